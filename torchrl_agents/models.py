"""Models, as the settings describe them.

Policies and their engines, adapters, a warm start, an optimizer.
"""

import asyncio
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open
from tensordict import TensorDict, lazy_stack
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.chat_template_utils import render_jinja_template

from collectors.weight_update.merged_adapters import whole
from collectors.weight_update.plain_weights import gathered_state_dict, unwrapped_module
from objectives import SFTLoss
from torchrl_data import import_package, page
from torchrl_data.conversation import Conversations, Turn, waiting_rows
from torchrl_data.conversation_io import row_tensordicts
from torchrl_data.pretrained import load_pretrained
from torchrl_data.templates.registry import (
    DEFAULT_TEMPLATE,
    builtin_template,
    control_literals,
    family_of,
    own_template,
    resolve_template,
)
from torchrl_data.token_scorer import TokenScorer, TokenScores
from torchrl_envs.datasets import MODEL_FILES, check_source
from torchrl_envs.tasks.task import Task
from torchrl_modules import (
    EngineFleet,
    LLMWrapperBase,
    SamplingParameters,
    TransformersWrapper,
    local_model,
)
from torchrl_modules.engines.transformers import TransformersEngine
from torchrl_modules.model_splits import plans_of
from torchrl_modules.policies.compute_dtype import warn_of_other_dtype
from torchrl_modules.policies.loading import OF_BOTH, load_causal_lm, sees_images
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer
from torchrl_modules.vllm.runtime import import_vllm, request_batch_invariance
from torchrl_modules.vllm.settings import ADAPTER_RANKS, mask_settings
from torchrl_modules.weights.quantized_weights import four_bit_config, quantization_of

from .optimizers import MuonWithAdamW, adamw_8bit, matrices_of
from .settings.command_line import num_ranks
from .settings.schema import (
    SCHEDULES,
    OptimConfig,
    PolicyConfig,
    RecipeConfig,
    RolloutsConfig,
    SettingsError,
    TrainingConfig,
    collects_on_ray,
    refusing,
)

_LOG = logging.getLogger("torchrl_agents")

# vLLM as the settings say: in this process, at servers that run, or at servers started here.


def sampling_of(cfg: PolicyConfig) -> SamplingParameters:
    """Return how turns are sampled."""
    return SamplingParameters(
        max_new_tokens=cfg.max_new_tokens or 1,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        min_p=cfg.min_p,
        sampling_mask=cfg.sampling_mask,
        routed_experts=cfg.routed_experts,
        stop=tuple(cfg.stop or ()),
    )


