"""Credit over the tree of an episode's rows: what a row is paid by, and whom it is compared with.

Shape legend: T tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_data import keys

from .estimators import (
    WHO,
    AdvantageEstimator,
    DecoupledSources,
    EstimatorOver,
    GroupMean,
    LeaveOneOut,
    MaxRL,
    RewardedGroup,
    TurnCredit,
)
from .rollout_tree import RolloutTreeCredit
from .row_tree import RowTree, read_dense

CreditFunction = Callable[[RowTree, float], Sequence[float | Tensor]]
"""From the tree of an episode and its advantage to one for each row: a number, or ``[T]``."""


class _Unit(NamedTuple):
    """Rows of an episode that get one advantage."""

    member: int
    rows: list[int]
    peers: Hashable
    """Units of a group with the same value are compared."""
    value: float
    """What it is paid by; NaN where the episode could not be scored."""


@dataclass(frozen=True, kw_only=True)
class _UnitCredit(AdvantageEstimator):
    """Credit of parts of episodes, each compared with the like parts of its group.

    Args:
        estimator: what makes advantages of them: GroupMean, LeaveOneOut or MaxRL.
        reward_key: ``[1, 1]``, or dense ``[T, 1]``.
        assistant_mask_key: bool ``[T]``, True on what was sampled.

    Raises:
        ValueError: the estimator goes by something else than returns.
    """

    estimator: AdvantageEstimator = field(default_factory=GroupMean)
    reward_key: NestedKey = keys.REWARD
    assistant_mask_key: NestedKey = keys.ASSISTANT_MASK

    def __post_init__(self) -> None:
        if not isinstance(self.estimator, GroupMean | LeaveOneOut | MaxRL):
            raise ValueError(
                f"{type(self).__name__} compares parts of episodes by their returns, by which "
                f"{type(self.estimator).__name__} does not go: use the estimators 'group', 'rloo' "
                "or 'maxrl'."
            )

    def _units(self, member: int, tree: RowTree, value: float) -> list[_Unit]:
        raise NotImplementedError

    def _compared(self, group: RewardedGroup) -> tuple[list[RewardedGroup], list[list[_Unit]]]:
        """The units of a group, by whom they are compared with."""
        by_peers: dict[Hashable, list[_Unit]] = {}
        for number, (member, value) in enumerate(zip(group.rows, group.returns, strict=True)):
            for unit in self._units(number, RowTree.of(member, WHO), value):
                by_peers.setdefault(unit.peers, []).append(unit)
        groups = [
            RewardedGroup(
                (group.group_id, peers),
                [group.rows[unit.member] for unit in units],
                [unit.value for unit in units],
            )
            for peers, units in by_peers.items()
        ]
        return groups, list(by_peers.values())

    def by_row(self, groups: Sequence[RewardedGroup]) -> list[list[Tensor]]:
        """See the base class."""
        compared: list[RewardedGroup] = []
        places: list[tuple[int, list[int]]] = []
        found: list[dict[int, Tensor]] = []
        for group in groups:
            begin = len(found)
            found += [{} for _ in group.rows]
            own, units = self._compared(group)
            compared += own
            places += [(begin + unit.member, unit.rows) for each in units for unit in each]
        for (member, rows), advantage in zip(
            places, self.estimator.advantages(compared), strict=True
        ):
            found[member] |= dict.fromkeys(rows, advantage)
        return [[own[row] for row in sorted(own)] for own in found]

    def is_flat(self, group: RewardedGroup) -> bool:
        """See the base class; here, no part is better than those that it is compared with."""
        return all(map(self.estimator.is_flat, self._compared(group)[0]))


@dataclass(frozen=True, kw_only=True)
class AgentCredit(_UnitCredit):
    """Each agent of a program by itself: its rows are compared with those of the same agent.

    All rows of an episode are paid by its reward, or, where agents have rewards of their own
    (``agent_reward``, of ``AgentProgram(agents=[...])``), by their agent's. The mean and the
    deviation are those of the episodes of the group in which the agent took part, each counted
    once.

    See Also:
        Feng et al., 2026 (Dr. MAS), arXiv:2602.08847.
    """

    def _units(self, member: int, tree: RowTree, value: float) -> list[_Unit]:
        if not all(tree.agents):
            raise ValueError(
                f"{WHO}: credit='agent' compares the rows of one agent, and a row names none: it "
                "is of no AgentProgram. Take credit='episode'."
            )
        rows: dict[str, list[int]] = {}
        for number, agent in enumerate(tree.agents):
            rows.setdefault(agent, []).append(number)
        return [
            _Unit(member, own, agent, _own_reward(tree.rows[own[0]], value))
            for agent, own in rows.items()
        ]


def _own_reward(row: TensorDictBase, value: float) -> float:
    """Return the reward of a row's agent: its own one, where agents have that."""
    own = row.get(keys.AGENT_REWARD, None)
    return value if own is None or math.isnan(value) else float(own)


