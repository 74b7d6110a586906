"""Jobs that all ranks of a run do together; rank 0 tells the others."""

from enum import Enum, auto
from typing import Any

from objectives import Ranks


class RankJob(Enum):
    """Jobs that all ranks of a run do together, in the order in which a run comes to them."""

    DIGEST_FROZEN = auto()
    """Of the weights that are not trained, which a checkpoint has to have in common."""
    OPEN_CHECKPOINTS = auto()
    LOAD_CHECKPOINT = auto()
    GIVE_WEIGHTS = auto()
    """To rank 0, which hands them to what samples."""
    SCORE_ROWS = auto()
    """Log-probs of rows, or rewards, by the model as it is."""
    JUDGE_ROWS = auto()
    """The critic's values of a step's rows."""
    TAKE_ROWS = auto()
    """Each its share of a step's rows."""
    TRAIN_PASS = auto()
    """An optimizer step over them."""
    SAVE_CHECKPOINT = auto()
    GIVE_ALL = auto()
    """What is trained and what is frozen, at the end."""
    GIVE_CRITIC = auto()
    """Its weights, at the end."""


def tell(ranks: Ranks, job: RankJob | None, *args: Any, **further: Any) -> None:
    """Let the other ranks do a job that this one, rank 0, is about to do.

    Args:
        ranks: of the run.
        job: what; ``None`` lets them end.
        *args: for theirs; can be pickled.
        **further: the same, by name.
    """
    if ranks.size > 1:
        ranks.broadcast((job, args, further))
