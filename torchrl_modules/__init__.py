"""Policies: inference engines behind one prompt/response/full layout."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_data import ChatHistory, LogProbs, Masks, Text, Tokens

    from .chunked_head import chunked_log_prob
    from .engine import Engine, EngineDied, Generation, VersionSpan
    from .process_group import stateless_init_process_group
    from .sampling import SamplingParameters
    from .supervised_engine import SupervisedEngine
    from .token_distribution import TokenDistribution
    from .transformers_engine import TransformersEngine
    from .transformers_wrapper import TransformersWrapper
    from .vllm_async import AsyncVLLMEngine
    from .vllm_engine import VLLMEngine
    from .vllm_placement import LLMOnDevice, make_vllm_worker
    from .vllm_serve import start_server
    from .vllm_server import VLLMServerEngine
    from .vllm_worker import vLLMWorker
    from .vllm_wrapper import vLLMWrapper
    from .wrapper_base import LLMWrapperBase

_HOMES = {
    "AsyncVLLMEngine": "vllm_async",
    "Engine": "engine",
    "EngineDied": "engine",
    "Generation": "engine",
    "LLMOnDevice": "vllm_placement",
    "LLMWrapperBase": "wrapper_base",
    "SamplingParameters": "sampling",
    "SupervisedEngine": "supervised_engine",
    "TokenDistribution": "token_distribution",
    "TransformersEngine": "transformers_engine",
    "TransformersWrapper": "transformers_wrapper",
    "VLLMEngine": "vllm_engine",
    "VLLMServerEngine": "vllm_server",
    "VersionSpan": "engine",
    "chunked_log_prob": "chunked_head",
    "make_vllm_worker": "vllm_placement",
    "start_server": "vllm_serve",
    "stateless_init_process_group": "process_group",
    "vLLMWorker": "vllm_worker",
    "vLLMWrapper": "vllm_wrapper",
}

# The groups that policies read and write, where TorchRL's users look for them too.
_LAYOUT = ("ChatHistory", "LogProbs", "Masks", "Text", "Tokens")

__all__ = [
    "AsyncVLLMEngine",
    "ChatHistory",
    "Engine",
    "EngineDied",
    "Generation",
    "LLMOnDevice",
    "LLMWrapperBase",
    "LogProbs",
    "Masks",
    "SamplingParameters",
    "SupervisedEngine",
    "Text",
    "TokenDistribution",
    "Tokens",
    "TransformersEngine",
    "TransformersWrapper",
    "VLLMEngine",
    "VLLMServerEngine",
    "VersionSpan",
    "chunked_log_prob",
    "make_vllm_worker",
    "start_server",
    "stateless_init_process_group",
    "vLLMWorker",
    "vLLMWrapper",
]


def __getattr__(name: str) -> Any:
    if name in _LAYOUT:
        return getattr(import_module("torchrl_data"), name)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
