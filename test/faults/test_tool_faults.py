"""Faults of tools: each is answered, none disturbs another rollout, nothing is left behind."""

import asyncio
import json
import os
import resource
import signal
import sys
import threading
import time

import pytest
from torchrl.envs.transforms import Compose

from torchrl_data.conversation_io import read_conversations
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    EnvironmentTools,
    FunctionTools,
    RewardFunctions,
    StepCounter,
)

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.timeout(60)]


def fine() -> str:
    """Work."""
    return "fine"


def zero(completions):
    return [0.0] * len(completions)


def make_env(*transforms, size=2):
    rows = [{"prompt": f"<{i}>"} for i in range(size)]
    parts = Compose(
        DataLoadingPrimer(rows), *transforms, RewardFunctions([zero]), StepCounter(max_steps=4)
    )
    return ChatEnv(batch_size=size).append_transform(parts)


def answers(end, row=0):
    messages = read_conversations(end, "prompt", who="test").messages(row)
    return [m["content"] for m in messages if m["role"] == "tool"]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_T01_tool_raises(scripted, call_text, play, is_async):
    def fails() -> str:
        """Fail."""
        raise LookupError("no such é" + "é" * 4000)

    async def fails_async() -> str:
        """Fail."""
        fails()

    bad = fails_async if is_async else fails
    env = make_env(FunctionTools({"bad": bad, "fine": fine}))
    ends = play(env, scripted({"<0>": [call_text("bad"), "x"], "<1>": [call_text("fine"), "x"]}))
    (answer,) = answers(ends[0])
    error = json.loads(answer)["error"]
    assert error.startswith("LookupError: no such é")
    assert len(error.encode()) <= 2 * 1024 + 60
    assert ends[0]["num_tool_errors"].tolist() == [[1], [0]]
    assert answers(ends[1], 1) == ["fine"]
    env.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_T02_tool_hangs_and_the_batch_takes_its_deadline_once(scripted, call_text, play, is_async):
    gate = threading.Event()

    def hang() -> str:
        """Never return."""
        gate.wait()

    async def hang_async() -> str:
        """Never return."""
        await asyncio.Event().wait()

    tools = FunctionTools({"hang": hang_async if is_async else hang, "fine": fine}, timeout_s=1.0)
    env = make_env(tools, size=8)
    # Started before, so that the time is that of the calls alone.
    play(env, scripted([call_text("fine"), "x"]))
    batch = env.reset()
    policy = scripted({"<7>": [call_text("fine"), "x"], "": [call_text("hang") * 2, "x"]})
    batch = policy(batch)
    start = time.monotonic()
    batch = env.step(batch)["next"]
    assert time.monotonic() - start <= 2.0, "the deadline and a second, not the sum"
    conversations = read_conversations(batch, "prompt", who="test")
    assert conversations.last_message(7)["content"] == "fine"
    for row in range(7):
        content = conversations.last_message(row)["content"]
        assert json.loads(content) == {"error": "CallTimeoutError: no answer within 1 s"}
    gate.set()
    env.close()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_T03_tool_exits_by_an_exception(scripted, call_text, play, error):
    def leave() -> str:
        """End the program."""
        raise error

    env = make_env(FunctionTools([leave, fine]))
    ends = play(env, scripted({"<0>": [call_text("leave"), "x"], "<1>": [call_text("fine"), "x"]}))
    assert json.loads(answers(ends[0])[0])["error"].startswith(type(error).__name__)
    assert answers(ends[1], 1) == ["fine"]
    env.close()


def test_T03_ctrl_c_still_works_while_a_tool_runs(scripted, call_text):
    entered, gate = threading.Event(), threading.Event()

    def wait() -> str:
        """Wait."""
        entered.set()
        gate.wait()

    env = make_env(FunctionTools([wait]))
    batch = scripted([call_text("wait")])(env.reset())

    def interrupt():
        entered.wait()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job ignores it
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            env.step(batch)
    finally:
        signal.signal(signal.SIGINT, handler)
    thread.join()
    gate.set()
    env.close()


@pytest.mark.parametrize("kind", [str, bytes], ids=["text", "bytes"])
def test_T04_tool_floods(scripted, call_text, play, kind):
    flood = "y" * 100_000_000 if kind is str else b"y" * 100_000_000

    def say() -> object:
        """Say far too much."""
        return flood

    env = make_env(FunctionTools([say, fine]))
    play(env, scripted([call_text("fine"), "x"]))
    batch = scripted([call_text("say"), "x"])(env.reset())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    batch = env.step(batch)["next"]
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    (answer,) = answers(batch)
    head, _, mark = answer.partition("\n[... ")
    assert len(head.encode()) == 64 * 1024
    assert mark.startswith(str(100_000_000 - 64 * 1024))
    assert grown_mib <= 16
    env.close()


class Stateful:
    """Its calls would spoil each other if they overlapped."""

    def reset(self):
        self.lines = []

    def note(self, text: str, pause_s: float) -> str:
        """Write a line, slowly.

        Args:
            text: The line.
            pause_s: How long it takes.
        """
        before = len(self.lines)
        time.sleep(pause_s)
        assert len(self.lines) == before, "another call came in between"
        self.lines.append(text)
        return " ".join(self.lines)


def test_calls_on_one_environment_stay_in_order_and_plain_functions_do_not_wait(
    scripted, call_text, play
):
    env = make_env(EnvironmentTools(Stateful), FunctionTools([fine]), size=1)
    turn = (
        call_text("note", text="a", pause_s=0.05)
        + call_text("fine")
        + call_text("note", text="b", pause_s=0.0)
        + call_text("note", text="c", pause_s=0.0)
    )
    (end,) = play(env, scripted([turn, "x"]))
    assert answers(end) == ["a", "fine", "a b", "a b c"]
    env.close()


def test_T05_tool_weird_where_showing_a_value_takes_for_ever(scripted, call_text, play):
    gate = threading.Event()

    class Slow:
        def __str__(self):
            gate.wait()
            return ""

    class Exits:
        def __str__(self):
            sys.exit(1)

    def slow() -> object:
        """Return what can't be shown in time."""
        return Slow()

    def exits() -> object:
        """Return what ends the program when it is shown."""
        return Exits()

    env = make_env(FunctionTools([slow, exits], timeout_s=0.3), size=1)
    (end,) = play(env, scripted([call_text("slow") + call_text("exits"), "x"]))
    errors = [json.loads(answer)["error"] for answer in answers(end)]
    assert errors == ["CallTimeoutError: no answer within 0.3 s", "SystemExit: 1"]
    gate.set()
    env.close()
