"""Limits of a streaming collection: how long a turn may take, how many groups wait."""

import asyncio
import re
import time

import pytest
from torchrl.envs.transforms import Compose

from collectors import Drop, OnPolicy, StreamingCollector, Wait
from torchrl_envs import ChatEnv, DataLoadingPrimer
from torchrl_modules.engines.batching_engine import BatchingEngine

pytestmark = pytest.mark.usefixtures("no_leaks")


class Hanging(BatchingEngine):
    """Never answers one prompt."""

    def __init__(self, engine, tokenizer, text):
        super().__init__(engine)
        self.tokenizer, self.text, self.num_aborted = tokenizer, text, 0

    async def respond(self, prompt, params, **kwargs):
        if self.text in self.tokenizer.decode(prompt):
            try:
                await asyncio.Event().wait()
            finally:
                self.num_aborted += 1
        return await super().respond(prompt, params, **kwargs)


def make_env(num_prompts=4):
    rows = [{"prompt": f"question <{i}>"} for i in range(num_prompts)]
    return ChatEnv(batch_size=num_prompts).append_transform(
        Compose(DataLoadingPrimer(rows, num_epochs=1))
    )


def test_E09_a_turn_past_its_time_ends_its_own_episode_and_no_other(scripted):
    policy = scripted(["hello"], write_tokens=False)
    engine = Hanging(policy.engine, policy.tokenizer, "<2>")
    with StreamingCollector(make_env(), policy, engine=engine, request_timeout=0.5) as collector:
        (batch,) = list(collector)
    reasons = {int(row["group_id"]): row["stop_reason"] for row in batch.unbind(0)}
    assert reasons.pop(2) == "error: no response within 0.5 s"
    assert reasons == dict.fromkeys((0, 1, 3), "answered")
    assert engine.num_aborted == 1
    assert collector.ledger.balance.in_flight.groups == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"request_timeout": 0.0}, "request_timeout must be positive, got 0.0"),
        ({"request_timeout": 5.0, "staleness": OnPolicy()}, "request_timeout=5 can't be kept"),
    ],
)
def test_limits_that_nothing_can_keep_are_refused(settings, message, scripted):
    with pytest.raises(ValueError, match=re.escape(message)):
        StreamingCollector(make_env(), scripted(["hello"], write_tokens=False), **settings)


@pytest.mark.parametrize("staleness", [Wait(2), Drop(2)])
def test_E11_before_a_slow_trainer_no_more_groups_wait_than_there_are_slots(staleness, scripted):
    policy = scripted(["hello"], write_tokens=False)
    with StreamingCollector(
        make_env(24),
        policy,
        engine=BatchingEngine(policy.engine),
        groups_per_step=2,
        staleness=staleness,
    ) as collector:
        num_slots, num_queued, numbers = collector.ledger.num_slots, 0, []
        assert num_slots < 24  # so that the data alone would not bound it
        for batch in collector:
            deadline = time.monotonic() + 60  # the trainer is slower than all that may begin
            while (now := collector.metrics())["ledger/in_flight/unfinished"]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            num_queued = max(num_queued, int(now["ledger/in_flight/waiting"]))
            numbers += [int(row["group_id"]) for row in batch.unbind(0)]
    assert 0 < num_queued <= num_slots
    assert len(set(numbers)) == len(numbers)
