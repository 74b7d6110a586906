"""GRPO, top to bottom: a language model learns a task in an environment that scores it.

    python sota-implementations/grpo/grpo.py                          # the embedded model
    python sota-implementations/grpo/grpo.py task=number_guessing seed=1
    python sota-implementations/grpo/grpo.py task=gsm8k policy.model=Qwen/Qwen3-0.6B engine=vllm
    python sota-implementations/grpo/grpo.py --help                   # every setting

The last line of the output is one JSON object with the result. Log, metrics, the learning curve,
all rollouts and the trained model are in a new folder ``outputs/grpo/<task>/<name>-<number>``, to
which ``outputs/grpo/<task>/<name>`` then shows.
"""

import json
import logging
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

# Before torch is imported: its threads spin for a moment, then leave the cores to the tools.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import hydra
import torch
from checks import check_config
from collection import (
    HeldOut,
    build_collector,
    collection_metrics,
    end_collection,
    evaluate,
)
from command_line import SettingsError, prepare, task_settings
from config import GRPOConfig, fill_in
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from plot import plot_learning_curve
from policies import build_policies, set_generation
from report import NoSignal, RunLog
from results import Recorder, StepRecord, finite, result_of, show_rollouts
from run_folder import Run, save_model
from stop import StopSignals
from torchrl.data import LazyStackStorage, ReplayBuffer
from training import (
    build_advantage,
    build_loggers,
    build_loss,
    build_optimizer,
    build_postproc,
    set_learning_rate,
)
from transformers.utils.logging import disable_progress_bar
from warm_start import warm_start

from collectors import LLMCollector, PhaseTimer, StepMetrics, StreamingCollector
from objectives import GRPOLoss, GRPOLossOutput, NonFiniteGate
from torchrl_envs import RewardFunctions, TokenBudget
from torchrl_envs.tasks.registry import make_task
from torchrl_envs.tasks.task import Task, TaskEnv
from torchrl_modules import LLMWrapperBase, TransformersWrapper

_LOG = logging.getLogger("grpo")


class Setup(NamedTuple):
    """What a run is made of before its model is loaded."""

    task: Task
    env: TaskEnv
    held_out_env: TaskEnv


class Trainer(NamedTuple):
    """What trains."""

    actor: TransformersWrapper
    policy: LLMWrapperBase
    collector: LLMCollector | StreamingCollector
    buffer: ReplayBuffer
    loss: GRPOLoss
    optimizer: torch.optim.Optimizer
    gate: NonFiniteGate
    timer: PhaseTimer


def build_task(cfg: GRPOConfig, settings: dict[str, Any]) -> Setup:
    """The task and its environments; whatever is wrong with them shows before a model is loaded.

    Raises:
        SettingsError: the task's settings or data can't be used.
    """
    try:
        task = make_task(
            cfg.task.id, seed=cfg.seed, num_held_out=cfg.evaluate.num_prompts, **settings
        )
        fill_in(
            cfg,
            max_new_tokens=task.max_new_tokens,
            has_demonstrations=bool(task.demonstrations),
        )
        if cfg.warm_start.num_steps and not task.demonstrations:
            raise ValueError("it has no demonstrations: set warm_start.num_steps=0")
        common: dict[str, Any] = {
            "shuffle": False,
            "seed": cfg.seed,
            "max_steps": cfg.collector.max_turns,
            "show_schemas": cfg.policy.show_tool_schemas,
        }
        group_size = cfg.collector.group_size
        num_rollouts = cfg.collector.num_prompts * group_size
        env = TaskEnv(task, num_envs=num_rollouts, repeats=group_size, **common)
        held_out_env = TaskEnv(task, held_out=True, num_envs=len(task.held_out_rows), **common)
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise SettingsError(f"task={cfg.task.id}: {error}") from error
    return Setup(task, env, held_out_env)


