"""The record in the terminal: what is printed of a run, and that content stays content (A17)."""

import io

import pytest
from made_records import event, sample, write_record
from rich.console import Console

from collectors.record import RunRecord
from collectors.record.browse import Browser
from collectors.record.view import main
from torchrl_agents.command import COMMANDS

ODD = "[bold]hi[/bold] \x1b[31m\u202e"


@pytest.fixture
def folder(tmp_path):
    odd = sample(2, 1, 1, stop_reason=ODD, rewards={ODD: 1.0}, num_tool_errors=1)
    odd.messages[0]["content"] = ODD
    odd.tokens.texts[1] = ODD
    steps = [
        [[sample(1, group, index) for index in range(2)] for group in range(2)],
        [[sample(2, 0, index) for index in range(2)], [sample(2, 1, 0), odd]],
    ]
    events = [
        event("offered", 1),
        event("dropped", 1, reason="stale"),
        event("offered", 1, 1, attempt=1),
        event("trained", 1, 1, attempt=1),
    ]
    return write_record(tmp_path / "run", steps, events=events)


def shown(capsys, *arguments, status=0):
    assert main([str(each) for each in arguments]) == status
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert "\x1b" not in text
    assert "\u202e" not in text
    return text


def test_run_step_group_and_sample_are_printed(folder, capsys):
    text = shown(capsys, folder)
    assert [line.split()[1] for line in text.splitlines() if "│" in line] == ["1", "2"]
    assert "question 0" in shown(capsys, folder, "--step", 1)
    assert "■ · " in shown(capsys, folder, "--step", 1, "--reward", 0, 0.5)
    group = shown(capsys, folder, "--step", 2, "--group", 1)
    assert "sample 0: 0" in group
    assert "answer 1" in group
    assert "sample 0" not in shown(capsys, folder, "--step", 2, "--group", 1, "--tool-errors")
    place = ("--step", 2, "--group", 1, "--sample", 1)
    text = shown(capsys, folder, *place, "--colour", "ratio")
    assert "[bold]hi[/bold] \\u001b[31m\\u202e" in text
    assert "from -0.5 (red) to 0.5" in text
    assert "add, 250 ms" in text


def test_where_a_prompt_is(folder, capsys):
    text = shown(capsys, folder, "--prompt", 1)
    assert "trained at step 2" in text
    lines = [line.strip() for line in text.splitlines() if "attempt" in line]
    assert lines == [
        "attempt 1: offered",
        "attempt 1: dropped, stale",
        "attempt 2: offered",
        "attempt 2: trained, step 2",
    ]
    assert "question 0" in shown(capsys, folder, "--prompt", "question 0")
    assert "none of 2 prompts is '17'" in shown(capsys, folder, "--prompt", "17", status=1)


def test_what_is_wrong_is_said(folder, tmp_path, capsys):
    assert "no step 9; there are [1, 2]" in shown(capsys, folder, "--step", 9, status=1)
    assert "has groups 0 to 1" in shown(capsys, folder, "--step", 1, "--group", 5, status=1)
    assert "--sample goes with" in shown(capsys, folder, "--sample", 0, status=1)
    assert "holds no record" in shown(capsys, tmp_path, status=1)
    assert "give --html" in shown(capsys, folder, folder, status=1)
    path = folder / "rollouts/step-000001.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    assert "not read: step-000001.jsonl.gz: cut off" in shown(capsys, folder, "--step", 1)
    module, _, function = COMMANDS["view"].function.partition(":")
    assert (module, function) == (main.__module__, main.__name__)


def test_one_looks_around_by_short_commands(folder, monkeypatch):
    out = Console(file=io.StringIO(), width=120, color_system=None)
    said = iter(["2", "1", "1", "b", "u", "c", "u", "b", "p 1", "7", "q"])
    monkeypatch.setattr(out, "input", lambda *_: next(said))
    browser = Browser(RunRecord(folder), out)
    browser.open()
    places = []
    original = browser._show
    monkeypatch.setattr(browser, "_show", lambda place: places.append(place) or original(place))
    browser.loop()
    assert places == [
        *([2], [2, 1], [2, 1, 1], [2, 1, 0], [2, 1], [2, 1], [2], [1]),
        [1, 7],
    ]
    text = out.file.getvalue()
    assert "colour: ratio" in text
    assert "step 1 has groups 0 to 1" in text
