"""Pairs of the best and the worst rollout of each group, as they go into a replay buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase

from torchrl_data import keys
from torchrl_data.checks import NOT_NEGATIVE, check_numbers

from .estimators import TrajectoryReturn, read_entry
from .group_queue import num_rows
from .group_refill import GroupRefill
from .group_selector import GroupSelector


class PairSelector(GroupSelector):
    """Releases the best and the worst row of each complete group, as a pair for ``DPOLoss``.

    The policy then learns preferences among its own rollouts, token by token as it sampled them::

        buffer = ReplayBuffer(
            storage=LazyStackStorage(64), transform=PairSelector(group_size=8)
        )
        LLMCollector(env, policy, replay_buffer=buffer).collect()
        rows = RetrieveLogProb(reference)(buffer[:])  # the better row of each pair comes first
        DPOLoss(policy, beta=0.1)(rows).total().backward()

    Read the buffer in order, as ``buffer[:]``: rows that are drawn one by one are no pairs, which
    the loss refuses. A group whose returns are all equal gives nothing; nor does a rollout without
    a return or a sampled token, or an episode of several rows, which no single row stands for. Of
    equal returns the row that came first is taken.

    Args:
        group_size: rows of a complete group.
        min_difference: of the two returns, at least.
        group_key: int64, the group's id, which becomes that of the pair.
        reward_key: ``[1, 1]``, or dense ``[T, 1]``.
        scorable_key: bool; False where no reward could be given. Optional in the rows.
        trajectory_return: how a dense reward becomes one number: ``"sum"``, ``"mean"``,
            ``"max"``.
        refill: another group is asked for in the place of one that gives nothing, which all
            collectors answer; ``None``: none is.
        max_pending_groups: more incomplete groups than this, and the oldest expires.
        expire_after_rows: a group expires once so many rows have come in since its first one.

    Raises:
        ValueError: a number is out of range, or a name is unknown.

    See Also:
        Guo et al., 2024 (online DPO), arXiv:2402.04792.

    Example:
        >>> from tensordict import lazy_stack
        >>> selector = PairSelector(group_size=4)
        >>> rewards = [torch.tensor([[value]]) for value in (0.25, 0.75, 0.0, 0.5)]
        >>> rows = [TensorDict({"reward": each, "group_id": torch.tensor(7)}) for each in rewards]
        >>> pair = selector.inv(lazy_stack(rows))
        >>> pair["reward"].flatten(), pair["chosen"].flatten(), pair["pair_id"].flatten()
        (tensor([0.7500, 0.0000]), tensor([ True, False]), tensor([7, 7]))
    """

    def __init__(
        self,
        group_size: int,
        *,
        min_difference: float = 0.0,
        group_key: NestedKey = keys.GROUP_ID,
        reward_key: NestedKey = keys.REWARD,
        scorable_key: NestedKey = keys.SCORABLE,
        trajectory_return: TrajectoryReturn | str = "sum",
        refill: GroupRefill | None = None,
        max_pending_groups: int = 1024,
        expire_after_rows: int | None = None,
    ) -> None:
        super().__init__(
            refill=refill,
            group_key=group_key,
            reward_key=reward_key,
            scorable_key=scorable_key,
            trajectory_return=trajectory_return,
            max_pending_groups=max_pending_groups,
            expire_after_rows=expire_after_rows,
            group_size=group_size,
            total_dialog_turns=None,
        )
        if group_size < 2:
            raise ValueError(
                f"PairSelector: a pair needs a group_size of 2 or more, got {group_size}."
            )
        self.min_difference: float = self._checked_change("min_difference", min_difference)

    changeable = frozenset({"min_difference", "refill"})

    def _checked_change(self, name: str, value: Any) -> Any:
        if name == "min_difference":
            check_numbers(self._get_name(), NOT_NEGATIVE, min_difference=value)
        return super()._checked_change(name, value)

    @property
    def num_released(self) -> int:
        """See the base class."""
        return 2

    def _select(self, members: Sequence[TensorDictBase]) -> list[TensorDictBase]:
        whole = [member for member in members if num_rows(member) == 1 and _has_answer(member)]
        returns = [(self._return(member), member) for member in whole]
        scored = [pair for pair in returns if not math.isnan(pair[0])]
        if not scored:
            return []
        best, worst = (choose(scored, key=lambda pair: pair[0]) for choose in (max, min))
        difference = best[0] - worst[0]
        is_pair = difference > 0 and difference >= self.min_difference
        return [best[1], worst[1]] if is_pair else []

    def _released(self, selected: Sequence[TensorDictBase]) -> list[TensorDictBase]:
        rows = [row.copy() for row in super()._released(selected)]
        for place, row in enumerate(rows):
            group_id = int(read_entry(row, self.group_key, self._get_name()))
            row[keys.PAIR_ID] = torch.tensor([group_id])
            row[keys.CHOSEN] = torch.tensor([place == 0])
        return rows


def _has_answer(row: TensorDictBase) -> bool:
    """Return whether the policy sampled a token; where no mask says so, it is taken to have."""
    mask = row.get(keys.ASSISTANT_MASK, None)
    return mask is None or bool(mask.any())
