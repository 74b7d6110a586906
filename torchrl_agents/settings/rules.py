"""Rules of settings: what can't work is refused by name, before torch is imported.

The rule of a single setting stands at its field; here are those of several that do not go together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from itertools import chain
from operator import attrgetter
from typing import Any, Final

from torchrl_envs.datasets import DATA_FILES, MODEL_FILES, check_source

from .agent_rules import agents_faults, warm_start_fault
from .engine_nodes import node_faults
from .errors import SettingsError, refusing
from .field_rules import broken_rules
from .recipe import Recipe, compares_groups
from .schema import (
    CollectorConfig,
    CriticConfig,
    OptimConfig,
    RecipeConfig,
    RolloutsConfig,
    SamplesConfig,
    TrainConfig,
    TrainingConfig,
    agents_settings,
    collects_on_ray,
)
from .started_ranks import OF_RANKS, num_ranks


def check_rules(recipe: Recipe, cfg: RecipeConfig) -> None:
    """Refuse settings that can't work, as far as that is known without torch.

    Raises:
        SettingsError: names the setting, what it must be, and what it is.
    """
    check_path_parts(cfg.name, cfg.task.id)
    faults = [_unused_faults(recipe, cfg)]
    faults += [rule.breaches(path, attrgetter(path)(cfg)) for path, rule in recipe.rules.items()]
    faults += [broken_rules(cfg), _policy_faults(cfg), _engine_faults(cfg), _invariance_faults(cfg)]
    faults += [_own_engine_faults(cfg), _evaluation_faults(cfg)]
    if isinstance(cfg, TrainingConfig):
        faults.append(_training_faults(recipe, cfg))
    elif num_ranks() > 1:
        faults.append(iter([_needs_one_process(recipe)]))
    if isinstance(cfg, RolloutsConfig):
        faults.append(_rollout_faults(recipe, cfg))
        faults += [_record_faults(cfg), _watch_faults(cfg)]
        faults += [_critic_faults(cfg), agents_faults(cfg)]
    # One after the other: what is looked at later may need that the rest is right.
    if (words := next(chain.from_iterable(faults), None)) is not None:
        raise SettingsError(words)


def _needs_one_process(recipe: Recipe) -> str:
    return (
        f"{recipe.name} trains nothing that ranks could share, and torchrun has started "
        f"{num_ranks()} of them (WORLD_SIZE). Start it without torchrun."
    )


def _unused_faults(recipe: Recipe, cfg: RecipeConfig) -> Iterator[str]:
    """Faults of settings that all recipes have, and that have no effect on this one."""
    usual = recipe.config()
    for path, why in recipe.unused.items():
        for name, value in _leaves(path, attrgetter(path)(cfg)):
            if value != attrgetter(name)(usual):
                yield f"{name}={value} has no effect: {why}. Leave it out."


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The settings of a group by their paths; of a single one, that one."""
    if is_dataclass(value):
        for each in fields(value):
            yield from _leaves(f"{path}.{each.name}", getattr(value, each.name))
    else:
        yield path, value


def reset_unused(recipe: Recipe, cfg: RecipeConfig) -> None:
    """Give settings without an effect their defaults again, where something was filled in.

    Args:
        recipe: says which they are.
        cfg: the settings, changed in place.
    """
    usual = recipe.config()
    for path in recipe.unused:
        group, _, name = path.rpartition(".")
        setattr(attrgetter(group)(cfg) if group else cfg, name, attrgetter(path)(usual))


def check_path_parts(name: str | None, task: str) -> None:
    """Refuse names that would be no folders of their own below that of the recipe's runs.

    Args:
        name: of the run, if it has one.
        task: its name; a slash in it is a folder in a folder.

    Raises:
        SettingsError: names the setting, and what is wrong with it.
    """
    parts = [("name", part) for part in (() if name is None else (name,))]
    parts += [("task", part) for part in task.split("/")]
    for setting, part in parts:
        is_odd = part in ("", ".", "..") or "/" in part or not part.isprintable()
        if is_odd or len(part.encode()) > _LONGEST_NAME:
            raise SettingsError(
                f"{setting}={part!r} can't be the name of a folder: it needs 1 to {_LONGEST_NAME} "
                "bytes of printable characters without '/', and more than '.' or '..'. A folder "
                "elsewhere is hydra.run.dir=."
            )


