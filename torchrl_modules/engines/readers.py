"""Readers: how a model continues rows, and what it keeps of the tokens that it has read.

The usual way is a :class:`~.slot_reader.SlotReader`; here are the others, and which of them first
gives a model's own log-probs.

Shape legend: A rows, T tokens so far, V vocabulary.
"""

import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Final, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad as pad_columns
from transformers import DynamicCache, PreTrainedModel

from torchrl_data.devices import on_device
from torchrl_data.ragged.packed import pad
from torchrl_modules.scoring.packed_attention import (
    PACKED_SDPA,
    cap_attention,
    use_packed_attention,
)
from torchrl_modules.scoring.trial import ReadingTrial, find_first, run_trial
from torchrl_modules.transformers_releases import cache_name, forward_parameters, with_cache

from .decoding import PromptReader, last_position
from .kept_caches import KeptCaches
from .slot_reader import SlotReader, has_plain_cache, is_read_by_length

FoundReaders = WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], type[PromptReader]]]
Reader = TypeVar("Reader", bound=PromptReader)
_SHARING: Final = {"cpu", "cuda"}
"""Devices with attention over slots and prefixes."""
_found = FoundReaders()
"""Of models that were tried: in which state, and how they continue rows."""


class PrefixSlotReader(SlotReader):
    """The same where what rows begin with alike is kept once, and read once for all of them."""

    _shares_prefixes: ClassVar[bool] = True


class ColumnMaskSlotReader(SlotReader):
    """The same for models that make more of a mask than their attention does, such as a bias."""

    _gives_whole_masks: ClassVar[bool] = False


class PaddedReader(PromptReader):
    """A cache of keys and values, prompts padded on the left; equal prompts are read once."""

    needs_one_length = False
    reads_past_ends = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._last_position = last_position(model)

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See :class:`PromptReader`."""
        different, index = different_rows(map(tuple, prompts), self.model.device)
        rows = [on_device(prompt, self.model.device) for prompt in different]
        mask = pad([torch.ones_like(row) for row in rows], value=0, side="left")
        self._cache = stepped_cache(self.model)
        self._longest = max(map(len, different))
        output = self.model(
            input_ids=pad(rows, value=0, side="left"),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            **with_cache(self.model, self._cache),
            logits_to_keep=1,
        )
        if len(rows) < len(prompts):
            self._cache.batch_select_indices(index)
        self._mask = mask[index]
        self._lengths = self._mask.sum(1)
        return output.logits[index, -1]

    def advance(self, tokens: Tensor) -> Tensor:
        """See :class:`PromptReader`."""
        self._mask = pad_columns(self._mask, (0, 1), value=1)
        positions = self._lengths
        if self._longest > self._last_position:  # of rows that have ended
            positions = positions.clamp(max=self._last_position)
        output = self.model(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=positions[:, None],
            **with_cache(self.model, self._cache),
        )
        self._lengths, self._longest = self._lengths + 1, self._longest + 1
        return output.logits[:, -1]

    def keep(self, rows: Sequence[int]) -> None:
        """See :class:`PromptReader`."""
        index = on_device(rows, self.model.device, torch.int64)
        self._cache.batch_select_indices(index)
        self._mask, self._lengths = self._mask[index], self._lengths[index]


def stepped_cache(model: PreTrainedModel) -> DynamicCache:
    """A new cache, for steps of a token.

    Args:
        model: which fills it.
    """
    cache = DynamicCache(config=model.config)
    if model.device.type != "cpu":
        # A mask that could be left out is left out by its values, which a host would wait for.
        for layer in cache.layers:
            layer.is_compileable = True
    return cache


class OwnCacheReader(PromptReader):
    """Whatever a model keeps itself (recurrent states, convolutions), rows of one length.

    No mask and no positions are given: the model computes a batch as it does a row alone.
    """

    needs_one_length = True
    _gives_positions: ClassVar[bool] = False

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._name = cache_name(model)
        self._cache: Any = None
        self._num_read = 0

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See :class:`PromptReader`."""
        different, index = different_rows(map(tuple, prompts), self.model.device)
        rows = on_device(different, self.model.device)
        logits = self._call(rows)
        if len(rows) == len(prompts):
            return logits
        if self.can_drop:
            self._cache.reorder_cache(index)
            return logits[index]
        self._cache, self._num_read = None, 0
        return self._call(rows[index])

    def advance(self, tokens: Tensor) -> Tensor:
        """See :class:`PromptReader`."""
        return self._call(tokens[:, None])

    def _call(self, ids: Tensor) -> Tensor:
        given = {} if self._cache is None else {self._name: self._cache}
        if self._gives_positions:
            end = self._num_read + ids.shape[1]
            given["position_ids"] = torch.arange(self._num_read, end, device=ids.device)[None]
            self._num_read = end
        output = self.model(input_ids=ids, use_cache=True, **given)
        self._cache = getattr(output, self._name)
        if self._cache is None:
            raise TypeError(f"{type(self.model).__name__} keeps nothing under {self._name}")
        return output.logits[:, -1]

    @property
    def can_drop(self) -> bool:
        """See :class:`PromptReader`."""
        return hasattr(self._cache, "reorder_cache")

    def keep(self, rows: Sequence[int]) -> None:
        """See :class:`PromptReader`."""
        self._cache.reorder_cache(on_device(rows, self.model.device, torch.int64))


