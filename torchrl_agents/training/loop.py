"""What is around the steps of a recipe: tests before, between and after, records, checkpoints."""

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from tensordict import TensorDictBase

from torchrl_agents.recipe.collection import AnyCollector, HeldOut, end_collection
from torchrl_agents.recipe.plot import REWARD_CURVES, plot_learning_curve
from torchrl_agents.recipe.policies import set_generation
from torchrl_agents.recipe.report import NoSignal, RunLog
from torchrl_agents.recipe.results import (
    Recorder,
    record_rollouts,
    result_of,
    show_rollouts,
)
from torchrl_agents.recipe.stop import StopRequested, StopSignals
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.schema import RolloutsConfig
from torchrl_envs.tasks.task import Task, TaskEnv

from .saving import save_model
from .trainer import Step, Trainer

_LOG = logging.getLogger("torchrl_agents")


class Tests(NamedTuple):
    """What the policy is tested on."""

    task: Task
    held_out_env: TaskEnv
    collector: AnyCollector
    """Of the run; tests don't disturb it."""


def learn(
    recipe: Recipe,
    trainer: Trainer,
    tests: Tests,
    log: RunLog,
    stop: StopSignals,
    *,
    curves: Mapping[str, str] = REWARD_CURVES,
) -> dict[str, Any]:
    """Test, make the steps, test again, and leave the model; go on where a run was stopped.

    Args:
        recipe: whose loop it is.
        trainer: makes its steps.
        tests: before and after, and between.
        log: of the run.
        stop: a signal ends a batch that is collected, or the run after a pass.
        curves: what is drawn beside the reward: the label of each metric.

    Returns:
        The result.

    Raises:
        SettingsError: the run had all its steps, or its checkpoint can't be used.
    """
    start = time.monotonic()
    try:
        result = _learn(recipe, trainer, tests, log, stop, curves)
    finally:
        tests.collector.shutdown()
    seconds = round(time.monotonic() - start, 1)
    return result | {"seconds": seconds, "output_dir": str(trainer.run.folder)}


def _learn(
    recipe: Recipe,
    trainer: Trainer,
    tests: Tests,
    log: RunLog,
    stop: StopSignals,
    curves: Mapping[str, str],
) -> dict[str, Any]:
    """All of it, while the collector is open."""
    cfg, run, actor, keep = trainer.cfg, trainer.run, trainer.actor, trainer.checkpoints
    task, held_out_env, collector = tests
    num_steps = cfg.train.num_steps
    done, saved = keep.restore()
    if run.had_finished and done >= num_steps:
        raise SettingsError(f"resume: all {done} steps are made; give a larger train.num_steps.")
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
    step = None if pending is None else Step.from_state(pending, trainer.timer)
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
        try:
            while done < num_steps and not recorder.reached(cfg.train.stop_at):
                step = step or trainer.draw(done + 1, stop)
                record = trainer.train(step, stop)
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
        result = _leave(recipe, trainer, task, recorder, (before, after), curves)
    trainer.crew.end()
    return result


def _leave(
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
