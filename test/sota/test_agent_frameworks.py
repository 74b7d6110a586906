"""Agents of four frameworks, run for real: what docs/agent-frameworks.md shows.

Its files are written to a folder, and its commands run there. The model has tokens that are whole
turns, right and wrong answers and a call of the agent's tool, so that a few steps of GRPO tell them
apart.
"""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pages_for_tests import FAST, call, command_of, lines_of, save_actor, write_files

from collectors.record import RunRecord

PAGE = Path(__file__).parents[2] / "docs/agent-frameworks.md"
FRAMEWORKS = ("openai_agents", "langgraph", "pydantic_ai", "smolagents")


ADD = call("add", a=2, b=3)
ANSWERS = ("4", "5", "6")
TURNS = (ADD, *ANSWERS)
FINAL = (ADD, *(call("final_answer", answer=text) for text in ANSWERS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a reader has written the files of the page."""
    path = tmp_path_factory.mktemp("frameworks")
    assert write_files(PAGE, path) == {f"with_{name}.py" for name in FRAMEWORKS}
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "framework",
    [
        *("openai_agents", "smolagents"),  # calls of tools, and an answer by a tool
        *(pytest.param(name, marks=pytest.mark.weekly) for name in ("langgraph", "pydantic_ai")),
    ],
)
def test_is_trained_on(framework, folder, run_script):
    """A few steps find the answer; what the framework's tool said is in the record."""
    words = [*command_of(PAGE, f"with_{framework}:solve"), *FAST, "policy.max_new_tokens=8"]
    words += [f"policy.model=models/{framework}", f"name={framework}", "train.num_steps=4"]
    save_actor(folder / "models" / framework, FINAL if framework == "smolagents" else TURNS)
    done = run_script(*words, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    out = Path(json.loads(done.stdout.strip().splitlines()[-1])["output_dir"])
    metrics = lines_of(out / "metrics.jsonl")
    rewards = [line["reward"] for line in metrics]
    assert metrics[0]["grad_norm"] > 0
    record = RunRecord(out)
    samples = [sample for step in record.steps for sample in record.samples(step.step)]
    ends = {"environment_done", "response_length"}  # that of a turn which the budget cut
    assert {sample.stop_reason for sample in samples} <= ends
    called = [sample for sample in samples if "add" in [c.tool for c in sample.tool_calls]]
    assert called
    heard = [sample.messages[-2]["content"] for sample in called if len(sample.messages) > 3]
    assert any("5" in text for text in heard)
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.3
