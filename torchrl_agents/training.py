"""The loop of a recipe and its steps: rollouts, updates, tests, saving.

The loop::

    first test -> [draw -> passes -> push -> record -> test -> checkpoint] -> last test -> model
                   a signal ends a draw, or the run after a pass: what is done is saved, and a
                   resumed run goes on inside of that step
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from tensordict import TensorDictBase

from collectors import (
    PhaseTimer,
    RayLLMCollector,
    RunState,
    StepMetrics,
    StreamingCollector,
    identity_of,
    rollout_metrics,
)
from collectors.collector import PostProcessing
from collectors.resume.run_state import Stateful
from collectors.streaming.background_collector import BackgroundCollector
from objectives import NonFiniteGate, Ranks, StepOutcome
from torchrl_modules import AgentPolicies, LLMWrapperBase, TransformersWrapper

from . import learning_curve
from .checkpoints import Checkpoints
from .collection import AnyCollector, HeldOutPrompts, end_collection
from .critic import Critic, mean_metrics
from .held_out import HeldOut
from .live_verification import live_verification
from .model_card import leave_card, push_to_hub
from .models.agents import pushed_models, scorer_of, trained_rows
from .models.policies import set_generation
from .models.reward_models import ChatRewardModel
from .optimizers import build_optimizer, set_learning_rate
from .parallel import (
    Follower,
    combined,
    identity_of_given,
    metrics_by_agent,
    saved_parts,
    take_share,
    whole_critic,
    whole_model,
)
from .rank_jobs import RankJob, tell
from .rank_share import RankShare
from .recorder import Recorder
from .reward_watch import RewardWatch
from .run import LastTestError, Run
from .run_log import has_signal, tell_of_no_signal
from .saved_model import leave, left_in, save_agents, save_model
from .settings.errors import SettingsError
from .settings.recipe import Recipe, compares_groups
from .settings.schema import EpochsTrainConfig, TrainingConfig
from .setup import Setup
from .stop_signals import StopRequested

_LOG = logging.getLogger("torchrl_agents")


@dataclass
class TrainingStep:
    """A step that is under way: draw its rows, make its passes, push the weights.

    A signal ends it between two of these, or gives its batch up; what it has done by then is kept,
    and a resumed run goes on inside of it.
    """

    number: int
    """From 1."""
    training: "Training" = field(repr=False)
    metrics: StepMetrics
    trajectories: TensorDictBase | None = None
    """As collected; ``None`` where nothing was."""
    trained: TensorDictBase | None = None
    """The rows of it that are trained; ``None`` where there are none."""
    num_epochs: int = 0
    """Passes over the trained rows that were made."""
    is_drawn: bool = False
    learning_rate: float = math.nan
    verified: Mapping[str, float] = field(default_factory=dict)
    """What came of computing its rows again, where some were."""
    critic_updates: list[Mapping[str, float]] = field(default_factory=list)
    """Metrics of the critic's optimizer steps."""
    agent_updates: list[Mapping[str, float]] = field(default_factory=list)
    """Metrics of each agent with weights of its own, of the optimizer steps."""
    share: RankShare | None = None
    """The rows of the passes, once they are taken."""

    def state(self) -> dict[str, Any] | None:
        """Give what a resumed run needs to go on inside of it; ``None`` before it is drawn."""
        names = ("number", "trajectories", "trained", "num_epochs", "critic_updates")
        names += ("agent_updates",)
        kept = {name: getattr(self, name) for name in names}
        return kept | {"metrics": self.metrics.state_dict()} if self.is_drawn else None

    @classmethod
    def from_state(cls, state: Mapping[str, Any], training: "Training") -> "TrainingStep":
        """Make the step of which :meth:`state` was kept."""
        metrics = training.new_metrics()
        metrics.load_state_dict(state["metrics"])
        return cls(training=training, is_drawn=True, **{**state, "metrics": metrics})

    def draw(self) -> None:
        """Collect its rows, if it has none; a signal gives them up, and it begins anew later."""
        if self.is_drawn:
            return
        training, drawn = self.training, None
        training.checkpoints.mark()
        try:
            with training.run.stop.breaking(), training.timer("environment"):
                drawn = training.data.draw(self.metrics)
        except StopRequested:
            if drawn is None:
                raise
        training.checkpoints.unmark()
        self.trajectories, self.trained = drawn
        if self.trained is not None:
            self.trained = trained_rows(training.actor, self.trained)
        if training.critic is not None and self.trained is not None:
            with training.timer("train"):
                training.critic.judge(self.trained)
        self.is_drawn = True
        collector = training.data.collector
        if training.verification is not None and self.trajectories is not None:
            assert collector is not None
            with training.timer("verify"):
                version = collector.policy_version
                self.verified = training.verification(self.number, self.trajectories, version)
        if training.cfg.engine.colocate:
            cast("Any", training.policy.engine).sleep()

    def passes(self) -> Iterator[RankShare]:
        """Make the passes over the trained rows that are left, if there are trained rows.

        Yields:
            This rank's share of the rows, the same in each pass.
        """
        training, ranks = self.training, self.training.ranks
        cfg, loss, optimizer = training.cfg, training.loss, training.gate.optimizer
        with training.timer("train"):
            rate = set_learning_rate(cfg.optim, optimizer, self.number, cfg.train.num_steps)
            self.learning_rate = rate
            if self.trained is None:
                return
            critic = training.critic
            also = {} if critic is None else {"also": [critic.loss]}
            batch = loss.pack(self.trained, **also)
            tell(ranks, RankJob.TAKE_ROWS, self.number)
            self.share = share = take_share(cfg, ranks, training.actor, loss, batch)
            while self.num_epochs < training.num_epochs:
                tell(ranks, RankJob.TRAIN_PASS)
                yield share
                self.num_epochs += 1
                if self.num_epochs < training.num_epochs:
                    training.run.stop.check()  # a run that stops here goes on with the next pass

    def note(self, outputs: Sequence[Any], outcome: StepOutcome) -> None:
        """Note how a pass went.

        Args:
            outputs: of the loss, one of each micro-batch.
            outcome: of the optimizer step.
        """
        training = self.training
        self.metrics.add_update(combined(training.cfg, training.ranks, outputs), outcome)
        if isinstance(training.actor, AgentPolicies):
            assert self.share is not None
            self.agent_updates.append(metrics_by_agent(training.cfg, self.share, outputs))

    def note_critic(self, metrics: Mapping[str, float]) -> None:
        """Note how an optimizer step of the critic went.

        Args:
            metrics: by :meth:`.Critic.update`.
        """
        self.critic_updates.append(metrics)

    def push(self) -> None:
        """Hand the new weights to the policy."""
        with self.training.timer("sync"):
            self.training.push()

    def reduced_metrics(self) -> dict[str, float]:
        """Give its metrics, once it is over."""
        training, collector = self.training, self.training.data.collector
        # Metrics of collection, where it goes on while the model trains.
        is_beside = isinstance(collector, StreamingCollector | RayLLMCollector)
        further = collector.metrics() if is_beside else {}
        further = {**training.measure(self), **self.verified, **further}
        further |= mean_metrics(self.critic_updates) | mean_metrics(self.agent_updates)
        return self.metrics.reduce(learning_rate=self.learning_rate, **further)


