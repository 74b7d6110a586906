"""From messages to tokens: only what is new in a conversation is encoded.

Shape legend: B rows, T tokens of a row.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torchrl_data.conversation.conversations import Conversations, EncodedMessages, waiting_rows
from torchrl_data.conversation.images import images_of, without_data
from torchrl_data.conversation.record import Message, Source, Waiting, check_messages

from .control_tokens import (
    ROW_ERRORS,
    Run,
    encode_runs,
    encoded_or_raise,
    label_pieces,
)
from .image_processor import ImageProcessor, with_image_runs
from .renderer import TemplateRenderer, Tools
from .template_cache import CompiledShapes
from .tools_shown import ToolsNotShownError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

MAX_OPENINGS: Final = 64
"""Sets of tools for which openings are compiled; further ones are rendered."""


class EncodedRows(NamedTuple):
    """What became of the rows of a batch."""

    conversations: Conversations
    errors: dict[int, Exception]
    """By row, for those that were refused."""


class ConversationEncoder(TemplateRenderer):
    """Encodes conversations with a chat template, one delta at a time.

    Args:
        tokenizer: a fast tokenizer.
        chat_template: Jinja source; generation-marked, or such that the assistant's turns can be
            found.
        chat_template_name: name of a built-in or added template.
        chat_template_kwargs: passed to the template (``enable_thinking=False``, say).
        reasoning_in_content: a ``<think>`` block that begins an assistant's content is its
            reasoning, written with the template's own tokens. Otherwise reasoning is what
            ``reasoning_content`` holds, and all content stays content.
        processor: of a vision-language model, for messages with images; without one a row that
            has any is refused.

    Raises:
        ValueError: the template does not show what the assistant wrote.
        TypeError: the tokenizer has no fast backend, or the processor processes no images.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        reasoning_in_content: bool = False,
        processor: "ProcessorMixin | ImageProcessor | None" = None,
    ) -> None:
        if processor is not None and not isinstance(processor, ImageProcessor):
            processor = ImageProcessor(processor)
        self.images: ImageProcessor | None = processor
        """What images in messages become."""
        super().__init__(
            tokenizer,
            chat_template=chat_template,
            chat_template_name=chat_template_name,
            chat_template_kwargs=chat_template_kwargs,
            reasoning_in_content=reasoning_in_content,
        )
        self._deltas = CompiledShapes(self._pieces_after_answer, self.guard, self.template)
        self._openings: dict[str, CompiledShapes] = {}

    def _delta_runs(self, messages: Sequence[Message], closed: bool, first: int) -> list[Run]:
        runs = self._deltas.runs(messages)
        if runs is None:
            escaped = self.guard.escape(messages)
            self._check_shown(escaped, self._after_answer, "later", first=first)
            runs = label_pieces(self._pieces_after_answer(escaped), [])
        if not closed:
            return runs
        end = self.end_of_turn_id
        for i, run in enumerate(runs):
            if run.ids == (end,) and run.text is None:
                return runs[i + 1 :]
        return runs

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_openings": {}}  # compiled anew where they are needed

    def _opening_runs(self, messages: Sequence[Message], tools: Tools | None) -> list[Run]:
        if tools:
            self.check_tools(tools, messages)
        key = json.dumps(tools, sort_keys=True, default=str) if tools else ""
        shapes = self._openings.get(key)
        if shapes is None and len(self._openings) < MAX_OPENINGS:
            shown = self.guard.escape(tools) if tools else None
            shapes = self._openings[key] = CompiledShapes(
                lambda escaped: self.guard.split(self._render_text(escaped, shown, True).text),
                self.guard,
                self.template,
            )
        runs = shapes.runs(messages) if shapes is not None else None
        if runs is not None:
            return runs
        return [
            run._replace(source=Source.CONTENT) if run.source == Source.MODEL else run
            for run in self._chat_runs(messages, tools, add_generation_prompt=True)
        ]

    # Encoding -----------------------------------------------------------------------------------

    def encode_chats(
        self,
        chats: Sequence[Sequence[Message]],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> list[EncodedMessages]:
        """Tokens of whole conversations; what the assistant wrote has the source ``MODEL``.

        Args:
            chats: messages of each row.
            tools: JSON schemas that the template shows.
            add_generation_prompt: end with the header of an assistant turn.
            continue_final_message: end inside the last message.

        Raises:
            ValueError: a message has an unknown role, or the template can't render the messages, or
                leaves out something that one holds: content, a call, reasoning, a speaker's name.
            TypeError: a content has the wrong type.
        """
        return self.encode_each(
            chats,
            [tools] * len(chats),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def encode_each(
        self, chats: Sequence[Sequence[Message]], tools: Sequence[Tools | None], **options: bool
    ) -> list[EncodedMessages]:
        """Like :meth:`encode_chats`, which says what the options are, with tools for each row.

        Args:
            chats: messages of each row.
            tools: JSON schemas that the template shows, per row.
            **options: ``add_generation_prompt`` and ``continue_final_message``.
        """
        for row, chat in enumerate(chats):
            check_messages(chat, row=row)
        runs = []
        for row, (chat, schemas) in enumerate(zip(chats, tools, strict=True)):
            images, shown = self._images_apart(chat)
            chat_runs = self._chat_runs(shown, schemas, row=row, **options)
            runs.append(with_image_runs(chat_runs, images, self.images))
        rows = encode_runs(runs, self.guard)
        return [encoded_or_raise(row) for row in rows]

    def check_prompt(self, messages: Sequence[Message], *, row: int | None = None) -> None:
        """Check that a prompt would show all that its messages hold.

        Args:
            messages: of the prompt; what the template can't render at all is left to the encoding.
            row: whose they are, for the error.

        Raises:
            ValueError: the template leaves something out.
        """
        escaped = self.guard.escape(self._images_apart(messages)[1])

        def render(shown: Sequence[Message]) -> str:
            return self._render_text(shown, None, True).text

        try:
            render(escaped)
        except ValueError:
            return
        self._check_shown(escaped, render, (False, True), row=row)

    def encode_waiting(self, conversations: Conversations) -> Conversations:
        """Encode the messages that wait and open the policy's turn, in one batch.

        A new conversation is encoded whole; later only its new messages are, after the closing
        token if the policy did not sample it. Sources never say ``MODEL``: nothing here was
        sampled.

        Args:
            conversations: rows that already await a response are left as they are.

        Raises:
            ValueError: a message has an unknown role, or the template can't render the messages.
            TypeError: a content has the wrong type.
        """
        encoded = self.encode_rows(conversations)
        for row, error in encoded.errors.items():
            error.add_note(f"This is row {row} of {len(conversations)}.")
            raise error
        return encoded.conversations

    def encode_rows(self, conversations: Conversations) -> EncodedRows:
        """Like :meth:`encode_waiting`, but a row that can't be encoded is marked, and no other.

        Args:
            conversations: rows that already await a response are left as they are.

        Returns:
            The conversations, and the error of each row that was refused: a role that the
            template does not take, a part that it can't show, text that is no Unicode. Such a
            row is left as it was: its messages wait, and no response is awaited.

        Raises:
            ToolsNotShownError: the template leaves out the tools of a row.
        """
        _ = self.end_of_turn_id  # without one no row can be opened
        rows: list[list[Run] | None] = []
        errors: dict[int, Exception] = {}
        for i, waiting in enumerate(waiting_rows(conversations)):
            runs = None
            if waiting is not None:
                try:
                    runs = self._waiting_runs(waiting, i)
                except ToolsNotShownError:
                    raise
                except ROW_ERRORS as error:
                    errors[i] = error
            rows.append(runs)
        encoded = iter(encode_runs([row for row in rows if row is not None], self.guard))
        new: list[EncodedMessages | None] = []
        for i, row in enumerate(rows):
            result = None if row is None else next(encoded)
            if isinstance(result, Exception):
                errors[i] = result
            new.append(result if isinstance(result, EncodedMessages) else None)
        return EncodedRows(conversations.append_encoded(new), errors)

    def _waiting_runs(self, waiting: Waiting, row: int) -> list[Run]:
        check_messages(waiting.messages, first=waiting.num_encoded, row=row)
        images, shown = self._images_apart(waiting.messages)
        if waiting.num_encoded == 0:
            runs = self._opening_runs(shown, waiting.tools)
        else:
            closed = waiting.last_id == self.end_of_turn_id
            runs = self._delta_runs(shown, closed, waiting.num_encoded)
        if not images and self.images is None:
            return runs
        return with_image_runs(runs, images, self.images)

    def _images_apart(self, messages: Sequence[Message]) -> tuple[list[str], Sequence[Message]]:
        """The images of messages, and the messages with only their places."""
        if all(type(message.get("content")) is str for message in messages):
            return [], messages
        shown = [without_data(message) for message in messages]
        if all(new is old for new, old in zip(shown, messages, strict=True)):
            return [], messages
        if self.images is None:  # the template may have more to say
            return [""], messages
        return images_of(messages), shown

    def decode_responses(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Text of sampled turns, without the stop token.

        Args:
            responses: sampled ids per row.
        """
        stops = set(self.stop_token_ids)
        return self.decode([ids[:-1] if ids and ids[-1] in stops else ids for ids in responses])

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Text of token ids, control tokens spelled out.

        Args:
            rows: ids per row; those outside the vocabulary are left out.
        """
        size = len(self.tokenizer)
        # The tokenizer's own methods look at every id in Python, which takes longer than this.
        backend: Any = self.tokenizer.backend_tokenizer
        return [
            backend.decode([i for i in ids if 0 <= i < size], skip_special_tokens=False)
            for ids in rows
        ]

    def encode_turn(self, text: str, *, close: bool = False) -> tuple[list[int], str]:
        """An assistant's turn that comes as text.

        Args:
            text: what is said; the end-of-turn token at its end is one, other control tokens that
                it spells stay text.
            close: end the turn also where the text does not.

        Returns:
            The ids, and the content of the message.
        """
        end = self._shape.end_of_turn
        closed = bool(end) and text.endswith(end)
        content = text.removesuffix(end) if closed else text
        ids = self.guard.encode_texts([content])[0] if content else []
        return ids + ([self.end_of_turn_id] if closed or close else []), content

    def without_end(self, text: str) -> str:
        """An assistant's text without the end-of-turn token that it spells at its end.

        Args:
            text: white space around the token goes too.
        """
        end = self._shape.end_of_turn
        stripped = text.rstrip()
        return stripped.removesuffix(end).rstrip() if end and stripped.endswith(end) else text
