"""The engine of a fleet that draws a response: that of its conversation, or the least loaded."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Final

_MAX_SESSIONS: Final = 1 << 16


class SessionRouter:
    """Keeps conversations with their engines, and gives new ones to whoever has least to do.

    Args:
        max_sessions: so many conversations are remembered, the latest used ones.
    """

    def __init__(self, *, max_sessions: int = _MAX_SESSIONS) -> None:
        self._engines: OrderedDict[Hashable, int] = OrderedDict()
        self._max_sessions = max_sessions

    def choose(self, session: Hashable, outstanding: Mapping[int, int]) -> int:
        """The engine that draws the next response of a conversation.

        Args:
            session: the conversation; ``None``: none in particular.
            outstanding: tokens that each engine that serves has still to read and to draw.
        """
        engine = self._engines.get(session, -1)
        if engine not in outstanding:
            engine = min(outstanding, key=lambda each: (outstanding[each], each))
        if session is not None:
            self._engines[session] = engine
            self._engines.move_to_end(session)
            if len(self._engines) > self._max_sessions:
                self._engines.popitem(last=False)
        return engine

    def end(self, session: Hashable) -> int | None:
        """A conversation is over; gives the engine that it was with."""
        return self._engines.pop(session, None)
