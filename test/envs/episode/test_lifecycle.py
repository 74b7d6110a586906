"""Environments that fail or hang as they begin or end: one row is lost, and nothing stays open."""

import asyncio
import logging
import subprocess
import sys
import threading
import time

import pytest
import torch
from torchrl.envs.transforms import Compose, Transform

from collectors import LLMCollector
from objectives import MCAdvantage
from torchrl_data.batched_object import read_objects
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    EnvironmentTools,
    EpisodeTransform,
    RewardFunctions,
    StepCounter,
)

START_S = 3.0
"""How long a start may take where one hangs."""


class Recorder:
    """Notes what happens to its instances; rows of ``number`` 1 misbehave as ``fault`` says."""

    made: list["Recorder"]
    fault: str
    gate: threading.Event

    def __init__(self):
        self.events = []
        self.made.append(self)
        if len(self.made) == 2 and self.fault == "constructor raises":
            raise OSError("no port")
        if len(self.made) == 2 and self.fault == "constructor hangs":
            self.gate.wait()

    def _misbehave(self, number):
        if number == 1 and self.fault == "reset raises":
            raise OSError("no disk")
        if number == 1 and self.fault == "reset exits":
            raise SystemExit(3)
        if number == 1 and self.fault == "reset hangs":
            self.gate.wait()
        return 3 if number == 1 and self.fault == "no text" else None

    def reset(self, *, number):
        self.events.append("reset")
        self.number = number
        return self._misbehave(number)

    def echo(self, text: str) -> str:
        """Say it again.

        Args:
            text: What to say.
        """
        self.events.append("echo")
        return text

    def get_reward(self):
        self.events.append("get_reward")
        return float(self.number)

    def close(self):
        self.events.append("close")


class AsyncRecorder(Recorder):
    async def reset(self, *, number):
        self.events.append("reset")
        self.number = number
        if number == 1 and self.fault == "reset hangs":
            await asyncio.sleep(1000)
        return self._misbehave(number)

    async def close(self):
        self.events.append("close")


@pytest.fixture
def recorder():
    gate = threading.Event()
    yield lambda base, fault: type("Arena", (base,), {"made": [], "fault": fault, "gate": gate})
    gate.set()


def make_env(arena, num_rows=4, **options):
    rows = [{"prompt": f"<{i}>", "number": i} for i in range(num_rows)]
    # What hangs waits for this; all else has to end within it, on a busy machine too.
    options = {"start_timeout_s": START_S if "hangs" in arena.fault else 60.0} | options
    return ChatEnv(batch_size=num_rows).append_transform(
        Compose(
            DataLoadingPrimer(rows), EnvironmentTools(arena, **options), StepCounter(max_steps=3)
        )
    )


@pytest.mark.parametrize("base", [Recorder, AsyncRecorder])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("constructor raises", "environment_error: Arena: constructor: OSError: no port"),
        (
            "constructor hangs",
            "environment_error: Arena: constructor: CallTimeoutError: no answer within 3 s",
        ),
        ("reset raises", "environment_error: Arena: reset: OSError: no disk"),
        ("reset exits", "environment_error: Arena: reset: SystemExit: 3"),
        (
            "reset hangs",
            "environment_error: Arena: reset: CallTimeoutError: no answer within 3 s",
        ),
        (
            "no text",
            "environment_error: Arena: reset: TypeError: An environment's reset returns a string, "
            "a list of content parts or None, got int.",
        ),
    ],
)
def test_a_row_that_does_not_begin_ends_alone(
    recorder, scripted, call_text, caplog, base, fault, reason
):
    arena = recorder(base, fault)
    env = make_env(arena)
    policy = scripted([call_text("echo", text="x"), "done"], write_tokens=False)
    with caplog.at_level(logging.WARNING):
        trajectories = LLMCollector(env, policy).collect()
    rows = trajectories.unbind(0)
    assert len(rows) == 4
    bad = [i for i, row in enumerate(rows) if row["stop_reason"] != "answered"]
    assert len(bad) == 1
    failed = rows[bad[0]]
    assert failed["stop_reason"] == failed["reward_errors"] == reason
    assert [bool(failed[k]) for k in ("done", "truncated", "terminated")] == [True, True, False]
    assert not failed["scorable"]
    assert failed["reward"].isnan()
    assert failed["rewards", "Arena"].isnan()
    assert failed["num_turns"] == 0
    assert not failed["masks", "all_assistant_mask"].any(), "nothing was sampled for it"
    assert len(policy.engine.served) == 6, "three rows of two turns"
    good = [row for i, row in enumerate(rows) if i not in bad]
    # Which of four constructors is the second to run is open.
    assert [row["reward"].item() for row in good] == [float(i) for i in range(4) if i != bad[0]]
    assert all(row["scorable"] for row in good)
    assert "Row" in caplog.text
    assert ("Traceback" in caplog.text) == (fault not in ("constructor hangs", "reset hangs"))

    for made in arena.made:  # what hung in its constructor closes when it returns
        made.gate.set()
    deadline = time.monotonic() + 20
    closes = 3 if fault == "constructor raises" else 4
    while sum("close" in made.events for made in arena.made) < closes:
        assert time.monotonic() < deadline, [made.events for made in arena.made]
        time.sleep(0.01)
    env.close()
    assert all(made.events.count("close") <= 1 for made in arena.made)