_LONGEST_NAME: Final = 200
"""Of a folder, in bytes: file systems take 255, with the number of a run and endings of files."""


def _policy_faults(cfg: RecipeConfig) -> Iterator[str]:
    policy = cfg.policy
    if cfg.dry_run and (cfg.overwrite or cfg.resume is not None):
        yield "dry_run=true changes no earlier run: leave overwrite= and resume= out."
    if policy.add_control_tokens and (policy.model is None or cfg.engine.name != "transformers"):
        yield "policy.add_control_tokens of a policy.model is for one with engine=transformers."
    if policy.chat_template is not None and policy.model is None:
        yield "policy.chat_template is for a policy.model: the embedded one has its own."
    if policy.chat_template is not None and policy.chat_template_name:
        yield (
            "policy.chat_template stands in place of policy.chat_template_name, which is "
            f"{policy.chat_template_name}: set policy.chat_template_name=null, too."
        )
    if policy.model is None and policy.model_kwargs:
        yield "policy.model_kwargs are for a policy.model that is loaded."
    yield from _quantization_faults(cfg)
    data = getattr(cfg, "data", None)
    for where, source, suffixes in (
        (f"task={cfg.task.id}", getattr(cfg.task, "dataset", None), DATA_FILES),
        ("data.dataset", getattr(data, "dataset", None), DATA_FILES),
        # With engine=chat a model has its name at the server.
        (f"policy.model={policy.model}", cfg.engine.name != "chat" and policy.model, MODEL_FILES),
    ):
        with refusing(where):
            check_source(source, suffixes)
    rank = policy.lora_rank
    given = [name for name in ("lora_alpha", "lora_target_modules") if getattr(policy, name)]
    if rank is None and given:
        yield f"policy.{given[0]} is for adapters: set policy.lora_rank, too."
    if rank is not None and not isinstance(cfg, TrainingConfig):
        yield f"policy.lora_rank={rank}: nothing is trained here. Leave it out."
    if rank is not None and find_spec("peft") is None:
        yield "policy.lora_rank needs the package peft: pip install 'torchrl-agents[lora]'."


def _quantization_faults(cfg: RecipeConfig) -> Iterator[str]:
    policy = cfg.policy
    ways = {
        "policy.load_in_4bit": policy.load_in_4bit,
        "policy.model_kwargs.quantization_config": "quantization_config" in policy.model_kwargs,
    }
    given = [name for name, is_given in ways.items() if is_given]
    yield from _eight_bit_faults(cfg, given)
    if not given:
        return
    who = given[-1]
    if len(given) > 1:
        yield f"{' and '.join(given)} say the same: leave one of them out."
    if policy.model is None:
        yield f"{who} is for a policy.model that is loaded."
    if find_spec("bitsandbytes") is None:
        install = "pip install 'torchrl-agents[qlora]'"
        yield f"{who} needs the package bitsandbytes, which is not here: {install}."
    if collects_on_ray(cfg) and cfg.engine.name == "transformers":
        yield f"{who}: collectors on Ray have no policy of 4 bits. Take engine=vllm."
    if not isinstance(cfg, TrainingConfig):
        if cfg.engine.name != "transformers":
            how = "Others quantise by settings of their own: engine.engine_kwargs.quantization."
            yield f"{who} is for engine=transformers. {how}"
    elif policy.lora_rank is None:
        yield f"{who}: weights of 4 bits are not trained. Train adapters: policy.lora_rank."
    elif num_ranks() > 1:
        yield f"{who} is for one process: of several ranks none would have its weights."


