"""Conversions between the layouts of a batch: messages, text, tokens; ragged and padded.

``full = prompt + response`` holds to the token in all of them.

Shape legend: B rows, T tokens of a row (ragged), P and R tokens of the longest prompt and response.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack
from torch import Tensor

from torchrl_data.conversation.conversations import Conversations, EncodedMessages, Source
from torchrl_data.conversation.messages import Message
from torchrl_data.history.history import History
from torchrl_data.history.rendering import encoder_for
from torchrl_data.keys import FULL, PROMPT, RESPONSE
from torchrl_data.ragged.packed import pad
from torchrl_data.ragged.ragged import entries_of, rows_of, value_stack

from .containers import PARTS, ChatHistory, LogProbs, Masks, Text, Tokens
from .export import conversations_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Conversations to everything ---------------------------------------------------------------------


def conversation_tokens(conversations: Conversations) -> tuple[Tokens, Masks, LogProbs]:
    """The ragged groups of conversations, with exactly the tokens that they hold.

    Args:
        conversations: B rows.

    Returns:
        Tokens, masks and log-probs, each ``[B, T]``.
    """
    rows = range(len(conversations))
    full = [conversations.token_ids(i) for i in rows]
    starts = [conversations.position(i).response_start for i in rows]
    tokens = _ragged_tokens(
        [ids[:start] for ids, start in zip(full, starts, strict=True)],
        [ids[start:] for ids, start in zip(full, starts, strict=True)],
    )
    masks = Masks.from_rows(
        all_attention_mask=[torch.ones_like(ids, dtype=torch.bool) for ids in full],
        all_assistant_mask=[conversations.assistant_mask(i) for i in rows],
    )
    log_probs = [conversations.log_probs(i) for i in rows]
    return (
        tokens,
        masks,
        LogProbs.from_rows(
            prompt=[row[:start] for row, start in zip(log_probs, starts, strict=True)],
            response=[row[start:] for row, start in zip(log_probs, starts, strict=True)],
            full=log_probs,
        ),
    )


def _ragged_tokens(prompt: Sequence[Tensor], response: Sequence[Tensor]) -> Tokens:
    full = [torch.cat([p, r]) for p, r in zip(prompt, response, strict=True)]
    return Tokens.from_rows(prompt=prompt, response=response, full=full)


# Tokens ------------------------------------------------------------------------------------------


def tokens_to_text(
    tokens: Tokens, tokenizer: "PreTrainedTokenizerBase", skip_special_tokens: bool
) -> Text:
    """See ``Tokens.to_text``."""
    if _is_padded(tokens):
        raise ValueError(
            "Padded tokens can't be decoded, as a pad id may be a real token too. Call "
            "to_ragged(masks) first."
        )
    columns = {
        name: tokenizer.batch_decode(
            [row.tolist() for row in rows_of(tokens, name)],
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        for name in _held(tokens)
    }
    return _text(columns)


def _is_padded(group: Any) -> bool:
    leaf = entries_of(group).get("padded", None)
    if leaf is None:
        return False
    data = leaf.tolist() if isinstance(leaf, NonTensorStack) else leaf.data
    return any(data) if isinstance(data, list) else bool(data)


def _held(group: Any) -> list[str]:
    names = set(entries_of(group).keys())
    return [name for name in PARTS if name in names]


def pad_tokens(tokens: Tokens, pad_token_id: int) -> tuple[Tokens, Masks]:
    """See ``Tokens.to_padded``."""
    prompts, responses = rows_of(tokens, PROMPT), rows_of(tokens, RESPONSE)
    prompt = pad(prompts, value=pad_token_id, side="left")
    response = pad(responses, value=pad_token_id)
    attention = torch.cat(
        [
            pad([torch.ones_like(r, dtype=torch.bool) for r in prompts], value=False, side="left"),
            pad([torch.ones_like(r, dtype=torch.bool) for r in responses], value=False),
        ],
        dim=-1,
    )
    size = torch.Size([len(prompts)])
    padded = Tokens(
        prompt=prompt,
        response=response,
        full=torch.cat([prompt, response], -1),
        padded=True,
        batch_size=size,
    )
    return padded, Masks(all_attention_mask=attention, padded=True, batch_size=size)


def unpad_tokens(tokens: Tokens, masks: Masks) -> Tokens:
    """See ``Tokens.to_ragged``."""
    entries = entries_of(tokens)
    width = entries.get(PROMPT).shape[-1]
    rows = list(zip(entries.get(FULL), entries_of(masks).get("all_attention_mask"), strict=True))
    return _ragged_tokens(
        [ids[:width][mask[:width]] for ids, mask in rows],
        [ids[width:][mask[width:]] for ids, mask in rows],
    )


# Text --------------------------------------------------------------------------------------------


def _text(columns: dict[str, list[str]]) -> Text:
    size = torch.Size([len(next(iter(columns.values())))])
    leaves = {name: value_stack(values) for name, values in columns.items()}
    return Text._from_tensordict(TensorDict(leaves, batch_size=size), {})


def _strings(text: Text, name: str) -> list[str]:
    value = getattr(text, name)
    return [value] if isinstance(value, str) else list(value)


def text_to_tokens(text: Text, tokenizer: "PreTrainedTokenizerBase") -> Tokens:
    """See ``Text.to_tokens``."""
    columns = {}
    for name in _held(text):
        encoded = tokenizer(_strings(text, name), add_special_tokens=False)["input_ids"]
        columns[name] = [torch.tensor(ids, dtype=torch.int64) for ids in encoded]  # type: ignore[union-attr]
    if PROMPT in columns and RESPONSE in columns:
        return _ragged_tokens(columns[PROMPT], columns[RESPONSE])
    return Tokens.from_rows(**columns)


def text_to_history(
    text: Text, tokenizer: "PreTrainedTokenizerBase", chat_template_name: str | None
) -> ChatHistory:
    """See ``Text.to_history``."""
    held = _held(text)
    parsed: dict[str, list[Any]] = {
        name: [
            History.from_text(value, chat_template_name, tokenizer=tokenizer)
            for value in _strings(text, name)
        ]
        for name in held
        if name != RESPONSE or held == [RESPONSE]
    }
    if PROMPT in parsed and FULL in parsed:
        pairs = zip(parsed[PROMPT], parsed[FULL], strict=True)
        parsed[RESPONSE] = [full[len(prompt) :] for prompt, full in pairs]
    size = [len(next(iter(parsed.values())))]
    return ChatHistory.of({name: lazy_stack(rows) for name, rows in parsed.items()}, size)


# Messages ----------------------------------------------------------------------------------------


def history_to_tokens(
    history: ChatHistory,
    tokenizer: "PreTrainedTokenizerBase",
    chat_template_name: str | None,
    chat_template: str | None,
) -> Tokens:
    """See ``ChatHistory.to_tokens``."""
    for name in (FULL, PROMPT):
        conversations = conversations_of(entries_of(history).get(name, None))
        if conversations is not None and any(
            conversations.num_tokens(i) for i in range(len(conversations))
        ):
            return conversation_tokens(conversations)[0]
    encoder = encoder_for(tokenizer, chat_template_name, chat_template)
    prompt = full = None
    if history.prompt is not None:
        chats: Any = history.prompt.to_chats()
        prompt = [e.ids for e in encoder.encode_chats(chats, add_generation_prompt=True)]
    if history.full is not None:
        chats = history.full.to_chats()
        encoded = encoder.encode_chats(chats)
        full = [_until_answered(e, chat) for e, chat in zip(encoded, chats, strict=True)]
    if prompt is None and full is None:
        raise ValueError("This ChatHistory has neither a prompt nor a full conversation.")
    if prompt is None or full is None:
        name, ids = (PROMPT, prompt) if full is None else (FULL, full)
        return Tokens.from_rows(**{name: [torch.tensor(row) for row in ids or []]})
    responses = []
    for row, (start, whole) in enumerate(zip(prompt, full, strict=True)):
        if whole[: len(start)] != start:
            raise ValueError(
                f"Row {row}: the full conversation does not begin with the tokens of the prompt "
                f"({len(start)} tokens), so there is no response to tell apart. The messages of "
                "the prompt must be the first of the full conversation."
            )
        responses.append(torch.tensor(whole[len(start) :], dtype=torch.int64))
    return _ragged_tokens([torch.tensor(row) for row in prompt], responses)


def _until_answered(encoded: EncodedMessages, chat: Sequence[Message]) -> list[int]:
    """Tokens up to the end of the assistant's last turn, where a policy's response ends."""
    if chat[-1]["role"] != "assistant" or Source.MODEL not in encoded.sources:
        return encoded.ids
    return encoded.ids[: len(encoded.ids) - encoded.sources[::-1].index(Source.MODEL)]
