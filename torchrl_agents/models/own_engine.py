"""A policy over an engine of the user's own: ``engine.name=mine:Engine``."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from torchrl_agents.settings.errors import refusing
from torchrl_agents.settings.schema import EngineConfig, RecipeConfig
from torchrl_data.import_path import import_callable
from torchrl_modules import LLMWrapperBase

from .policy_arguments import wrapper_arguments


def engine_factory(cfg: EngineConfig) -> Callable[[], Any]:
    """Return what makes the engine: the user's class or function, with what the settings give it.

    Args:
        cfg: the settings of the engine.

    Raises:
        SettingsError: it can't be found, or does not take what they give.
    """
    with refusing("engine"):
        make = import_callable("engine.name", cfg.name)
    given = {**({"url": cfg.url} if cfg.url else {}), **cfg.engine_kwargs}
    with refusing(f"engine.name={cfg.name} with engine.url and engine.engine_kwargs"):
        inspect.signature(make).bind(**given)
    return partial(make, **given)


def own_engine_policy(cfg: RecipeConfig, tokenizer: PreTrainedTokenizerBase) -> LLMWrapperBase:
    """A policy over an engine that the user's class or function makes.

    Args:
        cfg: the settings.
        tokenizer: of the model that the engine serves.

    Raises:
        SettingsError: the engine can't be made, or lacks what a policy asks of one.
    """
    make = engine_factory(cfg.engine)
    with refusing(f"engine.name={cfg.engine.name}"):
        return LLMWrapperBase(make(), **wrapper_arguments(cfg.policy, tokenizer))