class Rollouts:
    """The rows of the steps, which the policy samples.

    Args:
        collector: fills its buffer, of which a transform says which rows are trained; it is emptied
            in each step. ``None`` for a subclass whose rows are given, where no policy is tested.
        before_training: what is done to the rows that are trained, and to no others.
    """

    def __init__(
        self, collector: AnyCollector | None, *, before_training: PostProcessing | None = None
    ) -> None:
        self._before_training = before_training
        self.collector = collector
        """It samples, in steps and in tests."""
        self.parts: Mapping[str, Stateful] = {"collector": collector}  # type: ignore[dict-item]
        """What is saved: the data and counters go on."""

    def draw(self, metrics: StepMetrics) -> tuple[TensorDictBase | None, TensorDictBase | None]:
        """Rows of the next step: all of them, and those that are trained, if any has a signal."""
        collector = self.collector
        assert collector is not None
        buffer = collector.replay_buffer
        assert buffer is not None
        try:
            trajectories = metrics.add_rollouts(collector.collect())
            trained = buffer[:] if len(buffer) else None
            buffer.empty()
            if trained is not None and self._before_training is not None:
                trained = self._before_training(trained)
        except StopRequested:
            if isinstance(collector, BackgroundCollector):
                collector.give_up_batch()
            raise
        return trajectories, trained

    def close(self) -> None:
        """End what collects, where something does."""
        if self.collector is not None:
            self.collector.shutdown()

    def end(self, folder: Path, last: dict[str, float]) -> None:
        """See :func:`.end_collection`."""
        if self.collector is not None:
            end_collection(self.collector, folder, last)


