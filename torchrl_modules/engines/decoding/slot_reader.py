"""Rows that come and go between two tokens, in one cache of keys and values.

Each row has a slot, begins at its first column and is as long as it is; slots in use lie side by
side, so a step copies no cache, and a row that comes or goes copies one row.

Shape legend: A rows, L columns, Q tokens that are read at once, H heads, D head size, V vocabulary.
"""

import re
from collections.abc import Hashable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from torchrl_data.ragged.packed import pad

from .decode_loop import PromptReader
from .kept_caches import Found, KeptCaches

_WINDOW: Final = re.compile("window|chunk|local")
_MIN_COLUMNS = 64
_GROWTH = 1.25
_MAX_PREFILL_TOKENS = 1 << 14
"""Most tokens of one pass over prompts, padding included, unless one prompt alone has more."""
_RAGGED = 1.5
"""A pass over prompts reads at most so many times the tokens of its longest one per row."""


def has_plain_cache(model: PreTrainedModel) -> bool:
    """Whether every layer of a model keeps all keys and values, and nothing else.

    Args:
        model: a causal language model.
    """
    layers = DynamicCache(config=model.config).layers
    settings = model.config.get_text_config().to_dict()
    # Some models look only so far back in masks of their own, by columns and not by positions.
    unused = {"max_window_layers", "use_sliding_window"}
    if not settings.get("use_sliding_window", True):
        unused.add("sliding_window")
    windows = [settings[name] for name in settings if _WINDOW.search(name) and name not in unused]
    return not any(windows) and bool(layers) and all(type(one) is DynamicLayer for one in layers)


class _SlotLayer(CacheLayerMixin):
    """One layer's buffers, ``[slots, H, columns, D]``; what a step adds is written in place."""

    def __init__(self, rows: "SlotReader") -> None:
        super().__init__()
        self._rows = rows
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """They are made when the first rows are read."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the next token of each row, ``[A, H, 1, D]``."""
        assert self.keys is not None
        assert self.values is not None
        slots, lengths = self._rows.slots, self._rows.lengths
        self.keys[slots, :, lengths] = key_states.squeeze(2).to(self.keys.dtype)
        self.values[slots, :, lengths] = value_states.squeeze(2).to(self.values.dtype)
        num_rows, num_columns = len(lengths), self._rows.longest + 1
        return self.keys[:num_rows, :, :num_columns], self.values[:num_rows, :, :num_columns]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of the mask, and where it begins."""
        return self._rows.longest + query_length, 0

    def get_seq_length(self) -> int:
        """The longest row's."""
        return self._rows.longest

    def get_max_length(self) -> int:
        """None."""
        return -1


