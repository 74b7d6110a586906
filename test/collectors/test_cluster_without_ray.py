"""What a cluster's collectors say to its ledger, and how they follow their engines; without Ray."""

import asyncio
from types import SimpleNamespace

import pytest
from torchrl.envs.transforms import Compose

from collectors import Drop, LoadCap, Wait
from collectors.cluster.ledger_service import LedgerService, Scored
from collectors.cluster.worker import CollectorWorker, WorkerSettings
from collectors.streaming.group_runner import EpisodeEnd
from torchrl_envs import ChatEnv, DataLoadingPrimer
from torchrl_modules import EngineLoad
from torchrl_modules.engines.batching_engine import BatchingEngine
from torchrl_modules.engines.blocking_engine import BlockingEngine

N = 4  # rollouts of a prompt
GROUPS = 2  # of a batch
NUM_SLOTS = 2 * GROUPS


def make_env():
    rows = [{"prompt": f"question <{i}>"} for i in range(12)]
    primer = DataLoadingPrimer(rows, group_size=N, num_epochs=1)
    return ChatEnv(batch_size=GROUPS * N).append_transform(Compose(primer))


def settings_of(policy, staleness, tasks):
    most = NUM_SLOTS * N
    return WorkerSettings(make_env(), policy, N, most, (), None, staleness, tasks, NUM_SLOTS)


class Crowded(BatchingEngine):
    """As full as it is told to be; draws when it may."""

    tells_load, cache_use, num_waiting, may_draw = True, 0.1, 0, False

    async def measure_load(self):
        return EngineLoad(self.cache_use, 0)

    async def respond(self, prompt, params, **kwargs):
        self.num_waiting += 1
        try:
            while not self.may_draw:
                await asyncio.sleep(0.005)
        finally:
            self.num_waiting -= 1
        return await super().respond(prompt, params, **kwargs)


class Handle:
    """Calls a service as Ray's handle of its actor does, in this process."""

    def __init__(self, service):
        self.service = service

    def __getattr__(self, name):
        return SimpleNamespace(remote=getattr(self.service, name))


def test_a_collector_follows_its_engine_and_the_youngest_groups_run_again(scripted, monkeypatch):
    monkeypatch.setattr("collectors.cluster.worker.load_ray", lambda: SimpleNamespace(put=list))
    policy = scripted(["hello"], write_tokens=False)
    engine = Crowded(policy.engine)
    policy.engine = BlockingEngine(engine)
    cap, ages = LoadCap(interval_s=0.01), Wait(2)

    async def until(holds):
        while not holds():
            await asyncio.sleep(0.005)

    async def main():
        service = LedgerService(make_env, groups_per_step=GROUPS, staleness=ages)
        await service.open()
        worker = CollectorWorker(settings_of(policy, ages, cap))
        await worker.open()
        await service.join(0, 1)
        await service.begin()
        running = asyncio.create_task(worker.run(Handle(service), 0, 1))
        await until(lambda: engine.num_waiting == NUM_SLOTS * N)
        engine.cache_use = 0.95
        await until(lambda: engine.num_waiting == N)  # 3 groups, 2, 1
        await until(lambda: service.ledger.balance.dropped == {"load": (3, 0)})
        engine.cache_use, engine.may_draw = 0.1, True
        trained = []
        while shares := await service.take():
            trained += [share.ticket.ordinal for share in shares]
            await service.pulled(await service.push([share.ticket for share in shares], 0))
        ledger = await service.stop()
        await running
        await worker.close()
        return trained, ledger

    trained, ledger = asyncio.run(asyncio.wait_for(main(), timeout=60))
    assert sorted(trained) == list(range(12))
    assert ledger.balance.dropped == {"load": (3, 0)}
    assert ledger.balance.trained.groups == 12


