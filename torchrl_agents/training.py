"""The loop of a recipe and its steps: rollouts, updates, tests, saving."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer

from collectors import (
    PhaseTimer,
    RunState,
    ShardedModel,
    ShardedOptimizer,
    StepMetrics,
    identity_of,
)
from collectors.llm_collector import BackgroundCollector
from collectors.resume import Sharded, Stateful
from collectors.weight_update.weights import merged_weights
from objectives import MixedLoss, NonFiniteGate, PackedBatch, Ranks, StepOutcome
from objectives.losses.base import TokenLoss
from torchrl_data.keys import ADVANTAGE
from torchrl_envs.tasks.task import Task, TaskEnv
from torchrl_modules import LLMWrapperBase, TransformersWrapper
from torchrl_modules.engines.transformers import TransformersEngine

from .models import (
    build_optimizer,
    frozen_weights,
    is_adapted,
    model_folder,
    set_generation,
    set_learning_rate,
)
from .parallel import Checkpoints, Crew, SharedStore, tell_of_weights, whole_actor, whole_weights
from .results import (
    REWARD_CURVES,
    Recorder,
    StepRecord,
    plot_learning_curve,
    record_rollouts,
    result_of,
    show_rollouts,
)
from .run import CHECKPOINTS, NoSignal, Run, RunLog, StopRequested, StopSignals, remove
from .settings.schema import PolicyConfig, Recipe, RolloutsConfig, SettingsError, TrainingConfig
from .tasks import AnyCollector, HeldOut, collection_metrics, end_collection

# Passes over the rows of a step, each of which ends in an optimizer step.


class MicroBatches(NamedTuple):
    """A rank's share of the rows of a step, and what is measured over all of them."""

    parts: list[PackedBatch]
    window: Any
    """Of the loss, see :meth:`TokenLoss.measure_window`."""
    ranks: Ranks


Pass = Callable[[Any, NonFiniteGate, MicroBatches], tuple[Any, StepOutcome]]
"""From a loss: its output over all rows, after an optimizer step on their gradient."""


def one_pass(loss: Any, gate: NonFiniteGate, batch: MicroBatches) -> tuple[Any, StepOutcome]:
    """See :data:`Pass`."""
    outputs = []
    for part in batch.parts:
        outputs.append(loss(part, window=batch.window))
        gate.backward(outputs[-1], part)
    return type(outputs[0]).combine(outputs, ranks=batch.ranks), gate.step()


