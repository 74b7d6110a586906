"""Chat templates.

Where they come from, how they render, and what of their text the assistant says.
"""

import hashlib
import json
import re
import secrets
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from importlib.resources import files
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols

from torchrl_data import page
from torchrl_data.messages import PLACEHOLDER_ROLE, Message

from .sandbox import BoundedEnvironment, bounded_rendering, joined

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Which chat template a tokenizer uses, the templates that come with the toolkit, and your own.
#
# A template is *generation-marked* when ``{% generation %}`` surrounds what the assistant says,
# end-of-turn token included: that is what may be trained on. Where it is not, the assistant's spans
# are found from what the template renders (see ``assistant_spans``).

DEFAULT_TEMPLATE: Final = "chatml"
ALIASES: Final = {"chatml_format": "chatml"}
"""Other names of built-in templates."""
_TABLE: Final = files("torchrl_data.templates") / "families.toml"
FAMILIES: Final[dict[str, list[str]]] = tomllib.loads(_TABLE.read_text("utf-8"))
"""Built-in templates and the words in a tokenizer's name that stand for them; first match wins."""
_CONTROL_LITERAL = re.compile(
    r"<[|｜][^<>|｜]{1,40}[|｜]>|</?(?:think|tool_call|minimax:tool_call|TOOLCALL|TOOL_RESPONSE"
    r"|(?:start|end)_of_turn|sop|SPECIAL_[0-9]+)>|\[/?[A-Z_]{4,}\]|\[gMASK\]|\]~!b\[|\]~b\]|\[e~\["
)
_TAG = re.compile(r"</?[a-zA-Z_:]+>")
_GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class _Added(NamedTuple):
    template: str
    inverse_parser: Callable[[str], Any] | None
    keywords: tuple[str, ...]


_added: dict[str, _Added] = {}


def add_chat_template(
    template_name: str,
    template: str,
    inverse_parser: Callable[[str], Any] | None = None,
    model_family_keywords: Sequence[str] | None = None,
) -> None:
    r"""Register a template under a name, for this process; a name that exists is replaced.

    Args:
        template_name: what ``chat_template_name`` will say.
        template: Jinja source; ``{% generation %} ... {% endgeneration %}`` surrounds what the
            assistant says, end-of-turn token included.
        inverse_parser: turns rendered text into a ``History``, or a list of messages.
        model_family_keywords: tokenizers whose ``name_or_path`` (of a path, its last part) contains
            one of these words, in any case, use this template, whatever template they come with.

    Raises:
        ValueError: the template has no ``{% generation %}`` block.

    Example:
        >>> source = (
        ...     "{% for m in messages %}{% if m.role == 'assistant' %}"
        ...     "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        ...     "{% else %}{{ m.content }} = {% endif %}{% endfor %}"
        ... )
        >>> add_chat_template("my-sums", source)
        >>> encoder = ConversationEncoder(tokenizer, chat_template_name="my-sums")
        >>> chat = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
        >>> conversations = encode_demonstrations(encoder, [chat])
        >>> ids, mask = conversations.token_ids(0), conversations.assistant_mask(0)  # [T] each
        >>> tokenizer.decode(ids), tokenizer.decode(ids[mask])
        ('2 + 2 = 4<|im_end|>', '4<|im_end|>')
    """
    if not is_generation_marked(template):
        raise ValueError(
            f"The template {template_name!r} has no {{% generation %}} block, so it does not say "
            f"which tokens the assistant wrote: {template!r:.80}. Surround the assistant's content "
            "and its end-of-turn token with {% generation %} ... {% endgeneration %}. See "
            f"{page('docs/chat-templates.md')}."
        )
    keywords = tuple(keyword.lower() for keyword in model_family_keywords or ())
    _added[template_name] = _Added(template, inverse_parser, keywords)


