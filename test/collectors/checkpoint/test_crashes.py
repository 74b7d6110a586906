"""S03, S04: a save that is cut off or fails at any point leaves whole checkpoints, old or new."""

import errno
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
from crashing_disk import CALLS, CRASHES, Disk, recorded
from safetensors import SafetensorError

from collectors import CheckpointError, CheckpointStore, CheckpointWarning
from collectors.checkpoint import tensor_file

# Forked children need not import anything again.
FORK = multiprocessing.get_context("fork")
pytestmark = pytest.mark.usefixtures("no_real_syncs")


@pytest.fixture
def no_real_syncs(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)


def state(step):
    return {
        "step": step,
        "weights": torch.full((20_000,), float(step)),
        "rows": [{"x": b"a" * step}],
    }


def write_more(path):
    """A folder of somebody else's files, written and not synced."""
    path.mkdir()
    for name in ("a.txt", "b.txt"):
        (path / name).write_bytes(b"further")


def save(folder, step):
    with CheckpointStore(folder, on_error="raise") as store:
        return store.save(step, state(step), files={"more": write_more})


def leave_behind(folder):
    """What writers leave that died in the middle of a save, and of a removal."""
    dead = folder / ".staging-step-00000009.save-00009-0"
    dead.mkdir(parents=True)
    (dead / "tensors.safetensors").write_bytes(b"half")
    removed = folder / ".removing-step-00000000.save-00001"
    (removed / "more").mkdir(parents=True)


