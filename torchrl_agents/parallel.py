"""Several processes train one model: what they share, what each does, and its checkpoints."""

import copy
import logging
import math
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from collectors import (
    CheckpointMismatch,
    CheckpointStore,
    CheckpointWarning,
    RunState,
    ShardedModel,
    ShardedOptimizer,
    contribute_weights,
)
from collectors.resume.sharded import Sharded
from collectors.streaming.background_collector import BackgroundCollector
from collectors.weight_update.plain_weights import unwrapped_module
from collectors.weight_update.sharded_weights import is_spread, pushed_weights
from objectives import MixedLossOutput, NonFiniteGate, PackedBatch, Ranks, StepOutcome
from torchrl_data.token_scorer import TokenScorer
from torchrl_modules import LLMWrapperBase, TransformersWrapper
from torchrl_modules.engines.transformers import TransformersEngine
from torchrl_modules.scoring.packed_attention import can_share

from . import models
from .device_defaults import DEFAULT_TOKENS
from .models import transformers_policy
from .run import CHECKPOINTS, SIGNALS, Failures, RankJob, RankJobs, Run
from .settings.schema import CheckpointConfig, Recipe, SettingsError, TrainingConfig

_LOG = logging.getLogger("torchrl_agents")

# Passes over the rows of a step, each of which ends in an optimizer step; all ranks make them.


@dataclass
class RankShare:
    """What a rank trains on in a step: its micro-batches of the rows.

    Args:
        parts: as many on every rank.
        window: counts of the tokens and rows of all of them, by which a loss is divided.
        model: adds the gradients of all ranks up.
        reduces_once: it does so after the last micro-batch alone, or else after each.
        ranks: of the run.
    """

    parts: Sequence[PackedBatch]
    window: Any
    model: nn.Module
    reduces_once: bool
    ranks: Ranks

    def micro_batches(self) -> Iterable[PackedBatch]:
        """Each of them, one after the other; forward and backward come before the next one."""
        return self.ranks.reduced_once(self.model, self.parts) if self.reduces_once else self.parts


def standard_pass(
    loss: Any, gate: NonFiniteGate, share: RankShare
) -> tuple[list[Any], StepOutcome]:
    """Make an optimizer step over the rows of a step, as every rank does with its share of them.

    Args:
        loss: of the recipe.
        gate: has the optimizer.
        share: of this rank.

    Returns:
        What the loss gave of each micro-batch, and what came of the optimizer step.
    """
    outputs = []
    for part in share.micro_batches():
        outputs.append(loss(part, window=share.window))
        gate.backward(outputs[-1], part)
    return outputs, gate.step()


