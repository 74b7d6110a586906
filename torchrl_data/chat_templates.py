"""The chat templates that come with the toolkit, and which one a tokenizer uses.

A template is *generation-marked* when ``{% generation %}`` surrounds what the assistant says,
end-of-turn token included: that is what may be trained on.
"""

import re
from importlib.resources import files
from typing import Final

from transformers import PreTrainedTokenizerBase

DEFAULT_TEMPLATE: Final = "chatml"
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


def builtin_template(name: str) -> str:
    """Jinja source of a built-in template.

    Args:
        name: for instance ``"chatml"``.

    Raises:
        ValueError: there is no such template; the message lists those that there are.
    """
    folder = files("torchrl_data") / "templates"
    path = folder / f"{name}.jinja"
    if not path.is_file():
        known = sorted(p.name.removesuffix(".jinja") for p in folder.iterdir())
        raise ValueError(f"There is no chat template named {name!r}; there are {known}.")
    return path.read_text(encoding="utf-8")


def is_generation_marked(template: str) -> bool:
    """Whether a template says which part of it the assistant wrote."""
    return _GENERATION_MARK.search(template) is not None


def resolve_template(
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template: str | None = None,
    chat_template_name: str | None = None,
) -> str:
    """The template for a tokenizer: the one asked for, its own if marked, else the default.

    Args:
        tokenizer: its ``chat_template`` is used when it is generation-marked.
        chat_template: Jinja source that overrides everything.
        chat_template_name: name of a built-in template.

    Raises:
        ValueError: both are given, or the template is not generation-marked.
    """
    if chat_template is not None and chat_template_name is not None:
        raise ValueError("Give either chat_template or chat_template_name, not both.")
    if chat_template is None:
        own = getattr(tokenizer, "chat_template", None)
        if chat_template_name is None and isinstance(own, str) and is_generation_marked(own):
            return own
        return builtin_template(chat_template_name or DEFAULT_TEMPLATE)
    if not is_generation_marked(chat_template):
        raise ValueError(
            "The chat template has no {% generation %} block, so it does not say which tokens "
            "the assistant wrote. Surround the assistant's content and its end-of-turn token "
            "with {% generation %} ... {% endgeneration %}."
        )
    return chat_template
