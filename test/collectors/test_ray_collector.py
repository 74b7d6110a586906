"""Collection on a real local Ray: what is collected, and what becomes of it when a part dies."""

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from forked_ray_workers import forked_workers
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import CollectorDied, LoadCap, OnPolicy, RayLLMCollector, Wait
from collectors.streaming import program_end
from objectives import MCAdvantage
from torchrl_envs import (
    ChatEnv,
    DataExhaustedError,
    DataLoadingPrimer,
    EpisodeTransform,
    RewardFunctions,
    StepCounter,
)
from torchrl_modules import EngineFleet, EngineLoad, TransformersWrapper, vLLMWrapper
from torchrl_modules.engines.batching_engine import BatchingEngine
from torchrl_modules.engines.blocking_engine import BlockingEngine
from torchrl_modules.tiny_model import tiny_qwen3
from torchrl_modules.vllm.bridges import OwnServerEngine
from torchrl_modules.weights.expected_weights import UpdateRefused

# Ray's own clean-up closes sockets and pipes late.
pytestmark = pytest.mark.filterwarnings("ignore")
N = 4  # rollouts of a prompt
GROUPS = 2  # of a batch
FAKE = Path(__file__).parents[1] / "modules/engines/fake_engine.py"
FAULTS = json.dumps({"vocabulary": 400})
WEIGHTS = {"a": torch.ones(4, 3), "b": torch.zeros(3)}
WRONG = {"a": torch.ones(4, 4), "b": torch.zeros(3)}


WATCHED = """
import os, runpy, sys, threading, time
parent = os.getppid()

def watch():
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(0)

threading.Thread(target=watch, daemon=True).start()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def length_reward(completions):
    return [float(len(str(completion))) for completion in completions]


class Slowly(EpisodeTransform):
    """An environment that takes its time for a turn."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    async def after_turn(self, episode):

        async def sleep():
            await asyncio.sleep(self.seconds)

        await self.call(sleep, timeout_s=60.0)


def make_env(num_prompts=1000, seconds=0.0, num_epochs=None):
    rows = [{"prompt": f"question <{i}>", "number": i} for i in range(num_prompts)]
    return ChatEnv(batch_size=GROUPS * N).append_transform(
        Compose(
            DataLoadingPrimer(rows, group_size=N, num_epochs=num_epochs),
            Slowly(seconds),
            RewardFunctions([length_reward], completion_format="messages"),
            StepCounter(max_steps=1),
        )
    )


class FullAtFirst(BatchingEngine):
    """Tells that its cache is full for a while, from when it draws for a second group."""

    tells_load, num_looks, num_rows = True, 0, 0

    async def respond(self, *row, **options):
        self.num_rows += 1
        return await super().respond(*row, **options)

    async def measure_load(self):
        self.num_looks += self.num_rows > N
        return EngineLoad(0.95 if 0 < self.num_looks < 15 else 0.1, 3)


def make_buffer(group_size=N):
    return ReplayBuffer(
        storage=LazyStackStorage(GROUPS * N),
        transform=MCAdvantage(group_size),
        batch_size=GROUPS * N,
    )


@pytest.fixture(scope="module")
def ray():
    """One Ray for all tests of this file; its workers get the functions of this file by value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray = pytest.importorskip("ray")
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        with forked_workers():
            ray.init(
                num_cpus=4,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=100 << 20,
            )
            yield ray
            ray.shutdown()
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@contextmanager
def fake_server(folder):
    """A vLLM server's protocol in a process that does not outlive its parent; its pid is told."""
    path = folder / f"socket{len(list(folder.iterdir()))}"
    command = [sys.executable, "-S", "-c", WATCHED, str(FAKE), str(path), FAULTS]
    with subprocess.Popen(command) as process:
        (folder / f"pid{process.pid}").touch()
        try:
            yield f"unix://{path}"
        finally:
            process.kill()


def kill(ray, actor):
    """``kill -9`` of an actor's process."""
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)


def pid_of(name):
    """The one process of this test that has a name."""
    family = psutil.Process().children(recursive=True)
    (found,) = [process.pid for process in family if name in " ".join(process.cmdline())]
    return found


def train_forever(collector):
    while True:
        collector.collect()
        collector.update_policy_weights_(state_dict=WEIGHTS)