@pytest.mark.parametrize(
    ("staleness", "tasks", "message"),
    [
        (Wait(2), LoadCap(), "RayLLMCollector: BatchingEngine does not tell how full"),
        (Wait(2, recompute=False), -1, "RayLLMCollector: .* which BatchingEngine can't do"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(staleness, tasks, message, scripted):
    policy = scripted(["hello"], write_tokens=False)
    policy.engine = BlockingEngine(BatchingEngine(policy.engine))
    with pytest.raises(ValueError, match=message):
        asyncio.run(CollectorWorker(settings_of(policy, staleness, tasks)).open())


class TestLedgerService:
    """The ledger's side of the messages, without Ray."""

    @pytest.fixture(autouse=True)
    def balanced(self, check_balance):
        self.check_balance = check_balance

    def play(self, main, env=None, **settings):
        settings = {"groups_per_step": GROUPS, "staleness": Wait(2)} | settings

        async def with_service():
            service = LedgerService(env or make_env(), **settings)
            assert (await service.open())[:2] == (GROUPS, N)
            await service.begin()
            try:
                return await asyncio.wait_for(main(service), timeout=60)
            finally:
                await service.stop()
                self.check_balance(service.ledger)

        return asyncio.run(with_service())

    async def finish(self, service, worker, ticket, versions=(0, 0)):
        ends = [EpisodeEnd(5, versions, "answered")] * N
        await service.finish(worker, 1, ticket, ends, Scored([f"rows of {ticket.ordinal}"], N))

    def test_a_lost_collectors_groups_run_again_with_their_seeds(self):
        async def main(service):
            for worker in (0, 1):
                await service.join(worker, 1)
            asked = [await service.next_group(worker, 1) for worker in (0, 0, 0, 1)]
            await self.finish(service, 0, asked[0][0])
            assert await service.lose(0, 1) == 1
            # What it says afterwards changes nothing.
            await self.finish(service, 0, asked[1][0])
            assert await service.next_group(0, 1) is None
            assert service.ledger.balance.returned.groups == 3
            again = [await service.next_group(1, 1) for _ in range(3)]
            return asked, again

        asked, again = self.play(main)

        def seeds(groups):
            return [(ticket.ordinal, ticket.seed) for ticket, _ in groups]

        assert seeds(again) == seeds(asked[:3])
        assert [prompt for _, prompt in again] == [prompt for _, prompt in asked[:3]]

    def test_groups_go_to_who_has_least_to_do(self):
        async def main(service):
            for worker in (0, 1):
                await service.join(worker, 1)
            first = await service.next_group(0, 1)
            both = await asyncio.gather(service.next_group(0, 1), service.next_group(1, 1))
            return first[0].ordinal, [ticket.ordinal for ticket, _ in both]

        assert self.play(main) == (0, [2, 1])

    def test_a_batch_whose_rows_are_gone_is_put_back_and_filled_up(self):
        async def main(service):
            await service.join(0, 1)
            tickets = [(await service.next_group(0, 1))[0] for _ in range(GROUPS)]
            for ticket in tickets:
                await self.finish(service, 0, ticket)
            shares = await service.take()
            assert [share.rows for share in shares] == ["rows of 0", "rows of 1"]
            await service.put_back([tickets[0]])
            again, _ = await service.next_group(0, 1)
            assert (again.ordinal, again.seed) == (0, tickets[0].seed)
            await self.finish(service, 0, again)
            shares = await service.take()
            step = await service.push([share.ticket for share in shares], 1)
            await service.pulled(step)
            return sorted(share.ticket.ordinal for share in shares), service.ledger.balance

        ordinals, balance = self.play(main)
        assert ordinals == [0, 1]
        assert (balance.trained.groups, balance.returned.groups) == (2, 1)

    def test_what_an_engine_has_no_room_for_runs_again_and_is_counted(self):
        async def main(service):
            await service.join(0, 1)
            asked = [await service.next_group(0, 1) for _ in range(2)]
            await service.give_back(0, 1, asked[1][0], "load")
            return asked[1], await service.next_group(0, 1), service.ledger.balance

        asked, again, balance = self.play(main)
        assert (again[0].ordinal, again[0].seed, again[1]) == (1, asked[0].seed, asked[1])
        assert balance.dropped == {"load": (1, 0)}

    def test_under_drop_what_runs_too_long_is_drawn_again(self):
        async def main(service):
            await service.join(0, 1)
            asked = [(await service.next_group(0, 1))[0] for _ in range(2 * GROUPS)]
            slow, quick = asked[0], asked[1:]
            for ticket in quick[:GROUPS]:
                await self.finish(service, 0, ticket)
            shares = await service.take()
            await service.pulled(await service.push([share.ticket for share in shares], 1))
            await self.finish(service, 0, slow)  # nobody waits for it any more
            return service.ledger.balance.dropped, (await service.next_group(0, 1))[0], slow

        dropped, again, slow = self.play(main, staleness=Drop(0, pipeline_depth=1))
        assert dropped["stale"].groups == 2
        assert (again.ordinal, again.attempt) == (slow.ordinal, 1)
        assert again.seed != slow.seed
