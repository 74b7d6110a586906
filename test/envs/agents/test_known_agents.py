"""Agents that people use, as they install them, in both sandboxes of a command."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from agents_for_tests import reason_of, said
from torchrl.envs.transforms import Compose

from torchrl_envs import AgentCommand, AgentProgram, ChatEnv, DataLoadingPrimer, StepCounter
from torchrl_envs.agents.known import AGENTS, installed
from torchrl_envs.testing.scripted_turns import ScriptedTurns

# Starts the agent, as a child, and scores what it did.
HARNESS = """
import json, os, subprocess, sys
row = json.loads(sys.stdin.readline())
from torchrl_envs.agents.agent_command import AgentEndpoint
from torchrl_envs.agents.known import AGENTS, started
endpoint = AgentEndpoint(*(os.environ["OPENAI_" + x] for x in ("BASE_URL", "API_KEY", "MODEL")))
agent = started(AGENTS[row["agent"]], endpoint, "Write hi to out.txt.", row["program"])
os.makedirs(os.environ["TMPDIR"] + "/work")
os.chdir(os.environ["TMPDIR"] + "/work")
os.environ["PWD"] = os.getcwd()  # which some ask instead
for name, text in {**agent.files, **row["files"]}.items():
    path = os.path.join(os.environ["HOME"], name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    open(path, "w").write(text)
done = subprocess.run(agent.command, env={**os.environ, **agent.variables},
    stdin=subprocess.DEVNULL, capture_output=True, text=True)
if not os.path.exists("out.txt"):
    sys.exit(repr(done))
print(float(open("out.txt").read() == "hi\\n"))
"""


def call(name, **arguments):
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


SAID = {  # what a model would have to say for each agent to run a command, and to end
    "claude-code": call("Bash", command="echo hi > out.txt", description="x"),
    "codex": call("exec_command", cmd="echo hi > out.txt"),
    "opencode": call("bash", command="echo hi > out.txt", description="x"),
    "qwen-code": call("run_shell_command", command="echo hi > out.txt", is_background=False),
}
# Under Landlock there are no pseudo-terminals, in which it starts its shell otherwise.
FILES = {
    "qwen-code": {".qwen/settings.json": '{"tools": {"shell": {"enableInteractiveShell": false}}}'}
}


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["bubblewrap", "landlock"])
@pytest.mark.parametrize("name", sorted(SAID))
def test_an_agent_works_in_a_sandbox(chatml_tokenizer, tmp_path, name, isolation):
    """Its requests are turns of one row, and its shell writes in a folder of its own."""
    if shutil.which(AGENTS[name].program) is None:
        pytest.skip(f"{name} is not installed: {AGENTS[name].install}")
    program, folders = installed(AGENTS[name])
    project = str(Path(__file__).parents[3])
    command = AgentCommand(
        [sys.executable, "-c", HARNESS],
        environment={"PYTHONPATH": project},
        folder=tmp_path,
        # Programs made with Bun read /proc/self/maps as they start.
        sandbox=[project, *folders, "/proc"],
        isolation=isolation,
    )
    agent = AgentProgram(command, ignored_parameters=AGENTS[name].ignored, timeout_s=120.0)
    rows = [{"prompt": "x", "agent": name, "program": program, "files": FILES.get(name, {})}]
    env = ChatEnv(batch_size=1, tokenizer=chatml_tokenizer).append_transform(
        Compose(DataLoadingPrimer(rows), agent, StepCounter(max_steps=8))
    )
    try:
        policy = ScriptedTurns(chatml_tokenizer, [SAID[name], "done"])
        last = env.rollout(9, policy, break_when_any_done=True)[..., -1]["next"]
    finally:
        env.close()
    assert (reason_of(last), last["reward"].item()) == ("environment_done", 1.0)
    answers = [text for role, text in said(last) if role == "assistant"]
    assert answers[-2:] == [SAID[name], "done"]
