"""Text of a chat template with the places where the assistant speaks in it.

Shape legend: B rows, T tokens of a row.
"""

import json
import logging
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchrl_data import page
from torchrl_data.conversation import (
    Source,
)
from torchrl_data.message_edits import cut_at_end_mark, split_reasoning, with_end_mark
from torchrl_data.messages import Message

from .assistant_spans import ANSWER, QUESTION, TurnShape, find_spans, turn_shape
from .compiled_shapes import CompiledShapes
from .content_shown import TOOL, Suspects, ToolsNotShownError, dropped_entries, refusal
from .control_tokens import ControlTokenGuard, TextPiece, TokenRun, label_pieces
from .image_processor import ImageProcessor
from .registry import (
    builtin_template,
    control_literals,
    family_of,
    is_generation_marked,
    resolve_template,
    template_names,
)
from .rendering import Rendered, render_template
from .rendering_identity import RenderingIdentity, rendering_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


Tools = Sequence[dict[str, Any]]
_LOG: Final = logging.getLogger(__name__)


_OPENING_TAG: Final = re.compile(r"<((?:seed:)?think(?:ing)?|thoughts?|reasoning|scratchpad)>")
"""Begins what a model thinks before it answers; headers have other tags."""


class TemplateRenderer:
    """A chat template beside a tokenizer; :class:`~torchrl_data.ConversationEncoder` says more."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        reasoning_in_content: bool = False,
        processor: "ProcessorMixin | ImageProcessor | None" = None,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        if processor is not None and not isinstance(processor, ImageProcessor):
            processor = ImageProcessor(processor)
        self.images: ImageProcessor | None = processor
        """What images in messages become."""
        self.tokenizer = tokenizer
        self.guard = ControlTokenGuard(tokenizer)
        self.template = resolve_template(
            tokenizer, chat_template=chat_template, chat_template_name=chat_template_name
        )
        own = (
            f"of the tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__}"
        )
        self.template_name = repr(chat_template_name) if chat_template_name else own
        """What errors call the template."""
        special = tokenizer.special_tokens_map.items()
        self._variables = {name: str(value) for name, value in special if isinstance(value, str)}
        self._variables |= chat_template_kwargs or {}
        self._suspects: Suspects = {}
        self._marked = is_generation_marked(self.template)
        if reasoning_in_content and "reasoning_content" not in self.template:
            raise ValueError(
                "reasoning_in_content moves reasoning to 'reasoning_content', which this chat "
                "template does not show. Use one that does (qwen3, deepseek3)."
            )
        self._reasoning_in_content = reasoning_in_content

        def first_control(text: str) -> str | None:
            pieces = self.guard.split(text)
            return next((piece.text for piece in pieces if piece.control_id is not None), None)

        self._shape: TurnShape = turn_shape(
            self.template,
            lambda messages, prompt: self._render_text(messages, None, prompt).text,
            first_control,
        )
        rendered = self._render_text([QUESTION, ANSWER], None, False)
        spans = self._spans(rendered, [QUESTION, ANSWER], None)
        inside = "".join(rendered.text[start:end] for start, end in spans)
        if ANSWER["content"] not in inside:
            raise ValueError(
                f"The chat template's generation blocks hold {inside!r} of {rendered.text!r}, and "
                f"not the assistant's {ANSWER['content']!r}. Surround the assistant's content and "
                "its end-of-turn token with {% generation %} ... {% endgeneration %}. See "
                f"{page('docs/chat-templates.md')}."
            )
        self._end_token_ids = self._ending(end_token_ids)
        self._deltas = CompiledShapes(self._pieces_after_answer, self.guard, self.template)
        self._openings: dict[str, CompiledShapes] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_openings": {}}  # compiled anew where they are needed

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the template, in addition to messages and tools."""
        return dict(self._variables)

    @property
    def rendering(self) -> RenderingIdentity:
        """Identity of how messages become tokens; equal for encoders that give the same."""
        return self._rendering

    @cached_property
    def _rendering(self) -> RenderingIdentity:
        read = {name: value for name, value in self._variables.items() if name in self.template}
        backend = json.loads(self.tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]
        for stage in ("truncation", "padding", "post_processor"):  # encoders use none of them
            backend.pop(stage, None)
        return RenderingIdentity(
            self.template,
            json.dumps(read, sort_keys=True, default=repr),
            self._reasoning_in_content,
            rendering_digest(json.dumps(backend, sort_keys=True)),
        )

    # What ends a turn ---------------------------------------------------------------------------

    @cached_property
    def end_of_turn_id(self) -> int:
        """The token that ends the assistant's turn.

        Raises:
            ValueError: the template has none, so nothing tells the policy's turn to stop.
        """
        if not self._shape.end_of_turn:
            raise ValueError(
                f"The chat template closes an assistant turn with {self._shape.after!r}, which "
                "does not start with a control token, so nothing tells the policy's turn to stop. "
                "Put the end-of-turn token inside the {% generation %} block. Where the vocabulary "
                "lacks it, as a base model's does, take a template of tokens that it has, or add "
                "them (in a recipe policy.chat_template=, policy.add_control_tokens=true)."
            )
        return self.guard.control_ids[self._shape.end_of_turn]

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens at which the policy's turn stops.

        The template's end of turn, the tokenizer's end of sequence, and the model's own ends.
        """
        eos = self.tokenizer.eos_token_id
        ids = [self.end_of_turn_id] + ([eos] if isinstance(eos, int) else [])
        return tuple(dict.fromkeys([*ids, *self._end_token_ids]))

    def _ending(self, end_token_ids: Sequence[int]) -> tuple[int, ...]:
        """The model's own ends that end a turn of this template, too.

        One that the template writes where a turn goes on, in its header or before its end, ends
        none, and is told.
        """
        if not end_token_ids:
            return ()
        call = {"type": "function", "function": {"name": "Tool7", "arguments": {"a": 1}}}
        whole = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        thinks = [{**ANSWER, "reasoning_content": "Thought7"}]
        within = {piece.control_id for piece in self.guard.split(self._shape.header)}
        for answer in ([ANSWER], thinks, whole):
            try:
                runs = self._chat_runs([QUESTION, *answer], None)
            except (ValueError, TypeError):  # nothing that this template shows
                continue
            said = [i for run in runs if run.source == Source.MODEL for i in run.ids or ()]
            within.update(said[:-1])
        names = self.tokenizer.convert_ids_to_tokens
        if wrong := [i for i in end_token_ids if i in within - {self.end_of_turn_id}]:
            _LOG.warning(
                "The model names %s as ends of a turn, which the chat template writes where a turn "
                "goes on: a turn does not end there. SamplingParameters(stop_token_ids=...) says "
                "otherwise.",
                [f"{names(i)} ({i})" for i in wrong],
            )
        return tuple(i for i in end_token_ids if i not in wrong)

    @cached_property
    def opened_text(self) -> str:
        """Beginning of the assistant's own text in the generation prompt, such as ``<think>``.

        It is a tag that a turn has to close. Empty where the prompt ends with the header.
        """
        asked = self._render_text([QUESTION], None, False).text
        opened = self._render_text([QUESTION], None, True).text
        prompt = opened[len(commonprefix([asked, opened])) :]  # noqa: RUF071 (of texts, not paths)
        found = [
            tag.start()
            for tag in _OPENING_TAG.finditer(prompt)
            if f"</{tag[1]}>" not in prompt[tag.end() :]
        ]
        return prompt[found[0] :] if found else ""

    # Rendering ----------------------------------------------------------------------------------

    def _render_text(
        self, escaped: Sequence[Message], tools: Tools | None, add_generation_prompt: bool
    ) -> Rendered:
        return render_template(
            self.template,
            escaped,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=self._variables,
        )

    def _spans(
        self, rendered: Rendered, escaped: Sequence[Message], tools: Tools | None
    ) -> list[tuple[int, int]]:
        text, token = rendered.text, self._shape.end_of_turn
        if not self._marked:
            return find_spans(
                text,
                escaped,
                lambda messages, prompt: self._render_text(messages, tools, prompt).text,
                self._shape,
            )
        spans = []
        for start, end in rendered.spans:
            # An end-of-turn token that a generation block leaves out is sampled too.
            after = text[end:].lstrip()
            if token and not text.endswith(token, 0, end) and after.startswith(token):
                end = len(text) - len(after) + len(token)
            spans.append((start, end))
        return spans

    def _chat_runs(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        row: int | None = None,
    ) -> list[TokenRun]:
        """Runs of a whole conversation; what the assistant wrote is the model's."""
        self.check_tools(tools, messages)
        if self._reasoning_in_content:
            messages = [split_reasoning(message) for message in messages]
        escaped = self.guard.escape(messages)
        shown = self.guard.escape(tools) if tools else None
        rendered = self._render_text(escaped, shown, add_generation_prompt)
        self._check_shown(
            escaped,
            lambda others: self._render_text(others, shown, add_generation_prompt).text,
            (bool(tools), add_generation_prompt),
            row=row,
        )
        if continue_final_message:
            escaped[-1] = with_end_mark(escaped[-1])
            rendered = self._render_text(escaped, shown, add_generation_prompt)
        spans = self._spans(rendered, escaped, shown)
        text = cut_at_end_mark(rendered.text) if continue_final_message else rendered.text
        edges = [edge for span in spans for edge in span]
        return label_pieces(self.guard.split(text, edges), spans)

    def _after_answer(self, escaped: Sequence[Message]) -> str:
        """Text that a template writes after an assistant's content: closing, messages, a header."""
        rendered = self._render_text([QUESTION, ANSWER, *escaped], None, True).text
        return rendered[rendered.index(ANSWER["content"]) + len(ANSWER["content"]) :]

    def _pieces_after_answer(self, escaped: Sequence[Message]) -> list[TextPiece]:
        return self.guard.split(self._after_answer(escaped))

    def _check_shown(
        self,
        escaped: Sequence[Message],
        render: Callable[[Sequence[Message]], str],
        context: Any,
        *,
        row: int | None = None,
        first: int = 0,
    ) -> None:
        """Refuse messages of which the template leaves something out."""
        if dropped := dropped_entries(escaped, render, self._suspects, context):
            text = refusal(dropped, escaped, row=row, first=first, remedy=self._remedy(escaped))
            raise ValueError(self.guard.unescape(text))

    def _remedy(self, escaped: Sequence[Message]) -> str:
        """Templates for this tokenizer that leave nothing out."""
        found: list[str] = []
        for name in template_names():
            source = builtin_template(name)

            def text(messages: Sequence[Message], source: str = source) -> str:
                return render_template(source, messages, variables=self._variables).text

            literals = control_literals(source, of_turns=True)
            if not literals or not self.guard.control_ids.keys() >= set(literals):
                continue
            try:
                if not dropped_entries(escaped, text, {}):
                    found.append(name)
            except ValueError:
                continue
        if not found:
            return ""
        family = family_of(self.tokenizer)
        name = family if family in found else found[0]
        return (
            f"With this tokenizer {found} show it: choose chat_template_name={name!r} (in a recipe "
            f"policy.chat_template_name={name})"
        )

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the tokenizer, with this chat template in place of its own.

        Args:
            folder: gets its files; of a model, most often.
        """
        own, self.tokenizer.chat_template = self.tokenizer.chat_template, self.template
        try:
            self.tokenizer.save_pretrained(folder)
        finally:
            self.tokenizer.chat_template = own

    def check_tools(self, tools: Tools | None, messages: Sequence[Message] = ()) -> None:
        """Check that a prompt would tell the policy of tools.

        Args:
            tools: JSON schemas, or none.
            messages: of the prompt; what they say of the tools themselves is enough.

        Raises:
            ToolsNotShownError: the template leaves tools out, and no message names them.
        """
        if not tools or self._shows_tools:
            return
        text = "\n".join(str(message.get("content")) for message in messages)
        names = [str((tool.get("function") or tool).get("name")) for tool in tools]
        if missing := [name for name in names if name not in text]:
            raise ToolsNotShownError(
                "The chat template does not show tools, so the policy would not know of "
                f"{missing}: {self.template!r:.120}. Use a template that does "
                "(chat_template_name='chatml', say), or name the tools in a system prompt. See "
                f"{page('docs/chat-templates.md')}."
            )

    @cached_property
    def _shows_tools(self) -> bool:
        """Whether what the template renders depends on the tools that it is given."""
        without = self._render_text([QUESTION], None, True).text
        try:
            return self._render_text([QUESTION], [TOOL], True).text != without
        except ValueError:
            return True  # it looks at them, and says what is wrong with one
