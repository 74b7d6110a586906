"""Preferences: two answers to one prompt, of which one is the better.

Shape legend: P pairs, B rows, two of each pair.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, Final, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from .answers import messages_of, train_answer
from .conversation_io import row_tensordicts
from .keys import CHOSEN, MARGIN, PAIR_ID
from .messages import Message, check_messages
from .templates.demonstrations import encode_demonstrations
from .templates.encoder import ConversationEncoder

COLUMNS: Final = ("chosen", "rejected")


class PreferencePair(NamedTuple):
    """Two conversations that begin alike; from there on the assistant goes two ways."""

    chosen: list[Message]
    """With the better answer, whole."""
    rejected: list[Message]
    """With the other one."""
    num_shared: int
    """Messages that both begin with; what the assistant says in them is not trained."""
    margin: float | None = None
    """By how much the better answer is to lead, where the data say it; of reward models."""


def read_pair(row: Mapping[str, Any], *, number: int | None = None) -> PreferencePair:
    """Read a row of preference data, in any of the forms that TRL reads.

    Args:
        row: ``chosen`` and ``rejected`` are texts of the assistant, or lists of messages;
            ``prompt`` is the text of a user, or a list of messages. Without it the two are whole
            conversations; so they are where they begin with it. ``margin``, a number, says by how
            much the better answer is to lead.
        number: of the row, for errors.

    Returns:
        The pair.

    Raises:
        ValueError: a column is missing or of another form, both answers are the same, the two
            conversations part before the assistant says something, or the margin is negative or no
            number.
        TypeError: a message has the wrong form.

    Example:
        >>> pair = read_pair({"prompt": "2 + 2?", "chosen": "4", "rejected": "five"})
        >>> [message["content"] for message in pair.rejected], pair.num_shared
        (['2 + 2?', 'five'], 1)
    """
    who = "the row" if number is None else f"row {number}"
    if missing := [name for name in COLUMNS if row.get(name) in (None, "", [])]:
        raise ValueError(
            f"{who} of the preferences has nothing in {missing}; its columns are {sorted(row)}. A "
            "row has the better answer in 'chosen' and the other one in 'rejected', and what they "
            "answer in 'prompt', or at the beginning of both."
        )
    what = f"{who} of the preferences"
    prompt = messages_of(row.get("prompt") or [], "prompt", "user", what)
    chosen, rejected = (messages_of(row[name], name, "assistant", what) for name in COLUMNS)
    if prompt and not all(each[: len(prompt)] == prompt for each in (chosen, rejected)):
        if {each[0]["role"] for each in (chosen, rejected)} != {"assistant"}:
            raise ValueError(
                f"{who} of the preferences: 'chosen' and 'rejected' begin with messages of "
                f"{[each[0]['role'] for each in (chosen, rejected)]}, which are not those of "
                "'prompt'. Give answers alone, or conversations that begin with the prompt."
            )
        chosen, rejected = ([*prompt, *each] for each in (chosen, rejected))
    pair = pair_of(chosen, rejected, number=number)
    return pair._replace(margin=_margin_of(row.get("margin"), who))


def _margin_of(value: Any, who: str) -> float | None:
    """Read the column ``margin``, which may be empty; in a file of CSV it is a text."""
    if value is None:
        return None
    number = value
    if isinstance(value, str):
        with suppress(ValueError):
            number = float(value)
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not math.isfinite(number) or number < 0:
        raise ValueError(
            f"{who} of the preferences: 'margin' says by how much the better answer is to lead, a "
            f"finite number of at least 0, got {value!r}."
        )
    return float(number)


def pair_of(
    chosen: Sequence[Message], rejected: Sequence[Message], *, number: int | None = None
) -> PreferencePair:
    """Make a pair of two conversations.

    Args:
        chosen: with the better answer, whole.
        rejected: with the other one.
        number: of the row that they are of, for errors.

    Raises:
        ValueError: both are the same, or they part before the assistant says something.
        TypeError: a message has the wrong form.
    """
    for messages in (chosen, rejected):
        check_messages(messages, row=number)
    alike = takewhile(lambda two: two[0] == two[1], zip(chosen, rejected, strict=False))
    pair = PreferencePair([*chosen], [*rejected], len([*alike]))
    _check_parting(pair, "the row" if number is None else f"row {number}")
    return pair


def _check_parting(pair: PreferencePair, who: str) -> None:
    """Check that both go on with the assistant where they part."""
    if pair.chosen == pair.rejected:
        raise ValueError(
            f"{who} of the preferences: 'chosen' and 'rejected' are the same, so that nothing can "
            "be preferred. Leave it out."
        )
    nexts = [m[pair.num_shared]["role"] if len(m) > pair.num_shared else None for m in pair[:2]]
    if pair.num_shared == 0 or nexts != ["assistant"] * 2:
        what = [role or "nothing more" for role in nexts]
        raise ValueError(
            f"{who} of the preferences: 'chosen' and 'rejected' have {pair.num_shared} messages in "
            f"common, after which they go on with {what}. They answer the same prompt: what comes "
            "before the two answers is the same in both, and there the assistant speaks."
        )


def preference_rows(
    encoder: ConversationEncoder,
    pairs: Sequence[Mapping[str, Any] | PreferencePair],
    *,
    tools: Sequence[Sequence[dict[str, Any]] | None] | None = None,
    first_row: int = 0,
) -> list[TensorDict]:
    """Rows of preferences, as :class:`~objectives.DPOLoss` and ``RewardModelLoss`` read them.

    Args:
        encoder: with the chat template.
        pairs: as :func:`read_pair` reads them.
        tools: JSON schemas that the template shows, per pair.
        first_row: the number of the first pair, for errors.

    Returns:
        Two for each pair, the better answer first, with the entries of
        :func:`~torchrl_data.row_tensordicts`, ``pair_id`` and ``chosen``, and ``margin`` where a
        pair has one (0 of the others). They hold all that the template writes; what the assistant
        says from where the two part is trained.

    Raises:
        ValueError: as :func:`read_pair` and :func:`~torchrl_data.encode_demonstrations`.
        TypeError: the same.

    Example:
        >>> from torchrl_data import ConversationEncoder
        >>> pair = {"prompt": "2 + 2?", "chosen": "4", "rejected": "five"}
        >>> better, other = preference_rows(ConversationEncoder(tokenizer), [pair])
        >>> tokenizer.decode(other["tokens", "full"][other["masks", "all_assistant_mask"]])
        'five<|im_end|>'
        >>> better["pair_id"].item(), better["chosen"].item(), other["chosen"].item()
        (0, True, False)
    """
    read = [
        pair if isinstance(pair, PreferencePair) else read_pair(pair, number=number)
        for number, pair in enumerate(pairs, first_row)
    ]
    sides = []
    for name in COLUMNS:
        try:
            chats = [getattr(pair, name) for pair in read]
            options: Any = {"tools": tools, "first_row": first_row, "keep_end": True}
            sides.append(encode_demonstrations(encoder, chats, **options))
        except ValueError as error:
            raise ValueError(f"{name!r} of the preferences: {error}") from error
    better, other = map(row_tensordicts, sides)
    rows = [row for two in zip(better, other, strict=True) for row in two]
    chats = [chat for pair in read for chat in (pair.chosen, pair.rejected)]
    for place, (row, chat) in enumerate(zip(rows, chats, strict=True)):
        pair = place // 2
        train_answer(row, chat, read[pair].num_shared, who=f"row {first_row + pair}")
    mark_pairs(rows, [pair.margin for pair in read])
    return rows


def mark_pairs(rows: Sequence[TensorDictBase], margins: Sequence[float | None] = ()) -> None:
    """Write which rows are pairs.

    Args:
        rows: two of each pair, the better answer first.
        margins: of each pair; where one has any, the others get 0.
    """
    has_margins = any(margin is not None for margin in margins)
    for place, row in enumerate(rows):
        pair, side = divmod(place, 2)
        row[PAIR_ID] = torch.tensor([pair])
        row[CHOSEN] = torch.tensor([side == 0])
        if has_margins:
            row[MARGIN] = torch.tensor([margins[pair] or 0.0])
