"""Collection beside training: equal to batches on policy, bounded in age, and never lost."""

import asyncio
import copy
import json
import multiprocessing
import os
import random
import threading
import time
from collections import Counter

import pytest
import torch
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import Drop, LLMCollector, OnPolicy, StreamingCollector, Wait
from collectors.streaming import program_end
from collectors.streaming.evaluation_point import draw_point
from objectives import GRPOLoss, MCAdvantage
from torchrl_envs import (
    ChatEnv,
    DataExhaustedError,
    DataLoadingPrimer,
    EpisodeTransform,
    FunctionTools,
    RewardErrorLimit,
    RewardFunctions,
    StepCounter,
)
from torchrl_envs.episode.async_runner import AsyncEpisodeRunner
from torchrl_modules import EngineDied, TransformersWrapper
from torchrl_modules.engines.batching_engine import BatchingEngine
from torchrl_modules.policies.async_policy import AsyncPolicy
from torchrl_modules.weights.expected_weights import UpdateRefused

pytestmark = pytest.mark.usefixtures("no_leaks")
# TorchRL's storages count in shared memory, whose file lives to the end.
_SHARED = multiprocessing.Value("i", 0)
N = 4  # rollouts of a prompt


def length_reward(completions):
    return [float(len(str(completion))) for completion in completions]


def make_env(num_prompts=64, *, groups=2, reward=length_reward, **primer):
    rows = [{"prompt": f"question <{i}>", "number": i} for i in range(num_prompts)]
    return ChatEnv(batch_size=groups * N).append_transform(
        Compose(
            DataLoadingPrimer(rows, group_size=N, **primer),
            RewardFunctions([reward], completion_format="messages"),
            StepCounter(max_steps=3),
        )
    )


def make_buffer(groups=2, **advantage):
    return ReplayBuffer(
        storage=LazyStackStorage(groups * N),
        transform=MCAdvantage(N, **advantage),
        batch_size=groups * N,
    )


@pytest.fixture
def make_policy(chatml_tokenizer, make_tiny_model):
    def make(model=None, **sampling):
        return TransformersWrapper(
            make_tiny_model(0) if model is None else model,
            tokenizer=chatml_tokenizer,
            generate_kwargs={"max_new_tokens": 6} | sampling,
            write_tokens=False,
        )

    return make


def streaming(env, policy, **kwargs):
    """A collector whose engine takes whoever is ready: batches of any size, in any order."""
    return StreamingCollector(env, policy, engine=BatchingEngine(policy.engine), **kwargs)


def train(model, actor, buffer, optimizer):
    loss = GRPOLoss(actor)
    batch = loss.pack(buffer[:])
    output = loss(batch, window=loss.measure_window(batch))
    optimizer.zero_grad()
    output.loss_objective.backward()
    optimizer.step()
    buffer.empty()


def story(batch):
    return [
        (
            row["tokens", "full"].tolist(),
            row["log_probs", "full"].tolist(),
            row["reward"].tolist(),
            row["group_id"].item(),
            row["stop_reason"],
            row["num_turns"].item(),
        )
        for row in batch.unbind(0)
    ]


class Again(EpisodeTransform):
    """Asks again, after a while that differs; some episodes end earlier than others."""

    answers_cut_turns = True

    async def after_turn(self, episode):
        seconds = 0.02 * random.random()
        await self.call(lambda: time.sleep(seconds), timeout_s=10.0)
        if episode.num_turns < 1 + (episode.group_id + episode.row % N) % 3:
            episode.say({"role": "user", "content": f"again, {episode.num_turns}"})


class TestOnPolicy:
    def run(self, kind, make_policy, make_tiny_model, num_steps=4):
        model = make_tiny_model(0)
        actor = make_policy(model)
        env, buffer = make_env(shuffle=True, seed=3), make_buffer()
        env.append_transform(Again())
        if kind == "batches":
            collector = LLMCollector(env, actor, replay_buffer=buffer)
        else:
            collector = StreamingCollector(env, actor, replay_buffer=buffer, staleness=OnPolicy())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        torch.manual_seed(7)
        stories, advantages = [], []
        for _ in range(num_steps):
            stories.append(story(collector.collect()))
            advantages.append(buffer[:]["advantage"].tolist())
            train(model, actor, buffer, optimizer)
            collector.update_policy_weights_(model)
        collector.shutdown()
        return stories, advantages, {k: v.clone() for k, v in model.state_dict().items()}

    def test_everything_is_bit_equal_to_that_of_batches(self, make_policy, make_tiny_model):
        one = self.run("batches", make_policy, make_tiny_model)
        other = self.run("streaming", make_policy, make_tiny_model)
        assert one[0] == other[0]
        assert {turns for *_, turns in one[0][0]} == {1, 2, 3}
        assert one[1] == other[1]
        assert all(torch.equal(one[2][name], other[2][name]) for name in one[2])
        assert not torch.equal(one[2]["lm_head.weight"], make_tiny_model(0).lm_head.weight)

    def test_fewer_tasks_than_a_batch_are_refused(self, make_policy):
        with pytest.raises(ValueError, match="on policy all 8 episodes of a step"):
            StreamingCollector(
                make_env(), make_policy(), staleness=OnPolicy(), max_inflight_tasks=4
            )


