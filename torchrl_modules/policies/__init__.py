"""Policies: modules that write a turn into a batch, or score it."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from torchrl_data import ChatHistory as ChatHistory
    from torchrl_data import LogProbs as LogProbs
    from torchrl_data import Masks as Masks
    from torchrl_data import Text as Text
    from torchrl_data import Tokens as Tokens

    from .base import LLMWrapperBase as LLMWrapperBase
    from .transformers_wrapper import TransformersWrapper as TransformersWrapper
    from .vllm_wrapper import vLLMWrapper as vLLMWrapper


__getattr__ = lazy_names(__name__, __file__)
