"""Rows that come and go between two tokens, in one cache of keys and values.

Each row has a slot, begins at its first column and is as long as it is; slots in use lie side by
side, so a step copies no cache, and a row that comes or goes copies one row.

Shape legend: A rows, L columns, Q tokens that are read at once, H heads, D head size, V
vocabulary.
"""

import re
import warnings
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from torchrl_data.devices import on_device
from torchrl_data.ragged.packed import pad
from torchrl_modules.scoring.slot_attention import (
    PrefixPlan,
    SlotPlan,
    has_slot_attention,
    length_mask,
)
from torchrl_modules.scoring.wrapped_models import has_hooks
from torchrl_modules.transformers_releases import UnboundedCacheLayer, with_cache

from . import shared_prefixes
from .decoding import PromptReader, last_position
from .kept_caches import Found, KeptCaches
from .shared_prefixes import Prefix, SharedPrefixes
from .step_graph import CAPTURES, GraphShape, StepGraph, StepInput, graph_columns

_WINDOW: Final = re.compile("window|chunk|local")
_MIN_COLUMNS = 64
_SPARE_SLOTS: Final = 2
_STEPS: Final = 64
"""On an accelerator a step sees so many columns more at a time."""
_BY_LENGTH: Final = {"cuda"}
"""Devices on which attention reads slots by their lengths at every step. On others it does where
rows share what they begin with, and otherwise takes a mask."""
_PREFIX_PRICE: Final = 1 << 17
"""Numbers among the keys and values of a layer that are read in the time of one more call of
attention, where each prefix is a call of its own: on a CPU."""
_GROWTH = 1.25
_MAX_PREFILL_TOKENS = 1 << 14
"""Most tokens of one pass over prompts, padding included, unless one prompt alone has more."""
_RAGGED = 1.5
"""A pass over prompts reads at most so many times the tokens of its longest one per row."""


def is_read_by_length(device: torch.device) -> bool:
    """Whether attention on a device reads slots by their lengths, even of rows that share nothing.

    Args:
        device: of a model.
    """
    return device.type in _BY_LENGTH


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


class _Places:
    """Where the rows of a cache go on, which its layers share."""

    def __init__(self, device: torch.device) -> None:
        self.lengths = torch.zeros(0, dtype=torch.int64, device=device)
        """Tokens that each row has read, int64 ``[A]``."""
        self.shared = torch.zeros(0, dtype=torch.int64, device=device)
        """Of these, tokens that it shares with others and has not in its slot, int64 ``[A]``."""
        self.columns = self.lengths
        """The column of its slot that each row writes in this step, int64 ``[A]``."""
        self.prefixes: PrefixPlan | None = None
        """Where those are, if any row shares some."""
        self.is_varlen = False
        """Attention reads slots by their lengths, and prefixes behind them: the columns of a slot
        lie one behind the other. Otherwise those of each head do, and it reads with a mask."""
        self.num_shared_columns = 0
        """Columns that prefixes have, of which none has more tokens."""
        self.slots = torch.zeros(0, dtype=torch.int64, device=device)
        """The first A numbers."""
        self.longest = 0
        """Tokens that the longest row has read."""
        self.num_columns = 0
        """Columns that a step sees, the one included that it writes."""
        self.numbers = torch.zeros(0, dtype=torch.int32, device=device)
        """The first numbers, one more than there are slots."""
        self.starts = self.numbers
        """Where each slot begins among the columns of all of them, and where the last one ends."""

    def plan(self) -> SlotPlan:
        """The plan of a step's attention over slots."""
        behind = len(self.lengths) + 1
        lengths = (self.columns + 1).to(torch.int32)
        own = (lengths, self.numbers[:behind], self.starts[:behind])
        longest = self.num_columns
        if self.prefixes is not None:
            longest = max(longest, self.num_shared_columns)
        mask = length_mask(lengths) if lengths.device.type == "cpu" else None
        return SlotPlan(*own, longest, self.prefixes, mask)