def test_a_group_without_its_failed_member_has_its_advantages(recorder, scripted):
    arena = recorder(Recorder, "constructor raises")
    rows = [{"prompt": "q", "number": 2}]
    env = ChatEnv(batch_size=3).append_transform(
        Compose(DataLoadingPrimer(rows, group_size=3), EnvironmentTools(arena))
    )
    policy = scripted(["done"], write_tokens=False)
    rows = MCAdvantage(grpo_size=3)._inv_call(LLMCollector(env, policy).collect())
    assert sorted(row["scorable"].item() for row in rows.unbind(0)) == [False, True, True]
    assert [row["advantage"].abs().max().item() for row in rows.unbind(0)] == [0, 0, 0]
    env.close()


def test_a_batch_of_which_no_row_begins_ends_without_generation(recorder, scripted):
    class Fails(Recorder):
        def reset(self, *, number):
            raise OSError("no disk")

    env = make_env(recorder(Fails, ""), 2)
    policy = scripted(["done"], write_tokens=False)
    collector = LLMCollector(env, policy)
    for _ in range(2):
        assert not collector.collect()["scorable"].any()
    assert policy.engine.served == []
    env.close()


def test_a_policy_that_raises_leaves_nothing_open_and_the_collector_goes_on(
    recorder, scripted, call_text
):
    arena = recorder(Recorder, "")
    env = make_env(arena)
    policy = scripted([call_text("echo", text="x"), "done"], write_tokens=False)
    generate, turns = policy.engine.generate, []

    def fails_once(*args, **kwargs):
        turns.append(1)
        if len(turns) == 2:
            raise RuntimeError("out of memory")
        return generate(*args, **kwargs)

    policy.engine.generate = fails_once
    collector = LLMCollector(env, policy)
    with pytest.raises(RuntimeError, match="out of memory"):
        collector.collect()
    assert [made.events for made in arena.made] == [["reset", "echo", "close"]] * 4
    trajectories = collector.collect()
    # The rows that were lost are drawn again.
    assert [row["group_id"].item() for row in trajectories.unbind(0)] == [0, 1, 2, 3]
    assert len(arena.made) == 8
    assert all(made.events.count("close") == 1 for made in arena.made)
    env.close()


def test_a_partial_reset_that_fails_leaves_the_running_rows(recorder, scripted, call_text):
    class Fails(Recorder):
        def _misbehave(self, number):
            return super()._misbehave(1)

    arena = recorder(Fails, "")
    env = make_env(arena, 2)
    policy = scripted([call_text("echo", text="x")] * 2)
    batch = env.step(policy(env.reset()))["next"]
    arena.fault = "reset raises"
    batch["_reset"] = torch.tensor([[False], [True]])
    batch = env.reset(batch)
    reasons = read_objects(batch, "stop_reason")
    assert reasons == ["", "environment_error: Arena: reset: OSError: no disk"]
    after = env.step(policy(batch))["next"]
    assert after["done"].view(-1).tolist() == [False, True]
    assert ["reset", "echo", "echo"] in [made.events for made in arena.made]
    env.close()


def test_a_choice_of_episodes_that_raises_ends_that_one_alone():
    class Begins(EpisodeTransform):
        def begin(self, episode):
            begun.append(episode.row)

    begun, part = [], Begins()
    part.only_for = lambda episode: {0: True, 2: False}[episode.row]
    data = DataLoadingPrimer([{"prompt": "a"}] * 3)
    reset = ChatEnv(batch_size=3).append_transform(Compose(data, part)).reset()
    reason = "environment_error: Begins: KeyError: 1"
    assert read_objects(reset, "stop_reason") == ["", reason, ""]
    assert begun == [0]


@pytest.mark.parametrize("error", [OSError, StopIteration])  # which ends no loop in silence
@pytest.mark.parametrize("async_rows", [(), (0, 1, 2), (1,)])
def test_an_end_that_raises_keeps_no_other_from_ending(scripted, error, async_rows):
    class Ends(EpisodeTransform):
        def finish(self, episode):
            return (self.later if episode.row in async_rows else self.now)(episode)

        def now(self, episode):
            ended.append(episode.row)
            if episode.row < 2:
                raise error(f"no disk for row {episode.row}")

        async def later(self, episode):
            self.now(episode)

    ended = []
    parts = Compose(DataLoadingPrimer([{"prompt": "a"}] * 3), Ends())
    env = ChatEnv(batch_size=3, tokenizer=scripted([]).tokenizer).append_transform(parts)
    with pytest.raises((error, RuntimeError)) as raised:
        LLMCollector(env, scripted(["done"], write_tokens=False)).collect()
    causes = f"{raised.value} {raised.value.__cause__}"
    assert "no disk for row 0" in causes or "StopIteration" in causes
    assert ended == [0, 1, 2]
    env.close()


