"""How a Transformers model continues rows a token at a time, and what it keeps of them."""

import itertools
import math
import random
import re
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import isfinite
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.functional import pad as pad_columns
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from torchrl_data.devices import on_device
from torchrl_data.ragged.packed import pad
from torchrl_data.sampling_masks import encode_sets, pack_bits
from torchrl_modules.sampling.distribution import logits_warpers
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.sampling.token_history import TokenHistory, changed_logits, too_early
from torchrl_modules.transformers_releases import UnboundedCacheLayer, with_cache

from .engine import Generation

# Drawing tokens: some for each row of a batch at a time, before the host looks at them.
#
# A host that reads a value waits for all that its device has been told to do, and tells it nothing
# meanwhile. So a block of tokens is drawn without a look: the device goes on from each token to the
# next by itself. Then the host looks at all of them at once, decides as if it had looked after
# each, and drops what was drawn behind the end of a row.
#
# Shape legend: A rows that still run, S tokens of a block, V vocabulary.

_BLOCK: Final = 256
"""Tokens of a vocabulary whose probabilities are summed up first."""


def tokens_per_look(device: torch.device) -> int:
    """How many tokens of each row are drawn before the host looks at them, unless told otherwise.

    Args:
        device: of the model.
    """
    # On a CPU a look costs nothing, and a token drawn too far does.
    return 1 if device.type == "cpu" else 8


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
    kept_counts: Tensor | None = None
    """int64 ``[A]``: the tokens of which each was drawn; only when asked for."""
    kept: Tensor | None = None
    """uint8 ``[A, ceil(V / 8)]``: which they are, a bit each; only when asked for."""


class TokenDraw:
    """Draws the next tokens of rows that share their sampling parameters.

    Args:
        params: the distribution, and what to report.
    """

    def __init__(self, params: SamplingParameters) -> None:
        self.params = params
        self._warpers = logits_warpers(params)
        # Asked for once, and not for every token.
        self._changes_logits = params.changes_logits
        self._is_own_softmax = params.is_own_softmax
        self.is_random = params.temperature != 0
        """It needs numbers."""

    def __call__(
        self, logits: Tensor, history: TokenHistory, uniform: Tensor | None = None
    ) -> DrawnTokens:
        """Draw.

        Args:
            logits: of the model, ``[A, V]``.
            history: of each row; counted on here, where it is needed.
            uniform: a number of each row, at least 0 and below 1, float64 ``[A]``; torch's
                generator draws it when not given.
        """
        params, logits = self.params, logits.float()
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
        else:
            if uniform is None:
                uniform = torch.rand(len(p), dtype=torch.float64, device=p.device)
            tokens = drawn_at(p, uniform)
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
        counts = (scores > -torch.inf).sum(-1) if params.kept_counts else None
        kept = pack_bits(scores > -torch.inf) if params.sampling_mask else None
        return DrawnTokens(tokens.squeeze(1), log_probs, untempered, entropies, counts, kept)


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


@dataclass(eq=False, slots=True)
class AlikeRows:
    """Rows of a batch that are drawn from one distribution.

    Args:
        draw: their distribution.
        num_drawn: tokens of each so far.
        at: where they are in the batch, int64 ``[A]``; ``None`` where they are all of it.
        streams: of each; torch's generator draws when not given.
        seen: see :class:`~torchrl_modules.sampling.token_history.TokenHistory`; it is counted on.
        counts: the same.
    """

    draw: TokenDraw
    num_drawn: Sequence[int]
    at: Tensor | None = None
    streams: Sequence[random.Random] | None = None
    seen: Tensor | None = None
    counts: Tensor | None = None


