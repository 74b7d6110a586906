"""The learning curves of several runs in one figure, and a table of them.

    for t in spell_backward word_sorting; do grpo.py task=$t | tail -n 1; done > results.jsonl
    python sota-implementations/grpo/curves.py results.jsonl curves.png

A line of the file is the last line of a run's output, of any recipe. Lines are the rollouts of the
steps, points the held-out prompts, with a line through them where a run is short or has no
rollouts: fine-tuning samples nothing, and in self-play one seat of each game wins, whatever is
learnt. Runs that differ in their seeds share a plot; of a run with several tasks each has one.
"""

import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from torchrl_agents.results import smoothed

NUM_COLUMNS = 4
SMOOTHED_FROM = 40
"""Of fewer steps a mean over the last ones would lag far behind."""
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:red", "tab:brown")


def rewards(folder: Path, name: str) -> list[float]:
    """Mean reward of the rollouts of each step; nothing where it says nothing."""
    if folder.parts[-3] == "self_play":
        return []
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    told = [line.get(name) for line in lines]
    return [math.nan if x is None else x for x in told] if told.count(None) < len(told) else []


def tests(folder: Path, name: str) -> list[tuple[int, float]]:
    """Steps, and mean reward on the held-out prompts after each."""
    lines = (folder / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    points = [(line["step"], line.get(name)) for line in map(json.loads, lines)]
    return sorted((step, value) for step, value in points if value is not None)


def parts_of(result: dict[str, Any]) -> list[str]:
    """The tasks of a run that has several, each with what its metrics begin with."""
    ends = [name.split("/") for name in result if name.startswith("before/")]
    return [f"{end[1]}/" for end in ends if len(end) == 3 and end[2] == "reward"] or [""]


def title_of(result: dict[str, Any], part: str) -> str:
    """The task, and in what the run is another one than by default."""
    settings = json.loads((Path(result["output_dir"]) / "run.json").read_text())["settings"]
    mode = settings.get("collector.mode", "sync")
    further = [mode] if mode != "sync" else []
    shuffles = any(value is True and "shuffle_" in name for name, value in settings.items())
    further += ["control"] if shuffles else []
    return ", ".join([part.removesuffix("/") or result["task"], *further])


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """One small plot for each kind of run; runs that differ in their seeds share one."""
    plots = defaultdict(list)
    for result in results:
        for part in parts_of(result):
            plots[title_of(result, part)].append((Path(result["output_dir"]), f"{part}reward"))
    num_columns = min(NUM_COLUMNS, len(plots))
    num_rows = -(-len(plots) // num_columns)
    figure, axes = plt.subplots(
        *(num_rows, num_columns),
        figsize=(max(2.8, 5.6 / num_columns) * num_columns, 2.4 * num_rows),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for small in axes.flat[len(plots) :]:
        small.set_axis_off()
    for small, (title, runs) in zip(axes.flat, plots.items(), strict=False):
        ends = []
        for (folder, name), colour in zip(runs, COLOURS, strict=False):
            history, points = rewards(folder, name), tests(folder, name)
            steps = range(1, len(history) + 1)
            is_short = len(history) < SMOOTHED_FROM
            small.plot(steps, history, color=colour, lw=1, alpha=0.5 if is_short else 0.25)
            if not is_short:
                small.plot(steps, smoothed(history), color=colour, lw=1.8)
            style = "o-" if len(points) > 2 and is_short else "o"
            small.plot(*zip(*points, strict=True), style, color=colour, ms=4, lw=1.5)
            ends.append((points[0][1], points[-1][1]))
        before, after = (fmean(values) for values in zip(*ends, strict=True))
        small.set_title(f"{title}: {before:.2f} to {after:.2f}", fontsize=9)
        small.set_ylim(-0.04, 1.05)
        small.tick_params(labelsize=8)
        small.grid(alpha=0.3)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("mean reward", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def table(results: list[dict[str, Any]]) -> str:
    """The same as a table in Markdown."""
    lines = ["| task | seed | before | after | steps |", "|---|---|---|---|---|"]
    for result in results:
        ends = [f"{result[f'held_out_{when}']:.2f}" for when in ("before", "after")]
        shown = (result["task"], result["seed"], *ends, result["steps"])
        lines.append(f"| {' | '.join(map(str, shown))} |")
    return "\n".join(lines)


def main(source: str, target: str) -> None:
    """Read the results, draw and print them."""
    lines = Path(source).read_text(encoding="utf-8").splitlines()
    results = [json.loads(line) for line in lines if line]
    draw(results, Path(target))
    print(table(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