def whole_steps(folder):
    """The steps that a folder holds, each of them loaded and compared."""
    store = CheckpointStore(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in store.steps():
            found = store.load(step)
            assert (found.step, found.state["step"]) == (step, step)
            assert torch.equal(found.state["weights"], state(step)["weights"])
            assert (found.path / "more/b.txt").read_bytes() == b"further"
    return store.steps()


@pytest.mark.parametrize(
    ("earlier", "now", "before", "after"),
    [
        pytest.param((), 1, [], [1], id="the first"),
        pytest.param((1, 2), 3, [1, 2], [2, 3], id="one is removed"),
        pytest.param((1, 2), 2, [1, 2], [1, 2], id="a step saved again"),
    ],
)
def test_S03_a_crash_at_any_point_leaves_the_old_or_the_new(
    tmp_path, monkeypatch, earlier, now, before, after
):
    folder = tmp_path / "store"
    folder.mkdir()
    for step in earlier:
        save(folder, step)
    leave_behind(folder)
    disk = Disk(folder)
    with monkeypatch.context() as patched:
        changes = recorded(patched, folder)
        save(folder, now)
    assert len(changes) >= 30
    possible = {tuple(before), tuple(after), tuple(sorted({*before, *after}))}
    seen = set()
    # Before the first change, and after each.
    for number, change in enumerate([None, *changes]):
        if change is not None:
            disk.apply(*change)
        for name, choose in CRASHES.items():
            left = tmp_path / "left"
            disk.after_crash(left, choose)
            steps = whole_steps(left)
            assert tuple(steps) in possible, f"{name} after change {number}, {change}"
            assert number < len(changes) or steps == after, "what was saved stays"
            seen.add(tuple(steps))
            save(left, 7)
            names = [path.name for path in left.iterdir() if path.name != ".lock"]
            assert all(name.startswith("step-") for name in names), names
            assert whole_steps(left) == [*steps, 7][-2:]
            shutil.rmtree(left)
    assert whole_steps(folder) == after
    assert tuple(before) in seen
    assert tuple(after) in seen


def fail_at(patched, number, code):
    """Let the change of that number fail, and none before or after."""
    count = iter(range(10**6))

    def wrap(owner, name):
        real = getattr(owner, name)

        def call(*args, **more):
            if next(count) == number:
                if owner is tensor_file:
                    raise SafetensorError(f"I/O error: {os.strerror(code)} (os error {code})")
                # As the system does it: what has only a descriptor can't name the file.
                named = () if isinstance(args[0], int) else (str(args[0]),)
                raise OSError(code, os.strerror(code), *named)
            return real(*args, **more)

        patched.setattr(owner, name, call)

    for name in ("mkdir", *CALLS):
        wrap(os, name)
    wrap(Path, "write_bytes")
    wrap(tensor_file, "serialize_file")
    return count


@pytest.mark.parametrize(
    ("code", "wait"),
    [
        pytest.param(errno.ENOSPC, True, id="full, waited for"),
        pytest.param(errno.EROFS, False, id="read-only, on a thread"),
    ],
)
def test_S04_a_disk_that_fails_at_any_point_costs_the_save_only(tmp_path, monkeypatch, code, wait):
    number, failed = 0, True
    while failed:
        folder = tmp_path / str(number)
        for step in (1, 2):
            save(folder, step)
        with monkeypatch.context() as patched:
            count = fail_at(patched, number, code)
            store = CheckpointStore(folder)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                path = store.save(3, state(3), files={"more": write_more}, wait=wait)
                store.close()
            failed = next(count) > number
        told = [str(one.message) for one in caught if one.category is CheckpointWarning]
        if failed:
            assert len(told) == 1, (number, told)
            assert os.strerror(code) in told[0]
            assert str(folder) in told[0]
            # What was published may be there: what failed then is the sync of its name.
            steps = [1, 2] if store.last_error else [2, 3]
            assert whole_steps(folder) in (steps, [1, 2, 3])
            assert path is None or not wait or store.last_error is None
        save(folder, 4)
        assert whole_steps(folder)[-1] == 4
        assert not list(folder.glob(".[rs]*"))
        shutil.rmtree(folder)
        number += 1
    assert number >= 25


def test_S04_a_disk_that_is_full_costs_the_save_only(tmp_path):
    """The system itself refuses the library's bytes, not a function in its place."""
    store = CheckpointStore(tmp_path)
    store.save(1, state(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.warns(CheckpointWarning, match=r"tensors.safetensors: .*File too large"):
            assert store.save(2, state(2)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name[:5] for path in tmp_path.iterdir()) == [".lock", "step-"]
    assert store.load().state["step"] == 1


def test_what_failed_on_the_thread_is_raised_by_whoever_comes_next(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, on_error="raise")
    store.save(1, state(1))

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device", "tensors.safetensors")

    for come_back in (store.wait, store.close, lambda: store.save(3, state(3)), store.load):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "write_bytes", full)
            store.save(2, state(2), wait=False)
            store._thread.join()
        with pytest.raises(CheckpointError, match=r"step 2 could not be saved .*No space left"):
            come_back()
        assert isinstance(store.last_error.__cause__, OSError)
    assert store.load().step == 1


def test_what_nobody_asked_after_is_told_when_the_store_goes(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    with monkeypatch.context() as patched:
        fail_at(patched, 4, errno.EIO)
        store.save(1, state(1), wait=False)
        store._thread.join()
    with pytest.warns(CheckpointWarning, match=r"step 1 could not be saved .*Input/output error"):
        del store
    # Its lock is gone, too.
    assert save(tmp_path, 1).is_dir()


def test_S03_an_interrupt_in_the_middle_of_a_save_leaves_what_was_there(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, CheckpointStore(tmp_path) as store:
        patched.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.save(2, state(2))
    assert sorted(path.name[:5] for path in tmp_path.iterdir()) == [".lock", "step-"]
    assert whole_steps(tmp_path) == [1]


def test_one_store_at_a_time_saves_into_a_folder(tmp_path):
    first, second = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    first.save(1, {})
    with pytest.raises(CheckpointError, match="another CheckpointStore of this process saves here"):
        second.save(2, {})
    receiver, sender = FORK.Pipe()
    child = FORK.Process(target=_try_to_lock, args=(tmp_path, sender))
    child.start()
    assert f"another process saves here (process {os.getpid()} on" in receiver.recv()
    child.join()
    # A child that goes away takes nothing with it.
    with pytest.raises(CheckpointError, match="another CheckpointStore"):
        second.save(2, {})
    assert second.load().step == 1
    first.close()
    second.save(2, {})
    assert second.steps() == [1, 2]


def _try_to_lock(folder, sender):
    with pytest.raises(CheckpointError) as caught:
        CheckpointStore(folder).save(2, {})
    sender.send(str(caught.value))


def _save_for_ever(folder, begun):
    store = CheckpointStore(folder, on_error="raise")
    step = max(store.steps(), default=0)
    begun.set()
    while True:
        step += 1
        store.save(step, state(step), files={"more": write_more}, wait=step % 2 == 0)


def kill_at_random(folder, times, num_steps, longest_s=0.08):
    """Kill a process that saves in a loop, so often and until it got so far; the steps it left."""
    chance, last = random.Random(0), []
    while len(last) < times or last[-1] < num_steps:
        begun = FORK.Event()
        child = FORK.Process(target=_save_for_ever, args=(folder, begun))
        child.start()
        begun.wait()
        time.sleep(chance.uniform(0, longest_s))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        last += whole_steps(folder)[-1:] or [0]
    return last


def test_S03_a_writer_that_is_killed_at_random_times_leaves_whole_checkpoints(tmp_path):
    steps = kill_at_random(tmp_path, 20, 10)
    assert steps == sorted(steps)
    save(tmp_path, steps[-1] + 1)
    assert all(path.name[:5] in ("step-", ".lock") for path in tmp_path.iterdir())