def wrapper_arguments(cfg: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return what every policy is made with."""
    about = {"tokenizer": tokenizer, "chat_template_name": cfg.chat_template_name}
    return {**about, "generate_kwargs": sampling_of(cfg), "write_tokens": False}


Source = str | Mapping[str, bytes]
"""Hub id or folder of a model, or the files of one that was made here, by name."""


def vllm_policy(
    cfg: RecipeConfig, source: str, tokenizer: PreTrainedTokenizerBase, processor: Any = None
) -> LLMWrapperBase:
    """A policy over vLLM.

    Args:
        cfg: the settings.
        source: hub id or folder of the model.
        tokenizer: its tokenizer.
        processor: of a model that reads images.

    Raises:
        SettingsError: no server answers, or the engine can't be made so.
    """
    from torchrl_modules import vLLMWrapper

    arguments = wrapper_arguments(cfg.policy, tokenizer)
    engine_kwargs = _engine_kwargs(cfg)
    if cfg.engine.starts_servers:
        # The folder of an embedded model goes, and an engine may be started again.
        kept = source if cfg.policy.model is not None else files_of(source)
        devices, count = cfg.engine.devices, cfg.engine.num_engines
        fleet = _started_fleet(kept, devices, count, engine_kwargs, processor)
        return vLLMWrapper(fleet, **arguments)
    where = list(cfg.engine.urls) or cfg.engine.url or source
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
    from torchrl_modules.vllm.bridges import OwnServerEngine

    each = len(devices) // count
    shares = [devices[i * each : (i + 1) * each] or None for i in range(count)]
    servers = [partial(_server, source, devices=share, **options) for share in shares]
    return EngineFleet([partial(OwnServerEngine, one, processor=processor) for one in servers])


@contextmanager
def _server(source: Source, **options: Any) -> Iterator[str]:
    from torchrl_modules import start_server

    with folder_of(source) as folder, start_server(folder, **options) as url:
        yield url


def _engine_kwargs(cfg: RecipeConfig) -> dict[str, Any]:
    engine_kwargs = dict(cfg.engine.engine_kwargs)
    if cfg.policy.sampling_mask:
        if cfg.engine.batch_invariant and not cfg.engine.starts_servers:
            request_batch_invariance(who="engine.batch_invariant")  # before vLLM is imported
        is_cpu = import_vllm().current_platform.is_cpu()
        engine_kwargs = {**mask_settings(is_cpu=is_cpu), **engine_kwargs}
    if cfg.engine.batch_invariant:
        engine_kwargs["batch_invariant"] = True
    if cfg.engine.colocate and not (cfg.engine.url or cfg.engine.urls):
        engine_kwargs["enable_sleep_mode"] = True
    if cfg.policy.max_model_len is not None:
        engine_kwargs.setdefault("max_model_len", cfg.policy.max_model_len)
    if engine_kwargs.get("enable_lora"):
        # An engine applies the adapters that are trained, of all versions that may be in flight.
        trained = cfg.policy.lora_rank or 1
        ranks = (rank for rank in ADAPTER_RANKS if rank >= trained)
        engine_kwargs.setdefault("max_lora_rank", next(ranks, trained))
        if isinstance(cfg, RolloutsConfig) and cfg.collector.mode != "sync":
            engine_kwargs.setdefault("max_loras", cfg.collector.max_staleness + 2)
    return engine_kwargs


def model_files(policy: LLMWrapperBase, *, weights: bool = True) -> dict[str, bytes]:
    """A whole model as it is now, adapters merged, and its tokenizer: as files, by name.

    Args:
        policy: over Transformers.
        weights: ``False`` for its config and tokenizer alone.
    """
    engine = cast("TransformersEngine", policy.engine)
    with tempfile.TemporaryDirectory(prefix="torchrl-agents-") as folder:
        if weights:
            engine.inside.save_pretrained(folder, state_dict=gathered_state_dict(engine.model))
        else:
            engine.inside.config.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        return files_of(folder)


def files_of(folder: str) -> dict[str, bytes]:
    """The files in a folder, by name."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def model_folder(source: str) -> str:
    """Hub id or folder of a model: of a run's folder, a ``.gguf`` file, the name of a package's.

    Raises:
        SettingsError: the model of ``policy.model`` can't be had, or its file can't be converted.
    """
    of_run = Path(source) / "model"
    with refusing(f"policy.model={source}"):
        check_source(source, MODEL_FILES)
        return str(of_run) if (of_run / "config.json").is_file() else local_model(source)


@contextmanager
def folder_of(source: Source) -> Iterator[str]:
    """Yield the folder to load a model from; one made for given files is deleted afterwards."""
    if isinstance(source, str):
        yield source
        return
    with _folder_of_a_model() as folder:
        for name, content in source.items():
            Path(folder, name).write_bytes(content)
        yield folder


@contextmanager
def _folder_of_a_model() -> Iterator[str]:
    """A folder that goes afterwards; its name, which may choose a template, is always the same."""
    with tempfile.TemporaryDirectory(prefix="torchrl-agents-") as above:
        folder = Path(above, "model")
        folder.mkdir()
        yield str(folder)


# A policy behind OpenAI's protocol, to be evaluated: messages go out, text comes back.

MAX_CONCURRENT: Final = 64
"""Requests that are open at the same time."""


class ChatServerPolicy(LLMWrapperBase):
    """Asks a server for the next turn of each conversation.

    The server's tokens are not known: the tokens of the rows are those of ``tokenizer``, and their
    log-probs are 0. So nothing can be trained on what it says.

    Args:
        url: of the server, ``http://host:port/v1``.
        model: its name there.
        timeout_s: deadline of one turn.
        **arguments: of :class:`~torchrl_modules.LLMWrapperBase`; the tokenizer counts tokens, and
            writes what the server says down.

    Raises:
        ImportError: the package ``openai`` is not installed.
        ValueError: a sampling parameter is not in the protocol.
    """

    def __init__(self, url: str, model: str, *, timeout_s: float = 600.0, **arguments: Any) -> None:
        openai = import_package("openai", who="engine=chat", install="pip install openai")
        engine: Any = SimpleNamespace(version=0, max_model_len=None)  # it draws no tokens
        super().__init__(engine, **arguments)
        if self.sampling.top_k or self.sampling.min_p:
            raise ValueError("OpenAI's protocol has no top_k and no min_p: leave them out.")
        self._model = model
        key = os.environ.get("OPENAI_API_KEY") or "none"
        about = {"base_url": url, "api_key": key, "max_retries": 3, "timeout": timeout_s}
        # A client belongs to the event loop that it was first used on.
        self._client: Any = partial(openai.AsyncOpenAI, **about)

    def respond(
        self, prompt: Conversations, *, max_new_tokens: Sequence[int] | None = None
    ) -> tuple[Conversations, Conversations, list[str]]:
        """A turn of the server in each conversation, see :meth:`LLMWrapperBase.respond`."""
        limits = max_new_tokens or [self.sampling.max_new_tokens] * len(prompt)
        said = asyncio.run(self._ask_all(prompt, limits))
        turns: list[Turn | None] = [None] * len(prompt)
        for row, (text, reason) in enumerate(said):
            if text is not None:
                ids, content = self.encoder.encode_turn(text, close=reason == "stop")
                message: Any = {"role": "assistant", "content": content}
                turns[row] = Turn(ids, [0.0] * len(ids), message)
        prompt = self.encoder.encode_waiting(prompt)
        return prompt, prompt.append_turns(turns), [reason for _, reason in said]

    async def _ask_all(
        self, prompt: Conversations, limits: Sequence[int]
    ) -> list[tuple[str | None, str]]:
        """Return what the server says in each row, and why it ended."""
        free = asyncio.Semaphore(MAX_CONCURRENT)
        async with self._client() as client:

            async def ask(row: int) -> tuple[str | None, str]:
                tools = prompt.tools(row)
                if waiting_rows(prompt)[row].goes_on:  # type: ignore[union-attr]
                    why = "a server of OpenAI's protocol does not go on in the turn of a prompt"
                    return None, f"error: {why}"
                async with free:
                    try:
                        reply = await client.chat.completions.create(
                            model=self._model,
                            messages=prompt.messages(row),
                            max_tokens=limits[row],
                            stop=list(self.sampling.stop) or None,
                            temperature=self.sampling.temperature,
                            top_p=self.sampling.top_p,
                            **({"tools": list(tools)} if tools else {}),
                        )
                        return _text_of(reply.choices[0])
                    except Exception as error:  # what the server does ends this rollout alone
                        return None, f"error: {error}"

            return list(await asyncio.gather(*map(ask, range(len(prompt)))))


def _text_of(choice: Any) -> tuple[str, str]:
    """A turn of a server as text, its calls in the format of the embedded template."""
    text = choice.message.content or ""
    for call in choice.message.tool_calls or ():
        function = call.function
        said = {"name": function.name, "arguments": json.loads(function.arguments or "{}")}
        text += f"\n<tool_call>\n{json.dumps(said)}\n</tool_call>"
    return text.lstrip("\n"), "length" if choice.finish_reason == "length" else "stop"


# The model that is trained and the policy that samples, from the settings.

_NUM_TEXTS = 1024


@contextmanager
def model_source(cfg: RecipeConfig, task: Task) -> Iterator[str]:
    """Yield the source of the model: as given, a run's, or a folder with the embedded one."""
    if cfg.policy.model is not None:
        yield model_folder(cfg.policy.model)
        return
    with _folder_of_a_model() as folder:
        tokenizer = _task_tokenizer(task)
        tokenizer.save_pretrained(folder)
        torch.manual_seed(cfg.seed)
        tiny_qwen3(len(tokenizer)).save_pretrained(folder)
        yield folder


def _task_tokenizer(task: Task) -> PreTrainedTokenizerBase:
    """A tokenizer of what the task's conversations are like: demonstrations, or else prompts."""
    chats: Sequence[Sequence[Any]] = task.demonstrations[:_NUM_TEXTS]
    if not chats:
        column = task.prompt_column or "prompt"
        prompts = [row[column] for row in task.held_out_rows[:_NUM_TEXTS]]
        chats = [[{"role": "user", "content": x}] for x in prompts if isinstance(x, str)]
    texts = [task.name]
    if chats:
        template = builtin_template("chatml")
        texts, _ = render_jinja_template([list(chat) for chat in chats], chat_template=template)
    return train_tokenizer(list(texts), isolated=task.isolated, phrases=task.phrases)


# A model of its config, on the meta device: it has shapes and no weights.

_FILES: Final = ("model.safetensors", "pytorch_model.bin")
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


def outline(
    path: str,
    auto: Any = AutoModelForCausalLM,
    *,
    dtype: torch.dtype,
    check: bool = True,
    **arguments: Any,
) -> PreTrainedModel:
    """A language model on the meta device; the files of its weights have to be there.

    Args:
        path: hub id, of which no weights are fetched, or a folder.
        auto: which of Transformers' loaders.
        dtype: of the weights that it has not got.
        check: whether a folder has to have the files of the weights, too.
        **arguments: of ``from_pretrained``.

    Raises:
        ValueError: there is no such model, as from ``from_pretrained``.
        OSError: it has no config, or its weights are not there or broken off.
        TypeError: no model and no config has such an argument.
    """
    config, rest = load_pretrained(AutoConfig, path, return_unused_kwargs=True, **arguments)
    if unknown := sorted(set(rest) - _OF_LOADING):
        raise TypeError(f"from_pretrained takes no {', '.join(unknown)}")
    names = ("attn_implementation", "trust_remote_code")
    own = {"trust_remote_code": False} | {n: arguments[n] for n in names if n in arguments}
    with torch.device("meta"):
        model = auto.from_config(config, dtype=dtype, **own)
    if check and Path(path).is_dir() and not _ELSEWHERE & arguments.keys():
        _check_weights(Path(path))
    return model.eval()  # as `from_pretrained` gives it


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
        try:
            if name.endswith(".safetensors"):
                with safe_open(folder / name, framework="np"):
                    pass  # nothing but the header is read, which says how long the file has to be
        except SafetensorError as error:
            raise OSError(f"{name} broke off: {error}") from error


def load_model(
    cfg: PolicyConfig,
    source: str,
    *,
    who: str = "policy.model",
    load: Callable[..., PreTrainedModel] = load_causal_lm,
    images: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer.

    Args:
        cfg: device, dtype, attention and further arguments.
        source: hub id or path.
        who: names it.
        load: gives the model; a dry run has it without weights.
        images: whether it may be one that reads images.

    Raises:
        SettingsError: there is no such model, or it can't be loaded so.
    """
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    arguments: dict[str, Any] = dict(cfg.model_kwargs)
    if cfg.attn_implementation is not None:
        arguments["attn_implementation"] = cfg.attn_implementation
    if cfg.load_in_4bit:
        arguments["quantization_config"] = four_bit_config(getattr(torch, cfg.dtype))
    try:
        tokenizer = load_tokenizer(cfg, source)
        auto, config = AutoModelForCausalLM, load_pretrained(AutoConfig, source, **place_of(cfg))
        if sees_images(config, is_asked=False):
            auto = AutoModelForImageTextToText
            if not images:
                raise ValueError(
                    f"it is a vision-language model, and {who} has to be a text model. See "
                    f"{page('docs/images.md')}."
                )
        model = load(source, auto, dtype=getattr(torch, cfg.dtype), **arguments)
        if cfg.add_control_tokens:
            name = cfg.chat_template_name
            template = resolve_template(tokenizer, chat_template_name=name)
            add_tokens(model, tokenizer, control_literals(template, of_turns=True))
        model.to(device)  # type: ignore[arg-type]
        if cfg.gradient_checkpointing:
            model.gradient_checkpointing_enable()
            model.train()
    except (OSError, ValueError, TypeError, ImportError, SafetensorError) as error:
        kind = "" if Path(source).is_dir() else " (no folder of that name is here)"
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if not kind and not Path(source, "config.json").is_file():
            first = "the folder has no config.json, so it holds no model"
        raise SettingsError(f"{who}={source!r}{kind} can't be loaded: {first}") from error
    return model, tokenizer


def place_of(cfg: PolicyConfig) -> dict[str, Any]:
    """Arguments of loading that say where files are and what is trusted; of tokenizers, too."""
    return {name: value for name, value in cfg.model_kwargs.items() if name in OF_BOTH}


def load_tokenizer(cfg: PolicyConfig, source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with the chat template that the settings give it.

    Args:
        cfg: which template.
        source: hub id or path.
    """
    tokenizer = load_pretrained(AutoTokenizer, source, **place_of(cfg))
    if cfg.chat_template is not None:
        tokenizer.chat_template = cfg.chat_template
    elif cfg.chat_template_name is None and cfg.model is not None and not own_template(tokenizer):
        _LOG.info(
            "%s has no chat template of its own; it gets %r. policy.chat_template_name= and "
            "policy.chat_template= give it another one.",
            source,
            family_of(tokenizer) or DEFAULT_TEMPLATE,
        )
    return tokenizer


def load_processor(cfg: PolicyConfig, source: str) -> Any:
    """The processor of a model that reads images; ``None`` of one that does not.

    Args:
        cfg: says where files are.
        source: hub id or path.

    Raises:
        SettingsError: its folder has no processor.
    """
    place = place_of(cfg)
    if not sees_images(load_pretrained(AutoConfig, source, **place), is_asked=False):
        return None
    with refusing(f"the processor of policy.model={source!r}", foreign=True):
        return load_pretrained(AutoProcessor, source, **place)


@torch.no_grad()
def add_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]
) -> None:
    """Add control tokens to a vocabulary; each gets the mean of all rows, in and out.

    Args:
        model: its embeddings grow where they have no room.
        tokenizer: of the model.
        tokens: those that it knows are left as they are.
    """
    known = tokenizer.get_vocab()
    new: list[Any] = [token for token in tokens if token not in known]
    if not new:
        return
    num_known = len(tokenizer)
    tokenizer.add_tokens(new, special_tokens=True)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:  # type: ignore[union-attr]
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = getattr(layer, "weight", None)
        if weight is not None:
            weight[num_known : len(tokenizer)] = weight[:num_known].mean(0)
    _LOG.info("added to the vocabulary: %s", ", ".join(new))


