"""One token for each row: the distribution, the draw, and what is reported of it.

Shape legend: A rows, V vocabulary.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_modules.sampling.logit_warping import logits_warpers
from torchrl_modules.sampling.params import SamplingParameters
from torchrl_modules.sampling.token_history import TokenHistory, changed_logits, too_early


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
