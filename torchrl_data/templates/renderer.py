"""What a chat template writes, and where the assistant speaks in it.

Shape legend: B rows, T tokens of a row.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torchrl_data.conversation.message_edits import cut_at_end_mark, split_reasoning, with_end_mark
from torchrl_data.conversation.record import Message

from .assistant_spans import ANSWER, QUESTION, TurnShape, find_spans, turn_shape
from .control_tokens import ControlTokenGuard, Run, TextPiece, label_pieces
from .registry import (
    builtin_template,
    control_literals,
    family_of,
    is_generation_marked,
    resolve_template,
    template_names,
)
from .rendering import Rendered, render_template
from .rendering_identity import RenderingIdentity, rendering_identity
from .tools_shown import EntriesShown, check_tools_are_named, refusal, shows_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[dict[str, Any]]


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
    ) -> None:
        self.tokenizer = tokenizer
        self.guard = ControlTokenGuard(tokenizer)
        self.template = resolve_template(
            tokenizer, chat_template=chat_template, chat_template_name=chat_template_name
        )
        self._variables = {
            **{
                name: str(value)
                for name, value in tokenizer.special_tokens_map.items()
                if isinstance(value, str)
            },
            **(chat_template_kwargs or {}),
        }
        self._entries_shown = EntriesShown()
        self._marked = is_generation_marked(self.template)
        if reasoning_in_content and "reasoning_content" not in self.template:
            raise ValueError(
                "reasoning_in_content moves reasoning to 'reasoning_content', which this chat "
                "template does not show. Use one that does (qwen3, deepseek3)."
            )
        self._reasoning_in_content = reasoning_in_content
        self._shape: TurnShape = turn_shape(
            self.template,
            lambda messages, prompt: self._render_text(messages, None, prompt).text,
            self._first_control,
        )
        self._check_mask()

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the template is given beside messages and tools."""
        return dict(self._variables)

    @property
    def rendering(self) -> RenderingIdentity:
        """What decides how messages become tokens; equal for encoders that give the same."""
        return self._rendering

    @cached_property
    def _rendering(self) -> RenderingIdentity:
        backend = self.tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        return rendering_identity(
            self.template, self._variables, self._reasoning_in_content, backend
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
                "Put the end-of-turn token inside the {% generation %} block."
            )
        return self.guard.control_ids[self._shape.end_of_turn]

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens at which the policy's turn stops: the end of turn and the end of sequence."""
        eos = self.tokenizer.eos_token_id
        ids = [self.end_of_turn_id] + ([eos] if isinstance(eos, int) else [])
        return tuple(dict.fromkeys(ids))

    def _first_control(self, text: str) -> str | None:
        pieces = self.guard.split(text)
        return next((piece.text for piece in pieces if piece.control_id is not None), None)

    def _check_mask(self) -> None:
        rendered = self._render_text([QUESTION, ANSWER], None, False)
        spans = self._spans(rendered, [QUESTION, ANSWER], None)
        inside = "".join(rendered.text[start:end] for start, end in spans)
        if ANSWER["content"] not in inside:
            raise ValueError(
                f"The chat template's generation blocks hold {inside!r} of {rendered.text!r}, and "
                f"not the assistant's {ANSWER['content']!r}. Surround the assistant's content and "
                "its end-of-turn token with {% generation %} ... {% endgeneration %}."
            )

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
        if self._marked:
            return [
                (start, self._past_end_of_turn(rendered.text, end)) for start, end in rendered.spans
            ]
        return find_spans(
            rendered.text,
            escaped,
            lambda messages, prompt: self._render_text(messages, tools, prompt).text,
            self._shape,
        )

    def _past_end_of_turn(self, text: str, end: int) -> int:
        """Take in an end-of-turn token that a generation block leaves out: it is sampled too."""
        token = self._shape.end_of_turn
        after = text[end:].lstrip()
        if not token or text.endswith(token, 0, end) or not after.startswith(token):
            return end
        return len(text) - len(after) + len(token)

    def _chat_runs(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        row: int | None = None,
    ) -> list[Run]:
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
        """What a template writes after an assistant's content: its closing, messages, a header."""
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
        dropped = self._entries_shown.dropped(escaped, render, context)
        if not dropped:
            return
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
                if not EntriesShown().dropped(escaped, text, None):
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

    def check_tools(self, tools: Tools | None, messages: Sequence[Message] = ()) -> None:
        """Check that a prompt would tell the policy of tools.

        Args:
            tools: JSON schemas, or none.
            messages: of the prompt; what they say of the tools themselves is enough.

        Raises:
            ToolsNotShownError: the template leaves tools out, and no message names them.
        """
        if tools and not self._shows_tools:
            check_tools_are_named(tools, messages, self.template)

    @cached_property
    def _shows_tools(self) -> bool:
        return shows_tools(lambda tools: self._render_text([QUESTION], tools, True).text)
