"""Environments of other packages, run for real: what docs/environment-packages.md shows.

Its files are written to a folder, and its commands run there. The model has tokens that are whole
actions, some right and some wrong, so that a few steps of GRPO tell them apart.
"""

import json
import logging
import random
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from collectors.record import RunRecord
from torchrl_data import read_conversations
from torchrl_data.keys import PROMPT
from torchrl_envs.tasks.registry import make_task
from torchrl_envs.tasks.task import TaskEnv
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

PAGE = Path(__file__).parents[2] / "docs/environment-packages.md"
FILES = re.compile(r"`(\w+\.py)`:\n\n```python\n(.*?)```", re.DOTALL)
LINES = re.compile(r"`(\w+\.jsonl)` has lines such as\n\n```json\n(.*?)```", re.DOTALL)
FAST = (
    *(
        "debug=tiny",
        "warm_start.num_steps=0",
        "train.num_steps=8",
        "collector.num_prompts=2",
        "collector.group_size=8",
    ),
    *("evaluate.num_prompts=2", "logger=none", "optim.learning_rate=3e-3", "train.num_epochs=4"),
    *("optim.num_warmup_steps=0", "policy.gradient_checkpointing=false"),
)


def answer(value):
    return {"name": "submit_answer", "arguments": {"answer": value}}


