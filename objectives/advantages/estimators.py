"""How the rewards of a group become advantages."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from objectives import functional as F
from torchrl_data import keys
from torchrl_data.checks import POSITIVE, MissingEntryError, check_counts, check_numbers, one_of

from .group_queue import rows_of

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


class AdvantageEstimator:
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
        weights: of the sources by name; 1 for each when not given. A row must hold exactly these.
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
        tables = [
            read_sources(row, self.sources_key, WHO) for group in groups for row in group.rows
        ]
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
        """See the base class; here, no source tells two rows apart."""
        scored = zip(group.rows, group.valid, strict=True)
        tables = [read_sources(row, self.sources_key, WHO) for row, valid in scored if valid]
        if len(tables) < 2:
            return True
        columns = [[table.get(name, math.nan) for table in tables] for name in tables[0]]
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


def read_sources(row: TensorDictBase, key: NestedKey, who: str) -> dict[str, float]:
    """The rewards of a row by source."""
    group = row.get(key, None)
    if not isinstance(group, TensorDictBase) or group.is_empty():
        raise MissingEntryError(
            f"{who} reads the rewards by source at {key!r}, which a row lacks. "
            "Reward transforms write them; or rename the entry."
        )
    table = {str(name): value for name, value in group.items()}
    for name, value in table.items():
        if value.numel() != 1:
            raise ValueError(
                f"{who}: the reward source {name!r} has {value.numel()} values in a row; it needs "
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
        check_numbers("RoleBaseline", "[0, 1)", decay=decay)
        if isinstance(by, str) or not by:
            raise ValueError(f"RoleBaseline: by takes a tuple of entries, got {by!r}.")
        self.by = tuple(by)
        self._by = [key if isinstance(key, str) else list(key) for key in by]
        self.decay = decay
        self.baselines: dict[Role, float] = {}
        """Of each role that was met; 0 for one that was not."""

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