def _eight_bit_faults(cfg: RecipeConfig, others: Sequence[str]) -> Iterator[str]:
    """Faults of a model whose products are of 8 bits.

    Args:
        cfg: the settings.
        others: settings that quantise the weights themselves.
    """
    policy, engine = cfg.policy, cfg.engine
    if policy.quantization is None:
        return
    who = f"policy.quantization={policy.quantization}"
    if others:
        yield f"{who} is for whole weights: leave {others[0]} out."
    if engine.name in ("sglang", "chat"):
        yield f"{who} is for engine=transformers and engine=vllm, got engine={engine.name}."
    own = engine.engine_kwargs.get("quantization", policy.quantization)
    if engine.name == "vllm" and own != policy.quantization:
        yield f"{who}, but engine.engine_kwargs.quantization={own}: they have to be the same."
    is_merged = engine.name == "vllm" and not engine.engine_kwargs.get("enable_lora")
    if policy.lora_rank is not None and is_merged:
        yield (
            f"{who}: vLLM would round adapters with the matrices that they are merged into. Push "
            "them alone: +engine.engine_kwargs.enable_lora=true."
        )
    if isinstance(cfg, TrainingConfig) and num_ranks() > 1 and cfg.train.splits_model:
        yield f"{who} does not go with train.tensor_parallel_size and expert_parallel_size."


def _optimizer_faults(cfg: TrainingConfig) -> Iterator[str]:
    name = cfg.optim.name
    if name == "adamw8bit" and find_spec("bitsandbytes") is None:
        install = "pip install 'torchrl-agents[adamw8bit]'"
        yield f"optim.name=adamw8bit needs the package bitsandbytes, which is not here: {install}."
    if name in ("adamw8bit", "muon") and num_ranks() > 1 and cfg.train.parallel != "ddp":
        yield f"optim.name={name} needs whole parameters on each rank: train.parallel=ddp."
    if name != "muon" and cfg.optim.momentum != OptimConfig().momentum:
        hint = " The momentum of sgd is optim.beta1." if name == "sgd" else ""
        yield f"optim.momentum is for optim.name=muon, not {name}.{hint}"
    of_adam = [each for each in ("beta2", "eps") if name == "sgd"]
    for each in (x for x in of_adam if getattr(cfg.optim, x) != getattr(OptimConfig(), x)):
        yield f"optim.{each} is of adamw and muon, and optim.name=sgd has none."


def _training_faults(recipe: Recipe, cfg: TrainingConfig) -> Iterator[str]:
    yield from _optimizer_faults(cfg)
    if find_spec("matplotlib") is None:
        what = f"{recipe.name} draws its learning curve with matplotlib"
        yield f"{what}: pip install 'torchrl-agents[train]'."
    for backend in cfg.logger.backends:
        if backend != "csv" and find_spec(backend) is None:
            yield f"logger.backends: {backend} needs the package {backend}: pip install {backend}."
    if cfg.train.stop_at is not None and cfg.evaluate.every is None:
        yield f"train.stop_at={cfg.train.stop_at} needs tests between steps: set evaluate.every=."
    changed = [n for n in OF_RANKS if getattr(cfg.train, n) != getattr(TrainConfig(), n)]
    for name in changed:
        if num_ranks() == 1:
            yield f"train.{name} is for several ranks, which torchrun starts."
        elif name in ("num_replicas", "cpu_offload") and cfg.train.parallel != "fsdp2":
            yield f"train.{name} is for train.parallel=fsdp2, got {cfg.train.parallel}."
    yield from _split_faults(cfg)
    yield from _context_faults(cfg)
    if num_ranks() % cfg.train.num_replicas:
        yield f"train.num_replicas={cfg.train.num_replicas} has to divide the {num_ranks()} ranks."
    if num_ranks() > 1 and cfg.engine.name == "vllm" and not _has_servers(cfg):
        yield "Several ranks need vLLM's servers: give engine.url=, urls= or devices=."