@pytest.mark.parametrize("staleness", [Wait(2), Wait(4, pipeline_depth=1), Drop(1)])
def test_E10_no_token_is_too_old_and_none_is_lost(
    staleness, make_policy, make_tiny_model, check_balance
):
    model, seen = make_tiny_model(1), Counter()
    with streaming(
        make_env(40), make_policy(), replay_buffer=make_buffer(), staleness=staleness
    ) as collector:
        for step, batch in enumerate(collector):
            for row in batch.unbind(0):
                drawn = row["policy_versions", "full"]
                assert step - int(drawn[drawn >= 0].min()) <= staleness.max_staleness
                seen[int(row["group_id"])] += 1
            collector.update_policy_weights_(model)
            check_balance(collector.ledger)
            assert len(collector._producer.queue.steps) <= staleness.max_staleness + 2
            if step == 9:
                break
    balance = collector.ledger.balance
    check_balance(collector.ledger)
    assert balance.in_flight.groups == 0
    assert set(seen.values()) == {N}
    if isinstance(staleness, Wait):
        assert balance.num_dropped.groups == 0


def test_the_end_of_the_program_ends_what_nobody_shut_down(make_policy, monkeypatch):
    # Threads that are cut off in a step of the engine abort the process, with status 134.
    called = [each.func for each in threading._threading_atexits]  # the last one first
    names = [each.__name__ for each in called]
    assert names.index("shut_down_running") > names.index("_python_exit")  # that of thread pools
    collector = StreamingCollector(make_env(), make_policy(), replay_buffer=make_buffer())
    collector.collect()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    program_end.shut_down_running()  # in a fork, which has none of the threads
    assert collector.is_running
    monkeypatch.undo()
    program_end.shut_down_running()
    assert not collector.is_running
    assert collector.ledger.balance.in_flight.groups == 0
    assert not program_end._RUNNING


def test_all_data_are_trained_once_and_then_it_ends(make_policy):
    env = make_env(7, num_epochs=2)  # 14 groups: the last batch has two, of groups_per_step=4
    with streaming(env, make_policy(), groups_per_step=4) as collector:
        batches = list(collector)
        with pytest.raises(DataExhaustedError):
            collector.collect()
    assert [len(batch) for batch in batches] == [16, 16, 16, 8]
    numbers = Counter(row["row"]["number"] for batch in batches for row in batch.unbind(0))
    assert numbers == dict.fromkeys(range(7), 2 * N)
    assert collector.ledger.balance.trained.groups in (12, 14)


@pytest.mark.parametrize("error", [ConnectionError("the judge is away"), KeyboardInterrupt()])
def test_a_batch_that_is_cut_off_on_its_way_comes_again(error, make_policy):
    calls = []

    def judge(batch):
        assert "judged" not in list(batch.keys())
        calls.append(batch.set("judged", torch.ones(len(batch))))
        if len(calls) == 2:
            raise error
        return batch

    collector = streaming(make_env(num_prompts=6, num_epochs=1), make_policy(), postproc=judge)
    first = collector.collect()
    with pytest.raises(type(error)):
        collector.collect()
    batches = [first, *collector]
    collector.shutdown()
    assert Counter(i for batch in batches for i in batch["group_id"].tolist()) == dict.fromkeys(
        range(6), N
    )
    ledger = collector.ledger
    assert ledger.balance.trained.groups == 6
    assert sorted(o for step in ledger.schedule for o in step) == [*range(6)]
    assert sum(v for k, v in ledger.metrics().items() if k.startswith("staleness/at_")) == 1
    assert sum(ledger._accounts.ages.values()) == 6


