"""Sources of tools, and the dispatcher that gives each call of the policy to one of them."""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrl_data.checks import POSITIVE, check_counts, check_numbers
from torchrl_data.messages import Message
from torchrl_data.tool_calls.parser import TurnParser
from torchrl_data.tool_calls.records import MalformedCall, ToolCall
from torchrl_envs.concurrency.outcome import Call, EpisodeLostError, Outcome
from torchrl_envs.tool_results import (
    MAX_RESULT_BYTES,
    Content,
    as_content,
    environment_error,
    error_text,
    result_text,
)

from .episode import Episode, ToolCallRecord
from .episode_transform import EpisodeTransform, Event
from .pending_calls import PendingCall, PendingCalls

if TYPE_CHECKING:
    from torchrl_envs.tool_schemas import Tool


_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Answer(NamedTuple):
    """The environment's answer to something in the policy's turn.

    Example:
        >>> class Dice(ToolSource):
        ...     def read_turn(self, episode, text):
        ...         if "<roll>" in text:
        ...             return [Answer({"role": "user", "content": "You rolled a 4."})]
        ...         return [Answer(None, stop_reason="done")]
        >>> data = DataLoadingPrimer([{"prompt": "Roll."}])
        >>> env = ChatEnv(batch_size=(2,)).append_transform(data).append_transform(Dice())
        >>> out = env.step(env.reset().set("text_response", ["<roll>", "No."]))["next"]
        >>> out["history"].prompt.to_chats()[0][-1], out["stop_reason"]
        ({'role': 'user', 'content': 'You rolled a 4.'}, ['', 'environment_done: done'])
    """

    message: Message | None
    """Appended to the conversation, of whatever role the source chooses; ``None`` says nothing. A
    turn that nobody answers with a message ends its episode."""
    is_error: bool = False
    """Counted in ``num_tool_errors``."""
    stop_reason: str = ""
    """If not empty, the episode ends here, for this reason: a :class:`~torchrl_data.StopReason`, or
    words of your own, which become its detail (``environment_done: solved``)."""
    is_truncation: bool = False
    """Whether that end is not the episode's own: it is truncated, not terminated."""
    position: int = 0
    """Where in the turn's text its cause is, in characters: answers are in this order."""
    tool: str = ""
    """Whose answer it is, for the record; the dispatcher fills it in where it is empty."""


class Job(NamedTuple):
    """Something to run because of the policy's turn, and how its outcome is put."""

    call: Call
    """Takes no arguments; sync, or ``async`` (a coroutine function or a partial of one)."""
    phrase: Callable[[Outcome], Answer]
    """Turns the outcome into an answer. An error of the call, or a missed deadline, is in
    ``outcome.error``; must not raise. The answer's place is the job's."""
    timeout_s: float
    """Deadline of the call, seconds from when it starts."""
    lane: Hashable = None
    """Jobs of one source with equal lanes run in the order in which they were written, and none
    starts after one that missed its deadline; those of different lanes, and those without one,
    run at the same time. A source whose state belongs to the episode uses its ``id``."""
    position: int = 0
    """Where in the turn's text it was asked for, in characters: answers are in this order."""
    tool: str = ""
    """What is run, for the record; the dispatcher fills it in where it is empty."""