def build_policies(cfg: RecipeConfig, task: Task) -> tuple[Any, Any]:
    """The actor that is trained and the policy that samples.

    With Transformers they are one, so that the weights are there once (a streaming collector makes
    a copy to draw from); vLLM has its own copy, which every update replaces. On Ray collectors have
    policies of their own, and what this process samples, to test the model, it samples from that.

    Args:
        cfg: the settings.
        task: for the embedded model, and the tokenizer beside a server.

    Returns:
        A :class:`TransformersWrapper` and a :class:`LLMWrapperBase`; the second alone, after
        ``None``, where nothing is trained and an engine has the model.

    Raises:
        SettingsError: the model can't be loaded, or used as the settings say.
    """
    if cfg.engine.name == "chat":
        # What it says is written down in tokens that are not its own.
        arguments = wrapper_arguments(cfg.policy, _task_tokenizer(task))
        url, model = cast("str", cfg.engine.url), cast("str", cfg.policy.model)
        with refusing("engine=chat"):
            return None, ChatServerPolicy(url, model, **arguments)
    is_vllm = cfg.engine.name == "vllm" and not collects_on_ray(cfg)
    with model_source(cfg, task) as source:
        if is_vllm and not isinstance(cfg, TrainingConfig):
            tokenizer = load_tokenizer(cfg.policy, source)
            return None, vllm_policy(cfg, source, tokenizer, load_processor(cfg.policy, source))
        model, tokenizer = load_model(cfg.policy, source, images=True)
        processor = load_processor(cfg.policy, source)
        check_images(cfg, processor)
        _check_quantization(cfg, model)
        check_split(cfg, model)
        with refusing(f"policy.model={source!r} can't be used so"):
            actor = transformers_policy(cfg, model, tokenizer, processor=processor)
        if not is_vllm:
            return actor, actor
        sampler = vllm_policy(cfg, source, tokenizer, processor)
        warn_of_other_dtype(actor, sampler)
        return actor, sampler


