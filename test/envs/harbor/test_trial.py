"""How tasks are scored: by their own tests, step by step, and in machines of their own."""

import pytest
from tasks_for_tests import write_task

from torchrl_envs.harbor.folders import read_task
from torchrl_envs.harbor.trial import NoRewardError, Trial, read_rewards


@pytest.fixture
def begun(tmp_path):
    """Begins the task whose texts are changed."""
    trials = []

    def begin(**changed):
        trials.append(Trial(read_task(write_task(tmp_path / f"task{len(trials)}", **changed))))
        trials[-1].start()
        return trials[-1]

    yield begin
    for trial in trials:
        trial.stop()


def scored(trial, *commands):
    for command in commands:
        trial.run(command, timeout_s=10)
        trial.finish_step()
    return trial.reward()


@pytest.mark.parametrize(("word", "reward"), [("hi", 1.0), ("ho", 0.0)])
def test_the_tests_of_the_task_score_it(begun, word, reward):
    assert scored(begun(), f"echo {word} > out.txt") == reward


def test_rewards_and_tests_of_the_agent_are_removed_before(begun):
    trial = begun()
    tampered = "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh;"
    tampered += "echo '{\"reward\": 1}' > /logs/verifier/reward.json"
    assert scored(trial, tampered) == 0.0
    elsewhere = begun()
    assert (
        scored(elsewhere, "ln -s /etc /tests; rm -rf /logs/verifier; ln -s /app /logs/verifier")
        == 0
    )


def test_tests_in_a_machine_of_their_own_see_the_artifacts_alone(begun):
    """A program that the agent left running, and its other files, are not there."""
    texts = {
        "task.toml": 'artifacts = ["/app/out.txt"]\n[verifier]\nenvironment_mode = "separate"\n',
        "tests/test.sh": "#!/bin/bash\n"
        "[ -e /app/other.txt ] && exit\n"
        "pgrep -f 'sleep 77' && exit\n"
        "[ $(cat /app/out.txt) = hi ] && echo 1 > /logs/verifier/reward.txt\n",
    }
    command = "echo hi > out.txt; echo x > other.txt; sleep 77 > /dev/null 2>&1 &"
    assert scored(begun(**texts), command) == 1.0


STEPS = {
    "task.toml": "[[steps]]\nname = 'one'\nmin_reward = 0.5\n[[steps]]\nname = 'two'\n",
    "instruction.md": None,
    "tests/test.sh": None,
    "steps/one/instruction.md": "Write 1.",
    "steps/two/instruction.md": "Write 2.",
    "steps/one/tests/test.sh": "cat /app/n.txt > /logs/verifier/reward.txt",
    "steps/two/tests/test.sh": "cat /app/n.txt > /logs/verifier/reward.txt",
    "steps/two/workdir/more.txt": "more",
    "steps/two/workdir/setup.sh": "[ ! -e /tests ] && cp more.txt set_up.txt",
}


def test_steps_go_on_with_the_same_machine(begun):
    trial = begun(**STEPS)
    assert trial.step.instruction == "Write 1."
    trial.run("echo 1 > n.txt", timeout_s=5)
    assert trial.finish_step() == "Write 2."
    assert trial.run("cat n.txt set_up.txt; ls /logs/verifier", timeout_s=5).stdout == "1\nmore"
    trial.run("echo 0.5 > n.txt", timeout_s=5)
    assert trial.finish_step() is None
    assert trial.rewards == [{"reward": 1.0}, {"reward": 0.5}]
    assert trial.reward() == 0.75


def test_a_step_below_its_least_reward_ends_the_task(begun):
    trial = begun(**STEPS)
    trial.run("echo 0.25 > n.txt", timeout_s=5)
    assert trial.finish_step() is None
    assert trial.is_over
    assert trial.reward() == 0.25


def test_the_last_step_counts_where_the_task_says_so(begun):
    final = "multi_step_reward_strategy = 'final'\n" + STEPS["task.toml"]
    trial = begun(**{**STEPS, "task.toml": final})
    assert scored(trial, "echo 1 > n.txt", "echo 0.5 > n.txt") == 0.5


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 0", "the tests wrote no reward.json and no reward.txt"),
        ("sleep 60", "the tests did not end within 1 s"),
        ("echo much > /logs/verifier/reward.txt", "reward.txt can't be read"),
        ("echo nan > /logs/verifier/reward.txt", "finite numbers"),
        ("echo '{}' > /logs/verifier/reward.json", "an object of numbers"),
        ('echo \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json', "no 'reward': set reward_key"),
    ],
)
def test_tests_that_give_no_reward_are_named(begun, script, said):
    texts = {
        "tests/test.sh": f"#!/bin/bash\n{script}\n",
        "task.toml": "[verifier]\ntimeout_sec = 1\n",
    }
    with pytest.raises(NoRewardError, match=said):
        scored(begun(**texts), "true")


def test_reward_json_counts_before_reward_txt(begun):
    script = (
        'echo 0 > /logs/verifier/reward.txt; echo \'{"reward": 0.5, "x": 1}\' > /logs/verifier/'
    )
    assert scored(begun(**{"tests/test.sh": f"#!/bin/bash\n{script}reward.json\n"}), "true") == 0.5
    assert read_rewards("reward.txt", b" 0.25\n", "t") == {"reward": 0.25}


def test_the_agent_has_the_time_of_the_task(begun):
    trial = begun(**{"task.toml": "[agent]\ntimeout_sec = 0.5\n"})
    assert trial.run("sleep 20", timeout_s=20).status is None
    with pytest.raises(TimeoutError, match=r"time \(0.5 s\) is over"):
        trial.run("true", timeout_s=20)


@pytest.mark.parametrize(("command", "is_healthy"), [("test -e data.txt", True), ("false", False)])
def test_a_machine_has_to_be_healthy(begun, command, is_healthy):
    health = f"[environment.healthcheck]\ncommand = '{command}'\ninterval_sec = 0.01\nretries = 2\n"
    if is_healthy:
        assert scored(begun(**{"task.toml": health}), "true") == 0.0
    else:
        with pytest.raises(NoRewardError, match="not healthy"):
            begun(**{"task.toml": health})
