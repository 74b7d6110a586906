"""Groups of rollouts: how they become complete, and how their rewards become advantages."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from objectives import functional as F
from torchrl_data import keys
from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import POSITIVE, check_counts, check_numbers, one_of
from torchrl_data.keys import EPISODE_ID, NUM_SEGMENTS, SEGMENT
from torchrl_data.missing_entry import MissingEntryError
from torchrl_data.saved_rows import row_from_state, row_state

# How complete groups become advantages: one small class for each way, which reads rows.
#
# The arithmetic is in :mod:`objectives.functional`. Shape legend: T tokens of a row.

WHO: Final = "MCAdvantage"
TrajectoryReturn = Literal["sum", "mean", "max"]
TRAJECTORY_RETURNS: Final[tuple[TrajectoryReturn, ...]] = ("sum", "mean", "max")


class RewardedGroup(NamedTuple):
    """A complete group on its way out."""

    group_id: Hashable
    rows: list[TensorDictBase]
    returns: list[float]
    """NaN where a row could not be scored."""

    @property
    def valid(self) -> list[bool]:
        """Whether each row could be scored."""
        return [not math.isnan(value) for value in self.returns]


class AdvantageEstimator(ChecksAttributes):
    """From groups to advantages."""

    def advantages(self, groups: Sequence[RewardedGroup]) -> Sequence[Tensor]:
        """The advantage of each row of all groups, in order.

        Args:
            groups: all that are released at once.

        Returns:
            ``[1, 1]`` each, or ``[T, 1]``; 0 for a row that could not be scored.

        Raises:
            MissingEntryError: a row lacks what the estimator reads.
            ValueError: a row holds something else than the estimator needs.
        """
        returns = [value for group in groups for value in group.returns]
        # In float64, in which no sum or square of float32 rewards overflows.
        wide = torch.tensor(returns, dtype=torch.float64)
        estimate = self._estimate(wide, _group_index(groups), groups)
        return estimate.float().view(-1, 1, 1).unbind(0)

    def _estimate(self, returns: Tensor, index: Tensor, groups: Sequence[RewardedGroup]) -> Tensor:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON can hold it; empty where nothing is remembered."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a state.

        Args:
            state: what :meth:`state_dict` gave.

        Raises:
            ValueError: it is that of another estimator.
        """
        if state:
            raise ValueError(
                f"{type(self).__name__} remembers nothing, but the saved estimator had "
                f"{sorted(state)}. Resume with the estimator of the saved run."
            )

    def is_flat(self, group: RewardedGroup) -> bool:
        """Whether a group has nothing to learn from.

        Args:
            group: a complete one.

        Returns:
            True where fewer than two rows are valid, or no row is better than another.
        """
        valid = [value for value in group.returns if not math.isnan(value)]
        return len(valid) < 2 or min(valid) == max(valid)


@dataclass(frozen=True, kw_only=True)
class GroupMean(AdvantageEstimator):
    """GRPO: ``(R - mean) / (std + 1e-4)``, see :func:`~objectives.functional.group_advantage`.

    Args:
        scale: the standard deviation of the ``"group"``; of the ``"batch"``, all rows released
            at once; or ``"none"`` (Dr. GRPO).

    Raises:
        ValueError: the scale is unknown.
    """

    scale: F.Scale | str = "group"

    def __post_init__(self) -> None:
        one_of("scale", self.scale, F.SCALES)

    def _estimate(self, returns: Tensor, index: Tensor, groups: Sequence[RewardedGroup]) -> Tensor:
        del groups
        return F.group_advantage(returns, index, scale=self.scale)


