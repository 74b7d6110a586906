"""As many groups run as the engine has room for; the youngest are given back, none is lost."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrl.envs.transforms import Compose

from collectors import Drop, LoadCap, OnPolicy, StreamingCollector, Wait
from collectors.streaming.load_cap import GroupCap
from torchrl_envs import ChatEnv, DataLoadingPrimer, EpisodeTransform
from torchrl_modules import EngineLoad, TransformersWrapper
from torchrl_modules.engines.batching_engine import BatchingEngine

N = 2  # rollouts of a prompt

# Use of the cache, preemptions, groups that run, that have ended, version -> that may run; by hand.
TRACE = [
    ((0.1, 7, 20, 0, 0), 20),  # the most
    ((0.7, 7, 20, 3, 0), 20),
    ((0.9, 7, 20, 5, 0), 17),  # 20 * 0.8 / 0.9 = 17.8
    ((0.5, 9, 17, 6, 0), 13),  # two were put off: 17 * 0.8 = 13.6
    ((0.5, 9, 13, 18, 0), 13),  # 12 have ended since
    ((0.5, 9, 12, 19, 0), 13),  # not all run that may
    ((0.5, 9, 13, 19, 0), 16),  # 13 * 1.25 = 16.25
    ((0.5, 9, 16, 34, 0), 16),
    ((0.7, 9, 16, 40, 0), 16),  # between 0.6 and 0.8
    ((0.7, 12, 16, 40, 1), 16),  # an update: they are read again
    ((0.7, 14, 16, 40, 1), 16),  # and were, when it was over
    ((0.7, 15, 5, 40, 1), 4),  # 5 * 0.8
    ((0.99, 15, 1, 41, 1), 1),  # never none
    ((0.1, 15, 1, 42, 1), 1),  # it grew to too many: twice as many have to end
    ((0.1, 15, 1, 43, 1), 2),  # one more at least
    ((0.1, 15, 2, 46, 1), 2),
    ((0.1, 3, 2, 47, 1), 3),  # another engine, which counts from 0
    ((0.1, 3, 3, 50, 1), 4),  # growing after growing: no longer twice as many
]


def test_a_trace_worked_by_hand():
    cap = GroupCap(LoadCap(), 20)
    found = [
        cap.observe(EngineLoad(use, preemptions), running, ended, version)
        for (use, preemptions, running, ended, version), _ in TRACE
    ]
    assert found == [expected for _, expected in TRACE]


looks = st.tuples(
    st.floats(0, 1), st.integers(0, 3), st.integers(0, 60), st.integers(0, 99), st.integers(0, 1)
)


@given(
    most=st.integers(1, 50),
    rules=st.builds(
        LoadCap,
        grow_below=st.floats(0.01, 0.5),
        trim_above=st.floats(0.5, 0.99),
        grow=st.floats(1.001, 9),
        cut=st.floats(0.01, 0.99),
    ),
    trace=st.lists(looks, max_size=30),
)
def test_any_load_leaves_one_group_and_never_more_than_may_run(most, rules, trace):
    cap = GroupCap(rules, most)
    preemptions = version = ended = left = 0
    for use, more, running, ends, pushed in trace:
        before, preemptions, version = cap.num_groups, preemptions + more, version + pushed
        ended, left = ended + ends, left + ends
        now = cap.observe(EngineLoad(use, preemptions), running, ended, version)
        assert 1 <= now <= most
        if use > rules.trim_above:
            assert now == 1 or now < min(before, max(running, 1))
        elif not more:
            assert now >= before
            if use < rules.grow_below and running >= before and left >= 32 * before:
                assert now > before or now == most
        if now > before:
            assert use < rules.grow_below
            assert left >= before
        left = 0 if now != before else left


class Crowded(BatchingEngine):
    """Draws when it may, and is as full as it is told to be."""

    tells_load = True

    def __init__(self, engine):
        super().__init__(engine)
        self.cache_use, self.running = 0.1, []
        self.may_draw = False

    async def measure_load(self):
        return EngineLoad(self.cache_use, 0)

    async def respond(self, prompt, params, **kwargs):
        self.running.append(tuple(prompt))
        try:
            while not self.may_draw:
                await asyncio.sleep(0.005)
        finally:
            self.running.remove(tuple(prompt))
        return await super().respond(prompt, params, **kwargs)


class Seeds(EpisodeTransform):
    """Notes the seed of each episode that begins."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def begin(self, episode):
        self.seen.setdefault(episode.group_id, []).append(episode.seed)


