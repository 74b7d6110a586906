"""Questions of many episodes, which come one by one and are asked together."""

import asyncio
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from torchrl_data.messages import Message
from torchrl_envs.concurrency.calls import is_async

from .answerer import Answerer, ask

_PAUSE_S: Final = 0.001
"""As long as questions come at this pace, they are asked together."""
_LATE_PAUSES: Final = 10
"""So many pauses without a question may be late, as on a busy machine, where all come late."""


class _Question(NamedTuple):
    """A question, and what goes with it."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]]
    stream: int | None


class GatheredQuestions:
    """Asks an answerer for many episodes: what they ask at the same time is one call.

    An ``async`` answerer (a server's client) is called again while earlier calls are under way. Any
    other one (a policy of this process) has one call at a time, and what is asked meanwhile is the
    next one.

    Args:
        answerer: is asked.
        who: it is, named in errors.
    """

    def __init__(self, answerer: Answerer, *, who: str) -> None:
        self.answerer = answerer
        self.who = who
        self._lock = threading.Lock()
        # An environment leaves a loop that is blocked, and what waits there is lost with it.
        self._of_loop = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Waiting]()

    def __getstate__(self) -> dict[str, Any]:
        """A copy shares no questions."""
        return {"answerer": self.answerer, "who": self.who}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["answerer"], who=state["who"])

    async def ask(
        self,
        question: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] = (),
        stream: int | None = None,
    ) -> str | Message:
        """Ask one question, and wait for its answer.

        Args:
            question: messages.
            tools: JSON schemas of what the answer may call; then it may be a message.
            stream: names the random numbers of the answer, see :func:`ask`.

        Raises:
            Exception: why there is none, as the answerer gave or raised it.
            TypeError: the answer is no text, nor a message where there are tools.
        """
        with self._lock:
            waiting = self._of_loop.setdefault(asyncio.get_running_loop(), _Waiting(self))
        return await waiting.ask(_Question(question, tools, stream))


class _Waiting:
    """What waits to be asked on one event loop."""

    def __init__(self, owner: GatheredQuestions) -> None:
        self._answerer, self._who = owner.answerer, owner.who
        self._in_turn = not is_async(owner.answerer)
        self._asked: list[tuple[_Question, asyncio.Future[str | Message]]] = []
        self._gathering: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, question: _Question) -> str | Message:
        answer: asyncio.Future[str | Message] = asyncio.get_running_loop().create_future()
        self._asked.append((question, answer))
        if self._gathering is None:
            self._gathering = asyncio.create_task(self._gather())
            self._tasks.add(self._gathering)
            self._gathering.add_done_callback(self._tasks.discard)
        return await answer

    async def _gather(self) -> None:
        """Ask what waits; with an answerer that is asked in turn, until nothing does."""
        while self._asked:
            await self._last_of_many()
            asked, self._asked = [each for each in self._asked if not each[1].done()], []
            if not self._in_turn:
                self._gathering = None  # what comes now is asked beside it
            if asked:
                await self._ask_all(asked)
            if not self._in_turn:
                return
        self._gathering = None

    async def _last_of_many(self) -> None:
        """Wait until no question has come for a pause."""
        time, num_asked, num_late = asyncio.get_running_loop().time, 0, 0
        while num_asked < len(self._asked) or 0 < num_late <= _LATE_PAUSES:
            num_asked, begun = len(self._asked), time()
            await asyncio.sleep(_PAUSE_S)
            is_late = time() - begun > 3 * _PAUSE_S
            num_late = num_late + 1 if is_late and num_asked == len(self._asked) else 0

    async def _ask_all(
        self, asked: Sequence[tuple[_Question, asyncio.Future[str | Message]]]
    ) -> None:
        answers: Sequence[Any]
        try:
            questions, tools, streams = map(list, zip(*(each for each, _ in asked), strict=True))
            more: Any = {"tools": tools} if any(tools) else {}
            more |= {"streams": streams} if streams != [None] * len(streams) else {}
            answers = await ask(self._answerer, questions, who=self._who, **more)
        except Exception as error:
            answers = [error] * len(asked)
        for answer, (question, waits) in zip(answers, asked, strict=True):
            if waits.done():  # nobody waits any more
                continue
            if isinstance(answer, str) or (question.tools and isinstance(answer, Mapping)):
                waits.set_result(answer)
            elif isinstance(answer, BaseException):
                waits.set_exception(answer)
            else:
                waits.set_exception(TypeError(f"{self._who} must say a text, not {answer!r:.80}"))