def draw_block(
    rows: Sequence[AlikeRows],
    logits: Tensor,
    last: Tensor | None,
    advance: Callable[[Tensor], Tensor],
    num_steps: int,
) -> tuple[list[list[DrawnTokens]], Tensor]:
    """Draw some tokens of each row, of which the host reads none.

    Args:
        rows: all that are drawn, and what they are drawn from.
        logits: of their next tokens, ``[A, V]``, of the whole batch.
        last: the last token of each row of the batch, int64 ``[A]``, for rows that nothing is drawn
            of; not needed where there are none.
        advance: reads one more token of each row of the batch, and gives the logits of the next.
        num_steps: S.

    Returns:
        What was drawn of each of ``rows``, S times; and the last token of each row, not yet read.
    """
    device = logits.device
    uniform: list[Tensor | None] = []
    drawn_before: list[Tensor | None] = []
    for some in rows:
        is_counted = some.draw.params.min_tokens > min(some.num_drawn)
        counts = on_device(some.num_drawn, device, torch.int64) if is_counted else None
        drawn_before.append(counts)
        numbers = None
        if some.streams is not None and some.draw.is_random:
            numbers = [
                [stream.getrandbits(52) * 2.0**-52 for stream in some.streams]
                for _ in range(num_steps)
            ]
        uniform.append(None if numbers is None else on_device(numbers, device, torch.float64))
    drawn: list[list[DrawnTokens]] = [[] for _ in rows]
    for step in range(num_steps):
        if step:
            assert last is not None
            logits = advance(last)
        for some, before, numbers, found in zip(rows, drawn_before, uniform, drawn, strict=True):
            is_counted = some.draw.params.min_tokens > min(some.num_drawn) + step
            count = before + step if is_counted and before is not None else None
            history = TokenHistory(count, some.seen, some.counts)
            own = logits if some.at is None else logits.index_select(0, some.at)
            tokens = some.draw(own, history, None if numbers is None else numbers[step])
            found.append(tokens)
            if some.at is None:
                last = tokens.ids
            else:
                assert last is not None
                last = last.index_copy(0, some.at, tokens.ids)
    assert last is not None
    return drawn, last


class SeenTokens(NamedTuple):
    """What the host has seen of drawn tokens: see :class:`DrawnTokens`."""

    ids: list[int]
    log_probs: list[float]
    untempered_log_probs: list[float] | None
    entropies: list[float] | None
    kept_counts: list[float] | None
    sampling_masks: list[bytes] | None


def look(drawn: Sequence[Sequence[DrawnTokens]], vocab_size: int) -> list[list[SeenTokens]]:
    """Look at what was drawn, at all of it at once.

    Args:
        drawn: as :func:`draw_block` gives it.
        vocab_size: V.

    Returns:
        The same, on the host.
    """
    # Token ids are exact in double precision, and so is what is reported.
    every = [each for some in drawn for each in some]
    fields = [x.double() for each in every for x in each[:-1] if x is not None]
    values = torch.cat(fields).tolist()
    bits = [each.kept for each in every if each.kept is not None]
    sets = iter(encode_sets(torch.cat(bits), vocab_size) if bits else ())
    seen, end = [], 0
    for some in drawn:
        seen.append([])
        for each in some:
            columns = []
            for x in each[:-1]:
                begin, end = end, end + (0 if x is None else len(x))
                columns.append(None if x is None else values[begin:end])
            own = None if each.kept is None else [*islice(sets, len(each.kept))]
            ids, *figures = [*columns, own]
            seen[-1].append(SeenTokens([*map(int, ids)], *figures))
    return seen


@dataclass(eq=False, slots=True, kw_only=True)
class DrawnRow:
    """A response while it is drawn: what the host has seen of it."""

    tokens: list[int]
    """Those of the prompt, and behind them what was drawn."""
    params: SamplingParameters
    budget: int
    """Most new tokens."""
    num_prompt: int = 0
    log_probs: list[float] = field(default_factory=list)
    untempered_log_probs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    kept_counts: list[float] = field(default_factory=list)
    sampling_masks: list[bytes] = field(default_factory=list)
    finish_reason: str | None = None
    """Once it has ended: ``"stop"``, ``"length"``, or ``"error"``: a log-prob is not finite."""

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def num_drawn(self) -> int:
        """Tokens of the response so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def drawn(self) -> list[int]:
        """Tokens of the response so far."""
        return self.tokens[self.num_prompt :]

    def take(self, steps: Sequence[SeenTokens], at: int) -> None:
        """Take tokens up to the one that ends the row; what was drawn behind it is dropped.

        Args:
            steps: of the rows that were drawn with this one.
            at: which of them it is.
        """
        for step in steps:
            if self.finish_reason is not None:
                return
            token, log_prob = step.ids[at], step.log_probs[at]
            self.tokens.append(token)
            self.log_probs.append(log_prob)
            if step.untempered_log_probs is not None:
                self.untempered_log_probs.append(step.untempered_log_probs[at])
            if step.entropies is not None:
                self.entropies.append(step.entropies[at])
            if step.kept_counts is not None:
                self.kept_counts.append(step.kept_counts[at])
            if step.sampling_masks is not None:
                self.sampling_masks.append(step.sampling_masks[at])
            self.finish_reason = "error" if not isfinite(log_prob) else self._reason(token)

    def generation(self) -> Generation:
        """The whole response."""
        assert self.finish_reason is not None
        return Generation(
            ids=self.drawn,
            log_probs=self.log_probs,
            finish_reason=self.finish_reason,
            untempered_log_probs=self.untempered_log_probs or (),
            entropies=self.entropies or (),
            kept_counts=self.kept_counts or (),
            sampling_masks=self.sampling_masks or (),
        )

    def _reason(self, token: int) -> str | None:
        """Why it ends with its last token, if it does."""
        if token in (self.params.stop_token_ids or ()):
            return "stop"
        matcher = self.params.stop_matcher
        if matcher is not None and matcher.may_end(token) and matcher.just_ended(self.drawn):
            return "stop"
        return "length" if self.num_drawn >= self.budget else None


def start_history(prompts: Sequence[Sequence[int]], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens each row holds, bool ``[A, V]``, and how often it has drawn them: never yet."""
    counts = torch.zeros(logits.shape, device=logits.device)
    seen = torch.zeros_like(counts, dtype=torch.bool)
    rows = [row for row, prompt in enumerate(prompts) for _ in prompt]
    tokens = [token for prompt in prompts for token in prompt]
    at, ids = on_device([rows, tokens], logits.device, torch.int64)
    return seen.index_put_((at, ids), seen.new_ones(())), counts


