"""The loop of a recipe and its steps: rollouts, updates, tests, saving."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, cast

from tensordict import TensorDictBase
from torch import Tensor

from collectors import LLMCollector, PhaseTimer, RunState, StepMetrics, identity_of, rollout_metrics
from collectors.resume.run_state import Stateful
from collectors.streaming.background_collector import BackgroundCollector
from collectors.weight_update.merged_adapters import merged_weights
from torchrl_envs import DataLoadingPrimer
from torchrl_modules import LLMWrapperBase, TransformersWrapper
from torchrl_modules.engines.transformers import TransformersEngine

from . import results
from .models import is_adapted, model_folder, set_generation
from .parallel import Checkpoints, Updates, whole_model
from .results import Recorder, push_to_hub
from .run import LastTestError, RankJob, Run, StopRequested, has_signal, remove, tell_of_no_signal
from .settings.schema import (
    EpochsTrainConfig,
    PolicyConfig,
    SettingsError,
    TrainingConfig,
    compares_groups,
)
from .tasks import AnyCollector, HeldOut, Setup, end_collection

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
    def from_state(cls, state: Mapping[str, Any], trainer: "Trainer") -> "Step":
        """The step of which :meth:`state` was kept."""
        metrics = trainer.new_metrics()
        metrics.load_state_dict(state["metrics"])
        return cls(trainer=trainer, is_drawn=True, **{**state, "metrics": metrics})

    def draw(self) -> None:
        """Collect its rows, if it has none; a signal gives them up, and it begins anew later."""
        if self.is_drawn:
            return
        trainer, drawn = self.trainer, None
        trainer.checkpoints.mark()
        try:
            with trainer.run.stop.breaking(), trainer.timer("environment"):
                drawn = trainer.data.draw(self.metrics)
        except StopRequested:
            if drawn is None:
                raise
        trainer.checkpoints.unmark()
        self.trajectories, self.trained = drawn
        self.is_drawn = True
        if trainer.cfg.engine.colocate:
            cast("Any", trainer.policy.engine).sleep()

    def passes(self) -> Iterator[int]:
        """Its passes over the rows that are trained, by their number; none where there are none."""
        trainer = self.trainer
        with trainer.timer("train"):
            self.learning_rate = trainer.updates.begin(self.number, self.trained)
            while self.trained is not None and self.num_epochs < trainer.num_epochs:
                yield self.num_epochs
                self.num_epochs += 1
                if self.num_epochs < trainer.num_epochs:
                    trainer.run.stop.check()  # what is stopped here goes on with the next pass

    def update(self) -> None:
        """A pass on every rank: losses and gradients of all micro-batches, an optimizer step."""
        self.metrics.add_update(*self.trainer.run.jobs.do(RankJob.TRAIN_PASS))

    def push(self) -> None:
        """Hand the new weights to the policy."""
        with self.trainer.timer("sync"):
            self.trainer.push()

    def told(self) -> dict[str, float]:
        """Its metrics, once it is over."""
        trainer, collector = self.trainer, self.trainer.data.collector
        # What collection was like, where it goes on beside training.
        beside = {} if isinstance(collector, LLMCollector) else collector.metrics()
        more = {**trainer.measure(self), **beside}
        return self.metrics.reduce(learning_rate=self.learning_rate, **more)


class Rollouts:
    """The rows of the steps, which the policy samples.

    Args:
        collector: fills its buffer, of which a transform says which rows are trained; it is emptied
            in each step.
    """

    def __init__(self, collector: AnyCollector) -> None:
        self.collector = collector
        """It samples, in steps and in tests."""
        self.parts: Mapping[str, Stateful] = {"collector": collector}  # type: ignore[dict-item]
        """What is saved: the data and counters go on."""

    def draw(self, metrics: StepMetrics) -> tuple[TensorDictBase | None, TensorDictBase | None]:
        """Rows of the next step: all of them, and those that are trained, if any has a signal."""
        buffer = self.collector.replay_buffer
        assert buffer is not None
        try:
            trajectories = metrics.add_rollouts(self.collector.collect())
            trained = buffer[:] if len(buffer) else None
            buffer.empty()
        except StopRequested:
            if isinstance(self.collector, BackgroundCollector):
                self.collector.give_up_batch()
            raise
        return trajectories, trained


@dataclass
class Trainer:
    """What the steps of a run are made with, and what is saved of it."""

    cfg: TrainingConfig
    run: Run
    setup: Setup
    """Has the task, and the environment of the tests."""
    actor: TransformersWrapper
    """Is trained."""
    policy: LLMWrapperBase
    """Samples with its weights."""
    data: Rollouts
    """Gives the rows."""
    _: KW_ONLY
    measure: Callable[[Step], Mapping[str, float]] = lambda _: {}
    """Further metrics, of a step that is over."""
    parts: Mapping[str, Stateful] = field(default_factory=dict)
    """What else is saved, by name."""
    curves: Mapping[str, str] = field(default_factory=lambda: results.REWARD_CURVES)
    """What is drawn beside the reward: the label of each metric."""

    def __post_init__(self) -> None:
        cfg, run = self.cfg, self.run
        own = cfg.train.num_epochs if isinstance(cfg.train, EpochsTrainConfig) else 1
        self.num_epochs = own or 1
        """Passes over the rows of a step."""
        self.timer = PhaseTimer()
        self.timer.watch(self.policy, "generate")
        self.updates = Updates(run.recipe, cfg, self.actor, run.folder, run.jobs)
        """Make the passes."""
        inside = cast("TransformersEngine", self.actor.engine).inside
        held_out = self.setup.held_out_env.transforms_of(DataLoadingPrimer)
        tested = {"held_out_rows": [data.content for data in held_out]}
        state = RunState(
            identity=identity_of(self.policy, inside) | self.updates.identity | tested,
            **self.updates.sharded,
            gate=self.updates.gate,
            **self.parts,
            **self.data.parts,
        )
        self.checkpoints = Checkpoints(cfg.checkpoint, run.jobs, state)
        self.checkpoints.open(run.folder)

    def new_metrics(self) -> StepMetrics:
        """The metrics of a step that begins."""
        test = self.cfg.evaluate
        return StepMetrics(self.timer, solved_at=test.solved_at, solved_by=test.solved_by)

    def push(self) -> None:
        """Hand the weights to the policy."""
        self.run.jobs.tell(RankJob.GIVE_WEIGHTS)
        self.data.collector.update_policy_weights_(self.actor.model)


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
    if cfg.model is None:
        base = str((folder / "base").resolve())
        with model.disable_adapter():
            frozen = merged_weights(model)
        _leave(Path(base), lambda path: _save(path, plain, policy, frozen))
    else:
        source = model_folder(cfg.model)
        base = str(Path(source).resolve()) if Path(source).is_dir() else source
    for config in model.peft_config.values():
        config.base_model_name_or_path = base
    _leave(folder / "adapter", model.save_pretrained)
    merged = merged_weights(model)
    _leave(folder / "model", lambda path: _save(path, plain, policy, merged))


def _save(
    path: Path, model: Any, policy: TransformersWrapper, weights: Mapping[str, Tensor] | None = None
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


def _last_test(
    held_out: HeldOut, run: Run, done: int
) -> tuple[TensorDictBase | None, Exception | None]:
    """The test after training, where no signal gives it up; or why it failed."""
    after = None
    try:
        with suppress(StopRequested), run.stop.breaking(), run.log.phase("last evaluation"):
            after = held_out.now(done)
    except Exception as error:  # the steps are made: what they trained is left before it is told
        return None, error
    return after, None


@contextmanager
def training(trainer: Trainer) -> Iterator[tuple[Iterator[Step], dict[str, Any]]]:
    """Test, let the caller make the steps, test again, and leave the model.

    A run goes on where it was stopped. What is around a step is here: it is recorded, followed by
    a test and a checkpoint where it is time, and a signal ends the run with all that it has done:
    it ends a batch that is collected, or the run after a pass.

    Args:
        trainer: makes its steps.

    Yields:
        The steps that are left, which end after ``train.num_steps``, ``train.stop_at`` or a signal;
        and the result, which is empty until the context is left.

    Raises:
        SettingsError: the run had all its steps, or its checkpoint can't be used.
        LastTestError: the last test failed, after the model was left.
    """
    cfg, run, keep = trainer.cfg, trainer.run, trainer.checkpoints
    stop, log, collector = run.stop, run.log, trainer.data.collector
    num_steps, needs_groups = cfg.train.num_steps, compares_groups(run.recipe, cfg)
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
        held_out = HeldOut(cfg, collector, trainer.setup.held_out_env, trainer.policy)
        # The last step of which something is written that counts.
        after_step = -1 if before is None else done
        if before is None:
            with log.phase("first evaluation"):
                before = held_out.now(0)
            test = cfg.evaluate
            first = rollout_metrics(before, solved_at=test.solved_at, solved_by=test.solved_by)
            if needs_groups and first["reward/unscorable_fraction"] == 1:
                tell_of_no_signal(first, 0)
        step = None if pending is None else Step.from_state(pending, trainer)
        trainer.timer.reset()

        parts = (trainer.setup.task, collector, trainer.updates.loss)
        with (
            stop.held(),
            closing(keep),
            closing(Recorder(cfg, run, *parts, after=after_step)) as recorder,
        ):
            tell = log.steps(run.recipe.name, num_steps)
            last, num_flat = next(reversed(recorder.history), {}), 0
            recorder.write_tests(held_out.take(), now=done)

            def left() -> Iterator[Step]:
                nonlocal done, last, num_flat, step
                while done < num_steps and not recorder.reached(cfg.train.stop_at):
                    step = step or Step(done + 1, trainer, trainer.new_metrics())
                    yield step
                    last = step.told()
                    recorder.write(step.number, last, step.trajectories, step.trained)
                    done, step = step.number, None
                    tell(done, last)
                    if not has_signal(last, needs_groups=needs_groups):
                        num_flat += 1
                        tell_of_no_signal(last, num_flat)
                    with stop.breaking():
                        held_out.after(done)
                    recorder.write_tests(held_out.take(), now=done)
                    keep.after(done, last, {"before": before})
                    stop.check()

            result: dict[str, Any] = {}
            try:
                yield left(), result
            except StopRequested:
                _LOG.info("stopped after step %d; resume=%s goes on", done, run.folder)
            pending = None if step is None else step.state()
            keep.save(done, last, {"before": before, "pending": pending})

            after, failed = _last_test(held_out, run, done)
            recorder.write_tests(held_out.take(), now=done)
            end_collection(collector, run.folder, last)
            result |= _leave_results(trainer, recorder, before, after)
        run.failures |= {"checkpoint": keep.failures, **recorder.failures}
        run.jobs.tell(None)
        if failed is not None:
            raise LastTestError(
                f"the last test failed: {type(failed).__name__}: {failed}\nAll {done} steps are "
                f"made, and the model is in {run.folder / 'model'}. Mend what failed; "
                f"resume={run.folder} makes the test again."
            ) from failed
    result |= {"seconds": round(time.monotonic() - start, 1), "output_dir": str(run.folder)}


def learn(trainer: Trainer) -> dict[str, Any]:
    """All steps of a run, each drawn, trained and pushed; gives the result of :func:`training`."""
    with training(trainer) as (steps, result):
        for step in steps:
            step.draw()
            for _ in step.passes():
                step.update()
            step.push()
    return result


def _leave_results(
    trainer: Trainer, recorder: Recorder, before: TensorDictBase, after: TensorDictBase | None
) -> dict[str, Any]:
    """The model, the curve and the numbers of a run that is over."""
    cfg, run, task, history = trainer.cfg, trainer.run, trainer.setup.task, recorder.history
    if history:
        actor, weights = whole_model(run.jobs, cfg, trainer.actor)
        save_model(run.folder, cfg.policy, set_generation(cfg.policy, actor), weights)
        run.link()
    tests = {"before": before, "after": after}
    told = {when: recorder.score(rows) for when, rows in tests.items() if rows is not None}
    scores = {f"{when}/{name}": x for when, (own, _) in told.items() for name, x in own.items()}
    result = {
        "task": cfg.task.id,
        "seed": cfg.seed,
        **{f"held_out_{when}": scores.pop(f"{when}/reward", None) for when in tests},
        "steps": len(history),
        "optimizer_steps": int(sum(metrics["optimizer_steps"] for metrics in history)),
        **scores,
    }
    names = [function.__name__ for function in task.metrics]
    further = {name.replace("_", " "): f"rewards/{name}/mean" for name in names}
    results.plot_learning_curve(
        run.folder / "learning_curve.png",
        history,
        held_out=recorder.held_out,
        title=f"{run.recipe.summary.partition(':')[0]} on {cfg.task.id}, seed {cfg.seed}",
        further=further | {name: f"{name}/reward" for name in task.parts},
        beside=trainer.curves,
    )
    results.show_rollouts(tests, cfg.evaluate.num_shown)
    if history:
        estimates = {when: each for when, (_, each) in told.items()}
        results.leave_card(cfg, run, len(history), estimates)
        if cfg.push_to_hub is not None:
            result["pushed_to"] = push_to_hub(cfg.push_to_hub, run.folder / "model")
    return result
