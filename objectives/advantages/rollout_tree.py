"""Credit over a tree of rollouts: of each token, by all rollouts that come after it.

Shape legend: T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_data import keys
from torchrl_data.checks import one_of

from .estimators import (
    WHO,
    AdvantageEstimator,
    EstimatorOver,
    GroupMean,
    LeaveOneOut,
    MaxRL,
    RewardedGroup,
    read_entry,
)
from .group_queue import rows_of_member

Baseline = Literal["group", "siblings"]
BASELINES: Final[tuple[Baseline, ...]] = ("group", "siblings")


class _Rollout(NamedTuple):
    """A rollout of a group, in the tree that it is a part of."""

    id: int
    parent: int
    """The ``id`` of the rollout that it left; -1 for one that began with the prompt."""
    num_tokens: int
    """How many tokens of that one come before it."""
    lengths: list[int]
    """Tokens of each of its rows."""

    @classmethod
    def of(cls, member: TensorDictBase) -> _Rollout:
        """Read a rollout.

        Args:
            member: of a group; where it has several rows, one for all of them.

        Raises:
            MissingEntryError: it does not say which other one it left.
        """
        rows = list(rows_of_member(member))
        return cls(
            int(read_entry(rows[0], keys.EPISODE_ID, WHO)),
            int(read_entry(rows[0], keys.BRANCHED_FROM, WHO)),
            int(read_entry(rows[0], keys.BRANCHED_TOKENS, WHO)),
            [len(read_entry(row, keys.TOKENS_FULL, WHO)) for row in rows],
        )


class _Piece(NamedTuple):
    """Tokens of a rollout between two places where rollouts leave each other."""

    begin: int
    end: int
    members: set[int]
    """Numbers of the rollouts that they are a part of."""
    others: set[int]
    """Those that say something else where the piece begins."""


def _pieces(rollouts: Sequence[_Rollout]) -> list[list[_Piece]]:
    """The pieces of the own tokens of each rollout of a group, in order."""
    by_id = {rollout.id: number for number, rollout in enumerate(rollouts)}
    children: list[list[int]] = [[] for _ in rollouts]
    roots = []
    for number, rollout in enumerate(rollouts):
        parent = by_id.get(rollout.parent)
        (roots if parent is None else children[parent]).append(number)
    order = list(roots)
    for number in order:  # which grows: parents before their children
        order += children[number]
    below: list[set[int]] = [{number} for number in range(len(rollouts))]
    for number in reversed(order):
        below[number].update(*(below[child] for child in children[number]))
    found: list[list[_Piece]] = [[] for _ in rollouts]
    for number in order:
        rollout = rollouts[number]
        begin, through = 0, set(order)
        if (parent := by_id.get(rollout.parent)) is not None:
            begin = rollout.num_tokens
            through = next(piece.members for piece in found[parent] if piece.end == begin)
        ends = {rollouts[child].num_tokens for child in children[number]} | {sum(rollout.lengths)}
        for end in sorted(ends):
            later = (below[c] for c in children[number] if rollouts[c].num_tokens >= end)
            members = {number}.union(*later)
            found[number].append(_Piece(begin, end, members, through - members))
            begin, through = end, members
    return found


@dataclass(frozen=True, kw_only=True)
class RolloutTreeCredit(EstimatorOver):
    r"""Each token by the rewards of all rollouts that come after it, in a tree of rollouts.

    With :class:`~torchrl_envs.BranchRollouts` the rollouts of a group share beginnings, whose
    tokens were sampled once, and are trained once, in the row of the rollout that sampled them.
    With :math:`L(t)` the rollouts that token :math:`t` is a part of (the one that sampled it, and
    all that left it later), the advantage of the token is

    .. math:: A_t = \sum_{i \in L(t)} (a_i - b_t)

    where :math:`a_i` is what the estimator gives for the rewards of the group. With the baseline
    ``"group"`` :math:`b_t = 0`: the gradient is that of the rollouts trained apart from each other,
    each with all of its tokens. With ``"siblings"`` :math:`b_t` is the mean of the :math:`a_i` of
    the rollouts that pass through the state in which the token's branch begins and are not in
    :math:`L(t)`: what becomes of the episode where something else is said there. Before the first
    turn that is all other rollouts of the group.

    Args:
        estimator: what makes advantages of the rewards: GroupMean, LeaveOneOut or MaxRL.
        baseline: ``"group"`` or ``"siblings"``.

    Raises:
        ValueError: the estimator goes by something else than returns, or the baseline is unknown.

    See Also:
        Hou et al., 2025 (TreeRL), arXiv:2506.11902, section 3.2; Ji et al., 2025 (Tree-GRPO),
        arXiv:2509.21240, section 3.3; Kazemnejad et al., 2024 (VinePPO), arXiv:2410.01679.
    """

    estimator: AdvantageEstimator = field(default_factory=GroupMean)
    baseline: Baseline | str = "group"

    def __post_init__(self) -> None:
        one_of("baseline", self.baseline, BASELINES)
        if not isinstance(self.estimator, GroupMean | LeaveOneOut | MaxRL):
            raise ValueError(
                "RolloutTreeCredit adds up advantages of returns, which "
                f"{type(self.estimator).__name__} does not give: use the estimators 'group', "
                "'rloo' or 'maxrl'."
            )

    def by_row(self, groups: Sequence[RewardedGroup]) -> list[list[Tensor]]:
        """See the base class; ``[T, 1]`` each."""
        plain = iter(self.estimator.advantages(groups))
        found = []
        for group in groups:
            own = [float(next(plain)) for _ in group.rows]
            found += self._of_group(group, own)
        return found

    def _of_group(self, group: RewardedGroup, plain: Sequence[float]) -> Iterator[list[Tensor]]:
        """The advantages of the tokens of each rollout of a group, by its rows."""
        scored = {number for number, is_valid in enumerate(group.valid) if is_valid}
        rollouts = [_Rollout.of(member) for member in group.rows]
        for rollout, pieces in zip(rollouts, _pieces(rollouts), strict=True):
            advantage = torch.zeros(sum(rollout.lengths), 1)
            for piece in pieces:
                members, others = piece.members & scored, piece.others & scored
                base = sum(plain[i] for i in others) / len(others) if others else 0.0
                base = base if self.baseline == "siblings" else 0.0
                advantage[piece.begin : piece.end] = sum(plain[i] - base for i in members)
            yield list(advantage.split(rollout.lengths))