class Updates:
    """The loss of a recipe, its optimizer, and what guards its steps; every rank has its own.

    Args:
        recipe: has the loss.
        cfg: of the run.
        actor: is trained, but for what is frozen of it.
        folder: of the run; gets what was not finite.
        jobs: of the ranks that train together.
    """

    def __init__(
        self,
        recipe: Recipe,
        cfg: TrainingConfig,
        actor: TransformersWrapper,
        folder: Path,
        jobs: RankJobs,
    ) -> None:
        assert recipe.loss is not None
        self.loss = recipe.loss(cfg, actor)
        self._cfg = cfg
        self._jobs = jobs
        trained = [parameter for parameter in actor.parameters() if parameter.requires_grad]
        self._optimizer = models.build_optimizer(cfg.optim, trained, actor.model)
        self.gate = NonFiniteGate(
            self._optimizer,
            max_grad_norm=cfg.optim.max_grad_norm,
            dump_dir=folder / "not_finite",
            ranks=jobs.ranks,
        )
        self._train_pass = recipe.train_pass or standard_pass
        self._share: RankShare | None = None
        self._most_tokens = cfg.train.micro_batch_tokens or DEFAULT_TOKENS  # rank 0 has settled it
        self._model = actor.model
        self._scorer = actor.scorer
        copies = parallel_kind(cfg, jobs.ranks) != "fsdp2"
        # Reduced once, the gradients of shards would be whole on every rank until then.
        self._reduces_once = copies if cfg.train.reduce == "auto" else cfg.train.reduce == "step"
        # Of adapters these alone are saved where the rest can be loaded again.
        is_given = models.is_adapted(actor.model) and cfg.policy.model is not None
        self.identity = (
            {"weights of policy.model": models.frozen_weights(actor.model)} if is_given else {}
        )
        """What a checkpoint has to have in common with this run."""
        self.sharded: dict[str, Sharded] = {
            "model": ShardedModel(actor.model, trained_only=is_given),
            "optimizer": ShardedOptimizer(actor.model, self._optimizer),
        }
        """What is saved, of which each rank has a share."""
        jobs.known |= {RankJob.TAKE_ROWS: self._take_rows, RankJob.TRAIN_PASS: self._make_pass}

    def begin(self, step: int, rows: Any) -> float:
        """Take in what a step trains on, and set its learning rate; rank 0 calls it.

        Args:
            step: its number, from 1.
            rows: what the loss can pack; ``None`` where there is nothing.

        Returns:
            The learning rate.
        """
        if rows is None:
            return self._set_rate(step)
        batch = self.loss.pack(rows)
        self._jobs.tell(RankJob.TAKE_ROWS, step)
        return self._take_rows(step, batch)

    def _set_rate(self, step: int) -> float:
        return models.set_learning_rate(
            self._cfg.optim, self._optimizer, step, self._cfg.train.num_steps
        )

    def _take_rows(self, step: int, batch: PackedBatch | None = None) -> float:
        """Every rank gets its share of the rows, as many micro-batches as the others."""
        ranks = self._jobs.ranks
        parts = ranks.scatter(
            batch, max_tokens=self._most_tokens, count_shared_once=self._shares(batch)
        )
        window = self.loss.measure_window(parts, ranks=ranks)
        self._share = RankShare(parts, window, self._model, self._reduces_once, ranks)
        return self._set_rate(step)

    def _shares(self, batch: PackedBatch | None) -> bool:
        """Whether the model reads once what the rows of a micro-batch begin with alike."""
        if batch is None or not len(batch.lengths):
            return False
        reads = self._scorer.packed and self._scorer.share_prefixes
        return reads and can_share(self._scorer.model, int(batch.lengths.max()))

    def _make_pass(self) -> tuple[Any, StepOutcome]:
        """Make a pass; of several losses in one, the output of the first, the policy's, is told."""
        assert self._share is not None
        outputs, outcome = self._train_pass(self.loss, self.gate, self._share)
        output = type(outputs[0]).combine(outputs, ranks=self._jobs.ranks)
        if isinstance(output, MixedLossOutput):
            output = next(iter(output.streams.values()))
        if self._cfg.engine.colocate:
            torch.cuda.empty_cache()  # the engine takes its memory back
        return output, outcome


# A run by the ranks that ``torchrun`` started: rank 0 runs the recipe, the others train with it.
#
# Rank 0 alone has the task, environments, folder and trackers. The others get the filled-in
# settings and the model, and do the jobs that rank 0 names.


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
    cfg: TrainingConfig, run: Run, actor: TransformersWrapper, policy: LLMWrapperBase
) -> tuple[TransformersWrapper, LLMWrapperBase]:
    """Let all ranks train the model that rank 0 has, which calls it.

    Args:
        cfg: the settings.
        run: has the ranks.
        actor: with the whole model.
        policy: samples with its weights.

    Returns:
        The actor over the wrapped model, and the policy: over a copy where the model is sharded.
        One process gets back what it gave.
    """
    ranks = run.jobs.ranks
    if ranks.size == 1:
        return actor, policy
    files = models.model_files(actor, weights=False) if cfg.policy.model is None else None
    # Config and tokenizer, where they were made here; else `policy.model` has them. The settings of
    # a task are of a class made here, and nobody else's business.
    ranks.broadcast((replace(cfg, task=None), files))
    model: Any = actor.model
    if policy is actor and parallel_kind(cfg, ranks) == "fsdp2":
        whole = copy.deepcopy(model)
        whole = whole.unload() if models.is_adapted(model) else whole  # it is given merged weights
        policy = transformers_policy(cfg, whole.to(ranks.device), actor.tokenizer)
    return _wrapped(cfg, ranks, model, actor.tokenizer), policy


def follow(ranks: Ranks, recipe: Recipe) -> None:
    """What a rank other than 0 does from beginning to end.

    Args:
        ranks: of the run.
        recipe: says what is trained.
    """
    received: list[int] = []

    def wait_for_rank_0(number: int, frame: FrameType | None) -> None:
        """Rank 0 says when to stop; a second signal ends this rank where it is."""
        del frame
        if received:
            raise SystemExit(128 + number)
        received.append(number)

    for number in SIGNALS:
        signal.signal(number, wait_for_rank_0)
    cfg, files = ranks.broadcast()
    given = cfg.policy.model
    with models.folder_of(files if given is None else models.model_folder(given)) as folder:
        # It has no weights before rank 0 gives them, part by part.
        settings = replace(cfg.policy, device="meta")
        model, tokenizer = models.load_model(
            settings, folder, load=partial(models.outline, check=False)
        )
    if cfg.policy.lora_rank is not None:
        model = models.with_adapters(cfg.policy, model)
    actor = _wrapped(cfg, ranks, model, tokenizer)
    jobs = RankJobs(ranks)
    jobs.known |= {
        RankJob.GIVE_WEIGHTS: lambda: contribute_weights(actor.model),
        RankJob.GIVE_ALL: lambda: _whole_state(actor.model),
    }
    with tempfile.TemporaryDirectory(prefix="torchrl-agents-") as folder:
        updates = Updates(recipe, cfg, actor, Path(folder), jobs)
        checkpoints = Checkpoints(cfg.checkpoint, jobs, RunState(identity={}, **updates.sharded))
        jobs.follow()
        checkpoints.close()


