"""How programs run, and how they and their episodes end."""

import asyncio
import os
import socket
import sys
import threading
import time

import openai
import psutil
import pytest
from agents_for_tests import (
    COMMAND,
    ROWS,
    asks_once,
    async_client_of,
    play,
    reason_of,
    said,
)
from torchrl.envs.transforms import Compose

from torchrl_envs import AgentCommand, AgentProgram, ChatEnv, DataLoadingPrimer, StepCounter
from torchrl_envs.agents.agent_sandbox import WeakerSandboxWarning
from torchrl_envs.sandbox import ProgramLimits, SandboxUnavailableError, program_check, sandbox
from torchrl_envs.tasks.agent_task import agent_task
from torchrl_envs.testing.scripted_turns import ScriptedTurns


def fails(endpoint, *, before):
    if not before:
        asks_once(endpoint)
    raise KeyError("lost")


def asks_for_ever(endpoint):
    while True:
        asks_once(endpoint)


def asks_three_times(endpoint):
    for number in range(3):
        try:
            asks_once(endpoint)
        except openai.PermissionDeniedError as error:
            return 0.25 * number if "the episode is over: max_steps" in str(error) else None
    return None


def sleeps(endpoint):
    asks_once(endpoint)
    time.sleep(30)


ROW_BEFORE = [{"prompt": "x", "before": True}]
ROW_AFTER = [{"prompt": "x", "before": False}]


@pytest.mark.parametrize(
    ("program", "rows", "options", "reason", "reward"),
    [
        (fails, ROW_BEFORE, {}, "environment_error: agent: KeyError", None),
        (fails, ROW_AFTER, {}, "environment_error: agent: KeyError", None),
        (fails, ROW_AFTER, {"error_reward": -1.0}, "environment_done", -1.0),
        (lambda _: 1.0, ROWS, {}, "environment_error: agent: RuntimeError: it ended", None),
        (asks_for_ever, ROWS, {}, "max_steps", 0.0),
        (asks_for_ever, ROWS, {"cut_reward": -0.5}, "max_steps", -0.5),
        (asks_for_ever, ROWS, {"cut_reward": None}, "max_steps", None),
        (asks_three_times, ROWS, {}, "max_steps", 0.5),
        (sleeps, ROWS, {"timeout_s": 0.3}, "environment_error: agent: CallTimeout", None),
        (lambda e: asks_once(e) and "much", ROWS, {}, "environment_done", None),
    ],
)
def test_how_an_episode_ends(chatml_tokenizer, program, rows, options, reason, reward):
    agent = AgentProgram(program, **{"timeout_s": 20.0, "end_timeout_s": 5.0, **options})
    env = ChatEnv(batch_size=1, tokenizer=chatml_tokenizer).append_transform(
        Compose(DataLoadingPrimer(rows, group_size=1), agent, StepCounter(max_steps=2))
    )
    try:
        last = env.rollout(9, ScriptedTurns(chatml_tokenizer, ["one"]))[..., -1]["next"]
    finally:
        env.close()
    assert reason_of(last).startswith(reason)
    assert last["scorable"].item() == (reward is not None)
    if reward is not None:
        assert last["reward"].item() == reward


@pytest.mark.parametrize(
    ("script", "reason", "reward"),
    [
        (COMMAND, "environment_done", 1.0),
        (COMMAND + "\nprint('bye')", "environment_error: agent: AgentProgramError: python", None),
        (COMMAND + "\nsys.exit('no luck')", "environment_error: agent: AgentProgramError", None),
    ],
)
def test_a_command_is_a_program(chatml_tokenizer, script, reason, reward):
    last = play(chatml_tokenizer, AgentCommand([sys.executable, "-c", script]), ["5"])
    assert reason_of(last).startswith(reason)
    assert last["scorable"].item() == (reward is not None)
    assert said(last) == [("user", "What is 2 + 3?"), ("assistant", "5")]
    if "no luck" in script:
        assert "ended with status 1: no luck" in reason_of(last)


