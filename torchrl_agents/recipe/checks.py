"""Settings that can't work are refused by name, before anything is loaded."""

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final

import torch

from torchrl_agents.engines.own_engines import collects_on_ray, sampling_of
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.schema import (
    CollectorConfig,
    RecipeConfig,
    RolloutsConfig,
    TrainingConfig,
)

from .adapters import check_adapters
from .collection import MODES, POLICIES, staleness_of
from .optim import OPTIMIZERS, SCHEDULES
from .trackers import LOGGERS, missing_package

Rule = tuple[Callable[[Any], bool], str]
COUNT: Final[Rule] = (lambda x: x >= 1, "at least 1")
NOT_NEGATIVE: Final[Rule] = (lambda x: math.isfinite(x) and x >= 0, "at least 0 and finite")
POSITIVE: Final[Rule] = (lambda x: math.isfinite(x) and x > 0, "positive and finite")
FRACTION: Final[Rule] = (lambda x: 0 <= x < 1, "in [0, 1)")
RULES: Final[dict[str, Rule]] = {
    "seed": NOT_NEGATIVE,
    "policy.max_model_len": COUNT,
    "policy.max_new_tokens": COUNT,
    "policy.lora_rank": COUNT,
    "policy.lora_alpha": POSITIVE,
    "engine.num_engines": COUNT,
    "collector.num_prompts": COUNT,
    "collector.group_size": COUNT,
    "collector.max_turns": COUNT,
    "collector.max_episode_tokens": COUNT,
    "collector.min_turn_tokens": COUNT,
    "collector.num_collectors": COUNT,
    "collector.max_staleness": NOT_NEGATIVE,
    "collector.pipeline_depth": NOT_NEGATIVE,
    "collector.max_inflight_tasks": (lambda x: x == -1 or x >= 1, "-1 or at least 1"),
    "optim.learning_rate": POSITIVE,
    "optim.num_warmup_steps": NOT_NEGATIVE,
    "optim.weight_decay": NOT_NEGATIVE,
    "optim.beta1": FRACTION,
    "optim.beta2": FRACTION,
    "optim.eps": POSITIVE,
    "optim.max_grad_norm": POSITIVE,
    "warm_start.num_steps": NOT_NEGATIVE,
    "warm_start.batch_size": COUNT,
    "warm_start.learning_rate": POSITIVE,
    "train.num_steps": COUNT,
    "train.num_epochs": COUNT,
    "train.micro_batch_tokens": COUNT,
    "train.timeout_s": POSITIVE,
    "train.wait_s": POSITIVE,
    "checkpoint.every": COUNT,
    "checkpoint.keep_last": (lambda x: x >= 2, "at least 2: the newest may be damaged"),
    "checkpoint.keep_best": NOT_NEGATIVE,
    "evaluate.num_prompts": COUNT,
    "evaluate.every": COUNT,
    "evaluate.num_shown": NOT_NEGATIVE,
}
"""What each number must be; ``None`` is always allowed."""
AGES: Final = ("max_staleness", "staleness_policy", "pipeline_depth", "recompute")
STREAMING: Final = (*AGES, "max_inflight_tasks", "follow_load")
PARALLEL: Final = ("auto", "ddp", "fsdp2")
DTYPES: Final = ("float32", "bfloat16", "float16")


def check_config(recipe: Recipe, cfg: RecipeConfig) -> None:
    """Refuse settings that can't work, alone or together.

    Raises:
        SettingsError: names the setting, what it must be, and what it is.
    """
    for key, (holds, rule) in RULES.items():
        group, _, name = key.rpartition(".")
        owner: Any = getattr(cfg, group, None) if group else cfg
        value = getattr(owner, name, None)
        if value is not None and not holds(value):
            raise SettingsError(f"{key} must be {rule}, got {value}.")
    if cfg.dry_run and (cfg.overwrite or getattr(cfg, "resume", None) is not None):
        raise SettingsError(
            "dry_run=true changes no earlier run: leave overwrite= and resume= out."
        )
    for key in recipe.required:
        group, _, name = key.rpartition(".")
        if getattr(getattr(cfg, group), name) is None:
            raise SettingsError(f"{recipe.name} needs {key}=...")
    _check_names(recipe, cfg)
    if isinstance(cfg, TrainingConfig):
        if find_spec("matplotlib") is None:
            raise SettingsError(
                f"{recipe.name} draws its learning curve with matplotlib, which is not here: "
                "pip install 'torchrl-agents[train]'."
            )
        _check_trackers(cfg.logger.backends)
        _check_train(cfg, can_follow=recipe.updates is not None)
    _check_engine(cfg)
    if cfg.policy.model is None and cfg.policy.model_kwargs:
        raise SettingsError("policy.model_kwargs are for a policy.model that is loaded.")
    if isinstance(cfg, RolloutsConfig):
        _check_rollouts(recipe, cfg)
    _check_device(cfg.policy.device)
    _try_parts(
        {
            "policy": lambda: (sampling_of(cfg.policy), check_adapters(cfg)),
            **recipe.parts(cfg),
        }
    )