def _check_quantization(cfg: RecipeConfig, model: PreTrainedModel) -> None:
    kind = quantization_of(model)
    if kind is None or not isinstance(cfg, TrainingConfig):
        return
    who = f"policy.model={cfg.policy.model}"
    if kind != "4bit":
        raise SettingsError(
            f"{who} has weights that {kind} quantised, over which nothing is trained here. Give "
            "whole weights; policy.load_in_4bit=true keeps them in 4 bits."
        )
    if cfg.policy.lora_rank is None:
        raise SettingsError(f"{who} has weights of 4 bits: train adapters, policy.lora_rank=16.")


def check_images(cfg: RecipeConfig, processor: Any) -> None:
    """Check that a model that reads images can be trained so.

    Args:
        cfg: the settings.
        processor: of the model; ``None`` of one that reads no images.

    Raises:
        SettingsError: it can't.
    """
    if processor is None:
        return
    policy = cfg.policy
    faults = {
        "policy.lora_rank": policy.lora_rank is not None,
        "policy.load_in_4bit": policy.load_in_4bit,
        "policy.add_control_tokens": policy.add_control_tokens,
        f"{num_ranks()} ranks": num_ranks() > 1,
    }
    if isinstance(cfg, RolloutsConfig):
        collector, streams = cfg.collector, cfg.collector.mode == "streaming"
        by_transformers, in_turn = cfg.engine.name == "transformers", collector.max_staleness == 0
        faults |= {
            "collector=ray": collects_on_ray(cfg),
            "collector.verify_every": bool(collector.verify_every),
            "collector=streaming and engine=transformers": streams and by_transformers,
            "collector=streaming and collector.max_staleness=0": streams and in_turn,
        }
    for setting, is_set in faults.items():
        if is_set:
            raise SettingsError(
                f"policy.model={policy.model} is a vision-language model, which is not trained "
                f"with {setting}. See {page('docs/images.md')}."
            )