@pytest.mark.parametrize(
    "attack", ["", "os.kill(os.getppid(), signal.SIGSTOP)", "os.kill(os.getppid(), signal.SIGKILL)"]
)
def test_a_command_is_killed_with_what_it_started(chatml_tokenizer, tmp_path, attack):
    """One too that kills, or stops, the process that watches over it."""
    pids = tmp_path / "pids"
    script = COMMAND.replace(
        'print("thinking")',
        f"""
import signal, subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)  # hides
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
{attack}
time.sleep(600)
""",
    )
    command = AgentCommand([sys.executable, "-c", script])
    last = play(chatml_tokenizer, command, ["5"], timeout_s=3.0)
    error = "AgentProgramError" if "SIGKILL" in attack else "CallTimeout"
    assert reason_of(last).startswith(f"environment_error: agent: {error}")
    deadline = time.monotonic() + 20
    for pid in map(int, pids.read_text().split()):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie":
            assert time.monotonic() < deadline
            time.sleep(0.05)


ESCAPES = """
import pathlib, signal, socket, subprocess, urllib.request
def reached(attempt, *arguments):
    try:
        return attempt(*arguments) is not None
    except OSError:
        return False
trainer, other = map(int, os.environ["CANARIES"].split())
wrong = [name for name, found in {
    "its files are read": not reached(pathlib.Path("kept/notes").read_text),
    "those named are read": not reached(pathlib.Path(os.environ["MORE"]).read_text),
    "it writes": not reached(pathlib.Path(os.environ["TMPDIR"], "x").write_text, "x"),
    "other files": reached(pathlib.Path(os.environ["SECRET"]).read_text),
    "write": reached(pathlib.Path("kept/notes").write_text, "x"),
    "variables": "OF_THE_TRAINER" in os.environ,
    "another port": reached(socket.create_connection, ("127.0.0.1", other), 2),
    "an address": reached(socket.create_connection, ("1.1.1.1", 80), 2),
    "a process": reached(os.kill, trainer, 0),
    "processes": reached(os.listdir, "/proc")
        and sum(name.isdigit() for name in os.listdir("/proc")) > 9,
    "mount": not subprocess.run(["mount", "-o", "remount,rw", "/usr"], stderr=-3).returncode,
}.items() if found]
if wrong: sys.exit(str(wrong))
"""


@pytest.mark.parametrize("isolation", ["bubblewrap", "landlock"])
def test_a_command_in_a_sandbox_reaches_its_policy_alone(
    chatml_tokenizer, tmp_path, monkeypatch, isolation
):
    monkeypatch.setenv("OF_THE_TRAINER", "secret")
    folder, more = tmp_path / "agent", tmp_path / "more"
    for path in (folder / "kept", more):
        path.mkdir(parents=True)
        (path / "notes").write_text("x")
    (folder / "agent.py").write_text(COMMAND.replace('print("thinking")', ESCAPES))
    (tmp_path / "secret").write_text("x")
    with socket.create_server(("127.0.0.1", 0)) as other:
        told = {
            "CANARIES": f"{os.getpid()} {other.getsockname()[1]}",
            "MORE": f"{more}/notes",
            "SECRET": f"{tmp_path}/secret",
        }
        own = {"environment": told, "sandbox": [more], "isolation": isolation}
        command = AgentCommand(["python", "agent.py"], folder=folder, **own)
        last = play(chatml_tokenizer, command, ["5"])
    assert command.isolation == isolation
    assert (reason_of(last), last["reward"].item()) == ("environment_done", 1.0)
    assert (folder / "kept/notes").read_text() == "x"
    monkeypatch.chdir(tmp_path)
    nobody = AgentCommand(["./nobody"], sandbox=True, isolation=isolation)
    lost = play(chatml_tokenizer, nobody, ["5"])
    assert "nobody ended with status 127: ./nobody: No such file" in reason_of(lost)


TAKES = {
    "memory_bytes = 104857600": "held = 'x' * (400 << 20)",
    "num_processes = 16": """
import subprocess
children = [subprocess.Popen(["sleep", "60"]) for _ in range(60)]""",
    "No space left": "open('/tmp/x', 'wb').write(bytes(40 << 20))",
}


@pytest.mark.parametrize("limit", TAKES)
def test_limits_bind_in_bubblewrap(chatml_tokenizer, limit):
    limits = ProgramLimits(memory_bytes=100 << 20, num_processes=16, disk_bytes=8 << 20)
    script = COMMAND.replace('print("thinking")', f"{TAKES[limit]}\nimport time; time.sleep(60)")
    command = AgentCommand(
        [sys.executable, "-c", script], sandbox=True, isolation="bubblewrap", limits=limits
    )
    assert limit in reason_of(play(chatml_tokenizer, command, ["5"]))


