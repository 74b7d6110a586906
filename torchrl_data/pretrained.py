"""Loading of models and tokenizers: no code that comes with them runs unless it is asked for."""

from __future__ import annotations

from typing import Any


def load_pretrained(auto: Any, path: Any, **arguments: Any) -> Any:
    """Return what a class of Transformers loads, without a question on the terminal.

    Args:
        auto: ``AutoModelForCausalLM``, ``AutoTokenizer`` and the like.
        path: hub id or folder.
        **arguments: of its ``from_pretrained``; ``trust_remote_code`` is ``False`` where it is not
            given.

    Raises:
        ValueError: it comes with code of its own, and that is not trusted.
    """
    arguments.setdefault("trust_remote_code", False)
    try:
        return auto.from_pretrained(path, **arguments)
    except ValueError as error:
        if arguments["trust_remote_code"] or "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{str(path)!r} comes with code of its own, which is not run unless you trust it. Read "
            "it, and give trust_remote_code=True: TransformersWrapper(..., model_kwargs="
            "{'trust_remote_code': True}), in a recipe +policy.model_kwargs.trust_remote_code=true."
        ) from error
