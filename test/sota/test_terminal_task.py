"""A terminal in a sandbox, a library with a mistake, and tests that score: examples/terminal."""

import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pages_for_tests import FAST, call, lines_of, save_actor

from collectors.record import RunRecord
from torchrl_envs.tasks.by_name import make_task


@pytest.fixture(scope="module")
def terminal():
    return import_module("torchrl_tasks.terminal")


@pytest.fixture(scope="module")
def task():
    return make_task("terminal", num_held_out=64)  # more than there are: 6 of 20


@pytest.fixture
def opened(terminal, task):
    """Opens the terminal of a problem; gives it, and the problem."""
    made = []

    def open_problem(function):
        rows = [*task.train_rows, *task.held_out_rows]
        row = next(row for row in rows if row["function"] == function)
        made.append(task.environment())
        made[-1].reset(**row)
        return made[-1], next(p for p in terminal.PROBLEMS if p["function"] == function)

    yield open_problem
    for one in made:
        one.close()


def test_there_are_twenty_problems_and_none_is_in_both_parts(terminal, task):
    trained, tested = (
        [r["function"] for r in rows] for rows in (task.train_rows, task.held_out_rows)
    )
    assert (len(trained), len(tested)) == (14, 6)
    assert len({*trained, *tested}) == len(terminal.PROBLEMS) == 20


def test_what_is_right_was_worked_out_by_hand(terminal, task):
    env = task.environment()
    right = dict(zip(terminal.CALLS, env._right, strict=True))
    env.close()
    for module, expression, result in [
        ("text", "shorten('abcd', 3)", "'...'"),
        ("arithmetic", "median([9, 1, 5, 3, 7, 2])", "4.0"),
        ("rows", "rotate([1, 2, 3, 4, 5], -1)", "[2, 3, 4, 5, 1]"),
        ("dates", "day_of_year(2024, 12, 31)", "366"),
        ("shop", "discount(101, 1)", "99"),
    ]:
        assert right[module, expression] == result


def test_each_mistake_scores_0_and_its_line_as_it_was_1(terminal, task):
    """Each is seen by the first call of its own problem, which the agent can try, and by others."""
    env = task.environment()
    rows = {row["function"]: row for row in [*task.train_rows, *task.held_out_rows]}
    for problem in terminal.PROBLEMS:
        files = dict(rows[problem["function"]]["files"])
        wrong = terminal.results(env._sandbox, files)
        calls = zip(terminal.CALLS, wrong, env._right, strict=True)
        differ = [call for (_, call), found, right in calls if found != right]
        assert problem["calls"][0] in differ
        assert len([call for call in problem["calls"] if call in differ]) > 1
        files[problem["file"]] = files[problem["file"]].replace(problem["wrong"], problem["right"])
        assert files[problem["file"]] == terminal.FILES[problem["file"]]
    assert terminal.results(env._sandbox, files) == env._right
    env.close()


def test_a_patch_in_the_terminal(opened):
    env, _ = opened("merge")
    said = env.shell("python check.py | grep -c ok; python check.py | grep WRONG; exit 3")
    assert said == "19\nWRONG  merge([1], [2, 3]) gives [1]\n[exit status 3]\n"
    assert env.get_reward() == 0.0
    env.shell("sed -i 's/return merged + left$/return left + merged + right/' rows.py")  # wrong
    assert env.get_reward() == 0.0
    assert env.edit("rows.py", "left + merged + right", "merged + left + right") == "done"
    assert env.get_reward() == 1.0
    env.shell("sed -i 's/02}/01}/' shop.py")  # which another problem's tests see
    assert env.get_reward() == 0.0


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("echo 'import os; os._exit(0)' >> rows.py", id="ends the tests"),
        pytest.param("echo 'raise SystemExit' >> rows.py", id="ends its import"),
        pytest.param("rm rows.py", id="is gone"),
        pytest.param("echo 'print([1] * 82)' >> rows.py", id="prints results"),
        pytest.param("echo 'print(1)' > check.py", id="changes what it can see"),
        pytest.param("head -c 200000 /dev/zero | tr '\\0' x > rows.py", id="floods"),
    ],
)
def test_what_is_no_patch_scores_0(opened, command):
    env, _ = opened("merge")
    env.shell(command)
    assert env.get_reward() == 0.0


def test_what_an_edit_can_not_do_is_told(opened):
    env, _ = opened("merge")
    with pytest.raises(RuntimeError, match=r"'left' stands in rows.py \d+ times, not once"):
        env.edit("rows.py", "left", "right")
    with pytest.raises(RuntimeError, match=r"No such file or directory: '/tmp/repository/x.py'"):
        env.edit("x.py", "left", "right")


@pytest.mark.slow
def test_is_trained_on(terminal, tmp_path, run_script):
    """A few steps tell the edit that mends the mistake from two that do not."""
    (problem,) = (p for p in terminal.PROBLEMS if p["function"] == "clamp")
    texts = (problem["right"], "max(low, max(value, high))", "min(low, min(value, high))")
    edit = partial(call, "edit", file="arithmetic.py", old=problem["wrong"])
    right, *wrong = (edit(new=text) for text in texts)
    save_actor(tmp_path / "model", [right, *wrong])
    words = ["task=terminal", "policy.max_new_tokens=8", *FAST, "task.functions=[clamp]"]
    words += ["task.max_turns=1", "policy.show_tool_schemas=false"]
    words += [f"policy.model={tmp_path}/model", "train.num_steps=5"]
    words += ["collector.num_prompts=1", "collector.group_size=16"]
    done = run_script(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    out = Path(json.loads(done.stdout.strip().splitlines()[-1])["output_dir"])
    rewards = [line["reward"] for line in lines_of(out / "metrics.jsonl")]
    record = RunRecord(out)
    samples = [sample for step in record.steps for sample in record.samples(step.step)]
    for sample in samples:  # the first edit changes the text that another one looks for
        _, tag, calls = sample.messages[1]["content"].partition("<tool_call>")
        assert sample.reward == float((tag + calls).startswith(right))
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.3