@dataclass(frozen=True)
class LeaveOneOut(AdvantageEstimator):
    """RLOO: less the mean of the others, see :func:`~objectives.functional.rloo_advantage`.

    Example:
        >>> from tensordict import lazy_stack
        >>> from torchrl.data import LazyStackStorage, ReplayBuffer
        >>> from objectives import MCAdvantage
        >>> advantage = MCAdvantage(3, estimator=LeaveOneOut())
        >>> buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=advantage)
        >>> rewards = [torch.tensor([[value]]) for value in (1.0, 0.0, 0.0)]
        >>> rows = [TensorDict({"reward": each, "group_id": torch.tensor(7)}) for each in rewards]
        >>> _ = buffer.extend(lazy_stack(rows))
        >>> buffer[:]["advantage"].flatten()  # 1 - 0, 0 - 1/2, 0 - 1/2
        tensor([ 1.0000, -0.5000, -0.5000])
    """

    def _estimate(self, returns: Tensor, index: Tensor, groups: Sequence[RewardedGroup]) -> Tensor:
        del groups
        return F.rloo_advantage(returns, index)


@dataclass(frozen=True)
class MaxRL(AdvantageEstimator):
    """Maximum likelihood RL: by the mean, see :func:`~objectives.functional.maxrl_advantage`.

    Raises (when it is asked):
        ValueError: a return is negative.
    """

    def _estimate(self, returns: Tensor, index: Tensor, groups: Sequence[RewardedGroup]) -> Tensor:
        negative = (returns < 0).nonzero()
        if len(negative):
            group = groups[int(index[negative[0]])].group_id
            raise ValueError(
                f"MaxRL divides by the mean return of a group, which has to be a rate of success; "
                f"group {group!r} has the return {float(returns[negative[0]])}. Use rewards of 0 "
                "and 1, or another estimator."
            )
        return F.maxrl_advantage(returns, index)


@dataclass(frozen=True, kw_only=True)
class DecoupledSources(AdvantageEstimator):
    """GDPO: every source normalised by itself, see :func:`~objectives.functional.gdpo_advantage`.

    Args:
        weights: of the sources by name. When not given, a collector takes those with which its
            environment adds the rewards up; without a collector it is 1 for each. A row must hold
            exactly these.
        sources_key: group of the rewards by source, one number each; NaN where one does not apply.

    Raises:
        ValueError: there are no weights in what is given, or one is not finite.
    """

    weights: Mapping[str, float] | None = None
    sources_key: NestedKey = keys.REWARDS

    def __post_init__(self) -> None:
        if self.weights is not None and not self.weights:
            raise ValueError("DecoupledSources: weights has no source; leave it out, or name them.")
        weights = {f"weight of {name!r}": x for name, x in (self.weights or {}).items()}
        check_numbers("DecoupledSources", **weights)

    def _estimate(self, returns: Tensor, index: Tensor, groups: Sequence[RewardedGroup]) -> Tensor:
        tables = [read_sources(row, self.sources_key) for group in groups for row in group.rows]
        weights = self.weights or dict.fromkeys(tables[0], 1.0)
        for table in tables:
            if table.keys() != weights.keys():
                raise ValueError(
                    f"{WHO}: a row has rewards of {sorted(table)}, but DecoupledSources weighs "
                    f"{sorted(weights)}. Give weights for exactly the sources that there are."
                )
        rewards = returns.new_tensor([[table[name] for name in weights] for table in tables])
        scored = ~returns.isnan().unsqueeze(1).expand_as(rewards)
        return F.gdpo_advantage(rewards, index, returns.new_tensor(list(weights.values())), scored)

    def is_flat(self, group: RewardedGroup) -> bool:
        """See the base class; here, no source with a weight tells two rows apart."""
        scored = zip(group.rows, group.valid, strict=True)
        tables = [read_sources(row, self.sources_key) for row, valid in scored if valid]
        if len(tables) < 2:
            return True
        weighed = [name for name in tables[0] if (self.weights or {}).get(name, 1.0)]
        columns = [[table.get(name, math.nan) for table in tables] for name in weighed]
        finite = [{value for value in column if math.isfinite(value)} for column in columns]
        return all(len(values) < 2 for values in finite)


