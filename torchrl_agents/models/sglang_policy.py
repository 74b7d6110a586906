"""A policy over SGLang: at servers that run, or at servers started here."""

from functools import partial

from transformers import PreTrainedTokenizerBase

from torchrl_agents.settings.errors import refusing
from torchrl_agents.settings.schema import RecipeConfig
from torchrl_modules import LLMWrapperBase, SGLangWrapper, start_sglang_server
from torchrl_modules.sglang.own_server import OwnSGLangServer

from .hosted_fleet import hosted_fleet
from .policy_arguments import wrapper_arguments
from .sources import files_of
from .started_fleet import started_fleet


def sglang_policy(
    cfg: RecipeConfig, source: str, tokenizer: PreTrainedTokenizerBase
) -> LLMWrapperBase:
    """A policy over SGLang.

    Args:
        cfg: the settings.
        source: hub id or folder of the model.
        tokenizer: its tokenizer.

    Raises:
        SettingsError: no server answers, or none can be started.
    """
    arguments = wrapper_arguments(cfg.policy, tokenizer)
    options = dict(cfg.engine.engine_kwargs)
    if where := list(cfg.engine.urls) or cfg.engine.url:
        with refusing("engine"):  # servers that run are asked
            return SGLangWrapper(where, engine_kwargs={"model": source, **options}, **arguments)
    if cfg.policy.max_model_len is not None:
        options.setdefault("context_length", cfg.policy.max_model_len)
    if cfg.engine.colocate:
        options.setdefault("enable_memory_saver", True)
    # The folder of an embedded model goes, and a server may be started again.
    kept = source if cfg.policy.model is not None else files_of(source)
    devices, count = cfg.engine.devices, cfg.engine.num_engines
    if cfg.engine.nodes:
        own_there = partial(OwnSGLangServer, model=source)
        fleet = hosted_fleet(source, cfg.engine, own=own_there, **options)
        return SGLangWrapper(fleet, **arguments)
    with refusing("engine=sglang"):
        start, own = start_sglang_server, OwnSGLangServer
        fleet = started_fleet(kept, devices, count, start=start, own=own, **options)
    return SGLangWrapper(fleet, **arguments)