def test_a_close_that_fails_is_logged_and_keeps_no_other_from_closing(recorder, scripted, caplog):
    class Fails(Recorder):
        def close(self):
            super().close()
            if self.number == 0:
                raise OSError("busy")

    arena = recorder(Fails, "")
    env = make_env(arena, 3)
    with caplog.at_level(logging.WARNING):
        LLMCollector(env, scripted(["done"], write_tokens=False)).collect()
    assert [made.events[-1] for made in arena.made] == ["close"] * 3
    assert "Arena.close failed" in caplog.text
    assert "OSError: busy" in caplog.text


def test_the_environment_that_a_function_makes_to_be_looked_at_is_closed(recorder):
    arena = recorder(AsyncRecorder, "")

    async def inside_a_loop():  # as in a notebook
        return EnvironmentTools(lambda: arena())

    asyncio.run(inside_a_loop())
    assert [made.events for made in arena.made] == [["close"]]


def test_a_reset_that_fails_at_its_end_leaves_nothing_open(recorder):
    class Limit(Transform):
        def _reset(self, tensordict, tensordict_reset):
            raise ValueError("no budget")

    arena = recorder(Recorder, "")
    env = make_env(arena, 2)
    env.append_transform(Limit())
    with pytest.raises(ValueError, match="no budget"):
        env.reset()
    assert [made.events for made in arena.made] == [["reset", "close"]] * 2
    env.close()


class Scores:
    """A reward function that notes when it is closed; the first one fails then."""

    def __init__(self, name, closed):
        self.__name__ = self.name = name
        self.closed = closed

    def __call__(self, completions):
        return [0.0] * len(completions)

    def close(self):
        self.closed.append(self.name)
        if self.name == "first":
            raise OSError("function")


def test_closing_goes_on_after_an_error(recorder, caplog):
    closed = []

    class Fails(EpisodeTransform):
        def begin(self, episode):
            episode.resources.add(self, "held", close=self.give_back)

        def give_back(self):
            closed.append("held")
            raise OSError("resource")

        def close(self):
            raise OSError("transform")

    class Works(EpisodeTransform):
        def close(self):
            closed.append("transform")

    arena = recorder(Recorder, "")
    env = make_env(arena, 2)
    functions = RewardFunctions([Scores("first", closed), Scores("second", closed)])
    for transform in (Fails(), functions, Works()):
        env.append_transform(transform)
    threads = set(threading.enumerate())
    env.reset()
    env.reset()
    assert closed == ["held"] * 2
    assert "str.close failed" in caplog.text
    assert "OSError: resource" in caplog.text
    assert env.calls.run([[lambda: 1]])[0][0].value == 1
    with pytest.raises(ExceptionGroup, match="could not be closed") as raised:
        env.close()
    assert list(map(str, raised.value.exceptions)) == ["transform", "function"]
    assert sorted(closed) == ["first", *["held"] * 4, "second", "transform"]
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=20)
        assert not thread.is_alive()


@pytest.mark.parametrize("end", [pytest.param("", marks=pytest.mark.weekly), "1 / 0"])
def test_what_is_open_is_closed_when_the_program_ends(end):
    program = f"""
import os
from tensordict import TensorDict
from torchrl.envs.transforms import Compose
from torchrl_envs import ChatEnv, DataLoadingPrimer, EnvironmentTools

class Arena:
    def reset(self, *, number):
        self.number = number
    def get_reward(self):
        return 0.0
    def close(self):
        os.write(1, b"closed %d\\n" % self.number)

class AsyncArena(Arena):
    async def close(self):
        super().close()

rows = [dict(prompt="x", number=i, environment="ab"[i % 2]) for i in range(4)]
tools = EnvironmentTools(dict(a=Arena, b=AsyncArena))
env = ChatEnv(batch_size=4).append_transform(Compose(DataLoadingPrimer(rows), tools))
env.reset()
print("open", flush=True)
{end}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    lines = done.stdout.split("\n")
    assert lines[0] == "open", done.stderr
    assert sorted(lines[1:5]) == [f"closed {i}" for i in range(4)]


def test_the_seed_is_the_groups_unless_the_data_have_one():
    seen = []

    class Seeded:
        def reset(self, *, seed):
            seen.append(seed)

        def get_reward(self):
            return 0.0

    def begin(rows):
        seen.clear()
        env = ChatEnv(batch_size=4).append_transform(
            Compose(DataLoadingPrimer(rows, group_size=2, seed=3), EnvironmentTools(Seeded))
        )
        groups = env.reset()["seed"].tolist()
        env.close()
        return groups

    groups = begin([{"prompt": "a"}, {"prompt": "b"}])
    assert sorted(seen) == sorted(groups)
    assert groups[0] == groups[1] != groups[2]
    begin([{"prompt": "a", "seed": 1}, {"prompt": "b", "seed": 2}])
    assert sorted(seen) == [1, 1, 2, 2]
