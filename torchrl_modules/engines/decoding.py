"""How a Transformers model continues rows a token at a time, and what it keeps of them."""

import itertools
import random
import re
import sys
import threading
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias
from weakref import proxy

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_columns
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from torchrl_data.ragged import pad
from torchrl_modules.sampling import (
    SamplingParameters,
    TokenHistory,
    changed_logits,
    logits_warpers,
    too_early,
)
from torchrl_modules.transformers_releases import with_cache

from .engine import Generation

# Drawing tokens from a Transformers model, one step for the whole batch at a time.
#
# A step is a :class:`TokenDraw` (the distribution, the draw, and what is reported of it) and a
# :class:`PromptReader` that goes on. Beside what ``generate`` does, a prompt that many rows share
# is read once, rows that have ended cost nothing where the model's cache can leave them out, and
# the log-probability of each sampled token is kept without keeping any logits.
#
# Shape legend: A rows that still run, V vocabulary.

_REPORTED: Final = ("log_probs", "untempered_log_probs", "entropies")
"""Fields of drawn tokens, and of generations."""
_BLOCK: Final = 256
"""Tokens of a vocabulary whose probabilities are summed up first."""
_COMPACT_BELOW = 0.75
"""Rows that have ended are dropped from the batch once fewer than this fraction still run."""


class DrawnTokens(NamedTuple):
    """The next tokens of some rows."""

    ids: Tensor
    """int64 ``[A]``."""
    log_probs: Tensor
    """float32 ``[A]``, in nats, of the distribution that they were drawn from."""
    untempered_log_probs: Tensor | None
    """float32 ``[A]``, of the model's own softmax; only when asked for."""
    entropies: Tensor | None
    """float32 ``[A]``, in nats; only when asked for."""


class TokenDraw:
    """Draws the next tokens of rows that share their sampling parameters.

    Args:
        params: the distribution, and what to report.
    """

    def __init__(self, params: SamplingParameters) -> None:
        self._params = params
        self._warpers = logits_warpers(params)
        # Asked for once, and not for every token.
        self._changes_logits = params.changes_logits
        self._is_own_softmax = params.is_own_softmax

    def __call__(
        self, logits: Tensor, history: TokenHistory, streams: Sequence[random.Random] | None = None
    ) -> DrawnTokens:
        """Draw.

        Args:
            logits: of the model, ``[A, V]``.
            history: of each row; counted on here, where it is needed.
            streams: of each row; torch's generator draws when not given.
        """
        params, logits = self._params, logits.float()
        scores = logits
        if self._changes_logits:
            scores = changed_logits(logits, params, history)
            banned = too_early(scores, params, history)
            scores = scores if banned is None else scores.masked_fill(banned, -torch.inf)
        for warper in self._warpers:
            scores = warper(None, scores)  # type: ignore[arg-type]
        log_p = torch.log_softmax(scores, -1)
        p = log_p.exp()
        if params.temperature == 0:
            tokens = log_p.argmax(-1, True)
        elif streams is None:
            tokens = drawn_at(p, torch.rand(len(p), dtype=torch.float64, device=p.device))
        else:
            uniform = [stream.getrandbits(52) * 2.0**-52 for stream in streams]
            tokens = drawn_at(p, torch.tensor(uniform, dtype=torch.float64, device=p.device))
        if history.seen is not None and history.counts is not None:
            history.seen.scatter_(1, tokens, True)
            history.counts.scatter_add_(1, tokens, torch.ones_like(tokens, dtype=torch.float32))
        untempered = entropies = None
        if params.untempered_log_probs:
            own = log_p if self._is_own_softmax else torch.log_softmax(logits, -1)
            untempered = own.gather(1, tokens).squeeze(1)
        if params.entropy:
            entropies = torch.special.entr(p).sum(-1)
        log_probs = log_p.gather(1, tokens).squeeze(1)
        return DrawnTokens(tokens.squeeze(1), log_probs, untempered, entropies)


