"""Protocol of models that score tokens, so that packages need not import each other.

Shape legend: N packed tokens, B sequences, K target tokens (the ``True`` entries of a mask).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from .checks import takes_argument
from .sampling_masks import SamplingMasks


class TokenScores(NamedTuple):
    """Per-target-token results of a scorer, in the order of the packed tokens."""

    log_prob: Tensor
    """float32 ``[K]``, in nats, differentiable in the model's parameters."""
    entropy: Tensor | None = None
    """float32 ``[K]``, in nats; only when asked for."""
    untempered_log_prob: Tensor | None = None
    """float32 ``[K]``, in nats, under the model's own softmax; only when asked for."""


@runtime_checkable
class TokenScorer(Protocol):
    """Something that gives the log-probability of tokens in packed sequences.

    ``TransformersWrapper`` is one; a loss takes any. For batches of which rows have images, one
    takes ``images=`` too: those of each sequence in order, in base 64. For batches of which tokens
    have sampling masks, one takes ``sampling_masks=``: a
    :class:`~torchrl_data.SamplingMasks` of the targets; and where rows say to which experts a
    mixture sent their tokens, ``routed_experts=``, uint8 or int16 ``[N, L, S]``. One with models of
    several agents takes ``agents=``, the author of each sequence.
    """

    def score_packed(
        self,
        ids: Tensor,
        lengths: Tensor,
        target_mask: Tensor,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> TokenScores:
        """Score the masked tokens of packed sequences, each given the tokens before it.

        Args:
            ids: int64 ``[N]``, the sequences one after the other, without padding.
            lengths: int64 ``[B]``, tokens of each sequence; sums to N.
            target_mask: bool ``[N]``; the tokens to score. The first token of a sequence has
                nothing before it and cannot be a target.
            temperature: the logits are divided by it before the softmax.
            entropy: also give the entropy of the distribution that each target was drawn from.

        Returns:
            The K scores in packed order.
        """
        ...


def check_scorer(who: str, model: object) -> None:
    """Check that a model scores packed tokens."""
    if not isinstance(model, TokenScorer):
        raise TypeError(
            f"{who} needs a model with a score_packed method (torchrl_data.TokenScorer), "
            f"such as torchrl_modules.TransformersWrapper, got {type(model)}."
        )


def image_arguments(
    scorer: TokenScorer, images: Sequence[Sequence[str]] | None, who: str
) -> dict[str, Any]:
    """Arguments of ``score_packed`` for the images of its sequences; none where there are none.

    Raises:
        TypeError: there are images, and the scorer takes none.
    """
    if not images or not any(images):
        return {}
    if "images" not in inspect.signature(scorer.score_packed).parameters:
        raise TypeError(
            f"{who}: {sum(map(bool, images))} of {len(images)} rows have images, and score_packed "
            f"of {type(scorer).__name__} takes none. Score with TransformersWrapper(processor=...)."
        )
    return {"images": images}


def agent_arguments(scorer: TokenScorer, agents: Sequence[str] | None) -> dict[str, Any]:
    """Arguments of ``score_packed`` for the authors of its sequences, where it names ``agents``."""
    asks = "agents" in inspect.signature(scorer.score_packed).parameters
    return {"agents": agents} if asks else {}


def expert_arguments(scorer: TokenScorer, experts: Tensor | None, who: str) -> dict[str, Tensor]:
    """Arguments of ``score_packed`` for the experts of its tokens.

    Args:
        scorer: that is to score.
        experts: ``[N, L, S]``, or ``None`` where none were recorded.
        who: the component that asks, named in the error.

    Returns:
        None where there are none.

    Raises:
        TypeError: there are some, and the scorer takes none.
    """
    if experts is None:
        return {}
    if not takes_argument(scorer.score_packed, "routed_experts"):
        raise TypeError(
            f"{who}: rows say to which experts their tokens went, and score_packed of "
            f"{type(scorer).__name__} takes none. Score with TransformersWrapper, or sample "
            "without routed_experts."
        )
    return {"routed_experts": experts}


def mask_arguments(
    scorer: TokenScorer, masks: SamplingMasks | None, who: str
) -> dict[str, SamplingMasks]:
    """Arguments of ``score_packed`` for the sets that its targets were drawn from.

    Args:
        scorer: that is to score.
        masks: of the targets, or ``None`` where none were recorded.
        who: the component that asks, named in the error.

    Returns:
        None where there are none.

    Raises:
        TypeError: there are some, and the scorer takes none.
    """
    if masks is None or not bool(masks.recorded.any()):
        return {}
    if not takes_argument(scorer.score_packed, "sampling_masks"):
        raise TypeError(
            f"{who}: {int(masks.recorded.sum())} of {masks.num_tokens} tokens have sampling masks, "
            f"and score_packed of {type(scorer).__name__} takes none. Score with "
            "TransformersWrapper, or sample without sampling_mask."
        )
    return {"sampling_masks": masks}
