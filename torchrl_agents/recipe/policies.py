"""The model that is trained and the policy that samples, from the settings."""

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.chat_template_utils import render_jinja_template

from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import (
    PolicyConfig,
    RecipeConfig,
    RolloutsConfig,
    TrainingConfig,
)
from torchrl_data.conversation.conversations import Message
from torchrl_data.templates.registry import builtin_template
from torchrl_envs.tasks.task import Task
from torchrl_modules import (
    EngineFleet,
    LLMWrapperBase,
    SamplingParameters,
    TransformersWrapper,
)
from torchrl_modules.engines.transformers_engine import TransformersEngine
from torchrl_modules.policies.compute_dtype import warn_of_other_dtype
from torchrl_modules.policies.model_loading import load_causal_lm
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer
from torchrl_modules.vllm.settings import ADAPTER_RANKS

from .chat_server import ChatServerPolicy

_NUM_TEXTS = 1024


def sampling_of(cfg: PolicyConfig) -> SamplingParameters:
    """How turns are sampled."""
    return SamplingParameters(
        max_new_tokens=cfg.max_new_tokens or 1,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        min_p=cfg.min_p,
    )


@contextmanager
def model_source(cfg: RecipeConfig, task: Task) -> Iterator[str]:
    """Where to load the model from: as given, a run's, or a folder with the embedded one."""
    if cfg.policy.model is not None:
        yield model_folder(cfg.policy.model)
        return
    with tempfile.TemporaryDirectory(prefix="torchrl-agents-") as folder:
        tokenizer = _task_tokenizer(task)
        tokenizer.save_pretrained(folder)
        torch.manual_seed(cfg.seed)
        tiny_qwen3(len(tokenizer)).save_pretrained(folder)
        yield folder


def model_folder(source: str) -> str:
    """Hub id or path of a model, of whatever has one: a run's folder has it in ``model/``."""
    of_run = Path(source) / "model"
    return str(of_run) if (of_run / "config.json").is_file() else source


def _task_tokenizer(task: Task) -> PreTrainedTokenizerBase:
    texts = task_texts(task)
    return train_tokenizer(texts, isolated=task.isolated, phrases=task.phrases)


def task_texts(task: Task) -> list[str]:
    """What the task's conversations look like: demonstrations, or else its prompts."""
    if task.demonstrations:
        return rendered(task.demonstrations[:_NUM_TEXTS])
    column = task.prompt_column or "prompt"
    prompts = [row[column] for row in task.held_out_rows[:_NUM_TEXTS]]
    chats = [[{"role": "user", "content": text}] for text in prompts if isinstance(text, str)]
    return rendered(chats) if chats else [task.name]


def rendered(chats: Sequence[Sequence[Message]]) -> list[str]:
    """Conversations as the chat template writes them."""
    texts, _ = render_jinja_template(
        [list(chat) for chat in chats], chat_template=builtin_template("chatml")
    )
    return list(texts)