def whole_model(
    jobs: RankJobs, cfg: TrainingConfig, actor: TransformersWrapper
) -> tuple[TransformersWrapper, Mapping[str, Tensor] | None]:
    """The model without its wrappers and shards, to be saved; rank 0 calls it.

    Args:
        jobs: of the ranks.
        cfg: the settings.
        actor: over the wrapped model.

    Returns:
        The actor itself where nothing has to be done; where adapters are in shards, one over a
        whole copy on the CPU. And the weights of other shards, on the CPU; ``None`` where the
        actor's model has them.
    """
    model: Any = unwrapped_module(actor.model)
    if not models.is_adapted(model):
        if not is_spread(actor.model):
            return actor, None
        jobs.tell(RankJob.GIVE_WEIGHTS)
        with pushed_weights(actor.model) as weights:
            return actor, {name: value.cpu() for name, value in weights.items()}
    if is_spread(model):
        jobs.tell(RankJob.GIVE_ALL)
        state = _whole_state(model)
        plain = cast("TransformersEngine", actor.engine).inside
        skeleton: Any = type(plain)(plain.config)
        model = models.with_adapters(cfg.policy, skeleton.to(plain.dtype))
        model.load_state_dict(state)
    return transformers_policy(cfg, model, actor.tokenizer, generate=False), None