# Drawing tokens from a Transformers model, one step for the whole batch at a time.
#
# A step is a :class:`TokenDraw` (the distribution, the draw, and what is reported of it)
# and a :class:`PromptReader` that goes on. Beside what ``generate`` does, a prompt that many rows
# share is read once, rows that have ended cost nothing where the model's cache can leave them out,
# and the log-probability of each sampled token is kept without keeping any logits.
#
# Shape legend: A rows that still run, V vocabulary.

_COMPACT_BELOW = 0.75
"""Rows that have ended are dropped from the batch once fewer than this fraction still run."""


def last_position(model: PreTrainedModel) -> int:
    """The last position that a model names; a large number where it names none."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return (limit or 1 << 62) - 1


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
    reads_past_ends: ClassVar[bool] = False
    """Rows that have ended can be read on, behind the last position of the model, without use."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @abstractmethod
    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts; logits of the next token, ``[A, V]``."""

    @abstractmethod
    def advance(self, tokens: Tensor) -> Tensor:
        """Read one more token of each row, int64 ``[A]``; logits of the next, ``[A, V]``."""

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Go on with some of the rows, in this order."""

    def expect(self, num_tokens: int) -> None:  # noqa: B027
        """Rows that have been read may become so long, prompt included."""

    def leave_behind(self, row: int, ids: Sequence[int], key: Hashable = None) -> None:
        """Keep what was read of a row, where :attr:`keeps_rows`."""
        raise NotImplementedError(type(self).__name__)