class _SlotLayer(UnboundedCacheLayer):
    """One layer's buffers, ``[slots, H, columns, D]``; what a step adds is written in place."""

    keys: Any
    values: Any

    def __init__(self, places: _Places, like: Any) -> None:
        super().__init__()
        self._places = places
        self.is_initialized = True
        kind = like.keys.device.type
        # A mask that could be left out is left out by its values, which a host would wait for.
        self.is_compileable = kind != "cpu"
        # Rotary positions leave keys in float32 under autocast, which casts them at each use.
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.keys, self.values = (
            states.new_zeros(0, states.shape[1], 0, states.shape[3], dtype=dtype)
            for states in (like.keys, like.values)
        )

    def grow(self, num_slots: int, num_columns: int, num_behind: tuple[int, int]) -> None:
        """Make the buffers larger; what is in them stays.

        Args:
            num_slots: of rows.
            num_columns: of a slot.
            num_behind: slots behind those, whose columns prefixes have: how many there are, and how
                many there shall be.
        """
        before, behind = num_behind
        for name in ("keys", "values"):
            buffer = getattr(self, name)
            slots, heads, columns, size = buffer.shape
            # Zeros: what is masked is multiplied by 0, which leaves infinity and NaN.
            if not self._places.is_varlen:
                grown = buffer.new_zeros(num_slots, heads, num_columns, size)
            else:
                shape = (num_slots + behind, num_columns, heads, size)
                grown = buffer.new_zeros(shape).transpose(1, 2)
                if before:
                    at, begin = (slots - before) * columns, num_slots * num_columns
                    kept = _flat(buffer)[at:]
                    _flat(grown)[begin : begin + len(kept)] = kept
                for fixed in (1, 3):  # for a compiler, which takes sizes as variable
                    torch._dynamo.mark_static(grown, fixed)
            grown[: slots - before, :, :columns] = buffer[: slots - before]
            setattr(self, name, grown)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """They are made when the first rows are read."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the next token of each row, ``[A, H, 1, D]``."""
        slots, columns = self._places.slots, self._places.columns
        self.keys[slots, :, columns] = key_states.squeeze(2).to(self.keys.dtype)
        self.values[slots, :, columns] = value_states.squeeze(2).to(self.values.dtype)
        if self._places.is_varlen:
            return self.keys, self.values
        num_rows, num_columns = len(columns), self._places.num_columns
        return self.keys[:num_rows, :, :num_columns], self.values[:num_rows, :, :num_columns]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        """Columns of the mask, and where it begins."""
        return self._places.num_columns, 0

    def get_seq_length(self, *_: Any) -> int:
        """The longest row's."""
        return self._places.longest


def _flat(buffer: Tensor) -> Tensor:
    """The columns of all slots one behind the other, ``[slots * columns, H, D]``, as a view."""
    return buffer.transpose(1, 2).flatten(0, 1)


_STEPS_BEFORE_A_GRAPH: Final = 4
"""A graph takes as long as a few steps: very short responses go without."""
_STEPS_BEFORE_A_SMALLER_GRAPH: Final = 32
"""Where a graph of more rows or columns is there, which takes hardly longer."""
_EXPECTED_BYTES: Final = 4 << 30
"""So much is reserved at once for what rows may still draw; more when it is needed."""
_not_captured: "WeakSet[nn.Module]" = WeakSet()
"""Models whose steps can't be captured; told once of each."""


def _passes(num_new: Mapping[tuple[int, ...], int]) -> list[list[tuple[int, ...]]]:
    """Rows that are read together: of about one length, and not too many.

    Args:
        num_new: tokens of each row that are to be read.
    """
    passes: list[list[tuple[int, ...]]] = []
    total = 0
    for ids in sorted(num_new, key=num_new.__getitem__, reverse=True):
        total += num_new[ids]
        longest = num_new[passes[-1][0]] if passes else 0
        padded = longest * (len(passes[-1]) + 1) if passes else 0
        if not passes or padded > max(_RAGGED * total, 512) or padded > _MAX_PREFILL_TOKENS:
            passes.append([])
            total = num_new[ids]
        passes[-1].append(ids)
    return passes


