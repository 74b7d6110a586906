"""The script under torchrun: what two ranks train is what one process trains, and so it goes on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = [
    *(str(ROOT / "sota-implementations/grpo/grpo.py"), "debug=tiny", "task=number_guessing"),
    *("evaluate.num_shown=0", "warm_start.num_steps=100", "train.num_steps=3"),
    *("collector.num_prompts=8", "collector.group_size=4", "checkpoint.every=1"),
    # Adam divides gradients by their size, so it blows rounding up.
    *("optim=sgd", "optim.learning_rate=0.05", "optim.num_warmup_steps=0"),
]
ONE = [sys.executable]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def start(tmp_path):
    def popen(program, *more):
        return subprocess.Popen(
            [*program, *SCRIPT, *more],
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return popen


def finish(process):
    out, _ = process.communicate(timeout=280)
    assert process.returncode == 0, out[-3000:]
    last = [line for line in out.splitlines() if line.startswith('{"task"')]
    return Path(json.loads(last[-1])["output_dir"])


@pytest.mark.slow
def test_a_run_of_shards_goes_on_with_copies_and_is_that_of_one_process(start):
    with start(ONE, "name=one") as process:
        one = finish(process)
    with start(TWO, "name=two", "train.parallel=fsdp2") as process:
        told = []
        for line in process.stdout:
            told.append(line)
            if "step 1/" in line:
                process.send_signal(signal.SIGTERM)
                break
        told += process.stdout.readlines()
    assert any("stopped after step" in line for line in told), "".join(told)[-3000:]
    with start(TWO, "name=two", "resume=auto") as process:
        two = finish(process)
    assert two.name == "two-001"
    same = ("reward", "loss", "grad_norm", "entropy", "ratio_mean/max", "trained_tokens")
    for ours, theirs in zip(metrics_of(two), metrics_of(one), strict=True):
        for name in same:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    assert sum(step["optimizer_steps"] for step in metrics_of(one)) >= 4
