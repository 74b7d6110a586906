"""Engines that die, stop, stammer or come back: noticed, replaced, nothing lost, nothing stale."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchrl_modules.engines import rows_of_server
from torchrl_modules.engines.engine import EngineDied
from torchrl_modules.engines.process_state import is_stopped, this_process
from torchrl_modules.engines.progress import StallClock
from torchrl_modules.engines.supervision import EngineState
from torchrl_modules.engines.version_labels import StaleWeights
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.vllm.server_engine import VLLMServerEngine
from torchrl_modules.vllm.supervised_engine import SupervisedEngine

FAKE = Path(__file__).with_name("fake_engine.py")
PROMPTS = [[1, 2], [3], [4, 5, 6], [8]]
PARAMS = SamplingParameters(max_new_tokens=10, stop_token_ids=())
SEEDS = [11, 12, 13, 14]
SEEDED = replace(PARAMS, seed=11)
FIRST = {"a": torch.ones(4, 3), "b": torch.zeros(3)}
SECOND = {"a": torch.zeros(4, 3), "b": torch.ones(3)}


@pytest.fixture
def start(tmp_path):
    """Gives `start` for a supervisor: each engine has the next faults, the last ones for ever."""
    numbers = itertools.count()

    def with_faults(*faults):
        @contextmanager
        def start_one():
            path = tmp_path / f"socket{next(numbers)}"
            given = plan[min(len(processes), len(plan) - 1)]
            with subprocess.Popen(
                [sys.executable, "-S", str(FAKE), str(path), json.dumps(given)]
            ) as process:
                try:
                    deadline = time.monotonic() + 20
                    while not path.exists():
                        assert time.monotonic() < deadline
                        time.sleep(0.01)
                    time.sleep(0.05)  # from bound to listening
                    processes.append(process)
                    yield f"unix://{path}"
                finally:
                    process.kill()

        plan = faults or ({},)
        start_one.processes = processes = []
        return start_one

    return with_faults


@contextmanager
def connected(start_one, **settings):
    with start_one() as url:
        engine = VLLMServerEngine(url, **settings)
        try:
            yield engine
        finally:
            start_one.processes[-1].kill()
            engine.close()


def healthy(start, weights=None):
    """What an engine without faults draws."""
    with SupervisedEngine(start({})) as engine:
        if weights is not None:
            engine.update_weights(weights)
        return [row.ids for row in engine.generate(PROMPTS, SEEDED)]


def health(engine):
    """Of the only engine of a fleet."""
    (only,) = engine.inside.health()
    return only


def test_the_same_seeds_draw_the_same_and_others_do_not(start):
    with connected(start()) as engine:
        first = engine.generate(PROMPTS, PARAMS, seeds=SEEDS)
        assert engine.generate(PROMPTS, PARAMS, seeds=SEEDS) == first
        assert engine.generate(PROMPTS, PARAMS, seeds=[21, 22, 23, 24]) != first
        with pytest.raises(ValueError, match="4 prompts, but 4 max_new_tokens, 1 seeds"):
            engine.generate(PROMPTS, PARAMS, seeds=[1])


def test_E01_a_killed_engine_is_noticed_at_once(start):
    start_one = start({"token_s": 0.1})
    with connected(start_one) as engine:
        timer = threading.Timer(0.3, start_one.processes[0].kill)
        timer.start()
        begin = time.monotonic()
        with pytest.raises(EngineDied, match="4 of 4 rows were lost") as error:
            engine.generate(PROMPTS, PARAMS)
        assert time.monotonic() - begin < 5
        assert error.value.results == [None] * 4
        with pytest.raises(EngineDied):
            engine.generate(PROMPTS, PARAMS)
        with pytest.raises(EngineDied):
            engine.update_weights(FIRST)
        timer.join()


def test_what_was_finished_before_is_handed_over(start):
    # The first rows are short; the process ends while the last one is drawn.
    start_one = start({"die_after": 10, "token_s": 0.1})
    with connected(start_one) as engine, pytest.raises(EngineDied) as error:
        engine.generate(PROMPTS, PARAMS, max_new_tokens=[1, 1, 1, 10], seeds=SEEDS)
    *finished, lost = error.value.results
    assert [len(row.ids) for row in finished] == [1, 1, 1]
    assert lost is None


@pytest.mark.parametrize("stopped", ["in a request", "by hand"])
def test_E02_a_stopped_engine_is_noticed_though_its_connections_are_open(start, stopped):
    start_one = start({"token_s": 0.05, "stop_after": 6 if stopped == "in a request" else None})
    with connected(start_one, stall_timeout_s=1.0) as engine:
        if stopped == "by hand":
            timer = threading.Timer(0.2, start_one.processes[0].send_signal, (signal.SIGSTOP,))
            timer.start()
        begin = time.monotonic()
        with pytest.raises(EngineDied, match="made no progress for"):
            engine.generate(PROMPTS, PARAMS)
        assert 1 <= time.monotonic() - begin < 5


def test_the_first_batch_of_a_cold_engine_is_no_stall(start):
    with connected(start({"cold_s": 2.5}), stall_timeout_s=1.0) as engine:
        assert [len(row.ids) for row in engine.generate(PROMPTS, PARAMS)] == [10] * 4
    start_one = start({"cold_s": 60})  # one that is stopped meanwhile is
    with connected(start_one, stall_timeout_s=1.0) as engine:
        timer = threading.Timer(0.3, start_one.processes[-1].send_signal, (signal.SIGSTOP,))
        timer.start()
        with pytest.raises(EngineDied, match="made no progress for"):
            engine.generate(PROMPTS, PARAMS)
        timer.join()


def test_a_server_that_is_starting_is_waited_for(start, tmp_path):
    path = tmp_path / "later"
    with pytest.raises(ConnectionError, match="No answer"):
        VLLMServerEngine(f"unix://{path}", wait_s=0.3)
    processes = []

    def start_later():
        processes.append(subprocess.Popen([sys.executable, "-S", str(FAKE), str(path), "{}"]))

    timer = threading.Timer(0.5, start_later)
    timer.start()
    try:
        engine = VLLMServerEngine(f"unix://{path}", wait_s=20)
        assert len(engine.generate(PROMPTS, PARAMS)) == 4
    finally:
        timer.join()
        processes[0].kill()
        processes[0].wait()
    engine.close()


def test_a_plain_server_can_be_drawn_from_and_an_update_says_what_it_lacks(start):
    tempered = SamplingParameters(max_new_tokens=10, temperature=0.7, stop_token_ids=())
    with connected(start({"plain": "raw"})) as engine:
        rows = engine.generate(PROMPTS, PARAMS)
        assert [len(row.ids) for row in rows] == [10] * 4
        assert (engine.max_model_len, engine.vocab_size, engine.version) == (64, None, 0)
        with pytest.raises(ValueError, match="--logprobs-mode processed_logprobs"):
            engine.generate(PROMPTS, tempered)
        with pytest.raises(RuntimeError, match=r"--worker-extension-cls .*VLLM_SERVER_DEV_MODE=1"):
            engine.update_weights(FIRST)
        with pytest.raises(RuntimeError, match="VLLM_SERVER_DEV_MODE=1"):
            engine.join()
        assert engine.generate(PROMPTS, PARAMS, seeds=SEEDS)[0].ids
    with pytest.raises(RuntimeError, match="--enable-scale-out"), start({"plain": "no"})() as url:
        VLLMServerEngine(url)
    with connected(start({"plain": "dev"})) as engine:  # VLLM_SERVER_DEV_MODE=1 `vllm serve`
        assert [len(row.ids) for row in engine.generate(PROMPTS, PARAMS)] == [10] * 4
        with pytest.raises(RuntimeError, match=r"--worker-extension-cls \S+vLLMWorker\)(?! and)"):
            engine.update_weights(FIRST)
    with connected(start({"plain": "processed"})) as engine:
        assert [len(row.ids) for row in engine.generate(PROMPTS, tempered)] == [10] * 4


KILLED_IN_AN_UPDATE = """
import os, signal, sys, torch
from torchrl_modules.vllm.server_engine import VLLMServerEngine
engine = VLLMServerEngine(sys.argv[1])
engine._post = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
engine.update_weights({"a": torch.ones(4, 3), "b": torch.zeros(3)})
"""


def test_a_kill_in_a_hand_over_leaves_no_file(start, pytestconfig, tmp_path):
    places = [Path("/dev/shm"), tmp_path]
    before = [set(place.iterdir()) for place in places]
    with start()() as url:
        environment = os.environ | {"TMPDIR": str(tmp_path)}
        run = subprocess.run(
            [sys.executable, "-c", KILLED_IN_AN_UPDATE, url],
            cwd=pytestconfig.rootpath,
            env=environment,
            check=False,
        )
        assert run.returncode == -signal.SIGKILL
        left = [
            set(place.glob("weights-*")) - was for place, was in zip(places, before, strict=True)
        ]
    assert left == [set(), set()]


def test_a_slow_engine_is_not_taken_for_a_stopped_one(start):
    with connected(start({"token_s": 0.2}), stall_timeout_s=1.0) as engine:
        rows = engine.generate(PROMPTS, PARAMS)  # 2 s, a token every 0.2 s
    assert [len(row.ids) for row in rows] == [10] * 4


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param("poison", "poisoned", id="the engine fails on one request"),
        pytest.param("garbage", "no generation", id="an answer that is none"),
        pytest.param("nan", "no finite number", id="a log-prob that is no number"),
        pytest.param("infinite", "no finite number", id="a log-prob of minus infinity"),
        pytest.param("positive", "at most 0: 0.25", id="a log-prob above 0"),
    ],
)
def test_E09_one_bad_row_fails_alone(start, fault, message):
    with connected(start({fault: 3})) as engine:
        for _ in range(2):  # and the next call succeeds
            rows = engine.generate(PROMPTS, PARAMS)
            assert [row.finish_reason for row in rows] == ["length", "error", "length", "length"]
            assert message in rows[1].error
            assert rows[1].ids == rows[1].log_probs == []


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({**SECOND, "b": torch.ones(4)}, id="shape"),
        pytest.param({**SECOND, "c": torch.ones(3)}, id="name"),
        pytest.param({"a": SECOND["a"]}, id="half"),
        pytest.param({**SECOND, "b": torch.full((3,), torch.nan)}, id="NaN"),
    ],
)
def test_E04_bad_weights_are_refused_whole_and_the_old_version_serves(start, wrong):
    with connected(start()) as engine:
        engine.update_weights(FIRST)
        before = engine.generate(PROMPTS, PARAMS, seeds=SEEDS)
        with pytest.raises(ValueError, match=r"names or shapes|not finite"):
            engine.update_weights(wrong)
        with pytest.raises(ValueError, match="version 1 is not above the present one, 1"):
            engine.update_weights(SECOND, version=1)
        assert engine.version == 1
        assert engine.generate(PROMPTS, PARAMS, seeds=SEEDS) == before


def test_an_engine_that_stops_in_an_update_is_noticed(start):
    with connected(start({"stop_in_update": True}), stall_timeout_s=1.0) as engine:
        begin = time.monotonic()
        with pytest.raises(EngineDied, match="made no progress for"):
            engine.update_weights(FIRST)
        assert 1 <= time.monotonic() - begin < 5
        with pytest.raises(EngineDied, match="made no progress for"):
            engine.update_weights(FIRST)


def test_a_process_is_stopped_or_not():
    with subprocess.Popen(["sleep", "60"]) as child:
        process = this_process() | {"pid": child.pid}
        assert not is_stopped(process)
        child.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while not is_stopped(process):
            assert time.monotonic() < deadline
        assert is_stopped(this_process() | {"parent": child.pid})
        assert not is_stopped(process | {"machine": "another one"})
        assert not is_stopped(process | {"machine": None})
        child.kill()
        child.wait()
        assert is_stopped(process)
    assert not is_stopped(this_process())


def test_an_update_in_flight_is_stamped_token_by_token(start):
    with connected(start({"token_s": 0.05})) as engine:
        timer = threading.Timer(0.2, engine.update_weights, (FIRST,))
        timer.start()
        rows = engine.generate(PROMPTS, PARAMS)
        timer.join()
    for row in rows:
        versions = row.token_versions(otherwise=-1)
        assert len(versions) == 10
        assert sorted(set(versions)) == [0, 1]
        assert versions == sorted(versions)


def test_a_client_knows_a_bounded_number_of_updates(start, monkeypatch):
    monkeypatch.setattr(rows_of_server, "_MAX_LABELS", 3)
    with connected(start({"token_s": 0.05})) as engine:
        for _ in range(5):
            engine.update_weights(FIRST)
        timer = threading.Timer(0.2, engine.update_weights, (SECOND,))
        timer.start()
        rows = engine.generate(PROMPTS, PARAMS)
        timer.join()
        assert engine._labels == ["4", "5", "6"]
        assert {v for row in rows for v in row.token_versions(otherwise=-1)} == {5, 6}
        engine._labels = ["1", "6"]  # as if the server were back at what it had long ago
        engine._post("/update_weight_version", {"new_version": "1"})
        with pytest.raises(StaleWeights, match="'1'"):
            engine.generate(PROMPTS, PARAMS)


def test_E03_an_engine_that_was_restarted_behind_ones_back_is_stale(start):
    start_one = start()
    with connected(start_one) as engine:
        engine.update_weights(FIRST)
        other = VLLMServerEngine(engine._client.url)
        other.update_weights(SECOND, version=9)
        with pytest.raises(StaleWeights, match="'9'"):
            engine.generate(PROMPTS, PARAMS)
        other.close()


@pytest.mark.parametrize("fault", [{"die_after": 17}, {"stop_after": 17}], ids=["dies", "stops"])
def test_E01_a_replaced_engine_draws_what_the_first_one_would_have(start, fault):
    expected = healthy(start, FIRST)
    start_one = start({"token_s": 0.01, **fault}, {})
    with SupervisedEngine(start_one, stall_timeout_s=1.0) as engine:
        engine.update_weights(FIRST, version=5)
        rows = engine.generate(PROMPTS, SEEDED)
        assert health(engine).num_restarts == 1
        # The new process has the weights that the old one had, under their number.
        assert [row.ids for row in rows] == expected
        assert {v for row in rows for v in row.token_versions(otherwise=-1)} == {5}
        assert engine.version == 5
        assert start_one.processes[0].poll() is not None
        assert health(engine).state is EngineState.HEALTHY
    assert all(process.poll() is not None for process in start_one.processes)
    with pytest.raises(RuntimeError, match="is closed"):
        engine.generate(PROMPTS, PARAMS)


def test_callers_of_several_threads_share_one_replacement(start):
    expected = healthy(start)
    with SupervisedEngine(start({"die_after": 60}, {})) as engine:
        outcomes = []
        callers = [
            threading.Thread(target=lambda: outcomes.append(engine.generate(PROMPTS, SEEDED)))
            for _ in range(4)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(timeout=30)
        assert health(engine).num_restarts == 1
    assert [[row.ids for row in rows] for rows in outcomes] == [expected] * 4


def test_an_engine_that_dies_in_an_update_is_replaced_and_updated(start):
    expected = healthy(start, SECOND)
    with SupervisedEngine(start({"die_in_update": True}, {})) as engine:
        engine.update_weights(SECOND)
        assert (engine.version, health(engine).num_restarts) == (1, 1)
        rows = engine.generate(PROMPTS, SEEDED)
    assert [row.ids for row in rows] == expected


def test_engines_that_fail_in_the_middle_of_an_update_are_replaced_and_updated(start):
    expected = healthy(start, FIRST)
    start_one = start({}, {"fail_in_update": True}, {})
    with SupervisedEngine(start_one) as engine:
        engine.update_weights(FIRST)
        start_one.processes[0].kill()  # the next one fails to take the weights
        assert [row.ids for row in engine.generate(PROMPTS, SEEDED)] == expected
        assert (engine.version, health(engine).num_restarts) == (1, 2)
    with SupervisedEngine(start({"fail_in_update": True}, {})) as engine:
        engine.update_weights(FIRST)
        assert [row.ids for row in engine.generate(PROMPTS, SEEDED)] == expected
        assert (engine.version, health(engine).num_restarts) == (1, 1)
    with (
        SupervisedEngine(start({"fail_in_update": True}), max_restarts=1) as engine,
        pytest.raises(EngineDied, match="between two tensors"),
    ):
        engine.update_weights(SECOND)


@pytest.mark.parametrize("num_failures", [1, 9])
def test_an_engine_that_does_not_start_counts_as_one_that_died(start, num_failures):
    start_one, calls = start({"die_after": 25}, {}), itertools.count()

    @contextmanager
    def sometimes():
        if 0 < next(calls) <= num_failures:
            raise RuntimeError("no memory on the device")
        with start_one() as url:
            yield url

    engine = SupervisedEngine(sometimes, max_restarts=2)
    if num_failures == 1:
        rows = engine.generate(PROMPTS, SEEDED)
        assert [row.ids for row in rows] == healthy(start)
        assert next(calls) == 3
        assert health(engine).num_restarts == 1
    else:
        with pytest.raises(EngineDied, match=r"no engine serves any more: .*no memory") as error:
            engine.generate(PROMPTS, SEEDED, max_new_tokens=[1, 1, 1, 30])
        assert [row is not None for row in error.value.results] == [True, True, True, False]
        assert health(engine).state is EngineState.DEAD
        with pytest.raises(EngineDied, match="no engine serves any more"):
            engine.generate(PROMPTS, PARAMS)
    engine.close()
    assert all(process.poll() is not None for process in start_one.processes)


def test_a_request_that_kills_every_engine_ends_the_run(start):
    with SupervisedEngine(start({"die_after": 3}), max_restarts=2) as engine:
        with pytest.raises(EngineDied, match="no engine serves any more") as error:
            engine.generate(PROMPTS, PARAMS)
        assert error.value.results == [None] * 4
        assert health(engine).num_restarts == 2
    with pytest.raises(ValueError, match="max_restarts"):
        SupervisedEngine(start(), max_restarts=-1)


def test_a_stall_is_counted_from_the_last_progress():
    clock = StallClock(10.0)
    assert clock.idle_s(0, 10.0) == 0.0
    assert clock.idle_s(0, 12.0) == 2.0
    assert clock.idle_s(1, 13.0) == 0.0
    assert clock.idle_s(None, 14.5) == 1.5  # nobody answered
    assert clock.idle_s(1, 15.0) == 2.0
