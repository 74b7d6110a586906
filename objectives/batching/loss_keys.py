"""Entries that each loss reads: pass another instance as ``read=`` to rename them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tensordict import NestedKey

from torchrl_data import keys

TEACHER_LOG_PROBS: Final = ("next", "teacher_log_probs", "full")


@dataclass(frozen=True, kw_only=True)
class TokenKeys:
    """The entries that say which tokens there are, and which are trained."""

    tokens: NestedKey = keys.TOKENS_FULL
    """int64, ragged or padded ``[B, T]``."""
    attention_mask: NestedKey = keys.ATTENTION_MASK
    """bool, like the tokens; optional: without it every token is real."""
    assistant_mask: NestedKey = keys.ASSISTANT_MASK
    """bool, like the tokens: True on those that the policy sampled."""


@dataclass(frozen=True, kw_only=True)
class GRPOLossKeys(TokenKeys):
    """The batch entries that :class:`~objectives.GRPOLoss` reads."""

    log_probs: NestedKey = keys.LOG_PROBS_FULL
    """float32, like the tokens: of the distribution that was sampled from; read where sampled."""
    advantage: NestedKey = keys.ADVANTAGE
    """float32 ``[B, 1, 1]`` or ``[B, T, 1]``."""
    ref_log_probs: NestedKey = keys.REF_LOG_PROBS_FULL
    """float32, like the tokens; read for a KL to the reference."""
    old_log_probs: NestedKey = ("old_log_probs", "full")
    """float32, like the tokens; the trainer's own scores from before the update; read for
    ``old_policy="recomputed"``."""
    truncated: NestedKey = keys.TRUNCATED
    """bool ``[B, 1]``; read to drop rollouts that were cut off."""
    teacher_log_probs: NestedKey = TEACHER_LOG_PROBS
    """float32, like the tokens: the teacher's; read for ``teacher_coeff``."""


@dataclass(frozen=True, kw_only=True)
class SFTLossKeys(TokenKeys):
    """The batch entries that :class:`~objectives.SFTLoss` reads."""

    ref_log_probs: NestedKey = keys.REF_LOG_PROBS_FULL
    """float32, like the tokens; read for a KL to the reference, and for minor SFT."""


@dataclass(frozen=True, kw_only=True)
class CriticLossKeys(TokenKeys):
    """The batch entries that :class:`~objectives.CriticLoss` reads."""

    value_target: NestedKey = keys.VALUE_TARGET
    """float32, like the tokens; of a token with NaN nothing is trained."""
    state_value: NestedKey = keys.STATE_VALUE
    """float32, like the tokens: what the critic said before the update; read for
    ``clip_value``."""


@dataclass(frozen=True, kw_only=True)
class PairLossKeys(TokenKeys):
    """The batch entries that say which rows are pairs, which every loss of preferences reads."""

    pair_id: NestedKey = keys.PAIR_ID
    """int64 ``[B, 1]``: equal for the two rows of a pair, which lie side by side."""
    chosen: NestedKey = keys.CHOSEN
    """bool ``[B, 1]``: True for the first row of a pair, which is the better answer."""


@dataclass(frozen=True, kw_only=True)
class RewardModelLossKeys(PairLossKeys):
    """The batch entries that :class:`~objectives.RewardModelLoss` reads."""

    margin: NestedKey = keys.MARGIN
    """float32 ``[B, 1]``: by how much the reward of the better answer has to lead, in addition to
    the option; optional."""


@dataclass(frozen=True, kw_only=True)
class DPOLossKeys(PairLossKeys):
    """The batch entries that :class:`~objectives.DPOLoss` reads."""

    ref_log_probs: NestedKey = keys.REF_LOG_PROBS_FULL
    """float32, like the tokens; read unless the loss is ``reference_free``."""


@dataclass(frozen=True, kw_only=True)
class KTOLossKeys(TokenKeys):
    """The batch entries that :class:`~objectives.KTOLoss` reads."""

    ref_log_probs: NestedKey = keys.REF_LOG_PROBS_FULL
    """float32, like the tokens."""
    label: NestedKey = keys.LABEL
    """bool ``[B, 1]``: True where the answer is desirable."""
    mismatched: NestedKey = keys.MISMATCHED
    """bool ``[B, 1]``: True where the answer is one to another prompt: it is not trained."""


@dataclass(frozen=True, kw_only=True)
class DistillationLossKeys(TokenKeys):
    """The batch entries that :class:`~objectives.DistillationLoss` reads."""

    teacher_log_probs: NestedKey = TEACHER_LOG_PROBS
    """float32, like the tokens: the teacher's."""
