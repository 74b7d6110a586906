"""How a recipe starts: its settings are checked, tried in a dry run, and run."""

import errno
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from collectors.composition_checks import check_fit
from objectives import RankFailedError, Ranks
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_data.templates.template import render_template
from torchrl_envs.tasks.task import Task
from torchrl_modules import LLMWrapperBase
from torchrl_modules.engines.transformers import TransformersEngine

from .models import (
    OPTIMIZERS,
    SCHEDULES,
    build_sampler,
    check_adapters,
    collects_on_ray,
    load_model,
    load_tokenizer,
    model_source,
    sampling_of,
    vllm_policy,
    with_adapters,
    wrapper_arguments,
)
from .parallel import follow, loading_device
from .results import LOGGERS, MultirunSummary, check_loggers, finite, missing_package, open_loggers
from .run import Run, RunLog, StopSignals, plain_settings, remove, with_recorded
from .settings.command_line import prepare, task_settings
from .settings.schema import (
    CollectorConfig,
    EpisodeConfig,
    Recipe,
    RecipeConfig,
    RolloutsConfig,
    SettingsError,
    TrainingConfig,
)
from .tasks import MODES, POLICIES, build_task, set_token_budget, staleness_of

# Settings that can't work are refused by name, before anything is loaded.

Rule = tuple[Callable[[Any], bool], str]
COUNT: Final[Rule] = (lambda x: x >= 1, "at least 1")
NOT_NEGATIVE: Final[Rule] = (lambda x: math.isfinite(x) and x >= 0, "at least 0 and finite")
POSITIVE: Final[Rule] = (lambda x: math.isfinite(x) and x > 0, "positive and finite")
FRACTION: Final[Rule] = (lambda x: 0 <= x < 1, "in [0, 1)")
RULES: Final[dict[str, Rule]] = {
    "seed": (lambda x: 0 <= x < 1 << 63, "from 0 to 2**63 - 1"),
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
    _read_template(cfg)
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


def _read_template(cfg: RecipeConfig) -> None:
    """Put the text of ``policy.chat_template`` in the place of its file's name."""
    policy = cfg.policy
    if policy.add_control_tokens and (policy.model is None or cfg.engine.name != "transformers"):
        raise SettingsError(
            "policy.add_control_tokens changes a policy.model as it is loaded by Transformers, so "
            "it is for one with engine=transformers. The model of the run that trained it has them."
        )
    if policy.chat_template is None:
        return
    if policy.model is None or policy.chat_template_name is not None:
        raise SettingsError(
            "policy.chat_template is for a policy.model, in the place of policy.chat_template_name."
        )
    if "{" in policy.chat_template:  # of a run's settings: the text itself
        return
    where = f"policy.chat_template={policy.chat_template}"
    try:
        text = Path(policy.chat_template).read_text(encoding="utf-8")
        special = {f"{name}_token": "" for name in ("bos", "eos", "pad", "unk")}
        render_template(text, [{"role": "user", "content": "?"}], variables=special)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{where}: {error}") from error
    if "{" not in text:
        raise SettingsError(f"{where} is no Jinja template: it shows no message.")
    policy.chat_template = text


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


# A model of its config, on the meta device: it has shapes and no weights.

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


# What a dry run checks: all that a run would refuse later, but for what weights alone can tell.


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
                setup.env.encode_demonstrations(policy.encoder)
        if recipe.rehearse is not None:
            recipe.rehearse(cfg, setup, policy)
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
                tokenizer = load_tokenizer(cfg.policy, source)
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


# How a recipe runs: its settings are checked, its folder is its own, it is told how it ended.

_LOG = logging.getLogger("torchrl_agents")
_OF_THE_DISK: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
Build = Callable[[Recipe, Any, dict[str, Any]], Any]
"""Gives the task and its environments, a tuple."""
Train = Callable[[Any, Any, Run, RunLog, StopSignals], dict[str, Any]]
"""Trains as the settings say; gives the result."""


def run_recipe(recipe: Recipe, train: Train, build: Build = build_task) -> None:
    """Do what the command line says: help, a check, or a run, with short errors for settings.

    Args:
        recipe: its settings.
        train: its loop.
        build: makes the task and its environments.
    """
    summary = MultirunSummary()

    def with_settings(typed: DictConfig) -> None:
        try:
            _run(recipe, train, build, typed, summary)
        except SettingsError as error:
            raise SystemExit(f"{recipe.name}.py: {error}") from error
        except RankFailedError as error:
            raise SystemExit(str(error)) from error
        except (OSError, SafetensorError) as error:
            if isinstance(error, OSError) and error.errno not in _OF_THE_DISK:
                raise
            folder = HydraConfig.get().runtime.output_dir
            words = f"a file can't be written ({error}). What is whole so far is in {folder}."
            raise SystemExit(f"{recipe.name}.py: {words}") from error

    try:
        _look_in(Path.cwd())
        sys.argv[1:] = with_own_task(with_recorded(sys.argv[1:]))
        text = prepare(recipe, sys.argv[1:])
    except SettingsError as error:
        raise SystemExit(f"{recipe.name}.py: {error}") from error
    if text is not None:
        print(text)
        return
    decorate = hydra.main(
        version_base="1.3", config_path=str(recipe.config_dir), config_name=recipe.name
    )
    try:
        decorate(with_settings)()
    finally:
        summary.show()


def _look_in(folder: Path) -> None:
    """Find the user's modules there, here and in workers, after all that is installed."""
    sys.path.append(str(folder))
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), str(folder)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def with_own_task(arguments: Sequence[str]) -> list[str]:
    """A command line that gives parts of a task and names none is about ``environment``."""
    names = [argument.partition("=")[0].lstrip("+") for argument in arguments]
    is_own = {"task.factory", "task.tools", "task.rewards"} & {*names}
    return ["task=environment", *arguments] if is_own and "task" not in names else [*arguments]