def decode(
    reader: PromptReader,
    prompts: Sequence[Sequence[int]],
    params: SamplingParameters,
    budgets: Sequence[int],
    seeds: Sequence[int] | None = None,
    *,
    per_look: int = 1,
) -> list[Generation]:
    """Continue one batch of prompts until every row has drawn a stop token or used up its budget.

    Args:
        reader: of a model in evaluation mode.
        prompts: token ids of each row, none empty.
        params: the distribution and the stop tokens.
        budgets: most new tokens of each row.
        seeds: of each row's stream; torch's generator draws when not given.
        per_look: so many tokens are drawn of each row before the host looks at them. With seeds a
            row is the same whatever the number. Torch's generator also draws for rows that have
            ended and are still in the batch, so without seeds it decides which numbers others get.
    """
    rows = [
        DrawnRow(tokens=[*prompt], params=params, budget=budget)
        for prompt, budget in zip(prompts, budgets, strict=True)
    ]
    streams = None if seeds is None else [random.Random(seed) for seed in seeds]
    # Row of each batch element; elements leave the batch when their rows have ended.
    here = list(range(len(rows)))
    logits, draw, num_drawn = reader.read(prompts), TokenDraw(params), 0
    reader.expect(max(len(row.tokens) + row.budget for row in rows))
    seen, counts = start_history(prompts, logits) if params.penalises else (None, None)
    while True:
        batch = AlikeRows(
            draw,
            [num_drawn] * len(here),
            streams=streams and [streams[row] for row in here],
            seen=seen,
            counts=counts,
        )
        left = [rows[row].budget for row in here if rows[row].finish_reason is None]
        num_steps = min(per_look, (max if reader.reads_past_ends else min)(left) - num_drawn)
        drawn, tokens = draw_block([batch], logits, None, reader.advance, num_steps)
        num_drawn += num_steps
        (steps,) = look(drawn, logits.shape[-1])
        for element, row in enumerate(here):
            rows[row].take(steps, element)
        if any(row.finish_reason == "error" for row in rows):
            raise RuntimeError(
                f"{type(reader.model).__name__} gives logits that are not finite, so no token can "
                "be drawn. Are its weights loaded, or did training diverge?"
            )
        keep = [k for k, row in enumerate(here) if rows[row].finish_reason is None]
        if not keep:
            break
        if len(keep) < _COMPACT_BELOW * len(here) and reader.can_drop:
            _leave_behind(reader, [rows[row] for row in here], ended=True)
            reader.keep(keep)
            at = on_device(keep, tokens.device, torch.int64)
            tokens, here = tokens[at], [here[k] for k in keep]
            if seen is not None and counts is not None:
                seen, counts = seen[at], counts[at]
        logits = reader.advance(tokens)
    _leave_behind(reader, [rows[row] for row in here], ended=False)
    return [row.generation() for row in rows]


def _leave_behind(reader: PromptReader, rows: Sequence[DrawnRow], *, ended: bool) -> None:
    """Rows of a batch leave, all or those that have ended; what was read may serve later turns."""
    for element, row in enumerate(rows) if reader.keeps_rows else ():
        if not ended or row.finish_reason is not None:
            reader.leave_behind(element, row.tokens)


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
_STEPS: Final = 64
"""On an accelerator a step sees so many columns more at a time."""
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


class _Places:
    """Where the rows of a cache go on, which its layers share."""

    def __init__(self, device: torch.device) -> None:
        self.lengths = torch.zeros(0, dtype=torch.int64, device=device)
        """Tokens that each row has read, int64 ``[A]``."""
        self.slots = torch.zeros(0, dtype=torch.int64, device=device)
        """The first A numbers."""
        self.longest = 0
        """Tokens that the longest row has read."""
        self.num_columns = 0
        """Columns that a step sees, the one included that it writes."""


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

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """They are made when the first rows are read."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the next token of each row, ``[A, H, 1, D]``."""
        slots, lengths = self._places.slots, self._places.lengths
        self.keys[slots, :, lengths] = key_states.squeeze(2).to(self.keys.dtype)
        self.values[slots, :, lengths] = value_states.squeeze(2).to(self.values.dtype)
        num_rows, num_columns = len(lengths), self._places.num_columns
        return self.keys[:num_rows, :, :num_columns], self.values[:num_rows, :, :num_columns]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        """Columns of the mask, and where it begins."""
        return self._places.num_columns, 0

    def get_seq_length(self) -> int:
        """The longest row's."""
        return self._places.longest


_Capture: TypeAlias = Callable[[Callable[[], Tensor], torch.device], Callable[[], Tensor]]
_STEPS_BEFORE_A_GRAPH: Final = 4
"""A graph takes as long as a few steps: very short responses go without."""
_STEPS_BEFORE_A_SMALLER_GRAPH: Final = 32
"""Where a graph of more rows or columns is there, which takes hardly longer."""
_GRAPH_COLUMNS: Final = 256
"""Graphs see so many columns, or a multiple; of long rows in steps of a quarter of their length."""
_EXPECTED_BYTES: Final = 4 << 30
"""So much is reserved at once for what rows may still draw; more when it is needed."""
_GRAPH_TOLERANCE: Final = 0.02
"""Of the largest logit: kernels may be others than those of the step alone."""
_not_captured: "WeakSet[nn.Module]" = WeakSet()
"""Models whose steps can't be captured; told once of each."""


