"""A user who is simulated: a model, or a function, that answers what the policy says to it."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from string import Formatter
from typing import TYPE_CHECKING, Any, Final

from torchrl_data.checks import POSITIVE, check_counts, check_numbers
from torchrl_data.conversation import stream_number
from torchrl_data.message_edits import split_reasoning
from torchrl_data.messages import Message
from torchrl_data.tool_calls.call_messages import calls_of_message
from torchrl_envs.answerers.answerer import Answerer, as_exception
from torchrl_envs.answerers.gathered_questions import GatheredQuestions
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import (
    EpisodeStartError,
    EpisodeTransform,
    OpenedTurns,
    overrides,
    parts_before,
    takes_one_turn,
)
from torchrl_envs.episode.pending_calls import PendingCall, PendingCalls
from torchrl_envs.episode.tool_source import (
    Answer,
    CallBinder,
    Job,
    ToolSource,
    bind_call,
    refuse_call,
)
from torchrl_envs.graders.answers import as_opened, text_of_message
from torchrl_envs.tool_schemas import Tool
from torchrl_envs.tools.functions import FunctionTools

if TYPE_CHECKING:
    from torchrl_envs.episode.episode_transform import EpisodeEnvironment

END: Final = "###STOP###"
"""What a user says who has done."""
INSTRUCTIONS: Final = (
    "You are a person who writes to an assistant. You are the one who wants something; the "
    "assistant, not you, is the one who helps.\n\n"
    "Who you are, what you want, and what you know:\n{scenario}\n\n"
    "Write one short message at a time, in the words of such a person. Say what you want first, "
    "and tell the rest when you are asked for it. What is not written above you don't know: say "
    "so, and make nothing up. When you have got what you want, or see that you won't get it, write "
    "{end} and nothing else."
)
_SILENCE: Final = "(The assistant says nothing.)"
_NOT_YET: Final = "say first what you want; tools can be called once the assistant has answered"


class SimulatedUser(OpenedTurns, EpisodeTransform):
    """Answers what the policy says, as a user would, until the user has done.

    The user is asked in a conversation of its own: its instructions come first, what the policy
    says to it is what it reads, and what it has said itself are its own turns. It sees neither the
    policy's reasoning, nor calls of tools and their results, nor the system prompt. Where a turn
    calls tools these answer, and the user is asked when the policy speaks to it again. What it says
    is a message of the user's in the episode; it is not trained.

    The user of all episodes is asked at the same time, in one call where that is possible. Where it
    fails (no answer in time, an answer that was cut, an empty one), the episode is lost, and not
    trained.

    A user may have tools of its own: functions, and the methods of the episode's environment that
    ``user_tool`` marks, which work on the same state as the policy's tools. It calls them before it
    speaks; the policy sees neither these calls nor their results. A call that fails is answered
    with an error, which the user reads.

    Args:
        user: answers questions, each a list of messages: :class:`ChatCompletions`,
            :class:`PolicyAnswers`, or a function of yours, sync or ``async``, that returns a text
            for each question, or an exception; or a message with ``tool_calls``, where there are
            tools, whose JSON schemas it gets as ``tools``, a list for each question, if it names
            them.
        instructions: the system prompt of the user's conversation: a text whose ``{names}`` are
            columns of the data (``{end}`` is ``end``, or the first), or a function of a row of it.
        end: the user has done when it says this, or one of several; its words in that message are
            left out, and the episode ends with the stop reason ``environment_done: user``.
        opens: whether the user begins, with a message that it makes up, the same one in all
            rollouts of a draw. The column of the prompts is replaced by it, and may be the scenario
            (``instructions="... {prompt}"``). Otherwise the data's prompt is what the user said.
        greeting: what the assistant seems to have said before the user's first words: the first
            message that the user reads.
        tools: functions that the user alone may call, as :class:`FunctionTools` takes them, or a
            :class:`ToolSource` of yours that stands nowhere else, whose events don't run.
        max_calls: most calls of tools between two words of the user; with more the episode is lost.
        timeout_s: deadline of one answer, in seconds, with what it waits for others.

    Raises:
        TypeError: the user, the instructions or the tools are of another kind.
        ValueError: ``end`` or the greeting is empty, or a number is not positive.

    Example:
        >>> def user(questions):  # or ChatCompletions("Qwen/Qwen3-8B", base_url=...)
        ...     asked = [question[-1]["content"] for question in questions]
        ...     return ["Six." if "many" in text else "###STOP###" for text in asked]
        >>> data = DataLoadingPrimer([{"prompt": "Eggs, please.", "scenario": "You want six."}])
        >>> env = ChatEnv(batch_size=(1,)).append_transform(data)
        >>> env = env.append_transform(SimulatedUser(user))
        >>> out = env.step(env.reset().set("text_response", ["How many?"]))["next"]
        >>> [message["content"] for message in out["history"].prompt.to_chats()[0]]
        ['Eggs, please.', 'How many?', 'Six.']
        >>> env.step(out.set("text_response", ["Here they are."]))["next"]["stop_reason"]
        ['environment_done: user']
    """

    def __init__(
        self,
        user: Answerer,
        *,
        instructions: str | Callable[[Mapping[str, Any]], str] = INSTRUCTIONS,
        end: str | Sequence[str] = END,
        opens: bool = False,
        greeting: str = "Hello! How can I help you?",
        tools: Sequence[Callable[..., Any]] | Mapping[str, Callable[..., Any]] | ToolSource = (),
        max_calls: int = 16,
        timeout_s: float = 120.0,
    ) -> None:
        super().__init__()
        if not callable(user):
            raise TypeError(
                f"SimulatedUser: the user {user!r:.80} can't be called. Give a function of "
                "questions, ChatCompletions(model, base_url=...), or PolicyAnswers(policy)."
            )
        if not (isinstance(instructions, str) or callable(instructions)):
            raise TypeError(
                "SimulatedUser: instructions are a text or a function of a row, got "
                f"{instructions!r:.80}."
            )
        ends = [end] if isinstance(end, str) else list(end)
        for name, texts in {"end": ends, "greeting": [greeting]}.items():
            if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
                raise ValueError(f"SimulatedUser: {name} must be a text, got {texts!r:.80}.")
        check_numbers("SimulatedUser", POSITIVE, timeout_s=timeout_s)
        check_counts("SimulatedUser", max_calls=max_calls)
        if not isinstance(tools, ToolSource):
            tools = FunctionTools(tools, show_schemas=False) if tools else ToolSource()
        self._own_tools = (tools,)  # no submodule, which would be a part of the environment
        self.max_calls = max_calls
        self.instructions = instructions
        self.ends = tuple(ends)
        self.opens = opens
        self.greeting = greeting
        self.timeout_s = timeout_s
        self.keeps_prompt = not opens
        self.required_columns = [] if callable(instructions) else _columns_of(instructions)
        self._questions = GatheredQuestions(user, who="the simulated user")

    @property
    def user(self) -> Answerer:
        """Answers for the user."""
        return self._questions.answerer

    @property
    def has_tools(self) -> bool:
        """True where it may call functions of its own, or what an environment has for it."""
        others = self.env_transforms(ToolSource)
        own = self._own_tools[0].tool_names()
        return bool(own) or any(source.user_tool_names() for source in others)

    def extra_repr(self) -> str:
        """Who the user is, who begins, and the functions that are its tools."""
        name = getattr(self.user, "__name__", type(self.user).__name__)
        tools = [*self._own_tools[0].tool_names()]
        return f"user={name}, opens={self.opens}" + (f", tools={tools}" if tools else "")

    def close(self) -> None:
        """Close what runs the user's own functions."""
        self._own_tools[0].close()

    def conversation_of(self, episode: Episode) -> list[Message]:
        """The conversation as the user has it, with its instructions, its calls and their results.

        Args:
            episode: that has begun.
        """
        return list(episode.memory.get(self.key, ()))

    def check(self, env: "EpisodeEnvironment") -> None:
        """There is room for what the user answers, and nothing of the prompt is lost.

        Raises:
            ValueError: every episode ends with its first turn; the user begins, and a part
                before this one adds to the prompt that the user's first message replaces; or the
                policy has the same source of tools, or two tools of the user have one name.
        """
        self.note_environment(env)
        if takes_one_turn(env):
            raise ValueError(
                "SimulatedUser: the environment ends every episode after one turn, so nobody would "
                "read what the user answers. Allow more: max_steps=8, say (of a recipe "
                "task.max_turns=8)."
            )
        if self._own_tools[0] in env.transforms_of(ToolSource):
            raise ValueError(
                "SimulatedUser: the source of its tools is a part of the environment, too, so that "
                "the policy could call them. Give one of its own."
            )
        owners = dict(self._own_tools[0].tool_names())
        for source in env.transforms_of(ToolSource):
            names = source.user_tool_names()
            for name in names.keys() & owners.keys():
                raise ValueError(
                    f"SimulatedUser: two tools of the user are named {name!r}: {owners[name]} and "
                    f"{names[name]} have one each. Rename one."
                )
            owners.update(names)
        before = [part for part in parts_before(env, self) if isinstance(part, ToolSource)]
        adding = [type(part).__name__ for part in before if overrides(part, "begin")]
        if self.opens and adding:
            raise ValueError(
                "SimulatedUser: the user begins, and its first message takes the place of the "
                f"prompt, to which {adding} may have added. Append SimulatedUser before them."
            )

    def check_policy(self, policy: Any) -> None:
        """Note what the policy's prompts open of its turns."""
        self.note_encoder(getattr(policy, "encoder", None))

    # Events -------------------------------------------------------------------------------------

    def drawn(self, episodes: Sequence[Episode]) -> None:
        """Note the prompt as the data have it; an opening message is shared by a draw's rollouts.

        Raises:
            TypeError: the instructions of a row are no text.
        """
        openings: dict[int, _Opening] = {}
        for episode in episodes:
            said = [self._told(episode.example or {}), {"role": "user", "content": self.greeting}]
            if self.opens:
                begun = _Opening(said, self._schemas(episode), episode.seed, self.max_calls)
                opening = openings.setdefault(episode.group_id, begun)
                episode.memory = {**episode.memory, self.key: opening}
            else:
                self._remember(episode, [*said, *_as_user(episode.query)])

    async def begin(self, episode: Episode) -> None:
        """Let the user say what it wants, where the user begins.

        Raises:
            EpisodeStartError: it did not.
        """
        if not self.opens:
            return
        opening: _Opening = episode.memory[self.key]
        call = partial(opening.first_words, self._questions)
        (outcome,) = await self.call(call, timeout_s=self.timeout_s)
        try:
            if outcome.error is not None:
                raise as_exception(outcome.error)
            *_, last = outcome.value
            text, is_end = self._read(last)
            if is_end:
                raise ValueError(f"it ended before it began: {last['content']!r:.80}")
        except Exception as error:
            raise EpisodeStartError("SimulatedUser") from error
        self._remember(episode, outcome.value)
        episode.query = text

    async def after_turn(self, episode: Episode) -> None:
        """Let the user answer what was said to it, and call its tools before it does.

        Raises:
            Exception: it did not: the episode is lost.
        """
        if episode.is_over or not episode.awaits_answer:
            return
        (turn,) = as_opened([episode.last_message], self.opened_text)
        heard = text_of_message(split_reasoning(turn)).strip() or _SILENCE
        chat = [*episode.memory[self.key], {"role": "user", "content": heard}]
        schemas, num_calls = self._schemas(episode), 0
        stream = None if episode.stream is None else stream_number(episode.stream, "user")
        while True:
            call = partial(self._questions.ask, tuple(chat), tools=schemas, stream=stream)
            (outcome,) = await self.call(call, timeout_s=self.timeout_s)
            if outcome.error is not None:
                raise as_exception(outcome.error)
            chat.append(_as_message(outcome.value))
            items = list(self._bound(episode, chat[-1]))
            if not items:
                break
            num_calls = _counted(num_calls + len(items), self.max_calls)
            for answer in await _run(items):
                chat.append(answer.message or {})
                if answer.stop_reason:
                    episode.truncate(answer.stop_reason)
            self._remember(episode, chat)
            if episode.is_over:
                return
        text, is_end = self._read(chat[-1])
        self._remember(episode, chat)
        if is_end:
            episode.terminate("user")
        else:
            episode.say({"role": "user", "content": text})

    # Its tools ---------------------------------------------------------------------------------

    def _offers(self, episode: Episode) -> dict[int, tuple[Mapping[str, Tool], CallBinder]]:
        """Tools of an episode's user: functions of its own, and those of its environment."""
        own = self._own_tools[0]
        offers = {-1: (own.tools_of(episode), own.bind)}
        for number, source in enumerate(self.env_transforms(ToolSource)):
            if source.only_for is None or source.only_for(episode):
                offers[number] = (source.user_tools_of(episode), source.bind_user)
        return offers

    def _schemas(self, episode: Episode) -> list[dict[str, Any]]:
        """JSON schemas of the tools of an episode's user."""
        offers = self._offers(episode).values()
        return [tool.schema for offered, _ in offers for tool in offered.values()]

    def _bound(self, episode: Episode, message: Message) -> Iterator[Job | Answer]:
        """Give each call of a message, ready to run, or what is wrong with it."""
        offers = self._offers(episode)
        for call, error in calls_of_message(message):
            yield refuse_call(call, error) if error else bind_call(offers, episode, call)

    def _told(self, row: Mapping[str, Any]) -> Message:
        """Return the system prompt of a user's conversation."""
        if callable(self.instructions):
            text = self.instructions(row)
            if not isinstance(text, str):
                raise TypeError(
                    f"SimulatedUser: instructions(row) must return a text, got {text!r:.80}."
                )
        else:
            text = self.instructions.format_map({**row, "end": self.ends[0]})
        return {"role": "system", "content": text}

    def _read(self, said: Message) -> tuple[str, bool]:
        """What the user says aloud, and whether it has done.

        Raises:
            ValueError: it says nothing.
        """
        whole = text_of_message(said)
        text = whole.rpartition("</think>")[2].strip()
        if any(end in text for end in self.ends):
            return "", True
        if not text:
            raise ValueError(f"the simulated user says nothing: {whole!r:.80}")
        return text, False

    def _remember(self, episode: Episode, question: Sequence[Message]) -> None:
        episode.memory = {**episode.memory, self.key: tuple(question)}


