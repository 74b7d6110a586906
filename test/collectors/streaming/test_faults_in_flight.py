"""Tools, judges, environments and engines that fail while weights are on their way.

Of twelve prompts two are faulty. Whatever happens to them is theirs alone: every other group is
trained once, no token is too old, and every push arrives.
"""

import asyncio
import threading
import time
from collections import Counter

import pytest
import torch
from torchrl.envs.transforms import Compose

from collectors import StreamingCollector, Wait
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    EpisodeTransform,
    FunctionTools,
    RewardErrorLimit,
    RewardFunctions,
)
from torchrl_modules import EngineDied
from torchrl_modules.engines.batching_engine import BatchingEngine
from torchrl_modules.weights.expected_weights import UpdateRefused

pytestmark = pytest.mark.usefixtures("no_leaks")
FAULTY = (3, 7)
N, PROMPTS = 2, 12
DEADLINE_S = 0.3


class Engine(BatchingEngine):
    """Takes 50 ms to take weights; never answers some prompts, dies under others once."""

    def __init__(self, engine, hangs=(), dies=()):
        super().__init__(engine)
        self.hangs, self.dies, self.updating = hangs, set(dies), threading.Event()
        engine.update_weights = self._take

    def _take(self, state_dict, *, version):
        self.updating.set()
        time.sleep(0.05)
        self.updating.clear()
        if "wrong" in state_dict:
            raise UpdateRefused("a wrong name")
        self._inside.version = version

    async def respond(self, prompt, params, **kwargs):
        text = self._inside.tokenizer.decode(prompt)
        number = next(i for i in range(PROMPTS) if f"<{i}>" in text)
        if number in self.hangs:
            await asyncio.Event().wait()
        if number in self.dies:
            while not self.updating.is_set():  # in the middle of an update, and back after it
                await asyncio.sleep(0.005)
            self.dies.discard(number)
            raise EngineDied("killed")
        return await super().respond(prompt, params, **kwargs)


def tool(fault):
    async def ask(number: int) -> str:
        """Ask.

        Args:
            number: of the prompt.
        """
        if number in FAULTY and fault == "raises":
            raise OSError("no route")
        if number in FAULTY and fault == "hangs":
            await asyncio.Event().wait()
        if number in FAULTY and fault == "blocks":
            time.sleep(2 * DEADLINE_S)  # the event loop of all tools
        return "42"

    return ask


class Environment(EpisodeTransform):
    """Fails in an event."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def begin(self, episode):
        if self.fault == "does not begin" and episode.group_id in FAULTY:
            raise ConnectionError("refused")

    async def after_turn(self, episode):
        if self.fault == "hangs" and episode.group_id in FAULTY:
            (outcome,) = await self.call(lambda: time.sleep(2 * DEADLINE_S), timeout_s=DEADLINE_S)
            raise outcome.error


def judge(fault):
    def score(number, completions):
        if number[0] in FAULTY and fault == "raises":
            raise RuntimeError("overloaded")
        if number[0] in FAULTY and fault == "hangs":
            time.sleep(2 * DEADLINE_S)
        return [0.5] * len(completions)

    return score


def collected(scripted, call_text, *, tools="", environment="", judged="", engine=(), pushes=()):
    rows = [{"prompt": f"question <{i}>", "number": i} for i in range(PROMPTS)]
    env = ChatEnv(batch_size=2 * N).append_transform(
        Compose(
            DataLoadingPrimer(rows, group_size=N, num_epochs=1),
            FunctionTools({"ask": tool(tools)}, timeout_s=DEADLINE_S),
            Environment(environment),
            RewardFunctions([judge(judged)], completion_format="messages", timeout_s=DEADLINE_S),
            RewardErrorLimit(1.0),
        )
    )
    script = {f"<{i}>": [call_text("ask", number=i), "hello"] for i in range(PROMPTS)}
    policy = scripted(script, write_tokens=False)
    served = Engine(policy.engine, **dict(engine))
    found, refused = [], 0
    with StreamingCollector(
        env,
        policy,
        engine=served,
        groups_per_step=2,
        staleness=Wait(2),
        request_timeout=3 * DEADLINE_S,
    ) as collector:
        for step, batch in enumerate(collector):
            for row in batch.unbind(0):
                drawn = row["policy_versions", "full"]
                drawn = drawn[drawn >= 0]
                assert not len(drawn) or step - int(drawn.min()) <= 2
                found.append(row)
            weights = {"wrong" if step in pushes else "w": torch.zeros(1)}
            try:
                collector.update_policy_weights_(weights)
            except UpdateRefused:
                refused += 1
                collector.update_policy_weights_({"w": torch.zeros(1)})
    balance = collector.ledger.balance
    assert balance.in_flight.groups == 0
    assert balance.trained.groups + balance.returned.groups == PROMPTS
    assert Counter(int(row["row"]["number"]) for row in found) == dict.fromkeys(range(PROMPTS), N)
    sound = [row for row in found if row["row"]["number"] not in FAULTY]
    assert {(row["stop_reason"], float(row["reward"])) for row in sound} == {("answered", 0.5)}
    faulty = [row for row in found if row["row"]["number"] in FAULTY]
    return faulty, collector, refused


@pytest.mark.parametrize("fault", ["raises", "hangs", "blocks"])
def test_a_tool(fault, scripted, call_text):
    faulty, collector, _ = collected(scripted, call_text, tools=fault)
    assert {row["stop_reason"] for row in faulty} == {"answered"}  # the policy is told
    assert {int(row["num_tool_errors"]) for row in faulty} == {1}
    assert collector.policy_version >= 5  # the last push may be cut short by the end


@pytest.mark.parametrize(
    ("fault", "said"),
    [("does not begin", "ConnectionError: refused"), ("hangs", "TimeoutError")],
)
def test_an_environment(fault, said, scripted, call_text):
    faulty, collector, _ = collected(scripted, call_text, environment=fault)
    assert {row["stop_reason"].split(": ")[0] for row in faulty} == {"environment_error"}
    assert all(said in row["stop_reason"] for row in faulty)
    assert not any(row["scorable"] for row in faulty)
    assert collector.policy_version >= 5  # the last push may be cut short by the end


@pytest.mark.parametrize(("fault", "said"), [("raises", "overloaded"), ("hangs", "TimeoutError")])
def test_a_judge(fault, said, scripted, call_text):
    faulty, _, _ = collected(scripted, call_text, judged=fault)
    assert all(said in str(row["reward_errors"]) for row in faulty)
    assert not any(row["scorable"] for row in faulty)


def test_an_engine_that_hangs(scripted, call_text):
    faulty, _, _ = collected(scripted, call_text, engine={"hangs": FAULTY})
    assert {row["stop_reason"] for row in faulty} == {"error: no response within 0.9 s"}


def test_an_engine_that_dies_under_an_update_and_comes_back(scripted, call_text):
    faulty, collector, _ = collected(scripted, call_text, engine={"dies": FAULTY})
    assert {row["stop_reason"] for row in faulty} == {"answered"}  # of the second attempt
    assert collector.ledger.balance.dropped["engine_died"].groups == 2


def test_updates_that_are_refused_in_between(scripted, call_text):
    _, collector, refused = collected(scripted, call_text, pushes=(1, 3))
    assert refused == 2
    assert collector.policy_version >= 3  # four were good; the end may cut the last one short
