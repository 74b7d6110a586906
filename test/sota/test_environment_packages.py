"""Environments of other packages, run for real: what docs/environment-packages.md shows.

Its files are written to a folder, and its commands run there. The model has tokens that are whole
actions, some right and some wrong, so that a few steps of GRPO tell them apart.
"""

import asyncio
import importlib
import json
import logging
import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from pages_for_tests import FAST, call, command_of, lines_of, save_actor, write_files

from collectors.record import RunRecord
from torchrl_data import read_conversations
from torchrl_data.keys import PROMPT
from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.task import TaskEnv

PAGE = Path(__file__).parents[2] / "docs/environment-packages.md"
ACTIONS = {
    "lake": ("left", "right", "down", "up"),
    "gem": tuple(f"\\boxed{{{n}}}" for n in range(1, 11)),
    "skyrl_gym": tuple(f"#### {n}" for n in range(3, 8)),
    "aviary_steps": tuple(call("submit_answer", answer=str(n)) for n in range(3, 8)),
    "house": (
        "open antique trunk",
        "take old key from antique trunk",
        "inventory",
        "look",
    ),
    "with_verifiers": (call("add", a=2, b=3), "4", "5", "6"),
}
FILES = {"lake.py", "aviary_steps.py", "house.py"}
FILES |= {"sums_v1.py", "in_process.py", "with_verifiers.py"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a reader has written the files of the page."""
    path = tmp_path_factory.mktemp("packages")
    assert write_files(PAGE, path) == FILES
    lines = PAGE.read_text("utf-8").splitlines()
    (makes,) = (line for line in lines if line.startswith("tw-make "))
    program, *words = shlex.split(makes)
    subprocess.run([Path(sys.executable).with_name(program), *words], cwd=path, check=True)
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


def command(module):
    """The words of the command that names a module's environment."""
    setting = "program" if module == "with_verifiers" else "factory"
    return command_of(PAGE, f"task.{setting}={module}:")


def settings_of(module):
    """The settings of the task in the command that names a module's environment."""
    words = [word for word in command(module) if word != "task=agent"]
    pairs = (word.removeprefix("task.").split("=", 1) for word in words)
    return {name: yaml.safe_load(value) for name, value in pairs}


def played(play, scripted, module, turns, row=0):
    """The end of an episode, and what was said to the policy in it."""
    settings = settings_of(module)
    kind = "agent" if "program" in settings else "environment"
    task = make_task(kind, **settings, num_held_out=1)
    if "dataset" in settings:
        task = replace(task, train_rows=[lines_of(Path(settings["dataset"]))[row]])
    env = TaskEnv(task, num_envs=1)
    try:
        (end,) = play(env, scripted(turns))
    finally:
        env.close()
    said = read_conversations(end, PROMPT, who="test").messages(0)
    return end, [message["content"] for message in said if message["role"] != "assistant"]


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


BREAKFAST = (
    *("open antique trunk", "take old key from antique trunk"),
    *("unlock wooden door with old key", "open wooden door", "go east"),
    *("go south", "take milk from couch", "go north", "put milk on stove"),
)


@pytest.mark.usefixtures("there")
def test_textworld(play, scripted):
    """Eight of nine commands are worth a point; "save", which is not possible, does nothing."""
    turns = ["Hm.", "save", "look", "The trunk.\nOpen Antique Trunk", *BREAKFAST[1:]]
    end, said = played(play, scripted, "house", turns)
    assert said[0].startswith("Play this game.\n\n")
    assert "You can: " in said[0]
    assert "open antique trunk" in said[0]
    assert all(text.startswith("You can't do that.\nYou can: ") for text in said[1:3])
    assert said[4].startswith("You open the antique trunk, revealing an old key.")
    assert "You scored 8 out of a possible 8" in said[-1]
    assert len(said) == 1 + len(turns)
    assert (end["reward"].item(), end["terminated"].item()) == (pytest.approx(1.0), True)
    assert {path.suffix for path in Path("games").iterdir()} <= {".z8", ".json", ".ni"}
    assert not list(Path().glob("*.qzl"))


def test_textworld_on_threads(there):
    """Games that are played at once are those that are played one after the other."""
    code = f"""
import sys
from concurrent.futures import ThreadPoolExecutor
from house import House

def game(_):
    house = House({{"game": "games/1.z8"}})
    said = [house.reset()[0], *(house.step(turn) for turn in {BREAKFAST!r})]
    house.close()
    return said

with ThreadPoolExecutor(16) as threads:
    games = list(threads.map(game, range(16)))
assert all(said == game(0) for said in games)
"""  # in a fresh process: what the parser has read once it knows
    subprocess.run([sys.executable, "-c", code], cwd=there, check=True)


@pytest.fixture
def with_verifiers(there, monkeypatch):
    """The program of the page; the process of its tools ends with the test."""
    monkeypatch.setenv("PYTHONPATH", str(there))
    module = importlib.import_module("with_verifiers")
    yield module
    closing = module.serving.__aexit__(None, None, None)
    asyncio.run_coroutine_threadsafe(closing, module.LOOP).result(timeout=30)
    module.LOOP.call_soon_threadsafe(module.LOOP.stop)
    while module.LOOP.is_running():
        time.sleep(0.01)
    module.LOOP.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its use of tenacity
@pytest.mark.usefixtures("with_verifiers")
def test_verifiers(play, scripted, call_text):
    """An answer is worth 1, and a call of the tool 0.1; a tool that does not exist ends it."""
    add = call_text("add", a=2, b=3)
    for turns, reward in (([add, "5"], 1.1), (["5"], 1.0), ([add, "6"], 0.1), (["6"], 0.0)):
        end, said = played(play, scripted, "with_verifiers", turns)
        assert said == (["What is 2 + 3?", "5"] if add in turns else ["What is 2 + 3?"])
        assert (end["reward"].item(), end["terminated"].item()) == (pytest.approx(reward), True)
    end, _ = played(play, scripted, "with_verifiers", [add, call_text("subtract", a=2, b=3)])
    assert (end["reward"].item(), end["terminated"].item()) == (0.0, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "num_steps", "gain"),
    [
        *(("lake", 2, None), ("gem", 2, None)),
        *(  # what each asks and pays is played above, and test_agent_frameworks.py trains a program
            pytest.param(*each, marks=pytest.mark.weekly)
            for each in (
                *(("skyrl_gym", 8, 0.3), ("aviary_steps", 12, 0.3), ("house", 8, 0.05)),
                ("with_verifiers", 6, 0.3),
            )
        ),
    ],
)
def test_is_trained_on(module, num_steps, gain, there, run_script):
    """Where a single action is right, a few steps find it: 0.36 to 1.0, 0.1 to 0.9."""
    words = [*command(module), *FAST, f"train.num_steps={num_steps}"]
    words += ["policy.max_new_tokens=8", f"policy.model=models/{module}", f"name={module}"]
    save_actor(there / "models" / module, ACTIONS[module])
    if module == "house":  # the first two points of eight
        words = [word for word in words if not word.startswith("task.max_turns=")]
        words.append("task.max_turns=2")
    if module == "aviary_steps":  # -1 for what is no call teaches the tiny model not to end a turn
        words = [word.replace("learning_rate=3e-3", "learning_rate=3e-4") for word in words]
    if module == "lake":  # a hole is below the start, and the goal beside the hole
        words = [word for word in words if not word.startswith("task.arguments=")]
        words.append("task.arguments={is_slippery: false, desc: [SF, HG]}")
    path = {}
    if module == "with_verifiers":
        path["PYTHONPATH"] = os.pathsep.join([str(PAGE.parents[1]), str(there)])
    done = run_script(*words, cwd=there, **path)
    assert done.returncode == 0, done.stderr[-3000:]
    out = Path(json.loads(done.stdout.strip().splitlines()[-1])["output_dir"])
    metrics = lines_of(out / "metrics.jsonl")
    assert len(metrics) == num_steps
    assert metrics[0]["grad_norm"] > 0
    record = RunRecord(out)
    samples = [sample for step in record.steps for sample in record.samples(step.step)]
    ends = {"environment_done", "max_steps", "response_length"}
    assert {sample.stop_reason for sample in samples} <= ends
    if gain is not None:
        rewards = [line["reward"] for line in metrics]
        assert sum(rewards[-2:]) / 2 > rewards[0] + gain
    if module == "with_verifiers":
        ended = [sample for sample in samples if sample.stop_reason == "environment_done"]
        assert any(sample.num_turns > 1 for sample in ended)
        for sample in ended:  # each conversation is one row, to its end
            said = [message["content"] for message in sample.messages]
            called = ACTIONS[module][0] in said
            assert sample.reward == pytest.approx((said[-1] == "5") + 0.1 * called)
            assert len(said) == 2 * sample.num_turns
    if module == "lake":
        for sample in samples:
            is_there = "[G]" in sample.messages[-1]["content"]
            assert sample.reward == float(is_there)


def test_tau2_is_trained_on(tmp_path, run_script):
    """Each rollout is scored, and paid only where its customer was content."""
    right = call("create_task", user_id="user_1", title="Important Meeting")
    wrong = call("create_task", user_id="user_1", title="Meeting")
    save_actor(tmp_path / "actor", (right, wrong, "Done."))
    words = ["task=tau2", "task.domain=mock", "task.split=base", "task.held_out_split=base"]
    words += [*FAST, "policy.model=actor", "policy.max_new_tokens=40", "task.max_turns=4"]
    words += ["train.num_steps=2", "hydra.run.dir=run"]
    done = run_script(*words, cwd=tmp_path, name="grpo")
    assert done.returncode == 0, done.stderr[-3000:]
    record = RunRecord(tmp_path / "run")
    samples = [sample for step in record.steps for sample in record.samples(step.step)]
    assert len(samples) == 2 * 2 * 8
    assert {sample.reward for sample in samples} == {0.0, 1.0}
    for sample in samples:
        assert "<policy>" in sample.messages[0]["content"]
        assert sample.stop_reason == "environment_done: user" or sample.reward == 0.0