def build_trainer(cfg: GRPOConfig, setup: Setup, run: Run, log: RunLog) -> Trainer:
    """The model, warmed up, and everything around it."""
    task, env, held_out_env = setup

    # The model that is trained, and the policy that samples with its weights.
    with log.phase("loading the model"):
        actor, policy = build_policies(cfg, task)
        for each in (env, held_out_env):
            budget = TokenBudget(
                cfg.collector.max_episode_tokens,
                max_model_len=policy.engine.max_model_len,  # type: ignore[attr-defined]
                min_turn_tokens=cfg.collector.min_turn_tokens,
                encoder=policy.encoder,
            )
            each.append_transform(budget)
    torch.manual_seed(cfg.seed)

    # Warm start: demonstrations teach the format.
    num_warm = cfg.warm_start.num_steps or 0
    if num_warm:
        with log.phase("warm start"), log.steps("warm start", num_warm) as steps:
            warm_start(
                actor,
                task.demonstrations,
                num_steps=num_warm,
                batch_size=cfg.warm_start.batch_size,
                learning_rate=cfg.warm_start.learning_rate,
                on_step=lambda step, loss: steps.done(step, {"loss": loss}, quiet=step % 100 > 0),
            )

    # GRPO: the collector fills the buffer with groups that have advantages; the loss reads it.
    num_rollouts = env.batch_size.numel()
    buffer = ReplayBuffer(
        storage=LazyStackStorage(num_rollouts),
        transform=build_advantage(cfg.loss, cfg.collector.group_size),
        batch_size=num_rollouts,
    )
    collector = build_collector(
        cfg.collector,
        env,
        policy,
        replay_buffer=buffer,
        postproc=build_postproc(cfg, actor),
    )
    for functions in env.transforms_of(RewardFunctions):
        functions.trainer_state.max_steps = cfg.train.num_steps
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
    loggers = build_loggers(cfg, run.folder)
    with Recorder(run.folder, loggers) as recorder, log.steps("GRPO", cfg.train.num_steps) as steps:
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


def run_script(typed: DictConfig) -> None:
    """Check, train, tell."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    with ExitStack() as stack:
        stack.callback(_remove_if_empty, folder)
        settings = task_settings(typed)
        cfg = OmegaConf.to_object(typed)
        assert isinstance(cfg, GRPOConfig)
        check_config(cfg)
        disable_progress_bar()  # loading a model has bars of its own
        run = stack.enter_context(Run(folder, overwrite=cfg.overwrite))
        log = stack.enter_context(RunLog(folder / "grpo.log"))
        stop = stack.enter_context(StopSignals())
        _LOG.info("GRPO on %s, seed %d; results in %s", cfg.task.id, cfg.seed, folder)
        with log.phase("loading the data"):
            setup = build_task(cfg, settings)
        stack.callback(setup.env.close, raise_if_closed=False)
        stack.callback(setup.held_out_env.close, raise_if_closed=False)
        config = OmegaConf.to_yaml(OmegaConf.structured(cfg))
        (folder / "config.yaml").write_text(config, encoding="utf-8")
        if cfg.dry_run:
            run.set_status("checked")
            print(config)
            return
        result = train(cfg, setup, run, log, stop)
        run.set_status("interrupted" if stop.received else "finished")
        sys.stdout.flush()
        print(json.dumps(finite(result)), flush=True)
        if stop.received:
            raise SystemExit(stop.status)


def _remove_if_empty(folder: Path) -> None:
    if not any(folder.iterdir()):
        folder.rmdir()


@hydra.main(version_base="1.3", config_path="config", config_name="grpo")
def main(typed: DictConfig) -> None:
    """The script, with short errors for what is wrong with the settings."""
    try:
        run_script(typed)
    except SettingsError as error:
        raise SystemExit(f"grpo.py: {error}") from error


if __name__ == "__main__":
    try:
        help_text = prepare(sys.argv[1:])
    except SettingsError as wrong:
        raise SystemExit(f"grpo.py: {wrong}") from wrong
    if help_text is not None:
        print(help_text)
    else:
        main()