@dataclass(frozen=True, kw_only=True)
class PassAtK(AdvantageEstimator):
    """Any success among k counts, see :func:`~objectives.functional.pass_at_k_advantage`.

    Args:
        k: size of the subsets of the group; a group of fewer valid rows has advantage 0.
        success_threshold: returns above it are successes.

    Raises:
        ValueError: k is no whole number of at least 1, or the threshold is not finite.

    Example:
        >>> from tensordict import lazy_stack
        >>> from torchrl.data import LazyStackStorage, ReplayBuffer
        >>> from objectives import MCAdvantage
        >>> advantage = MCAdvantage(4, estimator=PassAtK(k=2))
        >>> buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=advantage)
        >>> rewards = [torch.tensor([[value]]) for value in (1.0, 0.0, 0.0, 0.0)]
        >>> rows = [TensorDict({"reward": each, "group_id": torch.tensor(7)}) for each in rewards]
        >>> _ = buffer.extend(lazy_stack(rows))
        >>> buffer[:]["advantage"].flatten()  # (1 - 1/2) / (1/2), and (1/3 - 1/2) / (1/2)
        tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """

    k: int
    success_threshold: float = 0.0

    def __post_init__(self) -> None:
        check_counts("PassAtK", k=self.k)
        check_numbers("PassAtK", success_threshold=self.success_threshold)

    def _estimate(self, returns: Tensor, index: Tensor, groups: Sequence[RewardedGroup]) -> Tensor:
        del groups
        success = returns > self.success_threshold
        return F.pass_at_k_advantage(success, index, ~returns.isnan(), k=self.k)

    def is_flat(self, group: RewardedGroup) -> bool:
        """See the base class; here, every subset of k succeeds, or none does."""
        valid = [value for value in group.returns if not math.isnan(value)]
        failures = sum(value <= self.success_threshold for value in valid)
        return failures < self.k or failures == len(valid)


@dataclass(frozen=True, kw_only=True)
class TurnCredit(AdvantageEstimator):
    """Process supervision from dense rewards, see :func:`~objectives.functional.turn_advantage`."""

    reward_key: NestedKey = keys.REWARD
    assistant_mask_key: NestedKey = keys.ASSISTANT_MASK

    def advantages(self, groups: Sequence[RewardedGroup]) -> Sequence[Tensor]:
        """See the base class; ``[T, 1]`` each."""
        rows = [row for group in groups for row in group.rows]
        masks = [read_entry(row, self.assistant_mask_key, WHO).view(-1) for row in rows]
        rewards = [read_entry(row, self.reward_key, WHO).view(-1) for row in rows]
        for mask, reward in zip(masks, rewards, strict=True):
            if len(mask) != len(reward):
                raise ValueError(
                    f"credit 'turn' needs a reward for each token: found {len(reward)} rewards "
                    f"at {self.reward_key!r} for {len(mask)} tokens."
                )
        lengths = torch.tensor([len(mask) for mask in masks])
        advantage = F.turn_advantage(
            torch.cat(rewards).double(),
            torch.cat(masks).bool(),
            lengths,
            _group_index(groups),
            torch.tensor([valid for group in groups for valid in group.valid]),
        )
        return [part.unsqueeze(-1) for part in advantage.float().split(lengths.tolist())]

    def is_flat(self, group: RewardedGroup) -> bool:
        """See the base class; here, every turn of every row had the same reward."""
        if sum(group.valid) < 2:
            return True
        return not any(bool(part.any()) for part in self.advantages([group]))


def _group_index(groups: Sequence[RewardedGroup]) -> Tensor:
    sizes = torch.tensor([len(group.rows) for group in groups])
    return torch.arange(len(groups)).repeat_interleave(sizes)


# Reading one row ---------------------------------------------------------------------------------


