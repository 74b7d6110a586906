"""What a run leaves behind: a curve, rollouts, and conversations to look at."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import matplotlib as mpl
import torch
from rich.console import Console
from rich.rule import Rule
from tensordict import TensorDictBase

from torchrl_data import read_conversations
from torchrl_data.display.terminal import show_conversation
from torchrl_data.keys import FULL

mpl.use("Agg")
from matplotlib import pyplot as plt


def metrics_of(trajectories: TensorDictBase, prefix: str = "") -> dict[str, float]:
    """Figures of a batch of trajectories.

    Args:
        trajectories: what the collector gives.
        prefix: of each name.

    Returns:
        Mean reward, each reward source's mean where it applies, turns, sampled tokens per rollout,
        and the fractions that were truncated or could not be scored.
    """
    masks = trajectories.get(("masks", "all_assistant_mask"), as_list=True)
    figures = {
        "reward": trajectories["reward"].mean().item(),
        "turns": trajectories["num_turns"].float().mean().item(),
        "sampled_tokens": sum(int(mask.sum()) for mask in masks) / len(masks),
        "truncated_fraction": trajectories["truncated"].float().mean().item(),
        "unscorable_fraction": 1 - trajectories["scorable"].float().mean().item(),
    }
    rewards = trajectories["rewards"]
    for name in rewards.keys():  # noqa: SIM118  a TensorDict
        figures[f"rewards/{name}"] = torch.nanmean(rewards[name]).item()
    return {prefix + name: value for name, value in figures.items()}


def write_rollouts(file: IO[str], step: int, trajectories: TensorDictBase) -> None:
    """Append trajectories to a JSONL file, one a line."""
    for row in trajectories.unbind(0):
        record: dict[str, Any] = {
            "step": step,
            "group_id": row["group_id"].item(),
            "policy_version": row["policy_version"].item(),
            "reward": row["reward"].item(),
            "stop_reason": row["stop_reason"],
            "messages": _conversation(row).messages(0),
        }
        if row["reward_errors"]:
            record["reward_errors"] = row["reward_errors"]
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def show_rollouts(console: Console, title: str, trajectories: TensorDictBase, count: int) -> None:
    """Print the first conversations in colour, with their rewards."""
    console.print(Rule(title))
    for row in trajectories[:count].unbind(0):
        show_conversation(_conversation(row), 0, reward=row["reward"].item(), console=console)


def _conversation(row: TensorDictBase) -> Any:
    return read_conversations(row, FULL, who="show_rollouts")


def plot_learning_curve(
    path: Path,
    rewards: Sequence[float],
    *,
    before: float,
    after: float,
    title: str,
    metrics: dict[str, Sequence[float]],
) -> None:
    """Draw the mean reward of each step's rollouts, and the test before and after.

    Args:
        path: of the PNG.
        rewards: one per step.
        before: mean reward on the held-out prompts before training.
        after: the same after it.
        title: above the plot.
        metrics: further curves by name.
    """
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    steps = range(1, len(rewards) + 1)
    axes.plot(steps, rewards, color="tab:blue", lw=1, alpha=0.35)
    axes.plot(steps, _smoothed(rewards), color="tab:blue", lw=2, label="training rollouts")
    for (name, values), color in zip(metrics.items(), ["tab:orange", "tab:purple"], strict=False):
        axes.plot(steps, _smoothed(values), color=color, lw=1.5, ls="--", label=name)
    ends = (0, len(rewards))
    axes.plot(ends, (before, after), "o", color="tab:green", ms=8, label="held-out prompts")
    for x, y, side in ((ends[0], before, "left"), (ends[1], after, "right")):
        axes.annotate(f"{y:.2f}", (x, y), xytext=(0, 10), textcoords="offset points", ha=side)
    axes.set(xlabel="GRPO step", ylabel="mean reward", ylim=(-0.03, 1.1), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _smoothed(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Exponential moving average without a bias at its start."""
    total, norm, smooth = 0.0, 0.0, []
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + 1 - weight
        smooth.append(total / norm)
    return smooth
