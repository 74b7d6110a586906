"""Prompt, response and full as plain columns: what the classes of the layout are made of.

A column is a list of one value per row: token ids, int64 ``[T]``, or strings.

Shape legend: B rows, T tokens of a row (ragged), P and R tokens of the longest prompt and response.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from torchrl_data.conversation.conversations import Conversations, EncodedMessages, Source
from torchrl_data.conversation.record import Message
from torchrl_data.keys import FULL, PROMPT, RESPONSE
from torchrl_data.ragged.packed import pad

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torchrl_data.templates.encoder import ConversationEncoder

Columns = dict[str, list[Tensor]]
PARTS: Final = (PROMPT, RESPONSE, FULL)
"""Names of the three parts."""


def conversation_columns(conversations: Conversations) -> Columns:
    """The token ids of conversations, exactly as they hold them."""
    rows = range(len(conversations))
    return split_columns(
        [conversations.token_ids(i) for i in rows],
        [conversations.position(i).response_start for i in rows],
    )


def split_columns(full: Sequence[Tensor], starts: Sequence[int]) -> Columns:
    """The three parts of full rows whose responses start somewhere."""
    pairs = list(zip(full, starts, strict=True))
    return {
        PROMPT: [row[:start] for row, start in pairs],
        RESPONSE: [row[start:] for row, start in pairs],
        FULL: list(full),
    }


def joined_columns(prompt: Sequence[Tensor], response: Sequence[Tensor]) -> Columns:
    """The three parts of prompts and their responses."""
    full = [torch.cat([p, r]) for p, r in zip(prompt, response, strict=True)]
    return {PROMPT: list(prompt), RESPONSE: list(response), FULL: full}


def decode_columns(
    columns: Mapping[str, Sequence[Tensor]],
    tokenizer: "PreTrainedTokenizerBase",
    skip_special_tokens: bool,
) -> dict[str, list[str]]:
    """The text of each column, spaces kept as they are."""
    return {
        name: tokenizer.batch_decode(
            [row.tolist() for row in rows],
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        for name, rows in columns.items()
    }


def encode_columns(
    texts: Mapping[str, Sequence[str]], tokenizer: "PreTrainedTokenizerBase"
) -> Columns:
    """Tokenise prompt and response each by itself; full is their concatenation."""
    columns = {}
    for name, rows in texts.items():
        encoded = tokenizer(list(rows), add_special_tokens=False)["input_ids"]
        columns[name] = [torch.tensor(ids, dtype=torch.int64) for ids in encoded]  # type: ignore[union-attr]
    if PROMPT in columns and RESPONSE in columns:
        return joined_columns(columns[PROMPT], columns[RESPONSE])
    return columns


class PaddedColumns(NamedTuple):
    """Dense parts, prompts padded on the left and responses on the right."""

    prompt: Tensor
    """int64 ``[B, P]``."""
    response: Tensor
    """int64 ``[B, R]``."""
    attention_mask: Tensor
    """bool ``[B, P + R]``, True on tokens."""


def pad_columns(
    prompts: Sequence[Tensor], responses: Sequence[Tensor], pad_token_id: int
) -> PaddedColumns:
    """Pad prompts on the left and responses on the right."""
    real = [
        pad([torch.ones_like(row, dtype=torch.bool) for row in rows], value=False, side=side)
        for rows, side in ((prompts, "left"), (responses, "right"))
    ]
    return PaddedColumns(
        pad(prompts, value=pad_token_id, side="left"),
        pad(responses, value=pad_token_id),
        torch.cat(real, -1),
    )


def unpad_columns(full: Tensor, attention_mask: Tensor, width: int) -> Columns:
    """Undo :func:`pad_columns`; ``width`` is that of the padded prompts."""
    rows = list(zip(full, attention_mask, strict=True))
    return joined_columns(
        [ids[:width][mask[:width]] for ids, mask in rows],
        [ids[width:][mask[width:]] for ids, mask in rows],
    )


def chat_columns(
    prompt: Sequence[Sequence[Message]] | None,
    full: Sequence[Sequence[Message]] | None,
    encoder: "ConversationEncoder",
) -> Columns:
    """Token ids of chats; the response is what the full one has beyond the prompt."""
    columns: dict[str, Any] = {}
    if prompt is not None:
        encoded = encoder.encode_chats(prompt, add_generation_prompt=True)
        columns[PROMPT] = [torch.tensor(row.ids, dtype=torch.int64) for row in encoded]
    if full is not None:
        encoded = encoder.encode_chats(full)
        columns[FULL] = [
            torch.tensor(_until_answered(row, chat), dtype=torch.int64)
            for row, chat in zip(encoded, full, strict=True)
        ]
    if len(columns) < 2:
        return columns
    for row, (start, ids) in enumerate(zip(columns[PROMPT], columns[FULL], strict=True)):
        if not torch.equal(ids[: len(start)], start):
            raise ValueError(
                f"Row {row}: the full conversation does not begin with the tokens of the prompt "
                f"({len(start)} tokens), so there is no response to tell apart. The messages of "
                "the prompt must be the first of the full conversation."
            )
    return split_columns(columns[FULL], [len(start) for start in columns[PROMPT]])


def _until_answered(encoded: EncodedMessages, chat: Sequence[Message]) -> list[int]:
    """Tokens up to the end of the assistant's last turn, where a policy's response ends."""
    if chat[-1]["role"] != "assistant" or Source.MODEL not in encoded.sources:
        return encoded.ids
    return encoded.ids[: len(encoded.ids) - encoded.sources[::-1].index(Source.MODEL)]