def read_entry(row: TensorDictBase, key: NestedKey, who: str) -> Tensor:
    """An entry that every row must have."""
    value = row.get(key, None)
    if value is None:
        found = sorted(map(str, row.keys(include_nested=True, leaves_only=True)))
        raise MissingEntryError(
            f"{who} reads {key!r}, which a row lacks. The row holds {found}. "
            "Run the step that writes the entry first, or rename it."
        )
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{who} reads {key!r} as a tensor, found {type(value).__name__}. (Groups go by an "
            "integer id, never by text: have the data loader write 'group_id'.)"
        )
    return value


def read_sources(row: TensorDictBase, key: NestedKey) -> dict[str, float]:
    """The rewards of a row by source."""
    group = row.get(key, None)
    if not isinstance(group, TensorDictBase) or group.is_empty():
        raise MissingEntryError(
            f"{WHO} reads the rewards by source at {key!r}, which a row lacks. "
            "Reward transforms write them; or rename the entry."
        )
    table = {str(name): value for name, value in group.items()}
    for name, value in table.items():
        if value.numel() != 1:
            raise ValueError(
                f"{WHO}: the reward source {name!r} has {value.numel()} values in a row; it needs "
                "one. (A dense reward has no advantage by source.)"
            )
    return {name: float(value) for name, value in table.items()}


def trajectory_return(reward: Tensor, scorable: Tensor | None, how: TrajectoryReturn) -> float:
    """One number for a row; NaN where it could not be scored, or is not finite."""
    if scorable is not None and not bool(scorable.all()):
        return math.nan
    one = reward.numel() == 1
    reduce = {"sum": Tensor.sum, "mean": Tensor.mean, "max": Tensor.amax}[how]
    value = float(reward if one else reduce(reward))
    return value if math.isfinite(value) else math.nan


# A price for length, relative to the group.


