"""Session between a program that asks and the episode that answers it."""

import asyncio
import secrets
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .turns import RequestError, TurnReply, TurnRequest


class SessionOver(Exception):
    """The episode answers no more; its text says why."""


class ProgramEnd(NamedTuple):
    """A program has come to its end."""

    value: Any
    """What it gave."""
    error: BaseException | None


@dataclass(eq=False)
class Asked:
    """A request, and what becomes of it."""

    request: TurnRequest
    reply: Future[TurnReply] = field(default_factory=Future)
    """Holds a ``RequestError`` where it can't be answered as it is."""
    is_awaited: bool = True


class AgentSession:
    """The requests of one program, answered one after the other."""

    # The program asks from the server's thread, and ends on its own; the episode waits in whatever
    # loop drives its events. All of them meet in what the lock guards.

    def __init__(self) -> None:
        self.key = secrets.token_hex(24)  # as a word of a command it is no option
        """Who knows it is this session's program."""
        self._refusal = ""
        self._lock = threading.Lock()
        self._waiting: deque[Asked] = deque()
        self._asked: Asked | None = None
        self._unheard: list[Asked] = []
        """Those that were answered when nobody waited for it any more."""
        self._end: ProgramEnd | None = None
        self._listener: Future[None] | None = None

    # The program's side -------------------------------------------------------------------------

    def ask(self, request: TurnRequest) -> Asked:
        """Ask for a turn.

        Args:
            request: what is asked; one that was given up in the midst of its answer gets that.

        Raises:
            SessionOver: the episode answers no more.
        """
        asked = Asked(request)
        with self._lock:
            if self._refusal:
                raise SessionOver(self._refusal)
            self._waiting.append(asked)
            self._notify()
        return asked

    def give_up(self, asked: Asked) -> None:
        """Note that no client waits for an answer any more.

        Args:
            asked: what :meth:`ask` gave.
        """
        with self._lock:
            asked.is_awaited = False
            asked.reply.cancel()

    def end(self, value: Any = None, error: BaseException | None = None) -> None:
        """The program has come to its end; what else it does is of no account.

        Args:
            value: what it gave.
            error: what it raised.
        """
        with self._lock:
            if self._end is None:
                self._end = ProgramEnd(value, error)
            self._notify()
        self.refuse("its program has ended")

    # The episode's side -------------------------------------------------------------------------

    async def next_event(self) -> TurnRequest | ProgramEnd:
        """Return what the program asks next, or that it has ended; waits for it."""
        while True:
            with self._lock:
                if self._end is not None:
                    return self._end
                while self._waiting:
                    asked = self._waiting.popleft()
                    if not asked.reply.set_running_or_notify_cancel():
                        continue
                    same = (u for u in self._unheard if u.request == asked.request)
                    unheard = next(same, None)
                    if unheard is not None:  # a client that tries again
                        self._unheard.remove(unheard)
                        asked.reply.set_result(unheard.reply.result())
                        continue
                    self._asked = asked
                    return asked.request
                self._listener = listener = Future()
            await asyncio.wrap_future(listener)

    def answer(self, reply: TurnReply | RequestError) -> None:
        """Answer what :meth:`next_event` gave.

        Args:
            reply: the policy's turn, or why there is none.
        """
        with self._lock:
            asked, self._asked = self._asked, None
            if asked is not None and not asked.is_awaited and isinstance(reply, TurnReply):
                self._unheard.append(asked)
        if asked is None:
            return
        if isinstance(reply, RequestError):
            asked.reply.set_exception(reply)
        else:
            asked.reply.set_result(reply)

    def refuse(self, reason: str) -> None:
        """Answer nothing any more: what is asked now, or later, fails.

        Args:
            reason: what the program is told.
        """
        with self._lock:
            self._refusal = self._refusal or reason
            waiting = [a.reply for a in self._waiting if a.reply.set_running_or_notify_cancel()]
            refused = waiting + ([] if self._asked is None else [self._asked.reply])
            self._waiting.clear()
            self._asked = None
        for reply in refused:
            reply.set_exception(SessionOver(reason))

    def _notify(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None and listener.set_running_or_notify_cancel():
            listener.set_result(None)
