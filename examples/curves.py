# /// script
# requires-python = ">=3.11"
# dependencies = ["matplotlib"]
# ///
"""The learning curves of several runs in one figure, and a table of them.

python examples/curves.py curves.png outputs/grpo/calculator/seed0 outputs/grpo/calculator/seed1

Lines are the rollouts of the steps, and their running mean where a run is long; points are the
held-out prompts, with their intervals. Runs that differ in their seeds share a plot, a control has
one of its own, and so has each task of a run with several.
"""

import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt

SMOOTHED_FROM = 40  # of fewer steps a running mean would lag far behind
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:red", "tab:brown")


def lines_of(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def rewards(folder, name):
    """Of the rollouts of each step; none of fine-tuning, nor of self-play: a seat always wins."""
    told = [line.get(name) for line in lines_of(folder, "metrics.jsonl")]
    is_told = "self_play" not in folder.parts and told.count(None) < len(told)
    return [math.nan if x is None else x for x in told] if is_told else []


def running_mean(values, weight=0.8):
    total, norm, smooth = 0.0, 0.0, []
    for value in values:
        if not math.isnan(value):
            total, norm = weight * total + (1 - weight) * value, weight * norm + 1 - weight
        smooth.append(total / norm if norm else math.nan)
    return smooth


def plots_of(folders):
    """Title of each plot: its runs, by folder and what they call their reward."""
    plots = defaultdict(list)
    for folder in folders:
        settings = json.loads((folder / "run.json").read_text())["settings"]
        is_control = any(x is True and "shuffle_" in name for name, x in settings.items())
        mode = settings.get("collector.mode", "sync")
        further = [mode] * (mode != "sync") + ["control"] * is_control
        names = {name for line in lines_of(folder, "evaluations.jsonl") for name in line}
        parts = sorted(x for x in names if x.endswith("/reward") and x.count("/") == 1)
        for name in parts or ["reward"]:
            task = name.removesuffix("reward").rstrip("/") or settings["task.id"]
            plots[", ".join([task, *further])].append((folder, name))
    return plots


def draw_run(axes, folder, name, colour):
    """Draw a run; gives its first and its last test."""
    history = rewards(folder, name)
    tests = [x for x in lines_of(folder, "evaluations.jsonl") if x.get(name) is not None]
    if not (points := sorted((test["step"], test[name]) for test in tests)):
        sys.exit(f"curves.py: {folder} has no test of a {name}, which recipes of rollouts make.")
    steps, is_short = range(1, len(history) + 1), len(history) < SMOOTHED_FROM
    axes.plot(steps, history, color=colour, lw=1, alpha=0.5 if is_short else 0.25)
    if not is_short:
        axes.plot(steps, running_mean(history), color=colour, lw=1.8)
    style = "o-" if len(points) > 2 and is_short else "o"
    axes.plot(*zip(*points, strict=True), style, color=colour, ms=4, lw=1.5)
    for test in tests:
        if (found := test.get("estimates", {}).get(name)) is not None:
            axes.vlines(test["step"], found["low"], found["high"], color=colour, lw=1)
    return points[0][1], points[-1][1]


if __name__ == "__main__":
    plots = plots_of(list(map(Path, sys.argv[2:]))) or sys.exit("curves.py PICTURE RUN [RUN ...]")
    wide = min(4, len(plots))
    high, options = -(-len(plots) // wide), {"squeeze": False, "sharey": True}
    size = (max(2.8, 5.6 / wide) * wide, 2.4 * high)
    plt.switch_backend("Agg")
    figure, grid = plt.subplots(high, wide, figsize=size, layout="constrained", **options)
    for axes in grid.flat[len(plots) :]:
        axes.set_axis_off()
    print("| task | runs | before | after |\n|---|---|---|---|")
    for axes, (title, runs) in zip(grid.flat, plots.items(), strict=False):
        ends = [draw_run(axes, *run, c) for run, c in zip(runs, COLOURS, strict=False)]
        before, after = (fmean(values) for values in zip(*ends, strict=True))
        axes.set_title(f"{title}: {before:.2f} to {after:.2f}", fontsize=9)
        axes.set_ylim(-0.04, 1.05)
        axes.grid(alpha=0.3)
        print(f"| {title} | {len(runs)} | {before:.2f} | {after:.2f} |")
    figure.supxlabel("step")
    figure.supylabel("mean reward")
    figure.savefig(sys.argv[1], dpi=130)
