"""Tokens drawn for each row of a batch, some at a time, before the host looks at them.

A host that reads a value waits for all that its device has been told to do, and tells it nothing
meanwhile. So a block of tokens is drawn without a look: the device goes on from each token to the
next by itself. Then the host looks at all of them at once, decides as if it had looked after
each, and drops what was drawn behind the end of a row.

Shape legend: A rows that still run, S tokens of a block, V vocabulary.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_columns

from torchrl_data.devices import on_device
from torchrl_data.sampling_masks import encode_sets, pack_bits
from torchrl_modules.sampling.distribution import logits_warpers
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.sampling.token_history import TokenHistory, changed_logits, too_early

from .engine import Generation

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
    """The drawn tokens that the host has seen: see :class:`DrawnTokens`."""

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
    mark: int = 0
    """What is added to its tokens where they are read: see :class:`~.joined_model.JoinedModel`."""
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

    @property
    def marked(self) -> list[int]:
        """All tokens, as they are read."""
        return [token + self.mark for token in self.tokens] if self.mark else self.tokens

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
        """The reason why it ends with its last token, if it does."""
        if token in (self.params.stop_token_ids or ()):
            return "stop"
        matcher = self.params.stop_matcher
        if matcher is not None and matcher.may_end(token) and matcher.just_ended(self.drawn):
            return "stop"
        return "length" if self.num_drawn >= self.budget else None


def advancing(
    advance: Callable[[Tensor], Tensor], rows: Sequence[DrawnRow], device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Read one more token of each row of a batch as it was drawn, without its mark.

    Args:
        advance: reads it with its mark.
        rows: of the batch.
        device: of the model.
    """
    marks = [row.mark for row in rows]
    if not any(marks):
        return advance
    added = on_device(marks, device, torch.int64)
    return lambda tokens: advance(tokens + added)


def start_history(prompts: Sequence[Sequence[int]], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that each row holds, bool ``[A, V]``, and how often it has drawn them: never yet."""
    counts = torch.zeros(logits.shape, device=logits.device)
    seen = torch.zeros_like(counts, dtype=torch.bool)
    rows = [row for row, prompt in enumerate(prompts) for _ in prompt]
    tokens = [token for prompt in prompts for token in prompt]
    at, ids = on_device([rows, tokens], logits.device, torch.int64)
    return seen.index_put_((at, ids), seen.new_ones(())), counts
