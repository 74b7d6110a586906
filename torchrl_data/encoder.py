"""From messages to tokens: only what is new in a conversation is encoded."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from .chat_templates import resolve_template
from .control_tokens import ControlTokenGuard, TextPiece
from .conversation import Conversations, EncodedMessages, Message, Source

_STUB: list[Message] = [
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"},
]


class ConversationEncoder:
    """Encodes conversations with a chat template, one delta at a time.

    Args:
        tokenizer: a fast tokenizer.
        chat_template: Jinja source with ``{% generation %}`` marks.
        chat_template_name: name of a built-in template.
        chat_template_kwargs: passed to the template (``enable_thinking=False``, say).

    Raises:
        ValueError: the template is unmarked, or closes an assistant turn without a control token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.guard = ControlTokenGuard(tokenizer)
        self.template = resolve_template(
            tokenizer, chat_template=chat_template, chat_template_name=chat_template_name
        )
        self._kwargs = dict(chat_template_kwargs or {})
        self._special = {
            name: str(value)
            for name, value in tokenizer.special_tokens_map.items()
            if isinstance(value, str)
        }
        rendered, spans = self._render(_STUB)
        start, self._stub_end = spans[-1]
        self._stub_prefix = rendered[: self._stub_end]
        self._closing = rendered[start : self._stub_end].removeprefix("a")
        closing_ids = [p.control_id for p in self.guard.split(self._closing)]
        if not closing_ids or closing_ids[0] is None:
            raise ValueError(
                f"The chat template closes an assistant turn with {self._closing!r}, which does "
                "not start with a control token, so nothing tells the policy's turn to stop. Put "
                "the end-of-turn token inside the {% generation %} block."
            )
        self.end_of_turn_id: int = closing_ids[0]
        eos = tokenizer.eos_token_id
        self.stop_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys([self.end_of_turn_id] + ([eos] if isinstance(eos, int) else []))
        )

    def _render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        rendered, spans = render_jinja_template(  # type: ignore[misc]
            [self.guard.escape(messages)],
            tools=self.guard.escape(tools) if tools else None,
            chat_template=self.template,
            return_assistant_tokens_mask=True,
            add_generation_prompt=add_generation_prompt,
            **self._special,
            **self._kwargs,
        )
        return rendered[0], spans[0]

    def _pieces_of_start(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> list[tuple[TextPiece, Source]]:
        rendered, spans = self._render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt
        )
        return self._label(rendered, spans)

    def _pieces_of_delta(
        self, messages: Sequence[Message], closed: bool
    ) -> list[tuple[TextPiece, Source]]:
        rendered, spans = self._render([*_STUB, *messages], add_generation_prompt=True)
        if not rendered.startswith(self._stub_prefix):
            raise ValueError(
                "The chat template rewrites earlier turns when messages are added, so a "
                "conversation can't be continued token by token. Use a template that only appends."
            )
        offset = self._stub_end
        delta = [(a - offset, b - offset) for a, b in spans if a >= offset]
        pieces = self._label(rendered[offset:], delta)
        if not closed:
            pieces = self._label(self._closing, []) + pieces
        return pieces

    def _label(
        self, rendered: str, spans: Sequence[tuple[int, int]]
    ) -> list[tuple[TextPiece, Source]]:
        """Cut text at control tokens and at the assistant's spans, and say who wrote each piece."""
        pieces = self.guard.split(rendered, [edge for span in spans for edge in span])
        labelled = []
        for piece in pieces:
            if any(start <= piece.start < end for start, end in spans):
                source = Source.MODEL
            else:
                source = Source.CONTENT if piece.control_id is None else Source.TEMPLATE
            labelled.append((piece, source))
        return labelled

    def _encode_pieces(
        self, rows: Sequence[Sequence[tuple[TextPiece, Source]]]
    ) -> list[EncodedMessages]:
        """Encode the text of all rows in one call of the tokenizer."""
        texts = [p.text for row in rows for p, _ in row if p.control_id is None]
        encoded = iter(self.guard.encode_texts(texts))
        results = []
        for row in rows:
            ids: list[int] = []
            sources: list[Source] = []
            for piece, source in row:
                new = next(encoded) if piece.control_id is None else [piece.control_id]
                ids.extend(new)
                sources.extend([source] * len(new))
            results.append(EncodedMessages(ids, sources))
        return results

    def encode_chats(
        self,
        chats: Sequence[Sequence[Message]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[EncodedMessages]:
        """Tokens of whole conversations; what the assistant wrote has the source ``MODEL``.

        Args:
            chats: messages of each row.
            tools: JSON schemas that the template shows.
            add_generation_prompt: end with the header of an assistant turn.
        """
        return self._encode_pieces(
            [self._pieces_of_start(chat, tools, add_generation_prompt) for chat in chats]
        )

    def encode_waiting(self, conversations: Conversations) -> Conversations:
        """Encode the messages that wait and open the policy's turn, in one batch.

        A new conversation is encoded whole; later only its new messages are, after the closing
        token if the policy did not sample it. Sources never say ``MODEL``: nothing here was
        sampled.

        Args:
            conversations: rows that already await a response are left as they are.
        """
        rows: list[list[tuple[TextPiece, Source]] | None] = []
        for i in range(len(conversations)):
            position = conversations.position(i)
            if position.awaits_response:
                rows.append(None)
                continue
            messages = conversations.messages(i)
            if position.num_encoded == 0:
                rows.append(self._pieces_of_start(messages, conversations.tools(i), True))
            else:
                closed = conversations.last_id(i) == self.end_of_turn_id
                rows.append(self._pieces_of_delta(messages[position.num_encoded :], closed))
        encoded = iter(self._encode_pieces([row for row in rows if row is not None]))
        return conversations.append_encoded(
            [None if row is None else _not_sampled(next(encoded)) for row in rows]
        )

    def decode_responses(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Text of sampled turns, without the stop token.

        Args:
            responses: sampled ids per row.
        """
        stops = set(self.stop_token_ids)
        trimmed = [ids[:-1] if ids and ids[-1] in stops else ids for ids in responses]
        return self.tokenizer.batch_decode(
            [list(ids) for ids in trimmed],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )


def _not_sampled(encoded: EncodedMessages) -> EncodedMessages:
    sources = [Source.CONTENT if s == Source.MODEL else s for s in encoded.sources]
    return EncodedMessages(encoded.ids, sources)
