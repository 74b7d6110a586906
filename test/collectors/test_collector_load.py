"""A collector of a cluster follows the load of its engine; played without Ray."""

import asyncio
from types import SimpleNamespace

import pytest
from torchrl.envs.transforms import Compose

from collectors import LoadCap, Wait
from collectors.cluster.ledger_service import LedgerService
from collectors.cluster.worker import CollectorWorker, WorkerSettings
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
