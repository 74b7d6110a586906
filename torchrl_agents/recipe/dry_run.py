"""What a dry run checks: all that a run would refuse later, but for what weights alone can tell.

Models are built of their config on the meta device: they have shapes and no weights.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from collectors.composition_checks import check_fit
from torchrl_agents.engines.own_engines import collects_on_ray, vllm_policy, wrapper_arguments
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.schema import (
    EpisodeConfig,
    RecipeConfig,
    RolloutsConfig,
    TrainingConfig,
)
from torchrl_data import encode_demonstrations
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_envs.tasks.task import Task
from torchrl_modules import LLMWrapperBase
from torchrl_modules.engines.transformers_engine import TransformersEngine

from .adapters import with_adapters
from .policies import build_sampler, load_model, model_source
from .preparation import set_token_budget
from .trackers import check_loggers

_FILES: Final = ("model.safetensors", "pytorch_model.bin")
_MOST_OF_HEADER: Final = 100_000_000
"""Bytes; as the format has it."""
_ELSEWHERE: Final = {"gguf_file", "subfolder", "variant"}
"""Arguments with which the weights are in other files."""
_OF_LOADING: Final = _ELSEWHERE | {
    *("cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision"),
    *("token", "trust_remote_code", "attn_implementation", "experts_implementation"),
    *("device_map", "max_memory", "offload_folder", "offload_buffers", "low_cpu_mem_usage"),
    *("ignore_mismatched_sizes", "use_safetensors", "weights_only", "disable_mmap", "key_mapping"),
    *("quantization_config", "fusion_config", "adapter_name", "adapter_kwargs", "tp_plan"),
    *("tp_size", "device_mesh", "distributed_config", "generation_config", "kernel_config"),
    *("use_kernels", "allow_all_kernels", "tqdm_class"),
}
"""Arguments of ``from_pretrained`` that no model is made with."""


def check_run(recipe: Recipe, cfg: RecipeConfig, setup: Any) -> None:
    """Refuse what a run would refuse after its data: model, adapters, template, servers, trackers.

    Args:
        recipe: whose run it is.
        cfg: the settings, filled in.
        setup: the task and its environments.

    Raises:
        SettingsError: as the run would, or in place of what it would break with.
    """
    task, *envs = setup
    policy = _policy_without_weights(cfg, task)
    if policy is not None:
        limits = next(v for v in vars(cfg).values() if isinstance(v, EpisodeConfig))
        with _told_of(f"task={cfg.task.id}"):
            for env in envs:
                set_token_budget(env, limits, policy)
                check_fit(env, policy, who=recipe.name)
            if isinstance(cfg, RolloutsConfig) and cfg.warm_start.num_steps:
                encode_demonstrations(policy.encoder, task.demonstrations)
        if recipe.rehearse is not None:
            recipe.rehearse(cfg, task, policy)
    if isinstance(cfg, TrainingConfig):
        check_loggers(cfg, recipe.name)


def _policy_without_weights(cfg: RecipeConfig, task: Task) -> Any:
    """What samples, and how it reads and writes; nothing, where an engine alone would tell."""
    if cfg.engine.name == "chat":
        return build_sampler(cfg, task)
    starts_here = cfg.engine.name == "vllm" and not (cfg.engine.url or cfg.engine.urls)
    if collects_on_ray(cfg):
        _check_package("collector=ray", "ray", "pip install 'torchrl-agents[ray]'")
    elif starts_here:
        _check_package("engine=vllm", "vllm", "see docs/vllm.md, or give engine.url=")
    with model_source(cfg, task) as source:
        if cfg.engine.name == "vllm" and not isinstance(cfg, TrainingConfig):
            # What Transformers can't compute an engine of vLLM may.
            with _told_of(f"policy.model={source!r}"):
                AutoConfig.from_pretrained(source)
                tokenizer = AutoTokenizer.from_pretrained(source)
                ConversationEncoder(tokenizer, chat_template_name=cfg.policy.chat_template_name)
            return None if starts_here else _reached(cfg, source, tokenizer)
        settings = replace(cfg.policy, device="meta")
        model, tokenizer = load_model(settings, source, load=outline)
        with _told_of(f"policy.model={source!r} can't be used so"):
            engine = TransformersEngine(model, max_model_len=cfg.policy.max_model_len, check=False)
            policy = LLMWrapperBase(engine, **wrapper_arguments(cfg.policy, tokenizer))
        if cfg.policy.lora_rank is not None:
            with_adapters(cfg.policy, model)
        serves = cfg.engine.name == "vllm" and not starts_here and not collects_on_ray(cfg)
        return _reached(cfg, source, tokenizer) if serves else policy


def _check_package(who: str, package: str, hint: str) -> None:
    if find_spec(package) is None:
        raise SettingsError(f"{who} needs the package {package}, which is not here: {hint}.")


def _reached(cfg: RecipeConfig, source: str, tokenizer: Any) -> LLMWrapperBase:
    """A policy over servers that run."""
    with _told_of("engine"):
        return vllm_policy(cfg, source, tokenizer)


@contextmanager
def _told_of(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        raise SettingsError(f"{what}: {error}") from error


def outline(path: str, *, dtype: torch.dtype, **arguments: Any) -> PreTrainedModel:
    """A causal language model on the meta device; the files of its weights have to be there.

    Args:
        path: hub id, of which no weights are fetched, or a folder.
        dtype: of the weights that it has not got.
        **arguments: of ``from_pretrained``.

    Raises:
        ValueError: there is no such model, as from ``from_pretrained``.
        OSError: it has no config, or its weights are not there or broken off.
        TypeError: no model and no config has such an argument.
    """
    config, rest = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **arguments)
    unknown = sorted(set(rest) - _OF_LOADING)
    if unknown:
        raise TypeError(f"from_pretrained takes no {', '.join(unknown)}")
    names = ("attn_implementation", "trust_remote_code")
    own = {name: arguments[name] for name in names if name in arguments}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **own)
    if Path(path).is_dir() and not _ELSEWHERE & arguments.keys():
        _check_weights(Path(path))
    return model


def _check_weights(folder: Path) -> None:
    """Find all files of a model's weights, without reading them."""
    names: set[str] = {name for name in _FILES if (folder / name).is_file()}
    for name in _FILES:
        index = folder / f"{name}.index.json"
        if not names and index.is_file():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing or not names:
        raise OSError(f"its folder has no {', '.join(missing) or ' or '.join(_FILES)}")
    for name in sorted(names):
        size = (folder / name).stat().st_size
        if name.endswith(".safetensors") and (whole := _size_in_header(folder / name)) != size:
            raise OSError(f"{name} has {size} bytes, and should have {whole}: it broke off")


def _size_in_header(path: Path) -> int:
    """The bytes that a file of safetensors says that it has; nothing but its header is read."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(length, _MOST_OF_HEADER)))
        except ValueError as error:
            raise OSError(f"{path.name} has no header of safetensors") from error
    ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0)