@dataclass(frozen=True, kw_only=True)
class LengthPenalty(AdvantageEstimator):
    """Takes ``coeff`` times a row's share of its group's longest output off its return.

    The share is that of sampled tokens, of all rows of an episode, so that the price follows the
    task: what is long for one prompt is short for another. Give it to
    ``MCAdvantage(8, estimator=LengthPenalty(coeff=0.1))``.

    Args:
        coeff: what the longest output of a group costs.
        estimator: what makes advantages of the returns that are left.
        success_threshold: only returns above it pay; ``None``: all do.
        assistant_mask_key: bool ``[T]``, True on what was sampled.

    Raises:
        ValueError: the coefficient is not positive, or the returns that are left could be negative
            though the estimator needs a rate of success.
        TypeError: the estimator does not go by returns.
    """

    coeff: float
    estimator: AdvantageEstimator = field(default_factory=GroupMean)
    success_threshold: float | None = None
    assistant_mask_key: NestedKey = keys.ASSISTANT_MASK

    def __post_init__(self) -> None:
        check_numbers("LengthPenalty", POSITIVE, coeff=self.coeff)
        check_numbers("LengthPenalty", success_threshold=self.success_threshold)
        if isinstance(self.estimator, DecoupledSources | PassAtK | TurnCredit | LengthPenalty):
            raise TypeError(
                "LengthPenalty changes the return of a row, by which "
                f"{type(self.estimator).__name__} does not go: use another estimator."
            )
        least = -math.inf if self.success_threshold is None else self.success_threshold
        if isinstance(self.estimator, MaxRL) and least < self.coeff:
            raise ValueError(
                f"LengthPenalty: MaxRL needs returns of at least 0, and coeff={self.coeff} may "
                f"leave less: set success_threshold to {self.coeff} or more."
            )

    def _penalised(self, group: RewardedGroup) -> RewardedGroup:
        lengths = [
            sum(int(read_entry(part, self.assistant_mask_key, WHO).sum()) for part in rows_of(row))
            for row in group.rows
        ]
        shares = F.relative_length(
            torch.tensor(lengths), torch.zeros(len(lengths), dtype=torch.int64)
        )
        least = -math.inf if self.success_threshold is None else self.success_threshold
        returns = [
            value - self.coeff * share if value > least else value
            for value, share in zip(group.returns, shares.tolist(), strict=True)
        ]
        return group._replace(returns=returns)

    def advantages(self, groups: Sequence[RewardedGroup]) -> Sequence[Tensor]:
        """See the base class."""
        return self.estimator.advantages([self._penalised(group) for group in groups])

    def is_flat(self, group: RewardedGroup) -> bool:
        """See the base class; equal rewards of different length are none."""
        return self.estimator.is_flat(self._penalised(group))

    def state_dict(self) -> dict[str, Any]:
        """See the base class."""
        return self.estimator.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the base class."""
        self.estimator.load_state_dict(state)


# A baseline of each role, for self-play: its own running mean of the returns.

Role = tuple[int | str, ...]


class RoleBaseline(AdvantageEstimator):
    """RAE: ``R - b``, b the running mean of the returns of the role that the row was played in.

    The two sides of a game have different chances, so that a baseline for both would praise a
    role. b is what was known before the row: ``b <- decay b + (1 - decay) R`` comes after it.
    Groups play no part: ``MCAdvantage(1, estimator=RoleBaseline())`` trains each row as it comes.
    The baselines are part of ``MCAdvantage``'s ``state_dict``.

    Args:
        by: entries whose values tell the roles apart, an integer or a string each, such as
            ``("game", "player")``.
        decay: of the running mean.

    Raises:
        ValueError: there are no entries, or the decay is not in [0, 1).

    See Also:
        Liu et al., 2025 (SPIRAL), arXiv:2506.24119, section 3.3.
    """

    def __init__(self, *, by: Sequence[NestedKey] = ("agent",), decay: float = 0.95) -> None:
        if isinstance(by, str) or not by:
            raise ValueError(f"RoleBaseline: by takes a tuple of entries, got {by!r}.")
        self.by = tuple(by)
        self._by = [key if isinstance(key, str) else list(key) for key in by]
        self.decay: float = self._checked_change("decay", decay)
        self.baselines: dict[Role, float] = {}
        """Of each role that was met; 0 for one that was not."""

    changeable = frozenset({"decay"})

    def _checked_change(self, name: str, value: Any) -> Any:
        check_numbers("RoleBaseline", "[0, 1)", **{name: value})
        return value

    def advantages(self, groups: Sequence[RewardedGroup]) -> Sequence[Tensor]:
        """See the base class; ``[1, 1]`` each."""
        found = []
        for group in groups:
            for row, value in zip(group.rows, group.returns, strict=True):
                role, gain = tuple(self._value(row, key) for key in self.by), 0.0
                if not math.isnan(value):
                    baseline = self.baselines.get(role, 0.0)
                    self.baselines[role] = self.decay * baseline + (1 - self.decay) * value
                    gain = value - baseline
                found.append(torch.full((1, 1), gain))
        return found

    def _value(self, row: TensorDictBase, key: NestedKey) -> int | str:
        value = row.get(key, None)
        if value is None:
            found = sorted(map(str, row.keys()))
            raise MissingEntryError(
                f"{WHO}: RoleBaseline reads {key!r}, which a row lacks. The row holds {found}. "
                "Write who played it, or name the entries with by=."
            )
        value = getattr(value, "data", value) if not isinstance(value, Tensor) else value
        return value if isinstance(value, str) else int(value)

    def is_flat(self, group: RewardedGroup) -> bool:
        """See the base class; no row needs another one here."""
        return all(map(math.isnan, group.returns))

    def state_dict(self) -> dict[str, Any]:
        """See the base class."""
        baselines = [[list(role), value] for role, value in self.baselines.items()]
        return {"by": self._by, "baselines": baselines}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the base class."""
        if state.get("by") != self._by:
            raise ValueError(
                f"RoleBaseline: the saved baselines are by {state.get('by')}, these by {self._by}. "
                "Resume with the estimator of the saved run."
            )
        self.baselines = {tuple(role): value for role, value in state["baselines"]}