def make_env(num_prompts=8):
    rows = [{"prompt": f"question <{i}>"} for i in range(num_prompts)]
    primer = DataLoadingPrimer(rows, group_size=N, num_epochs=1, seed=5)
    return ChatEnv(batch_size=N).append_transform(Compose(primer))


def until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("staleness", [Wait(4), Drop(20, pipeline_depth=3)])
def test_the_youngest_groups_are_given_back_and_run_again_with_their_seeds(staleness, scripted):
    policy = scripted(["hello"], write_tokens=False)
    engine, seeds = Crowded(policy.engine), Seeds()
    with StreamingCollector(
        make_env().append_transform(seeds),
        policy,
        engine=engine,
        groups_per_step=1,
        staleness=staleness,
        max_inflight_tasks=LoadCap(interval_s=0.02),
    ) as collector:
        assert collector.ledger.num_slots == 4
        collector.start()
        until(lambda: len(engine.running) == 4 * N)
        engine.cache_use = 0.95
        until(lambda: len(engine.running) == N)  # 3, 2, 1
        oldest = {policy.tokenizer.decode(ids) for ids in engine.running}
        assert ["<0>" in text for text in oldest] == [True]
        until(lambda: collector.metrics().get("ledger/groups/dropped/load") == 3)
        metrics = collector.metrics()
        assert (metrics["collect/max_groups"], metrics["collect/cache_use"]) == (1, 0.95)
        assert collector.ledger.balance.offered.groups == 4
        engine.cache_use = 0.1
        engine.may_draw = True
        numbers = [int(row["group_id"]) for batch in collector for row in batch.unbind(0)]
    assert sorted(numbers) == sorted(list(range(8)) * N)
    assert all(len(set(own)) == 1 for own in seeds.seen.values())
    assert [len(seeds.seen[i]) for i in range(8)] == [N, 2 * N, 2 * N, 2 * N] + 4 * [N]
    balance = collector.ledger.balance
    assert balance.dropped == {"load": (3, 0)}
    assert (balance.offered.groups, balance.trained.groups) == (11, 8)


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize(
    ("staleness", "message"),
    [
        (Wait(4), "AsyncTransformersEngine does not tell how full its cache is"),
        (OnPolicy(), r"on policy all \d+ episodes .* max_inflight_tasks=LoadCap\("),
    ],
)
def test_a_load_that_nobody_tells_is_refused(staleness, message, chatml_tokenizer, make_tiny_model):
    policy = TransformersWrapper(
        make_tiny_model(0), tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 2}
    )
    with pytest.raises(ValueError, match=message):
        StreamingCollector(make_env(), policy, staleness=staleness, max_inflight_tasks=LoadCap())


@pytest.mark.parametrize("number", [-1, 6])
def test_a_number_of_tasks_is_kept_whatever_the_load(number, scripted):
    policy = scripted(["hello"], write_tokens=False)
    engine = Crowded(policy.engine)
    engine.cache_use = 0.99  # nobody asks
    with StreamingCollector(
        make_env(), policy, engine=engine, groups_per_step=2, max_inflight_tasks=number
    ) as collector:
        collector.start()
        until(lambda: len(engine.running) == (8 * N if number == -1 else 6))
        assert "collect/max_groups" not in collector.metrics()
        engine.may_draw = True


def test_rules_that_make_no_sense_are_refused():
    for rules, message in [
        ({"grow": 1.0}, "grow must be a finite number in"),
        ({"cut": 1.0}, "cut must be a finite number in"),
        ({"grow_below": 0.9}, "grow_below=0.9 is above trim_above=0.8"),
        ({"max_inflight_tasks": 0}, "max_inflight_tasks must be a whole number"),
    ]:
        with pytest.raises(ValueError, match=message):
            LoadCap(**rules)
