"""From messages and images to the tokens of a conversation, as the model's template has them."""

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from math import nan
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from torchrl_data import page
from torchrl_data.conversation import (
    ConversationRecord,
    Conversations,
    EncodedMessages,
    Position,
    Source,
    Waiting,
    waiting_rows,
)
from torchrl_data.messages import (
    Message,
    check_messages,
    cut_at_end_mark,
    decoded,
    images_of,
    split_reasoning,
    with_end_mark,
    with_plain_images,
    without_data,
)

from .control_tokens import (
    ROW_ERRORS,
    CompiledShapes,
    ControlTokenGuard,
    Run,
    TextPiece,
    encode_runs,
    label_pieces,
)
from .template import (
    ANSWER,
    QUESTION,
    TOOL,
    Rendered,
    RenderingIdentity,
    Suspects,
    ToolsNotShownError,
    TurnShape,
    builtin_template,
    control_literals,
    digest_of,
    dropped_entries,
    family_of,
    find_spans,
    is_generation_marked,
    refusal,
    render_template,
    resolve_template,
    template_names,
    turn_shape,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


Tools = Sequence[dict[str, Any]]
_LOG: Final = logging.getLogger(__name__)


# What a vision-language model reads of images: their places in the tokens, and their pixels.
#
# Shape legend: T tokens of a row.

MAX_KEPT_BYTES: Final = 1 << 28
"""Of the pixels of images that were processed last."""


class Processed(NamedTuple):
    """What a processor makes of the images of a row."""

    ids: list[int]
    """The tokens that stand for them."""
    tensors: dict[str, Tensor]
    """Their pixels, and whatever else the model's forward takes of them."""
    aligned: tuple[str, ...]
    """Inputs ``[T]`` that say of each token whether it is an image's."""
    num_bytes: int
    """Of the pixels."""


class ImageProcessor:
    """A processor of Transformers, asked for images alone.

    Args:
        processor: of the model; it has a tokenizer and an image processor.

    Raises:
        TypeError: it processes no images.
    """

    def __init__(self, processor: Any) -> None:
        token, token_id = (
            getattr(processor, name, None) for name in ("image_token", "image_token_id")
        )
        if getattr(processor, "image_processor", None) is None or not isinstance(token, str):
            raise TypeError(
                "processor= takes the processor of a vision-language model, with an image "
                "processor and an image token (AutoProcessor.from_pretrained), got "
                f"{type(processor).__name__}."
            )
        ids = processor.tokenizer.convert_tokens_to_ids
        self.processor = processor
        self.token_id: int = ids(token) if token_id is None else token_id
        """Stands for a piece of an image, in the model's forward."""
        self.place: str = getattr(processor, "boi_token", None) or token
        """What a template writes where an image is."""
        self.place_id: int = ids(self.place)
        media = (getattr(processor, f"{kind}_token_id", None) for kind in ("video", "audio"))
        self.never_drawn = (self.token_id, *(i for i in media if isinstance(i, int)))
        """Tokens that stand for media: a policy that drew one would see nothing there."""
        self._kept: OrderedDict[tuple[str, ...], Processed] = OrderedDict()
        self._num_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": OrderedDict(), "_num_bytes": 0}

    def process(self, images: Sequence[str]) -> Processed:
        """Pixels of the images of a row, in order.

        Args:
            images: in base 64, one at least.

        Raises:
            ValueError: one is broken.
        """
        key = tuple(images)
        found = self._kept.get(key)
        if found is None:
            output = self.processor(
                text=self.place * len(key),
                images=[decoded(image) for image in key],
                return_tensors="pt",
                add_special_tokens=False,
            )
            ids = output.pop("input_ids")
            output.pop("attention_mask", None)
            aligned = tuple(name for name, value in output.items() if value.shape == ids.shape)
            tensors = {name: value for name, value in output.items() if name not in aligned}
            num_bytes = sum(value.numel() * value.element_size() for value in tensors.values())
            found = self._kept[key] = Processed(ids[0].tolist(), tensors, aligned, num_bytes)
            self._num_bytes += num_bytes
        self._kept.move_to_end(key)
        while self._num_bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
            self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes
        return found

    def count(self, ids: Sequence[int] | Tensor) -> int:
        """Pieces of images that tokens stand for."""
        return int((torch.as_tensor(ids) == self.token_id).sum())

    def fault(self, ids: Sequence[int] | Tensor, images: Sequence[str]) -> str | None:
        """Why tokens and images don't belong together, or ``None``."""
        here = self.count(ids)
        expected = self.count(self.process(images).ids) if images else 0
        if here == expected:
            return None
        return (
            f"it holds {here} tokens that stand for images ({self.token_id}), where its "
            f"{len(images)} images have {expected}: its images were lost, or changed, on the way"
        )

    def inputs(self, ids: Tensor, images: Sequence[Sequence[str]]) -> dict[str, Tensor]:
        """What a model's forward takes beside rows of one length.

        Args:
            ids: int64 ``[B, T]``.
            images: of each row; of one :meth:`shape`.
        """
        rows = [self.process(row) for row in images]
        names = rows[0].tensors
        inputs = {name: torch.cat([row.tensors[name] for row in rows]) for name in names}
        if rows[0].aligned:
            kinds = torch.tensor(self.processor.create_mm_token_type_ids(ids.tolist()))
            inputs |= dict.fromkeys(rows[0].aligned, kinds)
        return {name: value.to(ids.device) for name, value in inputs.items()}

    def shape(self, images: Sequence[str]) -> tuple[Any, ...]:
        """Rows with the same can be read together."""
        tensors = self.process(images).tensors
        return tuple((name, tuple(value.shape[1:])) for name, value in tensors.items())


def with_image_runs(
    runs: list[Run], images: Sequence[str], processor: ImageProcessor | None
) -> list[Run]:
    """Runs of a rendered template, with the tokens of images at their places."""
    if processor is None:
        if images:
            raise ValueError(
                "The messages hold images, and nothing here reads images: give the "
                "policy the processor of a vision-language model, TransformersWrapper(model, "
                "tokenizer=..., processor=...)."
            )
        return runs
    places = [i for i, run in enumerate(runs) if run.ids == (processor.place_id,) and not run.text]
    if len(places) != len(images):
        raise ValueError(
            f"The chat template writes {processor.place!r} {len(places)} times for messages that "
            f"hold {len(images)} images. Use the template of the model's processor."
        )
    runs = list(runs)
    for i, image in zip(places, images, strict=True):
        runs[i] = Run(tuple(processor.process([image]).ids), Source.CONTENT)
    return runs


# What a chat template writes, and where the assistant speaks in it.
#
# Shape legend: B rows, T tokens of a row.


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
        """What the template is given beside messages and tools."""
        return dict(self._variables)

    @property
    def rendering(self) -> RenderingIdentity:
        """What decides how messages become tokens; equal for encoders that give the same."""
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
            digest_of(json.dumps(backend, sort_keys=True)),
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
        """What the generation prompt begins of the assistant's own text, such as ``<think>``.

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


# From messages to tokens: only what is new in a conversation is encoded.
#
# Shape legend: B rows, T tokens of a row.

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

    def _waiting_runs(self, waiting: Waiting, row: int) -> list[Run]:
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
    ) -> list[Run]:
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
        """What is wrong with a prompt that the template refuses, and what may be done."""
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


# Conversations that nobody sampled, and that are there to be learnt.


def encode_demonstrations(
    encoder: ConversationEncoder,
    chats: Sequence[Sequence[Message]],
    *,
    tools: Sequence[Sequence[dict[str, Any]] | None] | None = None,
    first_row: int = 0,
) -> Conversations:
    """Whole conversations to learn from: what the assistant says counts as the policy's.

    Args:
        encoder: with the chat template.
        chats: messages of each row; the assistant says something in each.
        tools: JSON schemas that the template shows, per row.
        first_row: the number of the first row, for errors.

    Returns:
        The conversations; :func:`~torchrl_data.row_tensordicts` makes the rows that ``SFTLoss``
        reads. Nothing is left open at the end. Log-probs of what the assistant says are NaN,
        because nobody sampled it.

    Raises:
        ValueError: the assistant says nothing in a row, a message has an unknown role, or the
            template can't render the messages, or leaves out something that one holds.
        TypeError: a content has the wrong type.

    Example:
        >>> chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
        >>> conversations = encode_demonstrations(ConversationEncoder(tokenizer), [chat])
        >>> ids, mask = conversations.token_ids(0), conversations.assistant_mask(0)  # [T] each
        >>> ids.dtype, mask.dtype, ids.shape == mask.shape
        (torch.int64, torch.bool, True)
        >>> tokenizer.decode(ids[mask])
        '4<|im_end|>'
    """
    tools = [None] * len(chats) if tools is None else tools
    encoded = encoder.encode_each(chats, tools, first_row=first_row)
    records, positions = [], []
    for row, (chat, new) in enumerate(zip(chats, encoded, strict=True)):
        if Source.MODEL not in new.sources:
            raise ValueError(
                f"encode_demonstrations: the assistant says nothing in row {first_row + row}, "
                f"whose roles are {[message['role'] for message in chat]}. Leave the row out."
            )
        ids, sources = new
        end = len(sources) - sources[::-1].index(Source.MODEL)
        if chat[-1]["role"] == "assistant":  # ends like a sampled turn, with its closing token
            ids, sources = ids[:end], sources[:end]
        record = ConversationRecord(tools[row])
        record.extend_tokens(ids, sources, [nan if s == Source.MODEL else 0.0 for s in sources])
        record.messages.extend(map(with_plain_images, chat))
        start = len(record.sources[:end].rstrip(bytes([Source.MODEL])))
        n, m = len(record.ids), len(record.messages)
        records.append(record)
        positions.append(Position(n, m, m, response_start=start))
    return Conversations(records, positions)