def test_both_sandboxes_record_the_same_tokens(chatml_tokenizer, tmp_path):
    """And the same as a command without one, from the row's prompt to its reward."""
    recorded = []
    for options in ({}, {"isolation": "bubblewrap"}, {"isolation": "landlock"}):
        command = AgentCommand(
            [sys.executable, "-c", COMMAND], folder=tmp_path, sandbox=bool(options), **options
        )
        last = play(chatml_tokenizer, command, ["5"])
        (episode,) = last["episode"]
        (row,) = episode.rows
        own = row.token_ids(0).tolist(), row.assistant_mask(0).tolist(), last["reward"].item()
        recorded.append(own)
    assert recorded[0] == recorded[1] == recorded[2]
    assert recorded[0][2] == 1.0
    assert sum(recorded[0][1]) > 0


@pytest.mark.parametrize("isolation", ["bubblewrap", "landlock"])
def test_a_sandbox_ends_with_all_that_a_command_started(chatml_tokenizer, isolation):
    script = COMMAND.replace(
        'print("thinking")',
        """
import subprocess, time
subprocess.Popen(["sleep", "61.0437"], start_new_session=True)
time.sleep(60.0437)
""",
    )
    command = AgentCommand([sys.executable, "-c", script], sandbox=True, isolation=isolation)
    last = play(chatml_tokenizer, command, ["5"], timeout_s=3.0)
    assert reason_of(last).startswith("environment_error: agent: CallTimeout")
    (episode,) = last["episode"]
    assert episode.metrics["logged_extra"] == {"isolation": isolation}
    deadline = time.monotonic() + 20
    while any(
        "61.0437" in " ".join(each.info["cmdline"] or ())
        for each in psutil.process_iter(["cmdline"])
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_sandbox_that_shows_too_much_or_is_not_there_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="won't offer"):
        AgentCommand(["python"], folder=os.path.expanduser("~"), sandbox=True)
    assert AgentCommand(["python"], sandbox=[]).isolation != "none", "nothing more is shown"
    assert AgentCommand(["python"]).isolation == "none"
    for option in ({"isolation": "landlock"}, {"limits": ProgramLimits()}):
        with pytest.raises(ValueError, match="are of a sandbox, and sandbox=False"):
            AgentCommand(["python"], **option)
    with pytest.raises(ValueError, match="must be one of 'bubblewrap', 'landlock' and None"):
        AgentCommand(["python"], sandbox=True, isolation="none")
    with pytest.raises(ValueError, match=r"ProgramLimits\.num_processes must be an integer"):
        ProgramLimits(num_processes=0)
    with pytest.raises(ValueError, match="not a directory"):
        AgentCommand(["python"], sandbox=["no/such/folder"])
    with pytest.raises(TypeError, match=r"sandbox=data must be a list of folders, \[data\]"):
        AgentCommand(["python"], sandbox="data")
    with pytest.raises(ValueError, match="prints_reward, sandbox, isolation and limits are for"):
        agent_task(program="math:sqrt", dataset=ROWS, sandbox=True)
    confined = {
        "command": ["true"],
        "dataset": [*ROWS, {**ROWS[0], "prompt": "other"}],
        "sandbox": True,
    }
    with pytest.raises(TypeError, match=r"limits has no setting 'memory'.*mean 'memory_bytes'\?"):
        agent_task(**confined, limits={"memory": 1})
    with pytest.raises(ValueError, match="memory_bytes must be an integer of at least"):
        agent_task(**confined, limits={"memory_bytes": 1})
    task = agent_task(**confined, limits={"memory_bytes": 1 << 30}, num_held_out=1)
    (agent,) = task.tools(None)
    assert agent.program._sandbox.limits == ProgramLimits(memory_bytes=1 << 30)
    monkeypatch.setattr(sandbox, "_verified", {})
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SandboxUnavailableError, match="bubblewrap"):
        AgentCommand([sys.executable], sandbox=True, isolation="bubblewrap")
    with pytest.warns(WeakerSandboxWarning, match="enforces less than bubblewrap"):
        command = AgentCommand([sys.executable], sandbox=True)
    assert command.isolation == "landlock"
    monkeypatch.setattr(program_check, "failing_program_checks", lambda: ["no servers"])
    with pytest.raises(SandboxUnavailableError, match="landlock: these do not hold here: no serv"):
        AgentCommand([sys.executable], sandbox=True)


LEAVES = threading.Event()


async def raises_at_once(endpoint):
    raise KeyError("its bug")


async def returns_at_once(endpoint):
    return 1.0