def template_names() -> list[str]:
    """Names of all templates, built-in and added."""
    folder = files("torchrl_data.templates") / "builtin"
    return sorted({*_added, *(path.name.removesuffix(".jinja") for path in folder.iterdir())})


def builtin_template(name: str) -> str:
    """Jinja source of a built-in or added template.

    Args:
        name: for instance ``"chatml"``.

    Raises:
        ValueError: there is no such template; the message lists those that there are.
    """
    if name in _added:
        return _added[name].template
    path = files("torchrl_data.templates") / "builtin" / f"{ALIASES.get(name, name)}.jinja"
    if not name.replace("_", "").isalnum() or not path.is_file():
        raise ValueError(
            f"There is no chat template named {name!r}; there are {template_names()}. Register "
            "yours with add_chat_template."
        )
    return path.read_text(encoding="utf-8")


def added_inverse_parser(name: str) -> Callable[[str], Any] | None:
    """The inverse parser that was registered with a template, if any."""
    return _added[name].inverse_parser if name in _added else None


def is_generation_marked(template: str) -> bool:
    """Whether a template says which part of it the assistant wrote."""
    return _GENERATION_MARK.search(template) is not None


def control_literals(template: str, *, of_turns: bool = False) -> list[str]:
    """Control tokens that a template's source spells, sorted.

    Args:
        template: Jinja source.
        of_turns: leave out tags such as ``<think>``, which work as ordinary text, too.
    """
    return sorted(
        token
        for token in set(_CONTROL_LITERAL.findall(template))
        if not of_turns or not _TAG.fullmatch(token) or token.endswith("_of_turn>")
    )


def own_template(tokenizer: "PreTrainedTokenizerBase | None") -> str | None:
    """The template that a tokenizer comes with, the default one if it has several."""
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):
        own = own.get("default")
    return own if isinstance(own, str) and own else None


def _model_name(source: str) -> str:
    """The part of a hub id or a path that names a model; folders above it name other things."""
    path = Path(source)
    if not (path.is_absolute() or path.exists()):
        return source
    cached = [part for part in path.parts if part.startswith("models--")]  # the hub's cache
    return (cached or [path.name])[-1]


def family_of(
    tokenizer: "PreTrainedTokenizerBase | None", *, added_only: bool = False
) -> str | None:
    """The template that the name of a tokenizer stands for, or ``None``."""
    name = _model_name(str(getattr(tokenizer, "name_or_path", "") or "")).lower()
    known: list[tuple[str, Sequence[str]]] = [] if added_only else [*FAMILIES.items()]
    known[:0] = [(template, added.keywords) for template, added in reversed(_added.items())]
    named = (template for template, words in known if any(word in name for word in words))
    return next(named, None)


def resolve_template(
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    chat_template: str | None = None,
    chat_template_name: str | None = None,
) -> str:
    """The template for a tokenizer.

    The first that applies: the one asked for; one registered with a keyword that the tokenizer's
    name contains; the tokenizer's own; the built-in one of its family; ChatML.

    Args:
        tokenizer: whose template it is.
        chat_template: Jinja source that overrides everything.
        chat_template_name: name of a built-in or added template.

    Raises:
        ValueError: both are given, or there is no template of that name.
    """
    if chat_template is not None and chat_template_name is not None:
        raise ValueError("Give either chat_template or chat_template_name, not both.")
    if chat_template is not None:
        return chat_template
    name = chat_template_name or family_of(tokenizer, added_only=True)
    if name is None and (own := own_template(tokenizer)) is not None:
        return own
    return builtin_template(name or family_of(tokenizer) or DEFAULT_TEMPLATE)


# What decides how messages become tokens, so that two encoders can be compared.
#
# An environment and a policy each have an encoder; where they render differently, what the
# environment shows is not what the policy samples from.


