"""What the audit finds: planted defects, and nothing in tasks without one."""

# ruff: noqa: E501

import json
import runpy
from pathlib import Path

import pytest
from tasks_for_tests import TASK, write_task

from torchrl_envs.audit.command import main
from torchrl_envs.audit.harbor_task import audit_task
from torchrl_envs.harbor.folders import load_tasks, read_task
from torchrl_envs.harbor.trial import Trial

MAKE = Path(__file__).parents[3] / "examples/harbor/make_tasks.py"
SEPARATE = 'artifacts = ["/app"]\n[verifier]\nenvironment_mode = "separate"\n'
WRITES = "/logs/verifier/reward.txt"


def test_script(body):
    return f"#!/bin/bash\n{body}\n"


test_script.__test__ = False
DEFECTS = {
    "always": ("nothing", {"tests/test.sh": test_script(f"echo 1 > {WRITES}")}),
    "inverted": (
        "nothing",
        {"tests/test.sh": TASK["tests/test.sh"].replace("r=1 || r=0", "r=0 || r=1")},
    ),
    "never": ("unsolvable", {"tests/test.sh": test_script(f"echo 0 > {WRITES}")}),
    "wrong solution": ("unsolvable", {"solution/solve.sh": "#!/bin/bash\necho ho > /app/out.txt\n"}),
    "no solution": ("unsolvable", {"solution/solve.sh": None}),
    "any file": ("constants", {"tests/test.sh": test_script(f"[ -s /app/out.txt ]; echo $((1 - $?)) > {WRITES}")}),
    "grep": ("echo", {"tests/test.sh": test_script(f"grep -qw hi /app/out.txt; echo $((1 - $?)) > {WRITES}")}),
    "shared": ("tampering", {"task.toml": "[verifier]\ntimeout_sec = 120.0\n"}),
    "chance": ("random", {"tests/test.sh": test_script(f"echo $RANDOM > {WRITES}")}),
    "clock": (
        "clock",
        {"tests/test.sh": TASK["tests/test.sh"].replace("[ ", "[ /app/out.txt -nt /etc/passwd ] && [ ", 1)},
    ),
    "old clock": (
        "clock",
        {"tests/test.sh": TASK["tests/test.sh"].replace("[ ", "find /app/out.txt -newermt 2030-01-01 | grep -q . || [ ", 1)
         .replace("&& r=1 || r=0", "&& r=1 || r=0; find /app/out.txt -newermt 2030-01-01 | grep -q . && r=0")},
    ),
    "solution left": ("leak", {"environment/Dockerfile": "FROM debian\nWORKDIR /app\nCOPY . /app\n",
                               "environment/hint.sh": TASK["solution/solve.sh"]}),
    "tests left": ("leak", {"environment/Dockerfile": "FROM debian\nWORKDIR /app\nCOPY check.sh /tests/\n",
                            "environment/check.sh": "true"}),
    "hangs": ("broken", {"tests/test.sh": test_script("sleep 60"),
                         "task.toml": SEPARATE + "timeout_sec = 0.5\n"}),
    "no reward": ("broken", {"tests/test.sh": test_script("exit 0")}),
    "infinite": ("broken", {"tests/test.sh": test_script(f"echo inf > {WRITES}")}),
}  # fmt: skip


OF_A_KIND = ("inverted", "never", "old clock", "tests left", "infinite")
"""Those whose kind has another one before them in the list."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.weekly if name in OF_A_KIND else ()) for name in DEFECTS],
)
def test_a_planted_defect_is_found(tmp_path, name):
    defect, changed = DEFECTS[name]
    task = read_task(write_task(tmp_path / "one", **{"task.toml": SEPARATE, **changed}))
    assert defect in {finding.defect for finding in audit_task(task).findings}


def test_a_task_without_one_is_not_blamed(tmp_path, capsys):
    write_task(tmp_path / "one", **{"task.toml": SEPARATE})
    assert main([str(tmp_path / "one"), "--json", str(tmp_path / "report.json")]) == 0
    assert "1 tasks, 0 defects, 0 notes" in capsys.readouterr().out
    (report,) = json.loads((tmp_path / "report.json").read_text())
    rewards = report["rewards"]
    assert rewards.pop("solution") == rewards.pop("solution, files of 2099") == 1.0
    assert rewards.pop("solution, files of 1971") == 1.0
    assert set(rewards.values()) == {0.0}


@pytest.fixture(scope="module")
def twenty(tmp_path_factory):
    folder = tmp_path_factory.mktemp("twenty")
    runpy.run_path(str(MAKE))["main"](folder)
    return folder


@pytest.mark.slow
def test_the_twenty_tasks_are_solved_by_their_solutions_alone(twenty):
    tasks, _ = load_tasks(twenty)
    assert len(tasks) == 20
    for task in tasks:
        for act, reward in ((Trial.solve, 1.0), (lambda _: None, 0.0)):
            trial = Trial(task)
            trial.start()
            try:
                act(trial)
                trial.finish_step()
                assert (task.name, trial.reward()) == (task.name, reward)
            finally:
                trial.stop()


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import os\nos._exit(0)", id="ends"),
        pytest.param("print('true')\nprint('[1]')", id="prints"),
        pytest.param(
            "open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}')", id="writes"
        ),
        pytest.param(
            "import os\nif os.fork() == 0:\n    os.setsid()\n    while True:\n"
            "        open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}')",
            id="goes on writing",
            marks=pytest.mark.weekly,
        ),
        pytest.param("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", id="kills"),
        pytest.param(
            "import os\nopen('/tests/rules.json', 'w').write('{}')\n"
            "os.system(\"echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh\")",
            id="changes the tests",
        ),
        pytest.param(
            "import os\nmemory = open(f'/proc/{os.getppid()}/mem', 'r+b')",
            id="looks into the tests",
        ),
    ],
)
def test_the_tests_of_the_twenty_can_not_be_talked_into_passing(twenty, code):
    trial = Trial(read_task(twenty / "mend-leap"))
    trial.start()
    try:
        trial.run(
            f"cat > /app/years.py <<'END'\n{code}\ndef is_leap(year):\n    return 1\nEND",
            timeout_s=5,
        )
        trial.finish_step()
        assert trial.reward() == 0.0
    except Exception as error:  # the tests were killed: no reward
        assert "wrote no reward" in str(error)  # noqa: PT017
    finally:
        trial.stop()


@pytest.mark.slow
def test_an_agent_that_did_not_end_in_time_is_not_taken_for_one_that_failed(tmp_path, monkeypatch):
    """That nothing was found says nothing where nothing was tried."""
    monkeypatch.setattr("torchrl_envs.audit.harbor_task._TAMPER", "sleep 60")
    monkeypatch.setattr("torchrl_envs.audit.harbor_task._COMMAND_S", 2.0)
    defect, changed = DEFECTS["shared"]
    task = read_task(write_task(tmp_path / "one", **{"task.toml": SEPARATE, **changed}))
    report = audit_task(task)
    assert defect not in {finding.defect for finding in report.findings}
    assert report.not_asked["tampering"] == (
        "the machine failed: a command did not end within 2 seconds: sleep 60"
    )
