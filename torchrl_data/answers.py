"""Answers that are to be learnt, and the prompts before them, as columns of data sets have them."""

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from .keys import ASSISTANT_MASK
from .messages import Message, check_messages


def read_completion(
    row: Mapping[str, Any], *, number: int | None = None
) -> tuple[list[Message], int]:
    """Read a row with the columns ``prompt`` and ``completion``, as TRL's data sets have them.

    Args:
        row: ``prompt`` is the text of a user, or a list of messages; ``completion`` is a text of
            the assistant, or a list of messages.
        number: of the row, for errors.

    Returns:
        The conversation, and how many messages of it are the prompt.

    Raises:
        ValueError: a column is missing or of another form.
        TypeError: a message has the wrong form.

    Example:
        >>> chat, num_prompt = read_completion({"prompt": "2 + 2?", "completion": "4"})
        >>> [message["role"] for message in chat], num_prompt
        (['user', 'assistant'], 1)
    """
    who = "the row" if number is None else f"row {number}"
    if missing := [name for name in ("prompt", "completion") if row.get(name) in (None, "", [])]:
        raise ValueError(f"{who} has nothing in {missing}; its columns are {sorted(row)}.")
    prompt = messages_of(row["prompt"], "prompt", "user", who)
    chat = [*prompt, *messages_of(row["completion"], "completion", "assistant", who)]
    check_messages(chat, row=number)
    if all(message["role"] != "assistant" for message in chat[len(prompt) :]):
        raise ValueError(f"{who}: the assistant says nothing in its completion. Leave it out.")
    return chat, len(prompt)


def messages_of(value: Any, name: str, role: str, who: str) -> list[Message]:
    """Read a column that holds a text or messages.

    Args:
        value: of the column.
        name: of the column.
        role: says a text.
        who: has it, for errors.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, Sequence) and all(isinstance(message, Mapping) for message in value):
        # Columns of data sets have every key that any message has.
        return [{k: v for k, v in m.items() if v is not None or k == "content"} for m in value]
    raise ValueError(
        f"{who}: {name!r} is a text or a list of messages, got {type(value).__name__}: "
        f"{value!r:.80}."
    )


def train_answer(
    row: TensorDictBase, chat: Sequence[Message], num_prompt: int, *, who: str
) -> None:
    """Train what the assistant says after the prompt, and nothing that it says in it.

    Args:
        row: of :func:`~torchrl_data.row_tensordicts`; its assistant mask is changed.
        chat: the conversation that it is of.
        num_prompt: so many messages of it are the prompt.
        who: the row, for errors.

    Raises:
        ValueError: the chat template writes a turn of the assistant in several pieces, so that
            nobody knows which tokens are the answer.
    """
    mask = row[ASSISTANT_MASK]
    turn = _turn_of(mask)
    is_said = [message["role"] == "assistant" for message in chat]
    if int(turn[-1]) != sum(is_said):
        raise ValueError(
            f"{who}: the chat template writes the {sum(is_said)} turns of the assistant in "
            f"{int(turn[-1])} pieces, of which it can't be told where the answer begins."
        )
    row[ASSISTANT_MASK] = mask & (turn > sum(is_said[:num_prompt]))


def _turn_of(mask: Tensor) -> Tensor:
    """The number, from 1, of the assistant's turn that each token lies in or after, ``[T]``."""
    begins = mask.clone()
    begins[1:] &= ~mask[:-1]
    return begins.cumsum(0)
