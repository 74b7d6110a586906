"""Several processes train one model: what they share, what each does, and its checkpoints."""

import copy
import math
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, Self, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from collectors import CheckpointMismatch, CheckpointStore, RunState, contribute_weights
from collectors.checkpoint.reading import Checkpoint
from collectors.llm_collector import BackgroundCollector
from collectors.resume import Sharded
from collectors.weight_update.weights import is_spread, pushed_weights, unwrapped
from objectives import Ranks
from torchrl_data.checks import TokenScorer
from torchrl_modules import LLMWrapperBase, TransformersWrapper
from torchrl_modules.engines.transformers import TransformersEngine

from .models import (
    WithoutAdapters,
    folder_of,
    is_adapted,
    load_model,
    model_files,
    model_folder,
    transformers_policy,
    with_adapters,
)
from .run import SIGNALS
from .settings.schema import CheckpointConfig, Recipe, SettingsError, TrainingConfig

# The ranks of a run: rank 0 runs the recipe, the others do with it what takes all of them.

Job = Callable[..., Any]


class Crew:
    """Jobs by name, each of which all ranks do at the same time, when rank 0 says so.

    Args:
        ranks: of the run.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._jobs: dict[str, Job] = {}

    def learn_job(self, name: str, job: Job) -> None:
        """Say what this rank does of a job.

        Args:
            name: of the job.
            job: is called with what rank 0 gives along.
        """
        self._jobs[name] = job

    def tell(self, name: str, *args: Any) -> None:
        """Let the other ranks do a job that this one, rank 0, is about to do.

        Args:
            name: of the job.
            *args: for theirs; can be pickled.
        """
        if self.ranks.size > 1:
            self.ranks.broadcast((name, args))

    def do(self, name: str, *args: Any) -> Any:
        """Do a job with the others; rank 0 calls it.

        Args:
            name: of the job.
            *args: for all.

        Returns:
            What this rank's job gave.
        """
        self.tell(name, *args)
        return self._jobs[name](*args)

    def follow(self) -> None:
        """Do what rank 0 says until it ends; the others call it."""
        while (order := self.ranks.broadcast()) is not None:
            name, args = order
            self._jobs[name](*args)

    def end(self) -> None:
        """Let the others end; rank 0 calls it."""
        if self.ranks.size > 1:
            self.ranks.broadcast(None)


# Checkpoints to which every rank of a run adds what it holds of the model and the optimizer.


class SharedStore(CheckpointStore):
    """The store of a run, on rank 0: what it does the other ranks do with it.

    Args:
        folder: of the checkpoints, in that of the run.
        cfg: how many are kept.
        crew: the ranks that save, each of which has a :class:`Shares`.

    Raises:
        SettingsError: ranks of other machines don't see the run's folder.
    """

    def __init__(self, folder: Path, cfg: CheckpointConfig, crew: Crew) -> None:
        self._crew = crew
        crew.tell("open checkpoints", str(folder.resolve()), cfg)
        _check_seen(folder, crew)
        super().__init__(folder, cfg.keep_last, cfg.keep_best, process_group=_group(crew))

    def save(self, step: int, state: Mapping[str, Any], **options: Any) -> Path | None:
        """See :meth:`CheckpointStore.save`."""
        about = {name: options[name] for name in ("metric", "wait")}
        self._crew.tell("save checkpoint", step, about)
        return super().save(step, state, **options)

    def load(self, step: int | str | Path | None = None) -> Checkpoint:
        """See :meth:`CheckpointStore.load`; the others load their shares then."""
        self._crew.tell("load checkpoint")
        return super().load(step)


class Shares:
    """What a rank other than 0 does of a run's checkpoints.

    Args:
        crew: of the run.
        parts: of which this rank has its share.
    """

    def __init__(self, crew: Crew, parts: Mapping[str, Sharded]) -> None:
        self._crew = crew
        self._state = RunState(identity={}, **parts)
        self._store: CheckpointStore
        crew.learn_job("open checkpoints", self._open)
        crew.learn_job("save checkpoint", self._save)
        crew.learn_job("load checkpoint", self._load)

    def _open(self, folder: str, cfg: CheckpointConfig) -> None:
        _check_seen(Path(folder), self._crew)
        self._store = CheckpointStore(
            folder, cfg.keep_last, cfg.keep_best, process_group=_group(self._crew)
        )

    def _save(self, step: int, about: Mapping[str, Any]) -> None:
        self._state.save(self._store, step, **about)

    def _load(self) -> None:
        self._state.restore(self._store)

    def close(self) -> None:
        """Wait for the last save."""
        self._store.close()


def _group(crew: Crew) -> Any:
    return None if crew.ranks.size == 1 else dist.group.WORLD


def _check_seen(folder: Path, crew: Crew) -> None:
    """Check that all ranks write to one and the same folder; they call it together.

    Raises:
        SettingsError: on rank 0, for all of them.
    """
    seen = crew.ranks.gather((folder.parent.is_dir(), socket.gethostname()))
    blind = [f"{rank} on {host}" for rank, (there, host) in enumerate(seen) if not there]
    if blind and crew.ranks.rank == 0:
        raise SettingsError(
            f"train.parallel: each rank writes its share of a checkpoint, and ranks {blind} don't "
            f"see {folder.parent.resolve()}. Start in a folder on a disk that all machines share."
        )


# A run by the ranks that ``torchrun`` started: rank 0 runs the recipe, the others train with it.
#
# Rank 0 alone has the task, environments, folder and trackers. The others get the filled-in
# settings and the model, and do the jobs of the :class:`Crew`.

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


# The model from before training, which a KL term compares with.


def freeze_reference(
    cfg: TrainingConfig, ranks: Ranks, actor: TransformersWrapper
) -> tuple[TokenScorer, dict[str, nn.Module]]:
    """Keep the model as it is now: a copy of it, or itself with its adapters off.

    Args:
        cfg: the settings.
        ranks: of the run; where they share shards one of them can score nothing with them.
        actor: with the whole model, before ranks share it.

    Returns:
        What scores rows by it, and the parts that a checkpoint needs for that.
    """
    adapted = is_adapted(actor.model)
    if adapted and parallel_kind(cfg, ranks) != "fsdp2":
        return WithoutAdapters(actor), {}
    model: Any = deepcopy(actor.model)
    reference = TransformersWrapper(
        (model.unload() if adapted else model).eval().requires_grad_(False),
        tokenizer=actor.tokenizer,
        generate_kwargs=actor.sampling,
        generate=False,
    )
    return reference, {"reference": reference.model}


# When a run is saved, and how it goes on.

UNCHANGED_BY_COLLECTING: Final = ("model", "optimizer", "opponents", "reference")


class Checkpoints:
    """Saves a run every so many steps and when it is stopped.

    Args:
        cfg: how often.
        store: of the run.
        state: its parts.
    """

    def __init__(self, cfg: CheckpointConfig, store: CheckpointStore, state: RunState) -> None:
        self._every = cfg.every
        self._state = state
        self._store = store
        self._mark: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def restore(self) -> tuple[int, Mapping[str, Any]]:
        """Go on from the newest checkpoint.

        Returns:
            The steps that were made, and what was kept beside the parts; 0 and nothing where there
            is no checkpoint.

        Raises:
            SettingsError: it belongs to another run.
        """
        try:
            step = self._state.restore(self._store)
        except CheckpointMismatch as error:
            raise SettingsError(f"resume: {error}") from error
        except ValueError as error:  # of a part
            raise SettingsError(f"resume: the checkpoint can't be used here: {error}") from error
        return step, self._state.further

    def mark(self) -> None:
        """A batch is about to be collected; if that is cut short the run is saved as it is now."""
        if not isinstance(self._state.parts.get("collector"), BackgroundCollector):
            self._mark = copy.deepcopy(self._state.state_dict(without=UNCHANGED_BY_COLLECTING))

    def unmark(self) -> None:
        """The batch is there."""
        self._mark = None

    def after(self, step: int, metrics: Mapping[str, float], further: Mapping[str, Any]) -> None:
        """A step is over: save it if it is time.

        Args:
            step: its number.
            metrics: its own; the best are kept by its reward, or else its loss.
            further: what to keep beside the parts.
        """
        if self._every is not None and step % self._every == 0:
            self._save(step, metrics, further, wait=False)

    def save(self, step: int, metrics: Mapping[str, float], further: Mapping[str, Any]) -> None:
        """Save now, and wait until it is on the disk.

        Args:
            step: steps that are over.
            metrics: of the last one.
            further: what to keep beside the parts.
        """
        self._save(step, metrics, further, wait=True)

    def _save(
        self, step: int, metrics: Mapping[str, float], further: Mapping[str, Any], *, wait: bool
    ) -> None:
        metric = metrics.get("reward", -metrics.get("loss", 0.0))
        metric = metric if math.isfinite(metric) else -sys.float_info.max
        self._state.save(
            self._store, step, metric=metric, wait=wait, further=further, since=self._mark
        )