class RenderingIdentity(NamedTuple):
    """Equal where the same messages give the same tokens."""

    template: str
    """Jinja source."""
    variables: str
    """Special tokens and template kwargs that the template names, as JSON."""
    reasoning_in_content: bool
    """A ``<think>`` block that begins an assistant's content is its reasoning."""
    vocabulary: str
    """Digest of the tokenizer's backend."""

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that stand for all of it."""
        return digest_of(json.dumps(self))


def digest_of(text: str) -> str:
    """16 hexadecimal digits that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Renders(Protocol):
    """A :class:`~torchrl_data.ConversationEncoder`."""

    tokenizer: Any

    @property
    def rendering(self) -> RenderingIdentity:
        """What decides how messages become tokens."""
        ...


def check_same_rendering(env_encoder: Renders, policy_encoder: Renders) -> None:
    """Check that an environment shows what a policy samples from.

    Args:
        env_encoder: of the environment (``env.encoder``).
        policy_encoder: of the policy (``policy.encoder``).

    Raises:
        ValueError: templates, what they read, or tokenizers differ; the message says in what.
    """
    if env_encoder is policy_encoder or env_encoder.rendering == policy_encoder.rendering:
        return
    env, policy = env_encoder.rendering, policy_encoder.rendering
    ours, theirs = json.loads(env.variables), json.loads(policy.variables)
    missing = object()
    differences = [
        f"{name} ({ours.get(name, 'not given')!r} / {theirs.get(name, 'not given')!r})"
        for name in sorted({*ours, *theirs})
        if ours.get(name, missing) != theirs.get(name, missing)
    ]
    if env.template != policy.template:
        shown = f"({env.template!r:.80} / {policy.template!r:.80})"
        differences.insert(0, f"the chat template {shown}")
    if env.reasoning_in_content != policy.reasoning_in_content:
        shown = f"({env.reasoning_in_content} / {policy.reasoning_in_content})"
        differences.append(f"reasoning_in_content {shown}")
    if env.vocabulary != policy.vocabulary:
        names = (
            f"{type(own).__name__} {own.name_or_path!r} of {len(own)} tokens"
            for own in (env_encoder.tokenizer, policy_encoder.tokenizer)
        )
        differences.append(f"the tokenizer ({' / '.join(names)})")
    raise ValueError(
        "The environment shows other text than the policy samples from. They differ (environment / "
        f"policy) in {', '.join(differences)}. Give both the same tokenizer, chat template and "
        "template kwargs."
    )


# Rendering a chat template, and which part of the text its generation blocks gave.
#
# The environment is the one that transformers renders chat templates with, but for the generation
# blocks: they are marked in the text itself, so that any number of threads can render at once.

# Nobody can guess the marks, so no content can spell them.
_SECRET: Final = secrets.token_hex(8)
_BEGIN: Final = f"\ua789{_SECRET}<"
_END: Final = f"\ua789{_SECRET}>"
_MARKS = re.compile(f"({_BEGIN}|{_END})")


class Rendered(NamedTuple):
    """What a template gave."""

    text: str
    spans: list[tuple[int, int]]
    """Where the generation blocks are, in characters: start and end of each."""