def _split_faults(cfg: TrainingConfig) -> Iterator[str]:
    """Faults of a model of which ranks compute parts of one layer."""
    train, ranks = cfg.train, num_ranks()
    matrices, experts = train.tensor_parallel_size, train.expert_parallel_size
    if ranks > 1 and train.splits_model:
        if ranks % matrices:
            yield f"train.tensor_parallel_size={matrices} has to divide the {ranks} ranks."
        if experts > 1 and (experts % matrices or ranks % experts):
            yield (
                f"train.expert_parallel_size={experts} has to be a multiple of "
                f"train.tensor_parallel_size={matrices}, and to divide the {ranks} ranks."
            )
        is_set = {
            "train.parallel=ddp": train.parallel == "ddp",
            "train.num_replicas": train.num_replicas > 1,
            "train.cpu_offload": train.cpu_offload,
            "train.compile_layers": bool(train.compile_layers),
            "policy.lora_rank": cfg.policy.lora_rank is not None,
            "policy.routed_experts": cfg.policy.routed_experts,
            "engine.batch_invariant": cfg.engine.batch_invariant,
        }
        for name in (name for name, value in is_set.items() if value):
            yield (
                f"{name} does not go with train.tensor_parallel_size and expert_parallel_size: "
                "leave one of them out."
            )


def _context_faults(cfg: TrainingConfig) -> Iterator[str]:
    """Faults of rows whose tokens ranks share out."""
    train, ranks = cfg.train, num_ranks()
    size = train.context_parallel_size
    if ranks == 1 or size == 1:
        return
    if ranks % size:
        yield f"train.context_parallel_size={size} has to divide the {ranks} ranks."
    is_set = {
        "train.tensor_parallel_size and expert_parallel_size": train.splits_model,
        "engine.batch_invariant": cfg.engine.batch_invariant,
    }
    for name in (name for name, value in is_set.items() if value):
        yield f"{name} does not go with train.context_parallel_size: leave one of them out."


def _evaluation_faults(cfg: RecipeConfig) -> Iterator[str]:
    test: SamplesConfig | None = getattr(cfg, "evaluate", None)
    if test is not None and any(k > test.num_samples for k in test.ks or ()):
        most = f"evaluate.num_samples={test.num_samples}"
        yield f"evaluate.ks must be from 1 to {most}, got {test.ks}."


def _has_servers(cfg: RecipeConfig) -> bool:
    """Return whether vLLM runs in processes of its own, wherever they are started."""
    engine = cfg.engine
    return bool(engine.url or engine.urls or engine.starts_servers) or collects_on_ray(cfg)


def _invariance_faults(cfg: RecipeConfig) -> Iterator[str]:
    engine, policy = cfg.engine, cfg.policy
    if not engine.batch_invariant:
        return
    if engine.name not in ("transformers", "vllm"):
        yield f"engine.batch_invariant is for engine=transformers or vllm, not for {engine.name}."
    if engine.url or engine.urls:
        yield (
            "engine.batch_invariant can't reach a server that runs already: start it with "
            "VLLM_BATCH_INVARIANT=1 in its environment, and leave engine.batch_invariant out."
        )
    if engine.name != "transformers":
        return
    why = "engine.batch_invariant of engine=transformers is for float32 on a CPU, got"
    if policy.dtype != "float32":
        yield f"{why} policy.dtype={policy.dtype}."
    if policy.device is not None and policy.device != "cpu":
        yield f"{why} policy.device={policy.device}."
    if policy.gradient_checkpointing:
        yield (
            "engine.batch_invariant: layers that are computed again in the backward pass would "
            "take other kernels: set policy.gradient_checkpointing=false."
        )
    train = cfg.train if isinstance(cfg, TrainingConfig) else None
    if train is not None and train.autocast:
        yield f"{why} train.autocast=true."
    if train is not None and train.compile_layers:
        yield "engine.batch_invariant goes without train.compile_layers: leave one of them out."


