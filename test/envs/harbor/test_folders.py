"""What folders of tasks hold, and what is said of broken ones."""

import tarfile
import zipfile

import pytest
from tasks_for_tests import TASK, write_task

from torchrl_envs.harbor.folders import TaskFolderError, load_tasks, read_task, resolved
from torchrl_envs.tasks.by_name import make_task

STEPS = """
multi_step_reward_strategy = "final"
[agent]
timeout_sec = 9
[environment.env]
TOKEN = "${TOKEN:-none}"
[[steps]]
name = "first"
min_reward = 0.5
agent.timeout_sec = 5
[[steps]]
name = "second"
"""


def test_a_task(tmp_path):
    task = read_task(write_task(tmp_path / "one"))
    assert (task.name, task.has_steps, task.strategy) == ("one", False, "mean")
    (step,) = task.steps
    assert step.instruction == "Write the word hi to /app/out.txt.\n"  # without its canary
    assert (step.tests.timeout_s, step.timeout_s, step.tests.place) == (20.0, None, None)
    assert step.solution == task.folder / "solution"


def test_several_steps(tmp_path):
    folder = write_task(
        tmp_path / "two",
        **{
            "task.toml": STEPS,
            "steps/first/instruction.md": "one",
            "steps/second/instruction.md": "two",
            "steps/second/tests/test.sh": "exit",
        },
    )
    task = read_task(folder)
    first, second = task.steps
    assert (task.has_steps, task.strategy) == (True, "final")
    assert (first.timeout_s, second.timeout_s) == (5, 9)
    assert first.min_reward == {"reward": 0.5}
    assert first.tests.folders == (folder / "tests",)
    assert second.tests.folders == (folder / "tests", folder / "steps/second/tests")
    assert resolved(task.place.variables, {}) == {"TOKEN": "none"}
    assert resolved(task.place.variables, {"TOKEN": "x"}) == {"TOKEN": "x"}
    with pytest.raises(KeyError, match="needs the environment variable A"):
        resolved({"B": "${A}"}, {})


@pytest.mark.parametrize("kind", ["folder", "tar.gz", "zip"])
def test_a_data_set(tmp_path, kind):
    for name in ("b", "a"):
        write_task(tmp_path / "set/deep" / name)
    path = tmp_path / "set"
    if kind == "tar.gz":
        path = tmp_path / "set.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            archive.add(tmp_path / "set", "set")
    if kind == "zip":
        path = tmp_path / "set.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for file in (tmp_path / "set").rglob("*"):
                archive.write(file, file.relative_to(tmp_path))
    tasks, faults = load_tasks(path)
    assert [task.name for task in tasks] == ["a", "b"]
    assert tasks[0].place.dockerfile.read_text() == TASK["environment/Dockerfile"]
    assert not faults


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        pytest.param({"instruction.md": None}, "instruction.md is missing", id="no instruction"),
        pytest.param(
            {"instruction.md": "\ufeff \n"}, "instruction.md of the task is empty", id="empty"
        ),
        pytest.param({"tests/test.sh": None}, "has no tests/test.sh", id="no tests"),
        pytest.param({"task.toml": "[x"}, "task.toml is no TOML", id="no TOML"),
        pytest.param(
            {"task.toml": "verifier = 3"}, "verifier of the task must be a table", id="type"
        ),
        pytest.param(
            {"task.toml": "[verifier]\ntimeout_sec = -1"},
            "timeout_sec of .verifier. of the task must be a positive number, got -1",
            id="negative time",
        ),
        pytest.param(
            {"task.toml": "[environment]\nnetwork_mode = 'some'"},
            "network_mode must be",
            id="network",
        ),
        pytest.param(
            {"task.toml": "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = [1]"},
            "allowed_hosts must be names or addresses, got",
            id="hosts",
        ),
        pytest.param(
            {"task.toml": "[environment]\nallowed_hosts = ['x.org']"},
            "allowed_hosts are for network_mode = 'allowlist'",
            id="hosts without the mode",
        ),
        pytest.param({"task.toml": "[environment]\nos = 'windows'"}, "only Linux", id="windows"),
        pytest.param(
            {"task.toml": "[agent]\nnetwork_mode = 'no-network'"},
            r"the task network_mode=no-network is not that of \[environment\] \(public\)",
            id="network of the agent",
        ),
        pytest.param(
            {"task.toml": "[verifier]\nnetwork_mode = 'no-network'"},
            r"\[verifier\] of the task network_mode=no-network is not that",
            id="network of tests",
        ),
        pytest.param(
            {"task.toml": "[environment]\ngpus = 1\ngpu_types = ['H100']"},
            "gpu_types is not supported here",
            id="kinds of GPUs",
        ),
        pytest.param({"task.toml": "[[steps]]\nname = '../x'"}, "needs a name", id="step out"),
        pytest.param({"task.toml": "[[steps]]\nname = 'x'"}, "no folder steps/x", id="no step"),
        pytest.param(
            {"task.toml": "multi_step_reward_strategy = 'max'"}, "mean or final", id="strategy"
        ),
        pytest.param({"trajectory.json": "{}"}, "can't be loaded", id="prior context"),
        pytest.param({"task.toml": "artifacts = ['../x']"}, "an artifact", id="artifact"),
        pytest.param(
            {"task.toml": "[verifier]\nenvironment_mode = 'own'"}, "shared or separate", id="mode"
        ),
    ],
)
def test_a_broken_task_is_named_alone(tmp_path, changed, said):
    write_task(tmp_path / "set/broken", **changed)
    write_task(tmp_path / "set/good")
    with pytest.raises(TaskFolderError, match=said) as raised:
        load_tasks(tmp_path / "set")
    assert "1 of 2 tasks" in str(raised.value)
    tasks, faults = load_tasks(tmp_path / "set", skip_bad=True)
    assert [task.name for task in tasks] == ["good"]
    assert list(faults) == ["broken"]


