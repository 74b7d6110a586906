"""Policies: inference engines behind one prompt/response/full layout."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from torchrl_data import ChatHistory, LogProbs, Masks, Text, Tokens

    from .engines.bridges import open_async
    from .engines.continuous import AsyncTransformersEngine
    from .engines.engine import AsyncEngine, Engine, EngineDied, EngineLoad, Generation, VersionSpan
    from .engines.fleet import EngineFleet
    from .engines.supervision import EngineHealth
    from .engines.transformers import TransformersEngine
    from .policies.base import LLMWrapperBase
    from .policies.model_files import local_model
    from .policies.transformers_wrapper import TransformersWrapper
    from .policies.vllm_wrapper import vLLMWrapper
    from .sampling import SamplingParameters
    from .scoring.scorer import TokenDistribution, chunked_log_prob
    from .vllm.client import VLLMServerEngine
    from .vllm.engine import AsyncVLLMEngine, VLLMEngine
    from .vllm.server import LLMOnDevice, SupervisedEngine, make_vllm_worker, start_server
    from .vllm.worker import vLLMWorker
    from .weight_transfer import stateless_init_process_group

__all__ = [
    "AsyncEngine",
    "AsyncTransformersEngine",
    "AsyncVLLMEngine",
    "ChatHistory",
    "Engine",
    "EngineDied",
    "EngineFleet",
    "EngineHealth",
    "EngineLoad",
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
    "local_model",
    "make_vllm_worker",
    "open_async",
    "start_server",
    "stateless_init_process_group",
    "vLLMWorker",
    "vLLMWrapper",
]

__getattr__ = lazy_names(__name__, __file__)
