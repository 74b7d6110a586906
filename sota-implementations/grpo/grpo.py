"""GRPO, top to bottom: a language model learns a task in an environment that scores it.

    python sota-implementations/grpo/grpo.py                          # the embedded model
    python sota-implementations/grpo/grpo.py task=number_guessing seed=1
    python sota-implementations/grpo/grpo.py task=gsm8k policy.model=Qwen/Qwen3-0.6B engine=vllm
    python sota-implementations/grpo/grpo.py --help                   # every setting

The last line of the output is one JSON object with the result. Log, metrics, the learning curve,
all rollouts, checkpoints and the trained model are in a new folder
``outputs/grpo/<task>/<name>-<number>``, to which ``outputs/grpo/<task>/<name>`` then shows. A run
that was stopped goes on, as if it had not been, with ``resume=auto`` or ``resume=<folder>``.
"""

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# Before torch is imported: its threads spin for a moment, then leave the cores to the tools.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from config import GROUPS, GRPOConfig
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from training import (
    NoActor,
    build_advantage,
    build_loss,
    build_pools,
    build_postproc,
    build_reference,
    check_correction,
    policy_loss,
    policy_output,
)

from collectors import PhaseTimer, RunState, StepMetrics, identity_of
from objectives import GRPOLoss, MixedLoss, NonFiniteGate
from torchrl_agents.recipe.collection import (
    AnyCollector,
    HeldOut,
    build_collector,
    collection_metrics,
    end_collection,
    evaluate,
)
from torchrl_agents.recipe.optim import build_optimizer, set_learning_rate
from torchrl_agents.recipe.plot import plot_learning_curve
from torchrl_agents.recipe.policies import set_generation
from torchrl_agents.recipe.preparation import Setup, load_policies
from torchrl_agents.recipe.report import NoSignal, RunLog
from torchrl_agents.recipe.results import (
    EVALUATIONS,
    Recorder,
    StepRecord,
    record_rollouts,
    result_of,
    show_rollouts,
)
from torchrl_agents.recipe.run_folder import Run, save_model
from torchrl_agents.recipe.start import run_recipe
from torchrl_agents.recipe.stop import StopRequested, StopSignals
from torchrl_agents.recipe.trackers import build_loggers
from torchrl_agents.resume.checkpoints import Checkpoints
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.recipe import Recipe
from torchrl_envs import RewardFunctions
from torchrl_modules import LLMWrapperBase, TransformersWrapper

RECIPE = Recipe(
    name="grpo",
    summary="GRPO: a language model learns a task in an environment that scores it.",
    example="task=gsm8k task.dataset=rows.jsonl policy.model=Qwen/Qwen3-0.6B profile=gpu",
    script=Path(__file__),
    config=GRPOConfig,
    groups=GROUPS,
    parts=lambda cfg: {
        "loss": lambda: build_loss(
            cfg.loss, NoActor(), temperature=cfg.policy.temperature, max_tokens=1
        ),
        "loss.advantage": lambda: build_advantage(cfg.loss, cfg.collector.group_size),
        "loss.sampler_correction": lambda: check_correction(cfg),
        "train.drop_solved_at": lambda: build_pools(cfg),
    },
)

_LOG = logging.getLogger("torchrl_agents")


class Trainer(NamedTuple):
    """What trains."""

    actor: TransformersWrapper
    policy: LLMWrapperBase
    collector: AnyCollector
    buffer: ReplayBuffer
    loss: GRPOLoss | MixedLoss
    optimizer: torch.optim.Optimizer
    gate: NonFiniteGate
    timer: PhaseTimer
    checkpoints: Checkpoints


@dataclass
class Step:
    """A step of GRPO that is under way."""

    number: int
    trajectories: TensorDictBase
    trained: TensorDictBase | None
    """Those with an advantage; none where no group has a signal."""
    metrics: StepMetrics
    num_epochs: int = 0
    """Passes over them that were made."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on inside of it."""
        return vars(self) | {"metrics": self.metrics.state_dict()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], timer: PhaseTimer) -> "Step":
        """The step of which :meth:`state` was kept."""
        metrics = StepMetrics(timer)
        metrics.load_state_dict(state["metrics"])
        return cls(**{**state, "metrics": metrics})


def build_trainer(cfg: GRPOConfig, setup: Setup, run: Run, log: RunLog) -> Trainer:
    """The model, warmed up, and everything around it."""
    task, env, _ = setup

    actor, policy = load_policies(cfg, setup, log, warm=not run.goes_on)
    reference = build_reference(cfg, actor)

    # GRPO: the collector fills the buffer with groups that have advantages; the loss reads it.
    num_rollouts = env.batch_size.numel()
    advantage = build_advantage(cfg.loss, cfg.collector.group_size)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(num_rollouts), transform=advantage, batch_size=num_rollouts
    )
    for functions in env.transforms_of(RewardFunctions):
        functions.trainer_state.max_steps = cfg.train.num_steps
    collector = build_collector(
        cfg.collector,
        env,
        policy,
        replay_buffer=buffer,
        postproc=build_postproc(cfg, reference, build_pools(cfg, env)),
    )
    loss = build_loss(
        cfg.loss,
        actor,
        temperature=cfg.policy.temperature,
        max_tokens=(cfg.collector.max_turns or task.max_turns) * (cfg.policy.max_new_tokens or 1),
    )
    optimizer = build_optimizer(cfg.optim, actor.parameters())
    gate = NonFiniteGate(
        optimizer, max_grad_norm=cfg.optim.max_grad_norm, dump_dir=run.folder / "not_finite"
    )
    timer = PhaseTimer()
    timer.watch(policy, "generate")
    state = RunState(
        identity=identity_of(policy, actor.model),
        model=actor.model,
        optimizer=optimizer,
        gate=gate,
        advantage=advantage,
        collector=collector,
        **({} if reference is None else {"reference": reference.model}),
    )
    can_be_saved = cfg.collector.mode != "ray"
    checkpoints = Checkpoints(cfg.checkpoint, run.folder, state if can_be_saved else None)
    return Trainer(actor, policy, collector, buffer, loss, optimizer, gate, timer, checkpoints)