class _GenerationBlocks(Extension):
    """``{% generation %} ... {% endgeneration %}`` leaves marks around its output."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment.from_string(source)


def render_template(
    source: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> Rendered:
    """Render messages."""
    shown = [_joined(message) for message in messages if message["role"] != PLACEHOLDER_ROLE]
    values = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
    values |= variables or {}
    rendered = _render(source, shown, values)
    for i, message in enumerate(shown):
        content = message.get("content")
        if isinstance(content, _Parts):
            only_text = _Parts(part for part in content if part.get("type") == "text")
            texts = {**message, "content": only_text}
            if _render(source, [*shown[:i], texts, *shown[i + 1 :]], values) == rendered:
                raise ValueError(
                    f"The chat template leaves out what is no text in message {i} "
                    f"({message['role']}), which has parts of the types {content.types}. Take "
                    "them out, or use a template that shows them (chat_template_name)."
                )
    text, spans, begin = "", [], 0
    for piece in _MARKS.split(rendered):
        if piece == _BEGIN:
            begin = len(text)
        elif piece == _END:
            spans.append((begin, len(text)))
        else:
            text += piece
    return Rendered(text, spans)


def _render(source: str, messages: Sequence[Message], values: Mapping[str, Any]) -> str:
    try:
        template = _compile(source)
        context = template.new_context({"messages": messages, **values})
        with bounded_rendering():
            return joined(template.root_render_func(context))
    except Exception as error:  # a template is a program, and may fail of anything
        roles = [message["role"] for message in messages]
        text = str(error)
        if not isinstance(error, jinja2.TemplateError):
            text = f"{type(error).__name__}: {text}"
        raise ValueError(
            f"The chat template can't render messages of roles {roles}: {text}. Change the "
            "messages, or use another template (chat_template_name)."
        ) from error


class _Parts(list[Any]):
    """Parts of a content; a template that would print them as Python does can't render them."""

    @property
    def types(self) -> list[Any]:
        return [part.get("type") for part in self]

    def __radd__(self, text: Any) -> Any:
        return text + str(self)

    def __str__(self) -> str:
        raise TypeError(f"it shows content as text, which has parts of the types {self.types}")


