"""What a task brings: rows to train and to be tested on, an environment, demonstrations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torchrl_data.conversation.conversations import Message

Row = dict[str, Any]


class Task(NamedTuple):
    """Everything about a task that a training script needs."""

    name: str
    environment: Callable[[], Any] | Mapping[str, Callable[[], Any]]
    """Makes the environment of one rollout, or several by name; see ``EnvironmentTools``."""
    train_rows: Sequence[Row]
    held_out_rows: Sequence[Row]
    """Rows that are not trained on."""
    demonstrations: Sequence[Sequence[Message]]
    """Conversations about training rows that show the format, and little of the skill."""
    max_turns: int
    """Most turns of the policy in an episode."""
    max_new_tokens: int
    """Most tokens of a turn, for a model whose tokenizer was trained on the demonstrations."""
    metrics: Sequence[Callable[..., Any]] = ()
    """Reward functions that are only logged."""
    isolated: str = r"\d"
    """What a tokenizer made for this task never merges, a regular expression."""


def unique_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows without repeated prompts, in order."""
    return list({str(row["prompt"]): row for row in rows}.values())


def split_rows(rows: Sequence[Row], num_held_out: int) -> tuple[list[Row], list[Row]]:
    """Rows without repeated prompts, split into training and held-out rows.

    Args:
        rows: with a ``prompt`` each.
        num_held_out: how many are held out.

    Returns:
        Training rows and held-out rows; no prompt is in both.

    Raises:
        ValueError: too few different prompts are there to hold that many out and train on others.
    """
    distinct = unique_rows(rows)
    if len(distinct) < 2 * num_held_out:
        raise ValueError(
            f"Only {len(distinct)} of {len(rows)} rows have different prompts, too few to hold "
            f"{num_held_out} out. Generate more rows or hold out fewer."
        )
    return distinct[num_held_out:], distinct[:num_held_out]
