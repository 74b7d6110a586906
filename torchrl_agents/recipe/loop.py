"""What is around the steps of a recipe: tests before, between and after, records, model, curve."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from collectors import LLMCollector, StreamingCollector
from objectives.losses.base import TokenLoss
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.schema import RolloutsConfig, TrainingConfig
from torchrl_envs.tasks.task import Task, TaskEnv
from torchrl_modules import LLMWrapperBase, TransformersWrapper

from .collection import HeldOut, end_collection, evaluate
from .plot import REWARD_CURVES, plot_learning_curve
from .policies import set_generation
from .report import NoSignal, RunLog
from .results import Recorder, StepRecord, record_rollouts, result_of, show_rollouts
from .run_folder import Run, save_model
from .stop import StopSignals
from .trackers import build_loggers


class Learner(NamedTuple):
    """What is tested and saved."""

    task: Task
    held_out_env: TaskEnv
    actor: TransformersWrapper
    """Is trained."""
    policy: LLMWrapperBase
    """Samples with its weights."""
    collector: LLMCollector | StreamingCollector
    loss: TokenLoss


def learn(
    recipe: Recipe,
    cfg: TrainingConfig,
    learner: Learner,
    step_of: Callable[[int], StepRecord],
    run: Run,
    log: RunLog,
    stop: StopSignals,
    *,
    curves: Mapping[str, str] = REWARD_CURVES,
) -> dict[str, Any]:
    """Test, make the steps, test again, and leave the model.

    Args:
        recipe: whose loop it is.
        cfg: its settings.
        learner: what is tested and saved.
        step_of: makes a step, from 1, and pushes the new weights to the policy.
        run: its folder.
        log: its log.
        stop: a signal ends the run after a step.
        curves: what is drawn beside the reward: the label of each metric.

    Returns:
        The result.
    """
    start = time.monotonic()
    task, held_out_env, actor, policy, collector, loss = learner
    with log.phase("first evaluation"):
        before = evaluate(collector, held_out_env, policy)
    history: list[dict[str, float]] = []
    no_signal = NoSignal()
    path = run.folder / "evaluations.jsonl"
    held_out = HeldOut(collector, held_out_env, policy, every=cfg.evaluate.every, path=path)
    held_out.after(0)
    loggers = build_loggers(cfg.logger, run.folder, recipe.name)
    rollouts = None
    if isinstance(cfg, RolloutsConfig):
        rollouts = record_rollouts(cfg.record, run.folder, actor.tokenizer, loss, collector)
    num_steps = cfg.train.num_steps
    with (
        Recorder(run.folder, loggers, rollouts) as recorder,
        log.steps(recipe.name, num_steps) as steps,
    ):
        for step in range(1, num_steps + 1):
            with stop.held():  # a signal in here ends the run after the step
                record = step_of(step)
                history.append(record.metrics)
                recorder.write(record)
                steps.done(step, record.metrics)
                if isinstance(cfg, RolloutsConfig) and recipe.needs_groups:
                    no_signal.tell(record.metrics, cfg.collector.num_prompts)
                held_out.after(step)
            if stop.received:
                break
    with stop.held():
        after = None
        if not stop.received:
            with log.phase("last evaluation"):
                after = evaluate(collector, held_out_env, policy)
        end_collection(collector, run.folder, history[-1] if history else {})
        if rollouts is not None:
            rollouts.close()
        save_model(run.folder, set_generation(cfg.policy, actor))
        run.link()
        result = result_of(cfg, history, before, after)
        names = [function.__name__ for function in task.metrics]
        plot_learning_curve(
            run.folder / "learning_curve.png",
            history,
            before=result["held_out_before"],
            after=result["held_out_after"],
            title=f"{recipe.name} on {cfg.task.id}, seed {cfg.seed}",
            further={
                name.replace("_", " "): f"rewards/{name}/mean"
                for name in names
                if isinstance(cfg, RolloutsConfig)
            },
            beside=curves,
        )
        show_rollouts({"before": before, "after": after}, cfg.evaluate.num_shown)
    seconds = round(time.monotonic() - start, 1)
    return result | {"seconds": seconds, "output_dir": str(run.folder)}