def _joined(message: Message) -> Message:
    """A message whose parts are all text, with a string as content."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    if any(part.get("type") != "text" for part in parts):
        return {**message, "content": _Parts(parts)}
    return {**message, "content": "".join(str(part.get("text", "")) for part in parts)}


# Whether a chat template shows all that it is given: tools, and what messages hold.

_NO_PARAMETERS: Final = {"type": "object", "properties": {}}
TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "Tool7", "description": "D", "parameters": _NO_PARAMETERS},
}


class ToolsNotShownError(ValueError):
    """A chat template leaves tools out of the prompt, so the policy would not know of them."""


# What messages hold -----------------------------------------------------------------------------

_MAX_SHAPES: Final = 512
TOOL_ROLES: Final = ("tool", "function", "ipython")
"""Roles of what a tool answers; which one it was is told by the order, too."""
# Nobody can guess it, so nothing else in a rendered text can spell it.
_ENTRY: Final = f"mark{secrets.token_hex(8)}"


class Entry(NamedTuple):
    """Something that a message holds, and that a template may leave out."""

    message: int
    key: str
    """Of the message: ``content``, ``name``, ``reasoning_content`` or ``tool_calls``."""
    call: int = 0
    part: str = ""
    """Of a call: ``name`` or ``arguments``."""


def entries_of(messages: Sequence[Message]) -> Iterator[Entry]:
    """Whatever is to be read in messages, but for what is only white space."""
    for i, message in enumerate(messages):
        role = message["role"]
        if role == PLACEHOLDER_ROLE:
            continue
        if _text(message.get("content")).strip():
            yield Entry(i, "content")
        if _text(message.get("reasoning_content")).strip():
            yield Entry(i, "reasoning_content")
        name = message.get("name")
        if name and name != role and role not in TOOL_ROLES:
            yield Entry(i, "name")
        for j, call in enumerate(message.get("tool_calls") or ()):
            function = _function(call)
            yield Entry(i, "tool_calls", j, "name")
            if function.get("arguments") not in (None, {}, "", "{}"):
                yield Entry(i, "tool_calls", j, "arguments")


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if part["type"] == "text")
    return content if isinstance(content, str) else ""


def _function(call: Any) -> dict[str, Any]:
    return call.get("function") or call


def _replaced(message: Message, entry: Entry, mark: str) -> Message:
    """A message with a mark in the place of one entry."""
    value: Any = message[entry.key]
    if entry.part:
        calls = [dict(call) for call in value]
        call, function = calls[entry.call], dict(_function(calls[entry.call]))
        arguments = f'{{"{mark}": "{mark}"}}'
        if entry.part == "arguments" and not isinstance(function["arguments"], str):
            function["arguments"] = {mark: mark}
        else:
            function[entry.part] = arguments if entry.part == "arguments" else mark
        calls[entry.call] = {**call, "function": function} if call.get("function") else function
        value = calls
    elif isinstance(value, list):
        value = [{**part, "text": mark} if part["type"] == "text" else part for part in value]
    else:
        value = mark
    return {**message, entry.key: value}


Suspects = dict[Any, tuple[Entry, ...]]
"""Entries that a template may leave out, by the shape of messages that was looked at once."""


def dropped_entries(
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], str],
    known: Suspects,
    context: Any = None,
) -> list[Entry]:
    """What a template leaves out of messages: what the rendered text does not tell of.

    What it leaves out because the conversation has gone on (the thoughts of earlier turns) is no
    loss: it was shown when it was the last message.

    Args:
        messages: escaped, as they are rendered.
        render: of such messages.
        known: what is kept from call to call for one template.
        context: what else decides what is rendered, to be told from other contexts.
    """
    entries = tuple(entries_of(messages))
    shape = (context, tuple([(m["role"], tuple(m)) for m in messages]), entries)
    suspects = known.get(shape)
    if suspects is None:
        suspects = _suspects(messages, entries, render)
        if len(known) < _MAX_SHAPES:
            known[shape] = suspects
    return [entry for entry in suspects if _is_dropped(messages, entry, render)]


def _suspects(
    messages: Sequence[Message], entries: tuple[Entry, ...], render: Callable[..., str]
) -> tuple[Entry, ...]:
    """Entries whose marks are not found where all entries are marked; all, where none may be."""
    marks = [f"{_ENTRY}n{n}x" for n, _ in enumerate(entries)]
    marked = list(messages)
    for entry, mark in zip(entries, marks, strict=True):
        marked[entry.message] = _replaced(marked[entry.message], entry, mark)
    try:
        text = render(marked).casefold()
        return tuple(
            entry
            for entry, mark in zip(entries, marks, strict=True)
            if mark not in text
            and (
                entry.key != "reasoning_content"
                or mark not in render(marked[: entry.message + 1]).casefold()
            )
        )
    except ValueError:  # the template looks at what it shows
        return entries


def _is_dropped(messages: Sequence[Message], entry: Entry, render: Callable[..., str]) -> bool:
    """Whether another value in the place of an entry leaves the text as it is."""
    others = list(messages)
    others[entry.message] = _replaced(messages[entry.message], entry, _ENTRY)
    rendered = render(messages)
    try:
        if render(others) != rendered:
            return False
        if entry.key != "reasoning_content":
            return True
        end = entry.message + 1
        return render(others[:end]) == render(messages[:end])
    except ValueError:
        return False  # it was looked at


def refusal(
    dropped: Sequence[Entry],
    messages: Sequence[Message],
    *,
    first: int = 0,
    row: int | None = None,
    remedy: str = "",
) -> str:
    """The error for messages of which a template leaves something out.

    Args:
        dropped: what; the first message that has any is named.
        messages: all of them.
        first: the number of the first of them.
        row: whose they are.
        remedy: templates that show it, if some are known.
    """
    number = dropped[0].message
    message, what = messages[number], []
    for entry in dropped:
        if entry.message == number and entry.part:
            name = _function(message["tool_calls"][entry.call]).get("name")
            what.append(f"{'a call of' if entry.part == 'name' else 'the arguments for'} {name!r}")
        elif entry.message == number:
            what.append(repr(entry.key))
    where = f"Message {first + number} ({message['role']})"
    where += "" if row is None else f" of row {row}"
    return (
        f"{where} has {' and '.join(what)}, which the chat template leaves out, so that nobody "
        f"would read or learn it. {remedy or 'Use a chat template that shows it'}, or say it in "
        "the message's 'content'."
    )


# What the assistant wrote, in the text of a template that does not mark it.
#
# Nothing is compared with a known template: a fork, or one with a trailing space, works like the
# original. A turn starts after the header that the template itself gives for a generation prompt
# and ends with its first end-of-turn token. Content can't spell either, if they hold control
# tokens; if they hold none, each turn is measured by rendering the messages before it.

Render = Callable[[Sequence[Message], bool], str]
"""Renders escaped messages, with or without a generation prompt."""

QUESTION: Message = {"role": "user", "content": "Question7"}
ANSWER: Message = {"role": "assistant", "content": "Answer7"}


_LAST_TAG = re.compile(r"(-?)(%\}|\}\}|#\})((?:(?!%\}|\}\}|#\}).)*)\Z", re.DOTALL)


class TurnShape(NamedTuple):
    """How a template opens and closes an assistant's turn."""

    header: str
    """What opens the turn; nothing for some templates."""
    end_of_turn: str
    """The control token that ends it; nothing if there is none."""
    after: str
    """What follows the content: white space, end of turn and whatever comes after it."""
    header_is_control: bool
    """The header holds a control token, so that content can't spell it."""
    tail: str
    """What the template's source ends with, whatever the messages."""


