"""A collection on Ray that is killed: what dies with it, and that it goes on where it was."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from forked_ray_workers import forked_workers
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose
from transformers import AutoModelForCausalLM, AutoTokenizer

from collectors import CheckpointStore, RayLLMCollector, RunState, Wait
from collectors.cluster.ledger_service import LedgerService, Scored
from collectors.cluster.worker import CollectorWorker, WorkerSettings
from collectors.streaming.group_runner import EpisodeEnd
from objectives import MCAdvantage
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    DifficultyPools,
    EpisodeTransform,
    RewardErrorLimit,
    RewardFunctions,
    StepCounter,
)
from torchrl_envs.datasets.difficulty_pools import IDS_PER_EPOCH
from torchrl_modules import TransformersWrapper

# Ray's own clean-up closes sockets and pipes late.
pytestmark = pytest.mark.filterwarnings("ignore")
N = 3  # rollouts of a prompt
GROUPS = 2  # of a batch
PROMPTS = 24


def number_reward(number, completions):
    return [float(i) for i in range(len(completions))]


class Remembers(EpisodeTransform):
    """Knows how many episodes it has seen."""

    def __init__(self):
        super().__init__()
        self.num_seen = 0

    def begin(self, episode):
        self.num_seen += 1

    def get_extra_state(self):
        return {"num_seen": self.num_seen}

    def set_extra_state(self, state):
        self.num_seen = state["num_seen"]


def make_env(words="question", **data):
    rows = [{"prompt": f"{words} <{i}>", "number": i} for i in range(PROMPTS)]
    data = {"num_epochs": 1, "shuffle": True, "seed": 2, **data}
    return ChatEnv(batch_size=GROUPS * N).append_transform(
        Compose(
            DataLoadingPrimer(rows, group_size=N, **data),
            RewardFunctions([number_reward], completion_format="messages"),
            StepCounter(max_steps=1),
            Remembers(),
        )
    )


class Killed:
    """A ledger's side that is killed again and again, and goes on from what was saved last."""

    def __init__(self, seed):
        self.chooser = random.Random(seed)
        self.state, self.saved, self.trained = None, [], []
        self.kinds = Counter()

    env = staticmethod(make_env)

    async def live(self):
        """Collect and train until it is killed; gives whether the data have ended."""
        self.service = service = LedgerService(
            self.env(), groups_per_step=GROUPS, staleness=Wait(2)
        )
        await service.open()
        self.version, self.trained, taken = 1, list(self.saved), []
        if self.state is not None:
            state, waiting, ordinals = self.state
            taken = await service.load(json.loads(json.dumps(state)), waiting, ordinals)
            assert [ticket.ordinal for ticket in taken] == ordinals
        await service.pulled(await service.push([], 1))
        for worker in (0, 1):
            await service.join(worker, 1)
        await service.begin()
        async with asyncio.TaskGroup() as self.tasks:
            workers = [self.tasks.create_task(self.work(worker)) for worker in (0, 1)]
            for _ in range(self.chooser.randint(1, 5)):
                if taken:  # a batch that was in training when it was saved
                    await self.push(taken)
                shares = await asyncio.wait_for(service.take(), timeout=60)
                if not shares:
                    break
                taken = [share.ticket for share in shares]
                self.trained += [self.prompt_of(ticket) for ticket in taken]
                if self.chooser.random() < 0.3:
                    await self.save(taken)
            await service.stop()
            del workers
        self.kinds.update(service.ledger.balance.dropped.keys())
        return not shares

    @staticmethod
    def prompt_of(ticket):
        return ticket.ordinal

    async def push(self, taken):
        self.version += 1
        await self.service.pulled(await self.service.push(taken, self.version))
        if self.chooser.random() < 0.5:
            await self.save([])

    async def save(self, taken):
        state, shares = await self.service.state()
        waiting = {share.ticket.ordinal: ([share.rows], share.num_rows) for share in shares}
        for ordinal in list(waiting):
            if self.chooser.random() < 0.2:  # gone with their collector
                del waiting[ordinal]
        self.state = (state, waiting, [ticket.ordinal for ticket in taken])
        self.saved = list(self.trained)

    async def work(self, worker):
        while (work := await self.service.next_group(worker, 1)) is not None:
            self.tasks.create_task(self.run_group(worker, work[0], self.version))

    async def run_group(self, worker, ticket, version):
        for _ in range(self.chooser.randint(0, 9)):
            await asyncio.sleep(0)
        if self.service._is_over:
            return
        if self.chooser.random() < 0.1:
            await self.service.give_back(worker, 1, ticket)
            return
        ends = [EpisodeEnd(5, (version, version), "answered")] * N
        rows = [f"rows of {ticket.ordinal}"] * (ticket.ordinal % 5 > 0 or ticket.attempt > 0)
        rewards = [ticket.group_id % IDS_PER_EPOCH % 3 == 0] * N
        await self.service.finish(worker, 1, ticket, ends, Scored(rows, N, rewards))


