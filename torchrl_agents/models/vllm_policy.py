"""A policy over vLLM: in this process, at servers that run, or at servers started here."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from torchrl_agents.settings.errors import refusing
from torchrl_agents.settings.schema import PolicyConfig, RecipeConfig, RolloutsConfig
from torchrl_modules import EngineFleet, LLMWrapperBase
from torchrl_modules.vllm.runtime import import_vllm, request_batch_invariance
from torchrl_modules.vllm.settings import ADAPTER_RANKS, mask_settings

from .hosted_fleet import hosted_fleet
from .loading import load_tokenizer
from .policy_arguments import wrapper_arguments
from .saved_agents import adapter_ranks, whole_models
from .sources import Source, files_of, folder_of, model_files, model_folder
from .started_fleet import started_fleet


def vllm_policy(
    cfg: RecipeConfig,
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    processor: Any = None,
    *,
    share: tuple[int, int] | None = None,
) -> LLMWrapperBase:
    """A policy over vLLM.

    Args:
        cfg: the settings.
        source: hub id or folder of the model.
        tokenizer: its tokenizer.
        processor: of a model that reads images.
        share: of several models with engines of their own, which one this is and how many there
            are; the first of the agents' when not given.

    Raises:
        SettingsError: no server answers, or the engine can't be made so.
    """
    from torchrl_modules import vLLMWrapper

    arguments = wrapper_arguments(cfg.policy, tokenizer)
    number, num_models = share or (0, max(1, len(whole_models(cfg))))
    engine_kwargs = _engine_kwargs(cfg, num_models)
    if cfg.engine.starts_servers:
        # The folder of an embedded model goes, and an engine may be started again.
        kept = source if cfg.policy.model is not None else files_of(source)
        devices, count = cfg.engine.devices, cfg.engine.num_engines
        if cfg.engine.nodes:
            from torchrl_modules.vllm.bridges import OwnServerEngine

            own = partial(OwnServerEngine, processor=processor)
            fleet = hosted_fleet(kept, cfg.engine, own=own, **engine_kwargs)
        else:
            devices, count = _part(devices, number, num_models), count // num_models
            fleet = _started_fleet(kept, devices, count, engine_kwargs, processor)
        return vLLMWrapper(fleet, **arguments)
    where = list(_part(cfg.engine.urls, number, num_models)) or cfg.engine.url or source
    with refusing("engine"):  # servers that run are asked
        return vLLMWrapper(
            where, engine_kwargs=engine_kwargs or None, processor=processor, **arguments
        )


def engines_of_collector(
    cfg: RolloutsConfig, policy: LLMWrapperBase
) -> Callable[[], LLMWrapperBase]:
    """Factory of the policy of a collector on Ray: over servers of its own, on its node and GPUs.

    Args:
        cfg: the settings.
        policy: over Transformers; has the model and its tokenizer.
    """
    given = cfg.policy.model
    source: Source = model_files(policy) if given is None else model_folder(given)
    if isinstance(source, str) and Path(source).is_dir():
        source = str(Path(source).resolve())  # the collector's directory is another one
    count = cfg.engine.num_engines // cfg.collector.num_collectors
    return partial(_policy_of_collector, source, count, _engine_kwargs(cfg), cfg.policy)


def _policy_of_collector(
    source: Source, count: int, engine_kwargs: Mapping[str, Any], cfg: PolicyConfig
) -> LLMWrapperBase:
    from torchrl_modules import vLLMWrapper

    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if len(visible) % count:
        raise ValueError(
            f"{count} engines of a collector share the GPUs that Ray gave it, {visible}. Give it "
            f"a multiple of them: +collector.remote_config.num_gpus={count}."
        )
    with folder_of(source) as folder:
        tokenizer = load_tokenizer(cfg, folder)
    fleet = _started_fleet(source, visible, count, engine_kwargs)
    return vLLMWrapper(fleet, **wrapper_arguments(cfg, tokenizer))


def _started_fleet(
    source: Source,
    devices: Sequence[int | str],
    count: int,
    options: Mapping[str, Any],
    processor: Any = None,
) -> EngineFleet:
    """Servers that are started here, each on its share of the devices."""
    from torchrl_modules import start_server
    from torchrl_modules.vllm.bridges import OwnServerEngine

    own = partial(OwnServerEngine, processor=processor)
    return started_fleet(source, devices, count, start=start_server, own=own, **options)


def _part(items: Sequence[Any], number: int, count: int) -> Sequence[Any]:
    """One of equal parts of a list."""
    each = len(items) // count
    return items[number * each : (number + 1) * each]


def _is_on_cpu(cfg: RecipeConfig) -> bool:
    """Return whether vLLM, which is imported into this process, computes on a CPU."""
    if cfg.engine.batch_invariant and not cfg.engine.starts_servers:
        request_batch_invariance(who="engine.batch_invariant")  # before vLLM is imported
    return bool(import_vllm().current_platform.is_cpu())


def _shared_memory(cfg: RecipeConfig, count: int) -> dict[str, Any]:
    """Settings by which several engines of this process share what the settings give to one."""
    given, shared = cfg.engine.engine_kwargs, {}
    if "kv_cache_memory_bytes" in given:
        shared["kv_cache_memory_bytes"] = int(given["kv_cache_memory_bytes"]) // count
    if "gpu_memory_utilization" in given or not _is_on_cpu(cfg):
        shared["gpu_memory_utilization"] = cfg.engine.gpu_share / count
    return shared


def _engine_kwargs(cfg: RecipeConfig, num_models: int = 1) -> dict[str, Any]:
    """Settings of an engine, of which as many are made as there are models."""
    engine_kwargs = dict(cfg.engine.engine_kwargs)
    is_elsewhere = bool(cfg.engine.url or cfg.engine.urls)
    if cfg.policy.sampling_mask:
        engine_kwargs = {**mask_settings(is_cpu=_is_on_cpu(cfg)), **engine_kwargs}
    if num_models > 1 and not (is_elsewhere or cfg.engine.starts_servers):
        engine_kwargs |= _shared_memory(cfg, num_models)
    agent_ranks = {} if is_elsewhere else adapter_ranks(cfg)
    if agent_ranks:
        engine_kwargs.setdefault("enable_lora", True)
    if cfg.policy.quantization is not None:
        engine_kwargs["quantization"] = cfg.policy.quantization
    if cfg.engine.batch_invariant:
        engine_kwargs["batch_invariant"] = True
    if cfg.engine.colocate and not is_elsewhere:
        engine_kwargs["enable_sleep_mode"] = True
    if cfg.policy.max_model_len is not None:
        engine_kwargs.setdefault("max_model_len", cfg.policy.max_model_len)
    if engine_kwargs.get("enable_lora"):
        # An engine applies the adapters that are trained, of all versions that may be in flight.
        trained = max(cfg.policy.lora_rank or 1, *agent_ranks.values(), 1)
        ranks = (rank for rank in ADAPTER_RANKS if rank >= trained)
        engine_kwargs.setdefault("max_lora_rank", next(ranks, trained))
        settings = cfg.collector if isinstance(cfg, RolloutsConfig) else None
        streams = settings is not None and settings.mode != "sync"
        if agent_ranks or streams:
            versions = settings.max_staleness + 2 if settings and streams else 1
            engine_kwargs.setdefault("max_loras", versions * max(1, len(agent_ranks)))
    return engine_kwargs