def _check_names(recipe: Recipe, cfg: RecipeConfig) -> None:
    names: dict[str, tuple[str, Collection[str]]] = {
        "engine.name": (cfg.engine.name, recipe.engines),
        "policy.dtype": (cfg.policy.dtype, DTYPES),
    }
    if isinstance(cfg, TrainingConfig):
        names["optim.name"] = (cfg.optim.name, OPTIMIZERS)
        names["optim.schedule"] = (cfg.optim.schedule, tuple(SCHEDULES))
        names["train.parallel"] = (cfg.train.parallel, PARALLEL)
        for i, backend in enumerate(cfg.logger.backends):
            names[f"logger.backends[{i}]"] = (backend, LOGGERS)
    if isinstance(cfg, RolloutsConfig):
        names["collector.mode"] = (cfg.collector.mode, MODES)
        names["collector.staleness_policy"] = (cfg.collector.staleness_policy, POLICIES)
    for key, (value, known) in names.items():
        if value not in known:
            raise SettingsError(f"{key} must be one of {', '.join(known)}, got {value!r}.")


def _check_trackers(backends: Sequence[str]) -> None:
    for backend in backends:
        package = missing_package(backend)
        if package is not None:
            raise SettingsError(
                f"logger.backends: {backend} needs the package {package}: pip install {package}."
            )


