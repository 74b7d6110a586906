"""GRPO, top to bottom: a language model learns a task in an environment that scores it.

    python sota-implementations/grpo/grpo.py                          # the embedded model
    python sota-implementations/grpo/grpo.py task=number_guessing seed=1
    python sota-implementations/grpo/grpo.py policy.model=Qwen/Qwen3-0.6B task=gcd engine=vllm

The last line of the output is one JSON object with the result. Metrics (CSV, TensorBoard), the
learning curve, all rollouts and the trained model are in ``outputs/grpo/<task>/seed<seed>``.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

# Before torch is imported: its threads spin for a moment, then leave the cores to the tools.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import hydra
import torch
from config import GRPOConfig, check_config
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from policies import build_embedded_model, build_sampler
from report import metrics_of, plot_learning_curve, show_rollouts, write_rollouts
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose
from torchrl.record.loggers.csv import CSVLogger
from torchrl.record.loggers.tensorboard import TensorboardLogger
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar
from warm_start import warm_start

from collectors import LLMCollector
from objectives import GRPOLoss, GRPOLossOutput, MCAdvantage, NonFiniteGate
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    EnvironmentTools,
    EpisodeEnv,
    RewardFunctions,
    StepCounter,
)
from torchrl_envs.tasks.registry import make_task
from torchrl_envs.tasks.task import Task
from torchrl_modules import LLMWrapperBase, TransformersWrapper


def make_env(
    task: Task, *, held_out: bool, num_rollouts: int, group_size: int, show_schemas: bool, seed: int
) -> EpisodeEnv:
    """The environment of the task: data, tools and reward, metrics, a turn limit."""
    rows = task.held_out_rows if held_out else task.train_rows
    parts = [
        DataLoadingPrimer(rows, group_size=group_size, seed=seed),
        EnvironmentTools(task.environment, show_schemas=show_schemas),
        StepCounter(max_steps=task.max_turns),
    ]
    if task.metrics:
        parts.append(RewardFunctions(task.metrics, weights=[0.0] * len(task.metrics)))
    env = ChatEnv(batch_size=(num_rollouts,)).append_transform(Compose(*parts))
    env.check()
    return env


def evaluate(env: EpisodeEnv, policy: LLMWrapperBase) -> TensorDictBase:
    """One rollout of each held-out prompt, sampled as in training."""
    for data in env.transforms_of(DataLoadingPrimer):
        data.rewind()
    return LLMCollector(env, policy).collect()


@hydra.main(version_base="1.3", config_path="config", config_name="grpo")
def main(cfg: GRPOConfig) -> None:
    """Train as the settings say."""
    start = time.monotonic()
    check_config(cfg)
    disable_progress_bar()  # loading a model has bars of its own
    console = Console()
    out = Path(HydraConfig.get().runtime.output_dir)
    console.print(f"[bold]GRPO[/] on [bold]{cfg.task}[/], seed {cfg.seed}; results in {out}")
    embedded = cfg.policy.model is None

    # The task and its environments: whatever is wrong with them shows before a model is built.
    task = make_task(cfg.task, seed=cfg.seed, num_held_out=cfg.evaluate.num_prompts)
    schemas = cfg.policy.show_tool_schemas
    schemas = not embedded if schemas is None else schemas
    num_rollouts = cfg.train.num_prompts * cfg.train.group_size
    env = make_env(
        task,
        held_out=False,
        num_rollouts=num_rollouts,
        group_size=cfg.train.group_size,
        show_schemas=schemas,
        seed=cfg.seed,
    )
    held_out_env = make_env(
        task,
        held_out=True,
        num_rollouts=cfg.evaluate.num_prompts,
        group_size=1,
        show_schemas=schemas,
        seed=cfg.seed,
    )

    # The model that is trained, and the policy that samples with a copy of its weights.
    torch.manual_seed(cfg.seed)
    path = build_embedded_model(task, out / "model") if embedded else str(cfg.policy.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    max_new_tokens = cfg.policy.max_new_tokens or (task.max_new_tokens if embedded else 512)
    policy = build_sampler(cfg, path, max_new_tokens, tokenizer)
    actor = TransformersWrapper(
        path, tokenizer=tokenizer, chat_template_name=cfg.policy.chat_template_name
    )
    torch.manual_seed(cfg.seed)

    for folder in ("csv", "tensorboard"):  # of an earlier run with the same settings
        shutil.rmtree(out / folder, ignore_errors=True)
    loggers = [CSVLogger("csv", str(out)), TensorboardLogger("tensorboard", str(out))]
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}"),
        console=Console(stderr=True),
    )
    with progress:
        # Warm start: demonstrations teach the format.
        num_warm = cfg.warm_start.num_steps
        num_warm = (600 if embedded else 0) if num_warm is None else num_warm
        if num_warm:
            bar = progress.add_task("warm start", total=num_warm, figures="")
            warm_start(
                actor,
                task.demonstrations,
                num_steps=num_warm,
                batch_size=cfg.warm_start.batch_size,
                learning_rate=cfg.warm_start.learning_rate,
                on_step=lambda step, loss: progress.update(
                    bar, completed=step, figures=f"loss {loss:.3f}"
                ),
            )

        # GRPO: the collector fills the buffer with groups that have advantages; the loss reads it.
        buffer = ReplayBuffer(
            storage=LazyStackStorage(num_rollouts),
            transform=MCAdvantage(cfg.train.group_size, zero_variance="drop"),
            batch_size=num_rollouts,
        )
        collector = LLMCollector(
            env,
            policy,
            replay_buffer=buffer,
            postproc=_shuffle_rewards if cfg.train.shuffle_rewards else None,
        )
        loss_module = GRPOLoss(
            actor,
            clip_epsilon=(cfg.train.clip_low, cfg.train.clip_high),
            aggregation="token_mean",
            temperature=cfg.policy.temperature,
        )
        optimizer = torch.optim.AdamW(
            actor.parameters(), lr=cfg.train.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        gate = NonFiniteGate(
            optimizer, max_grad_norm=cfg.train.max_grad_norm, dump_dir=out / "not_finite"
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(
                1.0,
                (step + 1) / max(1, cfg.train.num_warmup_steps),
                2 * (1 - step / cfg.train.num_steps),
            ),
        )

        collector.update_policy_weights_(actor.model)
        before = evaluate(held_out_env, policy)
        history: list[dict[str, float]] = []
        bar = progress.add_task("GRPO", total=cfg.train.num_steps, figures="")
        with (out / "rollouts.jsonl").open("w", encoding="utf-8") as rollouts:
            for step in range(1, cfg.train.num_steps + 1):
                trajectories = collector.collect()
                figures = metrics_of(trajectories)
                num_epochs = cfg.train.num_epochs if len(buffer) else 0  # 0: no group has a signal
                if num_epochs:
                    batch = loss_module.pack(buffer[:])
                    window = loss_module.measure_window(batch)
                for _ in range(num_epochs):
                    outputs = []
                    for part in batch.micro_batches(max_tokens=cfg.train.micro_batch_tokens):
                        outputs.append(loss_module(part, window=window))
                        gate.backward(outputs[-1], part)
                    outcome = gate.step()
                    losses = GRPOLossOutput.combine(outputs)
                    figures |= {
                        "loss": losses.loss_objective.item(),
                        "clip_fraction": losses.clip_fraction.item(),
                        "kl_approx": losses.kl_approx.item(),
                        "grad_norm": outcome.grad_norm,
                        "steps_not_finite": float(gate.num_not_finite),
                        "rows_trained": float(batch.num_rows),
                    }
                schedule.step()
                buffer.empty()
                figures["policy_version"] = collector.update_policy_weights_(actor.model)

                history.append(figures)
                for logger in loggers:
                    logger.log_metrics(figures, step)
                write_rollouts(rollouts, step, trajectories)
                progress.update(bar, completed=step, figures=f"reward {figures['reward']:.2f}")
        after = evaluate(held_out_env, policy)

    # What came of it.
    actor.model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    result = {
        "task": cfg.task,
        "seed": cfg.seed,
        "held_out_before": before["reward"].mean().item(),
        "held_out_after": after["reward"].mean().item(),
        "steps": cfg.train.num_steps,
        "seconds": round(time.monotonic() - start, 1),
        **{k: v for k, v in metrics_of(before, "before/").items() if "rewards/" in k},
        **{k: v for k, v in metrics_of(after, "after/").items() if "rewards/" in k},
        "output_dir": str(out),
    }
    plot_learning_curve(
        out / "learning_curve.png",
        [figures["reward"] for figures in history],
        before=result["held_out_before"],
        after=result["held_out_after"],
        title=f"GRPO on {cfg.task}, seed {cfg.seed}",
        metrics={
            name.__name__.replace("_", " "): [f[f"rewards/{name.__name__}"] for f in history]
            for name in task.metrics
        },
    )
    show_rollouts(console, "before", before, cfg.evaluate.num_shown)
    show_rollouts(console, "after", after, cfg.evaluate.num_shown)
    collector.shutdown()
    held_out_env.close()
    (out / "config.yaml").write_text(OmegaConf.to_yaml(cfg), encoding="utf-8")
    sys.stdout.flush()
    print(json.dumps(result), flush=True)


def _shuffle_rewards(trajectories: TensorDictBase) -> TensorDictBase:
    """Deal the rewards out at random."""
    rows = trajectories.unbind(0)
    rewards = [row["reward"] for row in rows]
    for row, index in zip(rows, torch.randperm(len(rows)).tolist(), strict=True):
        row["reward"] = rewards[index]
    return trajectories


if __name__ == "__main__":
    main()