def test_S06_whenever_the_ledger_is_killed_no_prompt_is_skipped_or_trained_twice():
    total = 0
    for seed in range(5):
        run, num_kills = Killed(seed), 0
        while not asyncio.run(run.live()):
            num_kills += 1
            assert num_kills < 200
        ledger = run.service.ledger
        assert sorted(run.trained) == list(range(PROMPTS))
        assert ledger.frontier == PROMPTS
        assert ledger.balance.trained.groups == PROMPTS
        assert ledger.balance.in_flight.groups == 0
        total += num_kills
        assert "no_signal" in run.kinds
    assert total > 5


class KilledWithPools(Killed):
    """Every third prompt is solved, and not to be drawn again."""

    @staticmethod
    def env():
        env = make_env(num_epochs=3, shuffle=False)
        (primer,) = env.transforms_of(DataLoadingPrimer)
        primer.admit_by(DifficultyPools(admit_easy=0.0))
        return env

    @staticmethod
    def prompt_of(ticket):
        return ticket.group_id


def test_S06_with_difficulty_pools_each_prompt_is_trained_once_in_each_epoch_that_draws_it():
    run, num_kills = KilledWithPools(3), 0
    while not asyncio.run(run.live()):
        num_kills += 1
        assert num_kills < 200
    assert sorted(run.trained) == [
        epoch * IDS_PER_EPOCH + number
        for epoch in range(3)
        for number in range(PROMPTS)
        if epoch == 0 or number % 3
    ]
    assert num_kills > 3


def test_other_data_are_refused():
    async def main():
        service, other = (
            LedgerService(make_env(words), groups_per_step=GROUPS, staleness=Wait(2))
            for words in ("question", "another")
        )
        for each in (service, other):
            await each.open()
        state, _ = await service.state()
        with pytest.raises(ValueError, match="content"):
            await other.load(state, {}, [])
        for each in (service, other):
            await each.stop()

    asyncio.run(main())


def collector_env(num_seen=0, errors=(), more=()):
    """Of a collector that has seen episodes, some of which failed."""
    limit = RewardErrorLimit(1.0)
    limit.set_extra_state(list(errors))
    env = make_env().append_transform(Compose(limit, *more))
    next(env.transforms_of(Remembers)).num_seen = num_seen
    return env


def worker_of(env):
    """A collector in this process that has its environment, and needs no policy."""
    worker = CollectorWorker(WorkerSettings(env, None, 1, 1, (), None, Wait(), -1, 1))
    worker._env = env
    return worker


def state_of(env):
    return asyncio.run(worker_of(env).state())


def load_state(env, saved, *, index, num_collectors):
    asyncio.run(worker_of(env).load_state(saved, index, num_collectors))