def _engine_faults(cfg: RecipeConfig) -> Iterator[str]:
    engine, longest = cfg.engine, cfg.policy.max_model_len
    is_library = engine.is_library
    if not is_library and (engine.urls or engine.starts_servers):
        names = "engine.nodes is" if engine.nodes else "engine.urls, num_engines and devices are"
        yield f"{names} for engine=vllm or sglang, got engine={engine.name}."
    if bool(engine.url) + bool(engine.urls) + engine.starts_servers > 1:
        others = "num_engines with devices, and nodes"
        yield f"engine.url, engine.urls, {others}: give one of them."
    if len(engine.devices) % engine.num_engines:
        yield (
            f"engine.devices={engine.devices} are shared out to engine.num_engines="
            f"{engine.num_engines}: take a multiple of them of devices."
        )
    if is_library and (engine.url or engine.urls) and longest:
        yield (
            f"policy.max_model_len={longest}: a server at engine.url has the length that it was "
            "started with (--max-model-len, or SGLang's --context-length). Leave it out."
        )
    if engine.name == "transformers" and (engine.url or engine.engine_kwargs):
        yield (
            "engine.url and engine.engine_kwargs are for engine=vllm or sglang, or an engine of "
            "yours."
        )
    in_steps = isinstance(cfg, RolloutsConfig) and cfg.collector.mode == "sync"
    if engine.colocate and not (is_library and in_steps):
        yield (
            "engine.colocate lends the memory of engine=vllm or sglang to a step: it needs "
            "collector=sync."
        )
    unknown = sorted({*engine.engine_kwargs} - {"timeout_s"}) if engine.name == "chat" else []
    if unknown:
        yield f"engine.engine_kwargs of engine=chat takes timeout_s alone, got {unknown}."
    if engine.name == "chat" and not (engine.url and cfg.policy.model):
        yield "engine=chat needs engine.url=http://.../v1 and policy.model=, its name there."
    yield from _library_faults(cfg)
    yield from node_faults(cfg)


def changed_base(num_steps: int) -> str:
    """The fault of a warm start where adapters alone go to the engine."""
    return (
        f"warm_start.num_steps={num_steps} trains the model before it gets adapters, and an engine "
        "that takes adapters alone (enable_lora) keeps the weights that policy.model has: it would "
        "draw with another model than is trained. Set warm_start.num_steps=0 and begin with what "
        "`torchrl-agents sft` leaves, or take an engine without enable_lora, which is sent whole "
        "weights."
    )


def _library_faults(cfg: RecipeConfig) -> Iterator[str]:
    """Faults of vLLM's adapters, and of SGLang."""
    engine = cfg.engine
    own_adapters = engine.engine_kwargs.get("enable_lora")
    if isinstance(cfg, RolloutsConfig) and (fault := warm_start_fault(cfg)) is not None:
        yield fault
    if own_adapters and engine.name == "sglang":
        yield "engine.engine_kwargs.enable_lora is for engine=vllm: SGLang is sent whole weights."
    if engine.name == "sglang" and collects_on_ray(cfg):
        yield (
            "engine=sglang is for collector=sync or streaming, whose servers may be on other "
            "machines (engine.urls=): collector=ray draws with transformers or vllm."
        )
    if own_adapters and cfg.policy.lora_rank is None:
        yield "engine.engine_kwargs.enable_lora needs policy.lora_rank."
    warmed = cfg.warm_start.num_steps if isinstance(cfg, RolloutsConfig) else None
    if own_adapters and warmed and not cfg.policy.load_in_4bit:
        yield changed_base(warmed)
    if own_adapters and (engine.url or engine.urls):
        yield "engine.engine_kwargs.enable_lora: start the servers with --enable-lora instead."


def _own_engine_faults(cfg: RecipeConfig) -> Iterator[str]:
    engine, longest = cfg.engine, cfg.policy.max_model_len
    if not engine.is_own:
        return
    if longest is not None:
        yield f"policy.max_model_len={longest}: {engine.name} has its own max_model_len."
    if collects_on_ray(cfg):
        yield f"engine.name={engine.name} is of this process: take collector=sync or streaming."