def _captured_on_cuda(run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """What a function launches, launched again at once; each time its result is overwritten."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # What is made once is made before.
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, as a trainer does.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = run()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


_CAPTURES: Final[dict[str, _Capture]] = {"cuda": _captured_on_cuda}
"""By the kind of device."""


def _without_kept_casts(kind: str) -> AbstractContextManager[Any]:
    """What autocast keeps of weights is of one moment; inside, each step casts them itself."""
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)


class _StepGraph:
    """A step of a fixed number of rows, of which the last may be nobody's."""

    def __init__(
        self,
        step: Callable[[Tensor, Tensor, Tensor], Tensor],
        capture: _Capture,
        size: int,
        tokens: Tensor,
        lengths: Tensor,
    ) -> None:
        device = tokens.device
        # What a graph reads has to live as long as it does.
        self._tokens, self._lengths = (tokens.new_zeros(size) for _ in range(2))
        self._slots = torch.arange(size, device=device)
        # Captured with other tokens, so that a replay that does nothing is found out. Each run
        # writes its keys and values in the same places, the last one those of the tokens.
        self._set(torch.zeros_like(tokens), lengths)

        def run() -> Tensor:
            with _without_kept_casts(device.type):
                return step(self._tokens, self._lengths, self._slots)

        self._replay = capture(run, device)
        replayed = self(tokens, lengths).float()
        own = step(self._tokens, self._lengths, self._slots).float()
        apart = (replayed - own).abs().max()
        if bool(apart > _GRAPH_TOLERANCE * own.abs().max()):
            raise RuntimeError(f"its logits are off by {apart.item():.2g}")

    def _set(self, tokens: Tensor, lengths: Tensor) -> None:
        self._tokens[: len(tokens)] = tokens
        self._lengths.zero_()
        self._lengths[: len(lengths)] = lengths

    def __call__(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Logits ``[size, V]``, until the next call.

        Args:
            tokens: int64 ``[A]``, at most ``size``.
            lengths: int64 ``[A]``.
        """
        self._set(tokens, lengths)
        return self._replay()


def _graph_columns(num_seen: int) -> int:
    """Columns of the graph of steps that see so many, or a few more."""
    step = max(_GRAPH_COLUMNS, 1 << max(0, num_seen.bit_length() - 3))
    return -(-num_seen // step) * step


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

    def __init__(self, model: PreTrainedModel, kept: KeptCaches | None = None) -> None:
        super().__init__(model)
        self._kept = kept
        self.keeps_rows = kept is not None
        self._layers: list[_SlotLayer] = []
        self._num_slots = self._num_columns = 0
        self._counts: list[int] = []
        self._places = _Places(model.device)
        self._last_position = last_position(model)
        # What is given of shapes that come again needs no plan of its own for each token.
        self._steps = 1 if model.device.type == "cpu" else _STEPS
        is_captured = model not in _not_captured
        self._capture = _CAPTURES.get(model.device.type) if is_captured else None
        self._graphs: dict[tuple[int, int], _StepGraph] = {}
        """By rows and columns."""
        self._num_asked: Counter[tuple[int, int]] = Counter()
        self.num_read = 0
        """Tokens of prompts that the model has read, padding and what was kept left out."""

    @property
    def num_rows(self) -> int:
        """Rows that have a slot."""
        return len(self._counts)

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See :class:`PromptReader`; the rows come behind those that are there."""
        begin = len(self._counts)
        self._count([*self._counts, *map(len, prompts)])
        return self.fill(prompts, range(begin, len(self._counts)))

    def advance(self, tokens: Tensor) -> Tensor:
        """See :class:`PromptReader`."""
        places, counts = self._places, self._counts
        logits = None if self._capture is None else self._replayed(tokens)
        if logits is None:
            self._reserve(len(tokens), places.longest + 1)
            columns = -(-(places.longest + 1) // self._steps) * self._steps
            places.num_columns = min(columns, self._num_columns)
            is_full = places.num_columns == places.longest + 1 and min(counts) == places.longest
            logits = self._step(tokens, is_masked=not is_full)
        self._counts = [count + 1 for count in counts]
        places.lengths = places.lengths + 1
        places.longest += 1
        return logits

    def _step(self, tokens: Tensor, *, is_masked: bool) -> Tensor:
        """The model's own part of a step, of which the host reads no value."""
        lengths, mask = self._places.lengths, None
        if is_masked:
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
        )
        return output.logits[:, -1]

    def _replayed(self, tokens: Tensor) -> Tensor | None:
        """A step of a graph; ``None`` where there is none, or none yet."""
        num_rows, num_seen = len(tokens), self._places.longest + 1
        # Slots behind the last row are read, too, and written at their first column: nobody has
        # them, and who gets them writes there.
        own = (1 << (num_rows - 1).bit_length(), _graph_columns(num_seen))
        self._reserve(*own)
        fitting = [
            (rows, columns)
            for rows, columns in self._graphs
            if rows >= num_rows and columns >= num_seen
        ]
        best = min(fitting, key=math.prod, default=None)
        if best != own:
            self._num_asked[own] += 1
            patience = _STEPS_BEFORE_A_SMALLER_GRAPH if best else _STEPS_BEFORE_A_GRAPH
            if self._num_asked[own] > patience:
                best = own if self._captured(own, tokens) else None
        return best and self._graphs[best](tokens, self._places.lengths)[:num_rows]

    def _captured(self, shape: tuple[int, int], tokens: Tensor) -> bool:
        """Make a graph of a step of so many rows that sees so many columns, if that works."""
        if self._capture is None:
            return False
        step = partial(self._whole_step, shape[1])
        try:
            self._graphs[shape] = _StepGraph(
                step, self._capture, shape[0], tokens, self._places.lengths
            )
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

    def _whole_step(
        self, num_columns: int, tokens: Tensor, lengths: Tensor, slots: Tensor
    ) -> Tensor:
        """A step over some columns, whose shapes stay as they are while the buffers do."""
        places = self._places
        before = vars(places).copy()
        places.lengths = lengths.clamp(max=self._last_position)
        places.slots, places.num_columns = slots, num_columns
        try:
            return self._step(tokens, is_masked=True)
        finally:
            vars(places).update(before)

    def keep(self, rows: Sequence[int]) -> None:
        """See :class:`PromptReader`; rows that stay where they are cost nothing."""
        moved = [(new, old) for new, old in enumerate(rows) if new != old]
        if moved:
            new, old = on_device([*zip(*moved, strict=True)], self.model.device)
            for layer in self._layers:
                for buffer in (layer.keys, layer.values):
                    buffer[new, :, : self._places.longest] = buffer[old, :, : self._places.longest]
        self._count([self._counts[old] for old in rows])

    def expect(self, num_tokens: int) -> None:
        """See :class:`PromptReader`: graphs need not be made anew where there is room at once."""
        if self._capture is None:
            return
        columns, num_rows = _graph_columns(num_tokens), max(self._num_slots, len(self._counts))
        one = sum(x[:1, :, :1].nbytes for each in self._layers for x in (each.keys, each.values))
        if one * num_rows * columns <= _EXPECTED_BYTES:
            self._reserve(num_rows, columns)

    def restart(self, kept: KeptCaches | None) -> None:
        """Begin again without rows; the buffers and graphs stay.

        Args:
            kept: what earlier calls have read.
        """
        self._kept, self.keeps_rows, self.num_read = kept, kept is not None, 0
        self._count([])

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
            (layer.keys[row, :, :count].clone(), layer.values[row, :, :count].clone())
            for layer in self._layers
        ]
        self._kept.keep(key, ids[:count], cache)

    def wipe(self, row: int) -> None:
        """Leave nothing of a row that is not finite to those that use its slot later."""
        for layer in self._layers:
            layer.keys[row] = layer.values[row] = 0.0

    def _count(self, counts: list[int]) -> None:
        self._counts, places, device = counts, self._places, self.model.device
        places.lengths = on_device(counts, device, torch.int64)
        if len(places.slots) != len(counts):
            places.slots = torch.arange(len(counts), device=device)
        places.longest = max(counts, default=0)

    def _reserve(self, num_rows: int, num_columns: int) -> None:
        """Make the buffers large enough; what is in them stays."""
        if num_rows <= self._num_slots and num_columns <= self._num_columns:
            return
        if num_rows > self._num_slots:
            self._num_slots = max(num_rows, 2 * self._num_slots)
        if num_columns > self._num_columns:
            self._num_columns = max(num_columns + _MIN_COLUMNS, int(_GROWTH * num_columns))
        self._graphs.clear()  # of the buffers that were
        self._num_asked.clear()
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
        if not self._layers:  # buffers of the shapes that the model has shown
            self._layers = [_SlotLayer(self._places, layer) for layer in cache.layers]
            self._given = with_cache(self.model, Cache(layers=list(self._layers)))
        self._reserve(len(self._counts), self._places.longest)
        for element, (ids, found) in enumerate(rows):  # each into all the slots that have it
            at = on_device([slots[place] for place in places[ids]], device)
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