def num_ranks() -> int:
    """How many ranks torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _check_train(cfg: TrainingConfig, *, can_follow: bool) -> None:
    if cfg.train.stop_at is not None and cfg.evaluate.every is None:
        raise SettingsError(
            f"train.stop_at={cfg.train.stop_at} is compared with tests between the steps: set "
            "evaluate.every=."
        )
    kind, size = cfg.train.parallel, num_ranks()
    if size == 1 and kind != "auto":
        raise SettingsError(
            f"train.parallel={kind} is for several ranks: torchrun --nproc-per-node=2 ..."
        )
    if size > 1 and not can_follow:
        raise SettingsError(
            f"There are {size} ranks of torchrun; this recipe trains in one process."
        )
    if size > 1 and cfg.engine.name == "vllm" and not _has_servers(cfg):
        raise SettingsError(
            "An engine of vLLM in this process does not go with several ranks: start servers, and "
            "give engine.url=, engine.urls= or engine.devices=."
        )


def _has_servers(cfg: RecipeConfig) -> bool:
    """Whether vLLM runs in processes of its own, wherever they are started."""
    engine = cfg.engine
    return bool(engine.url or engine.urls or engine.starts_servers) or collects_on_ray(cfg)


def _check_engine(cfg: RecipeConfig) -> None:
    engine = cfg.engine
    if engine.name != "vllm" and (engine.urls or engine.starts_servers):
        raise SettingsError("engine.urls, num_engines and devices are for engine=vllm.")
    if bool(engine.url) + bool(engine.urls) + engine.starts_servers > 1:
        raise SettingsError(
            "engine.url, engine.urls, and engine.num_engines with engine.devices for engines that "
            "are started here: give one of them."
        )
    if len(engine.devices) % engine.num_engines:
        raise SettingsError(
            f"engine.devices={engine.devices} are shared out to engine.num_engines="
            f"{engine.num_engines}: take a multiple of them of devices."
        )
    if engine.name == "vllm" and (engine.url or engine.urls) and cfg.policy.max_model_len:
        raise SettingsError(
            f"policy.max_model_len={cfg.policy.max_model_len}: a server at engine.url has the "
            "length that it was started with (--max-model-len). Leave it out."
        )
    has_url = engine.name == "transformers" and engine.url
    if has_url or (engine.name != "vllm" and engine.engine_kwargs):
        raise SettingsError("engine.url and engine.engine_kwargs are for engine=vllm.")
    if engine.engine_kwargs.get("enable_lora"):
        if cfg.policy.lora_rank is None:
            raise SettingsError("engine.engine_kwargs.enable_lora needs policy.lora_rank.")
        if _has_servers(cfg):
            raise SettingsError(
                "engine.engine_kwargs.enable_lora is for an engine in this process; servers get "
                "merged weights."
            )
    if cfg.engine.name == "chat" and not (cfg.engine.url and cfg.policy.model):
        raise SettingsError(
            "engine=chat needs engine.url=http://.../v1 and policy.model=, its name at the server."
        )


def _check_rollouts(recipe: Recipe, cfg: RolloutsConfig) -> None:
    if recipe.needs_groups and cfg.collector.group_size < 2:
        raise SettingsError(
            "collector.group_size must be at least 2: a group of one never has a signal, got "
            f"{cfg.collector.group_size}."
        )
    _check_streaming(cfg)
    if cfg.collector.mode != "ray" and (
        cfg.collector.num_collectors > 1 or cfg.collector.remote_config
    ):
        raise SettingsError("collector.num_collectors and remote_config are for collector=ray.")
    if collects_on_ray(cfg):
        _check_engines_on_ray(cfg)
    smallest = cfg.collector.min_turn_tokens
    for key, bound in (
        ("policy.max_model_len", cfg.policy.max_model_len),
        ("collector.max_episode_tokens", cfg.collector.max_episode_tokens),
    ):
        if bound is not None and bound < smallest:
            raise SettingsError(
                f"{key}={bound} leaves no room for a turn of collector.min_turn_tokens={smallest}."
            )
    if cfg.policy.temperature <= 0:
        raise SettingsError(
            f"policy.temperature must be positive, got {cfg.policy.temperature}: rollouts of one "
            "prompt must differ."
        )
    _try_parts({"collector": lambda: staleness_of(cfg.collector)})


def _check_streaming(cfg: RolloutsConfig) -> None:
    default, collector = CollectorConfig(), cfg.collector
    changed = [name for name in STREAMING if getattr(collector, name) != getattr(default, name)]
    if collector.mode == "sync" and changed:
        raise SettingsError(f"collector.{changed[0]} is for collector=streaming.")
    if collector.follow_load and cfg.engine.name != "vllm":
        raise SettingsError(
            "collector.follow_load needs engine=vllm: other engines don't tell how full they are."
        )


def _check_engines_on_ray(cfg: RolloutsConfig) -> None:
    """Each collector has a copy of the model, or starts servers of its own."""
    engine, collector = cfg.engine, cfg.collector
    if engine.name != "vllm":
        return
    for name in ("url", "urls", "devices"):
        if getattr(engine, name):
            raise SettingsError(
                f"engine.{name}: on Ray each collector starts servers of its own, on the GPUs that "
                "+collector.remote_config.num_gpus= gives it. Leave it out."
            )
    if engine.num_engines % collector.num_collectors:
        raise SettingsError(
            f"engine.num_engines={engine.num_engines} are shared out to collector.num_collectors="
            f"{collector.num_collectors}: take a multiple of them of engines."
        )
    if "max_model_len" in engine.engine_kwargs:
        raise SettingsError(
            "engine.engine_kwargs.max_model_len: the trainer, which knows no engine on Ray, bounds "
            "episodes by policy.max_model_len. Set that instead."
        )


def _check_device(device: str | None) -> None:
    if device is None:
        return
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise SettingsError(f"policy.device={device!r} is no device of torch.") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise SettingsError(f"policy.device={device!r}, but torch finds no GPU here.")


def _try_parts(parts: Mapping[str, Callable[[], Any]]) -> None:
    """What other parts refuse, tried without a model."""
    for group, build in parts.items():
        try:
            build()
        except (TypeError, ValueError) as error:
            raise SettingsError(f"{group}: {error}") from error