_EARLIER: Final = "earlier_segments"
_LOG = logging.getLogger(__name__)


@dataclass
class GroupStats:
    """Counts since the queue was made; ``rows_in`` is the sum of what became of the rows."""

    rows_in: int = 0
    rows_released: int = 0
    rows_dropped_unscorable: int = 0
    rows_dropped_zero_variance: int = 0
    rows_dropped_bounds: int = 0
    rows_dropped_unselected: int = 0
    rows_expired: int = 0
    groups_completed: int = 0
    groups_zero_variance: int = 0
    groups_expired: int = 0

    def ledger(self, rows_pending: int) -> bool:
        """Whether every row is accounted for."""
        dropped = sum(n for name, n in asdict(self).items() if name.startswith("rows_dropped_"))
        return self.rows_in == self.rows_released + dropped + self.rows_expired + rows_pending


class GroupQueue:
    """Collects rows by group id until a group has all of its members.

    Groups may arrive interleaved and out of order. Groups that stay incomplete expire, oldest
    first, when too many wait, or when a group has waited too long; each is logged and counted.

    Args:
        group_size: members of a complete group.
        max_pending_groups: more incomplete groups than this, and the oldest expires.
        expire_after_rows: a group expires once so many rows have come in since its first one;
            None for never.

    Raises:
        ValueError: a number is not whole, or not positive.
    """

    def __init__(
        self,
        group_size: int,
        *,
        max_pending_groups: int = 1024,
        expire_after_rows: int | None = None,
    ) -> None:
        check_counts(
            group_size=group_size,
            max_pending_groups=max_pending_groups,
            expire_after_rows=expire_after_rows,
        )
        self.group_size = group_size
        self.max_pending_groups = max_pending_groups
        self.expire_after_rows = expire_after_rows
        self.stats = GroupStats()
        self.expired: deque[tuple[Hashable, int]] = deque(maxlen=1000)
        """The latest expired groups: id, and how many rows it had."""
        self._pending: dict[Hashable, list[TensorDictBase]] = {}
        self._first_row: dict[Hashable, int] = {}
        self._waiting: Waiting = {}

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def num_rows(self) -> int:
        """Rows that wait for others of their group."""
        return sum(num_rows(row) for rows in self._pending.values() for row in rows)

    def missing(self) -> dict[Hashable, int]:
        """How many rows each incomplete group still lacks, oldest group first."""
        return {group: self.group_size - len(rows) for group, rows in self._pending.items()}

    def add(self, group: Hashable, row: TensorDictBase) -> list[TensorDictBase] | None:
        """Add a row.

        Args:
            group: its group's id.
            row: the row; kept as it is. Where an episode has several, the group gets one for all of
                them, with the others inside, once they are there.

        Returns:
            The group's rows in the order of their arrival once it is complete, else None.

        Raises:
            ValueError: a row of an episode of several came before.
        """
        member = member_of(group, row, self._waiting)
        if member is None:
            return None
        self.stats.rows_in += num_rows(member)
        rows = self._pending.get(group)
        if rows is None:
            rows = self._pending[group] = []
            self._first_row[group] = self.stats.rows_in
        rows.append(member)
        if len(rows) < self.group_size:
            return None
        del self._pending[group], self._first_row[group]
        self.stats.groups_completed += 1
        return rows

    def expire(self) -> list[tuple[Hashable, list[TensorDictBase]]]:
        """Take out the groups that have waited too long.

        Returns:
            Ids and rows, oldest group first. Whoever calls it counts what becomes of the rows.
        """
        late = []
        if self.expire_after_rows is not None:
            limit = self.stats.rows_in - self.expire_after_rows
            late = [group for group, first in self._first_row.items() if first <= limit]
        surplus = len(self._pending) - len(late) - self.max_pending_groups
        if surplus > 0:
            gone = set(late)
            rest = (group for group in self._pending if group not in gone)
            late += [group for group, _ in zip(rest, range(surplus), strict=False)]
        taken = [(group, self._pending.pop(group)) for group in late]
        for group, rows in taken:
            del self._first_row[group]
            self.expired.append((group, len(rows)))
            _LOG.warning("Group %r expired with %d of %d rows.", group, len(rows), self.group_size)
        self.stats.groups_expired += len(taken)
        return taken

    @contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """Whatever is done within has not happened if it raises; the error goes on."""
        pending = {group: list(rows) for group, rows in self._pending.items()}
        waiting = {episode: dict(rows) for episode, rows in self._waiting.items()}
        first_row, stats, expired = dict(self._first_row), replace(self.stats), self.expired.copy()
        try:
            yield
        except BaseException:
            self._pending, self._first_row, self._waiting = pending, first_row, waiting
            self.stats, self.expired = stats, expired
            raise

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs: what JSON can hold, and tensors."""
        pending = [
            {
                "group": group,
                "first_row": self._first_row[group],
                "rows": list(map(row_state, rows)),
            }
            for group, rows in self._pending.items()
        ]
        expired = [list(item) for item in self.expired]
        about = {"group_size": self.group_size, "stats": asdict(self.stats)}
        segments = [
            {"group": group, "episode": episode, "segment": segment, "row": row_state(row)}
            for (group, episode), rows in self._waiting.items()
            for segment, row in rows.items()
        ]
        return {**about, "pending": pending, "expired": expired, "segments": segments}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to a state.

        Args:
            state: what :meth:`state` gave.

        Raises:
            ValueError: it belongs to groups of another size.
        """
        if state["group_size"] != self.group_size:
            raise ValueError(
                f"GroupQueue: the saved groups have {state['group_size']} members, these have "
                f"{self.group_size}. Resume with the group_size of the saved run."
            )
        self._pending, self._first_row, self._waiting = {}, {}, {}
        for item in state["segments"]:
            rows = self._waiting.setdefault((item["group"], item["episode"]), {})
            rows[item["segment"]] = row_from_state(item["row"])
        for item in state["pending"]:
            self._pending[item["group"]] = [row_from_state(row) for row in item["rows"]]
            self._first_row[item["group"]] = item["first_row"]
        self.stats = GroupStats(**state["stats"])
        self.expired = deque(map(tuple, state["expired"]), maxlen=self.expired.maxlen)