@dataclass
class Training:
    """The training of a run, as rank 0 makes it; other ranks have a :class:`.Follower`."""

    cfg: TrainingConfig
    run: Run
    setup: Setup
    """Has the task, and the environment of the tests."""
    actor: TransformersWrapper | ChatRewardModel | AgentPolicies
    """Is trained."""
    policy: LLMWrapperBase | ChatRewardModel
    """Samples with its weights; a reward model itself, which samples nothing."""
    data: Rollouts
    """Gives the rows."""
    _: KW_ONLY
    measure: Callable[[TrainingStep], Mapping[str, float]] = lambda _: {}
    """Further metrics, of a step that is over."""
    parts: Mapping[str, Stateful] = field(default_factory=dict)
    """What else is saved, by name."""
    critic: Critic | None = None
    """Gives the advantages of the rows, and learns beside the policy."""
    held_out: HeldOut | None = None
    """The tests; ``None``: the policy answers the held-out prompts of the task."""
    curves: Mapping[str, str] = field(default_factory=lambda: learning_curve.REWARD_CURVES)
    """What is drawn beside the reward: the label of each metric."""
    result: dict[str, Any] = field(default_factory=dict)
    """Of the run; empty until its steps are over."""
    loss: Any = field(init=False)
    gate: NonFiniteGate = field(init=False)
    checkpoints: Checkpoints = field(init=False)

    def __post_init__(self) -> None:
        train = self.cfg.train
        self.num_epochs = (train.num_epochs if isinstance(train, EpochsTrainConfig) else 1) or 1
        """Passes over the rows of a step."""
        self.timer = PhaseTimer()
        if isinstance(self.policy, LLMWrapperBase):
            self.timer.watch(self.policy, "generate")
        self.verification = live_verification(self.cfg, self.actor)
        """Computes rows again before they are trained; ``None`` where the settings ask for none."""
        self.recipe: Recipe = self.run.recipe
        self.ranks: Ranks = self.run.ranks
        self.folder = self.run.folder

    def new_metrics(self) -> StepMetrics:
        """Make the metrics of a step that begins."""
        test = self.cfg.evaluate
        return StepMetrics(self.timer, solved_at=test.solved_at, solved_by=test.solved_by)

    def push(self, *, is_first: bool = False) -> None:
        """Hand the weights to the policy, if one samples with them.

        Args:
            is_first: also those that stay, to an engine with weights of its own.
        """
        if (collector := self.data.collector) is not None:
            tell(self.ranks, RankJob.GIVE_WEIGHTS)
            is_first = is_first and self.policy is not self.actor
            collector.update_policy_weights_(pushed_models(self.actor, is_first=is_first))

    def _policy_tests(self) -> HeldOut:
        collector, policy = self.data.collector, self.policy
        assert collector is not None
        assert isinstance(policy, LLMWrapperBase)
        env, task = self.setup.held_out_env, self.setup.task
        return HeldOutPrompts(self.cfg, collector, env, policy, task)

    def _open_checkpoints(self, held_out: HeldOut) -> Checkpoints:
        critic = self.critic
        sharded = saved_parts(self.cfg, self.actor, self.gate.optimizer, critic)
        own = identity_of_given(self.cfg, self.ranks, self.actor)
        reader: Any = self.policy  # a reward model has a tokenizer and a template, too
        identity = identity_of(reader, scorer_of(self.actor).model) | own | held_out.identity()
        parts = {"gate": self.gate, **self.parts, **self.data.parts}
        if critic is not None:
            parts["critic_gate"] = critic.gate
        state = RunState(identity=identity, **sharded, **parts)
        return Checkpoints(self.cfg.checkpoint, self.ranks, state).open(self.folder)

    @contextmanager
    def steps(self, loss: Any, gate: NonFiniteGate) -> Iterator[Iterator[TrainingStep]]:
        """Test, let the caller make the steps, test again, and leave the model and the result.

        A run goes on where it was stopped. What is around a step is here: it is recorded, followed
        by a test and a checkpoint where it is time, and a signal ends the run with all that it has
        done: it ends a batch that is collected, or the run after a pass.

        Args:
            loss: packs the rows of a step, and counts their tokens.
            gate: has the optimizer.

        Yields:
            The steps that are left, which end after ``train.num_steps``, ``train.stop_at`` or a
            signal.

        Raises:
            SettingsError: the run had all its steps, or its checkpoint can't be used.
            LastTestError: the last test failed, after the model was left.
        """
        cfg, run = self.cfg, self.run
        start, num_steps = time.monotonic(), cfg.train.num_steps
        self.loss, self.gate = loss, gate
        with ExitStack() as stack:
            stack.callback(self.data.close)
            held_out = self.held_out or self._policy_tests()
            self.checkpoints = keep = self._open_checkpoints(held_out)
            done, saved = keep.restore()
            if run.had_finished and done >= num_steps:
                made = f"all {done} steps are made"
                raise SettingsError(f"resume: {made}; give a larger train.num_steps.")
            if run.goes_on:
                _LOG.info("going on after step %d", done)
            self.push(is_first=True)
            before, pending = saved.get("before"), saved.get("pending")
            # The last step of which something is written that counts.
            after_step = -1 if before is None else done
            if before is None:
                before = self._first_test(held_out)
            step = None if pending is None else TrainingStep.from_state(pending, self)
            self.timer.reset()

            parts = (held_out, self.data.collector, loss)
            stack.enter_context(run.stop.held())
            stack.enter_context(closing(keep))
            recorder = Recorder(cfg, run, *parts, after=after_step)
            stack.enter_context(closing(recorder))
            tell_step = run.log.steps(run.recipe.name, num_steps)
            watch = RewardWatch(cfg, self.folder)
            last, num_flat = next(reversed(recorder.history), {}), 0
            recorder.write_tests(held_out.take(), now=done)

            def left() -> Iterator[TrainingStep]:
                nonlocal done, last, num_flat, step
                reached = partial(recorder.reached, cfg.train.stop_at)
                while done < num_steps and not (watch.ends_run or reached()):
                    step = step or TrainingStep(done + 1, self, self.new_metrics())
                    yield step
                    last = step.reduced_metrics()
                    recorder.write(step.number, last, step.trajectories, step.trained)
                    done, step = step.number, None
                    tell_step(done, last)
                    if not has_signal(last, needs_groups=compares_groups(run.recipe, cfg)):
                        num_flat += 1
                        tell_of_no_signal(last, num_flat)
                    with run.stop.breaking():
                        held_out.after(done)
                    recorder.write_tests(held_out.take(), now=done)
                    watch.after(done)
                    keep.after(done, last, {"before": before})
                    run.stop.check()

            try:
                yield left()
            except StopRequested:
                _LOG.info("stopped after step %d; resume=%s goes on", done, run.folder)
            pending = None if step is None else step.state()
            keep.save(done, last, {"before": before, "pending": pending})

            after, failed = _last_test(held_out, run, done)
            recorder.write_tests(held_out.take(), now=done)
            self.data.end(run.folder, last)
            self.result |= _leave_results(self, recorder, held_out, before, after)
        run.failures |= {"checkpoint": keep.failures, **recorder.failures}
        tell(self.ranks, None)
        if failed is not None:
            raise LastTestError(
                f"the last test failed: {type(failed).__name__}: {failed}\nAll {done} steps are "
                f"made, and {left_in(run.folder, cfg)}. Mend what failed; "
                f"resume={run.folder} makes the test again."
            ) from failed
        seconds = round(time.monotonic() - start, 1)
        self.result |= {"seconds": seconds, "output_dir": str(run.folder)}

    def _first_test(self, held_out: HeldOut) -> TensorDictBase:
        """Test before the first step, and say so if nothing can be scored."""
        test, run = self.cfg.evaluate, self.run
        with run.log.phase("first evaluation"):
            before = held_out.now(0)
        if compares_groups(run.recipe, self.cfg):
            first = rollout_metrics(before, solved_at=test.solved_at, solved_by=test.solved_by)
            if first["reward/unscorable_fraction"] == 1:
                tell_of_no_signal(first, 0)
        return before


