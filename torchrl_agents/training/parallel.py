"""A run by the ranks that ``torchrun`` started: rank 0 runs the recipe, the others train with it.

Rank 0 alone has the task, environments, folder and trackers. The others get the filled-in settings
and the model, and do the jobs of the :class:`~torchrl_agents.training.crew.Crew`.
"""

import signal
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from collectors import contribute_weights
from collectors.weight_update.gathering import unwrapped
from collectors.weight_update.sharded import is_spread, pushed_weights
from objectives import Ranks
from torchrl_agents.engines.own_engines import folder_of, model_files, model_folder
from torchrl_agents.recipe.adapters import is_adapted, with_adapters
from torchrl_agents.recipe.policies import load_model, transformers_policy
from torchrl_agents.recipe.stop import SIGNALS
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.schema import TrainingConfig
from torchrl_modules import LLMWrapperBase, TransformersWrapper
from torchrl_modules.engines.transformers_engine import TransformersEngine

from .crew import Crew
from .shared_store import Shares

_WEIGHTS = "give weights"
_WHOLE = "give all that is trained and frozen"


class Plan(NamedTuple):
    """What rank 0 tells the others before they have the model."""

    cfg: Any
    """The settings, filled in."""
    files: dict[str, bytes] | None
    """The model and its tokenizer, where they were made here; else ``policy.model`` is loaded."""
    warmed: bool
    """The parameters are no longer those that are loaded."""


def parallel_kind(cfg: TrainingConfig, ranks: Ranks) -> str:
    """How the model is trained: ``none``, ``ddp`` or ``fsdp2``."""
    if ranks.size == 1:
        return "none"
    automatic = "fsdp2" if ranks.device.type == "cuda" else "ddp"
    return automatic if cfg.train.parallel == "auto" else cfg.train.parallel


def loading_device(cfg: TrainingConfig, ranks: Ranks) -> str | None:
    """Where a rank loads the model; a model that is sharded is never whole on a GPU of a rank."""
    if ranks.size == 1:
        return cfg.policy.device
    return "cpu" if parallel_kind(cfg, ranks) == "fsdp2" else str(ranks.device)


def share_model(
    cfg: TrainingConfig, ranks: Ranks, actor: TransformersWrapper, policy: LLMWrapperBase
) -> tuple[Crew, TransformersWrapper, LLMWrapperBase]:
    """Let all ranks train the model that rank 0 has, which calls it.

    Args:
        cfg: the settings.
        ranks: of the run.
        actor: with the whole model.
        policy: samples with its weights.

    Returns:
        The crew, the actor over the wrapped model, and the policy: over a copy where the model is
        sharded. One process gets back what it gave.
    """
    if ranks.size == 1:
        return Crew(ranks), actor, policy
    files = model_files(actor) if cfg.policy.model is None else None
    warm_start: Any = getattr(cfg, "warm_start", None)
    warmed = files is None and warm_start is not None and bool(warm_start.num_steps)
    # The settings of a task are of a class made here, and nobody else's business.
    ranks.broadcast(Plan(replace(cfg, task=None), files, warmed))
    model: Any = actor.model
    _copy_from_first(ranks, model, all_of_it=warmed)
    if policy is actor and parallel_kind(cfg, ranks) == "fsdp2":
        copy = deepcopy(model)
        copy = copy.unload() if is_adapted(model) else copy  # it is given merged weights
        policy = transformers_policy(cfg, copy.to(ranks.device), actor.tokenizer)
    return Crew(ranks), _wrapped(cfg, ranks, model, actor.tokenizer), policy


def follow(ranks: Ranks, recipe: Recipe) -> None:
    """What a rank other than 0 does from beginning to end.

    Args:
        ranks: of the run.
        recipe: says what is trained.
    """
    _wait_for_rank_0()
    crew = Crew(ranks)
    plan: Plan = ranks.broadcast()
    cfg = plan.cfg
    cfg.policy.device = loading_device(cfg, ranks)
    given = cfg.policy.model
    source = (plan.files or {}) if given is None else model_folder(given)
    with folder_of(source) as folder:
        model, tokenizer = load_model(cfg.policy, folder)
    if cfg.policy.lora_rank is not None:
        model = with_adapters(cfg.policy, model)
    _copy_from_first(ranks, model, all_of_it=plan.warmed)
    actor = _wrapped(cfg, ranks, model, tokenizer)
    assert recipe.updates is not None
    with tempfile.TemporaryDirectory(prefix="torchrl-agents-") as folder:
        updates = recipe.updates(cfg, actor, Path(folder), crew)
        shares = Shares(crew, updates.sharded)
        crew.learn_job(_WEIGHTS, lambda: contribute_weights(actor.model))
        crew.learn_job(_WHOLE, lambda: _whole_state(actor.model))
        crew.follow()
        shares.close()


def _copy_from_first(ranks: Ranks, model: nn.Module, *, all_of_it: bool) -> None:
    """What other ranks could not load: new adapters, or all weights."""
    if all_of_it:
        ranks.copy_from_first(model)
    elif is_adapted(model):
        trained = [value for value in model.parameters() if value.requires_grad]
        ranks.copy_from_first(nn.ParameterList(trained))


def _wait_for_rank_0() -> None:
    """Rank 0 says when to stop; a second signal ends this rank where it is."""
    told: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        del frame
        if told:
            raise SystemExit(128 + number)
        told.append(number)

    for number in SIGNALS:
        signal.signal(number, receive)


def tell_of_weights(crew: Crew) -> None:
    """Let the others give their shards of the weights, which rank 0 is about to read."""
    crew.tell(_WEIGHTS)


def whole_actor(crew: Crew, cfg: TrainingConfig, actor: TransformersWrapper) -> TransformersWrapper:
    """The actor over the model without its wrappers, to be saved; rank 0 calls it.

    Args:
        crew: the ranks.
        cfg: the settings.
        actor: over the wrapped model.

    Returns:
        The actor itself where nothing has to be done; where adapters are in shards, one over a
        whole copy on the CPU. The weights of other shards are :func:`whole_weights`.
    """
    model: Any = unwrapped(actor.model)
    if not is_adapted(model):
        return actor
    if is_spread(model):
        crew.tell(_WHOLE)
        weights = _whole_state(model)
        plain = cast("TransformersEngine", actor.engine).inside
        skeleton: Any = type(plain)(plain.config)
        skeleton = skeleton.to(plain.dtype)
        model = with_adapters(cfg.policy, skeleton)
        model.load_state_dict(weights)
    return transformers_policy(cfg, model, actor.tokenizer, generate=False)


def _whole_state(model: nn.Module) -> dict[str, Any]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def whole_weights(crew: Crew, model: nn.Module) -> Mapping[str, Tensor] | None:
    """The weights of a sharded model on the CPU; ``None`` of one that is whole. Rank 0 calls it."""
    if not is_spread(model):
        return None
    tell_of_weights(crew)
    with pushed_weights(model) as weights:
        return {name: value.cpu() for name, value in weights.items()}


def _wrapped(
    cfg: TrainingConfig, ranks: Ranks, model: PreTrainedModel, tokenizer: Any
) -> TransformersWrapper:
    wrapped: nn.Module = model
    if parallel_kind(cfg, ranks) == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        shard(model, ranks)
    return transformers_policy(cfg, wrapped, tokenizer, generate=False)


def shard(model: PreTrainedModel, ranks: Ranks) -> None:
    """Spread a model over the ranks, layer by layer, in place."""
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    layers = [
        block
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        for block in module
        if type(block).__name__ in (model._no_split_modules or ())
    ]
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)