def _rollout_faults(recipe: Recipe, cfg: RolloutsConfig) -> Iterator[str]:
    collector, default = cfg.collector, CollectorConfig()
    if compares_groups(recipe, cfg) and collector.group_size < 2:
        yield (
            "collector.group_size must be at least 2: a group of one never has a signal. One "
            "rollout a prompt goes with loss.advantage=batch_mean or running_mean of grpo."
        )
    yield from _refill_faults(recipe, cfg)
    yield from _branch_faults(recipe, cfg)
    for name in (
        *("max_staleness", "staleness_policy", "pipeline_depth", "recompute", "follow_load"),
        "max_inflight_tasks",
    ):
        if collector.mode == "sync" and getattr(collector, name) != getattr(default, name):
            yield f"collector.{name} is for collector=streaming."
    if collector.follow_load and not cfg.engine.is_library:
        yield "collector.follow_load needs engine=vllm or sglang, which tell how full they are."
    if collector.mode != "ray" and (collector.num_collectors > 1 or collector.remote_config):
        yield "collector.num_collectors and remote_config are for collector=ray."
    if collects_on_ray(cfg) and cfg.engine.name == "vllm":
        yield from _ray_faults(cfg)
    for key, bound in (
        ("policy.max_model_len", cfg.policy.max_model_len),
        ("collector.max_episode_tokens", collector.max_episode_tokens),
    ):
        least = collector.min_turn_tokens
        if bound is not None and bound < least:
            yield f"{key}={bound} leaves no room for a turn of collector.min_turn_tokens={least}."
    if cfg.policy.temperature <= 0:
        yield f"policy.temperature must be positive for a signal, got {cfg.policy.temperature}."


def _critic_faults(cfg: RolloutsConfig) -> Iterator[str]:
    """Faults of the critic's settings, and of those that a run with a critic can't have."""
    critic: CriticConfig | None = getattr(cfg, "critic", None)
    if critic is None:
        return
    loss, train = attrgetter("loss")(cfg), cfg.train
    if loss.advantage != "gae":
        for name, default in vars(CriticConfig()).items():
            if getattr(critic, name) != default:
                yield f"critic.{name} is for loss.advantage=gae, got {loss.advantage}."
        return
    is_set = {
        f"loss.credit={loss.credit}": loss.credit != "episode",
        f"loss.advantage_scale={loss.advantage_scale}": loss.advantage_scale is not None,
        f"loss.length_penalty={loss.length_penalty}": bool(loss.length_penalty),
        f"loss.observation_coeff={loss.observation_coeff}": bool(loss.observation_coeff),
        "train.tensor_parallel_size and expert_parallel_size": train.splits_model,
        "train.context_parallel_size": train.context_parallel_size > 1,
        "policy.load_in_4bit without critic.model": cfg.policy.load_in_4bit and not critic.model,
    }
    for name in (name for name, value in is_set.items() if value):
        yield f"{name} does not go with loss.advantage=gae: leave one of them out."
    if critic.model is not None:
        with refusing("critic.model"):
            check_source(critic.model, MODEL_FILES)


def _record_faults(cfg: RolloutsConfig) -> Iterator[str]:
    one_policy = agents_settings(cfg) is None  # in wrappers of all ranks, and agents' are in none
    if cfg.collector.verify_every is not None and num_ranks() > 1 and one_policy:
        yield "collector.verify_every is for one rank: leave it out."
    if cfg.record.kept_counts and cfg.engine.name != "transformers":
        yield "record.kept_counts needs engine=transformers: other engines don't tell them."
    truncates = cfg.policy.top_k > 0 or cfg.policy.top_p < 1 or cfg.policy.min_p > 0
    if cfg.policy.routed_experts and (
        cfg.engine.name != "transformers" or cfg.collector.mode != "sync"
    ):
        yield (
            "policy.routed_experts is for engine=transformers and collector=sync, got "
            f"engine={cfg.engine.name} and collector={cfg.collector.mode}: others don't tell them."
        )
    if cfg.policy.routed_experts and cfg.policy.gradient_checkpointing:
        yield (
            "policy.routed_experts are not replayed where layers are computed again in the "
            "backward pass: set policy.gradient_checkpointing=false."
        )
    if cfg.policy.sampling_mask and not truncates:
        yield "policy.sampling_mask is for policy.top_k, top_p or min_p: nothing is left out."
    if cfg.policy.sampling_mask and cfg.engine.name not in ("transformers", "vllm", "sglang"):
        yield "policy.sampling_mask needs engine=transformers, vllm or sglang, which tell it."
    urls = cfg.engine.url or cfg.engine.urls
    served = cfg.engine.starts_servers or urls or collects_on_ray(cfg)
    if cfg.policy.sampling_mask and cfg.engine.name == "vllm" and served:
        yield "policy.sampling_mask needs an engine of this process: leave servers of vLLM out."
    if not cfg.record.replay and not (cfg.policy.sampling_mask or cfg.policy.routed_experts):
        yield (
            "record.replay=false leaves out what policy.sampling_mask and policy.routed_experts "
            "record, and neither is on: leave it out."
        )
    if cfg.record.kept_counts and not truncates:
        yield "record.kept_counts is for policy.top_k, top_p or min_p: nothing is left out."