def load_model(
    cfg: PolicyConfig, source: str, *, who: str = "policy.model"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer.

    Args:
        cfg: device, dtype, attention and further arguments.
        source: hub id or path.
        who: names it.

    Raises:
        SettingsError: there is no such model, or it can't be loaded so.
    """
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    arguments: dict[str, Any] = dict(cfg.model_kwargs)
    if cfg.attn_implementation is not None:
        arguments["attn_implementation"] = cfg.attn_implementation
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = load_causal_lm(source, dtype=getattr(torch, cfg.dtype), **arguments)
    except (OSError, ValueError, TypeError, ImportError) as error:
        kind = "" if Path(source).is_dir() else " (no folder of that name is here)"
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise SettingsError(f"{who}={source!r}{kind} can't be loaded: {first}") from error
    model.to(device)  # type: ignore[arg-type]
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    return model, tokenizer


def build_policies(cfg: RecipeConfig, task: Task) -> tuple[TransformersWrapper, LLMWrapperBase]:
    """The actor that is trained and the policy that samples.

    With Transformers they are one, so that the weights are there once (a streaming collector makes
    a copy to draw from); vLLM has its own copy, which every update replaces.

    Args:
        cfg: the settings.
        task: for the embedded model.

    Raises:
        SettingsError: the model can't be loaded, or used as the settings say.
    """
    with model_source(cfg, task) as source:
        actor = _loaded_policy(cfg, source)
        if cfg.engine.name == "transformers":
            return actor, actor
        sampler = _vllm_policy(cfg, source, actor.tokenizer)
        warn_of_other_dtype(actor, sampler)
        return actor, sampler


def build_sampler(cfg: RecipeConfig, task: Task) -> LLMWrapperBase | ChatServerPolicy:
    """A policy that samples where nothing is trained: Transformers, vLLM or a server.

    Args:
        cfg: the settings.
        task: for the embedded model, and the tokenizer beside a server.

    Raises:
        SettingsError: the model can't be loaded, or used as the settings say.
    """
    if cfg.engine.name == "chat":
        # What it says is written down in tokens that are not its own.
        tokenizer = _task_tokenizer(task)
        assert cfg.engine.url is not None
        assert cfg.policy.model is not None
        try:
            return ChatServerPolicy(
                cfg.engine.url,
                cfg.policy.model,
                tokenizer=tokenizer,
                sampling=sampling_of(cfg.policy),
            )
        except (ImportError, ValueError) as error:
            raise SettingsError(str(error)) from error
    with model_source(cfg, task) as source:
        if cfg.engine.name == "vllm":
            return _vllm_policy(cfg, source, AutoTokenizer.from_pretrained(source))
        return _loaded_policy(cfg, source)


def transformers_policy(
    cfg: RecipeConfig,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    generate: bool = True,
) -> TransformersWrapper:
    """A policy over a model that is there, as the settings say.

    Args:
        cfg: the settings.
        model: with its wrappers.
        tokenizer: its tokenizer.
        generate: whether it samples.

    Raises:
        ValueError: the model can't be used so.
    """
    autocast = isinstance(cfg, TrainingConfig) and cfg.train.autocast
    return TransformersWrapper(
        model,
        generate=generate,
        max_model_len=cfg.policy.max_model_len,
        autocast_dtype=torch.bfloat16 if autocast else None,
        **_common(cfg, tokenizer),
    )


def _loaded_policy(cfg: RecipeConfig, source: str) -> TransformersWrapper:
    model, tokenizer = load_model(cfg.policy, source)
    try:
        return transformers_policy(cfg, model, tokenizer)
    except ValueError as error:
        raise SettingsError(f"policy.model={source!r} can't be used so: {error}") from error


def _vllm_policy(
    cfg: RecipeConfig, source: str, tokenizer: PreTrainedTokenizerBase
) -> LLMWrapperBase:
    from torchrl_modules import vLLMWrapper

    engine_kwargs = dict(cfg.engine.engine_kwargs)
    if cfg.policy.max_model_len is not None:
        engine_kwargs.setdefault("max_model_len", cfg.policy.max_model_len)
    if engine_kwargs.get("enable_lora"):
        _fit_adapters(cfg, engine_kwargs)
    if cfg.engine.starts_servers:
        fleet = _started_fleet(cfg, source, engine_kwargs)
        return vLLMWrapper(fleet, **_common(cfg, tokenizer))
    where = list(cfg.engine.urls) or cfg.engine.url or source
    return vLLMWrapper(where, engine_kwargs=engine_kwargs or None, **_common(cfg, tokenizer))


def _fit_adapters(cfg: RecipeConfig, engine_kwargs: dict[str, Any]) -> None:
    """Let an engine apply the adapters that are trained, of all versions that may be in flight."""
    assert cfg.policy.lora_rank is not None
    ranks = (rank for rank in ADAPTER_RANKS if rank >= cfg.policy.lora_rank)
    engine_kwargs.setdefault("max_lora_rank", next(ranks, cfg.policy.lora_rank))
    if isinstance(cfg, RolloutsConfig) and cfg.collector.mode == "streaming":
        engine_kwargs.setdefault("max_loras", cfg.collector.max_staleness + 2)


def _started_fleet(cfg: RecipeConfig, source: str, engine_kwargs: dict[str, Any]) -> EngineFleet:
    """Servers that are started here, each on its share of the devices."""
    from torchrl_modules import start_server
    from torchrl_modules.vllm.bridges import OwnServerEngine

    kept = source
    if cfg.policy.model is None:  # The folder goes, and an engine may be started again.
        kept = tempfile.mkdtemp(prefix="engines-")
        atexit.register(shutil.rmtree, kept, ignore_errors=True)
        shutil.copytree(source, kept, dirs_exist_ok=True)
    count, devices = cfg.engine.num_engines, cfg.engine.devices
    each = len(devices) // count
    shares = [devices[i * each : (i + 1) * each] or None for i in range(count)]
    return EngineFleet(
        [
            partial(OwnServerEngine, partial(start_server, kept, devices=share, **engine_kwargs))
            for share in shares
        ]
    )


def _common(cfg: RecipeConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "tokenizer": tokenizer,
        "generate_kwargs": sampling_of(cfg.policy),
        "chat_template_name": cfg.policy.chat_template_name,
        "write_tokens": False,
    }


def set_generation(cfg: PolicyConfig, policy: TransformersWrapper) -> TransformersWrapper:
    """Let the model, once saved, sample as it did here, and stop where it did."""
    settings = cast("TransformersEngine", policy.engine).inside.generation_config
    assert settings is not None
    settings._from_model_config = False  # or Transformers makes them anew
    settings.update(
        do_sample=True,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        max_new_tokens=policy.sampling.max_new_tokens,
        eos_token_id=list(policy.sampling.stop_token_ids or ()) or settings.eos_token_id,
        pad_token_id=policy.tokenizer.pad_token_id,
    )
    return policy
