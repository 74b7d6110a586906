"""Rewards of several sources in a batch, one each or one per token.

A reward with one value per token is padded with zeros in a batch of environment rows,
``[B, T, ...]``; a note beside it says so, and rows taken out of the batch lose the padding.

Shape legend: B rows, T tokens of the longest row written, T_i tokens of a row.
"""

import logging
import math
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import torch
from tensordict import NestedKey, NonTensorData, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_data import page
from torchrl_data.batched_object import write_objects
from torchrl_data.keys import REWARD, REWARDS, SCORABLE
from torchrl_envs.concurrency.outcome import Outcome

TOKEN_ENTRIES: Final = "token_entries"
"""Which entries are padded per-token ones: entry of the batch to entry of a row."""


def write_token_entry(
    batch: TensorDictBase,
    key: NestedKey,
    rows: Sequence[int],
    values: Sequence[Tensor],
    *,
    row_key: NestedKey | None = None,
) -> None:
    """Set one value per token for some rows."""
    # key: the entry, written as [B, T, ...], 0 where nothing was given; values: [T_i, ...] for
    # each.
    if not rows:
        return
    length = max(max(len(value) for value in values), 1)
    padded = values[0].new_zeros(batch.batch_size[0], length, *values[0].shape[1:])
    for row, value in zip(rows, values, strict=True):
        padded[row, : len(value)] = value
    batch.set(key, padded)
    note = batch.get(TOKEN_ENTRIES, None)
    noted = {} if note is None else dict(note.data)
    noted[key] = key if row_key is None else row_key
    batch.set(TOKEN_ENTRIES, NonTensorData(noted, batch_size=batch.batch_size))


def token_entries_of_row(
    batch: TensorDictBase, row: int, num_tokens: int
) -> dict[NestedKey, Tensor]:
    """All per-token entries of a row, by their names in a row, each ``[T_i, ...]``."""
    note = batch.get(TOKEN_ENTRIES, None)
    found: dict[NestedKey, Tensor] = {}
    for key, row_key in ({} if note is None else note.data).items():
        value = batch.get(key)[row, :num_tokens]
        missing = value.new_zeros(num_tokens - len(value), *value.shape[1:])
        found[row_key] = torch.cat([value, missing]) if len(missing) else value
    return found


REWARD_ERRORS: Final = "reward_errors"
"""What went wrong, a string per row; empty where nothing did."""

_log = logging.getLogger(__name__)

SCORED_BY: Final = "scored_by"
"""Which transform scored a finished trajectory, so that it does so once."""

MOST_REWARD: Final = 1e30
"""What lies beyond it is an error: float32, in which rewards are added up, ends at 3e38."""

REWARD_KEYS: Final = frozenset({REWARD, REWARDS, SCORABLE, REWARD_ERRORS, TOKEN_ENTRIES})
"""Entries that say how an episode was scored; every step has its own."""


class RewardSource:
    """Something that can score episodes."""

    weights: Sequence[float] = ()
    """Of its rewards in their sum, in the order of their names; 1 for each where there are none."""

    @property
    def reward_names(self) -> list[str]:
        """Name of each reward that it gives."""
        raise NotImplementedError

    def reward_names_of(self, row: Mapping[str, Any]) -> list[str]:
        """Name of each reward that it gives an episode which starts from a row of the data.

        Args:
            row: of the data.
        """
        del row
        return self.reward_names


class RowReward(NamedTuple):
    """The reward that a source gave one row."""

    value: float | Tensor | None = None
    """A number, or one per token, float32 ``[T]``; ``None`` where the source does not apply."""
    error: str = ""
    """What went wrong."""


