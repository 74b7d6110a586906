"""Why an episode ended: every value of the entry ``stop_reason``, in one place.

A reason may carry a detail after a colon (``"error: the prompt is empty"``); :func:`kind_of` gives
the part before it. ``""`` is a row that is still running.
"""

from typing import Final

ANSWERED: Final = "answered"
"""The policy's turn was left without an answer by tools or anybody else: terminated."""
MAX_STEPS: Final = "max_steps"
"""A transform such as ``StepCounter`` truncated the episode."""
RESPONSE_LENGTH: Final = "response_length"
"""A turn was cut at the policy's own limit of one turn: truncated."""
TOKEN_BUDGET: Final = "token_budget"
"""The episode's token budget is used up: truncated."""
CONTEXT_LENGTH: Final = "context_length"
"""The conversation is as long as the model takes: truncated."""
ERROR: Final = "error"
"""``error: ...``: the engine could not serve the row: truncated, unscorable."""
ENVIRONMENT_ERROR: Final = "environment_error"
"""``environment_error: ...``: an environment could not be made or reset, or was lost: truncated,
unscorable."""
ENVIRONMENT_DONE: Final = "environment_done"
"""The environment said that the episode is over: terminated."""
ROLLOUT_TRUNCATED: Final = "truncated"
"""A user's own rollout function says that it cut the rollout: truncated."""
NO_DATA: Final = "no_data"
"""The data ended before this row of the batch: it is no trajectory, and nobody gets it."""
CUT_REASONS: Final = frozenset({RESPONSE_LENGTH, TOKEN_BUDGET, CONTEXT_LENGTH})
"""Of episodes in which a limit of tokens cut a turn or left none."""
UNSCORABLE_REASONS: Final = frozenset({ERROR, ENVIRONMENT_ERROR})
"""Of episodes that failed, but not by the policy's doing: what they got says nothing of it."""


def kind_of(reason: str) -> str:
    """The reason without its detail.

    Examples:
        >>> kind_of("error: the prompt is empty")
        'error'
    """
    return reason.partition(":")[0]
