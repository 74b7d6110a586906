"""Which chat template a tokenizer uses, the templates that come with the toolkit, and your own.

A template is *generation-marked* when ``{% generation %}`` surrounds what the assistant says,
end-of-turn token included: that is what may be trained on. Where it is not, the assistant's spans
are found from what the template renders (see ``assistant_spans``).
"""

import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_TEMPLATE: Final = "chatml"
ALIASES: Final = {"chatml_format": "chatml"}
"""Other names of built-in templates."""
FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    "qwen3": ("qwen3", "qwq"),
    "qwen": ("qwen",),
    "dialogpt": ("dialogpt", "microsoft/dialo"),
    "falcon": ("falcon",),
    "deepseek3": ("deepseek-r1", "deepseek-v3"),
    "deepseek": ("deepseek",),
    "llama": ("llama",),
    "mistral": ("mistral", "mixtral"),
    "smollm": ("smollm",),
}
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
        model_family_keywords: tokenizers whose ``name_or_path`` contains one of these words, in
            any case, use this template, whatever template they come with.

    Raises:
        ValueError: the template has no ``{% generation %}`` block.
    """
    if not is_generation_marked(template):
        raise ValueError(
            f"The template {template_name!r} has no {{% generation %}} block, so it does not say "
            f"which tokens the assistant wrote: {template!r:.80}. Surround the assistant's content "
            "and its end-of-turn token with {% generation %} ... {% endgeneration %}."
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
    found = set(_CONTROL_LITERAL.findall(template))
    return sorted(
        token
        for token in found
        if not of_turns or not _TAG.fullmatch(token) or token.endswith("_of_turn>")
    )


def own_template(tokenizer: "PreTrainedTokenizerBase | None") -> str | None:
    """The template that a tokenizer comes with, the default one if it has several."""
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):
        own = own.get("default")
    return own if isinstance(own, str) and own else None


def family_of(
    tokenizer: "PreTrainedTokenizerBase | None", *, added_only: bool = False
) -> str | None:
    """The template that the name of a tokenizer stands for, or ``None``."""
    name = str(getattr(tokenizer, "name_or_path", "") or "").lower()
    for template, added in reversed(_added.items()):
        if any(keyword in name for keyword in added.keywords):
            return template
    if added_only:
        return None
    for template, keywords in FAMILIES.items():
        if any(keyword in name for keyword in keywords):
            return template
    return None


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
    if name is None:
        own = own_template(tokenizer)
        if own is not None:
            return own
        name = family_of(tokenizer) or DEFAULT_TEMPLATE
    return builtin_template(name)