@dataclass(slots=True)
class Score:
    """The rewards of one episode, by their sources."""

    # An episode is `scorable` when at least one source applies and none failed: a reward that
    # raised, is NaN or infinite, or is not a number makes it unscorable, and its `error` says why.

    by_source: dict[str, float] = field(default_factory=dict)
    """The reward of each source that applies; the sum where it gave one per token."""
    total: float = 0.0
    """The weighted sum of the rewards of whole episodes."""
    by_token: Tensor | None = None
    """The weighted sum of the rewards per token, float32 ``[T]`` over all tokens of all rows."""
    error: str = ""
    """What went wrong, of all sources."""
    is_scored: bool = False
    """Whether a source applies that scores, rather than punishes."""

    @property
    def is_scorable(self) -> bool:
        """Whether it was scored, and nothing failed."""
        return self.is_scored and not self.error

    @property
    def reward(self) -> float:
        """The sum of the rewards of whole episodes; NaN where the episode could not be scored."""
        return self.total if self.is_scorable else math.nan

    def add(
        self, name: str, reward: RowReward, *, weight: float = 1.0, scores: bool = True
    ) -> None:
        """Add what a source gave, already checked."""
        value, error = reward
        if error:
            self.error = f"{self.error}\n{error}".strip()
        if value is None or error:
            return
        self.is_scored |= scores
        if isinstance(value, Tensor):
            self.by_source[name] = float(value.sum())
            self.by_token = weight * value + (0 if self.by_token is None else self.by_token)
        else:
            self.by_source[name] = value
            self.total += weight * value

    def add_outcome(self, name: str, outcome: Outcome, *, weight: float = 1.0, who: str) -> None:
        """Add what a source's call gave: a number, ``None`` (it does not apply), or an error."""
        if outcome.error is None:
            given = RowReward(*number_or_error(outcome.value, who))
        else:
            given = RowReward(error=raised_text(outcome.error, who))
        self.add(name, given, weight=weight)


def error_kind(error: str) -> str:
    """Return what errors of a kind have in common: who failed, and the last line of the traceback.

    Args:
        error: what ``reward_errors`` says of a rollout, not empty.
    """
    first, *more = error.splitlines()
    return f"{first.split(' raised ')[0]} raised {more[-1]}" if more else first


def kinds_of(errors: Sequence[str]) -> list[str]:
    """The most frequent kinds of errors of rewards, each with its count; at most five.

    Args:
        errors: what ``reward_errors`` says of rollouts, none of them empty.
    """
    kinds = Counter(map(error_kind, errors))
    return [f"{count} x {kind}" for kind, count in kinds.most_common(5)]


@dataclass(slots=True)
class UnscoredWatch:
    """Warns at once where none of the first rollouts could be scored, whatever the reason.

    It warns again after 2, 4, 8, ... such batches in a row.
    """

    num_batches: int = 0
    """In a row, of which no rollout could be scored."""
    was_scored: bool = False
    """Whether any rollout could be, ever."""

    def record(self, scores: Sequence[Score]) -> None:
        """Take note of rollouts that have just ended.

        Args:
            scores: of each of them; may be none.
        """
        if not scores:
            return
        if any(score.is_scorable for score in scores):
            self.num_batches, self.was_scored = 0, True
            return
        self.num_batches = count = self.num_batches + 1
        if count & (count - 1) or (count == 1 and self.was_scored):
            return
        errors = [score.error for score in scores if score.error]
        why = kinds_of(errors)
        if len(errors) < len(scores):
            why.append(f"{len(scores) - len(errors)} x no reward applies (each is None)")
        _log.warning(
            "None of the %d rollouts that have just ended could be scored, so their reward is NaN "
            "and nothing is learnt from them: %s. See %s.",
            *(len(scores), "; ".join(why).rstrip("."), page("docs/rewards.md")),
        )


