"""The rows of an episode as a tree, as a function of credit sees it.

Shape legend: T tokens of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_data import keys
from torchrl_data.batched_object import read_objects
from torchrl_data.missing_entry import MissingEntryError

from .group_queue import rows_of_member

_ENTRIES = (keys.PARENT_SEGMENT, keys.PARENT_TOKENS, keys.ROW_KIND, keys.AGENT)


class RowTree(NamedTuple):
    """The rows of one episode, in the order of ``segment``, and where each of them comes from."""

    rows: list[TensorDictBase]
    parents: list[int]
    """Of each row the number of the row that it left; -1 for the first one."""
    parent_tokens: list[int]
    """How many tokens of that row come before it."""
    kinds: list[str]
    """How each row began: main, parallel, sub_agent or compaction."""
    agents: list[str]
    """The author of each row; empty where the policy has no program."""

    @classmethod
    def of(cls, member: TensorDictBase, who: str) -> RowTree:
        """The tree of an episode.

        Args:
            member: of a group; where an episode has several rows, one for all of them.
            who: reads it, named in the error.

        Raises:
            MissingEntryError: an episode has several rows, and they do not say where they come
                from.
        """
        rows = list(rows_of_member(member))
        if len(rows) == 1:
            (row,) = rows
            return cls(rows, [-1], [0], [_text(row, keys.ROW_KIND, "main")], [_agent(row)])
        for row in rows:
            lacks = [key for key in _ENTRIES if row.get(key, None) is None]
            if lacks:
                raise MissingEntryError(
                    f"{who} reads {lacks}, which a row of an episode of {len(rows)} rows lacks. "
                    "Collectors write them: collect the rows anew, or take credit='episode'."
                )
        return cls(
            rows,
            [int(row[keys.PARENT_SEGMENT]) for row in rows],
            [int(row[keys.PARENT_TOKENS]) for row in rows],
            [_text(row, keys.ROW_KIND, "main") for row in rows],
            [_agent(row) for row in rows],
        )

    @property
    def children(self) -> list[list[int]]:
        """The numbers of the rows that left each row."""
        found: list[list[int]] = [[] for _ in self.rows]
        for number, parent in enumerate(self.parents):
            if parent >= 0:
                found[parent].append(number)
        return found

    def with_descendants(self, values: list[float]) -> list[float]:
        """Sum a value over each row and all rows that come from it.

        Args:
            values: one per row.
        """
        totals, children = list(values), self.children
        todo = [number for number, parent in enumerate(self.parents) if parent < 0]
        for number in todo:  # which grows: parents before their children
            todo += children[number]
        for number in reversed(todo):
            totals[number] += sum(totals[child] for child in children[number])
        return totals

    def later(self, to_go: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
        """Values of turns and of all later ones, of which rows that left after a turn are a part.

        Args:
            to_go: of each row the sum from the token's turn to the end of the row, ``[T]``.
            masks: of each row True on the sampled tokens, bool ``[T]``.

        Returns:
            The same with what comes in the rows that left this one after the turn.
        """
        first = [
            float(values[mask][0]) if mask.any() else 0.0
            for values, mask in zip(to_go, masks, strict=True)
        ]
        totals, children, found = self.with_descendants(first), self.children, []
        for number, (values, mask) in enumerate(zip(to_go, masks, strict=True)):
            values, ends = values.clone(), _turn_ends(mask)
            for child in children[number]:
                values[mask & (ends < self.parent_tokens[child])] += totals[child]
            found.append(values)
        return found


def read_dense(tree: RowTree, reward_key: NestedKey, mask_key: NestedKey, credit: str) -> Any:
    """Rewards by token and masks of sampled tokens of each row, ``[T]`` each.

    Raises:
        ValueError: there is no reward for each token.
    """
    rewards = [row.get(reward_key).reshape(-1) for row in tree.rows]
    masks = [row.get(mask_key).reshape(-1) for row in tree.rows]
    for mask, reward in zip(masks, rewards, strict=True):
        if len(mask) != len(reward):
            raise ValueError(
                f"credit {credit!r} needs a reward for each token: found {len(reward)} rewards "
                f"at {reward_key!r} for {len(mask)} tokens. Give rewards by turn, "
                "RewardFunctions(..., level='turn'), or take credit='episode'."
            )
    return rewards, masks


def _turn_ends(mask: Tensor) -> Tensor:
    """The last token of the turn of each sampled one, int64 ``[T]``."""
    place = torch.arange(len(mask))
    ends = torch.where(mask, len(mask), place - 1)  # of what is not sampled: the token before it
    after = torch.cat([ends, torch.tensor([len(mask) - 1])])
    return after.flip(0).cummin(0).values.flip(0)[1:]


def _text(row: TensorDictBase, key: str, default: str) -> str:
    return str(read_objects(row, key, default)[0])


def _agent(row: TensorDictBase) -> str:
    return _text(row, keys.AGENT, "")
