"""Reasons for which a turn of the policy ended, and for which an episode is over."""

from enum import StrEnum
from typing import Final


class FinishReason(StrEnum):
    """The reason a turn of the policy ended: ``finish_reason``; errors say ``error: ...``."""

    STOP = "stop"
    """The model drew an end token, or a stop text."""
    LENGTH = "length"
    """``max_new_tokens`` cut the turn."""
    CONTEXT_LENGTH = "context_length"
    """The model's own length, ``max_model_len``, cut the turn."""
    ERROR = "error"
    """The engine could not serve the row."""


class StopReason(StrEnum):
    """The reason an episode is over: ``stop_reason``, maybe with a detail, ``reason: detail``.

    Whether the episode is terminated or truncated follows from the reason, as Gymnasium and TorchRL
    use these words.

    Examples:
        >>> StopReason.MAX_STEPS == "max_steps", StopReason.MAX_STEPS.number
        (True, 5)
        >>> [reason for reason in StopReason if not reason.is_truncated]
        [<StopReason.ANSWERED: 'answered'>, <StopReason.ENVIRONMENT_DONE: 'environment_done'>]
    """

    ANSWERED = "answered"
    """The policy ended its turn, and neither a tool nor anything else had an answer to it."""
    ENVIRONMENT_DONE = "environment_done"
    """An environment, a tool or an agent's program said that the episode is over."""
    RESPONSE_LENGTH = "response_length"
    """``max_new_tokens`` cut the last turn."""
    CONTEXT_LENGTH = "context_length"
    """The conversation is as long as the model takes."""
    TOKEN_BUDGET = "token_budget"
    """The tokens that ``TokenBudget`` allows an episode are used up."""
    MAX_STEPS = "max_steps"
    """The last turn that ``StepCounter`` allows was taken, and the environment had an answer."""
    TRUNCATED = "truncated"
    """The user's code cut it: a transform, an environment's ``truncated``, a rollout function."""
    ERROR = "error"
    """The engine could not serve the row."""
    ENVIRONMENT_ERROR = "environment_error"
    """An environment could not begin, failed in a turn, or was lost."""
    NO_DATA = "no_data"
    """The data ended before this row of the batch. The row is no trajectory; nothing returns it."""

    @property
    def number(self) -> int:
        """Number of the reason, as rows hold it in ``stop_code``."""
        return _NUMBERS[self]

    @property
    def is_truncated(self) -> bool:
        """Whether an episode with this end is truncated; otherwise it is terminated."""
        return self not in (StopReason.ANSWERED, StopReason.ENVIRONMENT_DONE)

    @property
    def is_failure(self) -> bool:
        """Whether an episode with this end failed, and not by the policy's doing."""
        return self in (StopReason.ERROR, StopReason.ENVIRONMENT_ERROR)

    @property
    def is_scorable(self) -> bool:
        """Whether an episode with this end gets rewards, and is trained on."""
        return not self.is_failure and self != StopReason.NO_DATA


_NUMBERS: Final = {reason: number for number, reason in enumerate(StopReason)}
_KNOWN: Final = frozenset(map(str, StopReason))


def kind_of(reason: str) -> str:
    """The reason without its detail.

    Examples:
        >>> kind_of("error: the prompt is empty")
        'error'
    """
    return reason.partition(":")[0]


def end_text(reason: str, limit: int) -> str:
    """Return why an episode is over, with the limit that cut it.

    Args:
        reason: its ``stop_reason``.
        limit: its ``stop_limit``.

    Examples:
        >>> end_text("max_steps", 4), end_text("context_length", 2048), end_text("answered", -1)
        ('max_steps (4 turns)', 'context_length (2048 tokens)', 'answered')
    """
    if limit < 0:
        return reason
    unit = "turn" if kind_of(reason) == StopReason.MAX_STEPS else "token"
    return f"{reason} ({limit} {unit}{'s' * (limit != 1)})"


def stop_reason_of(text: str, default: StopReason) -> tuple[StopReason, str]:
    """The reason that a text gives, and the text with that reason in it.

    Args:
        text: a reason with or without detail, or words of the user's own; may be empty.
        default: the reason that words of the user's own are a detail of.

    Examples:
        >>> stop_reason_of("out of fuel", StopReason.TRUNCATED)
        (<StopReason.TRUNCATED: 'truncated'>, 'truncated: out of fuel')
        >>> stop_reason_of("environment_error: gone", StopReason.TRUNCATED)[0]
        <StopReason.ENVIRONMENT_ERROR: 'environment_error'>
    """
    kind = kind_of(text)
    if kind in _KNOWN:
        return StopReason(kind), str(text)
    return default, f"{default.value}: {text}" if text else default.value
