"""The script under torchrun: what two ranks train is what one process trains, and so it goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = [
    *(str(ROOT / "sota-implementations/grpo/grpo.py"), "debug=tiny", "task=number_guessing"),
    *("evaluate.num_shown=0", "warm_start.num_steps=30", "train.num_steps=3"),
    *("collector.num_prompts=8", "collector.group_size=4", "checkpoint.every=1"),
    # Adam divides gradients by their size, so it blows rounding up.
    *("optim=sgd", "optim.learning_rate=0.05", "optim.num_warmup_steps=0"),
]
ONE = [sys.executable]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def is_of(session, process):
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


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
            start_new_session=True,
        )

    return popen


def stop_after(step, process, stop):
    """Stop a run after a step; gives what it told."""
    told = []
    for line in process.stdout:
        told.append(line)
        if line.startswith(f"grpo step {step}/"):
            stop(process)
            break
    told += process.stdout.readlines()
    assert any("stopped after step" in line for line in told), "".join(told)[-3000:]


def ctrl_c(process):
    """To all processes of the terminal."""
    os.killpg(process.pid, signal.SIGINT)


def finish(process):
    out, _ = process.communicate(timeout=280)
    assert process.returncode == 0, out[-3000:]
    last = [line for line in out.splitlines() if line.startswith('{"task"')]
    return Path(json.loads(last[-1])["output_dir"])


@pytest.mark.slow
def test_a_run_of_shards_goes_on_in_one_process_and_is_that_of_one_process(
    start, run_script, tmp_path
):
    """The run of one process, and the end of the other, in forks, which need not import."""

    def in_a_fork(*more):
        done = run_script(*SCRIPT[1:], *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        return Path(json.loads(done.stdout.splitlines()[-1])["output_dir"])

    with start(TWO, "name=two", "train.parallel=fsdp2") as process:
        stop_after(1, process, ctrl_c)
    two = in_a_fork("name=two", "resume=auto")
    check_same_run(two, in_a_fork("name=one"))


@pytest.mark.weekly
def test_a_run_of_shards_goes_on_in_one_process_and_in_copies_and_is_that_of_one_process(start):
    with start(ONE, "name=one") as process:
        one = finish(process)
    with start(TWO, "name=two", "train.parallel=fsdp2") as process:
        stop_after(1, process, ctrl_c)
    deadline = time.monotonic() + 10
    while [each for each in psutil.process_iter() if is_of(process.pid, each)]:
        assert time.monotonic() < deadline, "ranks outlive the run"
        time.sleep(0.1)
    with start(ONE, "name=two", "resume=auto") as process:
        stop_after(2, process, subprocess.Popen.terminate)
    assert process.returncode == 128 + signal.SIGTERM
    with start(TWO, "name=two", "resume=auto") as process:
        two = finish(process)
    check_same_run(two, one)


def check_same_run(two, one):
    assert two.name == "two-001"
    same = ("reward", "loss", "grad_norm", "entropy", "ratio_mean/max", "trained_tokens")
    for ours, theirs in zip(metrics_of(two), metrics_of(one), strict=True):
        for name in same:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    assert sum(step["optimizer_steps"] for step in metrics_of(one)) >= 4
