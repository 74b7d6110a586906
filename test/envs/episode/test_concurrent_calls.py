"""Many calls at once: in order, each with a deadline, and none spoils another."""

import asyncio
import functools
import gc
import sys
import threading
import time

import pytest

from torchrl_envs.concurrency.calls import CallTimeoutError, ConcurrentCalls
from torchrl_envs.concurrency.event_loop import import_aside
from torchrl_envs.concurrency.threads import DaemonThreads


def said(outcomes):
    """What the calls gave, without how long they took."""
    return [[(each.value, each.error) for each in chain] for chain in outcomes]


@pytest.fixture
def make_calls():
    """Builds :class:`ConcurrentCalls` that are closed after the test."""
    made = []

    def make(timeout_s=30.0, **kwargs):
        made.append(ConcurrentCalls(timeout_s=timeout_s, **kwargs))
        return made[-1]

    yield make
    for calls in made:
        calls.close()


def test_an_import_that_takes_long_does_not_cost_the_loop_of_others(
    make_calls, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "takes_long.py").write_text("import time\ntime.sleep(2)\n")
    calls, loops = make_calls(), []

    async def imports():
        loops.append(asyncio.get_running_loop())
        await import_aside("takes_long")
        import takes_long  # type: ignore[reportMissingImports]

        return takes_long.__name__

    async def waits():
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(2.5)
        return "waited"

    outcomes = calls.run([[imports], [waits]])
    ((_, after),) = calls.run([[imports, imports]])
    assert said(outcomes) == [[("takes_long", None)], [("waited", None)]]
    assert after.error is None
    assert len(set(map(id, loops))) == 1


@pytest.fixture
def gate():
    """An event that calls wait for; opened at the end so that no thread is left behind."""
    event = threading.Event()
    yield event
    event.set()


def as_async(function):
    async def call():
        await asyncio.sleep(0)
        return function()

    return call


@pytest.mark.parametrize("kind", ["sync", "async", "mixed"])
def test_outcomes_come_in_the_order_of_the_calls(make_calls, kind):
    ran = []

    def make_call(chain, i):
        def call():
            ran.append((chain, i))
            return (chain, i)

        wants_async = kind == "async" or (kind == "mixed" and i % 2)
        return as_async(call) if wants_async else call

    sizes = [3, 0, 1, 5]
    outcomes = make_calls().run([[make_call(c, i) for i in range(n)] for c, n in enumerate(sizes)])
    assert [[o.value for o in chain] for chain in outcomes] == [
        [(c, i) for i in range(n)] for c, n in enumerate(sizes)
    ]
    for chain, size in enumerate(sizes):
        assert [i for c, i in ran if c == chain] == list(range(size)), "a chain runs in order"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_chains_run_at_the_same_time(make_calls, kind):
    # Each call waits until all eight are running: one after the other they would never meet.
    if kind == "sync":
        barrier = threading.Barrier(8, timeout=20)

        def call():
            return barrier.wait() >= 0
    else:
        arrived, met = [], []

        async def call():
            arrived.append(1)
            met.append(asyncio.Event()) if not met else None
            if len(arrived) == 8:
                met[0].set()
            await met[0].wait()
            return True

    outcomes = make_calls().run([[call]] * 8)
    assert [chain[0].value for chain in outcomes] == [True] * 8


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), BaseException("odd")], ids=repr
)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_a_call_raises_is_its_outcome(make_calls, error, kind):
    def fail():
        raise error

    outcomes = make_calls().run([[as_async(fail) if kind == "async" else fail, lambda: 2], [int]])
    assert outcomes[0][0].error is error
    assert outcomes[0][1].value == 2, "the chain goes on"
    assert (outcomes[1][0].value, outcomes[1][0].error) == (0, None)


def test_sys_exit_in_a_tool_ends_the_tool_only(make_calls):
    (outcome,), (other,) = make_calls().run([[sys.exit], [lambda: "alive"]])
    assert isinstance(outcome.error, SystemExit)
    assert other.value == "alive"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_call_past_its_deadline_ends_its_chain_and_no_other(make_calls, gate, kind):
    ran = []

    async def hang_async():
        await asyncio.Event().wait()

    hang = gate.wait if kind == "sync" else hang_async
    hung, fine = make_calls(0.2).run(
        [[lambda: 1, hang, lambda: ran.append("after")], [lambda: "fine", lambda: "too"]]
    )
    assert hung[0].value == 1
    assert [type(o.error) for o in hung[1:]] == [CallTimeoutError] * 2
    assert str(hung[1].error) == "no answer within 0.2 s"
    assert [o.value for o in fine] == ["fine", "too"]
    assert ran == []