class TestRay:
    @pytest.mark.parametrize("from_factory", [True, False])
    def test_a_policy_that_has_had_updates_goes_on_from_its_version(
        self, ray, chatml_tokenizer, make_tiny_model, from_factory
    ):
        model = make_tiny_model(0)

        def make_policy():
            sampling = {"max_new_tokens": 4}
            policy = TransformersWrapper(
                model, tokenizer=chatml_tokenizer, generate_kwargs=sampling
            )
            policy.update_weights(model.state_dict(), version=3)
            return policy

        which = {"policy_factory": make_policy} if from_factory else {"policy": make_policy()}
        with RayLLMCollector(make_env, staleness=OnPolicy(), **which) as collector:
            found = []
            for _ in range(2):
                rows = collector.collect()
                found.append(rows["policy_version"].tolist())
                assert collector.update_policy_weights_(make_tiny_model(1)) == len(found) + 3
            collector.collect()  # which waits for the update
            with pytest.raises(UpdateRefused):
                collector.update_policy_weights_(state_dict=WRONG, wait=True)
            assert collector.policy_version == 5
        assert found == [[3] * N * GROUPS, [4] * N * GROUPS]

    def test_with_a_seed_every_rollout_of_two_collectors_differs(
        self, ray, chatml_tokenizer, make_tiny_model
    ):
        sampling = {"max_new_tokens": 12, "min_tokens": 12, "seed": 7}
        model = make_tiny_model(0)

        def make_policy():
            return TransformersWrapper(model, tokenizer=chatml_tokenizer, generate_kwargs=sampling)

        def make_questions():
            data = DataLoadingPrimer([{"prompt": "question"}, {"prompt": "tool"}], group_size=N)
            parts = Compose(data, RewardFunctions([length_reward]), StepCounter(max_steps=1))
            return ChatEnv(batch_size=GROUPS * N).append_transform(parts)

        said = []
        with RayLLMCollector(
            make_questions, policy_factory=make_policy, num_collectors=2
        ) as collector:
            for _ in range(3):
                for row in collector.collect().unbind(0):
                    mask = row["masks", "all_assistant_mask"]
                    said.append(tuple(row["tokens", "full"][mask].tolist()))
        assert len(set(said)) == len(said) == 3 * GROUPS * N

    def test_two_collectors_one_killed_in_the_midst(
        self, ray, chatml_tokenizer, make_tiny_model, check_balance
    ):
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        model = make_tiny_model(0)

        def make_policy():
            return TransformersWrapper(
                model,
                tokenizer=chatml_tokenizer,
                generate_kwargs={"max_new_tokens": 6},
                write_tokens=False,
            )

        def scaled(factor):
            return {name: value * factor for name, value in model.state_dict().items()}

        group = ray.util.placement_group([{"CPU": 1}] * 2)
        ray.get(group.ready())
        buffer = make_buffer()
        collector = RayLLMCollector(
            lambda: make_env(12, seconds=0.05, num_epochs=1),
            policy_factory=make_policy,
            replay_buffer=buffer,
            staleness=Wait(2),
            num_collectors=2,
            remote_config={
                "num_cpus": 1,
                "runtime_env": {"env_vars": {"PASSED_ON": "1"}},
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group),
            },
        )
        supervisor = collector._supervisor
        numbers, versions = Counter(), []
        with collector:
            for step, batch in enumerate(collector):
                assert len(batch) == len(buffer) == GROUPS * N
                assert torch.isfinite(buffer[:]["advantage"]).all()
                numbers.update(batch["group_id"].tolist())
                versions.append(batch["policy_version"].min().item())
                buffer.empty()
                weights = scaled(1 + step / 100)
                assert collector.update_policy_weights_(state_dict=weights) == step + 1
                if step == 0:
                    with pytest.raises(ValueError, match="not above the present one, 1"):
                        collector.update_policy_weights_(model, version=1)
                if step == 1:
                    kill(ray, supervisor.workers[0])
            reserved = f"CPU_group_{group.id.hex()}"
            assert ray.cluster_resources()[reserved] == 2
            assert reserved not in ray.available_resources()  # the new collector is in there, too
            metrics = collector.metrics()
            with pytest.raises(DataExhaustedError):
                collector.collect()
            ledger = collector.ledger
            check_balance(ledger)
        # Every prompt was trained once, none twice, and none is too old.
        assert list(numbers.values()) == [N] * 12
        assert ledger.balance.trained.groups == 12
        assert all(step - version <= 2 for step, version in enumerate(versions))
        assert versions[-1] > 0
        assert 0 < metrics["collect/driver_bytes_per_row"] < 1024
        assert supervisor.known[0].incarnation == 2
        ray.util.remove_placement_group(group)
        with pytest.raises(RuntimeError, match="shut down"):
            collector.collect()

    @pytest.mark.weekly  # test_cluster_without_ray.py asks the same of one in this process
    def test_collectors_follow_the_load_of_their_engines(
        self, ray, chatml_tokenizer, make_tiny_model, check_balance
    ):
        model = make_tiny_model(0)

        def make_policy():
            policy = TransformersWrapper(
                model,
                tokenizer=chatml_tokenizer,
                generate_kwargs={"max_new_tokens": 4},
                write_tokens=False,
            )
            policy.engine = BlockingEngine(FullAtFirst(policy.engine))
            return policy

        collector = RayLLMCollector(
            lambda: make_env(12, seconds=0.5, num_epochs=1),
            policy_factory=make_policy,
            replay_buffer=make_buffer(),
            staleness=Wait(2),
            num_collectors=2,
            max_inflight_tasks=LoadCap(interval_s=0.02),
            remote_config={"num_cpus": 1},
        )
        loads, numbers = [], Counter()
        with collector:
            for batch in collector:
                numbers.update(batch["group_id"].tolist())
                collector.replay_buffer.empty()
                collector.update_policy_weights_(model)
                loads.append(collector.metrics())
            ledger = collector.ledger
        assert list(numbers.values()) == [N] * 12
        assert ledger.balance.dropped["load"].groups > 0
        check_balance(ledger)
        # 3 of each; one that has not begun has told none.
        assert {load["collect/preemptions"] for load in loads} <= {3, 6}
        assert {load["collect/cache_use"] for load in loads} <= {0.95, 0.1}
        most = 2 * collector.ledger.num_slots  # that two collectors may run
        caps = [load["collect/max_groups"] for load in loads]
        assert all(1 <= cap <= most for cap in caps), caps
        assert min(caps) < most

    def test_ray_that_has_no_place_for_a_collector_is_told_of(
        self, ray, chatml_tokenizer, make_tiny_model, monkeypatch, caplog
    ):
        monkeypatch.setattr("collectors.cluster.supervisor._TELL_S", 0.2)
        policy = TransformersWrapper(make_tiny_model(0), tokenizer=chatml_tokenizer)
        collector = RayLLMCollector(
            make_env,
            policy=policy,
            replay_buffer=make_buffer(),
            staleness=Wait(2),
            remote_config={"num_cpus": 100},
        )
        with collector:
            waiting = collector._supervisor.submit(collector._supervisor.ready())
            while not caplog.messages:
                time.sleep(0.05)
            waiting.cancel()
            collector.async_shutdown(timeout=0.5)  # there is none that could give back what it has
        assert "asks for {'num_cpus': 100}; Ray has {" in caplog.messages[0]
        assert "'CPU': 4.0" in caplog.messages[0]

    @pytest.mark.weekly
    def test_two_engines_one_killed_then_a_refused_update_then_the_ledger(
        self, ray, chatml_tokenizer, tmp_path, check_balance
    ):
        def make_policy():
            folder = tmp_path / str(os.getpid())
            folder.mkdir(exist_ok=True)
            start = partial(OwnServerEngine, partial(fake_server, folder), wait_s=20)
            return vLLMWrapper(
                EngineFleet([start], probe_interval_s=0.1),
                tokenizer=chatml_tokenizer,
                generate_kwargs={"max_new_tokens": 6, "stop_token_ids": ()},
            )

        def engines():
            pids = [int(path.name[3:]) for path in tmp_path.glob("*/pid*")]
            return [pid for pid in pids if psutil.pid_exists(pid)]

        collector = RayLLMCollector(
            lambda: make_env(seconds=0.05),
            policy_factory=make_policy,
            replay_buffer=make_buffer(),
            staleness=Wait(2),
            num_collectors=2,
        )
        supervisor = collector._supervisor
        with collector:
            collector.update_policy_weights_(state_dict=WEIGHTS)
            for _ in range(2):
                collector.collect()
                collector.update_policy_weights_(state_dict=WEIGHTS)
            while not all(known.may_serve for known in supervisor.known):
                time.sleep(0.05)
            before = engines()
            assert len(before) == 2
            os.kill(before[0], signal.SIGKILL)
            for _ in range(3):
                batch = collector.collect()
                collector.update_policy_weights_(state_dict=WEIGHTS)
            assert len(batch) == GROUPS * N
            while len(set(engines()) - {before[0]}) < 2:
                time.sleep(0.05)
            assert [known.incarnation for known in supervisor.known] == [1, 1]
            check_balance(collector.ledger)

            version = collector.policy_version
            collector.collect()
            with pytest.raises(UpdateRefused):
                collector.update_policy_weights_(state_dict=WRONG, wait=True)
            assert collector.policy_version == version
            collector.update_policy_weights_(state_dict=WEIGHTS, wait=True)
            assert collector.collect()["policy_version"].max().item() <= version + 1

            os.kill(pid_of("ray::LedgerService"), signal.SIGKILL)
            killed_s = time.monotonic()
            with pytest.raises(CollectorDied, match="ledger is gone"):
                train_forever(collector)
            assert time.monotonic() - killed_s < 5
            with pytest.raises(CollectorDied):
                collector.update_policy_weights_(state_dict=WEIGHTS)
        deadline = time.monotonic() + 10
        while engines():
            assert time.monotonic() < deadline, "engines outlive their collectors"
            time.sleep(0.1)

    def test_ctrl_c_in_a_collection_is_one_and_loses_nothing(
        self, ray, chatml_tokenizer, monkeypatch, check_balance
    ):
        """Ray's native code would make another error of it, which nobody expects."""

        model = tiny_qwen3(len(chatml_tokenizer))

        def make_policy():
            return TransformersWrapper(
                model,
                tokenizer=chatml_tokenizer,
                generate_kwargs={"max_new_tokens": 2},
                write_tokens=False,
            )

        def interrupted(_):
            raise KeyboardInterrupt

        numbers = Counter()
        with RayLLMCollector(
            lambda: make_env(2 * GROUPS, seconds=1.0, num_epochs=1),
            policy_factory=make_policy,
            staleness=Wait(1),
        ) as collector:
            # A turn takes a second, and none begins before this.
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                collector.collect()
            for _ in range(2):
                with monkeypatch.context() as patch:
                    patch.setattr(collector._ledger_client, "_rows_of", interrupted)
                    with pytest.raises(KeyboardInterrupt):
                        collector.collect()
                numbers.update(collector.collect()["group_id"].tolist())
                collector.update_policy_weights_(model, wait=True)
            check_balance(collector.ledger)
        assert list(numbers.values()) == [N] * 2 * GROUPS

    def test_gdpo_weighs_the_rewards_as_the_environment_does(self, ray, chatml_tokenizer):
        """One of four has a reward of 1 and 0.75 / 0.5; the other function counts nothing."""

        def is_first(completions):
            return [float(place == 0) for place in range(len(completions))]

        def place_of(completions):
            return list(range(len(completions)))

        def make():
            data = DataLoadingPrimer([{"prompt": "question"}], group_size=N)
            rewards = RewardFunctions([is_first, place_of], weights=[2.0, 0.0])
            parts = Compose(data, rewards, StepCounter(max_steps=1))
            return ChatEnv(batch_size=N).append_transform(parts)

        advantage = MCAdvantage(N, estimator="gdpo")
        buffer = ReplayBuffer(storage=LazyStackStorage(N), transform=advantage, batch_size=N)
        model, sampling = tiny_qwen3(len(chatml_tokenizer)), {"max_new_tokens": 2}

        def make_policy():
            return TransformersWrapper(
                model, tokenizer=chatml_tokenizer, generate_kwargs=sampling, write_tokens=False
            )

        with RayLLMCollector(make, policy_factory=make_policy, replay_buffer=buffer) as collector:
            collector.collect()
        found = sorted(buffer[:]["advantage"].unique().tolist())
        assert found == pytest.approx([-0.5, 1.5], rel=1e-3)

    def test_rows_that_wait_are_in_nobodys_memory_but_rays(self, ray, chatml_tokenizer):
        """Rows of a megabyte: the messages about them stay small, and so do trainer and ledger."""
        heavy, num_waiting = 1 << 20, 3 * GROUPS

        class Heavy(EpisodeTransform):
            def finish(self, episode):
                num_tokens = episode.conversation.num_tokens(0)
                size = (num_tokens, heavy // num_tokens + 1)
                episode.token_entries["picture"] = torch.zeros(size, dtype=torch.uint8)

        def make_policy():
            torch.manual_seed(0)
            return TransformersWrapper(
                tiny_qwen3(len(chatml_tokenizer)),
                tokenizer=chatml_tokenizer,
                generate_kwargs={"max_new_tokens": 2},
                write_tokens=False,
            )

        with RayLLMCollector(
            lambda: make_env().append_transform(Heavy()),
            policy_factory=make_policy,
            staleness=Wait(4),
        ) as collector:
            references = ray._private.worker.global_worker.core_worker.get_all_reference_counts
            collector.collect()
            known = len(references())
            processes = [psutil.Process(), psutil.Process(pid_of("ray::LedgerService"))]
            before = [process.memory_full_info().uss for process in processes]
            while collector.metrics()["collect/queued_groups"] < num_waiting:
                time.sleep(0.05)
            after = [process.memory_full_info().uss for process in processes]
            for _ in range(3):
                batch = collector.collect()
            assert len(references()) <= known  # nobody holds rows that were taken
            metrics = collector.metrics()

            processes[1].kill()
            with pytest.raises(CollectorDied, match="ledger is gone"):
                train_forever(collector)
            with pytest.raises(CollectorDied):
                collector.update_policy_weights_(state_dict=WEIGHTS)
        assert min(row["next", "picture"].nbytes for row in batch.unbind(0)) >= heavy
        assert metrics["collect/driver_bytes_per_row"] < 1024
        waited = num_waiting * N * heavy
        for now, then in zip(after, before, strict=True):
            assert now - then < waited / 4

    def test_a_push_that_the_end_cuts_off_is_no_error(self, ray, scripted):
        async def push(collector):
            while not collector._is_closed:
                await asyncio.sleep(0.001)
            ledger = collector._supervisor._ledger
            ray.kill(ledger)
            while True:  # it may still answer before it ends
                await ledger.report.remote()

        policy = scripted(["hello"], write_tokens=False)
        collector = RayLLMCollector(make_env, policy_factory=lambda: policy, staleness=Wait(2))
        pushed = collector._supervisor.submit(push(collector))
        collector._push_under_way = pushed
        assert id(collector) in program_end._RUNNING  # the end of the program shuts it down, too
        collector.shutdown()
        assert id(collector) not in program_end._RUNNING
        # Whichever the loop comes to first: the ledger's end, or its own, which ends the push.
        assert pushed.cancelled() or "died" in str(pushed.exception())

    def test_what_does_not_fit_together_is_told_as_it_is(self, ray):
        with pytest.raises(TypeError, match="one of policy and policy_factory"):
            RayLLMCollector(make_env)
        with pytest.raises(ValueError, match="groups of 3 rows"):
            RayLLMCollector(make_env, policy_factory=print, replay_buffer=make_buffer(3))
        with (
            RayLLMCollector(make_env, policy_factory=lambda: torch.nn.Linear(1, 1)) as collector,
            pytest.raises(RuntimeError, match=r"has failed: .*policy"),
        ):
            collector.collect()


@pytest.mark.parametrize("of", ["the environment", "the policy"])
def test_what_workers_can_not_import_is_told_with_what_to_do(
    ray, tmp_path, monkeypatch, chatml_tokenizer, of
):
    (tmp_path / "only_here.py").write_text("def length(completions):\n    return [1.0]\n")
    monkeypatch.syspath_prepend(str(tmp_path))  # of this process, after Ray has begun
    length = importlib.import_module("only_here").length

    def env_of_it():
        return make_env().append_transform(RewardFunctions([length]))

    def make_policy():
        model = tiny_qwen3(len(chatml_tokenizer))
        return TransformersWrapper(model, tokenizer=chatml_tokenizer)

    def policy_of_it():
        return length and make_policy()

    parts = {
        "the environment": (env_of_it, make_policy),
        "the policy": (make_env, policy_of_it),
    }
    env, policy = parts[of]
    told = r"can't read what it was sent: .*No module named 'only_here'.*Put its folder on PYTHON"
    settings = {"groups_per_step": GROUPS, "staleness": OnPolicy(), "num_collectors": 1}
    with (
        pytest.raises(CollectorDied, match=told) as error,
        RayLLMCollector(
            env, policy_factory=policy, replay_buffer=make_buffer(), **settings
        ) as collector,
    ):
        collector.collect()
    assert len(str(error.value)) < 900
