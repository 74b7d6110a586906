"""The learning curve of a run, as a picture; matplotlib is imported when it is drawn."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from collectors import Estimate
from collectors.record.terminal import axis_bounds

_ROOM: Final = 0.08
"""Above and below what is drawn."""
_MAIN: Final = "main"
REWARD_CURVES = {
    "entropy": "entropy, nats per token",
    "groups/without_signal_fraction": "groups without a signal",
    "sampled_tokens": "sampled tokens of a rollout",
}
CRITIC_CURVES = {
    "entropy": "entropy, nats per token",
    "critic/explained_variance": "variance that the critic explains",
    "sampled_tokens": "sampled tokens of a rollout",
}


def plot_learning_curve(
    path: Path,
    history: Sequence[Mapping[str, float]],
    *,
    held_out: Mapping[int, Estimate],
    title: str,
    further: Mapping[str, str],
    beside: Mapping[str, str] = REWARD_CURVES,
    score_name: str = "reward",
    labels: tuple[str, str] = ("training rollouts", "held-out prompts"),
) -> None:
    """Draw the score of each step, of the tests before, after and between, and what explains them.

    Args:
        path: of the PNG.
        history: the metrics of each step.
        held_out: mean score of what is held out, by the step after which it was measured; its
            interval is drawn, too.
        title: above the plot.
        further: more curves beside the score: the metric of each, by what to call it.
        beside: metrics with small plots of their own, and what to call them.
        score_name: by which a run is judged, such as the reward.
        labels: what to call it of a step, and of a test.
    """
    import matplotlib as mpl
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    mpl.use("Agg")
    mosaic: Any = [[_MAIN, name] for name in beside]
    figure, axes = plt.subplot_mosaic(
        mosaic, figsize=(9.5, 4.8), width_ratios=(2.1, 1), layout="constrained"
    )
    figure.suptitle(title, fontsize=11)
    curves = {labels[0]: score_name, **further}
    _draw_scores(axes[_MAIN], history, held_out, curves, tested=labels[1])
    axes[_MAIN].set(xlabel="step", ylabel=f"mean {score_name}")
    axes[_MAIN].xaxis.set_major_locator(MaxNLocator(integer=True))
    for name, label in beside.items():
        values = {i: metrics[name] for i, metrics in enumerate(history, 1) if name in metrics}
        small = axes[name]
        small.plot([*values], [*values.values()], color="tab:gray", lw=1.2)
        small.set_title(label, fontsize=9, loc="left")
        small.tick_params(labelsize=8)
        small.update_datalim([(1, 0.0)])  # which is always in the picture
        small.margins(y=_ROOM)
        small.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        small.grid(alpha=0.3)
    for name in list(beside)[:-1]:
        axes[name].tick_params(labelbottom=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_scores(
    axes: Any,
    history: Sequence[Mapping[str, float]],
    held_out: Mapping[int, Estimate],
    curves: Mapping[str, str],
    *,
    tested: str,
) -> None:
    """Draw the score of the first curve, further ones, and what came of tests."""
    from pandas import Series

    colors = ["tab:blue", "tab:orange", "tab:purple", "tab:brown", "tab:pink"]
    main = next(iter(curves.values()))
    for (label, name), color in zip(curves.items(), colors, strict=False):
        told = [metrics.get(name, math.nan) for metrics in history if main in metrics]
        values = Series(told, index=range(1, len(told) + 1), dtype=float)
        if name == main:
            axes.plot(values, color=color, lw=1, alpha=0.35)
        if values.notna().any():
            style = {"lw": 2} if name == main else {"lw": 1.5, "ls": "--"}
            # An average without a bias at its start; NaN leaves it as it is.
            smooth = values.ewm(alpha=0.2, ignore_na=True).mean()
            axes.plot(smooth, color=color, label=label, **style)
    points = sorted((step, each.value) for step, each in held_out.items()) or [(0, math.nan)]
    style = "o-" if len(points) > 2 else "o"
    axes.plot(*zip(*points, strict=True), style, color="tab:green", ms=7, label=tested)
    for step, each in held_out.items():
        axes.vlines(step, each.low, each.high, color="tab:green", lw=1, alpha=0.6)
    axes.margins(y=_ROOM)
    low, high = axis_bounds(axes.get_ylim())
    axes.set_ylim(low, high)
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
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=9)
