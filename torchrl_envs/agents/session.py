"""Between a program that asks and the episode that answers it."""

import asyncio
import secrets
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any, NamedTuple

from .turns import TurnReply, TurnRequest


class SessionOver(Exception):
    """The episode answers no more; its text says why."""


class ProgramEnd(NamedTuple):
    """A program has come to its end."""

    value: Any
    """What it gave."""
    error: BaseException | None


class AgentSession:
    """The requests of one program, answered one after the other."""

    # The program asks from the server's thread, and ends on its own; the episode waits in whatever
    # loop drives its events. All of them meet in what the lock guards.

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        """Who knows it is this session's program."""
        self.refusal = ""
        """Why nothing is answered any more."""
        self.was_refused = False
        """Whether something has been asked since."""
        self._lock = threading.Lock()
        self._waiting: deque[tuple[TurnRequest, Future[TurnReply]]] = deque()
        self._asked: Future[TurnReply] | None = None
        self._end: ProgramEnd | None = None
        self._listener: Future[None] | None = None

    # The program's side -------------------------------------------------------------------------

    def ask(self, request: TurnRequest) -> Future[TurnReply]:
        """Ask for a turn; cancel what is returned when nobody waits for it any more.

        Args:
            request: what is asked.

        Raises:
            SessionOver: the episode answers no more.
        """
        reply: Future[TurnReply] = Future()
        with self._lock:
            if self.refusal:
                self.was_refused = True
                raise SessionOver(self.refusal)
            self._waiting.append((request, reply))
            self._notify()
        return reply

    def end(self, value: Any = None, error: BaseException | None = None) -> None:
        """The program has come to its end.

        Args:
            value: what it gave.
            error: what it raised.
        """
        with self._lock:
            self._end = ProgramEnd(value, error)
            self._notify()

    # The episode's side -------------------------------------------------------------------------

    async def next_event(self) -> TurnRequest | ProgramEnd:
        """What the program asks next, or that it has ended; waits for it."""
        while True:
            with self._lock:
                while self._waiting:
                    request, reply = self._waiting.popleft()
                    if reply.set_running_or_notify_cancel():
                        self._asked = reply
                        return request
                if self._end is not None:
                    return self._end
                self._listener = listener = Future()
            await asyncio.wrap_future(listener)

    async def wait_for_end(self) -> ProgramEnd:
        """That the program has ended, once nothing that it asks is answered; waits for it."""
        event = await self.next_event()
        assert isinstance(event, ProgramEnd)
        return event

    def answer(self, reply: TurnReply) -> None:
        """Answer what :meth:`next_event` gave.

        Args:
            reply: the policy's turn.
        """
        with self._lock:
            asked, self._asked = self._asked, None
        if asked is not None:
            asked.set_result(reply)

    def refuse(self, reason: str) -> None:
        """Answer nothing any more: what is asked now, or later, fails.

        Args:
            reason: what the program is told.
        """
        with self._lock:
            self.refusal = self.refusal or reason
            refused = [reply for _, reply in self._waiting if reply.set_running_or_notify_cancel()]
            refused += [] if self._asked is None else [self._asked]
            self._waiting.clear()
            self._asked = None
            self.was_refused |= bool(refused)
        for reply in refused:
            reply.set_exception(SessionOver(reason))

    def _notify(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None and listener.set_running_or_notify_cancel():
            listener.set_result(None)
