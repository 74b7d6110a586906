"""An engine that lends its memory to the training, in a recipe.

vLLM on a CPU refuses its sleep mode; made to believe that it has one, it is told what an
engine of a GPU is told, and frees nothing.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "sota-implementations" / "grpo" / "grpo.py"
RECORD = """
import runpy, sys
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from objectives import NonFiniteGate

CpuPlatform.is_sleep_mode_available = lambda self: True
workers, step = UniProcExecutor.collective_rpc, NonFiniteGate.step

def told(self, method, *args, **options):
    name = getattr(method, "__name__", method)
    if name in ("sleep", "wake_up", "load_weights"):
        print("NOTED", name, *options.get("kwargs", {}).values(), file=sys.stderr)
    return workers(self, method, *args, **options)

def stepped(self):
    print("NOTED step", file=sys.stderr)
    return step(self)

UniProcExecutor.collective_rpc, NonFiniteGate.step = told, stepped
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SETTINGS = (
    "debug=tiny",
    "task.num_demonstrations=64",
    "task.num_rows=64",
    "engine=vllm",
    "engine.colocate=true",
)


def run(*command, cwd):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.vllm
def test_the_engine_sleeps_while_a_step_is_trained(tmp_path):
    signal = ("loss.length_penalty=0.5", "train.num_epochs=2")
    done = run("-c", RECORD, SCRIPT, *SETTINGS, *signal, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = json.loads(done.stdout.splitlines()[-1])["steps"]
    noted = [line[6:] for line in done.stderr.splitlines() if line.startswith("NOTED ")]
    noted = noted[noted.index("load_weights") + 1 :]  # after the warm start
    whole = ["sleep 2", "wake_up ['weights']", "load_weights", "wake_up None"]
    assert steps == 2
    assert [told for told in noted if told != "step"] == whole * steps
    before = [
        noted[i - 1] for i, told in enumerate(noted) if told == "step"
    ]  # where it has a signal
    assert before[:2] == ["sleep 2", "step"]
    assert set(before) == {"sleep 2", "step"}


@pytest.mark.vllm
def test_an_engine_on_a_cpu_has_no_memory_to_lend(tmp_path):
    done = run(SCRIPT, *SETTINGS, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].endswith("vLLM lends no memory of a CPU.")
    assert not list(tmp_path.glob("outputs/grpo/calculator/*"))
