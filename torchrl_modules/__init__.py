"""Policies: inference engines behind one prompt/response/full layout."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .chunked_head import chunked_log_prob
    from .engine import Engine, Generation
    from .sampling import SamplingParameters
    from .transformers_engine import TransformersEngine
    from .transformers_wrapper import TransformersWrapper
    from .vllm_wrapper import vLLMWrapper
    from .wrapper_base import LLMWrapperBase

_HOMES = {
    "Engine": "engine",
    "Generation": "engine",
    "LLMWrapperBase": "wrapper_base",
    "SamplingParameters": "sampling",
    "TransformersEngine": "transformers_engine",
    "TransformersWrapper": "transformers_wrapper",
    "chunked_log_prob": "chunked_head",
    "vLLMWrapper": "vllm_wrapper",
}

__all__ = [
    "Engine",
    "Generation",
    "LLMWrapperBase",
    "SamplingParameters",
    "TransformersEngine",
    "TransformersWrapper",
    "chunked_log_prob",
    "vLLMWrapper",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