def test_a_group_without_a_signal_is_asked_for_again(make_policy):
    attempts = Counter()

    def reward(number, completions):
        attempts[number[0]] += 1
        flat = attempts[number[0]] == 1
        return [1.0 if flat else float(i) for i in range(len(completions))]

    env = make_env(6, reward=reward, num_epochs=1)
    buffer = make_buffer(zero_variance="refill")
    with streaming(env, make_policy(), replay_buffer=buffer) as collector:
        rows = []
        for batch in collector:
            rows += batch.unbind(0)
            assert len(buffer) == len(batch)
            buffer.empty()
    assert Counter(row["row"]["number"] for row in rows) == dict.fromkeys(range(6), N)
    assert {float(row["reward"]) for row in rows} == {0.0, 1.0, 2.0, 3.0}
    assert collector.ledger.balance.dropped["no_signal"].groups == 6


def test_a_task_without_any_signal_says_so(make_policy):
    env = make_env(reward=lambda completions: [1.0] * len(completions))
    buffer = make_buffer(zero_variance="refill")
    with streaming(env, make_policy(), replay_buffer=buffer) as collector:
        with pytest.raises(RuntimeError, match="32 groups in a row were refused"):
            collector.collect()
        assert not collector.is_running


class Failing:
    """An engine that fails when it is told to."""

    def __init__(self, engine, error):
        self.engine, self.error, self.fails = engine, error, 0
        self.vocab_size, self.max_model_len = engine.vocab_size, engine.max_model_len

    @property
    def version(self):
        return self.engine.version

    def generate(self, *args, **kwargs):
        if self.fails:
            self.fails -= 1
            raise self.error
        return self.engine.generate(*args, **kwargs)

    def update_weights(self, state_dict, *, version=None):
        self.engine.update_weights(state_dict, version=version)


def test_an_engine_that_dies_once_costs_nothing(make_policy):
    policy = make_policy()
    engine = Failing(policy.engine, EngineDied("gone"))
    env = make_env(6, num_epochs=1)
    with StreamingCollector(env, policy, engine=BatchingEngine(engine)) as collector:
        engine.fails = 1
        rows = [row for batch in collector for row in batch.unbind(0)]
    assert Counter(row["row"]["number"] for row in rows) == dict.fromkeys(range(6), N)
    assert collector.ledger.balance.dropped["engine_died"].groups >= 1


def test_an_engine_that_is_given_is_served_or_refused_when_composed(make_policy):
    policy = make_policy()
    with pytest.raises(TypeError, match=r"an AsyncEngine \(respond, .*got TransformersWrapper"):
        StreamingCollector(make_env(), policy, engine=policy)
    # That draws in batches, and is of no known kind: it has the methods of an engine.
    plain = Failing(policy.engine, EngineDied("gone"))
    for engine in (policy.engine, plain):
        with StreamingCollector(make_env(6, num_epochs=1), policy, engine=engine) as collector:
            assert sum(len(batch) for batch in collector) == 6 * N
            collector.update_policy_weights_(policy.model, wait=True)
            assert collector.policy_version == 1


class DiesUnderHold(BatchingEngine):
    """Dies once, which its requests hear one after the other, while no group may begin."""

    def __init__(self, engine, num_requests):
        super().__init__(engine)
        self.num_missing, self.dies = num_requests, asyncio.Event()

    async def respond(self, prompt, params, **kwargs):
        if self.dies.is_set():
            return await super().respond(prompt, params, **kwargs)
        self.num_missing -= 1
        number = self.num_missing
        if number == 0:
            self.hold(1)
            self.dies.set()
        await self.dies.wait()
        await asyncio.sleep(0.01 * number)
        raise EngineDied("gone")


def test_an_engine_that_dies_once_while_groups_are_held_back_died_once(make_policy):
    policy = make_policy()
    engine = DiesUnderHold(policy.engine, 6 * N)
    env = make_env(6, num_epochs=1)
    with StreamingCollector(env, policy, engine=engine, groups_per_step=6) as collector:
        engine.hold = collector._producer._hold
        threading.Timer(1.0, engine.hold, (-1,)).start()
        rows = [row for batch in collector for row in batch.unbind(0)]
    assert Counter(row["row"]["number"] for row in rows) == dict.fromkeys(range(6), N)
    assert collector.ledger.balance.dropped["engine_died"].groups == 6


