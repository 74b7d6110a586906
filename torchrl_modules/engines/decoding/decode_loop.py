"""Drawing tokens from a Transformers model, one step for the whole batch at a time.

A step is a :class:`TokenDraw` (the distribution, the draw, and what is reported of it) and a
:class:`PromptReader` that goes on. Beside what ``generate`` does, a prompt that many rows share is
read once, rows that have ended cost nothing where the model's cache can leave them out, and the
log-probability of each sampled token is kept without keeping any logits.

Shape legend: A rows that still run, V vocabulary.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_modules.engines.protocol import Generation
from torchrl_modules.sampling.logit_warping import logits_warpers
from torchrl_modules.sampling.params import SamplingParameters
from torchrl_modules.sampling.token_history import TokenHistory, changed_logits, too_early

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
        self,
        logits: Tensor,
        history: TokenHistory,
        streams: "Sequence[RowStream] | None" = None,
    ) -> DrawnTokens:
        """Draw.

        Args:
            logits: of the model, ``[A, V]``.
            history: of each row; counted on here, where it is needed.
            streams: of each row; torch's generator draws when not given.
        """
        params, logits = self._params, logits.float()
        log_p = self._log_probs(logits, history)
        p = log_p.exp()
        if params.temperature == 0:
            tokens = log_p.argmax(-1, True)
        else:
            tokens = p.multinomial(1) if streams is None else _choose(p, streams)
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

    def _log_probs(self, logits: Tensor, history: TokenHistory) -> Tensor:
        """Of the distribution that is drawn from, ``[A, V]``."""
        scores = logits
        if self._changes_logits:
            scores = changed_logits(logits, self._params, history)
            banned = too_early(scores, self._params, history)
            scores = scores if banned is None else scores.masked_fill(banned, -torch.inf)
        for warper in self._warpers:
            scores = warper(None, scores)  # type: ignore[arg-type]
        return torch.log_softmax(scores, -1)


class RowStream:
    """Random numbers of one row: what is drawn with them depends on no other row.

    Args:
        seed: the same numbers each time.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self) -> float:
        """Uniform, at least 0 and below 1 by at least 2**-52."""
        return self._random.getrandbits(52) * 2.0**-52


def _choose(p: Tensor, streams: Sequence[RowStream]) -> Tensor:
    """A token of each row by its own stream: one number a token, by the inverse of the sum."""
    uniform = torch.tensor([stream.next() for stream in streams], dtype=torch.float64)
    total = p.double().cumsum(-1)  # In single precision small probabilities would be lost.
    at = uniform.to(p.device)[:, None] * total[:, -1:]
    return torch.searchsorted(total, at, right=True).clamp(max=p.shape[-1] - 1)


class PromptReader(ABC):
    """Reads prompts, and then one token of each row at a time.

    Args:
        model: a causal language model in evaluation mode.
    """

    needs_one_length: ClassVar[bool]
    """Its prompts have to be of one length."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @abstractmethod
    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts; logits of the next token, ``[A, V]``."""

    @abstractmethod
    def advance(self, tokens: Tensor) -> Tensor:
        """Read one more token of each row, int64 ``[A]``; logits of the next, ``[A, V]``."""

    @property
    def can_drop(self) -> bool:
        """Whether rows can be left out."""
        return True

    @abstractmethod
    def keep(self, index: Tensor) -> None:
        """Go on with some of the rows, int64 ``[A']``."""

    @property
    def keeps_rows(self) -> bool:
        """Whether what was read of a row that leaves may serve a later turn."""
        return False

    def leave_behind(self, row: int, ids: Sequence[int], key: Hashable = None) -> None:
        """Keep what was read of a row, where :attr:`keeps_rows`."""
        raise NotImplementedError(f"{type(self).__name__} keeps nothing of row {row}.")