class Updates:
    """A loss, the optimizer, and what guards its steps; every rank has one of its own.

    Args:
        cfg: of the run.
        actor: is trained, but for what is frozen of it.
        loss: of it.
        folder: of the run; gets what was not finite.
        crew: the ranks that train together.
        make_pass: over the rows, see :data:`Pass`.
    """

    def __init__(
        self,
        cfg: TrainingConfig,
        actor: TransformersWrapper,
        loss: TokenLoss | MixedLoss,
        folder: Path,
        crew: Crew,
        make_pass: Pass = one_pass,
    ) -> None:
        self._cfg = cfg
        self.crew = crew
        """The ranks that train."""
        self._ranks = crew.ranks
        self._make_pass = make_pass
        self.loss = loss
        trained = [parameter for parameter in actor.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(cfg.optim, trained)
        self.gate = NonFiniteGate(
            self.optimizer,
            max_grad_norm=cfg.optim.max_grad_norm,
            dump_dir=folder / "not_finite",
            ranks=crew.ranks,
        )
        self._batch: MicroBatches | None = None
        # Of adapters these alone are saved where the rest can be loaded again.
        is_given = is_adapted(actor.model) and cfg.policy.model is not None
        self.identity = {"weights of policy.model": frozen_weights(actor.model)} if is_given else {}
        """What a checkpoint has to have in common with this run."""
        self.parts: dict[str, Stateful | Sharded] = {
            "model": ShardedModel(actor.model, trained_only=is_given),
            "optimizer": ShardedOptimizer(actor.model, self.optimizer),
            "gate": self.gate,
        }
        """What is saved."""
        crew.learn_job("take in", self._take_in)
        crew.learn_job("make", self._make)

    @property
    def sharded(self) -> dict[str, Sharded]:
        """The parts of which each rank has a share."""
        return {name: part for name, part in self.parts.items() if isinstance(part, Sharded)}

    def begin(self, step: int, rows: Any) -> float:
        """Take in what a step trains on, and set its learning rate; rank 0 calls it.

        Args:
            step: its number, from 1.
            rows: what the loss can pack; ``None`` where there is nothing.

        Returns:
            The learning rate.
        """
        rate = self._set_rate(step)
        if rows is not None:
            batch = self.loss.pack(rows)
            self.crew.tell("take in", step)
            self._take_in(step, batch)
        return rate

    def make(self) -> tuple[Any, StepOutcome]:
        """One pass over the rows, and an optimizer step; rank 0 calls it."""
        return self.crew.do("make")

    def _set_rate(self, step: int) -> float:
        return set_learning_rate(self._cfg.optim, self.optimizer, step, self._cfg.train.num_steps)

    def _take_in(self, step: int, batch: PackedBatch | None = None) -> None:
        """Every rank gets its share of the rows, as many micro-batches as the others."""
        self._set_rate(step)
        parts = self._ranks.scatter(batch, max_tokens=self._cfg.train.micro_batch_tokens)
        window = self.loss.measure_window(parts, ranks=self._ranks)
        self._batch = MicroBatches(parts, window, self._ranks)

    def _make(self) -> tuple[Any, StepOutcome]:
        assert self._batch is not None
        return self._make_pass(self.loss, self.gate, self._batch)


# What a recipe trains, and how one of its steps is made: in parts, so that it can be stopped.


@dataclass
class Step:
    """A step that is under way: draw its rows, make its passes, push the weights.

    A signal ends it between two of these, or gives its batch up; what it has done by then is kept,
    and a resumed run goes on inside of it.
    """

    number: int
    """From 1."""
    trainer: "Trainer" = field(repr=False)
    stop: StopSignals = field(repr=False)
    metrics: StepMetrics
    trajectories: TensorDictBase | None = None
    """As collected; ``None`` where nothing was."""
    trained: TensorDictBase | None = None
    """What is trained of it; ``None`` where that is nothing."""
    num_epochs: int = 0
    """Passes over what is trained that were made."""
    is_drawn: bool = False
    learning_rate: float = math.nan

    def state(self) -> dict[str, Any] | None:
        """What a resumed run needs to go on inside of it; ``None`` before it is drawn."""
        names = ("number", "trajectories", "trained", "num_epochs")
        kept = {name: getattr(self, name) for name in names}
        return kept | {"metrics": self.metrics.state_dict()} if self.is_drawn else None

    @classmethod
    def from_state(cls, state: Mapping[str, Any], trainer: "Trainer", stop: StopSignals) -> "Step":
        """The step of which :meth:`state` was kept."""
        metrics = StepMetrics(trainer.timer)
        metrics.load_state_dict(state["metrics"])
        given = {**state, "metrics": metrics}
        return cls(trainer=trainer, stop=stop, is_drawn=True, **given)

    def draw(self) -> None:
        """Collect its rows, if it has none; a signal gives them up, and it begins anew later."""
        if self.is_drawn:
            return
        trainer, drawn = self.trainer, None
        trainer.checkpoints.mark()
        try:
            with self.stop.breaking(), trainer.timer("environment"):
                drawn = trainer.data.draw(self.metrics)
        except StopRequested:
            if drawn is None:
                raise
        trainer.checkpoints.unmark()
        self.trajectories, self.trained = drawn
        self.is_drawn = True

    def passes(self) -> Iterator[int]:
        """Its passes over the rows that are trained, by their number; none where there are none."""
        trainer = self.trainer
        with trainer.timer("train"):
            self.learning_rate = trainer.updates.begin(self.number, self.trained)
            while self.trained is not None and self.num_epochs < trainer.num_epochs:
                yield self.num_epochs
                self.num_epochs += 1
                if self.num_epochs < trainer.num_epochs:
                    self.stop.check()  # a run that is stopped here goes on with the next pass

    def update(self) -> None:
        """A pass on every rank: losses and gradients of all micro-batches, an optimizer step."""
        self.metrics.add_update(*self.trainer.updates.make())

    def push(self) -> None:
        """Hand the new weights to the policy."""
        with self.trainer.timer("sync"):
            self.trainer.push()

    def record(self) -> StepRecord:
        """What is written of it once it is over."""
        trainer, trained = self.trainer, self.trained
        more = {**trainer.measure(self), **trainer.data.metrics()}
        if trained is not None and trained[0].get(ADVANTAGE, None) is None:
            trained = None  # the record shows advantages, where there are some
        metrics = self.metrics.reduce(learning_rate=self.learning_rate, **more)
        return StepRecord(self.number, metrics, self.trajectories, trained)


class Data(Protocol):
    """Where the rows of a step come from."""

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """What is saved of it."""
        ...

    def draw(self, metrics: StepMetrics) -> tuple[TensorDictBase | None, TensorDictBase | None]:
        """Rows of the next step: all of them, and those that are trained."""
        ...

    def push(self, model: Any) -> None:
        """The model has new weights."""
        ...

    def metrics(self) -> dict[str, float]:
        """What the drawing was like."""
        ...


class Rollouts:
    """Rows that the policy samples; a buffer's transform says which of them are trained.

    Args:
        collector: fills the buffer.
        buffer: of the rows that are trained; emptied in each step.
    """

    def __init__(self, collector: AnyCollector, buffer: ReplayBuffer) -> None:
        self._collector = collector
        self._buffer = buffer

    @property
    def parts(self) -> dict[str, Stateful]:
        """The collector, whose data and counters go on."""
        return {"collector": self._collector}  # type: ignore[dict-item]

    def draw(self, metrics: StepMetrics) -> tuple[TensorDictBase, TensorDictBase | None]:
        """Collect; nothing is trained where no group has a signal."""
        try:
            trajectories = metrics.add_rollouts(self._collector.collect())
            trained = self._buffer[:] if len(self._buffer) else None
            self._buffer.empty()
        except StopRequested:
            if isinstance(self._collector, BackgroundCollector):
                self._collector.give_up_batch()
            raise
        return trajectories, trained

    def push(self, model: Any) -> None:
        """Hand the weights to the policy."""
        self._collector.update_policy_weights_(model)

    def metrics(self) -> dict[str, float]:
        """Of a collection beside training."""
        return collection_metrics(self._collector)


@dataclass(kw_only=True)
class Trainer:
    """What the steps of a run are made with, and what is saved of it."""

    cfg: TrainingConfig
    run: Run
    actor: TransformersWrapper
    """Is trained."""
    policy: LLMWrapperBase
    """Samples with its weights."""
    updates: Updates
    """Make the passes."""
    data: Data
    """Gives the rows."""
    num_epochs: int = 1
    """Passes over the rows of a step."""
    measure: Callable[[Step], Mapping[str, float]] = lambda _: {}
    """Further metrics, of a step that is over."""
    parts: Mapping[str, Stateful] = field(default_factory=dict)
    """What else is saved, by name."""

    def __post_init__(self) -> None:
        self.timer = PhaseTimer()
        self.timer.watch(self.policy, "generate")
        inside = cast("TransformersEngine", self.actor.engine).inside
        state = RunState(
            identity=identity_of(self.policy, inside) | self.updates.identity,
            **self.updates.parts,
            **self.parts,
            **self.data.parts,
        )
        cfg = self.cfg.checkpoint
        store = SharedStore(self.run.folder / CHECKPOINTS, cfg, self.crew)
        self.checkpoints = Checkpoints(cfg, store, state)

    @property
    def crew(self) -> Crew:
        """The ranks that train."""
        return self.updates.crew

    def push(self) -> None:
        """Hand the weights to the policy."""
        tell_of_weights(self.crew)
        self.data.push(self.actor.model)

    def whole_actor(self) -> TransformersWrapper:
        """The actor over a model that can be saved, see :func:`.parallel.whole_actor`."""
        return whole_actor(self.crew, self.cfg, self.actor)

    def whole_weights(self) -> Mapping[str, Tensor] | None:
        """The weights of a model that is spread over ranks; ``None`` of one that is not."""
        if is_adapted(self.actor.model):
            return None  # `whole_actor` has them
        return whole_weights(self.crew, self.actor.model)


# The trained model of a run, on the disk.


def save_model(
    folder: Path,
    cfg: PolicyConfig,
    policy: TransformersWrapper,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Leave ``model/``, whole or not at all: it loads in Transformers and serves in vLLM.

    Of a model with adapters that is the merged one. Beside it, ``adapter/`` has the adapters as
    PEFT and vLLM load them, and ``base/`` what they are of, where no ``policy.model`` has it.

    Args:
        folder: of the run.
        cfg: where the model is from.
        policy: its model is saved, and its tokenizer with the chat template that it was used with.
        weights: of a sharded model, whole.
    """
    model: Any = policy.model
    plain = cast("TransformersEngine", policy.engine).inside
    if not is_adapted(model):
        _leave(folder / "model", lambda path: _save(path, plain, policy, weights))
        return
    base = _base(folder, cfg)
    if cfg.model is None:
        with model.disable_adapter():
            frozen = merged_weights(model)
        _leave(Path(base), lambda path: _save(path, plain, policy, frozen))
    for config in model.peft_config.values():
        config.base_model_name_or_path = base
    _leave(folder / "adapter", model.save_pretrained)
    merged = merged_weights(model)
    _leave(folder / "model", lambda path: _save(path, plain, policy, merged))


def _base(folder: Path, cfg: PolicyConfig) -> str:
    """Where the model without adapters is."""
    if cfg.model is None:
        return str((folder / "base").resolve())
    source = model_folder(cfg.model)
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def _save(
    path: Path,
    model: Any,
    policy: TransformersWrapper,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    model.save_pretrained(path, state_dict=None if weights is None else dict(weights))
    tokenizer = policy.tokenizer
    own, tokenizer.chat_template = tokenizer.chat_template, policy.encoder.template
    tokenizer.save_pretrained(path)
    tokenizer.chat_template = own


def _leave(final: Path, save: Callable[[Path], Any]) -> None:
    """Put a folder in its place once it is whole, or leave nothing."""
    partial = final.with_name(f"{final.name}.partial")
    remove(partial)
    try:
        save(partial)
    except BaseException:
        remove(partial)
        raise
    remove(final)
    partial.rename(final)


# What is around the steps of a recipe: tests before, between and after, records, checkpoints.

_LOG = logging.getLogger("torchrl_agents")


class Tests(NamedTuple):
    """What the policy is tested on."""

    task: Task
    held_out_env: TaskEnv
    collector: AnyCollector
    """Of the run; tests don't disturb it."""


@contextmanager
def training(
    recipe: Recipe,
    trainer: Trainer,
    tests: Tests,
    log: RunLog,
    stop: StopSignals,
    *,
    curves: Mapping[str, str] = REWARD_CURVES,
) -> Iterator[tuple[Iterator[Step], dict[str, Any]]]:
    """Test, let the caller make the steps, test again, and leave the model.

    A run goes on where it was stopped. What is around a step is here: it is recorded, followed by
    a test and a checkpoint where it is time, and a signal ends the run with all that it has done.

    Args:
        recipe: whose loop it is.
        trainer: makes its steps.
        tests: before and after, and between.
        log: of the run.
        stop: a signal ends a batch that is collected, or the run after a pass.
        curves: what is drawn beside the reward: the label of each metric.

    Yields:
        The steps that are left, which end after ``train.num_steps``, ``train.stop_at`` or a signal;
        and the result, which is empty until the context is left.

    Raises:
        SettingsError: the run had all its steps, or its checkpoint can't be used.
    """
    cfg, run, actor, keep = trainer.cfg, trainer.run, trainer.actor, trainer.checkpoints
    task, held_out_env, collector = tests
    num_steps = cfg.train.num_steps
    start = time.monotonic()
    with ExitStack() as stack:
        stack.callback(collector.shutdown)
        done, saved = keep.restore()
        if run.had_finished and done >= num_steps:
            made = f"all {done} steps are made"
            raise SettingsError(f"resume: {made}; give a larger train.num_steps.")
        if run.goes_on:
            _LOG.info("going on after step %d", done)
        trainer.push()
        before, pending = saved.get("before"), saved.get("pending")
        held_out = HeldOut(
            collector, held_out_env, trainer.policy, every=cfg.evaluate.every, last=num_steps
        )
        is_new = before is None
        if before is None:
            with log.phase("first evaluation"):
                before = held_out.now(0)
        step = None if pending is None else Step.from_state(pending, trainer, stop)
        trainer.timer.reset()

        rollouts = None
        if isinstance(cfg, RolloutsConfig):
            loss = trainer.updates.loss
            rollouts = record_rollouts(
                cfg.record, run.folder, actor.tokenizer, loss, collector, after=done
            )
        no_signal = NoSignal()
        with (
            stop.held(),
            keep,
            Recorder(run.folder, run.loggers, rollouts, after=-1 if is_new else done) as recorder,
            log.steps(recipe.name, num_steps) as steps,
        ):
            history = recorder.history
            recorder.write_tests(held_out.take(), now=done)

            def left() -> Iterator[Step]:
                nonlocal done, step
                while done < num_steps and not recorder.reached(cfg.train.stop_at):
                    step = step or Step(done + 1, trainer, stop, StepMetrics(trainer.timer))
                    yield step
                    record = step.record()
                    done, step = step.number, None
                    history.append(record.metrics)
                    recorder.write(record)
                    steps.done(done, record.metrics)
                    if recipe.needs_groups:
                        no_signal.tell(record.metrics)
                    with stop.breaking():
                        held_out.after(done)
                    recorder.write_tests(held_out.take(), now=done)
                    keep.after(done, record.metrics, {"before": before})
                    stop.check()

            result: dict[str, Any] = {}
            try:
                yield left(), result
            except StopRequested:
                _LOG.info("stopped after step %d; resume=%s goes on", done, run.folder)
            last = history[-1] if history else {}
            pending = None if step is None else step.state()
            keep.save(done, last, {"before": before, "pending": pending})

            after = None
            with suppress(StopRequested), stop.breaking(), log.phase("last evaluation"):
                after = held_out.now(done)
            recorder.write_tests(held_out.take(), now=done)
            end_collection(collector, run.folder, last)
            if rollouts is not None:
                rollouts.close()
            result |= _leave_results(recipe, trainer, task, recorder, (before, after), curves)
        trainer.crew.end()
    result |= {"seconds": round(time.monotonic() - start, 1), "output_dir": str(run.folder)}


def learn(
    recipe: Recipe,
    trainer: Trainer,
    tests: Tests,
    log: RunLog,
    stop: StopSignals,
    *,
    curves: Mapping[str, str] = REWARD_CURVES,
) -> dict[str, Any]:
    """All steps of a run, each drawn, trained and pushed; see :func:`training`.

    Returns:
        The result.
    """
    with training(recipe, trainer, tests, log, stop, curves=curves) as (steps, result):
        for step in steps:
            step.draw()
            for _ in step.passes():
                step.update()
            step.push()
    return result


def _leave_results(
    recipe: Recipe,
    trainer: Trainer,
    task: Task,
    recorder: Recorder,
    tests: tuple[TensorDictBase, TensorDictBase | None],
    curves: Mapping[str, str],
) -> dict[str, Any]:
    """The model, the curve and the numbers of a run that is over."""
    cfg, run, history = trainer.cfg, trainer.run, recorder.history
    if history:
        actor = set_generation(cfg.policy, trainer.whole_actor())
        save_model(run.folder, cfg.policy, actor, trainer.whole_weights())
        run.link()
    result = result_of(cfg, history, *tests)
    names = [function.__name__ for function in task.metrics]
    further = {name.replace("_", " "): f"rewards/{name}/mean" for name in names}
    plot_learning_curve(
        run.folder / "learning_curve.png",
        history,
        held_out={0: result["held_out_before"], **recorder.held_out},
        title=f"{recipe.title} on {cfg.task.id}, seed {cfg.seed}",
        further=further | {name: f"{name}/reward" for name in task.parts},
        beside=curves,
    )
    show_rollouts(dict(zip(("before", "after"), tests, strict=True)), cfg.evaluate.num_shown)
    return result
