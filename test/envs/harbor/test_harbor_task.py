"""The task ``harbor``: by the policy with a shell, and by agents that people use."""

import json
import shutil

import pytest
from tasks_for_tests import write_task
from torchrl.envs.transforms import Compose

from torchrl_data import read_conversations
from torchrl_data.keys import PROMPT
from torchrl_envs import AgentProgram, ChatEnv, DataLoadingPrimer, StepCounter
from torchrl_envs.agents.known import AGENTS, find_agent
from torchrl_envs.harbor.folders import load_tasks
from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.harbor import named_program
from torchrl_envs.tasks.task import TaskEnv
from torchrl_envs.testing.scripted_turns import ScriptedTurns


def call(name, **arguments):
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def played(task, tokenizer, turns):
    env = TaskEnv(task, tokenizer=tokenizer, show_schemas=False)
    try:
        last = env.rollout(9, ScriptedTurns(tokenizer, turns), break_when_any_done=True)
    finally:
        env.close()
    return last[..., -1]["next"]


def messages_of(last):
    (row,) = read_conversations(last, PROMPT, who="test")
    return [(m["role"], m["content"]) for m in row.messages(0)]


def test_the_policy_has_a_shell(tmp_path, chatml_tokenizer):
    write_task(tmp_path / "one")
    task = make_task("harbor", dataset=str(tmp_path), max_turns=4)
    turns = [
        call("shell", command="ls; exit 3"),
        call("shell", command="echo hi > out.txt"),
        "done",
    ]
    last = played(task, chatml_tokenizer, turns)
    assert last["reward"].item() == 1.0
    results = [content for role, content in messages_of(last) if role == "tool"]
    assert results[0] == "data.txt\n\n[exit status 3]"
    assert played(task, chatml_tokenizer, ["done"])["reward"].item() == 0.0


def test_steps_are_asked_for(tmp_path, chatml_tokenizer):
    steps = {
        "task.toml": "[[steps]]\nname = 'one'\n[[steps]]\nname = 'two'\n",
        "instruction.md": None,
        "steps/one/instruction.md": "First.",
        "steps/two/instruction.md": "Second.",
    }
    write_task(tmp_path / "two", **steps)
    task = make_task("harbor", dataset=str(tmp_path))
    turns = [call("shell", command="echo hi > out.txt"), call("next_step")]
    last = played(task, chatml_tokenizer, [*turns, call("shell", command="rm out.txt"), "done"])
    assert ("tool", "Second.") in messages_of(last)
    assert last["reward"].item() == 0.5


def test_tests_that_give_nothing_lose_their_own_rollout_alone(tmp_path, chatml_tokenizer):
    write_task(tmp_path / "one", **{"tests/test.sh": "exit"})
    last = played(make_task("harbor", dataset=str(tmp_path)), chatml_tokenizer, ["done"])
    assert not last["scorable"].item()
    assert "the tests wrote no reward.json" in str(last["reward_errors"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "needs a dataset"),
        ({"machine": "vmware"}, "machine must be one of"),
        ({"agent": "hal"}, "agent must be one of claude-code, codex"),
        ({"agent": "gemini-cli"}, "Gemini's protocol"),
        ({"num_held_out": 1}, "too few to hold 1 out"),
        ({"command_timeout_s": 0}, r"command_timeout_s must be a finite number in \(0, inf\)"),
        ({"ignored_parameters": ["seed"]}, "set agent, too"),
    ],
)
def test_settings_that_can_not_work_are_refused(tmp_path, settings, said):
    write_task(tmp_path / "one")
    given = {"dataset": str(tmp_path), **settings} if settings else {}
    with pytest.raises(ValueError, match=said):
        make_task("harbor", **given)


def test_tasks_that_the_machine_can_not_run_are_named_or_left_out(tmp_path):
    write_task(tmp_path / "good")
    write_task(tmp_path / "gpu", **{"task.toml": "[environment]\ngpus = 1\n"})
    with pytest.raises(ValueError, match="gpu: the task needs a GPU"):
        make_task("harbor", dataset=str(tmp_path))
    task = make_task("harbor", dataset=str(tmp_path), skip_bad_tasks=True)
    assert [row["name"] for row in task.train_rows] == ["good"]


def test_an_agent_that_is_not_installed_is_named(tmp_path, monkeypatch):
    write_task(tmp_path / "one")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match="'codex' is not on PATH: `npm install -g @openai/c"
    ):
        named_program("codex", {})


SAID = {  # what a model would have to say for each agent to run a command, and to end
    "claude-code": [call("Bash", command="echo hi > /app/out.txt", description="x"), "done"],
    "codex": [call("exec_command", cmd="echo hi > /app/out.txt"), "done"],
    "mini-swe-agent": [
        call("bash", command="echo hi > /app/out.txt"),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ],
    "opencode": [call("bash", command="echo hi > /app/out.txt", description="x"), "done"],
    "qwen-code": [
        call("run_shell_command", command="echo hi > /app/out.txt", is_background=False),
        "done",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(AGENTS))
def test_an_agent_as_people_install_it_does_a_task(tmp_path, chatml_tokenizer, name):
    """Each runs inside the machine, and its two requests are turns of one row."""
    if shutil.which(AGENTS[name].program) is None:
        pytest.skip(f"{name} is not installed: {AGENTS[name].install}")
    write_task(tmp_path / "one")
    tasks = {str(task.folder): task for task in load_tasks(tmp_path)[0]}
    agent = AgentProgram(
        named_program(name, tasks), ignored_parameters=find_agent(name).ignored, timeout_s=120.0
    )
    data = DataLoadingPrimer([{"prompt": "x", "task": folder} for folder in tasks])
    env = ChatEnv(batch_size=1, tokenizer=chatml_tokenizer).append_transform(
        Compose(data, agent, StepCounter(max_steps=8))
    )
    try:
        policy = ScriptedTurns(chatml_tokenizer, SAID[name])
        last = env.rollout(9, policy, break_when_any_done=True)[..., -1]["next"]
    finally:
        env.close()
    assert last["stop_reason"] == ["environment_done"]
    assert last["reward"].item() == 1.0
    (episode,) = last["episode"]
    assert len(episode.rows) == 1
    assert last["num_tool_calls"].item() == sum("<tool_call>" in turn for turn in SAID[name])