class _Opening:
    """The first words of a user, asked for once and said in every rollout of a draw.

    The rollouts share them, so that a tool can't be called yet: its state is a rollout's own.
    """

    def __init__(
        self, chat: Sequence[Message], schemas: Sequence[dict[str, Any]], seed: int, max_calls: int
    ) -> None:
        self.chat = chat
        self.schemas = schemas
        self.stream = stream_number(seed, "user")
        self.max_calls = max_calls
        self._said: Future[list[Message]] = Future()

    async def first_words(self, questions: GatheredQuestions) -> list[Message]:
        """Ask, or wait for what somebody else has asked; gives the conversation with the answer."""
        if not self._said.running() and not self._said.done():
            self._said.set_running_or_notify_cancel()
            try:
                self._said.set_result(await self._ask(questions))
            except BaseException as error:
                self._said.set_exception(as_exception(error))
                raise
        return await asyncio.shield(asyncio.wrap_future(self._said))

    async def _ask(self, questions: GatheredQuestions) -> list[Message]:
        chat, num_calls = list(self.chat), 0
        while True:
            said = await questions.ask(tuple(chat), tools=self.schemas, stream=self.stream)
            chat.append(_as_message(said))
            calls = calls_of_message(chat[-1])
            if not calls:
                return chat
            num_calls = _counted(num_calls + len(calls), self.max_calls)
            chat.extend(refuse_call(call, _NOT_YET).message or {} for call, _ in calls)


