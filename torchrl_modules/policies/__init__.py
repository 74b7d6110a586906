"""Policies: modules that write a turn into a batch, or score it."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from torchrl_data import ChatHistory, LogProbs, Masks, Text, Tokens

    from .base import LLMWrapperBase
    from .transformers_wrapper import TransformersWrapper
    from .vllm_wrapper import vLLMWrapper

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

__getattr__ = lazy_names(__name__, __file__)
