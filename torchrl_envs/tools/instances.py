"""The environments of the rows that are running: made, reset, and always closed."""

import functools
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torchrl_envs.concurrency.calls import Call, ConcurrentCalls, Outcome, run_call
from torchrl_envs.concurrency.cleanup import close_all, log_close_error
from torchrl_envs.tool_calls.signatures import accepted_arguments

Factory = Callable[[], Any]
_EXIT_GRACE_S: Final = 5.0


class Beginning(NamedTuple):
    """What a row's environment starts from."""

    name: str
    """Of its factory."""
    columns: Mapping[str, Any]
    """Of the data row, and ``seed``."""


class Started(NamedTuple):
    """How a row's environment began."""

    observation: Any = None
    """What ``reset`` returned."""
    error: BaseException | None = None
    """Why there is no environment."""
    failed_in: str = ""
    """``"constructor"`` or ``"reset"``."""


class EnvironmentInstances(Mapping[int, tuple[str, Any]]):
    """One environment per running row, by row: its factory's name and the instance.

    Whatever is still open is closed when this object is no longer used, and when the program ends.

    Args:
        factories: make an environment each, by name.
        types: the class that each makes, by name.
        start_timeout_s: deadline of a constructor, and of ``reset``.
        timeout_s: deadline of ``close``.
    """

    def __init__(
        self,
        factories: Mapping[str, Factory],
        types: Mapping[str, type],
        *,
        start_timeout_s: float,
        timeout_s: float,
    ) -> None:
        self._factories = factories
        self._types = types
        self._start_timeout_s = start_timeout_s
        self._timeout_s = timeout_s
        self._held: dict[int, tuple[str, Any]] = {}
        weakref.finalize(self, _close_left_open, self._held)

    def __getitem__(self, row: int) -> tuple[str, Any]:
        return self._held[row]

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def start(
        self, beginnings: Mapping[int, Beginning], calls: ConcurrentCalls
    ) -> dict[int, Started]:
        """Make and reset the environments of some rows, all at once.

        A row whose environment fails or misses its deadline holds none afterwards: what was made of
        it is closed, now or when its constructor returns.

        Args:
            beginnings: by row; the names are those of factories.
            calls: runs what belongs to the user.

        Returns:
            What ``reset`` returned, or the error, by row.
        """
        slots = {row: _Slot(self._factories[b.name]) for row, b in beginnings.items()}
        chains = [[slots[row].make, self._reset(slots[row], b)] for row, b in beginnings.items()]
        try:
            results = calls.run(chains, self._start_timeout_s)
        except BaseException:
            close_all([slot.abandon() for slot in slots.values()], calls, self._timeout_s)
            raise
        started = {
            row: _started(made, reset)
            for row, (made, reset) in zip(beginnings, results, strict=True)
        }
        failed = [row for row, start in started.items() if start.error is not None]
        for row in started.keys() - set(failed):
            self._held[row] = (beginnings[row].name, slots[row].environment)
        close_all([slots[row].abandon() for row in failed], calls, self._timeout_s)
        return started

    def _reset(self, slot: "_Slot", beginning: Beginning) -> Call:
        if inspect.iscoroutinefunction(getattr(self._types[beginning.name], "reset", None)):
            return functools.partial(_reset_async, slot, beginning.columns)
        return functools.partial(_reset, slot, beginning.columns)

    def release(self, rows: Sequence[int], calls: Callable[[], ConcurrentCalls]) -> None:
        """Close the environments of some rows, all at once.

        Args:
            rows: those that have none are left out.
            calls: gives what runs the calls; only asked if there is something to close.
        """
        environments = [self._held.pop(row)[1] for row in rows if row in self._held]
        if environments:
            close_all(environments, calls(), self._timeout_s)


class _Slot:
    """Where an environment appears when its constructor returns."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._lock = threading.Lock()
        self._abandoned = False
        self.environment: Any = None

    def make(self) -> None:
        environment = self._factory()
        with self._lock:
            self.environment = environment
            too_late = self._abandoned
        if too_late and hasattr(environment, "close"):
            log_close_error(environment, run_call(environment.close))

    def abandon(self) -> Any:
        """Nobody waits any more: what was made so far; what comes later closes itself."""
        with self._lock:
            self._abandoned = True
            return self.environment


def _started(made: Outcome, reset: Outcome) -> Started:
    if made.error is not None:
        return Started(error=made.error, failed_in="constructor")
    return Started(reset.value, reset.error, "" if reset.error is None else "reset")


def _arguments(slot: _Slot, columns: Mapping[str, Any]) -> dict[str, Any]:
    return accepted_arguments(slot.environment.reset, columns, drop="seed")


def _reset(slot: _Slot, columns: Mapping[str, Any]) -> Any:
    if slot.environment is None:
        return None  # it could not be made, which is the row's error
    return slot.environment.reset(**_arguments(slot, columns))


async def _reset_async(slot: _Slot, columns: Mapping[str, Any]) -> Any:
    if slot.environment is None:
        return None
    result: Coroutine[Any, Any, Any] = slot.environment.reset(**_arguments(slot, columns))
    return await result


def _close_left_open(held: dict[int, tuple[str, Any]]) -> None:
    """Close what nobody closed; a close that hangs holds up the end of the program only briefly."""
    waiting: list[threading.Thread] = []
    while held:
        _, (_, environment) = held.popitem()
        if not hasattr(environment, "close"):
            continue
        close = functools.partial(_close_and_note, environment)
        thread = threading.Thread(target=close, name="close", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can start any more, as the interpreter is ending
            close()
        else:
            waiting.append(thread)
    deadline = time.monotonic() + _EXIT_GRACE_S
    for thread in waiting:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))


def _close_and_note(environment: Any) -> None:
    log_close_error(environment, run_call(environment.close))
