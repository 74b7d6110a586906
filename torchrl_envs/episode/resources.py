"""Resources that an episode holds while it runs: sessions, environments, processes, all closed."""

import itertools
import logging
import threading
import time
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from typing import Any, Final, NamedTuple

from torchrl_envs.concurrency.calls import run_call
from torchrl_envs.concurrency.outcome import Call

from .pending_calls import EventCoroutine, PendingCall, PendingCalls

Closing = Callable[[str], Call | None]
"""Gets why the episode has ended (empty where it was given up), and says what has to be called, if
anything has to; sync or ``async``."""

_EXIT_GRACE_S: Final = 5.0
_log = logging.getLogger(__name__)


class _Held(NamedTuple):
    value: Any
    closing: Closing | None
    timeout_s: float | None
    name: str


class Resources:
    """The resources of one episode, by owner. They are given back in reverse order, once.

    It does not travel with the values of the episode: a TensorDict that is stored or sent carries
    none of it.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[Any, _Held] = {}

    def add(
        self,
        owner: Any,
        value: Any,
        *,
        close: Call | None = None,
        closing: Closing | None = None,
        timeout_s: float | None = None,
        name: str = "",
    ) -> None:
        """Hold something until the episode is closed.

        Args:
            owner: who will ask for it; usually the transform itself.
            value: what is held.
            close: what gives it back, sync or ``async``; ``None`` lets it go.
            closing: the same, asked for when it is time.
            timeout_s: deadline of that, in seconds; that of the environment's calls if not given.
            name: what it is called in the log; its class when not given.

        Raises:
            RuntimeError: the owner holds something in this episode already.
        """
        if owner in self._held:
            raise RuntimeError(f"{type(owner).__name__} already holds something in this episode.")
        how = closing if close is None else lambda _: close
        self._held[owner] = _Held(value, how, timeout_s, name or type(value).__name__)

    def get(self, owner: Any, default: Any = None) -> Any:
        """Return what an owner holds in this episode.

        Args:
            owner: who added it.
            default: what to return if there is none.
        """
        held = self._held.get(owner)
        return default if held is None else held.value

    def __contains__(self, owner: Any) -> bool:
        return owner in self._held

    def __iter__(self) -> Iterator[Any]:
        """Whoever holds something."""
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def _let_go(self, reason: str, owner: Any = None) -> Iterator[tuple[_Held, Call]]:
        """Hold nothing any more, or nothing of one owner: what has to be called, newest first."""
        while self._held if owner is None else owner in self._held:
            held = self._held.popitem()[1] if owner is None else self._held.pop(owner)
            try:
                call = None if held.closing is None else held.closing(reason)
            except Exception as error:
                _log_error(held, error)
            else:
                if call is not None:
                    yield held, call


def close_resources(
    resources: Resources, reason: str, timeout_s: float, *, owner: Any = None
) -> "EventCoroutine | None":
    """Give back what an episode holds, in reverse order; of one owner only, if there is one.

    An error or a missed deadline is logged: the rest is given back all the same, and whoever gives
    something back has nothing to repair.

    Returns:
        What is left to do, if there is something to wait for.
    """
    closing = resources._let_go(reason, owner)
    first = next(closing, None)
    return None if first is None else _close_each(itertools.chain([first], closing), timeout_s)


async def _close_each(closing: Iterable[tuple[_Held, Call]], timeout_s: float) -> None:
    for held, call in closing:
        limit = timeout_s if held.timeout_s is None else held.timeout_s
        (outcome,) = await PendingCalls([PendingCall(call, limit, None)])
        _log_error(held, outcome.error)


def _log_error(held: _Held, error: BaseException | None) -> None:
    if error is not None:
        _log.warning("%s.close failed", held.name, exc_info=error)


def close_left_open(table: Mapping[int, tuple[int, Resources]]) -> None:
    """Close what nobody closed, at the end of its environment or of the program.

    A close that hangs holds up the end of the program only briefly.

    Args:
        table: of an environment: the row of each episode, and what it holds.
    """
    waiting: list[threading.Thread] = []
    for _, resources in list(table.values()):
        for held, call in resources._let_go(""):
            thread = threading.Thread(
                target=lambda held=held, call=call: _log_error(held, run_call(call).error),
                name="close",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError:  # no thread can start any more, as the interpreter is ending
                _log_error(held, run_call(call).error)
            else:
                waiting.append(thread)
    deadline = time.monotonic() + _EXIT_GRACE_S
    for thread in waiting:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
