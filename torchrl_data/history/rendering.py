"""Chats as text or tokens, with a chat template.

Shape legend: B rows, M messages of a row, T tokens of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from tensordict import TensorDict, lazy_stack

from torchrl_data.conversation.conversations import EncodedMessages, Source
from torchrl_data.conversation.message_edits import cut_at_end_mark, with_end_mark
from torchrl_data.conversation.record import Message, check_messages
from torchrl_data.ragged.packed import pad
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_data.templates.registry import control_literals, resolve_template
from torchrl_data.templates.rendering import render_template
from torchrl_data.templates.tools_shown import EntriesShown, refusal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RenderingOptions:
    """The options of ``History.apply_chat_template``."""

    add_generation_prompt: bool
    chat_template: str | None
    chat_template_name: str | None
    continue_final_message: bool
    tokenize: bool | None
    padding: bool | str
    truncation: bool | str
    return_tensors: str | None
    return_dict: bool | None
    return_assistant_tokens_mask: bool

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError(
                "add_generation_prompt opens a new turn and continue_final_message stays in the "
                "last one: ask for one of them."
            )
        if self.return_tensors not in (None, "pt"):
            raise ValueError(f"return_tensors is 'pt' or None, got {self.return_tensors!r}.")
        if self.tokenize is False and (self.return_assistant_tokens_mask or self.return_tensors):
            raise ValueError("A mask or tensors need tokens: leave tokenize=False out.")

    @property
    def wants_tokens(self) -> bool:
        """Whether tokens are asked for, openly or by asking for tensors or a mask."""
        if self.tokenize is not None:
            return self.tokenize
        return self.return_assistant_tokens_mask or self.return_tensors is not None

    @property
    def wants_dict(self) -> bool:
        """Whether a TensorDict is asked for."""
        if self.return_dict is not None:
            return self.return_dict
        return self.return_assistant_tokens_mask


def render_chats(
    rows: Sequence[Sequence[Message]],
    tokenizer: "PreTrainedTokenizerBase | None",
    options: RenderingOptions,
    variables: Mapping[str, Any],
    *,
    single: bool,
) -> Any:
    """See ``History.apply_chat_template``; ``single`` gives one result, not a batch of one."""
    values = dict(variables)
    tools = values.pop("tools", None)
    max_length = values.pop("max_length", None)
    for row, messages in enumerate(rows):
        check_messages(messages, row=None if single else row)
    template = resolve_template(
        tokenizer,
        chat_template=options.chat_template,
        chat_template_name=options.chat_template_name,
    )
    if not options.wants_tokens:
        seen = EntriesShown()
        texts = [_text(row, tokenizer, template, options, tools, values, seen) for row in rows]
        return texts[0] if single else texts
    encoder = _encoder(tokenizer or byte_tokenizer(template), template, values)
    encoded = encoder.encode_chats(
        [[m for m in row if m["role"] != "<none>"] for row in rows],
        tools=tools,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
    )
    if options.truncation:
        encoded = _truncated(encoded, max_length)
    return _tensors(encoded, single, options, encoder.tokenizer)


def _text(
    messages: Sequence[Message],
    tokenizer: "PreTrainedTokenizerBase | None",
    template: str,
    options: RenderingOptions,
    tools: Any,
    variables: Mapping[str, Any],
    seen: EntriesShown,
) -> str:
    special = {} if tokenizer is None else tokenizer.special_tokens_map

    def render(shown: Sequence[Message]) -> str:
        return render_template(
            template,
            shown,
            tools=tools,
            add_generation_prompt=options.add_generation_prompt,
            variables={**special, **variables},
        ).text

    text = render(messages)
    if dropped := seen.dropped(messages, render, None):
        raise ValueError(refusal(dropped, messages))
    if options.continue_final_message:
        return cut_at_end_mark(render([*messages[:-1], with_end_mark(messages[-1])]))
    return text


def _truncated(encoded: list[EncodedMessages], max_length: int | None) -> list[EncodedMessages]:
    if max_length is None:
        raise ValueError("truncation needs max_length, the most tokens of a row.")
    return [EncodedMessages(e.ids[:max_length], e.sources[:max_length]) for e in encoded]


def _tensors(
    encoded: list[EncodedMessages],
    single: bool,
    options: RenderingOptions,
    tokenizer: "PreTrainedTokenizerBase",
) -> Any:
    ids = [torch.tensor(row.ids, dtype=torch.int64) for row in encoded]
    if not options.wants_dict:
        if options.padding and not single:
            return _padded(ids, tokenizer, _pad_id(tokenizer))
        return ids[0] if single else ids
    columns = {"input_ids": ids, "attention_mask": [torch.ones_like(row) for row in ids]}
    if options.return_assistant_tokens_mask:
        columns["assistant_masks"] = [
            (torch.tensor(row.sources) == Source.MODEL).to(torch.int64) for row in encoded
        ]
    if options.padding and not single:
        fill = {"input_ids": _pad_id(tokenizer)}
        padded = {k: _padded(v, tokenizer, fill.get(k, 0)) for k, v in columns.items()}
        return TensorDict(padded, batch_size=[len(ids)])
    rows = [
        TensorDict(dict(zip(columns, values, strict=True)), batch_size=[])
        for values in zip(*columns.values(), strict=True)
    ]
    return rows[0] if single else lazy_stack(rows)


def _pad_id(tokenizer: "PreTrainedTokenizerBase") -> int:
    index = tokenizer.pad_token_id
    return index if isinstance(index, int) else 0


def _padded(
    rows: list[torch.Tensor], tokenizer: "PreTrainedTokenizerBase", value: int
) -> torch.Tensor:
    return pad(rows, value=value, side=tokenizer.padding_side)


# Encoders are kept, as making one reads the whole vocabulary --------------------------------------

_encoders: WeakKeyDictionary[Any, dict[Any, ConversationEncoder]] = WeakKeyDictionary()


def _encoder(
    tokenizer: "PreTrainedTokenizerBase", template: str, variables: Mapping[str, Any]
) -> ConversationEncoder:
    kept = _encoders.setdefault(tokenizer, {})
    key = (template, repr(sorted(variables.items())), len(tokenizer))
    if key not in kept:
        kept[key] = ConversationEncoder(
            tokenizer, chat_template=template, chat_template_kwargs=dict(variables)
        )
    return kept[key]


def encoder_for(
    tokenizer: "PreTrainedTokenizerBase", chat_template_name: str | None, chat_template: str | None
) -> ConversationEncoder:
    """The encoder of a tokenizer and a template; it is kept for the next call."""
    template = resolve_template(
        tokenizer, chat_template=chat_template, chat_template_name=chat_template_name
    )
    return _encoder(tokenizer, template, {})


_byte_tokenizers: dict[str, Any] = {}


def byte_tokenizer(template: str) -> "PreTrainedTokenizerBase":
    """A tokenizer of UTF-8 bytes, and of the control tokens that a template spells."""
    if template not in _byte_tokenizers:
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
        _byte_tokenizers[template] = made
    return _byte_tokenizers[template]
