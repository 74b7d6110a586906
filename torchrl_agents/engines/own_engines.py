"""vLLM as the settings say: in this process, at servers that run, or at servers started here."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from collectors.weight_update.gathering import gathered_state_dict
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import PolicyConfig, RecipeConfig, RolloutsConfig
from torchrl_modules import EngineFleet, LLMWrapperBase, SamplingParameters, local_model
from torchrl_modules.engines.transformers_engine import TransformersEngine
from torchrl_modules.vllm.settings import ADAPTER_RANKS


def sampling_of(cfg: PolicyConfig) -> SamplingParameters:
    """How turns are sampled."""
    return SamplingParameters(
        max_new_tokens=cfg.max_new_tokens or 1,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        min_p=cfg.min_p,
    )


def collects_on_ray(cfg: RecipeConfig) -> bool:
    """Whether collectors on Ray have policies of their own."""
    return isinstance(cfg, RolloutsConfig) and cfg.collector.mode == "ray"


def wrapper_arguments(cfg: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What every policy is made with."""
    return {
        "tokenizer": tokenizer,
        "generate_kwargs": sampling_of(cfg),
        "chat_template_name": cfg.chat_template_name,
        "write_tokens": False,
    }


Source = str | Mapping[str, bytes]
"""Hub id or folder of a model, or the files of one that was made here, by name."""


def vllm_policy(
    cfg: RecipeConfig, source: str, tokenizer: PreTrainedTokenizerBase
) -> LLMWrapperBase:
    """A policy over vLLM.

    Args:
        cfg: the settings.
        source: hub id or folder of the model.
        tokenizer: its tokenizer.
    """
    from torchrl_modules import vLLMWrapper

    arguments = wrapper_arguments(cfg.policy, tokenizer)
    engine_kwargs = _engine_kwargs(cfg)
    if cfg.engine.starts_servers:
        # The folder of an embedded model goes, and an engine may be started again.
        kept = source if cfg.policy.model is not None else files_of(source)
        shares = _shares(cfg.engine.devices, cfg.engine.num_engines)
        return vLLMWrapper(_started_fleet(kept, shares, engine_kwargs), **arguments)
    where = list(cfg.engine.urls) or cfg.engine.url or source
    return vLLMWrapper(where, engine_kwargs=engine_kwargs or None, **arguments)


@dataclass(frozen=True)
class OwnEngines:
    """Makes the policy of a collector on Ray: over servers of its own, on its node and GPUs."""

    source: Source
    num_engines: int
    engine_kwargs: Mapping[str, Any]
    policy: PolicyConfig

    @classmethod
    def of(cls, cfg: RolloutsConfig, policy: LLMWrapperBase) -> "OwnEngines":
        """The engines of one of the collectors.

        Args:
            cfg: the settings.
            policy: over Transformers; has the model and its tokenizer.
        """
        source: Source
        if cfg.policy.model is None:
            source = model_files(policy)
        else:
            source = model_folder(cfg.policy.model)
            if Path(source).is_dir():  # of the trainer's directory, not of the collector's
                source = str(Path(source).resolve())
        count = cfg.engine.num_engines // cfg.collector.num_collectors
        return cls(source, count, _engine_kwargs(cfg), cfg.policy)

    def __call__(self) -> LLMWrapperBase:
        """Start the servers.

        Raises:
            ValueError: the GPUs can't be shared out.
        """
        from torchrl_modules import vLLMWrapper

        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        if len(visible) % self.num_engines:
            raise ValueError(
                f"{self.num_engines} engines of a collector share the GPUs that Ray gave it, "
                f"{visible}. Give it a multiple of them: +collector.remote_config.num_gpus="
                f"{self.num_engines}."
            )
        with folder_of(self.source) as folder:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        shares = _shares(visible, self.num_engines)
        fleet = _started_fleet(self.source, shares, self.engine_kwargs)
        return vLLMWrapper(fleet, **wrapper_arguments(self.policy, tokenizer))


def _started_fleet(
    source: Source, shares: Sequence[Sequence[int | str] | None], options: Mapping[str, Any]
) -> EngineFleet:
    """Servers that are started here, each on its share of the devices."""
    from torchrl_modules.vllm.bridges import OwnServerEngine

    return EngineFleet(
        [
            partial(OwnServerEngine, partial(_server, source, devices=share, **options))
            for share in shares
        ]
    )


@contextmanager
def _server(source: Source, **options: Any) -> Iterator[str]:
    from torchrl_modules import start_server

    with folder_of(source) as folder, start_server(folder, **options) as url:
        yield url


def _engine_kwargs(cfg: RecipeConfig) -> dict[str, Any]:
    engine_kwargs = dict(cfg.engine.engine_kwargs)
    if cfg.policy.max_model_len is not None:
        engine_kwargs.setdefault("max_model_len", cfg.policy.max_model_len)
    if engine_kwargs.get("enable_lora"):
        _fit_adapters(cfg, engine_kwargs)
    return engine_kwargs


def _fit_adapters(cfg: RecipeConfig, engine_kwargs: dict[str, Any]) -> None:
    """Let an engine apply the adapters that are trained, of all versions that may be in flight."""
    assert cfg.policy.lora_rank is not None
    ranks = (rank for rank in ADAPTER_RANKS if rank >= cfg.policy.lora_rank)
    engine_kwargs.setdefault("max_lora_rank", next(ranks, cfg.policy.lora_rank))
    if isinstance(cfg, RolloutsConfig) and cfg.collector.mode == "streaming":
        engine_kwargs.setdefault("max_loras", cfg.collector.max_staleness + 2)


def _shares(devices: Sequence[int | str], count: int) -> list[Sequence[int | str] | None]:
    each = len(devices) // count
    return [devices[i * each : (i + 1) * each] or None for i in range(count)]


def model_files(policy: LLMWrapperBase) -> dict[str, bytes]:
    """A whole model as it is now, adapters merged, and its tokenizer: as files, by name.

    Args:
        policy: over Transformers.
    """
    engine = cast("TransformersEngine", policy.engine)
    with tempfile.TemporaryDirectory(prefix="torchrl-agents-") as folder:
        engine.inside.save_pretrained(folder, state_dict=gathered_state_dict(engine.model))
        policy.tokenizer.save_pretrained(folder)
        return files_of(folder)


def files_of(folder: str) -> dict[str, bytes]:
    """The files in a folder, by name."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def model_folder(source: str, *, who: str = "policy.model") -> str:
    """Hub id or folder of a model: of a run's folder, a ``.gguf`` file, the name of a package's.

    Raises:
        SettingsError: names ``who``; the model can't be had, or its file can't be converted.
    """
    of_run = Path(source) / "model"
    try:
        return str(of_run) if (of_run / "config.json").is_file() else local_model(source)
    except (OSError, ValueError, ImportError) as error:
        raise SettingsError(f"{who}={source}: {error}") from error


@contextmanager
def folder_of(source: Source) -> Iterator[str]:
    """Where to load a model from; the folder of files that were given goes afterwards."""
    if isinstance(source, str):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="torchrl-agents-") as folder:
        for name, content in source.items():
            Path(folder, name).write_bytes(content)
        yield folder
