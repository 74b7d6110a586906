"""How rewards of several sources come together in a batch.

Shape legend: B rows.
"""

import math
import traceback
from collections.abc import Sequence

import torch
from tensordict import TensorDictBase

from torchrl_data.keys import REWARD, REWARDS, SCORABLE
from torchrl_data.row_values import read_row_values, write_row_values

from .concurrent_calls import Outcome

REWARD_ERRORS = "reward_errors"
"""What went wrong, a string per row; empty where nothing did."""


class RewardSource:
    """Something that can score episodes."""

    @property
    def reward_names(self) -> list[str]:
        """Name of each reward that it gives."""
        raise NotImplementedError


def add_rewards(
    batch: TensorDictBase,
    name: str,
    rows: Sequence[int],
    outcomes: Sequence[Outcome],
    *,
    weight: float = 1.0,
    who: str,
) -> None:
    """Add one source's rewards to the sum.

    ``reward`` is the weighted sum of the sources that apply. A row is ``scorable`` when at least
    one applies and none failed: a reward that raised, is NaN or infinite, or is not a number makes
    its row unscorable and is recorded in ``reward_errors``.

    Args:
        batch: written to: ``reward``, ``scorable``, ``("rewards", name)`` and ``reward_errors``.
        name: of the source.
        rows: the rows that it scored.
        outcomes: what it gave for each; ``None`` means that it does not apply.
        weight: of this source in the sum.
        who: named in the errors.
    """
    size = batch.batch_size[0]
    reward = _entry(batch, REWARD, torch.zeros(size, 1, 1))
    scorable = _entry(batch, SCORABLE, torch.zeros(size, 1, dtype=torch.bool))
    own = _entry(batch, (REWARDS, name), torch.full((size, 1, 1), math.nan))
    errors = read_row_values(batch, REWARD_ERRORS, "")
    for row, outcome in zip(rows, outcomes, strict=True):
        value, error = _value(outcome, who)
        if error:
            errors[row] = f"{errors[row]}\n{error}".strip()
        elif value is not None:
            own[row] = value
            reward[row] += weight * value
            scorable[row] = True
    for row in rows:
        scorable[row] &= not errors[row]
    batch.set(REWARD, reward)
    batch.set(SCORABLE, scorable)
    batch.set((REWARDS, name), own)
    write_row_values(batch, REWARD_ERRORS, errors)


def _entry(
    batch: TensorDictBase, key: str | tuple[str, str], default: torch.Tensor
) -> torch.Tensor:
    value = batch.get(key, None)
    return default if value is None else value.clone()


def _value(outcome: Outcome, who: str) -> tuple[float | None, str]:
    """The reward, or ``None`` where it does not apply, and what went wrong."""
    if outcome.error is not None:
        lines = traceback.format_exception(outcome.error)
        return None, f"{who} raised {''.join(lines)[-2048:]}"
    if outcome.value is None:
        return None, ""
    try:
        value = float(outcome.value)
    except (TypeError, ValueError):
        return None, f"{who} gave {outcome.value!r:.80}, which is not a number"
    if not math.isfinite(value):
        return None, f"{who} gave {value}"
    return value, ""
