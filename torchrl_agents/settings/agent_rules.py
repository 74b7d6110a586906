"""Rules of agents with weights of their own: what does not go with them is refused by name."""

from collections.abc import Iterator

from .schema import (
    AgentsConfig,
    EngineConfig,
    RolloutsConfig,
    agents_settings,
    collects_on_ray,
    critic_settings,
)
from .started_ranks import num_ranks


def agents_faults(cfg: RolloutsConfig) -> Iterator[str]:
    """Yield faults of agents with weights of their own, and of settings that they can't have.

    Args:
        cfg: the settings.
    """
    given: AgentsConfig = getattr(cfg, "agents", AgentsConfig())
    names = given.names
    if not given.trained:
        if given != AgentsConfig():
            yield "agents.frozen and agents.otherwise are for agents.trained: name those, too."
        return
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"agents: {twice} are there twice."
    if given.otherwise is not None and given.otherwise not in names:
        yield f"agents.otherwise must be one of {', '.join(names)}, got {given.otherwise!r}."
    policy = cfg.policy
    is_set = {
        "loss.advantage=gae": critic_settings(cfg) is not None,
        "policy.load_in_4bit": policy.load_in_4bit,
        f"policy.quantization={policy.quantization}": policy.quantization is not None,
        "push_to_hub": cfg.push_to_hub is not None,
    }
    for name in (name for name, value in is_set.items() if value):
        yield f"{name} does not go with agents.trained: leave one of them out."
    yield from _ranks_faults(cfg)
    if cfg.engine.name not in ("transformers", "vllm"):
        yield f"agents.trained is for engine=transformers or vllm, got engine={cfg.engine.name}."
    if cfg.engine.name == "vllm":
        yield from _vllm_faults(cfg, given)


def _ranks_faults(cfg: RolloutsConfig) -> Iterator[str]:
    """Faults of several ranks that train agents with weights of their own."""
    train = cfg.train
    is_set = {
        "train.parallel=fsdp2": train.parallel == "fsdp2",
        "train.reduce=micro_batch": train.reduce == "micro_batch",
        "train.tensor_parallel_size and expert_parallel_size": train.splits_model,
        "train.context_parallel_size": train.context_parallel_size > 1,
    }
    for name in (name for name, value in is_set.items() if value and num_ranks() > 1):
        yield (
            f"{name} does not go with agents.trained: each of the {num_ranks()} ranks has the "
            "models of all agents whole, and gradients are added up once a step. Leave it out. "
            "With policy.lora_rank= agents have adapters over one model, of which a rank has one "
            "copy."
        )


def _vllm_faults(cfg: RolloutsConfig, agents: AgentsConfig) -> Iterator[str]:
    """Faults of vLLM, which draws for agents."""
    engine, has_adapters = cfg.engine, cfg.policy.lora_rank is not None
    if collects_on_ray(cfg):
        yield "agents.trained: collector=ray draws for agents with engine=transformers, got vllm."
    if engine.engine_kwargs.get("enable_lora", True) is False and has_adapters:
        yield (
            "engine.engine_kwargs.enable_lora=false: agents with policy.lora_rank have their "
            "adapters in one engine. Leave it out."
        )
    is_here = not (engine.url or engine.urls or engine.starts_servers)
    fault = None if has_adapters else whole_models_fault(engine, len(agents.names))
    if fault is not None:
        yield f"agents.trained without policy.lora_rank: {fault}"
    if engine.colocate and agents.frozen and not (is_here and has_adapters):
        yield (
            f"engine.colocate with agents.frozen={agents.frozen}: an update wakes an engine, and "
            "those get none. Take policy.lora_rank and an engine in this process, which all agents "
            "share, or leave engine.colocate out."
        )


def whole_models_fault(engine: EngineConfig, count: int) -> str | None:
    """Return what keeps agents from having a whole model each in vLLM; ``None``: nothing does.

    Args:
        engine: the settings.
        count: of agents.
    """
    if engine.name != "vllm":
        return None
    train = "Or give them adapters over one model: policy.lora_rank."
    if engine.url or engine.nodes:
        which = "engine.url" if engine.url else "engine.nodes"
        return (
            f"each of the {count} agents has a whole model, and {which} has one for all. Leave it "
            f"out, or take engine.urls= or engine.num_engines={count}. {train}"
        )
    if len(engine.urls) % count:
        return (
            f"engine.urls are shared out to the {count} agents, each of which has a whole model: "
            f"give a multiple of {count} servers, got {len(engine.urls)}. {train}"
        )
    if engine.starts_servers and engine.num_engines % count:
        return (
            f"engine.num_engines={engine.num_engines} are shared out to the {count} agents, each "
            f"of which has a whole model: take a multiple of {count}. {train}"
        )
    if engine.colocate and not (engine.urls or engine.starts_servers):
        return (
            "engine.colocate puts one engine of this process to sleep, and each agent has one. "
            f"Take servers, engine.num_engines={count}. {train}"
        )
    return None


def warm_start_fault(cfg: RolloutsConfig) -> str | None:
    """Return what keeps adapters of agents in vLLM from a warm start; ``None``: nothing does.

    Args:
        cfg: the settings; a number of steps that is not there yet is none.
    """
    is_adapted = agents_settings(cfg) is not None and cfg.policy.lora_rank is not None
    if not (is_adapted and cfg.engine.name == "vllm" and cfg.warm_start.num_steps):
        return None
    return (
        f"warm_start.num_steps={cfg.warm_start.num_steps} trains the model before agents get "
        "adapters over it, and engine=vllm keeps the weights that policy.model has: it would draw "
        "with another model than is trained. Set warm_start.num_steps=0 and begin with what "
        "`torchrl-agents sft` leaves, or take engine=transformers."
    )