class OwnCachePositionsReader(OwnCacheReader):
    """For models that count their positions wrongly when their first layer keeps no keys."""

    _gives_positions = True


class WholeRowReader(PromptReader):
    """Nothing is kept: every token reads its whole row again, as scoring does."""

    needs_one_length = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        takes = forward_parameters(model)
        self._no_cache = {"use_cache": False} if "use_cache" in takes else {}

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See :class:`PromptReader`."""
        self._ids = on_device([list(prompt) for prompt in prompts], self.model.device)
        return self._logits()

    def advance(self, tokens: Tensor) -> Tensor:
        """See :class:`PromptReader`."""
        self._ids = torch.cat([self._ids, tokens[:, None]], 1)
        return self._logits()

    def _logits(self) -> Tensor:
        return self.model(input_ids=self._ids, **self._no_cache).logits[:, -1]

    def keep(self, rows: Sequence[int]) -> None:
        """See :class:`PromptReader`."""
        self._ids = self._ids[on_device(rows, self.model.device, torch.int64)]


def different_rows(rows: Iterable[Hashable], device: torch.device) -> tuple[list[Any], Tensor]:
    """The different rows, and which of them each row is, int64 ``[A]``."""
    places: dict[Hashable, int] = {}
    index = [places.setdefault(row, len(places)) for row in rows]
    return list(places), on_device(index, device)


def group_rows(
    prompts: Sequence[Sequence[int]], rows: Sequence[int], *, by_length: bool
) -> list[list[int]]:
    """Rows that are drawn together.

    Args:
        prompts: of all rows.
        rows: those that are drawn.
        by_length: only prompts of one length go together.
    """
    if not by_length:
        return [list(rows)]
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(len(prompts[row]), []).append(row)
    return list(groups.values())


def find_prompt_reader(
    model: PreTrainedModel, *, share_prefixes: bool = True
) -> type[PromptReader]:
    """The fastest way to continue rows that gives the model's own log-probs; tried once per model.

    Args:
        model: a causal language model.
        share_prefixes: what rows begin with alike may be read once for all of them.

    Raises:
        ValueError: there is no such way.
    """
    is_plain, config = has_plain_cache(model), model.config.get_text_config()
    num_heads = getattr(config, "num_attention_heads", 0)
    shares_keys = (getattr(config, "num_key_value_heads", None) or num_heads) < num_heads
    is_sharing = share_prefixes and is_plain and model.device.type in _SHARING
    if is_plain and (shares_keys or is_sharing) and config._attn_implementation == "sdpa":
        use_packed_attention(model)  # It repeats no keys and values for heads that share them.
    cap_attention(model)
    is_sharing = is_sharing and config._attn_implementation == PACKED_SDPA
    readers: list[type[PromptReader]] = [
        *([PrefixSlotReader] if is_sharing else []),
        *([SlotReader, ColumnMaskSlotReader] if is_plain else []),
        *(PaddedReader, OwnCacheReader, OwnCachePositionsReader, WholeRowReader),
    ]
    if getattr(model, "_is_stateful", False):  # padding on the left would be part of the state
        readers = [reader for reader in readers if reader.needs_one_length]
    run = partial(run_trial, model, who="TransformersEngine")
    return fastest(_found, model, readers, run, read_trial, "a row")


def fastest(
    known: FoundReaders,
    model: PreTrainedModel,
    readers: Sequence[type[Reader]],
    run: Callable[[], ReadingTrial],
    log_probs: Callable[[type[Reader], PreTrainedModel, ReadingTrial], list[Tensor]],
    what: str,
) -> type[Reader]:
    """The first reader that gives the model's own log-probs, of what rows are read."""
    state = (model.dtype, model.device, model.config._attn_implementation, readers[0])
    earlier: Any = known.get(model)
    if earlier is not None and earlier[0] == state:
        return earlier[1]
    trial, name = run(), type(model).__name__
    at, _, wrong = find_first(
        model,
        trial,
        [(cls.__name__, partial(log_probs, cls, model, trial)) for cls in readers],
        f"TransformersEngine: {name} can't be sampled from here, but perhaps with vLLM: no way to "
        f"continue {what} gives what its forward says of a whole one",
    )
    # Where rows are read with masks, those that share nothing are read as fast by either reader.
    is_sharing = issubclass(readers[0], PrefixSlotReader) and is_read_by_length(model.device)
    is_fastest = issubclass(readers[at], PrefixSlotReader if is_sharing else SlotReader)
    if not is_fastest and issubclass(readers[0], SlotReader) and wrong[0].is_error:
        warnings.warn(
            f"TransformersEngine: rows of {name} are drawn by {readers[at].__name__}, which is "
            f"slower, because the fastest way failed when it was tried: {wrong[0]}.",
            stacklevel=3,
        )
    if issubclass(readers[at], WholeRowReader):
        tried = "; ".join(map(str, wrong))
        warnings.warn(
            f"TransformersEngine: what {name} keeps of {what} does not give the log-probs of its "
            f"own forward ({tried}), so every token reads its whole row again. That is "
            "slow for long rows: sample with vLLM where it knows the model.",
            stacklevel=3,
        )
    known[model] = (state, readers[at])
    return readers[at]


