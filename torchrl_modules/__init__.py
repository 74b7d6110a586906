"""Policies: inference engines behind one prompt/response/full layout."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from torchrl_data import ChatHistory as ChatHistory
    from torchrl_data import LogProbs as LogProbs
    from torchrl_data import Masks as Masks
    from torchrl_data import Text as Text
    from torchrl_data import Tokens as Tokens

    from .critics.transformers_critic import TransformersCritic as TransformersCritic
    from .critics.value_model import load_value_model as load_value_model
    from .critics.value_model import value_model_of as value_model_of
    from .engines.adapter_engine import engines_over_one_base as engines_over_one_base
    from .engines.async_transformers import AsyncTransformersEngine as AsyncTransformersEngine
    from .engines.batching_engine import BatchingEngine as BatchingEngine
    from .engines.checked_generation import check_prompt as check_prompt
    from .engines.engine import AsyncEngine as AsyncEngine
    from .engines.engine import Engine as Engine
    from .engines.engine import EngineDied as EngineDied
    from .engines.engine import EngineLoad as EngineLoad
    from .engines.engine import Generation as Generation
    from .engines.engine import VersionSpan as VersionSpan
    from .engines.fleet import EngineFleet as EngineFleet
    from .engines.json_client import JSONClient as JSONClient
    from .engines.open_async import open_async as open_async
    from .engines.process_state import EngineHealth as EngineHealth
    from .engines.transformers import TransformersEngine as TransformersEngine
    from .model_splits import split_model as split_model
    from .policies.agent_policies import AgentPolicies as AgentPolicies
    from .policies.base import LLMWrapperBase as LLMWrapperBase
    from .policies.model_files import local_model as local_model
    from .policies.sglang_wrapper import SGLangWrapper as SGLangWrapper
    from .policies.shared_base import models_over_one_base as models_over_one_base
    from .policies.transformers_wrapper import TransformersWrapper as TransformersWrapper
    from .policies.vllm_wrapper import vLLMWrapper as vLLMWrapper
    from .quantized_forward import quantize_forward as quantize_forward
    from .sampling.parameters import SamplingParameters as SamplingParameters
    from .scoring.chunked_log_prob import chunked_log_prob as chunked_log_prob
    from .scoring.token_distribution import TokenDistribution as TokenDistribution
    from .sglang.server import start_sglang_server as start_sglang_server
    from .sglang.server_engine import SGLangServerEngine as SGLangServerEngine
    from .vllm.async_engine import AsyncVLLMEngine as AsyncVLLMEngine
    from .vllm.engine import VLLMEngine as VLLMEngine
    from .vllm.server import start_server as start_server
    from .vllm.server_engine import VLLMServerEngine as VLLMServerEngine
    from .vllm.supervised_engine import LLMOnDevice as LLMOnDevice
    from .vllm.supervised_engine import SupervisedEngine as SupervisedEngine
    from .vllm.supervised_engine import make_vllm_worker as make_vllm_worker
    from .vllm.worker import vLLMWorker as vLLMWorker
    from .weight_transfer.broadcast_group import (
        stateless_init_process_group as stateless_init_process_group,
    )

__getattr__ = lazy_names(__name__, __file__)
