"""The script learns over all there is: two ranks train, two collectors on Ray draw from two vLLMs.

The task is that of ``test_recipes.py``: is a number odd? The model knows the form of an answer, and
guesses. In one process the same settings learn it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "sota-implementations/grpo/grpo.py"
NUM_STEPS = 32
TASK = (
    *("task=gsm8k", "task.dataset=rows.jsonl", "task.system_prompt=null", "logger=none"),
    *("evaluate.num_shown=0", "evaluate.num_prompts=48", "policy.max_new_tokens=24"),
)
LEARNS = (
    *("policy.model=outputs/sft/gsm8k/half", "policy.gradient_checkpointing=false"),
    *("optim.num_warmup_steps=0", "optim.max_grad_norm=0.1", "optim.learning_rate=1e-3"),
    *("train.num_epochs=4", f"train.num_steps={NUM_STEPS}", "checkpoint.every=8"),
    *("collector.num_prompts=24", "collector.group_size=8", "policy.max_model_len=256"),
)
TOGETHER = (
    *("engine=vllm", "engine.num_engines=2", "collector=ray", "collector.num_collectors=2"),
    *("collector.max_staleness=0", "+collector.remote_config.num_cpus=0"),
)
MARK = "TEST_OF_EVERYTHING"
"""In the environment of all processes of the run."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture
def half_trained(run_recipe, tmp_path, monkeypatch):
    """A model that knows the format, and guesses."""
    rows = [
        {"question": f"Is {i} odd?", "answer": f"look\n#### {i % 2}"}
        for i in sorted(range(10, 600), key=lambda i: i * 7919 % 1009)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    run_recipe("sft", *TASK, "name=half", "train.num_steps=45")


def engines_of(run):
    """The processes of vLLM's servers, in the order in which they were started."""
    found = [
        process
        for process in psutil.process_iter(["cmdline", "environ", "create_time", "ppid"])
        if "torchrl_modules.vllm.server" in (process.info["cmdline"] or [])
        and (process.info["environ"] or {}).get(MARK) == run
    ]
    started = {process.pid for process in found}
    servers = [each for each in found if each.info["ppid"] not in started]  # the others are forks
    return sorted(servers, key=lambda process: process.info["create_time"])


def steps_of(result):
    metrics = Path(result["output_dir"], "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in metrics]


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("half_trained")
def test_ranks_collectors_and_engines_learn_together_though_an_engine_is_killed(tmp_path):
    pytest.importorskip("ray")
    own = str(tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: own}
    command = [sys.executable, *TORCHRUN, str(SCRIPT), *TASK, *LEARNS, *TOGETHER, "name=all"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    ) as process:  # fmt: skip
        told = []
        assert process.stdout is not None
        for line in process.stdout:
            told.append(line)
            if line.startswith("grpo step 5/"):
                before = engines_of(own)
                os.kill(before[0].pid, signal.SIGKILL)
            if f"step {NUM_STEPS}/" in line:
                after = engines_of(own)
    assert process.returncode == 0, "".join(told)[-3000:]
    (result,) = [json.loads(line) for line in told if line.startswith('{"task"')]
    assert result["held_out_before"] < 0.6  # half of the answers are right
    assert result["held_out_after"] > 0.7, [step["reward"] for step in steps_of(result)]
    assert result["steps"] == NUM_STEPS
    assert len(before) == len(after) == 2
    assert {each.pid for each in before} - {each.pid for each in after} == {before[0].pid}
    steps = steps_of(result)
    assert [step["policy_version"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert all(0 < step["collect/driver_bytes_per_row"] < 1024 for step in steps)
    assert steps[-1]["ledger/groups/trained"] == NUM_STEPS * 24
    deadline = time.monotonic() + 20
    while engines_of(own):
        assert time.monotonic() < deadline, "engines outlive the run"
        time.sleep(0.1)