def read_trial(
    cls: type[PromptReader], model: PreTrainedModel, trial: ReadingTrial, mark: int = 0
) -> list[Tensor]:
    """Say what a reader makes of rows, in the first way of using it that is wrong, if one is.

    Args:
        cls: of the reader.
        model: that it reads with.
        trial: the rows.
        mark: of the rows, see :class:`~.joined_model.JoinedModel`. Rows of one that is not 0 are
            not tried in further ways.
    """
    # Read one by one; rows leave on the way.
    rows = trial.rows
    prompts = [(row[: max(1, min(4, len(row) - 2))] + mark).tolist() for row in rows]
    results: list[list[Tensor]] = [[] for _ in rows]
    for group in group_rows(prompts, range(len(rows)), by_length=cls.needs_one_length):
        reader, here = _on_trial(cls(model)), list(group)
        logits = reader.read([prompts[i] for i in here])
        for step in range(max(len(rows[i]) - len(prompts[i]) for i in group)):
            tokens = [rows[i][min(len(prompts[i]) + step, len(rows[i]) - 1)] for i in here]
            drawn = torch.stack(tokens)
            log_p = logits.double().log_softmax(-1).gather(1, drawn[:, None]).squeeze(1)
            for i, value in zip(here, log_p, strict=True):
                if len(prompts[i]) + step < len(rows[i]):
                    results[i].append(value)
            left = [k for k, i in enumerate(here) if len(prompts[i]) + step + 1 < len(rows[i])]
            if not left:
                break
            if len(left) < len(here) and reader.can_drop:
                reader.keep(left)
                drawn, here = drawn[left], [here[k] for k in left]
            logits = reader.advance(drawn + mark)
    continued = [torch.stack(values) for values in results]
    if mark or not issubclass(cls, SlotReader) or not trial.allows(trial.difference(continued)):
        return continued
    return _joined(cls, model, trial.rows)


def _on_trial(reader: Reader, *, by_length: bool = False) -> Reader:
    if isinstance(reader, SlotReader):
        reader.is_trial = True
        reader.is_always_by_length |= by_length
    return reader


def _joined(cls: type[SlotReader], model: PreTrainedModel, rows: Sequence[Tensor]) -> list[Tensor]:
    """Log-probs of the last tokens of rows that join one by one, and go on from what was kept."""
    # A reader that reads with masks and by length has been tried with masks.
    kept = KeptCaches(max_tokens=None)
    first, reader = (_on_trial(cls(model, kept), by_length=True) for _ in range(2))
    begin, results = rows[0][: len(rows[0]) // 2 + 1].tolist(), [[] for _ in rows]
    first.read([begin])
    first.leave_behind(0, begin, "trial")
    num_read = [max(1, len(row) - 3) for row in rows]
    here: list[int] = []
    joining, logits = [len(rows) - 1], torch.empty(0)
    while here or joining:
        if joining:
            joined = reader.read([rows[i][: num_read[i]].tolist() for i in joining])
            logits = torch.cat([logits, joined]) if here else joined
            here += joining
        for row, i in zip(logits.double().log_softmax(-1), here, strict=True):
            results[i].append(row[rows[i][num_read[i]]])
        left = [k for k, i in enumerate(here) if num_read[i] + 1 < len(rows[i])]
        here = [here[k] for k in left]
        reader.keep(left)
        if here:
            logits = reader.advance(torch.stack([rows[i][num_read[i]] for i in here]))
            for i in here:
                num_read[i] += 1
        joining = [i for i in range(len(rows)) if not results[i]]
    return [torch.stack(values) for values in results]