def _whole_state(model: nn.Module) -> dict[str, Any]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def _wrapped(
    cfg: TrainingConfig, ranks: Ranks, model: PreTrainedModel, tokenizer: Any
) -> TransformersWrapper:
    """The actor of a rank: over a model that is copied, or spread layer by layer, over all."""
    # Rank 0's weights reach the others here: of shards, a layer at a time.
    wrapped: nn.Module = model
    if parallel_kind(cfg, ranks) == "ddp":
        ranks.copy_from_first(model)
        wrapped = DistributedDataParallel(model, init_sync=False)
    else:
        copies = cfg.train.num_replicas
        sizes = {"replicate": copies} if copies > 1 else {}
        sizes["shard"] = ranks.size // copies
        kind, shape = ranks.device.type, tuple(sizes.values())
        mesh = init_device_mesh(kind, shape, mesh_dim_names=tuple(sizes))
        options: dict[str, Any] = {"mesh": mesh}
        if cfg.train.autocast:
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if cfg.train.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy()
        for part in (*layers_of(model), model):
            ranks.copy_from_first(part)
            fully_shard(part, **options)
    return transformers_policy(cfg, wrapped, tokenizer, generate=False)


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of a model, each of which is spread by itself.

    Args:
        model: says which of its blocks are not to be split.
    """
    blocks = (b for each in model.modules() if isinstance(each, nn.ModuleList) for b in each)
    return [b for b in blocks if type(b).__name__ in (model._no_split_modules or ())]


# The model from before training, which a KL term compares with.


def freeze_reference(
    cfg: TrainingConfig, run: Run, actor: TransformersWrapper, *, weight: float | None
) -> tuple[TokenScorer | None, dict[str, nn.Module]]:
    """Keep the model as it is now: a copy of it, or itself with its adapters off.

    Args:
        cfg: the settings.
        run: has the ranks; where they share shards one of them can score nothing with them.
        actor: with the whole model, before ranks share it.
        weight: of the KL term; nothing is kept without one.

    Returns:
        What scores rows by it, if anything does, and the parts that a checkpoint needs for that.
    """
    if not weight:
        return None, {}
    adapted = models.is_adapted(actor.model)
    if adapted and parallel_kind(cfg, run.jobs.ranks) != "fsdp2":
        return models.WithoutAdapters(actor), {}
    model: Any = copy.deepcopy(actor.model)
    reference = TransformersWrapper(
        (model.unload() if adapted else model).eval().requires_grad_(False),
        tokenizer=actor.tokenizer,
        generate_kwargs=actor.sampling,
        generate=False,
    )
    return reference, {"reference": reference.model}


# When a run is saved, and how it goes on.

_UNCHANGED_BY_COLLECTING = ("model", "optimizer", "opponents", "reference")


class Checkpoints:
    """Saves a run every so many steps and when it is stopped; every rank adds what it holds.

    Rank 0 opens, saves and restores, and the others do it with it.

    Args:
        cfg: how often a run is saved, and how many checkpoints are kept.
        jobs: of the ranks that save.
        state: the parts of the run; of another rank than 0, those of which it has a share.
    """

    def __init__(self, cfg: CheckpointConfig, jobs: RankJobs, state: RunState) -> None:
        self._cfg = cfg
        self._jobs = jobs
        self._state = state
        self._mark: dict[str, Any] | None = None
        self._store: CheckpointStore | None = None
        self.failures = Failures("checkpoint")
        """Saves that failed."""
        jobs.known[RankJob.OPEN_CHECKPOINTS] = self.open

    def open(self, folder: Path) -> Self:
        """Open the checkpoints in the folder of a run.

        Raises:
            SettingsError: ranks of other machines don't see it; on rank 0, for all of them.
        """
        ranks = self._jobs.ranks
        if ranks.rank == 0:
            self._jobs.tell(RankJob.OPEN_CHECKPOINTS, folder.resolve())
        seen = ranks.gather((folder.is_dir(), socket.gethostname()))
        blind = [f"{rank} on {host}" for rank, (there, host) in enumerate(seen) if not there]
        if blind and ranks.rank == 0:
            raise SettingsError(
                f"train.parallel: each rank writes its share of a checkpoint, and ranks {blind} "
                f"don't see {folder.resolve()}. Start in a folder on a disk that all share."
            )
        self._store = store = CheckpointStore(
            folder / CHECKPOINTS,
            self._cfg.keep_last,
            self._cfg.keep_best,
            on_error="raise" if self._cfg.on_error == "stop" else "warn",
            process_group=None if ranks.size == 1 else dist.group.WORLD,
        )
        self._jobs.known |= {
            RankJob.SAVE_CHECKPOINT: partial(self._state.save, store),
            RankJob.LOAD_CHECKPOINT: partial(self._state.restore, store),
        }
        return self

    def close(self) -> None:
        """Wait for the last save, and let another run save into the folder."""
        if self._store is not None:
            self._store.close()
            self.failures.note(self._store.last_error)

    def restore(self) -> tuple[int, Mapping[str, Any]]:
        """Go on from the newest checkpoint.

        Returns:
            The steps that were made, and what was kept beside the parts; 0 and nothing where there
            is no checkpoint.

        Raises:
            SettingsError: it belongs to another run.
        """
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                step = self._jobs.do(RankJob.LOAD_CHECKPOINT)
        except CheckpointMismatch as error:
            raise SettingsError(f"resume: {error}") from error
        except ValueError as error:  # of a part
            raise SettingsError(f"resume: the checkpoint can't be used here: {error}") from error
        for each in told:
            if issubclass(each.category, CheckpointWarning):  # of one that is damaged
                _LOG.warning("resume: %s", each.message)
            else:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        return step, self._state.further

    def mark(self) -> None:
        """A batch is about to be collected; if that is cut short the run is saved as it is now."""
        if not isinstance(self._state.parts.get("collector"), BackgroundCollector):
            self._mark = copy.deepcopy(self._state.state_dict(without=_UNCHANGED_BY_COLLECTING))

    def unmark(self) -> None:
        """The batch is there."""
        self._mark = None

    def after(self, step: int, metrics: Mapping[str, float], further: Mapping[str, Any]) -> None:
        """A step is over: save it if it is time; see :meth:`save`."""
        if self._cfg.every is not None and step % self._cfg.every == 0:
            self.save(step, metrics, further, wait=False)

    def save(
        self,
        step: int,
        metrics: Mapping[str, float],
        further: Mapping[str, Any],
        *,
        wait: bool = True,
    ) -> None:
        """Save now.

        Args:
            step: steps that are over.
            metrics: of the last one; the best are kept by its reward, or else its loss.
            further: what to keep beside the parts.
            wait: until it is on the disk.

        Raises:
            CheckpointError: with ``checkpoint.on_error=stop``, this save or the one before failed.
        """
        assert self._store is not None
        self._store.wait()
        self.failures.note(self._store.last_error)
        metric = metrics.get("reward", -metrics.get("loss", 0.0))
        metric = metric if math.isfinite(metric) else -sys.float_info.max
        about: Any = {"metric": metric, "wait": wait}
        self._jobs.tell(RankJob.SAVE_CHECKPOINT, step, **about)
        self._jobs.known[RankJob.SAVE_CHECKPOINT](step, **about, further=further, since=self._mark)
        self.failures.note(self._store.last_error)