def _watch_faults(cfg: RolloutsConfig) -> Iterator[str]:
    record = cfg.record
    if record.stop_on and record.check_every is None:
        yield f"record.stop_on={record.stop_on} is for what record.check_every finds: set it."
    if record.stop_on and record.max_groups_per_step == 0:
        yield "record.stop_on reads what is recorded: leave record.max_groups_per_step=0 out."


def _refill_faults(recipe: Recipe, cfg: RolloutsConfig) -> Iterator[str]:
    collector = cfg.collector
    if collector.refill and not compares_groups(recipe, cfg):
        what = "this loss.advantage" if recipe.needs_groups else recipe.name
        yield f"collector.refill: {what} has no groups without a signal. Leave it out."
    if collector.max_draws != CollectorConfig().max_draws and not collector.refill:
        yield "collector.max_draws is for collector.refill=true."
    if collector.refill and getattr(cfg.train, "shuffle_rewards", False):
        yield "collector.refill chooses groups before train.shuffle_rewards: take one of them."


def _branch_faults(recipe: Recipe, cfg: RolloutsConfig) -> Iterator[str]:
    """Some rollouts of a group begin in the middle of others: collector.num_roots."""
    collector, loss = cfg.collector, getattr(cfg, "loss", None)
    num_roots, credit = collector.num_roots, getattr(loss, "credit", "episode")
    if num_roots is None:
        if collector.branch_at != CollectorConfig().branch_at:
            yield f"collector.branch_at={collector.branch_at} is for collector.num_roots: set it."
        if credit == "tree":
            yield "loss.credit=tree is for rollouts that branch: set collector.num_roots."
        return
    if num_roots >= collector.group_size:
        yield (
            f"collector.num_roots={num_roots} of collector.group_size={collector.group_size} "
            "leaves no rollout that branches: take fewer."
        )
    if recipe.name in ("expert_iteration", "online_dpo"):
        yield f"collector.num_roots: {recipe.name} trains whole rollouts. Leave it out."
    if getattr(loss, "length_penalty", 0.0):
        yield "collector.num_roots: loss.length_penalty goes by whole rollouts. Leave one out."
    if collector.mode == "streaming" and not collector.max_staleness:
        yield (
            "collector.num_roots: with collector.max_staleness=0 all rollouts of a step are drawn "
            "at once. Take collector.mode=sync, or allow some staleness."
        )


def _ray_faults(cfg: RolloutsConfig) -> Iterator[str]:
    """Each collector has a copy of the model, or starts servers of its own."""
    engine, count = cfg.engine, cfg.collector.num_collectors
    for name in ("url", "urls", "devices"):
        if getattr(engine, name):
            yield (
                f"engine.{name}: on Ray each collector starts servers of its own, on the GPUs that "
                "+collector.remote_config.num_gpus= gives it. Leave it out."
            )
    if engine.num_engines % count:
        yield (
            f"engine.num_engines={engine.num_engines} are shared out to collector.num_collectors="
            f"{count}: take a multiple of them of engines."
        )
    if "max_model_len" in engine.engine_kwargs:
        yield "engine.engine_kwargs.max_model_len: Ray bounds episodes by policy.max_model_len."
