"""The learning curve of a run, as a picture; matplotlib is imported when it is drawn."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REWARD_CURVES = {
    "entropy": "entropy, nats per token",
    "groups/without_signal_fraction": "groups without a signal",
    "sampled_tokens": "sampled tokens of a rollout",
}


def plot_learning_curve(
    path: Path,
    history: Sequence[Mapping[str, float]],
    *,
    held_out: Mapping[int, float],
    title: str,
    further: Mapping[str, str],
    beside: Mapping[str, str] = REWARD_CURVES,
) -> None:
    """Draw the reward of each step, of the tests before, after and between, and what explains them.

    Args:
        path: of the PNG.
        history: the metrics of each step.
        held_out: mean reward on the held-out prompts, by the step after which it was measured.
        title: above the plot.
        further: more curves beside the reward: the metric of each, by what to call it.
        beside: metrics with small plots of their own, and what to call them.
    """
    import matplotlib as mpl
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    mpl.use("Agg")
    figure, axes = plt.subplot_mosaic(
        [["reward", name] for name in beside],
        figsize=(9.5, 4.8),
        width_ratios=(2.1, 1),
        layout="constrained",
    )
    figure.suptitle(title, fontsize=11)
    _draw_reward(axes["reward"], history, held_out, further)
    axes["reward"].xaxis.set_major_locator(MaxNLocator(integer=True))
    for name, label in beside.items():
        told = [(i, metrics[name]) for i, metrics in enumerate(history, 1) if name in metrics]
        values = [value for _, value in told]
        small = axes[name]
        small.plot([i for i, _ in told], values, color="tab:gray", lw=1.2)
        small.set_title(label, fontsize=9, loc="left")
        small.tick_params(labelsize=8)
        small.set_ylim(*_limits([*values, 0.0]))
        small.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        small.grid(alpha=0.3)
    for name in list(beside)[:-1]:
        axes[name].tick_params(labelbottom=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_reward(
    axes: Any,
    history: Sequence[Mapping[str, float]],
    held_out: Mapping[int, float],
    further: Mapping[str, str],
) -> None:
    rewards = [metrics["reward"] for metrics in history if "reward" in metrics]
    steps = range(1, len(rewards) + 1)
    if rewards:
        axes.plot(steps, rewards, color="tab:blue", lw=1, alpha=0.35)
        axes.plot(steps, smoothed(rewards), color="tab:blue", lw=2, label="training rollouts")
    points = sorted(held_out.items())
    shown = [*rewards, *held_out.values()]
    colors = ["tab:orange", "tab:purple", "tab:brown", "tab:pink"]
    for (label, name), color in zip(further.items(), colors, strict=False):
        told = [metrics.get(name, math.nan) for metrics in history if "reward" in metrics]
        values = smoothed(told)
        if any(math.isfinite(value) for value in told):
            axes.plot(steps, values, color=color, lw=1.5, ls="--", label=label)
            shown += values
    style = "o-" if len(points) > 2 else "o"
    axes.plot(*zip(*points, strict=True), style, color="tab:green", ms=7, label="held-out prompts")
    low, high = _limits(shown)
    for x, y in {points[0], points[-1]}:
        # Beside the first, where a line rises from it; above the last, or below at the top.
        at_end = (0, 9 if y < low + 0.85 * (high - low) else -16)
        axes.annotate(
            f"{y:.2f}",
            (x, y),
            xytext=(9, -4) if x == 0 else at_end,
            textcoords="offset points",
            ha="left" if x == 0 else "right",
        )
    axes.set(xlabel="step", ylabel="mean reward", ylim=(low, high))
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=9)


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """A range with all finite values in it, and some room around them."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    room = 0.08 * (high - low) or 0.5 * (abs(high) or 1.0)
    return low - room, high + room


def smoothed(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Exponential moving average without a bias at its start; NaN leaves it as it is."""
    total, norm, smooth = 0.0, 0.0, []
    for value in values:
        if value == value:
            total = weight * total + (1 - weight) * value
            norm = weight * norm + 1 - weight
        smooth.append(total / norm if norm else float("nan"))
    return smooth
