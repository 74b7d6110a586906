"""One episode.

Its conversation, rewards and resources, and how its events wait together with others'.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import (
    Callable,
    Coroutine,
    Generator,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from types import CoroutineType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_data.conversation import Conversations, stream_number
from torchrl_data.messages import Message
from torchrl_data.stop_reason import FinishReason, StopReason, stop_reason_of
from torchrl_envs.concurrency import Call, ConcurrentCalls, Outcome, run_call
from torchrl_envs.entries import Score

# What episodes hold while they run: sessions, environments, processes; all of it given back.

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
        how = closing if close is None else lambda _: close
        self._held[owner] = _Held(value, how, timeout_s, name or type(value).__name__)

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


# Events of many episodes at once: what they wait for runs together.
#
# An event of an episode is a plain method, or a coroutine that awaits calls
# (:meth:`~torchrl_envs.EpisodeTransform.call`). A coroutine never waits for anything else, so any
# loop can drive it: here one that takes all episodes as far as they get, runs what all of them ask
# for at once, and goes on.

EventCoroutine = Coroutine["PendingCalls", list[Outcome], None]


class PendingCall(NamedTuple):
    """A call that an event waits for."""

    call: Call
    """Takes no arguments; sync, or ``async``."""
    timeout_s: float
    """Deadline, in seconds from when it starts."""
    lane: Hashable
    """Calls of one lane run one after the other, also those of several episodes; none starts after
    one that missed its deadline."""


class PendingCalls(NamedTuple):
    """Calls that an event waits for, all of them; awaiting it gives an outcome for each."""

    calls: Sequence[PendingCall]

    def __await__(self) -> Generator["PendingCalls", list[Outcome], list[Outcome]]:
        return (yield self)


class EventDriver:
    """Runs events, sync or ``async``: many in step with each other, or each by itself in a loop.

    Args:
        calls: runs what they wait for.
    """

    def __init__(self, calls: ConcurrentCalls) -> None:
        self.calls = calls

    def run(self, event: Callable[[Any], Any], each: Sequence[Any]) -> None:
        """Run an event on each episode to its end, in their order; what they wait for, at once.

        What the first one raised is raised when all are at their ends.
        """
        errors: dict[int, Exception] = {}
        running: dict[int, EventCoroutine] = {}
        answers: dict[int, list[Outcome]] = {}
        todo: Iterable[int] = range(len(each))
        try:
            while True:
                asked: dict[int, Sequence[PendingCall]] = {}
                for number in todo:
                    try:
                        if number not in answers:
                            waiting = event(each[number])
                            if not isinstance(waiting, CoroutineType):
                                continue
                            running[number] = waiting
                        pending = _advance(running[number], answers.get(number))
                        if pending is not None:
                            asked[number] = pending.calls
                    except Exception as error:
                        errors[number] = error
                if not asked:
                    break
                flat = [*itertools.chain(*asked.values())]
                lanes = list(_by_lane(flat).values())
                found = self.calls.run(
                    [[flat[place].call for place in lane] for lane in lanes],
                    [[flat[place].timeout_s for place in lane] for lane in lanes],
                )
                by_place = dict(zip(itertools.chain(*lanes), itertools.chain(*found), strict=True))
                outcomes = map(by_place.__getitem__, range(len(flat)))
                answers = {n: [*itertools.islice(outcomes, len(asked[n]))] for n in asked}
                todo = asked
        finally:
            for coroutine in running.values():
                coroutine.close()
        if errors:
            raise errors[min(errors)]

    async def drive(self, event: Callable[["Episode"], Any], episode: "Episode") -> None:
        """Run an event of an episode to its end in an event loop; it waits for no other."""
        waiting, answer = event(episode), None
        if not isinstance(waiting, CoroutineType):
            return
        try:
            while (asked := _advance(waiting, answer)) is not None:
                answer = await self._run(asked.calls)
        finally:
            waiting.close()

    async def _run(self, pending: Sequence[PendingCall]) -> list[Outcome]:
        """Run calls, those of one lane in order, also among several events."""
        lanes = _by_lane(pending)
        results = [Outcome()] * len(pending)

        async def run(key: Any, places: list[int]) -> None:
            lane = [pending[place] for place in places]
            chain, limits = [each.call for each in lane], [each.timeout_s for each in lane]
            async with self.calls.lanes.setdefault(key, asyncio.Lock()):
                outcomes = await self.calls.run_async(chain, limits)
            for place, outcome in zip(places, outcomes, strict=True):
                results[place] = outcome

        if len(lanes) == 1:
            await run(*lanes.popitem())
        else:
            await asyncio.gather(*itertools.starmap(run, lanes.items()))
        return results


def _advance(coroutine: EventCoroutine, answer: list[Outcome] | None) -> PendingCalls | None:
    """What an event waits for next; nothing where it is at its end."""
    try:
        asked: Any = coroutine.send(answer)  # type: ignore[arg-type]
        while not isinstance(asked, PendingCalls):
            asked = coroutine.throw(
                TypeError(
                    f"An event of an episode awaits self.call(...) only, got {type(asked).__name__}"
                    ". Put what it waits for into a function, sync or async, and await "
                    "self.call(function)."
                )
            )
    except StopIteration:
        return None
    return asked


def _by_lane(pending: Iterable[PendingCall]) -> dict[Hashable, list[int]]:
    """The places of calls that run one after the other; one without a lane is alone in its own."""
    lanes: dict[Hashable, list[int]] = {}
    for place, each in enumerate(pending):
        lanes.setdefault(object() if each.lane is None else each.lane, []).append(place)
    return lanes


# One rollout, from its draw to its reward.
#
# Shape legend: T tokens of a row of an episode.

_CUT: Final = (FinishReason.LENGTH, FinishReason.CONTEXT_LENGTH)
_NOTHING: Final = Conversations.from_messages([[]])
_NO_MEMORY: Final[Mapping[str, Any]] = {}
_ids = itertools.count()


class ToolCallRecord(NamedTuple):
    """Something that the policy asked of a tool."""

    tool: str
    """As the policy called it; of what is no call, the kind of what answered. Empty where nothing
    can be made of it."""
    turn: int
    """Of the policy, from 1."""
    seconds: float | None
    """``None`` where nothing was run."""
    is_error: bool


class Episode:
    """One rollout. Everything that happens to it is here.

    Transforms work on it in their events, see :class:`~torchrl_envs.EpisodeTransform`. Its values
    travel with the batch as one object per row; what it holds (``resources``) stays in the
    environment.

    Args:
        row: which row of the environment's batch it runs in.
    """

    def __init__(self, row: int = 0) -> None:
        self.id: int = next(_ids)
        """Of this episode alone, in this process."""
        self.row: int = row
        """Which row of the environment's batch it runs in; where there is none, of its group."""
        self.example: Mapping[str, Any] | None = None
        """The data set's row that it started from."""
        self.group_id: int = -1
        """Equal for the episodes of one draw."""
        self.seed: int = 0
        """Equal for the episodes of one draw."""
        self.stream: int | None = None
        """Names the random numbers that its turns are drawn with, its own alone, see
        :func:`~torchrl_data.stream_number`. Whoever draws it may give it one."""
        self.query: Any = None
        """What opens the conversation: a string, messages or token ids; for ``begin``."""
        self.tools: Sequence[dict[str, Any]] | None = None
        """JSON schemas that the prompt shows."""
        # Its conversation is one of a snapshot, usually that of a whole batch.
        self._snapshot, self._index = _NOTHING, 0
        # What a turn of `max_new_tokens` would end the episode for, and the limit behind it.
        self._turn_bound: tuple[str, int] | None = None
        self.segments: tuple[Conversations, ...] = ()
        """What was said before the past was rewritten, see :meth:`rewrite`; one of a row each."""
        self.max_new_tokens: int | None = None
        """Most tokens of the next turn; ``None`` leaves it to the policy."""
        self.max_turns: int | None = None
        """Most turns of the policy; ``None`` for no bound."""
        self.finish_reason: str = ""
        """Why the newest turn ended, see :class:`~torchrl_data.FinishReason`."""
        self.stop_reason: str = ""
        """Why the episode is over, see :class:`~torchrl_data.StopReason`; empty while it runs."""
        self.stop_limit: int = -1
        """The limit that cut it, in tokens or turns; -1 where none did."""
        self.is_terminated: bool = False
        """It has come to its own end."""
        self.is_truncated: bool = False
        """It was cut."""
        self.num_turns: int = 0
        """Turns that the policy has taken."""
        self.num_tool_calls: int = 0
        self.num_tool_errors: int = 0
        self.tool_calls: tuple[ToolCallRecord, ...] = ()
        """What was asked of tools, in order; replace it, don't write into it."""
        self.score: Score = Score()
        """What it was given at its end."""
        self.metrics: dict[str, Any] = {}
        """What transforms measured at its end, by their ``key``."""
        self.token_entries: dict[Any, Tensor] = {}
        """Values by token, ``[T, ...]`` over all tokens of all its rows, by entry."""
        self.memory: Mapping[str, Any] = _NO_MEMORY
        """What transforms remember of it, by their ``key``; replace it, don't write into it."""
        self.resources: Resources = Resources()
        """What it holds; given back when it is over."""

    def fork(self) -> "Episode":
        """The same episode, to go on from here: what happens to one is not seen by the other."""
        fork = object.__new__(Episode)
        fork.__dict__ = self.__dict__.copy()
        return fork

    def __getstate__(self) -> dict[str, Any]:
        """Its values; what it holds does not travel, nor do the conversations of others."""
        own = {"_snapshot": self.conversation, "_index": 0, "resources": Resources()}
        return {**self.__dict__, **own}

    def __repr__(self) -> str:
        state = self.stop_reason or "running"
        return f"Episode(id={self.id}, group_id={self.group_id}, {state})"

    # What was said ------------------------------------------------------------------------------

    @property
    def conversation(self) -> Conversations:
        """One conversation: an append-only record and how far it has got."""
        return self._snapshot if len(self._snapshot) == 1 else self._snapshot.row(self._index)

    @conversation.setter
    def conversation(self, conversation: Conversations) -> None:
        if conversation.stream(0) is None and self.stream is not None:
            conversation = conversation.with_streams([self._next_stream(self.stream)])
        self._snapshot, self._index = conversation, 0

    def _next_stream(self, stream: int) -> int:
        """That of a record that begins now; another one than those before it had."""
        before = self._snapshot.stream(self._index) if self._snapshot is not _NOTHING else None
        if before is None:
            return stream
        return stream_number(before, self._snapshot.num_tokens(self._index))

    def share(self, conversations: Conversations, index: int) -> None:
        """Its conversation is one of several, which takes no object for each row."""
        self._snapshot, self._index = conversations, index

    def shares(self, conversations: Conversations) -> bool:
        """Whether its conversation is one of these still, see :meth:`share`."""
        return self._snapshot is conversations

    @property
    def messages(self) -> list[Message]:
        """The conversation as it stands."""
        return self._snapshot.messages(self._index)

    @property
    def last_message(self) -> Message:
        """The newest message."""
        return self._snapshot.last_message(self._index)

    @property
    def first_response(self) -> int:
        """Messages before the policy's first turn."""
        return self._snapshot.first_response(self._index)

    @property
    def prompt_messages(self) -> list[Message]:
        """What came before the policy's first turn."""
        first = self.rows[0]
        return first.messages(0)[: first.first_response(0)]

    @property
    def completion_messages(self) -> list[Message]:
        """Everything from the policy's first turn on, of all rows, each message once."""
        if not self.segments:
            return self.messages[self.first_response :]
        return [
            message
            for row in self.rows
            if row.was_sampled(0)
            for message in row.messages(0)[row.first_response(0) :]
        ]

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens before the first one that the policy sampled."""
        first = self.rows[0]
        return first.ids(0)[: first.num_tokens_before_policy(0)]

    @property
    def completion_ids(self) -> list[int]:
        """The tokens from the first one on that the policy sampled, of all rows."""
        return [
            token for row in self.rows for token in row.ids(0)[row.num_tokens_before_policy(0) :]
        ]

    @property
    def awaits_answer(self) -> bool:
        """Whether the policy spoke last."""
        return self._snapshot.last_message(self._index).get("role") == "assistant"

    @property
    def rows(self) -> list[Conversations]:
        """The rows that are trained: each sampled token is in exactly one of them.

        One for each segment, and one for the conversation as it stands.
        """
        return [*self.segments, self.conversation]

    @property
    def assistant_mask(self) -> Tensor:
        """True on the tokens that the policy sampled, of all rows one after the other, ``[T]``."""
        if not self.segments:
            return self._snapshot.assistant_mask(self._index)
        return torch.cat([row.assistant_mask(0) for row in self.rows])

    @property
    def sampled_versions(self) -> np.ndarray:
        """Policy version of each token that the policy sampled, of all rows, int64."""
        versions = np.concatenate([row.policy_versions(0).numpy() for row in self.rows])
        return versions[versions >= 0]

    def say(self, *messages: Message) -> None:
        """Add messages of anybody but the policy to the conversation.

        Args:
            messages: they get their tokens before the next turn.
        """
        self.conversation = self.conversation.append_messages([messages])

    def rewrite(self, messages: Sequence[Message]) -> None:
        """Go on from another past: a summary, a history without reasoning or old results.

        What the policy has sampled so far stays as it is, in a row of its own that shares group,
        reward and advantage with the rest (:attr:`segments`). Nothing in ``messages`` is trained
        again, whoever said it.

        Args:
            messages: the whole conversation from now on; they get their tokens before the next
                turn.
        """
        tools = self._snapshot.tools(self._index)
        self.replace_conversation(Conversations.from_messages([list(messages)], [tools]))

    def replace_conversation(self, conversation: Conversations) -> None:
        """Go on with another record; the old one is a segment if the policy sampled any of it.

        Args:
            conversation: one; none of its tokens is trained again.
        """
        if self._snapshot.was_sampled(self._index):
            self.segments = (*self.segments, self.conversation)
        self.conversation = conversation

    def start_turn(self) -> None:
        """Forget the bounds of the turn before."""
        self.max_new_tokens, self._turn_bound = None, None

    def limit_turn(self, max_new_tokens: int, reason: str = "", limit: int = -1) -> None:
        """Bound the next turn; the tightest bound counts.

        Args:
            max_new_tokens: most tokens of it.
            reason: why the episode is over if the turn is cut there; ``response_length`` when not
                given.
            limit: the limit behind it, in tokens: that of a whole row, say.
        """
        held = self.max_new_tokens
        if held is None or max_new_tokens < held:
            self.max_new_tokens = max_new_tokens
            self._turn_bound = (reason, limit) if reason else None

    def limit_turns(self, max_turns: int) -> None:
        """Bound the number of turns; the tightest bound counts.

        Args:
            max_turns: most turns of the policy.
        """
        held = self.max_turns
        self.max_turns = max_turns if held is None else min(held, max_turns)

    def drop_unanswered(self) -> None:
        """Leave a row out that began anew, and which the policy took no turn in."""
        if self.segments and not self._snapshot.was_sampled(self._index):
            *before, self.conversation = self.segments
            self.segments = tuple(before)

    # How it ends --------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether it is over."""
        return self.is_terminated or self.is_truncated

    @property
    def is_scorable(self) -> bool:
        """Whether what it got says anything about the policy: it began, and did not fail."""
        if not self.stop_reason:
            return self.num_turns > 0
        reason, _ = stop_reason_of(self.stop_reason, StopReason.TRUNCATED)
        return self.num_turns > 0 and reason.is_scorable

    @property
    def is_last_turn(self) -> bool:
        """Whether the policy has taken the last turn that :attr:`max_turns` allows."""
        return self.max_turns is not None and self.num_turns >= self.max_turns

    @property
    def is_turn_cut(self) -> bool:
        """Whether a limit of tokens cut the newest turn."""
        return self.finish_reason in _CUT

    def terminate(self, reason: str = "") -> None:
        """It has come to its own end; an episode that is truncated already stays so.

        Args:
            reason: why, in words of your own (``environment_done: <reason>``) or a
                :class:`~torchrl_data.StopReason`; the first one stays.
        """
        if not self.is_truncated:
            self.is_terminated = True
            self._end_for(reason, StopReason.ENVIRONMENT_DONE)

    def truncate(self, reason: str = "") -> None:
        """It is cut here; what it came to by itself does not count.

        Args:
            reason: why, in words of your own (``truncated: <reason>``) or a
                :class:`~torchrl_data.StopReason`; the first one that truncates stays.

        Raises:
            ValueError: the reason is one of an episode that came to its own end.
        """
        kind, _ = stop_reason_of(reason, StopReason.TRUNCATED)
        if not kind.is_truncated:
            raise ValueError(
                f"Episode.truncate: {kind!s} is an end of the episode's own. Call terminate(), or "
                "give a reason in words of your own."
            )
        if self.is_terminated:
            self.is_terminated, self.stop_reason = False, ""
        self.is_truncated = True
        self._end_for(reason, StopReason.TRUNCATED)

    def _end_for(self, reason: str, default: StopReason) -> None:
        if reason and not self.stop_reason:
            _, self.stop_reason = stop_reason_of(reason, default)

    def cut_turn(self) -> None:
        """End it because a limit of tokens cut the newest turn, and say which limit."""
        conversation = self.conversation
        total = conversation.num_tokens(0)
        num_tokens = total - conversation.position(0).response_start
        self.stop_reason, self.stop_limit = StopReason.RESPONSE_LENGTH.value, num_tokens
        if self.finish_reason == FinishReason.CONTEXT_LENGTH:
            self.stop_reason, self.stop_limit = StopReason.CONTEXT_LENGTH.value, total
        elif self._turn_bound is not None and num_tokens >= (self.max_new_tokens or 0):
            self.stop_reason, self.stop_limit = self._turn_bound
        self.is_terminated, self.is_truncated = False, True

    def resume(self) -> None:
        """It is not over after all."""
        self.is_terminated = self.is_truncated = False
        self.stop_reason, self.stop_limit = "", -1

    def end_turn(self) -> None:
        """End it where nobody spoke after the policy, or no turn is left to take."""
        if self.is_done or self.stop_reason:
            return
        if self.awaits_answer:
            self.terminate(StopReason.ANSWERED)
        elif self.is_last_turn:
            assert self.max_turns is not None
            self.truncate(StopReason.MAX_STEPS)
            self.stop_limit = self.max_turns

    def settle(self) -> bool:
        """Say why it is over, and what follows from that: terminated or truncated.

        Returns:
            Whether it is over.
        """
        if not (self.is_done or self.stop_reason):
            return False
        default = StopReason.TRUNCATED
        if self.is_terminated:
            default = StopReason.ANSWERED if self.awaits_answer else StopReason.ENVIRONMENT_DONE
        reason, text = stop_reason_of(self.stop_reason, default)
        # A turn that was cut did not end the episode, whatever was said to it.
        if self.is_turn_cut and (not self.stop_reason or not reason.is_truncated):
            self.cut_turn()
            return True
        self.stop_reason = text
        self.is_truncated = reason.is_truncated
        self.is_terminated = not reason.is_truncated
        return True