class DecodeLoop:
    """One batch of prompts, read and continued until every row has ended.

    Args:
        reader: of a model in evaluation mode.
        prompts: token ids of each row, none empty.
        params: the distribution and the stop tokens.
        budgets: most new tokens of each row.
        seeds: of each row's stream; torch's generator draws when not given.
    """

    def __init__(
        self,
        reader: PromptReader,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        budgets: Sequence[int],
        seeds: Sequence[int] | None = None,
    ) -> None:
        self._reader = reader
        self._prompts = prompts
        model = reader.model
        self._params = params
        self._draw_token = TokenDraw(params)
        self._streams = None if seeds is None else [RowStream(seed) for seed in seeds]
        self._budgets = torch.tensor(budgets, device=model.device)
        self._stops = torch.tensor(params.stop_token_ids or (), device=model.device)
        shape = (len(prompts), max(budgets))
        self._ids = torch.zeros(shape, dtype=torch.int64, device=model.device)
        # What is reported of each token: the log-prob, and what else was asked for.
        names = ["log_probs"]
        names += ["untempered_log_probs"] if params.untempered_log_probs else []
        names += ["entropies"] if params.entropy else []
        self._figures = {name: torch.zeros(shape, device=model.device) for name in names}
        self._num_drawn = torch.zeros(len(prompts), dtype=torch.int64, device=model.device)
        self._stopped = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
        # Row of each batch element; elements leave the batch when their rows have ended.
        self._rows = torch.arange(len(prompts), device=model.device)
        self._running = torch.ones(len(prompts), dtype=torch.bool, device=model.device)
        self._logits = reader.read(prompts)
        self._count_prompts(prompts)

    def run(self) -> list[Generation]:
        """Draw until every row has drawn a stop token or used up its budget."""
        for step in range(int(self._budgets.max())):
            tokens = self._draw(step)
            is_stop = torch.isin(tokens, self._stops)
            is_stop |= self._completes_stop_string(step)
            self._num_drawn[self._rows] += self._running
            self._stopped[self._rows] |= is_stop & self._running
            self._running &= ~is_stop & (step + 1 < self._budgets[self._rows])
            num_running = int(self._running.sum())
            if num_running == 0:
                break
            if num_running < _COMPACT_BELOW * len(self._rows) and self._reader.can_drop:
                tokens = self._drop_ended(tokens)
            self._logits = self._reader.advance(tokens)
        self._leave_behind(range(len(self._rows)))
        return self._generations()

    def _leave_behind(self, elements: Iterable[int]) -> None:
        """Rows leave; what was read of them may serve the next turn."""
        if not self._reader.keeps_rows:
            return
        for element in elements:
            row = int(self._rows[element])
            drawn = self._ids[row, : int(self._num_drawn[row])].tolist()
            self._reader.leave_behind(element, [*self._prompts[row], *drawn])

    def _generations(self) -> list[Generation]:
        longest = int(self._num_drawn.max())
        figures = {name: values[:, :longest].tolist() for name, values in self._figures.items()}
        drawn = self._ids[:, :longest].tolist()
        ends = zip(self._num_drawn.tolist(), self._stopped.tolist(), strict=True)
        return [
            Generation(
                ids=ids[:n],
                finish_reason="stop" if stopped else "length",
                **{name: values[row][:n] for name, values in figures.items()},
            )
            for row, (ids, (n, stopped)) in enumerate(zip(drawn, ends, strict=True))
        ]

    def _count_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Penalties know which tokens a row holds, and how often it has drawn them."""
        device = self._logits.device
        self._seen = self._counts = None
        if self._params.penalises:
            self._counts = torch.zeros(self._logits.shape, device=device)
            self._seen = torch.zeros_like(self._counts, dtype=torch.bool)
            for row, prompt in enumerate(prompts):
                self._seen[row, torch.tensor(prompt, device=device)] = True

    def _draw(self, step: int) -> Tensor:
        """One token per batch element, int64 ``[A]``; keeps it and what is reported of it."""
        drawn_before = torch.full((len(self._logits),), step, device=self._logits.device)
        history = TokenHistory(drawn_before, self._seen, self._counts)
        streams = self._streams and [self._streams[row] for row in self._rows.tolist()]
        drawn = self._draw_token(self._logits, history, streams)
        self._ids[self._rows, step] = drawn.ids
        for name, values in self._figures.items():
            values[self._rows, step] = getattr(drawn, name)
        return drawn.ids

    def _completes_stop_string(self, step: int) -> Tensor:
        ends = torch.zeros_like(self._running)
        matcher = self._params.stop_matcher
        if matcher is not None:
            for element in self._running.nonzero().squeeze(1).tolist():
                row = int(self._rows[element])
                ends[element] = matcher.just_ended(self._ids[row, : step + 1].tolist())
        return ends

    def _drop_ended(self, tokens: Tensor) -> Tensor:
        self._leave_behind((~self._running).nonzero().squeeze(1).tolist())
        keep = self._running.nonzero().squeeze(1)
        if self._seen is not None and self._counts is not None:
            self._seen, self._counts = self._seen[keep], self._counts[keep]
        self._reader.keep(keep)
        self._rows, self._running = self._rows[keep], self._running[keep]
        return tokens[keep]