def test_the_deadline_is_that_of_one_call_and_not_of_the_chain(make_calls):
    pause = threading.Event()
    (chain,) = make_calls(1.0).run([[lambda: pause.wait(0.3)] * 5])
    assert [o.error for o in chain] == [None] * 5


def test_stuck_threads_do_not_block_later_calls(make_calls, gate):
    calls = make_calls(0.2, max_threads=2)
    stuck = calls.run([[gate.wait], [gate.wait]])
    assert all(isinstance(chain[0].error, CallTimeoutError) for chain in stuck)
    barrier = threading.Barrier(2, timeout=20)
    calls.timeout_s = 30.0
    outcomes = calls.run([[barrier.wait], [barrier.wait]])
    assert sorted(chain[0].value for chain in outcomes) == [0, 1], "two threads are free again"


@pytest.mark.parametrize("order", [1, -1], ids=["blocked first", "blocked last"])
@pytest.mark.timeout(60)
def test_a_coroutine_that_never_awaits_costs_its_own_deadline(make_calls, gate, order):
    calls = make_calls()
    begun, pause = [], threading.Event()

    async def block():
        gate.wait()

    async def answer():
        begun.append(1)
        return 7

    # The deadline of the one that waits for the loop is far beyond this test's.
    limits = [[0.2], [600.0]]
    first, second = calls.run([[block], [answer]][::order], limits[::order])[::order]
    assert isinstance(first[0].error, CallTimeoutError)
    assert second[0].value == 7
    assert said(calls.run([[answer], [as_async(lambda: 8)]])) == [[(7, None)], [(8, None)]]
    gate.set()
    pause.wait(0.1)
    assert len(begun) == 2, "no call is made twice, when the loop reacts again either"


@pytest.mark.timeout(60)
def test_coroutines_that_never_await_miss_their_deadlines_at_once(make_calls, gate):
    calls, begun = make_calls(), []

    async def block():
        begun.append(threading.current_thread())
        gate.wait()

    async def answer():
        await asyncio.sleep(0)
        return 7

    # One after the other they would take longer than this test may.
    outcomes = calls.run([[block], [answer]] * 64, 3.0)
    assert all(isinstance(chain[0].error, CallTimeoutError) for chain in outcomes[::2])
    assert [chain[0].value for chain in outcomes[1::2]] == [7] * 64
    assert len(set(begun)) == len(begun) == 64
    assert said(calls.run([[answer]])) == [[(7, None)]]
    gate.set()
    for thread in begun:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in begun), "those loops end with what blocked them"


@pytest.mark.timeout(60)
def test_a_loop_that_is_blocked_between_a_chains_calls_ends_the_chain(make_calls, gate):
    entered = threading.Event()

    async def block():
        entered.set()
        gate.wait()

    def first():
        entered.wait()
        return 1

    mixed, _ = make_calls().run([[first, as_async(int)], [block]], [[0.3, 0.3], [0.3]])
    assert mixed[0].value == 1
    assert isinstance(mixed[1].error, CallTimeoutError)


@pytest.mark.timeout(60)
def test_a_loop_that_was_blocked_ends_when_it_reacts_again(make_calls, gate):
    before = set(threading.enumerate())

    async def block():
        gate.wait()

    make_calls().run([[block]], 0.1)
    (loop,) = set(threading.enumerate()) - before
    gate.set()
    loop.join(timeout=20)
    assert not loop.is_alive()


@pytest.mark.timeout(60)
def test_closing_leaves_no_loop_that_was_blocked(gate):
    before = set(threading.enumerate())
    calls = ConcurrentCalls()

    readers = []

    async def block():
        readers.append(asyncio.create_task(asyncio.Event().wait()))  # as a connection has
        gate.wait()

    calls.run([[block]], 0.1)
    calls.run([[as_async(int)]])
    started = set(threading.enumerate()) - before
    assert len(started) == 2
    calls.close()
    gate.set()
    for thread in started:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in started)


def test_a_call_past_its_deadline_is_the_last_of_its_chain_when_it_does_return(make_calls, gate):
    ran, second = [], threading.Event()
    calls = make_calls(max_threads=1)
    calls.run([[gate.wait, lambda: ran.append("after")]], 0.1)
    gate.set()
    calls.run([[second.set]])  # on the thread that took the place, or on that one
    assert said(calls.run([[lambda: 1]] * 8)) == [[(1, None)]] * 8
    assert ran == []