def test_a_link_out_of_a_task_is_refused(tmp_path):
    folder = write_task(tmp_path / "one")
    (folder / "tests/secret").symlink_to("/etc/passwd")
    with pytest.raises(TaskFolderError, match="tests/secret is a link out of the task"):
        read_task(folder)


def test_what_is_no_data_set_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder or archive"):
        load_tasks(tmp_path / "nothing")
    with pytest.raises(TaskFolderError, match="holds no task"):
        load_tasks(tmp_path)
    (tmp_path / "x.tar").write_text("no archive")
    with pytest.raises(TaskFolderError, match="is no folder"):
        load_tasks(tmp_path / "x.tar")


def test_networks_of_phases_that_a_machine_can_keep(tmp_path):
    same = "[environment]\nnetwork_mode = 'no-network'\n[agent]\nnetwork_mode = 'no-network'\n"
    separate = "[verifier]\nenvironment_mode = 'separate'\nnetwork_mode = 'allowlist'\n"
    separate += "allowed_hosts = ['x.org']\nuser = 'bob'\n"
    task = read_task(write_task(tmp_path / "one", **{"task.toml": same + separate}))
    tests = task.steps[0].tests.place
    assert (task.place.network, task.place.users) == ("no-network", ())
    assert (tests.network, tests.allowed_hosts, tests.users) == ("allowlist", ("x.org",), ("bob",))


def test_keys_that_do_not_exist_are_told(tmp_path, caplog):
    slips = "own = 1\n[agent]\ntimout_sec = 5\n[[steps]]\nname = 'a'\nagents = {}\n"
    texts = {"task.toml": slips, "steps/a/instruction.md": "x"}
    write_task(tmp_path / "one", **texts)
    write_task(tmp_path / "two", **{"task.toml": "[agent]\ntimout_sec = 5\n"})
    make_task("harbor", dataset=str(tmp_path))
    (said,) = [record.getMessage() for record in caplog.records if "task.toml" in record.message]
    once = "(of 1 tasks)"
    assert said.endswith(f"agent.timout_sec (of 2 tasks), own {once}, steps.agents {once}")
