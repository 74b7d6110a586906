"""Chats as text or tokens, with a chat template.

Shape legend: B rows, M messages of a row, T tokens of a row.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from tensordict import (
    TensorDict,
    lazy_stack,
)

from .conversation import EncodedMessages, Source
from .message_edits import cut_at_end_mark, with_end_mark
from .messages import PLACEHOLDER_ROLE, Message
from .ragged.packed import pad
from .templates.content_shown import Suspects, dropped_entries, refusal
from .templates.encoder import ConversationEncoder
from .templates.registry import control_literals
from .templates.rendering import render_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def rendered_chats(
    rows: Sequence[Sequence[Message]],
    template: str,
    variables: Mapping[str, Any],
    *,
    continue_final_message: bool,
    **options: Any,
) -> list[str]:
    """The text of each chat; ``options`` are the tools and whether a turn is opened."""
    known: Suspects = {}
    texts = []

    def render(messages: Sequence[Message]) -> str:
        return render_template(template, messages, variables=variables, **options).text

    for messages in rows:
        text = render(messages)
        if dropped := dropped_entries(messages, render, known):
            raise ValueError(refusal(dropped, messages))
        if continue_final_message:
            text = cut_at_end_mark(render([*messages[:-1], with_end_mark(messages[-1])]))
        texts.append(text)
    return texts


def chat_tensors(
    rows: Sequence[Sequence[Message]],
    tokenizer: "PreTrainedTokenizerBase",
    template: str,
    variables: dict[str, Any],
    options: dict[str, Any],
    *,
    single: bool,
    padding: bool,
    truncation: bool,
    as_dict: bool,
    with_mask: bool,
) -> Any:
    """Ids, or a TensorDict of them with their masks: a list, one of padded rows, or of one row."""
    max_length = variables.pop("max_length", None)
    chats = [[m for m in row if m["role"] != PLACEHOLDER_ROLE] for row in rows]
    encoded = encoder_for(tokenizer, template, variables).encode_chats(chats, **options)
    if truncation:
        if max_length is None:
            raise ValueError("truncation needs max_length, the most tokens of a row.")
        encoded = [EncodedMessages(r.ids[:max_length], r.sources[:max_length]) for r in encoded]
    columns = {"input_ids": [torch.tensor(row.ids, dtype=torch.int64) for row in encoded]}
    if as_dict:
        columns["attention_mask"] = [torch.ones_like(row) for row in columns["input_ids"]]
    if as_dict and with_mask:
        sampled = [torch.tensor(row.sources) == Source.MODEL for row in encoded]
        columns["assistant_masks"] = [mask.to(torch.int64) for mask in sampled]
    if padding and not single:
        index = tokenizer.pad_token_id
        fill = {"input_ids": index if isinstance(index, int) else 0}
        padded = {
            name: pad(rows, value=fill.get(name, 0), side=tokenizer.padding_side)
            for name, rows in columns.items()
        }
        return TensorDict(padded, batch_size=[len(encoded)]) if as_dict else padded["input_ids"]
    if not as_dict:
        return columns["input_ids"][0] if single else columns["input_ids"]
    dicts = [
        TensorDict(dict(zip(columns, values, strict=True)), batch_size=[])
        for values in zip(*columns.values(), strict=True)
    ]
    return dicts[0] if single else lazy_stack(dicts)


_encoders: WeakKeyDictionary[Any, dict[Any, ConversationEncoder]] = WeakKeyDictionary()


def encoder_for(
    tokenizer: "PreTrainedTokenizerBase", template: str, variables: Mapping[str, Any]
) -> ConversationEncoder:
    """The encoder of a tokenizer and a template; it is kept for the next call."""
    kept = _encoders.setdefault(tokenizer, {})
    key = (template, repr(sorted(variables.items())), len(tokenizer))
    if key not in kept:
        kept[key] = ConversationEncoder(
            tokenizer, chat_template=template, chat_template_kwargs=dict(variables)
        )
    return kept[key]


@cache
def byte_tokenizer(template: str) -> "PreTrainedTokenizerBase":
    """A tokenizer of UTF-8 bytes, and of the control tokens that a template spells."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    control: list[Any] = control_literals(template)
    made.add_tokens(control, special_tokens=True)
    return made
