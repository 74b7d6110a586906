"""Tools in processes of their own: whatever one does there, its call is answered, and no other."""

import contextlib
import importlib
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from torchrl.envs.transforms import Compose

from torchrl_data.conversation_io import read_conversations
from torchrl_envs import ChatEnv, DataLoadingPrimer, FunctionTools, RewardFunctions, StepCounter
from torchrl_envs.concurrency.calls import CallTimeoutError
from torchrl_envs.processes import ToolProcessError, ToolProcesses

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.timeout(120)]


@pytest.fixture
def dangerous(monkeypatch):
    """The module of dangerous tools, found by its name as any module is."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    yield importlib.import_module("dangerous_tools")
    del sys.modules["dangerous_tools"]


@pytest.fixture
def make_tools(dangerous):
    """Builds :class:`ToolProcesses` over dangerous tools, closed after the test."""
    made = []

    def make(*names, num_processes=1, timeout_s=60.0, max_result_bytes=1000, **settings):
        functions = {name: getattr(dangerous, name) for name in names}
        settings |= {"num_processes": num_processes, "timeout_s": timeout_s}
        made.append(ToolProcesses(functions, max_result_bytes=max_result_bytes, **settings))
        return made[-1]

    yield make
    for tools in made:
        tools.close()


def zero(completions):
    return [0.0] * len(completions)


def make_env(*transforms, size=1):
    rows = [{"prompt": f"<{i}>"} for i in range(size)]
    parts = Compose(
        DataLoadingPrimer(rows), *transforms, RewardFunctions([zero]), StepCounter(max_steps=4)
    )
    return ChatEnv(batch_size=size).append_transform(parts)


def answers(end, row=0):
    messages = read_conversations(end, "prompt", who="test").messages(row)
    return [m["content"] for m in messages if m["role"] == "tool"]


def test_T03_tool_ends_its_process(scripted, call_text, play, dangerous):
    names = ["leave", "crash", "hold", "leave_with_child", "give_up", "odd_error", "double"]
    functions = [getattr(dangerous, name) for name in names]
    env = make_env(FunctionTools(functions, num_processes=2, timeout_s=3.0), size=2)
    calls = [call_text("leave", code=0), call_text("leave", code=4), *map(call_text, names[1:-1])]
    turn = "".join([*calls, call_text("double", x=4)])
    ends = play(env, scripted({"<0>": [turn, turn, "x"], "<1>": [call_text("double", x=1), "x"]}))
    found = answers(ends[0])
    expected = [
        "ToolProcessError: its process ended with exit code 0",
        "ToolProcessError: its process ended with exit code 4",
        "ToolProcessError: its process was ended by a signal: Segmentation fault",
        "CallTimeoutError: no answer within 3 s",
        "ToolProcessError: its process ended with exit code 9",
        "SystemExit: 3",
        "OddError: odd",
    ]
    for answered in (found[:8], found[8:]):  # the second turn: those that died were replaced
        assert [json.loads(text)["error"] for text in answered[:-1]] == expected
        assert answered[-1] == '{"is": 8}'
    assert ends[0]["num_tool_errors"].tolist() == [[14], [0]]
    assert answers(ends[1], 1) == ['{"is": 2}']
    env.close()


def test_a_lost_environment_is_told_from_an_error(scripted, call_text, play, dangerous):
    env = make_env(FunctionTools([dangerous.lose], num_processes=1))
    (end,) = play(env, scripted([call_text("lose"), "x"]))
    assert end["truncated"].all()
    assert json.loads(answers(end)[0])["error"] == "EpisodeLostError: gone"
    env.close()


def test_T06_what_a_tool_prints_is_no_answer(make_tools, capfd):
    tools = make_tools("say")
    assert [tools.call("say", {}) for _ in range(2)] == ["", ""], "and it has no input"
    assert '{"error": "no"}' in capfd.readouterr().out


def test_values_errors_and_arguments_that_do_not_travel(make_tools, own_children):
    tools = make_tools("odd_value", "odd_error", "double", "flood")
    children = own_children()
    assert tools.call("odd_value", {}).startswith("<unlocked _thread.lock object")
    with pytest.raises(RuntimeError, match=r"^odd$") as raised:
        tools.call("odd_error", {})
    assert type(raised.value).__name__ == "OddError"
    with pytest.raises(TypeError, match="not JSON serializable"):
        tools.call("double", {"x": object()})
    surrogate = {"x": "\ud800" * 50_000}
    assert tools.call("double", surrogate) == '{"is": "' + "?" * 992 + "\n[... the rest was cut]"
    assert tools.call("flood", {}).startswith("y" * 1000 + "\n[... 999000 more")
    assert own_children() == children, "one worker did it all"


def test_T03_tool_eats_memory(make_tools):
    tools = make_tools("eat", "double", max_memory_mb=256)
    with pytest.raises(RuntimeError) as raised:
        tools.call("eat", {})
    assert type(raised.value).__name__ == "MemoryError"
    assert tools.call("double", {"x": 1}) == '{"is": 2}'
    assert make_tools("eat").call("eat", {}) == str(2**30)


def test_T02_a_call_past_its_deadline_is_killed_with_what_it_started(make_tools, own_children):
    tools = make_tools("hang", timeout_s=0.5)
    assert len(own_children()) == 2, "the worker and its keeper"
    with pytest.raises(CallTimeoutError, match=r"no answer within 0.5 s"):
        tools.call("hang", {})
    assert own_children() == [], "neither the worker nor its child"


def test_what_a_call_started_is_killed_wherever_it_hid(make_tools, own_children):
    tools = make_tools("hide_child", "hang", timeout_s=5.0)
    hidden = psutil.Process(int(tools.call("hide_child", {})))
    assert hidden.is_running()
    tools.close()
    assert not hidden.is_running()
    hidden = psutil.Process(int(tools.call("hide_child", {})))
    with pytest.raises(CallTimeoutError):
        tools.call("hang", {})
    assert not hidden.is_running()


def test_calls_wait_for_a_process_without_being_late(scripted, call_text, play, dangerous):
    env = make_env(FunctionTools([dangerous.hang, dangerous.double], num_processes=1, timeout_s=1))
    (end,) = play(env, scripted([call_text("hang") * 2 + call_text("double", x=2), "x"]))
    errors = [json.loads(text).get("error") for text in answers(end)]
    assert errors == ["CallTimeoutError: no answer within 1 s"] * 2 + [None]
    env.close()


def test_a_process_that_died_while_idle_fails_no_call(make_tools, own_children):
    tools = make_tools("die_later")
    for _ in range(2):
        assert tools.call("die_later", {}) == "fine"
        for child in own_children():
            with contextlib.suppress(ChildProcessError):  # its keeper's child
                os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def test_closing_ends_calls_that_run_and_those_that_wait(make_tools, own_children):
    tools = make_tools("hang", "double")
    errors = []

    def call():
        try:
            tools.call("hang", {})
        except ToolProcessError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    while "sleep" not in [child.name() for child in own_children()]:
        threading.Event().wait(0.01)
    started = own_children()
    tools.close()
    for thread in threads:
        thread.join()
    assert psutil.wait_procs(started, timeout=30)[1] == []
    assert sorted(errors) == ["its process was ended by a signal: Killed", "the tools were closed"]
    assert own_children() == []
    assert tools.call("double", {"x": 3}) == '{"is": 6}', "a later call starts new ones"


def test_a_copy_has_workers_of_its_own(make_tools, own_children):
    tools = make_tools("double")
    copy = pickle.loads(pickle.dumps(tools))
    assert len(own_children()) == 4
    tools.close()
    assert copy.call("double", {"x": 3}) == '{"is": 6}'
    del copy
    assert own_children() == [], "they end with the object"


def test_functions_that_no_other_process_can_find_are_refused(monkeypatch):
    def local() -> str:
        """Be local."""

    def found() -> str:
        """Work."""

    with pytest.raises(ValueError, match=r"function local can't run in another process.*locals"):
        FunctionTools([local], num_processes=1)
    monkeypatch.setattr(found, "__module__", "__main__")
    with pytest.raises(ValueError, match=r"found can't run .*the program itself. Define it at the"):
        FunctionTools([found], num_processes=1)
    # Pickle finds it here, where pytest has loaded this file by itself; nobody else does.
    shown = {"zero": zero}
    with pytest.raises(ToolProcessError, match="can't run in another process: ModuleNotFoundError"):
        ToolProcesses(shown, num_processes=1, timeout_s=1, max_result_bytes=1)


@pytest.mark.parametrize("settings", [{"num_processes": 0}, {"max_memory_mb": 0}], ids=str)
def test_settings_that_can_not_work_are_refused(dangerous, settings):
    with pytest.raises(ValueError, match="|".join(settings) + " must be a whole"):
        FunctionTools([dangerous.double], **{"num_processes": 1, **settings})
    with pytest.raises(ValueError, match="give num_processes too"):
        FunctionTools([dangerous.double], max_memory_mb=100)


def test_no_process_outlives_a_killed_program(dangerous):
    running = subprocess.Popen(
        [sys.executable, dangerous.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert running.stdout.readline() == b"started\n"
    tree = psutil.Process(running.pid)
    names = []
    while names.count("sleep") < 3:
        assert running.poll() is None
        threading.Event().wait(0.05)
        with contextlib.suppress(psutil.NoSuchProcess):  # what starts a worker may just end
            names = [each.name() for each in tree.children(recursive=True)]
    processes = tree.children(recursive=True)
    assert len(processes) == 7, "two workers, each with a keeper, and three children of theirs"
    running.kill()
    running.communicate()
    gone, alive = psutil.wait_procs(processes, timeout=30)
    assert (len(gone), alive) == (7, [])