def test_an_evaluation_whose_engine_dies_begins_again(make_policy):
    policy, held_out = make_policy(), make_env(8, groups=1)
    engine = Failing(policy.engine, EngineDied("gone"))
    serving = BatchingEngine(engine)
    parts = (held_out, AsyncEpisodeRunner(held_out), AsyncPolicy(policy, serving))
    engine.fails = 2  # it draws all episodes at once
    assert len(asyncio.run(draw_point(*parts, 0)).trajectories) == N
    engine.fails = 3
    with pytest.raises(EngineDied, match="gone"):
        asyncio.run(draw_point(*parts, 0))
    serving.close()
    held_out.close()


@pytest.mark.parametrize("error", [EngineDied("gone"), ZeroDivisionError("a fault")])
def test_E08_the_trainer_hears_at_once_that_collection_has_died(error, make_policy):
    policy = make_policy()
    engine = Failing(policy.engine, error)
    with StreamingCollector(make_env(), policy, engine=BatchingEngine(engine)) as collector:
        collector.collect()
        engine.fails = 1 << 30
        with pytest.raises(RuntimeError, match="the collection has failed") as raised:
            go_on(collector, policy)
        assert type(raised.value.__cause__) is type(error)
        with pytest.raises(RuntimeError, match="the collection has failed"):
            collector.collect()


def go_on(collector, policy):
    for _ in range(20):
        collector.collect()
        collector.update_policy_weights_(copy.deepcopy(policy.engine.model))


def test_the_model_that_is_trained_is_not_the_one_that_draws(make_policy):
    policy = make_policy()
    with streaming(make_env(), policy) as collector:
        with pytest.raises(ValueError, match="draws from the tensors that are trained"):
            collector.update_policy_weights_(policy.engine.model)
        with pytest.raises(ValueError, match="draws from the tensors that are trained"):
            collector.update_policy_weights_(state_dict=policy.engine.model.state_dict())
        with pytest.raises(RuntimeError, match="are pushed by its update_policy_weights_"):
            collector.weight_updater.push(copy.deepcopy(policy.engine.model))
        assert (policy.policy_version, collector.policy_version) == (0, 0)


@pytest.mark.parametrize("every", [1, 3])
def test_weights_are_pushed_after_so_many_steps(make_policy, make_tiny_model, every):
    policy = make_policy()
    with streaming(make_env(), policy, weight_sync_steps=every, staleness=Wait(4)) as collector:
        assert collector.update_policy_weights_(make_tiny_model(50), wait=True) == 1  # no step
        for step in range(1, 8):
            collector.collect()
            given = collector.update_policy_weights_(make_tiny_model(step), wait=True)
            assert given == collector.policy_version == 1 + step // every
            assert collector.ledger.version == step
            assert collector.ledger.pulled_version == step // every * every


def test_an_update_that_is_refused_is_raised_by_the_next_one(make_policy, make_tiny_model):
    weights = make_tiny_model(1).state_dict()
    wrong = {name: value for name, value in weights.items() if "norm" not in name}
    with streaming(make_env(), make_policy()) as collector:
        collector.collect()
        collector.update_policy_weights_(wrong)
        with pytest.raises(UpdateRefused):
            collector.update_policy_weights_(weights)
        assert collector.policy_version == 0
        assert collector.update_policy_weights_(weights, wait=True) == 1
        assert collector.policy_version == 1


def test_every_token_of_an_evaluation_is_of_one_version(make_policy, make_tiny_model):
    held_out = make_env(8, groups=1)
    with streaming(make_env(), make_policy()) as collector:
        for step in range(3):
            collector.collect()
            assert collector.evaluate(held_out) is None or step
            collector.update_policy_weights_(make_tiny_model(step), wait=step == 2)
        point = collector.evaluate(held_out, wait=True)
    assert point.version == 3
    points = collector.take_evaluations()
    assert [p.version for p in points if p.trajectories is not None][-1] == 3
    rows = point.trajectories.unbind(0)
    assert len(rows) == N
    assert {int(v) for row in rows for v in row["policy_versions", "full"] if v >= 0} == {3}
    assert all(p.skipped or p.trajectories is not None for p in points)
    assert collector.take_evaluations() == []
    held_out.close()