def check_split(cfg: RecipeConfig, model: PreTrainedModel) -> None:
    """Check that ranks can compute parts of a layer of the model, where the settings want it.

    Args:
        cfg: the settings.
        model: with weights or without.

    Raises:
        SettingsError: they can't.
    """
    if not isinstance(cfg, TrainingConfig) or not cfg.train.splits_model:
        return
    with refusing(f"policy.model={cfg.policy.model}"):
        plans_of(
            model,
            tensor_parallel_size=cfg.train.tensor_parallel_size,
            expert_parallel_size=cfg.train.expert_parallel_size,
            num_ranks=num_ranks(),
            who="train",
        )


def transformers_policy(
    cfg: RecipeConfig,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    generate: bool = True,
    processor: Any = None,
) -> TransformersWrapper:
    """A policy over a model that is there, as the settings say.

    Args:
        cfg: the settings.
        model: with its wrappers.
        tokenizer: its tokenizer.
        generate: whether it samples.
        processor: of a model that reads images.

    Raises:
        ValueError: the model can't be used so.
    """
    train = cfg.train if isinstance(cfg, TrainingConfig) else None
    autocast = train is not None and train.autocast
    arguments = wrapper_arguments(cfg.policy, tokenizer)
    if isinstance(cfg, RolloutsConfig) and cfg.record.kept_counts:
        arguments["generate_kwargs"] = replace(arguments["generate_kwargs"], kept_counts=True)
    return TransformersWrapper(
        model,
        generate=generate,
        max_model_len=cfg.policy.max_model_len,
        autocast_dtype=torch.bfloat16 if autocast else None,
        compile_layers=None if train is None else train.compile_layers,
        batch_invariant=cfg.engine.batch_invariant and cfg.engine.name == "transformers",
        processor=processor,
        **arguments,
    )


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