async def exits(endpoint):
    async with async_client_of(endpoint) as client:
        chat = [{"role": "user", "content": "x"}]
        await client.chat.completions.create(model="any", messages=chat)
    sys.exit("enough")


def gives_a_coroutine(endpoint):
    return asks(endpoint)


async def asks(endpoint):
    async with async_client_of(endpoint) as client:
        chat = [{"role": "user", "content": "x"}]
        reply = await client.chat.completions.create(model="any", messages=chat)
    asyncio.get_running_loop().run_in_executor(None, LEAVES.wait, 60)  # nobody waits for that
    return float(reply.choices[0].message.content == "one")


@pytest.mark.parametrize(
    ("program", "reason", "reward"),
    [
        (raises_at_once, "environment_error: agent: KeyError: 'its bug'", None),
        (returns_at_once, "environment_error: agent: RuntimeError: it ended before", None),
        (exits, "environment_error: agent: SystemExit: enough", None),
        (gives_a_coroutine, "environment_done", 1.0),
    ],
)
def test_the_end_of_an_async_program_is_heard_at_once(chatml_tokenizer, program, reason, reward):
    LEAVES.clear()
    last = play(chatml_tokenizer, program, ["one"])  # and not by a deadline
    LEAVES.set()
    assert reason_of(last).startswith(reason)
    assert last["scorable"].item() == (reward is not None)


def test_an_async_program_that_is_given_up_is_cancelled(chatml_tokenizer):
    ended = threading.Event()

    async def program(endpoint):
        async with async_client_of(endpoint) as client:
            chat = [{"role": "user", "content": "x"}]
            await client.chat.completions.create(model="any", messages=chat)
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    last = play(chatml_tokenizer, program, ["one"], timeout_s=0.5)
    assert reason_of(last).startswith("environment_error: agent: CallTimeout")
    assert ended.wait(20)


def test_columns_may_be_called_as_arguments_are(chatml_tokenizer):
    seen = []

    def program(policy, *, endpoint, seed):
        seen.append((endpoint, seed))
        return float(asks_once(policy) == "one")

    rows = [{"prompt": "x", "endpoint": "column", "policy": "of the data", "seed": 12}]
    assert play(chatml_tokenizer, program, ["one"], rows=rows)["reward"].item() == 1.0
    assert seen == [("column", 12)]


def test_what_a_command_is_given(chatml_tokenizer, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody is there
    script = COMMAND + "\nsys.exit(os.environ['NO_PROXY'])"
    last = play(chatml_tokenizer, AgentCommand([sys.executable, "-c", script]), ["5"])
    assert reason_of(last).endswith("ended with status 1: example.org,127.0.0.1")


def test_a_column_that_is_no_json_is_named(chatml_tokenizer):
    command = AgentCommand([sys.executable, "-c", COMMAND])
    rows = [{"prompt": "x", "question": "q", "answer": {1, 2}}]
    last = play(chatml_tokenizer, command, ["5"], rows=rows)
    assert "the column 'answer' is not" in reason_of(last)
    missing = play(chatml_tokenizer, AgentCommand(["./no-such-agent"]), ["5"])
    assert "ended with status 127: ./no-such-agent: No such file" in reason_of(missing)


@pytest.mark.parametrize(
    "line", ['{"reward": 1.0, "trace": "' + "x" * 9000 + '"}', "10 %\\r50 %\\r1.0", "flood"]
)
def test_a_last_line_may_be_long_or_have_a_bar_of_progress(chatml_tokenizer, line):
    script = f"{COMMAND}\nprint('{line}')"
    if line == "flood":  # of which no more is held anywhere than its end
        script += "\nimport stat\nfor n in range(80): print('x' * 100_000)"
        script += "\nprint(float(all(stat.S_ISFIFO(os.fstat(fd).st_mode) for fd in (1, 2))))"
    rows = [{**ROWS[0], "self": 1}]
    last = play(chatml_tokenizer, AgentCommand([sys.executable, "-c", script]), ["5"], rows=rows)
    assert last["reward"].item() == 1.0


def solves(endpoint, *, answer):
    return float(asks_once(endpoint) == answer)


def test_a_proxy_between_a_program_and_its_policy_is_refused(chatml_tokenizer, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    with pytest.raises(ValueError, match=r"Set NO_PROXY=127\.0\.0\.1"):
        play(chatml_tokenizer, solves, ["5"])
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert play(chatml_tokenizer, solves, ["5"])["reward"].item() == 1.0