def test_what_a_collector_remembers_goes_to_the_one_of_its_number(tmp_path):
    states = []
    for number in range(2):
        torch.manual_seed(number)
        states.append(state_of(collector_env(3 + number, [f"error {number}"])))
    CheckpointStore(tmp_path).save(0, {"workers": states})
    saved = CheckpointStore(tmp_path).load().state["workers"]
    expected = [torch.rand(1, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    for index in (1, 0):
        env = collector_env()
        load_state(env, saved, index=index, num_collectors=2)
        assert torch.equal(torch.rand(1), expected[index])
        assert next(env.transforms_of(Remembers)).num_seen == 3 + index
        assert next(env.transforms_of(RewardErrorLimit)).get_extra_state() == [f"error {index}"]
    load_state(env, [None, *saved], index=0, num_collectors=3)  # it did not serve then
    assert next(env.transforms_of(Remembers)).num_seen == 3


def test_with_another_number_of_collectors_what_they_remember_is_dealt_out_or_refused():
    saved = [state_of(collector_env(errors=[f"error {n}", ""])) for n in range(2)]
    with pytest.raises(ValueError, match=r"num_collectors=2, this one has 3, and what Remembers"):
        load_state(collector_env(), saved, index=0, num_collectors=3)
    for state in saved:
        state["transforms"] = state["transforms"][-1:]
    with pytest.raises(ValueError, match=r"had the transforms \['RewardErrorLimit'\], these"):
        load_state(collector_env(), saved, index=0, num_collectors=2)
    dealt = []
    for index in range(3):
        env = ChatEnv(batch_size=1).append_transform(RewardErrorLimit(1.0))
        load_state(env, saved, index=index, num_collectors=3)
        dealt += next(env.transforms_of(RewardErrorLimit)).get_extra_state()
    assert sorted(dealt) == ["", "", "error 0", "error 1"]


class Run:
    """A model, its collector on Ray, and their checkpoints."""

    def __init__(self, model, tokenizer, folder):
        self.model, self.store = model, CheckpointStore(folder)

        def make_policy():
            return TransformersWrapper(
                model,
                tokenizer=tokenizer,
                generate_kwargs={"max_new_tokens": 4},
                write_tokens=False,
            )

        self.collector = RayLLMCollector(
            make_env,
            policy_factory=make_policy,
            replay_buffer=ReplayBuffer(
                storage=LazyStackStorage(GROUPS * N),
                transform=MCAdvantage(N),
                batch_size=GROUPS * N,
            ),
            staleness=Wait(2),
            ray_init_config={"num_cpus": 2, "log_to_driver": False},
        )
        self.state = RunState(model=model, collector=self.collector)
        self.done = self.state.restore(self.store)
        self.collector.update_policy_weights_(model)

    def step(self):
        """Train a batch; gives its prompts."""
        batch = self.collector.collect()
        self.collector.replay_buffer.empty()
        self.collector.update_policy_weights_(self.model)
        self.done += 1
        return sorted({int(row["row"]["number"]) for row in batch.unbind(0)})


@pytest.fixture
def by_value():
    ray = pytest.importorskip("ray")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with forked_workers():
        yield ray
        ray.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def train_until_killed(folder):
    start = folder / "start"
    model = AutoModelForCausalLM.from_pretrained(start, dtype="float32").eval()
    run = Run(model, AutoTokenizer.from_pretrained(start), folder)
    for _ in range(PROMPTS // GROUPS):
        prompts = run.step()
        # A run of its own would save less often: what is trained after the last save is again.
        (folder / f"prompts-{run.done}.json").write_text(json.dumps(prompts))
        if run.done % 2 == 0:
            run.state.save(run.store, run.done)
    time.sleep(60)


@pytest.mark.slow
def test_S02_S06_kill_9_of_a_driver_ends_its_cluster_and_the_next_run_goes_on(
    by_value, make_tiny_model, chatml_tokenizer, tmp_path, request
):
    model = make_tiny_model(0)
    model.save_pretrained(tmp_path / "start")
    chatml_tokenizer.save_pretrained(tmp_path / "start")
    # A new process, since this one may have talked to Ray. Each of its workers is one, too.
    process = subprocess.Popen([sys.executable, __file__, tmp_path])
    request.addfinalizer(process.kill)
    deadline = time.monotonic() + 200
    while not (tmp_path / "prompts-3.json").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # Ray's two agents take a minute to tell a server that is gone, before they end, too.
    family = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "Agent" not in child.name()
    ]
    assert len(family) > 4  # Ray's own, the ledger's and the collector's
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 90

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(model, chatml_tokenizer, tmp_path)
        with run.collector, run.store:
            assert run.done >= 2
            kept = run.store.load().state["parts"]["collector"]["workers"]
            (remembered,) = run.collector.state_dict()["workers"]
            assert remembered["transforms"] == kept[0]["transforms"]
            assert remembered["transforms"][-1]["state"]["num_seen"] >= 2 * GROUPS * N
            trained = [
                json.loads((tmp_path / f"prompts-{n + 1}.json").read_text())
                for n in range(run.done)
            ]
            while run.done < PROMPTS // GROUPS:
                trained.append(run.step())
            ledger = run.collector.ledger
    assert sorted(number for prompts in trained for number in prompts) == list(range(PROMPTS))
    assert ledger.balance.trained.groups == ledger.frontier == PROMPTS
    assert ledger.balance.in_flight.groups == 0
    while left := [child for child in family if alive(child)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    train_until_killed(Path(sys.argv[1]))