# Low-rank adapters (LoRA) on the model that is trained, by PEFT.


def add_adapters(
    cfg: TrainingConfig, actor: TransformersWrapper, policy: LLMWrapperBase
) -> tuple[TransformersWrapper, LLMWrapperBase]:
    """Freeze the model and put adapters on it, where the settings say so.

    Args:
        cfg: the settings.
        actor: its model is trained; its weights don't change from here on.
        policy: that samples; the actor itself, or an engine which gets merged weights.

    Returns:
        Both, over the model with adapters. What they compute is the same until a step is made.

    Raises:
        SettingsError: the model has no such modules.
    """
    if cfg.policy.lora_rank is None:
        return actor, policy
    trained = transformers_policy(cfg, with_adapters(cfg.policy, actor.model), actor.tokenizer)
    return trained, trained if policy is actor else policy


def with_adapters(settings: PolicyConfig, model: Any) -> Any:
    """A model with new adapters, which change nothing yet, its own weights frozen.

    Raises:
        SettingsError: the model has no such modules.
    """
    import peft

    assert settings.lora_rank is not None
    alpha: Any = settings.lora_alpha or 2 * settings.lora_rank  # PEFT divides it
    modules = list(settings.lora_target_modules) or "all-linear"
    config = peft.LoraConfig(
        r=settings.lora_rank, lora_alpha=alpha, target_modules=modules, task_type="CAUSAL_LM"
    )
    with refusing("policy.lora_target_modules"):
        return peft.get_peft_model(model, config)


