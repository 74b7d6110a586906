"""Answers that are labelled one by one: desirable, or not.

Shape legend: T tokens of a row.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from .answers import read_completion, train_answer
from .conversation_io import row_tensordicts
from .keys import ASSISTANT_MASK, ATTENTION_MASK, IMAGES, LABEL, MISMATCHED, TOKENS_FULL
from .messages import Message
from .preferences import COLUMNS, read_pair
from .templates.demonstrations import encode_demonstrations
from .templates.encoder import ConversationEncoder

_LABELS: Final = {"true": True, "1": True, "false": False, "0": False}
"""Labels by their texts, which a CSV file has."""


class LabelledAnswer(NamedTuple):
    """A conversation of which the end is an answer, and whether that is one that is wanted."""

    messages: list[Message]
    """The prompt, then the answer."""
    num_prompt: int
    """Messages of the prompt; what the assistant says in them is not trained."""
    label: bool
    """True where the answer is desirable."""


def read_labelled(row: Mapping[str, Any], *, number: int | None = None) -> list[LabelledAnswer]:
    """Read a row of labelled answers, as TRL reads it, or a pair of answers as two of them.

    Args:
        row: ``prompt`` is the text of a user, or a list of messages; ``completion`` is a text of
            the assistant, or a list of messages; ``label`` is true where it is desirable. A row
            with ``chosen`` and ``rejected`` instead is a pair, as :func:`read_pair` reads it.
        number: of the row, for errors.

    Returns:
        The answer; of a pair the better one, which is desirable, and the other one, which is not.

    Raises:
        ValueError: a column is missing or of another form.
        TypeError: a message has the wrong form.

    Example:
        >>> [answer] = read_labelled({"prompt": "2 + 2?", "completion": "five", "label": False})
        >>> [message["content"] for message in answer.messages], answer.num_prompt, answer.label
        (['2 + 2?', 'five'], 1, False)
        >>> pair = {"prompt": "2 + 2?", "chosen": "4", "rejected": "five"}
        >>> [answer.label for answer in read_labelled(pair)]
        [True, False]
    """
    who = "the row" if number is None else f"row {number}"
    if row.get("completion") is None and any(row.get(name) is not None for name in COLUMNS):
        pair = read_pair(row, number=number)
        sides = (pair.chosen, True), (pair.rejected, False)
        return [LabelledAnswer(chat, pair.num_shared, label) for chat, label in sides]
    label = row.get("label")
    is_desirable = _LABELS.get(str(label).lower())
    if is_desirable is None:
        raise ValueError(
            f"{who} has {label!r} in 'label', which says whether the answer is desirable: true or "
            f"false. Its columns are {sorted(row)}. A row has 'prompt', 'completion' and 'label', "
            "or is a pair with 'chosen' and 'rejected'."
        )
    return [LabelledAnswer(*read_completion(row, number=number), is_desirable)]


def kto_rows(
    encoder: ConversationEncoder,
    rows: Sequence[Mapping[str, Any] | LabelledAnswer],
    *,
    tools: Sequence[Sequence[dict[str, Any]] | None] | None = None,
    first_row: int = 0,
    mismatched: bool = True,
    seed: int = 0,
) -> list[TensorDictBase]:
    """Rows of labelled answers, as :class:`~objectives.KTOLoss` reads them.

    Args:
        encoder: with the chat template.
        rows: as :func:`read_labelled` reads them.
        tools: JSON schemas that the template shows, per row.
        first_row: the number of the first row, for errors.
        mismatched: whether each answer is followed by a row of its prompt with the answer of
            another one; see :func:`with_mismatched`. Those of one step are to be drawn together.
        seed: of which answers these are.

    Returns:
        One for each answer, with the entries of :func:`~torchrl_data.row_tensordicts`, ``label``
        and ``mismatched``, each followed by its mismatched row.

    Raises:
        ValueError: as :func:`read_labelled`, :func:`~torchrl_data.encode_demonstrations` and
            :func:`with_mismatched`.
        TypeError: the same.

    Example:
        >>> from torchrl_data import ConversationEncoder
        >>> given = [("2 + 2?", "4", True), ("1 + 1?", "five", False)]
        >>> data = [{"prompt": p, "completion": c, "label": label} for p, c, label in given]
        >>> rows = kto_rows(ConversationEncoder(tokenizer), data)
        >>> [row["label"].item() for row in rows], [row["mismatched"].item() for row in rows]
        ([True, True, False, False], [False, True, False, True])
        >>> tokenizer.decode(rows[1]["tokens", "full"][rows[1]["masks", "all_assistant_mask"]])
        'five<|im_end|>'
    """
    found: list[TensorDictBase] = []
    for place, given in enumerate(rows):
        number = first_row + place
        is_read = isinstance(given, LabelledAnswer)
        schemas = None if tools is None else [tools[place]]
        for answer in [given] if is_read else read_labelled(given, number=number):
            options: Any = {"tools": schemas, "first_row": number}
            [row] = row_tensordicts(encode_demonstrations(encoder, [answer.messages], **options))
            train_answer(row, answer.messages, answer.num_prompt, who=f"row {number}")
            label_row(row, answer.label)
            found.append(row)
    if not mismatched:
        return found
    return [row for two in with_mismatched(found, seed=seed) for row in two]


def label_row(row: TensorDictBase, label: bool, *, mismatched: bool = False) -> None:
    """Write what a row is.

    Args:
        row: of an answer.
        label: whether it is desirable.
        mismatched: whether it is the answer to another prompt.
    """
    row[LABEL] = torch.tensor([label])
    row[MISMATCHED] = torch.tensor([mismatched])


def with_mismatched(
    rows: Sequence[TensorDictBase], *, seed: int = 0, max_tokens: int | None = None
) -> list[tuple[TensorDictBase, TensorDict]]:
    """Each labelled row, and its prompt with the answer to another prompt.

    The log-ratios of policy and reference of such answers say how far the two are apart, which is
    what KTO compares answers with. The two rows begin with the same tokens, which a reference that
    scores both reads once.

    Args:
        rows: with a label, and trained tokens, from the first of which on they are an answer.
        seed: the rows are put in an order that follows from it, in which each gets the answer of
            the last one before it that has another prompt.
        max_tokens: most tokens of a row; an answer is cut where the other prompt is too long.

    Returns:
        The two of each row, in the order of ``rows``.

    Raises:
        ValueError: all prompts are the same, a row has no trained token, or it has images.

    See Also:
        Ethayarajh et al., 2024, arXiv:2402.01306, section 4.2.
    """
    if not rows:
        return []
    parts = [_prompt_and_answer(row, place) for place, row in enumerate(rows)]
    prompts = [prompt[0].numpy().tobytes() for prompt, _ in parts]
    if len(set(prompts)) < 2:
        raise ValueError(
            f"All {len(rows)} labelled answers are to the same prompt, so that there is no answer "
            "to another one, with which KTO estimates how far policy and reference are apart. Give "
            "answers to more prompts, or take loss_function='apo_zero_unpaired', which needs none."
        )
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    last = [0] * len(order)  # the last one before each, in this order, with another prompt
    for at in (*range(len(order)), *range(len(order))):  # twice around
        place, before = order[at], order[at - 1]
        last[place] = before if prompts[before] != prompts[place] else last[before]
    found = []
    for place, row in enumerate(rows):
        ids, mask = (
            torch.cat([before, answer])[:max_tokens]
            for before, answer in zip(parts[place][0], parts[last[place]][1], strict=True)
        )
        made = TensorDict({TOKENS_FULL: ids, ASSISTANT_MASK: mask})
        made[ATTENTION_MASK] = torch.ones_like(mask)
        label_row(made, bool(row[LABEL]), mismatched=True)
        found.append((row, made))
    return found


def _prompt_and_answer(row: TensorDictBase, place: int) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens and assistant mask of what comes before the first trained token, and of the rest."""
    mask = row[ASSISTANT_MASK]
    if not bool(mask.any()):
        raise ValueError(f"Labelled row {place} has no trained token: leave it out.")
    if row.get(IMAGES, None) is not None:
        raise ValueError(
            f"Labelled row {place} has images, which answers to other prompts can't be made of. "
            "Take loss_function='apo_zero_unpaired', which needs none."
        )
    first = int(mask.int().argmax())
    columns = row[TOKENS_FULL], mask
    return [each[:first] for each in columns], [each[first:] for each in columns]
