"""Chat templates: those that the toolkit has, those that users add, and which one a tokenizer uses.

A template is *generation-marked* when ``{% generation %}`` surrounds what the assistant says,
end-of-turn token included: that is what may be trained on. Where it is not, the assistant's spans
are found from what the template renders (see :mod:`.assistant_spans`).
"""

import re
import tomllib
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torchrl_data import page

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """Return whether a template says which part of it the assistant wrote."""
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