def drawn_at(p: Tensor, uniform: Tensor) -> Tensor:
    """The tokens at which the sums of probabilities pass uniform numbers, int64 ``[A, 1]``.

    Args:
        p: probabilities, float32 ``[A, V]``; no token of probability 0 is drawn.
        uniform: at least 0 and below 1, float64 ``[A]``.
    """
    # First a block of tokens, then a token in it: a single row of sums would have to be in double
    # precision, as small probabilities would be lost behind large ones.
    blocks = pad_columns(p, (0, -p.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    sizes = blocks.sum(-1).double()
    ends = sizes.cumsum(-1)
    at = uniform[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, at, right=True).clamp(max=ends.shape[1] - 1)  # of NaN: any
    size = sizes.gather(1, block)
    inside = blocks[torch.arange(len(p), device=p.device), block[:, 0]].double().cumsum(-1)
    share = ((at - ends.gather(1, block) + size) / size).clamp(0, 1 - 2.0**-52)
    token = _BLOCK * block + torch.searchsorted(inside, share * inside[:, -1:], right=True)
    return token.clamp(max=p.shape[-1] - 1)


class PromptReader(ABC):
    """Reads prompts, and then one token of each row at a time.

    Args:
        model: a causal language model in evaluation mode.
    """

    needs_one_length: ClassVar[bool]
    """Its prompts have to be of one length."""
    can_drop = True
    """Rows can be left out."""
    keeps_rows = False
    """What was read of a row that leaves may serve a later turn."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @abstractmethod
    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts; logits of the next token, ``[A, V]``."""

    @abstractmethod
    def advance(self, tokens: Tensor) -> Tensor:
        """Read one more token of each row, int64 ``[A]``; logits of the next, ``[A, V]``."""

    @abstractmethod
    def keep(self, index: Tensor) -> None:
        """Go on with some of the rows, int64 ``[A']``."""

    def leave_behind(self, row: int, ids: Sequence[int], key: Hashable = None) -> None:
        """Keep what was read of a row, where :attr:`keeps_rows`."""
        raise NotImplementedError(type(self).__name__)


def decode(
    reader: PromptReader,
    prompts: Sequence[Sequence[int]],
    params: SamplingParameters,
    budgets: Sequence[int],
    seeds: Sequence[int] | None = None,
) -> list[Generation]:
    """Continue one batch of prompts until every row has drawn a stop token or used up its budget.

    Args:
        reader: of a model in evaluation mode.
        prompts: token ids of each row, none empty.
        params: the distribution and the stop tokens.
        budgets: most new tokens of each row.
        seeds: of each row's stream; torch's generator draws when not given.
    """
    device, shape = reader.model.device, (len(prompts), max(budgets))
    draw, matcher = TokenDraw(params), params.stop_matcher
    streams = None if seeds is None else [random.Random(seed) for seed in seeds]
    most = torch.tensor(budgets, device=device)
    stops = torch.tensor(params.stop_token_ids or (), device=device)
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    # What is reported of each token: the log-prob, and what else was asked for.
    asked = (True, params.untempered_log_probs, params.entropy)
    names = [name for name, wanted in zip(_REPORTED, asked, strict=True) if wanted]
    reported = {name: torch.zeros(shape, device=device) for name in names}
    num_drawn = torch.zeros(len(prompts), dtype=torch.int64, device=device)
    stopped = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    # Row of each batch element; elements leave the batch when their rows have ended.
    rows = torch.arange(len(prompts), device=device)
    running = torch.ones(len(prompts), dtype=torch.bool, device=device)
    logits = reader.read(prompts)
    seen, counts = start_history(prompts, logits) if params.penalises else (None, None)
    for step in range(max(budgets)):
        drawn_before = torch.full((len(logits),), step, device=logits.device)
        history = TokenHistory(drawn_before, seen, counts)
        drawn = draw(logits, history, streams and [streams[row] for row in rows.tolist()])
        tokens = drawn.ids
        ids[rows, step] = tokens
        for name, values in reported.items():
            values[rows, step] = getattr(drawn, name)
        ends = torch.isin(tokens, stops)
        if matcher is not None:
            for element in running.nonzero().squeeze(1).tolist():
                row = int(rows[element])
                ends[element] |= matcher.just_ended(ids[row, : step + 1].tolist())
        num_drawn[rows] += running
        stopped[rows] |= ends & running
        running &= ~ends & (step + 1 < most[rows])
        num_running = int(running.sum())
        if num_running == 0:
            break
        if num_running < _COMPACT_BELOW * len(rows) and reader.can_drop:
            _leave_behind(reader, ~running, rows, prompts, ids, num_drawn)
            keep = running.nonzero().squeeze(1)
            if seen is not None and counts is not None:
                seen, counts = seen[keep], counts[keep]
            reader.keep(keep)
            rows, running, tokens = rows[keep], running[keep], tokens[keep]
        logits = reader.advance(tokens)
    if not bool(reported["log_probs"].isfinite().all()):  # once: a look waits for the device
        raise RuntimeError(
            f"{type(reader.model).__name__} gives logits that are not finite, so no token can be "
            "drawn. Are its weights loaded, or did training diverge?"
        )
    _leave_behind(reader, torch.ones_like(running), rows, prompts, ids, num_drawn)
    longest = int(num_drawn.max())
    figures = {name: values[:, :longest].tolist() for name, values in reported.items()}
    ends = zip(ids[:, :longest].tolist(), num_drawn.tolist(), stopped.tolist(), strict=True)
    return [
        Generation(
            ids=drawn[:n],
            finish_reason="stop" if is_stopped else "length",
            **{name: values[row][:n] for name, values in figures.items()},
        )
        for row, (drawn, n, is_stopped) in enumerate(ends)
    ]


def _leave_behind(
    reader: PromptReader,
    leaving: Tensor,
    rows: Tensor,
    prompts: Sequence[Sequence[int]],
    ids: Tensor,
    num_drawn: Tensor,
) -> None:
    """Rows leave, bool ``[A]``; what was read of them may serve the next turn."""
    for element in leaving.nonzero().squeeze(1).tolist() if reader.keeps_rows else ():
        row = int(rows[element])
        reader.leave_behind(element, [*prompts[row], *ids[row, : int(num_drawn[row])].tolist()])


def start_history(prompts: Sequence[Sequence[int]], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens each row holds, bool ``[A, V]``, and how often it has drawn them: never yet."""
    counts = torch.zeros(logits.shape, device=logits.device)
    seen = torch.zeros_like(counts, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        seen[row, torch.tensor(prompt, device=logits.device)] = True
    return seen, counts


# What a model has read of conversations, kept for their next turns.
#
# Shape legend: H heads, T tokens, D head size.

RowCache: TypeAlias = list[tuple[Tensor, Tensor]]
"""Keys and values of one row, ``[H, T, D]`` each, of every layer."""


class _Kept(NamedTuple):
    tokens: bytes
    number: int
    """Rows are counted in the order in which they came."""
    cache: RowCache
    is_anonymous: bool

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


class Found(NamedTuple):
    """What is kept of the beginning of a row."""

    num_tokens: int = 0
    cache: RowCache | None = None
    """Of at least so many tokens; ``None`` without any."""
    used_up: Hashable = None
    """The key of what nobody needs any more once this row has it, or ``None``."""


_MAX_BYTES: Final = 1 << 30


class KeptCaches:
    """Caches of rows by their tokens, the latest used ones.

    They are looked up by tokens alone: what is found is always what was read of these tokens, by
    the present weights, as long as `clear` is called when those change. Any thread may call it.

    Args:
        max_tokens: most tokens that are kept; ``None`` for as many as take 1 GiB.
    """

    def __init__(self, max_tokens: int | None) -> None:
        self.max_tokens = max_tokens
        self._lock = threading.RLock()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        # In the order of their tokens, so that those that begin alike are neighbours; the number
        # of each makes them different.
        self._index: list[tuple[bytes, int, Hashable]] = []
        self._numbers = itertools.count()
        self.num_tokens = 0
        """Tokens that are kept."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy keeps nothing yet."""
        return type(self), (self.max_tokens,)

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, ids: Sequence[int]) -> Found:
        """What is kept of the beginning of a row, but for its last token.

        Args:
            ids: of the row.
        """
        with self._lock:
            if not self._index:
                return Found()
            tokens = _as_bytes(ids[:-1])
            at = bisect_left(self._index, (tokens,))
            near = [key for _, _, key in self._index[max(0, at - 1) : at + 1]]
            lengths = [_num_shared(self._kept[key].tokens, tokens) for key in near]
            longest = max(lengths)
            if not longest:
                return Found()
            key = near[lengths.index(longest)]
            self._kept.move_to_end(key)
            kept = self._kept[key]
            used_up = kept.is_anonymous and kept.num_tokens == longest
            return Found(longest, kept.cache, key if used_up else None)

    def keep(self, key: Hashable, ids: Sequence[int], cache: RowCache) -> None:
        """Keep a row in the place of what its key had.

        Args:
            key: of the conversation; without one it is forgotten once another row goes on from it.
            ids: the tokens that were read.
            cache: of these; it is not copied.
        """
        with self._lock:
            is_anonymous = key is None
            key = object() if is_anonymous else key
            self.end(key)
            if not len(ids):
                return
            if self.max_tokens is None:
                num_bytes = sum(k.nbytes + v.nbytes for k, v in cache) // len(ids)
                self.max_tokens = _MAX_BYTES // max(1, num_bytes)
            if len(ids) > self.max_tokens:
                return
            kept = _Kept(_as_bytes(ids), next(self._numbers), cache, is_anonymous)
            self._kept[key] = kept
            insort(self._index, (kept.tokens, kept.number, key))
            self.num_tokens += kept.num_tokens
            while self.num_tokens > self.max_tokens:
                self.end(next(iter(self._kept)))

    def end(self, key: Hashable) -> None:
        """Forget what a conversation has."""
        with self._lock:
            kept = self._kept.pop(key, None)
            if kept is None:
                return
            del self._index[bisect_left(self._index, (kept.tokens, kept.number))]
            self.num_tokens -= kept.num_tokens

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        with self._lock:
            for key in list(self._kept):
                self.end(key)


def _as_bytes(ids: Sequence[int]) -> bytes:
    """Bytes that are in the order of the tokens, and of which a beginning is one of the tokens."""
    tokens = array("I", ids)
    if sys.byteorder == "little":
        tokens.byteswap()
    return tokens.tobytes()


def _num_shared(left: bytes, right: bytes) -> int:
    """How many tokens two rows have in common at their beginning."""
    low, high = 0, min(len(left), len(right)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if left[: 4 * middle] == right[: 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low


# Rows that come and go between two tokens, in one cache of keys and values.
#
# Each row has a slot, begins at its first column and is as long as it is; slots in use lie side by
# side, so a step copies no cache, and a row that comes or goes copies one row.
#
# Shape legend: A rows, L columns, Q tokens that are read at once, H heads, D head size, V
# vocabulary.

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

    keys: Any
    values: Any

    def __init__(self, rows: "SlotReader", like: Any) -> None:
        super().__init__()
        self._rows = proxy(rows)  # or the buffers of a drawing would wait for the garbage collector
        self.is_initialized = True
        kind = like.keys.device.type
        # Rotary positions leave keys in float32 under autocast, which casts them at each use.
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self.keys, self.values = (
            states.new_zeros(0, states.shape[1], 0, states.shape[3], dtype=dtype)
            for states in (like.keys, like.values)
        )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """They are made when the first rows are read."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the next token of each row, ``[A, H, 1, D]``."""
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
        self.keeps_rows = kept is not None
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
        """See :class:`PromptReader`; the rows come behind those that are there."""
        begin = len(self._counts)
        self._count([*self._counts, *map(len, prompts)])
        return self.fill(prompts, range(begin, len(self._counts)))

    def advance(self, tokens: Tensor) -> Tensor:
        """See :class:`PromptReader`."""
        self._reserve(len(tokens), self.longest + 1)
        columns = torch.arange(self.longest + 1, device=tokens.device)
        output = self.model(
            input_ids=tokens[:, None],
            attention_mask=(columns <= self.lengths[:, None]).long(),
            position_ids=self.lengths[:, None],
            **with_cache(self.model, self._cache),
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
                    buffer[new, :, : self.longest] = buffer[old, :, : self.longest]
        self._count([self._counts[old] for old in order])

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
            (layer.keys[row, :, :count].clone(), layer.values[row, :, :count].clone())
            for layer in self._layers
        ]
        self._kept.keep(key, ids[:count], cache)

    def wipe(self, row: int) -> None:
        """Leave nothing of a row that is not finite to those that use its slot later."""
        for layer in self._layers:
            layer.keys[row] = layer.values[row] = 0.0

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
            self._num_slots = max(num_rows, 2 * self._num_slots)
        if num_columns > self._num_columns:
            self._num_columns = max(num_columns + _MIN_COLUMNS, int(_GROWTH * num_columns))
        for layer in self._layers:
            for name in ("keys", "values"):
                buffer = getattr(layer, name)
                slots, heads, columns, size = buffer.shape
                # Zeros: what is masked is multiplied by 0, which leaves infinity and NaN.
                grown = buffer.new_zeros(self._num_slots, heads, self._num_columns, size)
                grown[:slots, :, :columns] = buffer
                setattr(layer, name, grown)

    def fill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """Read prompts into slots, a few passes for all; logits of the next tokens, in order."""
        places: dict[tuple[int, ...], list[int]] = {}
        for at, prompt in enumerate(prompts):
            places.setdefault(tuple(prompt), []).append(at)
        found = {ids: Found() if self._kept is None else self._kept.find(ids) for ids in places}
        logits: list[Tensor] = [torch.empty(0)] * len(prompts)
        # Rows that are read together: of about one length, and not too many.
        num_new = {ids: len(ids) - found[ids].num_tokens for ids in places}
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
        for part in passes:
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
            **with_cache(self.model, cache),
            logits_to_keep=1,
        )
        self.num_read += sum(map(len, new))
        if not self._layers:  # buffers of the shapes that the model has shown
            self._layers = [_SlotLayer(self, layer) for layer in cache.layers]
            self._cache = Cache(layers=list(self._layers))
        self._reserve(len(self._counts), self.longest)
        for element, (ids, found) in enumerate(rows):  # each into all the slots that have it
            at = torch.tensor([slots[place] for place in places[ids]], device=device)
            known, end = found.num_tokens, len(ids)
            for number, (layer, source) in enumerate(zip(self._layers, cache.layers, strict=True)):
                for which, name in enumerate(("keys", "values")):
                    buffer, read = getattr(layer, name), getattr(source, name)
                    if found.cache is not None:
                        buffer[at, :, :known] = found.cache[number][which][:, :known]
                    buffer[at, :, known:end] = read[element, :, known - end :].to(buffer.dtype)
        return output.logits[:, -1]

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
