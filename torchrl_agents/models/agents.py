"""Policies of agents with weights of their own: adapters over one model, or a model each."""

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from torchrl_agents.settings.errors import refusing
from torchrl_agents.settings.schema import (
    AgentsConfig,
    PolicyConfig,
    RecipeConfig,
)
from torchrl_data.batched_object import read_objects
from torchrl_data.keys import AGENT
from torchrl_modules import (
    AgentPolicies,
    LLMWrapperBase,
    TransformersWrapper,
    models_over_one_base,
)

from .adapted_agents import models_with_adapters
from .adapters import adapter_config, is_adapted
from .agent_samplers import agent_samplers, saved_samplers
from .loading import load_model
from .policies import transformers_policy
from .saved_agents import SavedAgents, agents_of, found_agents, takes_adapters

_LOG = logging.getLogger("torchrl_agents")


def add_agents(
    cfg: RecipeConfig, actor: TransformersWrapper | None, policy: LLMWrapperBase
) -> tuple[AgentPolicies | None, AgentPolicies]:
    """Give each agent weights of its own.

    Args:
        cfg: the settings.
        actor: over the model that they begin with, or over the one below their adapters; ``None``
            where nothing is trained and vLLM has the model.
        policy: that samples: the actor itself, or one over vLLM.

    Returns:
        What is trained, if anything is, and what samples: the same, but over vLLM.

    Raises:
        SettingsError: vLLM takes no adapters, or agents that a run left have others.
    """
    saved = found_agents(cfg)
    if actor is None:
        assert saved is not None
        return None, saved_samplers(cfg, policy, saved)
    agents = agents_of(cfg, saved)
    assert agents is not None
    kind = _adapted_models if takes_adapters(cfg, saved) else _whole_models
    models = kind(cfg.policy, agents, actor.model, saved)
    for name in agents.frozen:
        models[name].requires_grad_(False)
    what = "adapters over one model" if kind is _adapted_models else "a whole model each"
    frozen = f"; {', '.join(agents.frozen)} stay as they are" if agents.frozen else ""
    _LOG.info("agents: %s have %s%s", ", ".join(agents.trained), what, frozen)
    own: dict[str, LLMWrapperBase] = {
        name: actor if model is actor.model else transformers_policy(cfg, model, actor.tokenizer)
        for name, model in models.items()
    }
    actors = AgentPolicies(own, otherwise=agents.otherwise)
    if policy is actor:
        return actors, actors
    return actors, agent_samplers(cfg, agents, policy, saved=saved, actor=actor)


def _whole_models(
    cfg: PolicyConfig, agents: AgentsConfig, given: nn.Module, saved: SavedAgents | None
) -> dict[str, nn.Module]:
    """A model for each agent: a copy of the one that is given, or what a run left."""
    if saved is not None:
        return {name: load_model(cfg, saved.whole(name))[0] for name in agents.names}
    return {name: deepcopy(given) for name in agents.names}


def _adapted_models(
    cfg: PolicyConfig, agents: AgentsConfig, base: Any, saved: SavedAgents | None
) -> dict[str, nn.Module]:
    """A model for each agent over one base: with new adapters, or those that a run left."""
    new = {} if cfg.lora_rank is None else dict.fromkeys(agents.trained, adapter_config(cfg, base))
    with refusing("policy.lora_target_modules"):
        return models_with_adapters(base, agents.names, saved, new)


def saved_models(saved: SavedAgents, cfg: PolicyConfig) -> tuple[nn.ModuleDict, Any, bool]:
    """The models of all agents that a run has left.

    Args:
        saved: by the run.
        cfg: of that run.

    Returns:
        The models by the names of the agents, their tokenizer, and whether they have adapters.
    """
    plain = replace(cfg, model_kwargs={}, add_control_tokens=False, chat_template=None)
    names, is_over_base = saved.settings.names, saved.base is not None
    source = saved.source(adapters=True)
    settings = plain if Path(source).is_dir() else cfg
    model, tokenizer = load_model(settings, source, who="the model of the run")
    if is_over_base:
        models = models_with_adapters(model, names, saved, {})
    else:
        models = {name: load_model(plain, saved.whole(name))[0] for name in names}
    for name in saved.settings.frozen:  # as in the run: they belong to what it was trained over
        models[name].requires_grad_(False)
    return nn.ModuleDict(models), tokenizer, is_over_base


def frozen_copies(policies: AgentPolicies) -> AgentPolicies:
    """The policies as they are now, to compare with: weights that are not trained are shared."""
    own: dict[str, LLMWrapperBase] = {}
    for name, policy in policies.by_agent.items():
        model: Any = policy.model
        every = chain(model.parameters(), model.buffers())
        shared = {id(value): value for value in every if not value.requires_grad}
        own[name] = TransformersWrapper(
            deepcopy(model, shared).eval().requires_grad_(False),
            tokenizer=policies.tokenizer,
            generate_kwargs=policies.sampling,
            generate=False,
        )
    return AgentPolicies(own, otherwise=policies.otherwise)


def trained_rows(actor: Any, rows: TensorDictBase) -> TensorDictBase | None:
    """The rows of agents that are trained, in order; ``None`` where there are none.

    Args:
        actor: what is trained.
        rows: ``[B]``, with the agents that wrote them, where these have weights of their own.
    """
    if not isinstance(actor, AgentPolicies):
        return rows
    by_agent = actor.rows_of(read_objects(rows, AGENT))
    chosen = sorted(row for name in actor.trained for row in by_agent.get(name, ()))
    return rows[chosen] if chosen else None


def adapters_of(policies: AgentPolicies) -> dict[str, Any]:
    """The configurations of the adapters that agents have, by name; none of whole models."""
    models: dict[str, Any] = {**policies.model}
    return {name: own.peft_config["default"] for name, own in models.items() if is_adapted(own)}


def models_alike(
    agents: AgentsConfig, model: nn.Module, adapters: Mapping[str, Any]
) -> nn.ModuleDict:
    """The models of all agents as another rank has them, to which their weights come.

    Args:
        agents: their settings.
        model: that they begin with, or below their adapters.
        adapters: their configurations, see :func:`adapters_of`.
    """
    adapted = models_over_one_base(model, adapters) if adapters else {}
    models = {
        name: adapted.get(name, model) if adapters else deepcopy(model) for name in agents.names
    }
    for name in agents.frozen:
        models[name].requires_grad_(False)
    return nn.ModuleDict(models)


def pushed_models(actor: Any, *, is_first: bool = False) -> Any:
    """The weights that a push takes: a model, or those of the agents that are trained.

    Args:
        actor: what is trained.
        is_first: so are those of frozen agents, which an engine may have begun otherwise; a frozen
            one without adapters is the base that others have adapters over.
    """
    if not isinstance(actor, AgentPolicies):
        return actor.model
    trained = actor.trained_models()
    if not is_first:
        return trained
    over_base = any(map(is_adapted, trained.values()))
    frozen = {name: own for name, own in actor.model.items() if name not in actor.trained}
    return trained | {name: own for name, own in frozen.items() if is_adapted(own) or not over_base}


def policies_of(actor: Any) -> Mapping[str, Any]:
    """The policies of agents by their names; of one policy that one, under nobody's name."""
    return getattr(actor, "by_agent", {"": actor})


def scorer_of(actor: Any) -> Any:
    """The scorer over the trained model; of agents over the first of their models, all alike."""
    return next(iter(policies_of(actor).values())).scorer