def write_rewards(
    batch: TensorDictBase,
    rows: Sequence[int],
    scores: Sequence[Score],
    dense: Sequence[Tensor] | None,
    names: Sequence[str],
) -> None:
    """Write the rewards of finished episodes: once, when all sources have scored."""
    # batch: of B rows; gets `reward`, [B, 1, 1] or [B, T, 1], 0 outside `rows` and NaN where an
    # episode could not be scored; `scorable`, `("rewards", name)` and `reward_errors`.
    # dense: of each the reward by token, [T, 1], or `None` if no source gave it so.
    size = batch.batch_size[0]
    reward, scorable, errors = [0.0] * size, [False] * size, [""] * size
    everybody = dict.fromkeys([*names, *(name for score in scores for name in score.by_source)])
    by_source = {name: [math.nan] * size for name in everybody}
    for row, score in zip(rows, scores, strict=True):
        reward[row], scorable[row], errors[row] = score.reward, score.is_scorable, score.error
        for name, value in score.by_source.items():
            by_source[name][row] = value
    named = {name: torch.tensor(values).view(size, 1, 1) for name, values in by_source.items()}
    batch.set(SCORABLE, torch.tensor(scorable).view(size, 1))
    batch.set(REWARDS, TensorDict._new_unsafe(named, batch_size=batch.batch_size))
    write_objects(batch, REWARD_ERRORS, errors)
    if dense is None:
        batch.set(REWARD, torch.tensor(reward).view(size, 1, 1))
    else:
        write_token_entry(batch, REWARD, rows, dense)


def reward_of_row(row: TensorDictBase) -> float:
    """The reward of a finished rollout, summed where it is dense; NaN where it was not scored."""
    reward, scorable = row.get(REWARD, None), row.get(SCORABLE, None)
    if reward is None or not (scorable is None or bool(scorable.all())):
        return math.nan
    return float(reward.sum())


def solving_rewards(
    row: TensorDictBase, solved_by: Sequence[str] | None = None
) -> dict[str, float]:
    """The rewards of a finished rollout that say whether it is solved, by their names.

    Args:
        row: of the rollout.
        solved_by: their names, of which those count that apply; ``"reward"`` is the sum of all.
            ``None``: every reward that applies, of which only one can say so, or the sum where no
            reward has a name.

    Returns:
        Without weights; none where the rollout was not scored, or none of them applies.
    """
    total, group = reward_of_row(row), row.get(REWARDS, None)
    if math.isnan(total):
        return {}
    named = {} if group is None else {str(k): float(each.sum()) for k, each in group.items()}
    applied = {name: value for name, value in named.items() if not math.isnan(value)}
    if solved_by is None:
        return applied or {REWARD: total}
    return {name: value for name, value in {REWARD: total, **applied}.items() if name in solved_by}


def several_rewards(names: Iterable[str], setting: str) -> str:
    """Return what to say where several rewards are added, and nothing says which of them solves."""
    listed = sorted(names)
    return (
        f"the rewards {listed} are added, and their sum does not say whether a rollout is solved. "
        f"Set {setting} to the reward that does, such as {listed[0]}, to a list of rewards that "
        f"all have to say so, or to {REWARD!r} for the sum."
    )


def dense_reward(total: Tensor, by_token: Tensor | None, assistant_mask: Tensor) -> Tensor:
    """A reward for each token, whose sum is that of what is given."""
    # total: of the trajectory, one value; it goes to the last sampled token (to the last token, if
    # nothing was sampled). Or already by token, [T, 1].
    # by_token: added, [T].
    # assistant_mask: bool [T], True on sampled tokens.
    # Gives float32 [max(T, 1), 1].
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
    """The last token of each turn of the policy."""
    # assistant_mask: bool [T], True on sampled tokens.
    # Gives int64 [num_turns], rising.
    after = torch.nn.functional.pad(assistant_mask[1:], (0, 1), value=False)
    return (assistant_mask & ~after).nonzero().squeeze(-1)


def number_or_error(value: Any, who: str, nan_applies: bool = True) -> tuple[float | None, str]:
    """A finite reward, or ``None`` where there is none, and what is wrong with it."""
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


RewardOf = Literal["sum", "last"]
"""What the rewards of an environment's steps make together."""


def reward_of_steps(rewards: Iterable[float | None], of: RewardOf) -> float | None:
    """Return what the steps of an episode gave, those that gave nothing left out."""
    given = [each for each in rewards if each is not None]
    if not given:
        return None
    return sum(given) if of == "sum" else given[-1]


def raised_text(error: BaseException, who: str) -> str:
    """Return what is recorded of an error that a source raised: the end of its traceback."""
    return f"{who} raised {''.join(traceback.format_exception(error))[-2048:]}"