def test_a_cancellation_of_the_calls_own_is_its_error(make_calls):
    def cancelled():
        raise asyncio.CancelledError

    ((outcome, other),) = make_calls().run([[as_async(cancelled), as_async(lambda: 2)]])
    assert isinstance(outcome.error, asyncio.CancelledError)
    assert other.value == 2, "the chain goes on"


@pytest.mark.parametrize("kind", ["sync", "mixed"])
@pytest.mark.timeout(60)
def test_a_call_that_waits_for_a_thread_is_not_late(make_calls, gate, kind):
    first = [] if kind == "sync" else [as_async(int)]
    # Those that wait come first, and last: none waits for one that nobody looks at.
    stuck = [[gate.wait]] * 2
    fine = [[*first, lambda i=i: i] for i in range(4)]
    outcomes = make_calls(0.2, max_threads=2).run([*fine[:2], *stuck, *fine[2:]])
    assert [isinstance(chain[-1].error, CallTimeoutError) for chain in outcomes] == [
        *[False] * 2, *[True] * 2, *[False] * 2,
    ]  # fmt: skip
    assert [outcomes[i][-1].value for i in (0, 1, 4, 5)] == [0, 1, 2, 3]


@pytest.mark.parametrize("num_stuck", [0, 2], ids=["fresh", "after two that were stuck"])
def test_no_more_threads_run_than_allowed(gate, num_stuck):
    running, most, lock = [0], [0], threading.Lock()
    together, entered = threading.Barrier(3), threading.Semaphore(0)

    def get_stuck():
        entered.release()
        gate.wait()

    def call(number):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        if number < 3:
            together.wait(20)  # all that are allowed run at once
        else:
            time.sleep(0.005)  # a fourth one would be seen
        with lock:
            running[0] -= 1

    threads = DaemonThreads(3)
    stuck = [threads.submit(get_stuck) for _ in range(num_stuck)]
    for _ in stuck:
        entered.acquire()
    for future in stuck:
        threads.give_up(future)
    gate.set()
    calls = [threads.submit(functools.partial(call, number)) for number in range(20)]
    for future in [*stuck, *calls]:
        future.result(timeout=20)
    assert most[0] == 3
    threads.close()


@pytest.mark.parametrize("settings", [{"timeout_s": 0.0}, {"timeout_s": 1, "max_threads": 0}])
def test_settings_that_can_not_work_are_refused(settings):
    with pytest.raises(ValueError, match="timeout_s must be positive and max_threads"):
        ConcurrentCalls(**settings)


def test_close_leaves_no_thread():
    before = set(threading.enumerate())
    calls = ConcurrentCalls(timeout_s=30)
    calls.run([[lambda: 1], [as_async(int)]])
    started = set(threading.enumerate()) - before
    assert {thread.name for thread in started} == {"call", "calls-loop"}
    calls.close()
    for thread in started:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in started)


@pytest.mark.timeout(60)
def test_dropped_calls_leave_no_thread(gate):
    before = set(threading.enumerate())

    async def hang():
        await asyncio.Event().wait()

    for _ in range(20):
        ConcurrentCalls().run([[lambda: 1], [as_async(int)], [lambda: 2, as_async(int)]])
        ConcurrentCalls().run([[hang]], 0.01)
    deadline = time.monotonic() + 20
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        gc.collect()  # once what was cancelled has ended, which is in its thread
        time.sleep(0.05)
    assert set(threading.enumerate()) <= before


def test_calls_that_keep_their_threads_are_told(make_calls, gate, caplog):
    make_calls(0.1).run([[gate.wait]] * 3)
    told = [record.getMessage().partition(" ")[0] for record in caplog.records]
    assert told == ["1", "2"], "and at 4, 8, ..."
    assert "num_processes" in caplog.text


@pytest.mark.timeout(60)
def test_closing_ends_what_runs_on_the_loop():
    calls = ConcurrentCalls(timeout_s=600)

    async def hang():
        threading.Thread(target=calls.close).start()
        await asyncio.Event().wait()

    ((outcome, after),) = calls.run([[hang, int]])
    assert isinstance(outcome.error, asyncio.CancelledError)
    assert isinstance(after.error, asyncio.CancelledError)
    assert said(calls.run([[int], [as_async(int)]])) == [[(0, None)], [(0, None)]], (
        "it starts again"
    )
    calls.close()
