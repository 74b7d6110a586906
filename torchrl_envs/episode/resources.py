"""What episodes hold while they run: sessions, environments, processes; all of it given back."""

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torchrl_envs.concurrency.calls import Call, ConcurrentCalls, run_call

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
    """What one episode holds, by owner. Given back in reverse order, once.

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
        if close is not None:
            closing = functools.partial(_always, close)
        self._held[owner] = _Held(value, closing, timeout_s, name or type(value).__name__)

    def get(self, owner: Any, default: Any = None) -> Any:
        """What an owner holds in this episode.

        Args:
            owner: who added it.
            default: what to return if there is none.
        """
        held = self._held.get(owner)
        return default if held is None else held.value

    def __contains__(self, owner: Any) -> bool:
        return owner in self._held

    def __len__(self) -> int:
        return len(self._held)

    def _take(self, owner: Any = None) -> list[_Held]:
        """Everything, the newest first, or what one owner has; it is not held any more."""
        if owner is None:
            held = list(reversed(self._held.values()))
            self._held.clear()
        else:
            held = [self._held.pop(owner)] if owner in self._held else []
        return [each for each in held if each.closing is not None]


def close_resources(
    episodes: Sequence[tuple[Resources, str]], calls: ConcurrentCalls, *, owner: Any = None
) -> None:
    """Give back what some episodes hold, all episodes at once, each in reverse order.

    An error or a missed deadline is logged: the others are closed all the same, and whoever gives
    something back has nothing to repair. Of one owner only what it added, if there is one.
    """
    stacks = [[(held, reason) for held in resources._take(owner)] for resources, reason in episodes]
    for depth in range(max(map(len, stacks), default=0)):
        level = [stack[depth] for stack in stacks if depth < len(stack)]
        pending: list[tuple[_Held, Call]] = []
        for held, reason in level:
            call = _asked(held, reason)
            if call is not None:
                pending.append((held, call))
        if not pending:
            continue
        limits = [[calls.timeout_s if h.timeout_s is None else h.timeout_s] for h, _ in pending]
        results = calls.run([[call] for _, call in pending], limits)
        for (held, _), (outcome,) in zip(pending, results, strict=True):
            _log_error(held, outcome.error)


async def close_resources_async(
    resources: Resources, reason: str, calls: ConcurrentCalls, *, owner: Any = None
) -> None:
    """Give back what one episode holds, as :func:`close_resources` does, in an event loop."""
    for held in resources._take(owner):
        call = _asked(held, reason)
        if call is not None:
            limit = calls.timeout_s if held.timeout_s is None else held.timeout_s
            ((outcome,),) = await calls.run_async([[call]], [[limit]])
            _log_error(held, outcome.error)


def _always(call: Call, reason: str) -> Call:
    del reason
    return call


def _asked(held: _Held, reason: str) -> Call | None:
    assert held.closing is not None
    try:
        return held.closing(reason)
    except Exception as error:
        _log_error(held, error)
        return None


def _log_error(held: _Held, error: BaseException | None) -> None:
    if error is not None:
        _log.warning("%s.close failed", held.name, exc_info=error)


def close_left_open(table: Mapping[Any, Resources]) -> None:
    """Close what nobody closed, at the end of its environment or of the program.

    A close that hangs holds up the end of the program only briefly.

    Args:
        table: of an environment; emptied.
    """
    waiting: list[threading.Thread] = []
    for resources in list(table.values()):
        for held in resources._take():
            call = _asked(held, "")
            if call is None:
                continue
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