def _run(
    recipe: Recipe, train: Train, build: Build, typed: DictConfig, summary: MultirunSummary
) -> None:
    """Check, train, tell."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    with ExitStack() as stack:
        stack.callback(_remove_if_empty, folder)
        settings = task_settings(typed)
        cfg = OmegaConf.to_object(typed)
        assert isinstance(cfg, RecipeConfig)
        check_config(recipe, cfg)
        if cfg.dry_run:  # its folder is its own, and what is refused leaves nothing
            stack.push(lambda refused, *_: remove(folder) if refused else None)
        disable_progress_bar()  # loading a model has bars of its own
        follows = os.environ.get("RANK", "0") != "0"
        if cfg.dry_run and follows:
            return
        ranks = stack.enter_context(_ranks(cfg))
        if follows:
            follow(ranks, recipe)
            return
        stop = stack.enter_context(StopSignals())
        run = stack.enter_context(open_run(folder, cfg, plain_settings(typed), ranks))
        log = stack.enter_context(RunLog(folder / f"{recipe.name}.log"))
        _LOG.info("%s on %s, seed %d; results in %s", recipe.name, cfg.task.id, cfg.seed, folder)
        with log.phase("loading the data"):
            setup = build(recipe, cfg, settings)
        for env in setup[1:]:
            stack.callback(env.close, raise_if_closed=False)
        config = OmegaConf.to_yaml(OmegaConf.structured(cfg))
        (folder / "config.yaml").write_text(config, encoding="utf-8")
        if cfg.dry_run:
            with log.phase("checking the model and the trackers"):
                check_run(recipe, cfg, setup)
            run.set_status("checked")
            print(config)
            return
        if isinstance(cfg, TrainingConfig):
            run.loggers = stack.enter_context(open_loggers(cfg, run, recipe.name))
        result = train(cfg, setup, run, log, stop)
        run.set_status("interrupted" if stop.received else "finished")
        sys.stdout.flush()
        print(json.dumps(finite(result)), flush=True)
        summary.add(result)
        if stop.received:
            raise SystemExit(stop.status)


def _ranks(cfg: RecipeConfig) -> Ranks:
    """The ranks that torchrun started; this process, where it trains alone."""
    if not isinstance(cfg, TrainingConfig) or cfg.dry_run:
        return Ranks.alone()
    ranks = Ranks.join(
        device=cfg.policy.device, timeout_s=cfg.train.timeout_s, wait_s=cfg.train.wait_s
    )
    cfg.policy.device = loading_device(cfg, ranks)
    return ranks


def open_run(folder: Path, cfg: RecipeConfig, settings: dict[str, Any], ranks: Ranks) -> Run:
    """The folder of a run that begins or goes on."""
    resume = getattr(cfg, "resume", None) is not None
    return Run(folder, settings=settings, overwrite=cfg.overwrite, resume=resume, ranks=ranks)


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