def turn_shape(
    source: str, render: Render, first_control: Callable[[str], str | None]
) -> TurnShape:
    """Find how a template opens and closes an assistant's turn."""
    asked = render([QUESTION], False)
    opened = render([QUESTION], True)
    answered = render([QUESTION, ANSWER], False)
    at = answered.find(ANSWER["content"])
    if at < 0:
        raise ValueError(
            "The chat template does not show what the assistant says: messages "
            f"{[QUESTION, ANSWER]} are rendered as {answered!r}. Use another template, or mark the "
            "assistant's part with {% generation %} ... {% endgeneration %}."
        )
    both = ((opened, asked), (opened, answered[:at]))
    begin, end = (len(commonprefix(texts)) for texts in both)  # noqa: RUF071 (of texts, not paths)
    header = opened[begin:end]
    after = answered[at + len(ANSWER["content"]) :]
    control = first_control(after)
    if control is None or after.split(control, 1)[0].strip():
        control = ""
    # The text after the last tag of the source, as Jinja gives it.
    tag, tail = _LAST_TAG.search(source), ""
    if tag is not None and tag[1] != "-":
        # Jinja drops one line end at the end of the source, and one after a block or a comment.
        tail = tag[3].removesuffix("\n")
        tail = tail if tag[2] == "}}" else tail.removeprefix("\n")
    if not all(text.endswith(tail) for text in (asked, opened, answered)):
        tail = ""
    return TurnShape(header, control, after, first_control(header) is not None, tail)


def find_spans(
    rendered: str, messages: Sequence[Message], render: Render, shape: TurnShape
) -> list[tuple[int, int]]:
    """Start and end, in characters, of each assistant's message, end-of-turn token included."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    spans: list[tuple[int, int]] = []
    position = 0
    for _ in turns if shape.header_is_control and shape.end_of_turn else ():
        header = rendered.find(shape.header, position)
        start = header + len(shape.header)
        end = rendered.find(shape.end_of_turn, start)
        if header < 0 or end < 0:
            break
        position = end + len(shape.end_of_turn)
        spans.append((start, position))
    if len(spans) == len(turns):
        return spans
    spans = []
    for turn in turns:
        before = render(messages[:turn], True).removesuffix(shape.tail)
        until = render(messages[: turn + 1], False).removesuffix(shape.after)
        if not until.startswith(before) or not rendered.startswith(until):
            raise ValueError(
                f"Message {turn} (assistant) can't be told from the text that the chat template "
                "renders, as the template changes earlier text when messages are added. Mark the "
                "assistant's part with {% generation %} ... {% endgeneration %}."
            )
        end = len(until)
        if shape.end_of_turn:
            end = rendered.index(shape.end_of_turn, end) + len(shape.end_of_turn)
        spans.append((len(before), end))
    return spans