class SlotReader(PromptReader):
    """Keeps every row in a slot; equal prompts are read once, and of kept rows only what is new.

    Args:
        model: with a plain cache.
        kept: what earlier calls have read.
    """

    needs_one_length = False

    def __init__(self, model: PreTrainedModel, kept: KeptCaches | None = None) -> None:
        super().__init__(model)
        self._kept = kept
        self._layers: list[_SlotLayer] = []
        self._num_slots = self._num_columns = 0
        self._counts: list[int] = []
        self.lengths = torch.zeros(0, dtype=torch.int64, device=model.device)
        """Tokens that each row has read, int64 ``[A]``."""
        self.slots = torch.zeros(0, dtype=torch.int64, device=model.device)
        """The first A numbers."""
        self.longest = 0
        """Tokens that the longest row has read."""
        self.num_read = 0
        """Tokens of prompts that the model has read, padding and what was kept left out."""

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See :class:`PromptReader`."""
        return self.join(prompts)

    def join(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Rows come behind those that are there; logits of their next tokens, ``[A', V]``."""
        begin = len(self._counts)
        self._count([*self._counts, *map(len, prompts)])
        return self._fill(prompts, range(begin, len(self._counts)))

    def reread(self, rows: Sequence[Sequence[int]]) -> None:
        """Read all rows again, by the weights as they are now."""
        self._fill(rows, range(len(rows)))

    def advance(self, tokens: Tensor) -> Tensor:
        """See :class:`PromptReader`."""
        self._reserve(len(tokens), self.longest + 1)
        columns = torch.arange(self.longest + 1, device=tokens.device)
        output = self.model(
            input_ids=tokens[:, None],
            attention_mask=(columns <= self.lengths[:, None]).long(),
            position_ids=self.lengths[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._count([count + 1 for count in self._counts])
        return output.logits[:, -1]

    def keep(self, index: Tensor) -> None:
        """See :class:`PromptReader`; rows that stay where they are cost nothing."""
        order = index.tolist()
        moved = [(new, old) for new, old in enumerate(order) if new != old]
        if moved:
            new, old = (
                torch.tensor(slots, device=index.device) for slots in zip(*moved, strict=True)
            )
            for layer in self._layers:
                for buffer in (layer.keys, layer.values):
                    assert buffer is not None
                    buffer[new, :, : self.longest] = buffer[old, :, : self.longest]
        self._count([self._counts[old] for old in order])

    @property
    def keeps_rows(self) -> bool:
        """See :class:`PromptReader`."""
        return self._kept is not None

    def leave_behind(self, row: int, ids: Sequence[int], key: Hashable = None) -> None:
        """Keep what was read of a row.

        Args:
            row: its number.
            ids: its tokens; it may have read more than these, or fewer.
            key: of the conversation, if it has one.
        """
        if self._kept is None:
            return
        count = min(len(ids), self._counts[row])
        cache = [
            (layer.keys[row, :, :count].clone(), layer.values[row, :, :count].clone())  # type: ignore[index]
            for layer in self._layers
        ]
        self._kept.keep(key, ids[:count], cache)

    def wipe(self, row: int) -> None:
        """Leave nothing of a row that is not finite to those that use its slot later."""
        for layer in self._layers:
            layer.keys[row] = layer.values[row] = 0.0  # type: ignore[index]

    def _count(self, counts: list[int]) -> None:
        self._counts = counts
        self.lengths = torch.tensor(counts, dtype=torch.int64, device=self.model.device)
        if len(self.slots) != len(counts):
            self.slots = torch.arange(len(counts), device=self.model.device)
        self.longest = max(counts, default=0)

    def _reserve(self, num_rows: int, num_columns: int) -> None:
        """Make the buffers large enough; what is in them stays."""
        if num_rows <= self._num_slots and num_columns <= self._num_columns:
            return
        if num_rows > self._num_slots:
            self._num_slots = (
                num_rows if not self._num_slots else max(num_rows, 2 * self._num_slots)
            )
        if num_columns > self._num_columns:
            self._num_columns = max(num_columns + _MIN_COLUMNS, int(_GROWTH * num_columns))
        for layer in self._layers:
            layer.keys, layer.values = map(self._grown, (layer.keys, layer.values))

    def _grown(self, buffer: Tensor | None) -> Tensor:
        assert buffer is not None
        slots, heads, columns, size = buffer.shape
        # Zeros: what is masked is multiplied by 0, which leaves infinity and NaN.
        grown = buffer.new_zeros(self._num_slots, heads, self._num_columns, size)
        grown[:slots, :, :columns] = buffer
        return grown

    def _fill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """Read prompts into slots, a few passes for all; logits of the next tokens, in order."""
        places: dict[tuple[int, ...], list[int]] = {}
        for at, prompt in enumerate(prompts):
            places.setdefault(tuple(prompt), []).append(at)
        found = {ids: Found() if self._kept is None else self._kept.find(ids) for ids in places}
        logits: list[Tensor] = [torch.empty(0)] * len(prompts)
        for part in _passes({ids: len(ids) - found[ids].num_tokens for ids in places}):
            read = self._read([(ids, found[ids]) for ids in part], places, slots)
            for ids, row in zip(part, read, strict=True):
                for at in places[ids]:
                    logits[at] = row
        if self._kept is not None:
            for one in found.values():
                self._kept.end(one.used_up)
        return torch.stack(logits)

    def _read(
        self,
        rows: list[tuple[tuple[int, ...], Found]],
        places: dict[tuple[int, ...], list[int]],
        slots: Sequence[int],
    ) -> Tensor:
        """One pass: what is kept is padded on the left, and so is what is new behind it."""
        device = self.model.device
        new = [torch.tensor(ids[found.num_tokens :], device=device) for ids, found in rows]
        mask = pad([torch.ones_like(row) for row in new], value=0, side="left")
        known = torch.tensor([[found.num_tokens] for _, found in rows], device=device)
        width = max(found.num_tokens for _, found in rows)
        columns = torch.arange(width, device=device)
        mask = torch.cat([(columns >= width - known).long(), mask], 1)
        cache = self._padded([found for _, found in rows], width)
        output = self.model(
            input_ids=pad(new, value=0, side="left"),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, width:],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.num_read += sum(map(len, new))
        self._make_layers(cache)
        self._reserve(len(self._counts), self.longest)
        for element, (ids, found) in enumerate(rows):
            at = torch.tensor([slots[place] for place in places[ids]], device=device)
            self._write(at, found, cache, element, len(ids) - found.num_tokens)
        return output.logits[:, -1]

    def _write(
        self, slots: Tensor, found: Found, read: DynamicCache, element: int, num_new: int
    ) -> None:
        """Write one row that was read into all the slots that have it."""
        known = found.num_tokens
        for number, (layer, source) in enumerate(zip(self._layers, read.layers, strict=True)):
            for which, name in enumerate(("keys", "values")):
                buffer, new = getattr(layer, name), getattr(source, name)
                if found.cache is not None:
                    buffer[slots, :, :known] = found.cache[number][which][:, :known]
                buffer[slots, :, known : known + num_new] = new[element, :, -num_new:]

    def _padded(self, rows: list[Found], width: int) -> DynamicCache:
        """What is kept of rows, padded on the left to one width."""
        cache = DynamicCache(config=self.model.config)
        first = next((found.cache for found in rows if found.cache is not None), None)
        if first is None:
            return cache
        for number, layer in enumerate(first):
            padded = [one.new_zeros(len(rows), one.shape[0], width, one.shape[2]) for one in layer]
            for element, (known, kept, _) in enumerate(rows):
                if kept is not None:
                    for buffer, one in zip(padded, kept[number], strict=True):
                        buffer[element, :, width - known :] = one[:, :known]
            cache.update(padded[0], padded[1], number)
        return cache

    def _make_layers(self, cache: DynamicCache) -> None:
        """Buffers of the shapes that the model has shown."""
        if self._layers:
            return
        for source in cache.layers:
            assert isinstance(source, DynamicLayer)
            layer = _SlotLayer(self)
            layer.keys, layer.values = _empty(source.keys), _empty(source.values)
            self._layers.append(layer)
        self._cache = Cache(layers=list(self._layers))


def _empty(states: Tensor | None) -> Tensor:
    assert states is not None
    return states.new_zeros(0, states.shape[1], 0, states.shape[3])


def _passes(num_new: dict[tuple[int, ...], int]) -> list[list[tuple[int, ...]]]:
    """Rows that are read together: of about one length, and not too many."""
    passes: list[list[tuple[int, ...]]] = []
    total = 0
    for ids in sorted(num_new, key=lambda ids: num_new[ids], reverse=True):
        total += num_new[ids]
        longest = num_new[passes[-1][0]] if passes else 0
        padded = longest * (len(passes[-1]) + 1) if passes else 0
        if not passes or padded > max(_RAGGED * total, 512) or padded > _MAX_PREFILL_TOKENS:
            passes.append([])
            total = num_new[ids]
        passes[-1].append(ids)
    return passes