def _as_message(said: str | Message) -> Message:
    """An answer as a message of the user's conversation."""
    if isinstance(said, str):
        return {"role": "assistant", "content": said}
    return {"content": "", **said, "role": "assistant"}


def _counted(num_calls: int, max_calls: int) -> int:
    """Return how many calls there were since the user's last words.

    Raises:
        ValueError: they are too many.
    """
    if num_calls > max_calls:
        raise ValueError(
            f"the simulated user called tools {num_calls} times and said nothing; at most "
            f"max_calls={max_calls} calls are answered before it speaks"
        )
    return num_calls


async def _run(items: Sequence[Job | Answer]) -> list[Answer]:
    """Run the calls of one message of the user's, and give the answers in their order."""
    jobs = [item for item in items if isinstance(item, Job)]
    pending = [PendingCall(job.call, job.timeout_s, job.lane) for job in jobs]
    outcomes = iter(await PendingCalls(pending) if pending else ())
    return [item.phrase(next(outcomes)) if isinstance(item, Job) else item for item in items]


def _columns_of(instructions: str) -> list[str]:
    """The columns that a text names, as ``{name}``.

    Raises:
        ValueError: it can't be filled in.
    """
    try:
        fields = [field for _, field, _, _ in Formatter().parse(instructions) if field is not None]
    except ValueError as error:
        raise ValueError(f"SimulatedUser: instructions are no format string: {error}.") from error
    names = [name for name in dict.fromkeys(fields) if name != "end"]
    if wrong := [name for name in names if not name.isidentifier()]:
        raise ValueError(
            f"SimulatedUser: instructions name {wrong}, and {{...}} must be the name of a column "
            "of the data. Write {{ and }} for braces."
        )
    return names


def _as_user(query: Any) -> list[Message]:
    """What opens an episode, as turns of the user: what it said, and what it was answered."""
    if isinstance(query, str):
        return [{"role": "assistant", "content": query}]
    swapped = {"user": "assistant", "assistant": "user"}
    return [
        {"role": swapped[message["role"]], "content": text_of_message(message)}
        for message in (query if isinstance(query, Sequence) else ())
        if isinstance(message, Mapping) and message.get("role") in swapped
    ]
