"""Encoder from messages to tokens: only what is new in a conversation is encoded.

Shape legend: B rows, T tokens of a row.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from torchrl_data.conversation import (
    Conversations,
    EncodedMessages,
    Source,
    Waiting,
    waiting_rows,
)
from torchrl_data.images import images_of, without_data
from torchrl_data.messages import Message, check_messages

from .compiled_shapes import CompiledShapes
from .content_shown import ToolsNotShownError
from .control_tokens import ROW_ERRORS, TokenRun, encode_runs, label_pieces
from .image_processor import with_image_runs
from .renderer import TemplateRenderer, Tools

MAX_OPENINGS: Final = 64
"""Sets of tools for which openings are compiled; further ones are rendered."""


class EncodedRows(NamedTuple):
    """The encoded rows of a batch, and the errors of those that could not be encoded."""

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
        end_token_ids: tokens that end a turn by the model's own settings
            (``generation_config.eos_token_id``), beside those of template and tokenizer. One that
            the template writes within a turn does not end it, which is logged.

    Raises:
        ValueError: the template does not show what the assistant wrote.
        TypeError: the tokenizer has no fast backend, or the processor processes no images.

    Example:
        >>> encoder = ConversationEncoder(tokenizer)
        >>> [encoded] = encoder.encode_chats([[{"role": "user", "content": "hello"}]])
        >>> tokenizer.decode(encoded.ids).split()
        ['<|im_start|>user', 'hello<|im_end|>']
    """

    def _waiting_runs(self, waiting: Waiting, row: int) -> list[TokenRun]:
        check_messages(waiting.messages, first=waiting.num_encoded, row=row)
        images, shown = self._images_apart(waiting.messages)
        if waiting.num_encoded == 0:
            runs = self._opening_runs(shown, waiting.tools, goes_on=waiting.goes_on)
        else:
            runs = self._deltas.runs(shown)
            if runs is None:
                escaped = self.guard.escape(shown)
                self._check_shown(escaped, self._after_answer, "later", first=waiting.num_encoded)
                runs = label_pieces(self._pieces_after_answer(escaped), [])
            end = self.end_of_turn_id
            if waiting.last_id == end:  # the turn before is closed: what is new comes after that
                closes = (i for i, run in enumerate(runs) if run.ids == (end,) and run.text is None)
                runs = runs[next(closes, -1) + 1 :]
        if not images and self.images is None:
            return runs
        return with_image_runs(runs, images, self.images)

    def _opening_runs(
        self, messages: Sequence[Message], tools: Tools | None, *, goes_on: bool = False
    ) -> list[TokenRun]:
        if tools:
            self.check_tools(tools, messages)
        if goes_on:  # in the last message; what is given of it is not trained
            runs = self._chat_runs(messages, tools, continue_final_message=True)
            return [run._replace(source=min(run.source, Source.CONTENT)) for run in runs]
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
        options = {"continue_final_message": continue_final_message}
        options["add_generation_prompt"] = add_generation_prompt
        return self.encode_each(chats, [tools] * len(chats), **options)

    def encode_each(
        self,
        chats: Sequence[Sequence[Message]],
        tools: Sequence[Tools | None],
        *,
        first_row: int = 0,
        **options: bool,
    ) -> list[EncodedMessages]:
        """Like :meth:`encode_chats`, which says what the options are, with tools for each row.

        Args:
            chats: messages of each row.
            tools: JSON schemas that the template shows, per row.
            first_row: the number of the first row, for errors.
            **options: ``add_generation_prompt`` and ``continue_final_message``.
        """
        for row, chat in enumerate(chats, first_row):
            check_messages(chat, row=row)
        runs = []
        for row, (chat, schemas) in enumerate(zip(chats, tools, strict=True), first_row):
            images, shown = self._images_apart(chat)
            chat_runs = self._chat_runs(shown, schemas, row=row, **options)
            runs.append(with_image_runs(chat_runs, images, self.images))
        encoded: list[EncodedMessages] = []
        for result in encode_runs(runs, self.guard):
            if isinstance(result, Exception):
                raise result
            encoded.append(result)
        return encoded

    def check_prompt(self, messages: Sequence[Message], *, row: int | None = None) -> None:
        """Check that a prompt would show all that its messages hold.

        Args:
            messages: of the prompt.
            row: whose they are, for the error.

        Raises:
            ValueError: the template leaves something out, or can't render them.
        """
        escaped = self.guard.escape(self._images_apart(messages)[1])

        def render(shown: Sequence[Message]) -> str:
            return self._render_text(shown, None, True).text

        try:
            render(escaped)
        except ValueError as error:
            raise ValueError(self._unrenderable(escaped, render, error, row)) from error
        self._check_shown(escaped, render, (False, True), row=row)

    def _unrenderable(
        self,
        escaped: Sequence[Message],
        render: Callable[[Sequence[Message]], str],
        error: ValueError,
        row: int | None,
    ) -> str:
        """Return what is wrong with a prompt that the template refuses, and what may be done."""
        which = "the prompt" if row is None else f"the prompt of row {row}"
        why = error.__cause__ or error
        do = "Change the messages, or choose another template with chat_template_name="
        if escaped[0]["role"] == "system":
            with suppress(ValueError):
                render(escaped[1:])  # so it is the system prompt
                do = (
                    "It takes no system prompt: leave system_prompt= out (of a recipe "
                    "task.system_prompt=null), put its text into the user's message, or choose "
                    "another template with chat_template_name="
                )
        roles = [message["role"] for message in escaped]
        return (
            f"The chat template {self.template_name} can't render {which}, whose roles are "
            f"{roles}: {why}. {do} (of a recipe policy.chat_template_name=)."
        )

    def encode_waiting(self, conversations: Conversations) -> Conversations:
        """Encode the messages that wait and open the policy's turn, in one batch.

        A new conversation is encoded whole; later only its new messages are, after the closing
        token if the policy did not sample it. Where the policy's turn goes on in the last message,
        that is left open. Sources never say ``MODEL``: nothing here was sampled.

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
        rows: list[list[TokenRun] | None] = []
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