ACTIONS = {
    "lake": ("left", "right", "down", "up"),
    "gem": tuple(f"\\boxed{{{n}}}" for n in range(1, 11)),
    "skyrl_gym": tuple(f"#### {n}" for n in range(3, 8)),
    "aviary_steps": tuple(json.dumps(answer(str(n))) for n in range(3, 8)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a reader has written the files of the page."""
    path = tmp_path_factory.mktemp("packages")
    text = PAGE.read_text("utf-8")
    files = dict(FILES.findall(text))
    assert set(files) == {"lake.py", "aviary_steps.py"}
    for name, code in files.items():
        assert len([line for line in code.splitlines() if line]) <= 30
        (path / name).write_text(code)
    for name, line in LINES.findall(text):
        rows = [json.loads(line) for _ in range(8)]
        for number, row in enumerate(rows[1:], start=2):  # of equal prompts the first is kept
            row["prompt"] = f"{number}. {row['prompt']}"
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def there(folder, monkeypatch):
    """The reader's folder, and their modules; what GEM does to Python's logging is undone."""
    handlers = logging.root.handlers[:]
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    yield folder
    logging.root.handlers[:] = handlers
    for name, module in list(sys.modules.items()):
        if str(folder) in str(getattr(module, "__file__", None)):
            del sys.modules[name]


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def command_of(module):
    """The words of the command that names a module's environment."""
    lines = PAGE.read_text("utf-8").replace("\\\n", " ").splitlines()
    (found,) = (line for line in lines if f"task.factory={module}:" in line)
    return [word for word in shlex.split(found)[2:] if word != "policy=smollm2"]


def settings_of(module):
    """The same as settings of the task."""
    pairs = (word.removeprefix("task.").split("=", 1) for word in command_of(module))
    return {name: yaml.safe_load(value) for name, value in pairs}


def played(play, scripted, module, turns, row=0):
    """The end of an episode, and what was said to the policy in it."""
    settings = settings_of(module)
    task = make_task("environment", **settings, num_held_out=1)
    if "dataset" in settings:
        task = replace(task, train_rows=[lines_of(Path(settings["dataset"]))[row]])
    env = TaskEnv(task, num_envs=1)
    try:
        (end,) = play(env, scripted(turns))
    finally:
        env.close()
    said = read_conversations(end, PROMPT, who="test").messages(0)
    return end, [message["content"] for message in said if message["role"] == "user"]


@pytest.mark.usefixtures("there")
def test_gymnasium(play, scripted):
    """The shortest way over the lake of four by four; a turn without a move costs nothing."""
    moves = ["Well.", "Go DOWN!", "down", "right", "right", "down", "right"]
    end, said = played(play, scripted, "lake", moves)
    assert said[0].endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    assert said[1] == "Say left, down, right or up."
    assert said[2] == "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert said[-1] == "(Right)\nSFFF\nFHFH\nFFFH\nHFF[G]"
    assert (end["reward"].item(), end["terminated"].item()) == (1.0, True)
    end, said = played(play, scripted, "lake", ["right", "down"])
    assert said[-1] == "(Down)\nSFFF\nF[H]FH\nFFFH\nHFFG"
    assert (end["reward"].item(), end["terminated"].item()) == (0.0, True)


@pytest.mark.usefixtures("there")
def test_gem(play, scripted):
    """A number from 1 to 10 in four guesses; the last one is paid by how near it is."""
    guesses = [f"I say \\boxed{{{n}}}" for n in (1, 2, 3, 4)]
    end, said = played(play, scripted, "gem", guesses)
    assert "between 1 and 10 (inclusive) within 4 turns" in said[0]
    for n, text in enumerate(said[1:-1], start=1):
        assert text == f"At turn {n}, you guessed {n}, and the target number is higher than {n}."
    n, reward = len(said) - 1, end["reward"].item()
    if said[-1] == f"Congratulations! You guessed the correct number {n} in {n} turns.":
        assert reward == 1.0
    else:
        assert said[-1] == "You have reached the maximum number of turns."
        assert reward in [pytest.approx(1 - away / 9) for away in range(1, 7)]
    end, said = played(play, scripted, "gem", ["five"])
    assert said[1] == "At turn 1, you did not provide a valid guess."
    assert (end["reward"].item(), end["terminated"].item()) == (pytest.approx(-0.1), True)


@pytest.mark.usefixtures("there")
def test_skyrl_gym(play, scripted):
    end, said = played(play, scripted, "skyrl_gym", ["#### 4", "5", "so #### 5"])
    assert said[0] == "What is 2 + 3? End with '#### ANSWER'."
    assert all("'#### ANSWER'" in text for text in said[1:])
    assert len(said) == 3
    assert end["reward"].item() == pytest.approx(0.2 / 5 + 0 + 1)  # a form, nothing, an answer


@pytest.mark.usefixtures("there")
def test_aviary(play, scripted, call_text):
    calls = [call_text("calculator", expr="2 + 3"), call_text("submit_answer", answer="5")]
    end, said = played(play, scripted, "aviary_steps", calls)
    assert '"name":"calculator"' in said[0]
    assert said[1:] == ["5", "True"]
    assert (end["reward"].item(), end["terminated"].item()) == (1.0, True)
    wrong = [call_text("submit_answer", answer="6")]
    assert played(play, scripted, "aviary_steps", wrong)[0]["reward"].item() == 0.0
    for broken in ("five", "<tool_call>{</tool_call>", '<tool_call>{"name": "x"}</tool_call>'):
        end, said = played(play, scripted, "aviary_steps", [broken])
        assert said[1].startswith("Must call one of the provided tools")
        assert end["reward"].item() == -1.0


@pytest.fixture
def actor(there):
    """Makes a model that says one of some actions, each as often; gives its folder."""

    def make(name, actions):
        rng = random.Random(0)
        torch.manual_seed(0)
        tokenizer = train_tokenizer([], vocab_size=263, phrases=actions)
        model = tiny_qwen3(len(tokenizer), max_position_embeddings=4096)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        is_call = actions[0].startswith("{")
        for _ in range(60):
            said = [rng.choice(actions) for _ in range(16)]
            before = "".join(rng.choice("aeinst. \n") for _ in range(rng.randrange(1, 60)))
            texts = [f"<tool_call>{text}</tool_call>" if is_call else text for text in said]
            start = f"<|im_start|>user\n{before}<|im_end|>\n<|im_start|>assistant\n"
            ids = torch.tensor([tokenizer.encode(f"{start}{text}<|im_end|>") for text in texts])
            labels = ids.clone()
            labels[:, : len(tokenizer.encode(start))] = -100
            model(input_ids=ids, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for part in (tokenizer, model):
            part.save_pretrained(there / "models" / name)
        return f"policy.model=models/{name}"

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "num_steps", "gain"),
    [("lake", 2, None), ("gem", 2, None), ("skyrl_gym", 8, 0.3), ("aviary_steps", 8, 0.3)],
)
def test_is_trained_on(module, num_steps, gain, there, actor, run_script):
    """Where a single action is right, a few steps find it: 0.36 to 1.0, 0.1 to 0.9."""
    words = [*command_of(module), *FAST, f"train.num_steps={num_steps}", f"name={module}"]
    words += ["policy.max_new_tokens=8", actor(module, ACTIONS[module])]
    if module == "lake":  # a hole is below the start, and the goal beside the hole
        words = [word for word in words if not word.startswith("task.arguments=")]
        words.append("task.arguments={is_slippery: false, desc: [SF, HG]}")
    done = run_script(*words, cwd=there)
    assert done.returncode == 0, done.stderr[-3000:]
    out = Path(json.loads(done.stdout.strip().splitlines()[-1])["output_dir"])
    metrics = lines_of(out / "metrics.jsonl")
    assert len(metrics) == num_steps
    assert metrics[0]["grad_norm"] > 0
    record = RunRecord(out)
    samples = [sample for step in record.steps for sample in record.samples(step.step)]
    assert {sample.stop_reason for sample in samples} <= {"environment_done", "max_steps"}
    if gain is not None:
        rewards = [line["reward"] for line in metrics]
        assert sum(rewards[-2:]) / 2 > rewards[0] + gain
    if module == "lake":
        for sample in samples:
            is_there = "[G]" in sample.messages[-1]["content"]
            assert sample.reward == float(is_there)
