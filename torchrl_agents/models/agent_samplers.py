"""Policies of agents over vLLM: adapters over one base, or an engine for each whole model."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from collectors.weight_update.adapters_alone import adapter_weights
from torchrl_agents.settings.errors import SettingsError, refusing
from torchrl_agents.settings.schema import AgentsConfig, RecipeConfig
from torchrl_modules import (
    AgentPolicies,
    EngineFleet,
    LLMWrapperBase,
    TransformersWrapper,
    engines_over_one_base,
    vLLMWrapper,
)
from torchrl_modules.engines.blocking_engine import BlockingEngine
from torchrl_modules.weights.agent_weights import AgentWeights

from .adapted_agents import models_with_adapters
from .loading import load_model
from .outline import outline
from .policy_arguments import wrapper_arguments
from .saved_agents import SavedAgents, adapter_ranks
from .sources import Source, folder_of, model_files, model_folder
from .vllm_policy import vllm_policy


def agent_samplers(
    cfg: RecipeConfig,
    agents: AgentsConfig,
    policy: LLMWrapperBase,
    *,
    saved: SavedAgents | None,
    actor: TransformersWrapper | None = None,
) -> AgentPolicies:
    """Policies that take the turns of agents with vLLM, each by weights of its own.

    With adapters one engine has the base of all, be it in this process or at each of several
    servers; otherwise each agent has engines of its own.

    Args:
        cfg: the settings.
        agents: which there are.
        policy: over the engine of the base, or of the first agent.
        saved: agents of the run that ``policy.model`` is, if it is one.
        actor: over the model that agents begin with; ``None`` where nothing is trained.

    Raises:
        SettingsError: the engine takes no adapters, or one can't be made so.
    """
    if adapter_ranks(cfg):
        own = _over_one_base(cfg, agents, policy)
    else:
        own = {agents.names[0]: policy}
        for number, name in enumerate(agents.names[1:], 1):
            with folder_of(_source_of(cfg, name, saved, actor)) as source:
                share = number, len(agents.names)
                own[name] = vllm_policy(cfg, source, policy.tokenizer, share=share)
    return AgentPolicies(own, otherwise=agents.otherwise)


def saved_samplers(cfg: RecipeConfig, policy: LLMWrapperBase, saved: SavedAgents) -> AgentPolicies:
    """Policies over vLLM of agents as a run has left them, where nothing is trained.

    Args:
        cfg: the settings.
        policy: as for :func:`agent_samplers`.
        saved: by the run.

    Raises:
        SettingsError: as there.
    """
    policies = agent_samplers(cfg, saved.settings, policy, saved=saved)
    if ranks := adapter_ranks(cfg):
        source = saved.source(adapters=True)
        model, _ = load_model(replace(cfg.policy, device="meta"), source, load=outline)
        models = models_with_adapters(model, [*ranks], saved, {})
        adapters: Any = AgentWeights({name: adapter_weights(models[name]) for name in ranks})
        with refusing("engine"):
            policies.update_weights(adapters)
    return policies


def _over_one_base(
    cfg: RecipeConfig, agents: AgentsConfig, policy: LLMWrapperBase
) -> dict[str, LLMWrapperBase]:
    """A policy for each agent over one engine, or over clients of one server or one fleet."""
    engine: Any = policy.engine
    if not getattr(engine, "max_adapters", 0):
        where = ", ".join(cfg.engine.urls) or cfg.engine.url
        raise SettingsError(
            f"agents.trained={agents.trained}: the server at {where} takes no adapters, with which "
            "it would draw for all agents. Start it with --enable-lora."
        )
    tokenizer = policy.tokenizer
    if isinstance(engine, BlockingEngine) and isinstance(engine.inside, EngineFleet):
        fleet, own = engine.inside, {agents.names[0]: policy}
        for name in agents.names[1:]:
            own[name] = _over(cfg, fleet.beside(), tokenizer)
        return own
    if cfg.engine.url:  # a client for each: it has adapters of its own there
        return {name: vllm_policy(cfg, cfg.engine.url, tokenizer) for name in agents.names}
    engines: Mapping[str, Any] = engines_over_one_base(engine, agents.names, frozen=agents.frozen)
    return {name: _over(cfg, each, tokenizer) for name, each in engines.items()}


def _over(cfg: RecipeConfig, engine: Any, tokenizer: PreTrainedTokenizerBase) -> LLMWrapperBase:
    return vLLMWrapper(engine, **wrapper_arguments(cfg.policy, tokenizer))


def _source_of(
    cfg: RecipeConfig, name: str, saved: SavedAgents | None, actor: TransformersWrapper | None
) -> Source:
    """The place of an agent's whole model; weights that are trained are pushed in any case."""
    if saved is not None:
        return saved.whole(name)
    if cfg.policy.model is not None:
        return model_folder(cfg.policy.model)
    assert actor is not None
    return model_files(actor)