class ToolSource(EpisodeTransform):
    """Base class of everything that runs because of what the policy wrote.

    All sources of an environment share one dispatcher, which sees a turn once. There are two ways
    to take part, and a source may do both:

    *Tools that are called in the model's own format* (JSON in ``<tool_call>`` and the like).
    Override :meth:`tool_names`, :meth:`tools_of` and :meth:`bind`. The dispatcher parses the turn,
    finds the source that owns the name, checks the arguments against the schema, and asks the owner
    for a :class:`Job`. A call that is malformed, or of a tool that nobody has, is answered once by
    the dispatcher. No two sources may have tools of the same name.

    *What is in the text itself* (code blocks, a request syntax, an action for a remote
    environment). Override :meth:`read_turn`: given the text of the policy's turn, which jobs, and
    how is each outcome put (role, content, whether the episode ends).

    The dispatcher runs the jobs of all episodes and sources at once, each with its deadline, and
    appends the answers of an episode in the order of ``position``. Only the policy's turn is read,
    never an answer. Jobs run on the threads and the event loop of ``self.calls``, which all parts
    of the environment share: what an async ``reset`` opened there, an async tool can use. The jobs
    of a turn run before the other transforms see the step, even if the turn is the last one.

    Lifecycle: make what an episode needs in ``begin`` (``await self.call(...)`` for what blocks)
    and add it to ``episode.resources`` with what gives it back: that happens once, when the episode
    has been scored, given up or the environment is closed. What belongs to all episodes is given
    back in ``close``.

    Args:
        timeout_s: deadline of one call, in seconds.
        max_result_bytes: longer results are cut, with a mark; bytes of UTF-8.
        show_schemas: whether the chat template shows the tools to the model.

    Raises:
        ValueError: a number is not positive.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 30.0,
        max_result_bytes: int = MAX_RESULT_BYTES,
        show_schemas: bool = True,
    ) -> None:
        super().__init__()
        check_numbers(type(self).__name__, POSITIVE, timeout_s=timeout_s)
        check_counts(type(self).__name__, max_result_bytes=max_result_bytes)
        self.timeout_s = timeout_s
        self.max_result_bytes = max_result_bytes
        self.show_schemas = show_schemas
        self._offered: Mapping[str, Tool] = {}
        """What every episode may call, by name."""

    # Tools that are called in the model's format --------------------------------------------------

    def tool_names(self) -> Mapping[str, str]:
        """Every tool that any episode may have, and who owns it, as an error would name it."""
        return dict.fromkeys(self._offered, type(self).__name__)

    def tools_of(self, episode: Episode) -> Mapping[str, "Tool"]:
        """An episode's tools, by name; called for every turn, so it must be cheap."""
        del episode
        return self._offered

    def bind(self, episode: Episode, call: ToolCall) -> Job:
        """A call of one of the episode's tools, ready to run; its arguments fit the schema."""
        raise NotImplementedError(f"{type(self).__name__} offers tools but has no bind().")

    # Tools of the simulated user ------------------------------------------------------------------

    def user_tool_names(self) -> Mapping[str, str]:
        """Every tool that any simulated user may call here, and who owns it."""
        return {}

    def user_tools_of(self, episode: Episode) -> Mapping[str, "Tool"]:
        """Tools that an episode's simulated user may call here, and the policy may not; by name.

        Called before ``begin``, too: it goes by the row of the data.
        """
        del episode
        return {}

    def bind_user(self, episode: Episode, call: ToolCall) -> Job:
        """A call of the simulated user's, ready to run; its arguments fit the schema."""
        return self.bind(episode, call)

    def extra_repr(self) -> str:
        """Tools of the source, and its rewards if it has any."""
        tools = [f"tools={list(self.tool_names())}"] if self.tool_names() else []
        return ", ".join([*tools, *filter(None, [super().extra_repr()])])

    def job(self, call: ToolCall, function: Callable[..., Any], *, lane: Hashable = None) -> Job:
        """A job with this source's deadline and cap, answered with a ``tool`` message.

        What the function returns is made text where it runs, under the deadline, but for images,
        which stay parts of the message. An
        :class:`~torchrl_envs.concurrency.outcome.EpisodeLostError` ends the row.

        Args:
            call: what the model asked for.
            function: takes no arguments.
            lane: see :class:`Job`.
        """

        def phrase(outcome: Outcome) -> Answer:
            error = outcome.error
            if error is None:
                return Answer(tool_message(call, outcome.value))
            is_lost = isinstance(error, EpisodeLostError)
            reason = environment_error(error) if is_lost else ""
            return Answer(tool_message(call, result_text(outcome)), True, reason, is_lost)

        return Job(as_content(function, self.max_result_bytes), phrase, self.timeout_s, lane)

    # What is in the text --------------------------------------------------------------------------

    def read_turn(self, episode: Episode, text: str) -> Sequence[Job | Answer]:
        """Return what a turn asks for by its text.

        Must be total: any text gives jobs and answers (an :class:`Answer` needs nothing to run,
        for instance a complaint about a malformed request), never an exception.

        Args:
            episode: whose turn it is.
            text: what the policy wrote, without the stop token.
        """
        del episode, text
        return ()


def tool_message(call: ToolCall | None, content: Content) -> Message:
    """A message of the ``tool`` role.

    Args:
        call: what it answers; ``None`` for a call that could not be read.
        content: its text, or parts with images.
    """
    message: Message = {"role": "tool", "content": content}
    if call is not None:
        # Both are the model's words, and templates write them into the scaffold.
        if _WORD.fullmatch(call.name):
            message["name"] = call.name
        if call.id is not None and _WORD.fullmatch(call.id):
            message["tool_call_id"] = call.id
    return message


