"""The record in the terminal: what is printed of a run, and that content stays content (A17)."""

import asyncio
import io

import pytest
from made_records import event, sample, write_record
from rich.console import Console
from textual.widgets import DataTable

from collectors.record import RunRecord
from collectors.record.app import RecordApp
from collectors.record.browser import Browser
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
    text = shown(capsys, folder, "--step", 1)
    assert "question 0" in text
    assert "□■ " in text, "the second of two is better, in a pipe too"
    assert "□·" in shown(capsys, folder, "--step", 1, "--reward", 0, 0.5)
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
    module, _, function = COMMANDS["view"][0].partition(":")
    assert (module, function) == (main.__module__, main.__name__)


def test_a_sample_of_a_group_that_its_step_does_not_have_is_named_and_left_out(tmp_path, capsys):
    stray = sample(1, 7, 1)
    folder = write_record(tmp_path / "run", [[[sample(1, 0, 0), stray]]])
    said = f"not read: step-000001.jsonl.gz: it has no group {stray.group_id} of a sample"
    for arguments in (("--step", 1), ("--html", tmp_path / "page")):
        assert " ".join(shown(capsys, folder, *arguments).split()).endswith(said)
    assert stray.group_id not in (tmp_path / "page/data/0/step-000001-0.js").read_text()
    assert [each.group_id for each in RunRecord(folder).samples(1)] == [sample(1, 0, 0).group_id]


def test_one_looks_around_by_keys(folder):
    async def look():
        app = RecordApp(Browser(RunRecord(folder)))
        async with app.run_test(size=(120, 40)) as pilot:
            places = []
            down = ("down", "enter", "j", "enter", "enter")
            for key in (*down, "]", "[", "c", "escape", "[", "escape", "escape"):
                await pilot.press(key)
                await pilot.pause()
                places.append(app.place)
            assert places == [
                *[(), (2,), (2,), (2, 1), (2, 1, 0), (2, 1, 1), (2, 1, 0), (2, 1, 0)],
                *[(2, 1), (2, 0), (2,), ()],
            ]
            assert app.query_one(DataTable).cursor_row == 1  # where one came from
            await pilot.press("enter", "down", "enter", "c", "c")
            text = screen(app)
            assert "[bold]hi[/bold]" in text
            assert "colour: entropy" in text
            await pilot.press("slash", "1", "enter")
            assert "attempt 1: dropped, stale" in screen(app)
            await pilot.press("escape", "slash", *"nobody", "enter")
            assert "none of 2 prompts is 'nobody'" in screen(app)
            return text

    text = asyncio.run(look())
    assert "\u202e" not in text


def test_a_filter_leaves_out_samples_of_a_group(folder):
    browser = Browser(RunRecord(folder), keep=lambda sample: sample.num_tool_errors > 0)
    assert browser.view((2, 1), "writer").rows.keys == [1]
    assert browser.beside((2, 1, 1), 1) == (2, 1, 1)
    assert browser.beside((2,), 1) == (2,)
    assert browser.beside((2,), -1) == (1,)


def screen(app):
    """What is on it, as text."""
    console = Console(file=io.StringIO(), width=120, height=40, record=True)
    console.print(app.screen._compositor)
    return console.export_text()