def test_an_evaluation_that_breaks_is_told_once(make_policy):
    class Broken(EpisodeTransform):
        def finish_batch(self, episodes):
            raise OSError("the disk is gone")

    def finished(collector):
        for _ in range(3000):
            if points := collector.take_evaluations():
                return points
            time.sleep(0.01)
        raise AssertionError("no evaluation ends")

    held_out, faulty = make_env(8, groups=1), make_env(8, groups=1)
    faulty.append_transform(Broken())
    with streaming(make_env(), make_policy()) as collector:
        assert collector.evaluate(faulty) is None
        with pytest.raises(OSError, match="the disk is gone"):
            finished(collector)
        assert collector.take_evaluations() == []
        assert collector.evaluate(faulty) is None
        with pytest.raises(OSError, match="the disk is gone"):
            collector.evaluate(held_out, wait=True)
        assert len(collector.evaluate(held_out, wait=True).trajectories) == N
        # Who waits comes after one that runs, and is not skipped.
        assert collector.evaluate(held_out) is None
        assert len(collector.evaluate(held_out, wait=True).trajectories) == N
        assert [point.skipped for point in finished(collector)] == [""] * 3
    for env in (held_out, faulty):
        env.close()


def test_a_pause_draws_nothing(make_policy, make_tiny_model):
    policy = make_policy()
    with streaming(make_env(1000), policy, staleness=Wait(8, pipeline_depth=8)) as collector:
        collector.collect()
        with collector.pause():
            time.sleep(0.3)  # the batch that was under way
            before = collector.ledger.balance
            time.sleep(0.3)
            assert collector.ledger.balance == before
        collector.collect()


def test_a_slow_tool_holds_up_no_other_group(scripted, call_text):
    gate = threading.Event()

    async def wait(number: int) -> str:
        """Wait.

        Args:
            number: of the prompt.
        """
        while number == 0 and not gate.is_set():
            await asyncio.sleep(0.01)
        return "done"

    rows = [{"prompt": f"question <{i}>"} for i in range(8)]
    env = ChatEnv(batch_size=2).append_transform(
        Compose(
            DataLoadingPrimer(rows, group_size=1, num_epochs=1),
            FunctionTools([wait], timeout_s=60.0),
            RewardFunctions([length_reward], completion_format="messages"),
        )
    )
    script = {f"<{i}>": [call_text("wait", number=i), "hello"] for i in range(8)}
    policy = scripted(script, write_tokens=False)
    # W = 6 of 8 slots: five younger groups may overtake the one that waits.
    staleness = Wait(8, pipeline_depth=3, window=0.75)
    with streaming(env, policy, groups_per_step=2, staleness=staleness) as collector:
        groups = [int(row["group_id"]) for _ in range(2) for row in collector.collect().unbind(0)]
        assert 0 not in groups
        gate.set()
        groups += [int(row["group_id"]) for batch in collector for row in batch.unbind(0)]
    assert sorted(groups) == list(range(8))


def test_what_an_event_raises_is_a_row_of_its_own(scripted, call_text):
    class Faulty(RewardFunctions):
        def after_turn(self, episode):
            if "<1>" in str(episode.messages):
                raise OSError("no disk")

    rows = [{"prompt": f"question <{i}>"} for i in range(4)]
    env = ChatEnv(batch_size=4).append_transform(
        Compose(
            DataLoadingPrimer(rows, num_epochs=1),
            Faulty([length_reward], completion_format="messages"),
            RewardErrorLimit(1.0),
        )
    )
    with streaming(env, scripted(["hello"], write_tokens=False)) as collector:
        (batch,) = list(collector)
    reasons = {int(row["group_id"]): row["stop_reason"] for row in batch.unbind(0)}
    assert reasons.pop(1) == "environment_error: Faulty: OSError: no disk"
    assert set(reasons.values()) == {"answered"}
    assert [bool(row["scorable"]) for row in batch.unbind(0)].count(False) == 1


def test_the_trace_and_the_metrics_say_where_time_went(make_policy, make_tiny_model, tmp_path):
    with streaming(make_env(), make_policy()) as collector:
        collector.collect()
        collector.update_policy_weights_(make_tiny_model(1), wait=True)
        metrics = collector.metrics()
        collector.write_trace(tmp_path / "trace.json")
    assert min(metrics["collect/generate_s"], metrics["collect/environment_s"]) > 0
    assert 0 <= metrics["collect/trainer_wait_fraction"] <= 1
    assert metrics["ledger/groups/trained"] == 2
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"generate", "episode", "score", "wait for rollouts", "push weights"} <= names
    tracks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {"trainer", "group 0", "group 1"} <= set(tracks.values())
    spans = [e for e in events if e["name"] == "episode" and tracks[e["pid"]] == "group 0"]
    assert sorted(span["tid"] for span in spans) == list(range(N))