class SlotReader(PromptReader):
    """Keeps every row in a slot; equal prompts are read once, and of kept rows only what is new.

    Args:
        model: with a plain cache.
        kept: what earlier calls have read.
    """

    needs_one_length = False
    reads_past_ends = True
    _gives_whole_masks: ClassVar[bool] = True
    """Of each token over the columns, and not of each column whether it is there."""
    _shares_prefixes: ClassVar[bool] = False
    """What rows begin with alike is kept once, where there is attention for the model's keys."""

    def __init__(self, model: PreTrainedModel, kept: KeptCaches | None = None) -> None:
        super().__init__(model)
        self._kept = kept
        self.keeps_rows = kept is not None
        self._layers: list[_SlotLayer] = []
        self._num_slots = self._num_columns = 0
        self._num_behind = 0
        """Slots behind those of rows, whose columns prefixes have."""
        self._counts: list[int] = []
        self._prefixes: SharedPrefixes | None = None
        """Where rows may share some."""
        self._num_seen = 1
        """Columns of a slot that the next step sees, the one included that it writes."""
        self._places = _Places(model.device)
        self._last_position = last_position(model)
        # What is given of shapes that come again needs no plan of its own for each token.
        self._steps = 1 if model.device.type == "cpu" else _STEPS
        self._capture = CAPTURES.get(model.device.type)
        if self._capture is not None and (model in _not_captured or has_hooks(model)):
            self._capture = None  # A graph would call no hook.
        self._graphs: dict[GraphShape, StepGraph] = {}
        self._num_asked: Counter[GraphShape] = Counter()
        self.is_trial = False
        """It is asked whether the model takes what it is given, whatever kernels there are."""
        self.is_always_by_length = is_read_by_length(model.device)
        """Attention reads slots by their lengths whether rows share anything or not."""
        self.num_read = 0
        """Tokens of prompts that the model has read, padding and what was kept left out."""

    @property
    def num_rows(self) -> int:
        """Rows that have a slot."""
        return len(self._counts)

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See :class:`PromptReader`; the rows come behind those that are there."""
        begin = len(self._counts)
        self._count([*self._counts, *map(len, prompts)], [*range(begin), *[None] * len(prompts)])
        return self.fill(prompts, range(begin, len(self._counts)))

    def advance(self, tokens: Tensor) -> Tensor:
        """See :class:`PromptReader`."""
        places, counts = self._places, self._counts
        logits = None if self._capture is None else self._replayed(tokens)
        if logits is None:
            self._reserve(len(tokens), self._num_seen)
            columns = -(-self._num_seen // self._steps) * self._steps
            places.num_columns = min(columns, self._num_columns)
            is_full = places.num_columns == places.longest + 1 and min(counts) == places.longest
            if places.is_varlen:
                places.num_columns = self._num_columns
                places.prefixes = self._prefix_plan(len(tokens))
            logits = self._step(tokens, is_masked=not is_full)
        self._counts = [count + 1 for count in counts]
        places.lengths = places.lengths + 1
        places.longest += 1
        self._num_seen += 1
        return logits

    def _step(self, tokens: Tensor, *, is_masked: bool) -> Tensor:
        """The model's own part of a step, of which the host reads no value."""
        lengths, mask, more = self._places.lengths, None, {}
        self._places.columns = lengths
        if self._places.is_varlen:
            self._places.columns = lengths - self._places.shared
            mask = torch.empty(1, 1, 0, 0, dtype=torch.bool, device=tokens.device)
            more["slots"] = self._places.plan()
        elif is_masked:
            mask = torch.arange(self._places.num_columns, device=tokens.device) <= lengths[:, None]
            mask = mask[:, None, None] if self._gives_whole_masks else mask.long()
        positions = lengths
        if self._places.longest > self._last_position:  # of rows that have ended
            positions = positions.clamp(max=self._last_position)
        output = self.model(
            input_ids=tokens[:, None],
            attention_mask=mask,
            position_ids=positions[:, None],
            **self._given,
            **more,
        )
        return output.logits[:, -1]

    def _replayed(self, tokens: Tensor) -> Tensor | None:
        """A step of a graph; ``None`` where there is none, or none yet."""
        num_rows, num_seen = len(tokens), self._num_seen
        # Slots behind the last row are read, too, and written at their first column: nobody has
        # them, and who gets them writes there.
        size, columns = 1 << (num_rows - 1).bit_length(), graph_columns(num_seen)
        self._reserve(size, columns)
        if self._places.is_varlen:  # It costs nothing to see columns that no row has.
            columns = self._num_columns
        num_prefixes = 0 if self._prefixes is None else self._prefixes.num_places
        own = GraphShape(size, columns, num_prefixes)
        fitting = [each for each in self._graphs if each.fits(num_rows, num_seen, own.num_prefixes)]
        best = min(fitting, key=lambda each: each.num_rows * each.num_columns, default=None)
        if best != own:
            self._num_asked[own] += 1
            patience = _STEPS_BEFORE_A_SMALLER_GRAPH if best else _STEPS_BEFORE_A_GRAPH
            if self._num_asked[own] > patience:
                best = own if self._captured(own, tokens) else None
        return best and self._graphs[best](self._input(tokens, best.num_rows))[:num_rows]

    def _input(self, tokens: Tensor, size: int) -> StepInput:
        """The input of a step of so many rows, of which the last ones may be nobody's."""
        places = self._places
        return StepInput(tokens, places.lengths, places.shared, self._prefix_plan(size))

    def _prefix_plan(self, num_rows: int) -> PrefixPlan | None:
        if self._prefixes is None:
            return None
        return self._prefixes.plan(num_rows, self._num_slots * self._num_columns)

    def _captured(self, shape: GraphShape, tokens: Tensor) -> bool:
        """Make a graph of a step of this shape, if that works."""
        if self._capture is None:
            return False
        step = partial(self._whole_step, shape.num_columns)
        given = self._input(tokens, shape.num_rows)
        try:
            self._graphs[shape] = StepGraph(step, self._capture, given, shape.num_rows)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the model, or of a driver: it is told, and goes without
            self._capture = None
            _not_captured.add(self.model)
            warnings.warn(
                f"TransformersEngine: a step of {type(self.model).__name__} can't be captured "
                "as a graph, so each of its operators is launched for every token, which is "
                f"slower ({type(error).__name__}: {str(error)[:200]}).",
                stacklevel=2,
            )
            return False
        return True

    def _whole_step(self, num_columns: int, given: StepInput, slots: Tensor) -> Tensor:
        """A step over some columns, whose shapes stay as they are while the buffers do."""
        places = self._places
        before = vars(places).copy()
        places.lengths = given.lengths.clamp(max=self._last_position)
        places.shared, places.prefixes = given.shared, given.prefixes
        places.slots, places.num_columns = slots, num_columns
        try:
            return self._step(given.tokens, is_masked=True)
        finally:
            vars(places).update(before)

    def keep(self, rows: Sequence[int]) -> None:
        """See :class:`PromptReader`; rows that stay where they are cost nothing."""
        moved = [(new, old) for new, old in enumerate(rows) if new != old]
        if moved:
            new, old = on_device([*zip(*moved, strict=True)], self.model.device)
            seen = self._num_seen - 1
            for layer in self._layers:
                for buffer in (layer.keys, layer.values):
                    buffer[new, :, :seen] = buffer[old, :, :seen]
        self._count([self._counts[old] for old in rows], rows)

    def expect(self, num_tokens: int) -> None:
        """See :class:`PromptReader`: graphs need not be made anew where there is room at once."""
        if self._capture is None:
            return
        if self._prefixes is not None:
            num_tokens -= min(map(self._prefixes.length, range(len(self._counts))), default=0)
        columns, num_rows = graph_columns(num_tokens), max(self._num_slots, len(self._counts))
        one = sum(x[:1, :, :1].nbytes for each in self._layers for x in (each.keys, each.values))
        if one * num_rows * columns <= _EXPECTED_BYTES:
            self._reserve(num_rows, columns)

    def restart(self, kept: KeptCaches | None) -> None:
        """Begin again without rows; the buffers and graphs stay.

        Args:
            kept: what earlier calls have read.
        """
        self._kept, self.keeps_rows, self.num_read = kept, kept is not None, 0
        self._count([], [])

    @property
    def has_graphs(self) -> bool:
        """A step need not be captured again."""
        return bool(self._graphs)

    @property
    def nbytes(self) -> int:
        """Of the buffers."""
        return sum(each.keys.nbytes + each.values.nbytes for each in self._layers)

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
            (self._of_row(layer.keys, row, count), self._of_row(layer.values, row, count))
            for layer in self._layers
        ]
        self._kept.keep(key, ids[:count], cache)

    def _of_row(self, buffer: Tensor, row: int, count: int) -> Tensor:
        """A copy of the first columns of a row, ``[H, count, D]``, with those that it shares."""
        prefix = self._prefix(row)
        if prefix is None:
            return buffer[row, :, :count].clone()
        own = buffer[row, :, : max(0, count - len(prefix.ids))]
        begin = self._num_slots * self._num_columns + prefix.offset
        shared = _flat(buffer)[begin : begin + min(count, len(prefix.ids))].transpose(0, 1)
        return torch.cat([shared, own], 1)

    def wipe(self, row: int) -> None:
        """Leave nothing of a row that is not finite to those that use its slot later."""
        for layer in self._layers:
            layer.keys[row] = layer.values[row] = 0.0

    def _count(self, counts: list[int], rows: Sequence[int | None]) -> None:
        """Rows have so many tokens now, of which each was one of those before, or is new."""
        self._counts, places, device = counts, self._places, self.model.device
        places.lengths = on_device(counts, device, torch.int64)
        if len(places.slots) != len(counts):
            places.slots = torch.arange(len(counts), device=device)
        places.longest = max(counts, default=0)
        self._num_seen = places.longest + 1
        if self._prefixes is not None:
            self._prefixes.keep(rows)
            self._take_over(self._prefixes)

    def _take_over(self, prefixes: SharedPrefixes) -> None:
        """Rows share what they share now."""
        self._places.shared = prefixes.starts
        own = [count - prefixes.length(row) for row, count in enumerate(self._counts)]
        self._num_seen = max(own, default=0) + 1

    def _lay_out(self, prefixes: SharedPrefixes) -> None:
        """Let columns lie as steps read them from now on; what rows have in them stays."""
        places = self._places
        is_varlen = self.is_always_by_length or prefixes.num_places > 0
        if is_varlen == places.is_varlen:
            return
        places.is_varlen = is_varlen
        self._graphs.clear()
        self._num_asked.clear()
        if is_varlen:  # The first prefix needs room, and buffers that grow lie anew.
            return
        places.prefixes, behind, self._num_behind = None, self._num_behind, 0
        for layer in self._layers:
            layer.grow(self._num_slots, self._num_columns, (behind, 0))

    def _prefix(self, row: int) -> Prefix | None:
        return None if self._prefixes is None else self._prefixes.of_rows[row]

    def _reserve(self, num_rows: int, num_columns: int) -> None:
        """Make the buffers large enough, for prefixes, too; what is in them stays."""
        num_shared = 0 if self._prefixes is None else self._prefixes.num_columns
        behind = self._num_behind
        num_shared_before = behind * self._num_columns
        if (
            num_rows <= self._num_slots
            and num_columns <= self._num_columns
            and num_shared <= num_shared_before
        ):
            return
        if num_rows > self._num_slots:
            # A compiler that sees as many slots as rows once takes it that they are always as many.
            spare = _SPARE_SLOTS if self._places.is_varlen else 0
            self._num_slots = max(num_rows + spare, 2 * self._num_slots)
        if num_columns > self._num_columns:
            self._num_columns = max(num_columns + _MIN_COLUMNS, int(_GROWTH * num_columns))
        if num_shared > num_shared_before:
            num_shared = int(_GROWTH * num_shared)
        self._num_behind = -(-max(num_shared, num_shared_before) // self._num_columns)
        self._graphs.clear()  # of the buffers that were
        self._num_asked.clear()
        for layer in self._layers:
            layer.grow(self._num_slots, self._num_columns, (behind, self._num_behind))
        places, device = self._places, self.model.device
        places.num_shared_columns = self._num_behind * self._num_columns
        places.numbers = torch.arange(self._num_slots + 1, dtype=torch.int32, device=device)
        places.starts = self._num_columns * places.numbers

    def fill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """Read prompts into slots, a few passes for all; logits of the next tokens, in order."""
        places: dict[tuple[int, ...], list[int]] = {}
        for at, prompt in enumerate(prompts):
            places.setdefault(tuple(prompt), []).append(at)
        found = {ids: Found() if self._kept is None else self._kept.find(ids) for ids in places}
        logits: list[Tensor] = [torch.empty(0)] * len(prompts)
        passes = _passes({ids: len(ids) - found[ids].num_tokens for ids in places})
        for number, part in enumerate(passes):
            rows = [(ids, found[ids]) for ids in part]
            read, cache = self._read(rows)
            if not self._layers:
                self._make_layers(cache)
            if number == 0 and self._prefixes is None and self._may_share(prompts):
                self._prefixes = self._new_prefixes()
            if number == 0 and self._prefixes is not None:
                self._prefixes.place(prompts, slots)
                self._take_over(self._prefixes)
                self._lay_out(self._prefixes)
            self._write(rows, cache, [[slots[at] for at in places[ids]] for ids in part])
            for ids, row in zip(part, read, strict=True):
                for at in places[ids]:
                    logits[at] = row
        if self._kept is not None:
            for one in found.values():
                self._kept.end(one.used_up)
        return torch.stack(logits)

    def _read(self, rows: Sequence[tuple[tuple[int, ...], Found]]) -> tuple[Tensor, DynamicCache]:
        """One pass: what is kept is padded on the left, and so is what is new behind it."""
        device = self.model.device
        new = [on_device(ids[found.num_tokens :], device) for ids, found in rows]
        mask = pad([torch.ones_like(row) for row in new], value=0, side="left")
        known = on_device([[found.num_tokens] for _, found in rows], device)
        width = max(found.num_tokens for _, found in rows)
        columns = torch.arange(width, device=device)
        mask = torch.cat([(columns >= width - known).long(), mask], 1)
        cache = self._padded([found for _, found in rows], width)
        output = self.model(
            input_ids=pad(new, value=0, side="left"),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, width:],
            **with_cache(self.model, cache),
            logits_to_keep=1,
        )
        self.num_read += sum(map(len, new))
        return output.logits[:, -1], cache

    def _make_layers(self, cache: DynamicCache) -> None:
        """Buffers of the shapes that the model has shown, without slots yet."""
        self._layers = [_SlotLayer(self._places, layer) for layer in cache.layers]
        self._given = with_cache(self.model, Cache(layers=list(self._layers)))

    def _may_share(self, prompts: Sequence[Sequence[int]]) -> bool:
        """Whether rows may save something, or slots are read by their lengths in any case."""
        if not self._shares_prefixes or self.is_always_by_length:
            return self._shares_prefixes
        long = [prompt for prompt in prompts if len(prompt) >= shared_prefixes.SHORTEST]
        begins = {tuple(prompt[: shared_prefixes.SHORTEST]) for prompt in long}
        least = (1 + shared_prefixes.FIRST) * self._prefix_price()
        return len(begins) < len(long) and sum(map(len, long)) > least

    def _prefix_price(self) -> int:
        """Tokens that a prefix has to save."""
        one = self._layers[0].keys
        own = _PREFIX_PRICE // (2 * one.shape[1] * one.shape[3])
        return 0 if self.is_always_by_length else own

    def _new_prefixes(self) -> SharedPrefixes | None:
        """Prefixes of the rows that are there; ``None`` without attention for the model's keys."""
        num_heads = self.model.config.get_text_config().num_attention_heads
        for each in self._layers:
            states = each.keys, each.values
            if not has_slot_attention(*states, num_heads, without_kernel=self.is_trial):
                return None
        return SharedPrefixes(self.model.device, len(self._counts), self._prefix_price())

    def _write(
        self,
        rows: Sequence[tuple[tuple[int, ...], Found]],
        cache: DynamicCache,
        slots: Sequence[Sequence[int]],
    ) -> None:
        """Write what a pass has read, each row into all the slots that have it."""
        self._reserve(len(self._counts), max(1, self._num_seen - 1))
        behind = self._num_slots * self._num_columns
        for element, ((ids, found), own_slots) in enumerate(zip(rows, slots, strict=True)):
            at = on_device(own_slots, self.model.device)
            prefix = self._prefix(own_slots[0])  # Rows that are alike share alike.
            num_shared = 0 if prefix is None else len(prefix.ids)
            known, end = found.num_tokens, len(ids)
            for number, (layer, source) in enumerate(zip(self._layers, cache.layers, strict=True)):
                for which, name in enumerate(("keys", "values")):
                    buffer, read = getattr(layer, name), getattr(source, name)
                    parts = [(known, read[element, :, known - end :].to(buffer.dtype))]
                    if found.cache is not None:
                        parts.append((0, found.cache[number][which][:, :known]))
                    for begin, states in parts:
                        split = max(0, num_shared - begin)
                        own = begin + split - num_shared
                        buffer[at, :, own : own + states[:, split:].shape[1]] = states[:, split:]
                        if prefix is not None and not prefix.is_read:
                            shared = states[:, :split].transpose(0, 1)
                            first = behind + prefix.offset + begin
                            _flat(buffer)[first : first + len(shared)] = shared
            if prefix is not None:
                prefix.is_read = True

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