@dataclass(frozen=True, kw_only=True)
class BranchCredit(_UnitCredit):
    """Each row by what was rewarded in it and in the rows that come from it.

    It is compared with the rows of its group that began in the same way, by the same agent. Rewards
    have to be dense.
    """

    def _units(self, member: int, tree: RowTree, value: float) -> list[_Unit]:
        rewards, _ = read_dense(tree, self.reward_key, self.assistant_mask_key, "branch")
        totals = tree.with_descendants([float(reward.double().sum()) for reward in rewards])
        if math.isnan(value):
            totals = [math.nan] * len(totals)
        named = zip(tree.kinds, tree.agents, totals, strict=True)
        return [
            _Unit(member, [number], (kind, agent), total)
            for number, (kind, agent, total) in enumerate(named)
        ]


@dataclass(frozen=True, kw_only=True)
class FunctionCredit(EstimatorOver):
    """Credit by a function of yours, of the tree of an episode and the episode's advantage.

    Args:
        function: gives an advantage for each row, in order: a number, or one per token, ``[T]``.
        estimator: what the episode's advantage comes from.

    Raises:
        TypeError: the function can't be called.
        ValueError: the estimator does not give an advantage for each episode; or, when it is asked,
            the function gives something else than finite numbers for each row.

    Example:
        >>> def by_depth(tree, advantage):  # half as much for a row that left another one
        ...     return [advantage / (1 + (parent >= 0)) for parent in tree.parents]
        >>> FunctionCredit(function=by_depth).estimator
        GroupMean(scale='group')
    """

    function: CreditFunction
    estimator: AdvantageEstimator = field(default_factory=GroupMean)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"FunctionCredit takes a function, got {self.function!r:.80}.")
        without = isinstance(self.estimator, DecoupledSources) and self.estimator.weights is None
        if without or isinstance(self.estimator, (TurnCredit, *TREE_CREDITS)):
            raise ValueError(
                "FunctionCredit gets one advantage for each episode, which "
                f"{type(self.estimator).__name__} does not give"
                f"{' without weights' * without}: use another estimator."
            )

    def by_row(self, groups: Sequence[RewardedGroup]) -> list[list[Tensor]]:
        """See the base class."""
        members = [member for group in groups for member in group.rows]
        found = []
        for member, whole in zip(members, self.estimator.advantages(groups), strict=True):
            tree = RowTree.of(member, WHO)
            given = list(self.function(tree, float(whole)))
            if len(given) != len(tree.rows):
                raise ValueError(
                    f"{WHO}: {self._name} gave {len(given)} advantages for an episode of "
                    f"{len(tree.rows)} rows; it has to give one for each."
                )
            found.append([self._checked(*each) for each in zip(given, tree.rows, strict=True)])
        return found

    def _checked(self, given: Any, row: Any) -> Tensor:
        values, size = torch.as_tensor(given, dtype=torch.float32), len(row[keys.TOKENS_FULL])
        if (
            values.ndim and values.shape not in ((size,), (size, 1))
        ) or not values.isfinite().all():
            raise ValueError(
                f"{WHO}: {self._name} gave {given!r:.80} for a row of {size} tokens; an advantage "
                "is a finite number, or one for each token."
            )
        return values.reshape(-1, 1)

    @property
    def _name(self) -> str:
        return f"credit={getattr(self.function, '__name__', self.function)!s:.60}"


TREE_CREDITS: Final = (AgentCredit, BranchCredit, FunctionCredit, RolloutTreeCredit)
"""Estimators that give each row of an episode, or its tokens, advantages of their own."""
