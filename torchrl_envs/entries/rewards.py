"""How rewards of several sources come together in a batch.

Shape legend: B rows, T tokens of a row.
"""

import math
import traceback
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_data.conversation.conversations import Conversations
from torchrl_data.conversation.object_entries import read_objects, write_objects
from torchrl_data.keys import REWARD, REWARDS, SCORABLE
from torchrl_envs.concurrency.calls import Outcome

from .padded import TOKEN_ENTRIES, write_token_entry

REWARD_ERRORS: Final = "reward_errors"
"""What went wrong, a string per row; empty where nothing did."""
TOKEN_REWARDS: Final = "token_rewards"
"""Rewards by token that wait for :func:`close_rewards`: a tensor ``[T]`` or ``None`` per row."""

MOST_REWARD: Final = 1e30
"""What lies beyond it is an error: float32, in which rewards are added up, ends at 3e38."""

REWARD_KEYS: Final = frozenset(
    {REWARD, REWARDS, SCORABLE, REWARD_ERRORS, TOKEN_REWARDS, TOKEN_ENTRIES}
)
"""Entries that say how an episode was scored; every step has its own."""


class RewardSource:
    """Something that can score episodes."""

    @property
    def reward_names(self) -> list[str]:
        """Name of each reward that it gives."""
        raise NotImplementedError


class RowReward(NamedTuple):
    """What a source gave one row."""

    value: float | Tensor | None = None
    """A number, or one per token, float32 ``[T]``; ``None`` where the source does not apply."""
    error: str = ""
    """What went wrong."""


def add_rewards(
    batch: TensorDictBase,
    name: str,
    rows: Sequence[int],
    outcomes: Sequence[Outcome],
    *,
    weight: float = 1.0,
    who: str,
    nan_applies: bool = True,
) -> None:
    """Add one source's rewards, one number per row, to the sum.

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
        nan_applies: whether NaN is an error; ``False`` takes it for ``None``.
    """
    given = [_row_reward(outcome, who, nan_applies) for outcome in outcomes]
    record_rewards(batch, name, rows, given, weight=weight)


def record_rewards(
    batch: TensorDictBase,
    name: str,
    rows: Sequence[int],
    given: Sequence[RowReward],
    *,
    weight: float = 1.0,
    scores: bool = True,
) -> None:
    """Add what a source gave, already checked, to the sum.

    Args:
        batch: see :func:`add_rewards`.
        name: of the source; its entry is the row's sum where it gave a reward per token.
        rows: the rows that it scored.
        given: finite rewards and errors.
        weight: of this source in the sum.
        scores: whether a row that has only this reward is scored; ``False`` for a penalty.
    """
    size = batch.batch_size[0]
    reward = _entry(batch, REWARD, torch.zeros(size, 1, 1))
    scorable = _entry(batch, SCORABLE, torch.zeros(size, 1, dtype=torch.bool))
    own = _entry(batch, (REWARDS, name), torch.full((size, 1, 1), math.nan))
    errors = read_objects(batch, REWARD_ERRORS, "")
    by_token = read_objects(batch, TOKEN_REWARDS)
    for row, (value, error) in zip(rows, given, strict=True):
        if error:
            errors[row] = f"{errors[row]}\n{error}".strip()
        if value is None or error:
            continue
        scorable[row] |= scores
        if isinstance(value, Tensor):
            own[row] = value.sum()
            by_token[row] = weight * value + (0 if by_token[row] is None else by_token[row])
        else:
            own[row] = value
            reward[row] += weight * value
    for row in rows:
        scorable[row] &= not errors[row]
    batch.set(REWARD, reward)
    batch.set(SCORABLE, scorable)
    batch.set((REWARDS, name), own)
    write_objects(batch, REWARD_ERRORS, errors)
    if any(value is not None for value in by_token):
        write_objects(batch, TOKEN_REWARDS, by_token)


def close_rewards(batch: TensorDictBase, rows: Sequence[int], conversations: Conversations) -> None:
    """Once all sources have scored: one ``reward``, dense if any source gave it by token.

    A number for the whole trajectory then belongs to its last sampled token (to its last token, if
    nothing was sampled), so that the sum over tokens is what it was.

    Args:
        batch: what the sources wrote to. ``reward`` stays ``[B, 1, 1]``, or becomes ``[B, T, 1]``,
            0 outside ``rows``.
        rows: the rows that were scored.
        conversations: of the batch.
    """
    if batch.get(TOKEN_REWARDS, None) is None:
        return
    by_token = read_objects(batch, TOKEN_REWARDS)
    total = batch.get(REWARD)
    dense = [
        dense_reward(total[row], by_token[row], conversations.assistant_mask(row)) for row in rows
    ]
    batch.pop(TOKEN_REWARDS)
    write_token_entry(batch, REWARD, rows, dense)


def dense_reward(total: Tensor, by_token: Tensor | None, assistant_mask: Tensor) -> Tensor:
    """A reward for each token, whose sum is that of what is given.

    Args:
        total: of the trajectory, one value; it goes to the last sampled token (to the last token,
            if nothing was sampled). Or already by token, ``[T, 1]``.
        by_token: added, ``[T]``.
        assistant_mask: bool ``[T]``, True on sampled tokens.

    Returns:
        float32 ``[max(T, 1), 1]``.
    """
    length = max(len(assistant_mask), 1)
    values = torch.zeros(length)
    sampled = assistant_mask.nonzero()
    if total.numel() == length > 1:
        values += total.reshape(-1)
    else:
        values[int(sampled[-1]) if len(sampled) else -1] += float(total)
    if by_token is not None:
        values += by_token
    return values[:, None]


def turn_ends(assistant_mask: Tensor) -> Tensor:
    """The last token of each turn of the policy.

    Args:
        assistant_mask: bool ``[T]``, True on sampled tokens.

    Returns:
        int64 ``[num_turns]``, rising.
    """
    after = torch.nn.functional.pad(assistant_mask[1:], (0, 1), value=False)
    return (assistant_mask & ~after).nonzero().squeeze(-1)


def number_or_error(value: Any, who: str, nan_applies: bool = True) -> tuple[float | None, str]:
    """A finite reward, or ``None`` where there is none, and what is wrong with it.

    Args:
        value: what a source gave.
        who: the source.
        nan_applies: whether NaN is an error; ``False`` takes it for ``None``.
    """
    if value is None:
        return None, ""
    try:
        single = not isinstance(value, str | bytes) and getattr(value, "ndim", 0) == 0
        number = float(value) if single else None
    except OverflowError:
        return None, f"{who} gave a whole number beyond the range of floats"
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        return None, f"{who} gave {value!r:.80}, which is not a number"
    if math.isnan(number) and not nan_applies:
        return None, ""
    if not math.isfinite(number):
        return None, f"{who} gave {number}"
    if abs(number) > MOST_REWARD:
        return None, f"{who} gave {number}, and a reward lies within {MOST_REWARD:.0e}"
    return number, ""


def raised_text(error: BaseException, who: str) -> str:
    """What is recorded of an error that a source raised: the end of its traceback."""
    return f"{who} raised {''.join(traceback.format_exception(error))[-2048:]}"


def _row_reward(outcome: Outcome, who: str, nan_applies: bool) -> RowReward:
    if outcome.error is not None:
        return RowReward(error=raised_text(outcome.error, who))
    return RowReward(*number_or_error(outcome.value, who, nan_applies))


def _entry(batch: TensorDictBase, key: str | tuple[str, str], default: Tensor) -> Tensor:
    value = batch.get(key, None)
    return default if value is None else value.clone()
