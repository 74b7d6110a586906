"""Origins of the rows of an episode, which are a tree.

Shape legend: T tokens of a row.
"""

from typing import Final, NamedTuple

import numpy as np

from torchrl_data.conversation import Conversations

MAIN: Final = "main"
PARALLEL: Final = "parallel"
SUB_AGENT: Final = "sub_agent"
COMPACTION: Final = "compaction"
ROW_KINDS: Final = (MAIN, PARALLEL, SUB_AGENT, COMPACTION)
"""How a row begins: it opens the episode; beside another one, from the same beginning or from one
of its own; as the conversation of another agent; or in place of another one, whose history was
shortened or rewritten."""


class RowOrigin(NamedTuple):
    """The place of a row in the tree of its episode."""

    number: int = 0
    """Of the row, in the order in which the rows of the episode began."""
    parent: int = -1
    """Number of the row that it left; -1 for the first one."""
    parent_tokens: int | None = 0
    """How many tokens of that row come before it; ``None`` for those that both begin with."""
    kind: str = MAIN
    """One of :data:`ROW_KINDS`."""
    agent: str = ""
    """Its author; empty where the policy has no program."""


def shared_beginning(row: Conversations, parent: Conversations) -> int:
    """Count the tokens that a row begins with as its parent does, before the policy samples in it.

    Args:
        row: a conversation.
        parent: a conversation.
    """
    mine = row.token_ids(0)[: row.num_tokens_before_policy(0)].numpy()
    theirs = parent.token_ids(0).numpy()
    size = min(len(mine), len(theirs))
    differs = np.flatnonzero(mine[:size] != theirs[:size])
    return int(differs[0]) if len(differs) else size