class ToolDispatcher(EpisodeTransform):
    """Answers the turns of episodes with what all sources of tools say.

    Args:
        parse: finds the calls of a turn, in the model's format.
    """

    changeable = frozenset({"parse"})

    def __init__(self, parse: TurnParser) -> None:
        super().__init__()
        self.parse = parse
        self.sources: Sequence[ToolSource] = ()
        """All sources of the environment, in order; the runner keeps it up to date."""

    def after_turn(self, episode: Episode) -> Event:
        """Answer a turn: run what it asks for, say what comes of it in order, and count it.

        Args:
            episode: that has just taken one; nothing happens where the policy did not speak last.
        """
        if (message := episode.last_message)["role"] != "assistant":
            return None
        text: str = message["content"]
        items: list[Job | Answer] = []
        tools: dict[int, Mapping[str, Tool]] = {}
        for number, source in enumerate(self.sources):
            if source.only_for is None or source.only_for(episode):
                tools[number] = source.tools_of(episode)
        if any(tools.values()):
            offers = {n: (own, self.sources[n].bind) for n, own in tools.items()}
            _, calls, places = self.parse(text)
            for call, at in zip(calls, places or [0] * len(calls), strict=True):
                items.append(bind_call(offers, episode, call, at))
        for number in tools:
            source = self.sources[number]
            for item in source.read_turn(episode, text):
                if not isinstance(item, Job | Answer):
                    raise TypeError(
                        f"{type(source).__name__}.read_turn must give a sequence of Job and "
                        f"Answer, got {item!r:.80} in it."
                    )
                # Lanes belong to their source.
                if isinstance(item, Job) and item.lane is not None:
                    item = item._replace(lane=(number, item.lane))
                items.append(item._replace(tool=item.tool or type(source).__name__))
        items.sort(key=lambda item: item.position)
        return self._answer(episode, items) if items else None

    async def _answer(self, episode: Episode, items: Sequence[Job | Answer]) -> None:
        """Run what a turn asks for, of all sources, and put it in the order of the text."""
        pending = [PendingCall(i.call, i.timeout_s, i.lane) for i in items if isinstance(i, Job)]
        outcomes = iter(await PendingCalls(pending) if pending else ())
        messages: list[Message] = []
        end: Answer | None = None  # the first that ends the episode says why
        for item in items:
            outcome = next(outcomes) if isinstance(item, Job) else Outcome()
            answer = item.phrase(outcome) if isinstance(item, Job) else item
            message: Any = answer.message if isinstance(answer, Answer) else answer
            if message is answer or not (message is None or "role" in message):
                raise TypeError(
                    f"{item.tool}: an Answer is due, whose message is a dictionary with role and "
                    f"content, or None; got {answer!r:.80}."
                )
            episode.num_tool_calls += 1
            episode.num_tool_errors += answer.is_error
            record = ToolCallRecord(item.tool, episode.num_turns, outcome.seconds, answer.is_error)
            episode.tool_calls = (*episode.tool_calls, record)
            if message is not None:
                messages.append(message)
            if answer.stop_reason and end is None:
                end = answer
        if messages:
            episode.say(*messages)
        if end is not None:
            (episode.truncate if end.is_truncation else episode.terminate)(end.stop_reason)


CallBinder = Callable[[Episode, ToolCall], Job]
"""Makes a call of a tool ready to run."""


def bind_call(
    offers: Mapping[Any, tuple[Mapping[str, "Tool"], CallBinder]],
    episode: Episode,
    call: ToolCall | MalformedCall,
    position: int = 0,
) -> Job | Answer:
    """A call that is ready to run, or what is wrong with it.

    Args:
        offers: the tools of each source, and how it binds a call; its key begins the lanes.
        episode: in which something is called.
        call: as it was read.
        position: see :class:`Job`.
    """
    if isinstance(call, MalformedCall):
        return refuse_call(None, f"malformed tool call: {call.error}", position)
    for number, (own, bind) in offers.items():
        tool = own.get(call.name)
        if tool is not None:
            if call.is_text:
                call = call._replace(arguments=tool.typed(call.arguments), is_text=False)
            error = tool.argument_error(call.arguments)
            if error is not None:
                return refuse_call(call, f"{call.name}: {error}", position)
            job = bind(episode, call)
            lane = None if job.lane is None else (number, job.lane)
            return Job(job.call, job.phrase, job.timeout_s, lane, position, call.name)
    names = [name for own, _ in offers.values() for name in own]
    return refuse_call(call, f"unknown tool {call.name!r:.80}; the tools are {names}", position)


def refuse_call(call: ToolCall | None, error: str, position: int = 0) -> Answer:
    """The answer to a call that is not run.

    Args:
        call: what it answers; ``None`` for one that could not be read.
        error: why it is not.
        position: see :class:`Job`.
    """
    tool = "" if call is None else call.name
    message = tool_message(call, error_text(error))
    return Answer(message, is_error=True, position=position, tool=tool)
