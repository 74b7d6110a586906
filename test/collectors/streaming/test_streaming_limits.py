"""Limits of a streaming collection: how long a turn may take, how many groups wait."""

import asyncio
import re
import time
from types import SimpleNamespace

import pytest
from torchrl.envs.transforms import Compose

from collectors import Drop, OnPolicy, StreamingCollector, Wait
from collectors.streaming.checks import check_adapters
from torchrl_envs import ChatEnv, DataLoadingPrimer, RewardFunctions
from torchrl_modules import TransformersWrapper
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
        # (1 + 1) * 4 groups may wait for an older one.
        ({"queue_maxsize": 7, "staleness": Wait(2, 1)}, "8 finished episodes may wait"),
        ({"queue_maxsize": 0}, "queue_maxsize must be a whole number, at least 1, got 0"),
    ],
)
def test_limits_that_nothing_can_keep_are_refused(settings, message, scripted):
    with pytest.raises(ValueError, match=re.escape(message)):
        StreamingCollector(make_env(), scripted(["hello"], write_tokens=False), **settings)


def test_a_staleness_that_is_no_policy_is_refused(scripted):
    policy = scripted(["hello"], write_tokens=False)
    with pytest.raises(TypeError, match=r"staleness takes StalenessPolicy\(...\), got 'wait'"):
        StreamingCollector(make_env(), policy, staleness="wait")


def test_the_updater_of_a_collector_refuses_to_push_under_what_is_drawn(scripted):
    policy = scripted(["hello"], write_tokens=False)
    with StreamingCollector(make_env(), policy, engine=BatchingEngine(policy.engine)) as collector:
        with pytest.raises(RuntimeError, match=r"pushed by its update_policy_weights_\(\)"):
            collector.weight_updater.push({}, version=1)
        assert policy.policy_version == collector.policy_version == 0


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


def test_E11_no_more_finished_episodes_wait_than_the_queue_holds(scripted):
    policy = scripted(["hello"], write_tokens=False)
    with StreamingCollector(
        make_env(24),
        policy,
        engine=BatchingEngine(policy.engine),
        groups_per_step=2,
        staleness=Drop(8),
        queue_maxsize=5,
    ) as collector:
        assert collector.ledger.num_slots == 18  # which would let as many wait
        numbers = []
        for batch in collector:
            numbers += [int(row["group_id"]) for row in batch.unbind(0)]
            deadline, fill = time.monotonic() + 60, min(5, 24 - len(numbers))
            while True:  # until all that may begin has ended
                now = collector.metrics()
                if now["ledger/in_flight/waiting"] >= fill and not now["collect/open_episodes"]:
                    break
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert now["ledger/in_flight/waiting"] == fill
    assert sorted(numbers) == list(range(24))


@pytest.mark.parametrize("staleness", [Wait(2), OnPolicy()])
def test_reward_functions_are_told_how_many_steps_there_were(
    staleness, chatml_tokenizer, make_tiny_model
):
    steps = []

    def reward(completions, trainer_state, **_):
        steps.append(trainer_state.global_step)
        return [0.0] * len(completions)

    policy = TransformersWrapper(
        make_tiny_model(0), tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 2}
    )
    functions = RewardFunctions([reward])
    env = make_env(3).append_transform(functions)
    weights = make_tiny_model(1).state_dict()
    with StreamingCollector(env, policy, groups_per_step=1, staleness=staleness) as collector:
        collector.update_policy_weights_(weights, wait=True)  # before the first batch: no step
        for number, _ in enumerate(collector, 1):
            assert functions.trainer_state.global_step == number - 1
            collector.update_policy_weights_(weights, wait=True)
    assert functions.trainer_state.global_step == len(steps) == 3
    if isinstance(staleness, OnPolicy):  # each group is scored between two steps
        assert steps == [0, 1, 2]


def test_an_engine_draws_from_all_versions_of_adapters_that_may_be_in_flight():
    engine = SimpleNamespace(max_adapters=3)
    check_adapters(engine, Wait(max_staleness=1))
    check_adapters(engine, OnPolicy())
    check_adapters(SimpleNamespace(), Wait(max_staleness=4))
    with pytest.raises(ValueError, match=r"4 versions may.*3 sets .*max_loras=4"):
        check_adapters(engine, Wait(max_staleness=2))