def is_adapted(model: Any) -> bool:
    """Return whether a model has adapters."""
    return hasattr(unwrapped_module(model), "peft_config")


def frozen_weights(model: nn.Module) -> str:
    """A digest of the weights that are not trained; all ranks take part.

    Args:
        model: whole or sharded, which gives the same.
    """
    frozen = (p for p in model.parameters() if not p.requires_grad)
    sums = [float(whole(each).double().sum()) for each in frozen]
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]


class WithoutAdapters(TokenScorer):
    """Scores tokens by the model as it was before there were adapters.

    Args:
        actor: whose model has them.
    """

    def __init__(self, actor: TransformersWrapper) -> None:
        self._actor = actor

    def score_packed(self, *args: Any, images: Any = None, **options: Any) -> TokenScores:
        """Score as the actor does, its adapters off meanwhile."""
        model: Any = self._actor.model
        with model.disable_adapter(), torch.no_grad():
            return self._actor.score_packed(*args, images=images, **options)


# Supervised training on demonstrations: the format, before the skill.


def short_enough(demonstrations: Conversations, most: int | None) -> list[TensorDict]:
    """The demonstrations that a model takes; how many are left out is said.

    Args:
        demonstrations: as ``TaskEnv.encode_demonstrations`` gives them.
        most: tokens that the model takes; ``None``: any number.

    Raises:
        SettingsError: all demonstrations are longer.
    """
    rows = row_tensordicts(demonstrations)
    short = [row for row in rows if most is None or row["tokens", "full"].shape[-1] <= most]
    if len(short) < len(rows):
        told = (
            f"{len(rows) - len(short)} of {len(rows)} demonstrations are longer than the {most} "
            "tokens that the model takes (policy.max_model_len=)"
        )
        if not short:
            raise SettingsError(f"warm_start: {told}. Set warm_start.num_steps=0.")
        _LOG.warning("warm start: %s. They are left out.", told)
    return short


