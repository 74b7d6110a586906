"""Checks that servers which run already have the model that a run is about."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from torchrl_agents.settings.agent_rules import warm_start_fault
from torchrl_agents.settings.errors import SettingsError, refusing
from torchrl_agents.settings.rules import changed_base
from torchrl_agents.settings.schema import RecipeConfig, RolloutsConfig
from torchrl_modules.engines.json_client import JSONClient
from torchrl_modules.policies.served_weights import check_engine_of
from torchrl_modules.sglang.launch import TOKEN_VARIABLE as SGLANG_TOKEN
from torchrl_modules.vllm.access_control import TOKEN_VARIABLE as VLLM_TOKEN

from .sources import name_of_model

_TIMEOUT_S: Final = 60.0
_AS_LOADED: Final = "default"
"""What vLLM calls the weights that it has from its files."""


def check_adapted_model(cfg: RecipeConfig, actor: Any, sampler: Any) -> None:
    """Check that adapters alone go to an engine over the very weights that they are trained over.

    Args:
        cfg: the settings.
        actor: the model, without adapters so far.
        sampler: over an engine, which may take adapters alone.

    Raises:
        SettingsError: the engine has other weights, or a warm start is to change the model's.
    """
    if not getattr(sampler.engine, "max_adapters", 0) or cfg.policy.lora_rank is None:
        return
    if isinstance(cfg, RolloutsConfig) and (fault := warm_start_fault(cfg)) is not None:
        raise SettingsError(fault)
    warmed = cfg.warm_start.num_steps if isinstance(cfg, RolloutsConfig) else None
    if warmed and not cfg.policy.load_in_4bit:
        raise SettingsError(changed_base(warmed))
    if urls := _urls(cfg):
        with refusing("engine"):
            names = {"engine": f"the server at {', '.join(urls)}", "model": name_of_model(cfg)}
            check_engine_of(actor, sampler, count=len(urls), **names)


def check_served(cfg: RecipeConfig, source: str) -> None:
    """Check that servers have the model that is evaluated, of which no weights are loaded here.

    They say what they were started with, and whether a run has replaced their weights since.

    Args:
        cfg: the settings.
        source: hub id or folder of the model.

    Raises:
        SettingsError: a server has another model by name, or weights that a run sent.
    """
    token = os.environ.get(SGLANG_TOKEN if cfg.engine.name == "sglang" else VLLM_TOKEN)
    token = cfg.engine.engine_kwargs.get("token", token)
    for url in _urls(cfg):
        with refusing("engine"), closing(JSONClient(url, _TIMEOUT_S, token=token)) as client:
            _check_label(client)
            names = [*_names(client)]
        given = cfg.policy.model
        if names and not any(_is_same(name, mine) for name in names for mine in (given, source)):
            raise SettingsError(
                f"The server at {url} has the model {' alias '.join(names)}, which would be "
                f"evaluated under another name, {name_of_model(cfg)}. Give policy.model="
                f"{names[-1]}; or, if both are one, start the server with --served-model-name "
                f"{given}."
            )


def _urls(cfg: RecipeConfig) -> list[str]:
    return [*cfg.engine.urls, *([cfg.engine.url] if cfg.engine.url else [])]


def _check_label(client: JSONClient) -> None:
    status, answer = client.request("GET", "/weight_info")  # a plain server has no such route
    label = answer.get("weight_version") if status == 200 and isinstance(answer, dict) else None
    if label not in (None, _AS_LOADED):
        raise ValueError(
            f"the weights of the server at {client.url} were replaced by a run ({label}): they are "
            "not those of the model that it was started with. Start it again, or give policy.model="
            "<folder of the run> without engine.url."
        )


def _names(client: JSONClient) -> Iterator[str]:
    """Names of a server's model: what it is called, and what it was loaded from."""
    status, answer = client.request("GET", "/v1/models")
    models = answer.get("data", ()) if status == 200 and isinstance(answer, dict) else ()
    for model in models:
        if not model.get("parent"):  # else adapters over another one
            found = dict.fromkeys((model.get("id"), model.get("root")))
            yield from (name for name in found if name)


def _is_same(name: str, mine: str | None) -> bool:
    """Return whether a server means what is given here: the same text, or the same folder."""
    if mine is None:
        return False
    return name == mine or (Path(name).is_dir() and Path(name).resolve() == Path(mine).resolve())
