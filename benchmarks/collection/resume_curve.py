"""A run that is killed again and again, laid over one that never stopped.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/collection/resume_curve.py [--steps 24]

The same settings twice. The second run is ended by SIGKILL, in the middle of whatever it does,
three times, and goes on with ``resume=auto``. Every metric of every step has to be the same number,
and so have the saved weights. The picture is docs/img/resume.png.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
SETTINGS = (
    *("debug=tiny", "task=number_guessing", "warm_start.num_steps=200", "evaluate.num_shown=0"),
    *("collector.num_prompts=8", "collector.group_size=8", "checkpoint.every=2", "resume=auto"),
)


def run(folder: Path, name: str, num_steps: int, kill_at: int | None = None) -> Path:
    """Run the script in a folder; gives that of the run."""
    script = ROOT / "sota-implementations/grpo/grpo.py"
    command = [sys.executable, str(script), *SETTINGS, f"train.num_steps={num_steps}"]
    with subprocess.Popen(
        [*command, f"name={name}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if kill_at is not None and f"step {kill_at}/" in line:
                process.send_signal(signal.SIGKILL)
                break
    expected = 0 if kill_at is None else -signal.SIGKILL
    if process.returncode != expected:
        raise SystemExit(f"{name}: the script ended with {process.returncode}")
    return folder / f"outputs/grpo/number_guessing/{name}-001"


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Those of each step, without times."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "throughput/"))}
        for line in lines
    ]


def main() -> None:
    """Run both, compare, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    num_steps = parser.parse_args().steps
    kills = [num_steps * part // 4 + 1 for part in (1, 2, 3)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        whole = run(folder, "whole", num_steps)
        for step in kills:
            run(folder, "killed", num_steps, kill_at=step)
        killed = run(folder, "killed", num_steps)
        one, other = metrics_of(whole), metrics_of(killed)
        same = [a == b for a, b in zip(one, other, strict=True)]
        weights = [(f / "model/model.safetensors").read_bytes() for f in (whole, killed)]
    print(f"steps that are equal in every metric: {sum(same)} of {len(same)}")
    print(f"weights at the end: {'equal to the bit' if weights[0] == weights[1] else 'DIFFERENT'}")

    figure, axes = plt.subplots(2, 1, figsize=(7, 4.6), sharex=True, layout="constrained")
    for axis, name in zip(axes, ("reward", "entropy"), strict=True):
        steps = [line["step"] for line in one]
        axis.plot(steps, [m[name] for m in one], color="#9ecae1", lw=6, label="never stopped")
        axis.plot(steps, [m[name] for m in other], color="#08306b", lw=1.2, label="killed 3 times")
        for step in kills:
            axis.axvline(step + 0.5, color="#cb181d", lw=0.8, ls=":")
        axis.set_ylabel(name)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, loc="best")
    axes[0].annotate("kill -9", (kills[0] + 0.6, 1), xycoords=("data", "axes fraction"), va="top",
                     color="#cb181d", fontsize=8)  # fmt: skip
    axes[-1].set_xlabel("step")
    figure.savefig(ROOT / "docs/img/resume.png", dpi=110)


if __name__ == "__main__":
    main()