def collect_step(trainer: Trainer, number: int, stop: StopSignals) -> Step:
    """Sample the rollouts of a step."""
    metrics = StepMetrics(trainer.timer)
    trainer.checkpoints.mark()
    with stop.breaking(), trainer.timer("environment"):
        trajectories = metrics.add_rollouts(trainer.collector.collect())
    trainer.checkpoints.unmark()
    trained = trainer.buffer[:] if len(trainer.buffer) else None  # empty: no group has a signal
    trainer.buffer.empty()
    return Step(number, trajectories, trained, metrics)


def train_step(cfg: GRPOConfig, trainer: Trainer, step: Step, stop: StopSignals) -> StepRecord:
    """Train on a step's rollouts, hand the new weights to the policy."""
    actor, _, collector, _, loss, optimizer, gate, timer, _ = trainer
    rate = set_learning_rate(cfg.optim, optimizer, step.number, cfg.train.num_steps)
    num_epochs = cfg.train.num_epochs or 1
    if step.trained is not None:
        with timer("train"):
            batch = loss.pack(step.trained)
            window = loss.measure_window(batch)
            while step.num_epochs < num_epochs:
                outputs = []
                for part in batch.micro_batches(max_tokens=cfg.train.micro_batch_tokens):
                    outputs.append(loss(part, window=window))
                    gate.backward(outputs[-1], part)
                step.metrics.add_update(policy_output(outputs), gate.step())
                step.num_epochs += 1
                if step.num_epochs < num_epochs:
                    stop.check()  # a run that is stopped here goes on with the next pass
    with timer("sync"):
        collector.update_policy_weights_(actor.model)
    reduced = step.metrics.reduce(learning_rate=rate, **collection_metrics(collector))
    return StepRecord(step.number, reduced, step.trajectories, step.trained)


def train(cfg: GRPOConfig, setup: Setup, run: Run, log: RunLog, stop: StopSignals) -> dict:
    """Train as the settings say; gives the result."""
    start = time.monotonic()
    trainer = build_trainer(cfg, setup, run, log)
    collector, held_out_env, keep = trainer.collector, setup.held_out_env, trainer.checkpoints
    done, saved = keep.restore()
    if run.had_finished and done >= cfg.train.num_steps:
        raise SettingsError(f"resume: all {done} steps are made; give a larger train.num_steps.")
    if run.goes_on:
        _LOG.info("going on after step %d", done)
    collector.update_policy_weights_(trainer.actor.model)
    before, pending = saved.get("before"), saved.get("pending")
    if before is None:
        with log.phase("first evaluation"):
            before = evaluate(collector, held_out_env, trainer.policy)
    step = None if pending is None else Step.from_state(pending, trainer.timer)
    trainer.timer.reset()

    no_signal = NoSignal()
    evaluations = run.folder / EVALUATIONS
    held_out = HeldOut(
        collector, held_out_env, trainer.policy, every=cfg.evaluate.every, path=evaluations
    )
    if not done:
        held_out.after(0)
    loggers = build_loggers(cfg.logger, run.folder, RECIPE.name)
    trained = policy_loss(trainer.loss)
    rollouts = record_rollouts(
        cfg.record, run.folder, trainer.actor.tokenizer, trained, collector, after=done
    )
    with (
        stop.held(),  # a signal ends a batch that is collected, or the run after a pass
        keep,
        Recorder(run.folder, loggers, rollouts, after=done) as recorder,
        log.steps("GRPO", cfg.train.num_steps) as steps,
    ):
        history = recorder.history
        try:
            while done < cfg.train.num_steps:
                step = step or collect_step(trainer, done + 1, stop)
                record = train_step(cfg, trainer, step, stop)
                done, step = step.number, None
                history.append(record.metrics)
                recorder.write(record)
                steps.done(done, record.metrics)
                no_signal.tell(record.metrics, cfg.collector.num_prompts)
                with stop.breaking():
                    held_out.after(done)
                keep.after(done, record.metrics["reward"], {"before": before})
                stop.check()
        except StopRequested:
            _LOG.info("stopped after step %d; resume=%s goes on", done, run.folder)
        pending = None if step is None else step.state()
        reward = history[-1]["reward"] if history else 0.0
        keep.save(done, reward, {"before": before, "pending": pending})

        after = None
        with suppress(StopRequested), stop.breaking(), log.phase("last evaluation"):
            after = evaluate(collector, held_out_env, trainer.policy)
        end_collection(collector, run.folder, history[-1] if history else {})
        rollouts.close()
        if done:
            save_model(run.folder, set_generation(cfg.policy, trainer.actor))
            run.link()
        result = result_of(cfg, history, before, after)
        names = [function.__name__ for function in setup.task.metrics]
        plot_learning_curve(
            run.folder / "learning_curve.png",
            history,
            before=result["held_out_before"],
            after=result["held_out_after"],
            title=f"GRPO on {cfg.task.id}, seed {cfg.seed}",
            further={name.replace("_", " "): f"rewards/{name}/mean" for name in names},
        )
        show_rollouts({"before": before, "after": after}, cfg.evaluate.num_shown)
    seconds = round(time.monotonic() - start, 1)
    return result | {"seconds": seconds, "output_dir": str(run.folder)}


if __name__ == "__main__":
    run_recipe(RECIPE, train)