def place_of(row: TensorDictBase) -> tuple[int, int]:
    """Which row of its episode it is, and how many there are."""
    count = row.get(NUM_SEGMENTS, None)
    return (0, 1) if count is None else (int(row.get(SEGMENT)), int(count))


def num_rows(member: TensorDictBase) -> int:
    """How many rows an episode has."""
    earlier = member.get(_EARLIER, None)
    return 1 if earlier is None else 1 + len(list(earlier.keys()))


def rows_of(member: TensorDictBase) -> Iterator[TensorDictBase]:
    """The rows of an episode, in order; its last row is as it came."""
    earlier = member.get(_EARLIER, None)
    if earlier is not None:
        member = member.exclude(_EARLIER)
        yield from (earlier.get(str(number)) for number in range(len(list(earlier.keys()))))
    yield member


Waiting = dict[tuple[Hashable, int], dict[int, TensorDictBase]]
"""Rows that wait for the others of their episode, by group and episode and by their number."""


def member_of(group: Hashable, row: TensorDictBase, waiting: Waiting) -> TensorDictBase | None:
    """One row for the whole episode of a row, once all of its rows are there."""
    segment, count = place_of(row)
    if count == 1:
        return row
    episode = int(row.get(EPISODE_ID))
    rows = waiting.setdefault((group, episode), {})
    if segment in rows:
        raise ValueError(f"Row {segment} of episode {episode} in group {group!r} came twice.")
    rows[segment] = row
    if len(rows) < count:
        return None
    del waiting[group, episode]
    member = rows[count - 1].copy()
    for number in range(count - 1):
        member.set((_EARLIER, str(number)), rows[number])
    return member
