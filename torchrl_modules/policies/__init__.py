"""Policies: modules that write a turn into a batch, or score it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_data import ChatHistory, LogProbs, Masks, Text, Tokens

    from .base import LLMWrapperBase
    from .transformers_wrapper import TransformersWrapper
    from .vllm_wrapper import vLLMWrapper

_HOMES = {
    "ChatHistory": "torchrl_data",
    "LLMWrapperBase": "torchrl_modules.policies.base",
    "LogProbs": "torchrl_data",
    "Masks": "torchrl_data",
    "Text": "torchrl_data",
    "Tokens": "torchrl_data",
    "TransformersWrapper": "torchrl_modules.policies.transformers_wrapper",
    "vLLMWrapper": "torchrl_modules.policies.vllm_wrapper",
}

__all__ = [
    "ChatHistory",
    "LLMWrapperBase",
    "LogProbs",
    "Masks",
    "Text",
    "Tokens",
    "TransformersWrapper",
    "vLLMWrapper",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
