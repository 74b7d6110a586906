"""GRPO, top to bottom: a language model learns a task in an environment that scores it.

    python sota-implementations/grpo/grpo.py                          # the embedded model
    python sota-implementations/grpo/grpo.py task=number_guessing seed=1
    python sota-implementations/grpo/grpo.py task=gsm8k policy.model=Qwen/Qwen3-0.6B engine=vllm
    python sota-implementations/grpo/grpo.py --help                   # every setting

The last line of the output is one JSON object with the result. Log, metrics, the learning curve,
all rollouts and the trained model are in a new folder ``outputs/grpo/<task>/<name>-<number>``, to
which ``outputs/grpo/<task>/<name>`` then shows.
"""

import os
import time
from pathlib import Path
from typing import NamedTuple

# Before torch is imported: its threads spin for a moment, then leave the cores to the tools.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from config import GROUPS, GRPOConfig
from torchrl.data import LazyStackStorage, ReplayBuffer
from training import NoActor, build_advantage, build_loss, build_postproc

from collectors import PhaseTimer, StepMetrics
from objectives import GRPOLoss, GRPOLossOutput, NonFiniteGate
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
    Recorder,
    StepRecord,
    record_rollouts,
    result_of,
    show_rollouts,
)
from torchrl_agents.recipe.run_folder import Run, save_model
from torchrl_agents.recipe.start import run_recipe
from torchrl_agents.recipe.stop import StopSignals
from torchrl_agents.recipe.trackers import build_loggers
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
    },
)


class Trainer(NamedTuple):
    """What trains."""

    actor: TransformersWrapper
    policy: LLMWrapperBase
    collector: AnyCollector
    buffer: ReplayBuffer
    loss: GRPOLoss
    optimizer: torch.optim.Optimizer
    gate: NonFiniteGate
    timer: PhaseTimer


def build_trainer(cfg: GRPOConfig, setup: Setup, run: Run, log: RunLog) -> Trainer:
    """The model, warmed up, and everything around it."""
    task, env, _ = setup

    actor, policy = load_policies(cfg, setup, log)

    # GRPO: the collector fills the buffer with groups that have advantages; the loss reads it.
    num_rollouts = env.batch_size.numel()
    buffer = ReplayBuffer(
        storage=LazyStackStorage(num_rollouts),
        transform=build_advantage(cfg.loss, cfg.collector.group_size),
        batch_size=num_rollouts,
    )
    for functions in env.transforms_of(RewardFunctions):
        functions.trainer_state.max_steps = cfg.train.num_steps
    collector = build_collector(
        cfg.collector,
        env,
        policy,
        replay_buffer=buffer,
        postproc=build_postproc(cfg, actor),
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
    collector.update_policy_weights_(actor.model)
    return Trainer(actor, policy, collector, buffer, loss, optimizer, gate, timer)


def train_step(cfg: GRPOConfig, trainer: Trainer, step: int) -> StepRecord:
    """Sample rollouts, train on them, hand the new weights to the policy."""
    actor, _, collector, buffer, loss, optimizer, gate, timer = trainer
    metrics = StepMetrics(timer)
    rate = set_learning_rate(cfg.optim, optimizer, step, cfg.train.num_steps)
    with timer("environment"):
        trajectories = metrics.add_rollouts(collector.collect())
    trained = buffer[:] if len(buffer) else None  # empty: no group has a signal
    if trained is not None:
        with timer("train"):
            batch = loss.pack(trained)
            window = loss.measure_window(batch)
            for _ in range(cfg.train.num_epochs or 1):
                outputs = []
                for part in batch.micro_batches(max_tokens=cfg.train.micro_batch_tokens):
                    outputs.append(loss(part, window=window))
                    gate.backward(outputs[-1], part)
                metrics.add_update(GRPOLossOutput.combine(outputs), gate.step())
    with timer("sync"):
        collector.update_policy_weights_(actor.model)
    buffer.empty()
    reduced = metrics.reduce(learning_rate=rate, **collection_metrics(collector))
    return StepRecord(step, reduced, trajectories, trained)


def train(cfg: GRPOConfig, setup: Setup, run: Run, log: RunLog, stop: StopSignals) -> dict:
    """Train as the settings say; gives the result."""
    start = time.monotonic()
    trainer = build_trainer(cfg, setup, run, log)
    with log.phase("first evaluation"):
        before = evaluate(trainer.collector, setup.held_out_env, trainer.policy)
    trainer.timer.reset()

    history: list[dict[str, float]] = []
    no_signal = NoSignal()
    held_out = HeldOut(
        trainer.collector,
        setup.held_out_env,
        trainer.policy,
        every=cfg.evaluate.every,
        path=run.folder / "evaluations.jsonl",
    )
    held_out.after(0)
    loggers = build_loggers(cfg.logger, run.folder, RECIPE.name)
    rollouts = record_rollouts(
        cfg.record, run.folder, trainer.actor.tokenizer, trainer.loss, trainer.collector
    )
    with (
        Recorder(run.folder, loggers, rollouts) as recorder,
        log.steps("GRPO", cfg.train.num_steps) as steps,
    ):
        for step in range(1, cfg.train.num_steps + 1):
            with stop.held():  # a signal in here ends the run after the step
                record = train_step(cfg, trainer, step)
                history.append(record.metrics)
                recorder.write(record)
                steps.done(step, record.metrics)
                no_signal.tell(record.metrics, cfg.collector.num_prompts)
                held_out.after(step)
            if stop.received:
                break

    with stop.held():
        after = None
        if not stop.received:
            with log.phase("last evaluation"):
                after = evaluate(trainer.collector, setup.held_out_env, trainer.policy)
        end_collection(trainer.collector, run.folder, history[-1] if history else {})
        rollouts.close()
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
