"""MLGym's tasks, against a stand-in with its interface whose container is a shell in a folder."""

import importlib
import sys
from pathlib import Path

import pytest

from torchrl_data.batched_object import read_objects, write_objects
from torchrl_envs import make_mlgym
from torchrl_tasks.mlgym.session import command_file, score_gain
from torchrl_tasks.mlgym.wrapper import NO_ACTION

STAND_IN = Path(__file__).parent / "mlgym_stand_in"


@pytest.fixture
def open_environments(monkeypatch):
    """The stand-in is MLGym, started in its folder; gives the environments that are open."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.chdir(STAND_IN)
    yield importlib.import_module("mlgym.environment.env").OPEN
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlgym"]:
        del sys.modules[name]


def say(env, batch, turns):
    write_objects(batch, "text_response", [f"Thinking.\n```\n{turn}\n```" for turn in turns])
    return env.step(batch)["next"]


def last(batch):
    return [chat[-1] for chat in batch["history"].prompt.to_chats()]


def test_each_row_has_a_shell_of_its_own_and_the_last_score_counts(open_environments):
    env = make_mlgym(task="guess", num_envs=3, repeats=3, reward_wrong_format=-0.5)
    assert not open_environments
    batch = env.reset()
    assert len({env.devices[0] for env in open_environments}) == 3
    for system, user in batch["history"].prompt.to_chats():
        assert system == {"role": "system", "content": "You have these commands:\nsubmit, validate"}
        assert user["content"] == "guess: Write a number. Steps left: 10, in workspace."
    batch = say(env, batch, ["echo 3 > number", "echo $WINDOW > number\ncat number", "ls"])
    assert [m["content"] for m in last(batch)] == [
        "No output.\n(step 1)",
        "100\n\n(step 1, in workspace)",
        "No output.\n(step 1)",
    ]
    assert {m["role"] for m in last(batch)} == {"user"}
    batch = say(env, batch, ["validate", "submit", "submit"])
    assert last(batch)[0]["content"] == ("Evaluation Score: {'Score': 3.0}\n(step 2, in workspace)")
    assert batch["done"].view(-1).tolist() == [False, True, True]
    assert len(open_environments) == 1
    write_objects(batch, "text_response", ["no block"] * 3)
    batch = env.step(batch)["next"]
    assert last(batch)[0]["content"] == NO_ACTION
    batch = say(env, batch, ["echo 5 > number\nsubmit"] * 3)
    # 5 less the baseline's 1, and 0.5 less for the turn without a command.
    assert batch["reward"][0].item() == pytest.approx(3.5)
    assert read_objects(batch, "stop_reason")[0] == "environment_done"
    assert batch["terminated"].all()
    assert not open_environments


def test_a_row_that_never_evaluated_has_no_score(open_environments):
    env = make_mlgym(tasks=["guess", "other"], num_envs=2, shuffle=False, max_steps=1)
    batch = env.reset()
    assert {env.task_args.id for env in open_environments} == {"guess", "other"}
    batch = say(env, say(env, batch, ["ls", "echo 7 > number"]), ["ls", "ls"])
    assert batch["reward"].view(-1).tolist() == [0.0, 6.0]
    assert batch["done"].all()
    env.close()
    assert not open_environments


def test_a_shell_that_is_gone_and_a_task_that_is_not_there_cost_their_row(open_environments):
    env = make_mlgym(tasks=["guess", "nobody"], num_envs=2, shuffle=False)
    batch = env.reset()
    assert len(open_environments) == 1
    batch = say(env, batch, ["kill -9 $$", "ls"])
    reasons = read_objects(batch, "stop_reason")
    assert reasons[0].startswith("environment_error: MLGym: RuntimeError: Failed to communicate")
    assert reasons[1].startswith("environment_error: MLGym nobody: constructor: FileNotFound")
    assert batch["truncated"].all()
    assert not batch["scorable"].any()
    assert batch["reward"].isnan().all()
    assert not open_environments


def test_what_is_wrong_shows_at_construction(open_environments, monkeypatch, tmp_path):
    for names in ({}, {"task": "guess", "tasks": ["other"]}, {"tasks": []}):
        with pytest.raises(ValueError, match="exactly one of task and tasks"):
            make_mlgym(**names)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match=f"start the program in {STAND_IN}"):
        make_mlgym(task="guess")
    del sys.modules["mlgym"]
    monkeypatch.setitem(sys.modules, "mlgym", None)
    with pytest.raises(ImportError, match="pip install -e MLGym"):
        make_mlgym(task="guess")


def test_commands_and_scores_that_nobody_can_read_are_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"notes\.txt is no program"):
        command_file(path)
    assert score_gain({"accuracy": 0.75}, {"accuracy": 0.5}) == 0.25
    assert score_gain({"Score": 2.0, "other": 9.0}, {}) == 2.0
    with pytest.raises(ValueError, match=r"measured \['a', 'b'\]"):
        score_gain({"a": 1.0, "b": 2.0}, {})