def learn(training: Training | Follower) -> dict[str, Any]:
    """Make all steps of a run, each drawn, trained and pushed; every rank does.

    Args:
        training: of this rank.

    Returns:
        The result of the run, on rank 0.
    """
    cfg, actor = training.cfg, training.actor
    assert training.recipe.loss is not None
    loss = training.recipe.loss(cfg, actor)
    trained = [p for p in actor.parameters() if p.requires_grad]
    gate = NonFiniteGate(
        build_optimizer(cfg.optim, trained, actor.model),
        max_grad_norm=cfg.optim.max_grad_norm,
        dump_dir=training.folder / "not_finite",
        ranks=training.ranks,
    )
    with training.steps(loss, gate) as steps:
        for step in steps:
            step.draw()
            for share in step.passes():
                outputs = []
                for part in share.micro_batches():
                    outputs.append(loss(part, window=share.window))
                    gate.backward(outputs[-1], part)
                step.note(outputs, gate.step())
            step.push()
    return training.result


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


def _leave_results(
    training: Training,
    recorder: Recorder,
    held_out: HeldOut,
    before: TensorDictBase,
    after: TensorDictBase | None,
) -> dict[str, Any]:
    """The model, the curve and the numbers of a run that is over."""
    cfg, run, task, history = training.cfg, training.run, training.setup.task, recorder.history
    if history:
        if isinstance(training.actor, AgentPolicies):
            save_agents(run.folder, cfg, training.actor)
        else:
            actor, weights = whole_model(run.ranks, cfg, training.actor)
            if isinstance(actor, TransformersWrapper):
                set_generation(cfg.policy, actor)
            save_model(run.folder, cfg, actor, weights)
        if (critic := training.critic) is not None:
            own = whole_critic(run.ranks, critic)
            leave(run.folder / "critic", lambda path: critic.save(path, own))
        run.link()
    tests = {"before": before, "after": after}
    told = {when: held_out.score(rows) for when, rows in tests.items() if rows is not None}
    scores = {f"{when}/{name}": x for when, (own, _) in told.items() for name, x in own.items()}
    result = {
        "task": cfg.task.id,
        "seed": cfg.seed,
        **{f"held_out_{when}": scores.pop(f"{when}/{held_out.score_name}", None) for when in tests},
        "steps": len(history),
        "optimizer_steps": int(sum(metrics["optimizer_steps"] for metrics in history)),
        **scores,
    }
    names = [function.__name__ for function in task.metrics]
    further = {name.replace("_", " "): f"rewards/{name}/mean" for name in names}
    learning_curve.plot_learning_curve(
        run.folder / "learning_curve.png",
        history,
        held_out=recorder.held_out,
        title=f"{run.recipe.summary.partition(':')[0]} on {cfg.task.id}, seed {cfg.seed}",
        further=further | {name: f"{name}/reward" for name in task.parts},
        beside=training.curves,
        score_name=held_out.score_name,
        labels=held_out.labels,
    )
    held_out.show(tests)
    if history:
        estimates = {when: each for when, (_, each) in told.items()}
        leave_card(cfg, run, len(history), estimates, held_out)
        if cfg.push_to_hub is not None:
            result["pushed_to"] = push_to_hub(cfg.push_to_hub, run.folder / "model")
    return result
