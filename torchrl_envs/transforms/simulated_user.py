"""A user who is simulated: a model, or a function, that answers what the policy says to it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from string import Formatter
from typing import TYPE_CHECKING, Any, Final

from torchrl_data.checks import POSITIVE, check_numbers
from torchrl_data.message_edits import split_reasoning
from torchrl_data.messages import Message
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
from torchrl_envs.episode.tool_source import ToolSource
from torchrl_envs.graders.answers import as_opened, text_of_message

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

    Args:
        user: answers questions, each a list of messages: :class:`ChatCompletions`,
            :class:`PolicyAnswers`, or a function of yours, sync or ``async``, that returns a text
            for each question, or an exception.
        instructions: the system prompt of the user's conversation: a text whose ``{names}`` are
            columns of the data (``{end}`` is ``end``), or a function of a row of the data.
        end: the user has done when it says this; its words in that message are left out, and the
            episode ends with the stop reason ``environment_done: user``.
        opens: whether the user begins, with a message that it makes up, the same one in all
            rollouts of a draw. The column of the prompts is replaced by it, and may be the scenario
            (``instructions="... {prompt}"``). Otherwise the data's prompt is what the user said.
        greeting: what the assistant seems to have said before the user's first words: the first
            message that the user reads.
        timeout_s: deadline of one answer, in seconds, with what it waits for others.

    Raises:
        TypeError: the user, or the instructions, are of another kind.
        ValueError: ``end`` or the greeting is empty, or the deadline is not positive.

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
        end: str = END,
        opens: bool = False,
        greeting: str = "Hello! How can I help you?",
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
        for name, text in {"end": end, "greeting": greeting}.items():
            if not (isinstance(text, str) and text.strip()):
                raise ValueError(f"SimulatedUser: {name} must be a text, got {text!r:.80}.")
        check_numbers("SimulatedUser", POSITIVE, timeout_s=timeout_s)
        self.instructions = instructions
        self.end = end
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

    def extra_repr(self) -> str:
        """Who the user is, and who begins."""
        name = getattr(self.user, "__name__", type(self.user).__name__)
        return f"user={name}, opens={self.opens}"

    def check(self, env: "EpisodeEnvironment") -> None:
        """There is room for what the user answers, and nothing of the prompt is lost.

        Raises:
            ValueError: every episode ends with its first turn; or the user begins, and a part
                before this one adds to the prompt that the user's first message replaces.
        """
        self.note_environment(env)
        if takes_one_turn(env):
            raise ValueError(
                "SimulatedUser: the environment ends every episode after one turn, so nobody would "
                "read what the user answers. Allow more: max_steps=8, say (of a recipe "
                "task.max_turns=8)."
            )
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
                opening = openings.setdefault(episode.group_id, _Opening(said))
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
            text, is_end = self._read(outcome.value)
            if is_end:
                raise ValueError(f"it ended before it began: {outcome.value!r:.80}")
        except Exception as error:
            raise EpisodeStartError("SimulatedUser") from error
        said: Message = {"role": "assistant", "content": outcome.value}
        self._remember(episode, [*opening.question, said])
        episode.query = text

    async def after_turn(self, episode: Episode) -> None:
        """Let the user answer what was said to it.

        Raises:
            Exception: it did not: the episode is lost.
        """
        if episode.is_over or not episode.awaits_answer:
            return
        (turn,) = as_opened([episode.last_message], self.opened_text)
        heard = text_of_message(split_reasoning(turn)).strip() or _SILENCE
        question = [*episode.memory[self.key], {"role": "user", "content": heard}]
        call = partial(self._questions.ask, question)
        (outcome,) = await self.call(call, timeout_s=self.timeout_s)
        if outcome.error is not None:
            raise as_exception(outcome.error)
        text, is_end = self._read(outcome.value)
        self._remember(episode, [*question, {"role": "assistant", "content": outcome.value}])
        if is_end:
            episode.terminate("user")
        else:
            episode.say({"role": "user", "content": text})

    def _told(self, row: Mapping[str, Any]) -> Message:
        """Return the system prompt of a user's conversation."""
        if callable(self.instructions):
            text = self.instructions(row)
            if not isinstance(text, str):
                raise TypeError(
                    f"SimulatedUser: instructions(row) must return a text, got {text!r:.80}."
                )
        else:
            text = self.instructions.format_map({**row, "end": self.end})
        return {"role": "system", "content": text}

    def _read(self, said: str) -> tuple[str, bool]:
        """What the user says aloud, and whether it has done.

        Raises:
            ValueError: it says nothing.
        """
        text = said.rpartition("</think>")[2].strip()
        if self.end in text:
            return "", True
        if not text:
            raise ValueError(f"the simulated user says nothing: {said!r:.80}")
        return text, False

    def _remember(self, episode: Episode, question: Sequence[Message]) -> None:
        episode.memory = {**episode.memory, self.key: tuple(question)}


class _Opening:
    """The first words of a user, asked for once and said in every rollout of a draw."""

    def __init__(self, question: Sequence[Message]) -> None:
        self.question = question
        self._said: Future[str] = Future()

    async def first_words(self, questions: GatheredQuestions) -> str:
        """Ask, or wait for what somebody else has asked."""
        if not self._said.running() and not self._said.done():
            self._said.set_running_or_notify_cancel()
            try:
                self._said.set_result(await questions.ask(self.question))
            except BaseException as error:
                self._said.set_exception(as_exception(error))
                raise
        return await asyncio.shield(asyncio.wrap_future(self._said))


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