def warm_start(
    policy: TransformersWrapper,
    demonstrations: Conversations,
    *,
    num_steps: int,
    batch_size: int,
    learning_rate: float,
    micro_batch_tokens: int,
    on_step: Callable[[int, float], None],
) -> None:
    """Train on what the assistant says in the demonstrations.

    Args:
        policy: its model is trained.
        demonstrations: as ``TaskEnv.encode_demonstrations`` gives them.
        num_steps: optimizer steps.
        batch_size: conversations of a step.
        learning_rate: of AdamW, falling to 0 along a cosine.
        micro_batch_tokens: most tokens of one forward and backward pass; a conversation that is
            longer has one by itself.
        on_step: told the step and its loss, in nats per token.

    Raises:
        SettingsError: all demonstrations are longer than the model's inputs.
    """
    rows = short_enough(demonstrations, getattr(policy.engine, "max_model_len", None))
    loss_module = SFTLoss(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / num_steps))
    )
    for step in range(num_steps):
        chosen = torch.randint(len(rows), (batch_size,)).tolist()
        batch: Any = lazy_stack([rows[i] for i in chosen])
        packed = loss_module.pack(batch)
        window, loss = loss_module.measure_window(packed), 0.0
        for part in packed.micro_batches(max_tokens=micro_batch_tokens):
            share = loss_module(part, window=window).total()
            share.backward()
            loss += share.item()
        optimizer.step()
        optimizer.zero_grad()  # or the last gradient would be a part of what is trained next
        schedule.step()
        on_step(step + 1, loss)


# The optimizer and its schedule, from the settings.


def build_optimizer(
    cfg: OptimConfig, parameters: Iterable[Tensor], model: torch.nn.Module | None = None
) -> torch.optim.Optimizer:
    """The optimizer, as its settings say.

    Args:
        cfg: the settings.
        parameters: that are trained.
        model: whose they are; Muon asks which of them are its matrices.

    Raises:
        ValueError: of Muon, no matrix is trained.
        ImportError: the package of the optimizer is not there.
    """
    common: Any = {"lr": cfg.learning_rate, "weight_decay": cfg.weight_decay}
    parameters = list(parameters)
    if len({getattr(value, "device_mesh", None) for value in parameters}) > 1:
        common["foreach"] = False  # one kernel for many tensors takes no two kinds of shards
    if cfg.name == "sgd":
        return torch.optim.SGD(parameters, momentum=cfg.beta1, **common)
    common |= {"betas": (cfg.beta1, cfg.beta2), "eps": cfg.eps}
    if cfg.name == "adamw8bit":
        return adamw_8bit(parameters, **common)
    if "foreach" not in common and all(value.is_cuda for value in parameters):
        common["fused"] = True
    if cfg.name == "muon":
        assert model is not None
        trained = {id(value) for value in parameters}
        matrices = [value for value in matrices_of(model) if id(value) in trained]
        taken = {id(value) for value in matrices}
        others = [value for value in parameters if id(value) not in taken]
        return MuonWithAdamW(matrices, others, momentum=cfg.momentum, **common)
    return torch.optim.AdamW(parameters, **common)


def set_learning_rate(
    cfg: OptimConfig, optimizer: torch.optim.Optimizer, step: int, num_steps: int
) -> float:
    """Set the learning rate of a step: a linear warm-up, then the schedule.

    Args:
        cfg: the settings.
        optimizer: of which it is set.
        step: from 1.
        num_steps: of the whole run.

    Returns:
        The learning rate.
    """
    shape = SCHEDULES[cfg.schedule]((step - 1) / num_steps)
    rate = (cfg.learning_rate or 0.0) * min(step / max(1, cfg.num_warmup_steps), shape)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate
