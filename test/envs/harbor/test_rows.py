"""Rows of a data set as tasks: what they become, how they are scored, and what is refused."""

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_envs.audit.command import main as audit_command
from torchrl_envs.harbor.folders import TaskFolderError
from torchrl_envs.harbor.rows import tasks_of_rows
from torchrl_envs.harbor.trial import Trial
from torchrl_envs.tasks.by_name import make_task

ROW = {"prompt": "Write the word hi to out.txt.", "tests": '[ "$(cat out.txt)" = hi ]'}


def scored(row, command, key="reward"):
    (task,), _ = tasks_of_rows([row])
    trial = Trial(task)
    trial.start()
    try:
        said = trial.run(command, timeout_s=20).stdout
        trial.finish_step()
        return said, trial.reward(key)
    finally:
        trial.stop()


@pytest.mark.parametrize(("word", "reward"), [("hi", 1.0), ("ho", 0.0)])
def test_the_reward_is_whether_the_tests_succeed(word, reward):
    assert scored(ROW, f"pwd; echo {word} > out.txt") == ("/app\n", reward)


def test_tests_that_write_a_reward_give_that():
    tests = "#!/usr/bin/env python3\nopen('/logs/verifier/reward.json', 'w').write('{\"x\": 0.25}')"
    assert scored({**ROW, "tests": f"{tests}\nraise SystemExit(1)"}, "true", key="x")[1] == 0.25


def test_files_setup_and_workdir_make_the_place():
    row = {**ROW, "files": {"a/b.txt": "text", "run": "#!/bin/sh\necho ran"}, "workdir": "/srv/x"}
    row |= {"setup": "echo made > made.txt\r\nls > seen.txt"}
    said, _ = scored(row, "pwd; cat a/b.txt made.txt; ./run; ls /tests /tmp/setup.sh; cat seen.txt")
    assert said == "/srv/x\ntextmade\nran\na\nmade.txt\nrun\nseen.txt\n"
    assert scored({**row, "files": json.dumps(row["files"])}, "cat a/b.txt")[0] == "text"


def test_tests_in_a_machine_of_their_own_see_the_working_directory_alone():
    row = {**ROW, "environment_mode": "separate", "files": {"given.txt": "x"}}
    row["tests"] = "[ ! -e /tmp/other ] && [ -e given.txt ] && ! pgrep -x sleep && " + row["tests"]
    left = "echo hi > out.txt; touch /tmp/other; sleep 99 > /dev/null 2>&1 &"
    assert scored(row, left)[1] == 1.0


def test_settings_are_those_of_the_columns():
    row = {**ROW, "image": "x/y:1", "workdir": "/w", "network_mode": "no-network", "cpus": 0.5}
    row |= {"memory_mb": "512", "timeout_s": 7, "tests_timeout_s": "2.5", "name": "one", "gpus": 1}
    row |= {"solution": "echo hi > out.txt", "other": object()}
    (task,), _ = tasks_of_rows([row])
    place, step = task.place, task.steps[0]
    assert (place.image, place.workdir, place.network) == ("x/y:1", "/w", "no-network")
    assert (place.cpus, place.memory_mb, place.gpus, place.dockerfile) == (0.5, 512, 1, None)
    assert (task.name, step.timeout_s, step.tests.timeout_s) == ("one", 7, 2.5)
    assert (step.solution / "solve.sh").read_text() == "#!/bin/bash\necho hi > out.txt"
    (task,), _ = tasks_of_rows([{**row, "setup": "true"}])  # which takes an image of its own
    assert (task.place.image, task.place.dockerfile.read_text().splitlines()[0]) == (
        None,
        "FROM x/y:1",
    )


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"tests": None}, "row 1: a task needs the column tests, a text"),
        ({"prompt": [{"role": "user", "content": "x"}]}, "row 1: prompt must be a text, got"),
        ({"image": "a", "dockerfile": "FROM b"}, "row 1: it has image and dockerfile"),
        (
            {"files": {"../x": ""}},
            "below the working directory, got '../x'",
        ),
        ({"files": {"/x": ""}}, "below the working directory, got '/x'"),
        ({"files": {"a": "", "a/b": ""}}, "row 1: files: 'a/b' can't be made"),
        ({"files": "{"}, "row 1: files is a text that is no JSON"),
        ({"files": ["x"]}, "row 1: files must be texts by their path, got"),
        ({"cpus": "many"}, "row 1: cpus must be a number, got 'many'"),
        (
            {"memory_mb": -1},
            r"row 1: memory_mb of .* must be a positive number, got -1",
        ),
        ({"network_mode": "some"}, "row 1: .*network_mode must be no-network, public or allowlist"),
    ],
)
def test_a_row_that_is_no_task_is_named_or_left_out(row, what):
    with pytest.raises(TaskFolderError, match=what):
        tasks_of_rows([ROW, {**ROW, **row}])
    tasks, faults = tasks_of_rows([ROW, {**ROW, **row}], skip_bad=True)
    assert [task.name for task in tasks] == ["row 0"]
    assert [*faults] == ["row 1"]


def test_the_audit_takes_a_file_of_rows_and_prints_each_as_it_is_done(tmp_path, capsys):
    sound = {**ROW, "environment_mode": "separate", "solution": "echo hi > out.txt"}
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(sound)}\n{json.dumps({'prompt': 'x'})}\n")
    assert audit_command([str(path), "--repeats", "1"]) == 1
    _, row, broken, *_ = capsys.readouterr().out.splitlines()
    assert row.split() == ["row", "0", "0", "1", "0", *row.split()[5:-1], "none"]
    assert broken.startswith("row 1: broken: row 1: a task needs the column tests")


NAMES = st.text(string.ascii_letters + ".-_ '\"$\\", min_size=1, max_size=12)


@given(
    st.text(min_size=1).filter(lambda x: x.strip() and x.isprintable()),
    st.dictionaries(NAMES.filter(lambda x: x.strip(".")), st.text(), max_size=3),
    st.text(min_size=1) | st.just("\x7f\U0001f600"),
)
def test_texts_arrive_as_they_are(prompt, files, name):
    (task,), _ = tasks_of_rows([{**ROW, "prompt": prompt, "files": files, "name": name}])
    assert (task.steps[0].instruction, task.name) == (prompt, name)
    for path, text in files.items():
        found = task.place.folder / "files" / path
        assert found.read_bytes().decode() == text


def test_the_folder_goes_with_its_tasks():
    tasks, _ = tasks_of_rows([ROW, ROW])
    top = tasks[0].folder.parent
    tasks.pop()
    assert top.is_dir()
    tasks.pop()
    assert not top.exists()


def test_a_file_of_rows_is_a_data_set(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps({**ROW, 'name': name})}\n" for name in "abc"))
    task = make_task("harbor", dataset=str(path), num_held_out=1)
    rows = [*task.train_rows, *task.held_out_rows]
    assert [(row["name"], row["task"]) for row in rows] == [
        ("a", "row-000000"),
        ("b", "row-000001"),
        ("c", "row-000002"),
    ]
    with pytest.raises(ValueError, match="row 0: a task needs the column tests"):
        make_task("harbor", dataset=[{"prompt": "x"}])
