"""The model that is trained and the policy that samples, from the settings."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.chat_template_utils import render_jinja_template

from torchrl_agents.engines.chat_server import ChatServerPolicy
from torchrl_agents.engines.own_engines import (
    collects_on_ray,
    model_folder,
    sampling_of,
    vllm_policy,
    wrapper_arguments,
)
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import PolicyConfig, RecipeConfig, TrainingConfig
from torchrl_data.conversation.conversations import Message
from torchrl_data.templates.registry import builtin_template
from torchrl_envs.tasks.task import Task
from torchrl_modules import LLMWrapperBase, TransformersWrapper
from torchrl_modules.engines.transformers_engine import TransformersEngine
from torchrl_modules.policies.compute_dtype import warn_of_other_dtype
from torchrl_modules.policies.model_loading import load_causal_lm
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

_NUM_TEXTS = 1024


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
    cfg: PolicyConfig,
    source: str,
    *,
    who: str = "policy.model",
    load: Callable[..., PreTrainedModel] = load_causal_lm,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer.

    Args:
        cfg: device, dtype, attention and further arguments.
        source: hub id or path.
        who: names it.
        load: gives the model; a dry run has it without weights.

    Raises:
        SettingsError: there is no such model, or it can't be loaded so.
    """
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    arguments: dict[str, Any] = dict(cfg.model_kwargs)
    if cfg.attn_implementation is not None:
        arguments["attn_implementation"] = cfg.attn_implementation
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = load(source, dtype=getattr(torch, cfg.dtype), **arguments)
        model.to(device)  # type: ignore[arg-type]
        if cfg.gradient_checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
    except (OSError, ValueError, TypeError, ImportError, SafetensorError) as error:
        kind = "" if Path(source).is_dir() else " (no folder of that name is here)"
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise SettingsError(f"{who}={source!r}{kind} can't be loaded: {first}") from error
    return model, tokenizer


def build_policies(cfg: RecipeConfig, task: Task) -> tuple[TransformersWrapper, LLMWrapperBase]:
    """The actor that is trained and the policy that samples.

    With Transformers they are one, so that the weights are there once (a streaming collector makes
    a copy to draw from); vLLM has its own copy, which every update replaces. On Ray collectors have
    policies of their own, and what this process samples, to test the model, it samples from that.

    Args:
        cfg: the settings.
        task: for the embedded model.

    Raises:
        SettingsError: the model can't be loaded, or used as the settings say.
    """
    with model_source(cfg, task) as source:
        actor = _loaded_policy(cfg, source)
        if cfg.engine.name == "transformers" or collects_on_ray(cfg):
            return actor, actor
        sampler = vllm_policy(cfg, source, actor.tokenizer)
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
            return vllm_policy(cfg, source, AutoTokenizer.from_pretrained(source))
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
        **wrapper_arguments(cfg.policy, tokenizer),
    )


def _loaded_policy(cfg: RecipeConfig, source: str) -> TransformersWrapper:
    model, tokenizer = load_model(cfg.policy, source)
    try:
        return transformers_policy(cfg, model, tokenizer)
    except ValueError as error:
        raise SettingsError(f"policy.model={source!r} can't be used so: {error}") from error


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
