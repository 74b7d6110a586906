"""An agent that owns its loop is trained as it is: its requests are the episode's turns."""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from torchrl_data.checks import check_counts, check_numbers
from torchrl_data.stop_reason import StopReason
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_envs.agents import programs, turns
from torchrl_envs.concurrency.calls import CallTimeoutError
from torchrl_envs.concurrency.outcome import Outcome
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.entries.rewards import RewardSource
from torchrl_envs.episode.episode import Episode, ToolCallRecord
from torchrl_envs.episode.episode_transform import EpisodeEnvironment, EpisodeStartError
from torchrl_envs.episode.lost_episodes import tell_lost
from torchrl_envs.episode.tool_source import ToolSource
from torchrl_envs.tool_results import environment_error
from torchrl_envs.transforms.fold_context import FoldContext
from torchrl_envs.transforms.thinking_prompt import AddThinkingPrompt
from torchrl_envs.transforms.token_budget import TokenBudget

from .agent_command import AgentCommand, AgentEndpoint
from .branches import Branches
from .program_prompt import as_prompt
from .programs import Program
from .server import AgentServer
from .session import AgentSession, ProgramEnd

_SPEAKERS: Final = (ToolSource, FoldContext, AddThinkingPrompt)
"""What else writes into a conversation."""


class AgentProgram(ToolSource, RewardSource):
    """Runs a program for every episode, and trains what it asks the policy for.

    The program is an agent as somebody wrote it: it calls a model over HTTP, with its own prompts,
    tools and loop. Here the model is the policy, behind OpenAI's protocols (chat completions,
    responses) and Anthropic's (messages). A server answers each request with a turn of the episode
    whose key it has, so the tokens that are trained are those that were sampled: of a request that
    goes on with an earlier one only the new messages are encoded. One that does not (another
    system prompt, a history that was summarised, a second agent of the program) begins a row of
    its own, with the episode's group and reward; the program can come back to the earlier one. Each
    row knows the row that it left, how it began (``row_kind``: parallel, sub_agent or compaction)
    and its author (``agent``): the header ``x-agent-name``, or else the first line of the system
    prompt. Requests that come at the same time are answered one after the other.

    The program gets ``AgentEndpoint(base_url, api_key, model)``, and by name the columns of the
    data and the group's ``seed``. What it returns is the reward: a number, or ``None`` where other
    parts score; with ``agents`` a number for each of them, ``{"white": 1, "black": 0}``. The
    episode ends when the program does.

    What can't take effect is refused, and the program told so: a ``temperature`` that is not the
    policy's, stop strings, log-probs, several choices, images.

    Args:
        program: a function, sync or ``async``, or an :class:`AgentCommand`. Each episode's has a
            thread to itself.
        name: of the reward.
        agents: names of agents that are rewarded by themselves, players against each other, say.
            The program returns a mapping with a number for each that took a turn (``None``: it has
            no reward, and advantage 0), or one number for all of them. The episode's reward is
            their mean; ``MCAdvantage(credit="agent")`` takes each agent's own.
        error_reward: what an episode is given whose program raised; ``None`` leaves it out of
            training.
        cut_reward: the same where a limit cut the episode (turns, tokens) and the program came to
            nothing without further answers.
        ignored_parameters: of requests, such as ``["temperature"]``: these may say anything, and
            the policy's own count.
        model: the name that the policy goes by.
        host: where the server listens; another one than this machine's own lets programs on other
            machines in.
        port: of the server; any that is free when 0.
        timeout_s: longest time between an answer and the program's next request, or its end.
        end_timeout_s: how long a program whose episode was cut may take to end.
        max_request_bytes: a longer request is refused with status 413, before it is kept.

    Raises:
        TypeError: the program can't be called, or not with an endpoint.
        ValueError: a number is out of range.

    Examples:
        >>> async def agent(endpoint, *, question, answer):
        ...     client = openai.AsyncOpenAI(
        ...         base_url=endpoint.base_url, api_key=endpoint.api_key
        ...     )
        ...     chat = [{"role": "user", "content": question}]
        ...     said = await client.chat.completions.create(model=endpoint.model, messages=chat)
        ...     return float(answer in said.choices[0].message.content)
        >>> part = AgentProgram(agent)
        >>> part.reward_names
        ['agent']
    """

    answers_cut_turns = True
    """The program is told that a turn was cut, and decides what comes of it."""
    names_agents = True
    can_branch = False
    """Nobody can take a program to the middle of what it does."""

    def __init__(
        self,
        program: Program,
        *,
        name: str = "agent",
        agents: Sequence[str] = (),
        error_reward: float | None = None,
        cut_reward: float | None = 0.0,
        ignored_parameters: Sequence[str] = (),
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = 300.0,
        end_timeout_s: float = 10.0,
        max_request_bytes: int = 4 << 20,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        if not callable(program):
            raise TypeError(f"AgentProgram takes a function or AgentCommand, got {program!r:.80}.")
        programs.first_argument(program)
        if isinstance(ignored_parameters, str):
            raise TypeError("AgentProgram: ignored_parameters is a list of names, not one string.")
        check_numbers("AgentProgram", "(0, inf)", end_timeout_s=end_timeout_s)
        check_counts("AgentProgram", max_request_bytes=max_request_bytes)
        given = {"error_reward": error_reward, "cut_reward": cut_reward}
        rewards = {name: value for name, value in given.items() if value is not None}
        check_numbers("AgentProgram", "(-inf, inf)", **rewards)
        self.program = program
        self.name = name
        self.agents = _checked_agents(agents)
        self.weights = [1 / len(self.agents) for _ in self.agents]
        self.error_reward = error_reward
        self.cut_reward = cut_reward
        self.ignored_parameters = tuple(ignored_parameters)
        self.model = model
        self.host, self.port = host, port
        self.end_timeout_s = end_timeout_s
        self.max_request_bytes = max_request_bytes
        self._accepted: dict[str, Any] = {}
        self._encoder: ConversationEncoder | None = None
        """The policy's, once that has been seen."""
        self._bound = self._max_tokens = turns.MOST_TOKENS
        """Most tokens of a prompt: what the environment says, and with it the policy's model."""
        self._server: AgentServer | None = None

    @property
    def reward_names(self) -> list[str]:
        """The program's reward, or those of its agents."""
        return [*self.agents] or [self.name]

    @property
    def server(self) -> AgentServer:
        """Answers the programs; started when it is first needed.

        Raises:
            ImportError: ``starlette`` or ``uvicorn`` is missing.
            OSError: it can't listen there.
        """
        if self._server is None:
            self._server = AgentServer(
                host=self.host,
                port=self.port,
                model=self.model,
                accepted=turns.Accepted(self._accepted, self.ignored_parameters),
                max_request_bytes=self.max_request_bytes,
            )
            weakref.finalize(self, self._server.stop).atexit = False
        return self._server

    def __getstate__(self) -> dict[str, Any]:
        """A copy has a server of its own, and sees its own policy."""
        own = {"_server": None, "_encoder": None, "_max_tokens": self._bound}
        return {**super().__getstate__(), **own}

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.close()
            self._server = None

    # What goes with it --------------------------------------------------------------------------

    def check(self, env: EpisodeEnvironment) -> None:
        """Nothing else speaks in a conversation that is the program's, and the server can start.

        Raises:
            ValueError: the environment has a system prompt, tools or another part that speaks, or
                the data lack a column that the program asks for; or a proxy would be asked.
        """
        if env.base_env.system_prompt is not None:
            raise ValueError(
                "AgentProgram: prompts are the program's, and the environment has a system_prompt."
            )
        others = [part for kind in _SPEAKERS for part in env.transforms_of(kind)]
        speaking = [type(p).__name__ for p in others if p is not self and p.only_for is None]
        if speaking:
            raise ValueError(
                "AgentProgram: all that is said is the program's, which runs its tools itself; the "
                f"environment has {speaking} for its episodes, too."
            )
        bounds = [(b.max_model_len, b.min_turn_tokens) for b in env.transforms_of(TokenBudget)]
        prompts = [most - least for most, least in bounds if most is not None]
        self._bound = min(prompts, default=turns.MOST_TOKENS)
        self._max_tokens = min(self._max_tokens, self._bound)
        for loader in env.transforms_of(DataLoadingPrimer):
            needed = programs.required_columns(self.program)
            first = programs.first_argument(self.program) or "the first"
            do = f" The endpoint is its first parameter, here {first!r}; the others are columns."
            who = "AgentProgram: the program"
            loader.require_columns(who, needed, do, of=self.takes_part_in_row)
        host = str(urlsplit(self.server.url).hostname)
        in_process = not isinstance(self.program, AgentCommand)
        if in_process and "http" in getproxies() and not proxy_bypass(host):
            raise ValueError(
                f"AgentProgram: HTTP_PROXY is set, and clients would ask the proxy for {host}. Set "
                f"NO_PROXY={host}."
            )

    def check_policy(self, policy: Any) -> None:
        """Requests may ask for what the policy does anyway, and prompts are its own."""
        self._accepted.clear()
        sampling = getattr(policy, "sampling", None)
        if sampling is not None:
            texts = list(sampling.stop)
            self._accepted |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
            self._accepted |= {"stop": texts, "stop_sequences": texts}
        self._encoder = getattr(policy, "encoder", None)
        limit = getattr(getattr(policy, "engine", None), "max_model_len", None)
        self._max_tokens = self._bound if limit is None else min(self._bound, limit - 1)

    # Events -------------------------------------------------------------------------------------

    def drawn(self, episodes: Sequence[Episode]) -> None:
        """Note that the agents have rewards of their own, where they have."""
        for episode in episodes if self.agents else ():
            episode.agent_rewards = {}

    async def begin(self, episode: Episode) -> None:
        """Start the program; its first request opens the conversation.

        Raises:
            EpisodeStartError: it ended, or let its time pass, before it asked for anything.
        """
        if isinstance(self.program, AgentCommand):
            episode.note("isolation", self.program.isolation)
        server = self.server
        session = server.open()
        endpoint = AgentEndpoint(f"{server.url}/v1", session.key, self.model)
        columns = {"seed": episode.seed, **(episode.example or {})}
        encode = partial(as_prompt, encoder=self._encoder, max_tokens=self._max_tokens)
        agent = _Agent(session, Branches(encode))
        episode.resources.add(self, agent, closing=partial(agent.close, server), name=self.name)
        agent.running = programs.RunningProgram(self.program, endpoint, columns, session)
        outcome = await self._next(agent, partial(agent.branches.begin, episode))
        event = outcome.value
        if isinstance(event, turns.TurnRequest):
            episode.query, episode.tools = event.messages, event.tools
            return
        error = outcome.error if event is None else event.error
        cause = error or RuntimeError("it ended before it asked the policy for anything")
        raise EpisodeStartError(self.name) from cause

    def before_turn(self, episode: Episode) -> None:
        """Bound the turn as the program asks."""
        agent: _Agent | None = episode.resources.get(self)
        if agent is not None and agent.asked is not None and agent.asked.max_new_tokens:
            episode.limit_turn(agent.asked.max_new_tokens)

    async def after_turn(self, episode: Episode) -> None:
        """Answer the program, and wait for what it asks next, or for its end."""
        agent: _Agent | None = episode.resources.get(self)
        if agent is None or agent.asked is None or not episode.awaits_answer:
            return
        try:
            self._answer(episode, agent, agent.asked)
            if episode.is_over:
                return
            outcome = await self._next(agent, partial(agent.branches.go_on, episode))
            if isinstance(outcome.value, ProgramEnd):
                agent.end = outcome.value
            elif isinstance(outcome.value, turns.TurnRequest):
                records = list(episode.tool_calls)
                for index in {agent.calls[c] for c in outcome.value.failed if c in agent.calls}:
                    records[index] = records[index]._replace(is_error=True)
                episode.tool_calls = tuple(records)
                episode.num_tool_errors = sum(record.is_error for record in records)
            error = outcome.error if agent.end is None else agent.end.error
            if error is not None and (agent.end is None or self.error_reward is None):
                self._fail(episode, error)
            elif agent.end is not None:
                episode.terminate(StopReason.ENVIRONMENT_DONE)
        except Exception as error:  # which is of this episode: the others of a batch go on
            tell_lost("An episode", f"{self.name} failed", error)
            self._fail(episode, error)

    def over(self, episode: Episode) -> None:
        """Answer the program no more; one whose episode is lost is stopped, too."""
        agent: _Agent | None = episode.resources.get(self)
        if agent is not None and agent.end is None:
            agent.session.refuse(episode.stop_reason)
            if agent.running is not None and not episode.is_scorable:
                agent.running.stop()

    async def finish(self, episode: Episode) -> None:
        """The reward is what the program returned; one that still runs is told that it is over."""
        agent: _Agent | None = episode.resources.get(self)
        if agent is None:
            return
        end = agent.end
        if end is None:
            (outcome,) = await self.call(agent.session.next_event, timeout_s=self.end_timeout_s)
            is_end = isinstance(outcome.value, ProgramEnd)
            end = outcome.value if is_end else ProgramEnd(None, outcome.error)
        value = end.value
        if end.error is not None:
            value = self.error_reward if agent.end else self.cut_reward
        if self.agents:
            self._reward_agents(episode, value)
        else:
            episode.score.add_outcome(self.name, Outcome(value), who=self.name)

    # How ----------------------------------------------------------------------------------------

    def _reward_agents(self, episode: Episode, value: Any) -> None:
        """Give each agent that took a turn its reward, and the episode their mean."""
        spoke = [
            origin.agent
            for origin, row in zip(episode.origins, episode.rows, strict=True)
            if row.was_sampled(0)
        ]
        given = value if isinstance(value, Mapping) else dict.fromkeys(self.agents, value)
        wrong = [name for name in [*given, *spoke] if name not in self.agents]
        lacking = [name for name in dict.fromkeys(spoke) if name not in given]
        if wrong or lacking:
            found = (
                f"took turns as {wrong or lacking}"
                if set(wrong or lacking) & {*spoke}
                else (f"gave rewards to {wrong}")
            )
            error = ValueError(
                f"the program {found}, and agents={list(self.agents)} are rewarded: {value!r:.80}. "
                "Name the author of each request (the header x-agent-name), and give each agent "
                "that takes a turn a number, or None."
            )
            episode.score.add_outcome(self.name, Outcome(error=error), who=self.name)
            return
        applying = [name for name in self.agents if given.get(name) is not None]
        for name in applying:
            outcome = Outcome(given[name])
            episode.score.add_outcome(name, outcome, weight=1 / len(applying), who=self.name)
        by_source = episode.score.by_source
        episode.agent_rewards = {name: by_source[name] for name in applying if name in by_source}

    async def _next(self, agent: "_Agent", take: Callable[[turns.TurnRequest], None]) -> Outcome:
        """The next request that can be taken, or the program's end, as an outcome's value."""
        deadline = time.monotonic() + self.timeout_s  # however many are refused
        while (left := deadline - time.monotonic()) > 0:
            (outcome,) = await self.call(agent.session.next_event, timeout_s=left)
            if isinstance(outcome.value, turns.TurnRequest):
                try:
                    take(outcome.value)
                except turns.RequestError as error:
                    agent.session.answer(error)
                    continue
                agent.asked = outcome.value
            return outcome
        error = CallTimeoutError(f"no request that can be answered within {self.timeout_s:g} s")
        return Outcome(error=error)

    def _answer(self, episode: Episode, agent: "_Agent", asked: turns.TurnRequest) -> None:
        base: Any = self._environment().base_env
        conversation = episode.conversation
        num_tokens = conversation.num_tokens(0)
        start = conversation.position(0).response_start
        reply = turns.reply_to(
            asked,
            str(episode.last_message["content"]),
            finish_reason=turns.LENGTH if episode.is_turn_cut else "stop",
            parse=base.parse_turn,
            num_prompt_tokens=start,
            num_tokens=num_tokens - start,
            used_ids=agent.calls,
        )
        for call in reply.message.get("tool_calls") or ():
            agent.calls[call["id"]] = len(episode.tool_calls)
            record = ToolCallRecord(call["function"]["name"], episode.num_turns, None, False)
            episode.tool_calls = (*episode.tool_calls, record)
            episode.num_tool_calls += 1
        agent.branches.add_reply(reply.message)
        agent.asked = None
        agent.session.answer(reply)

    def _fail(self, episode: Episode, error: BaseException) -> None:
        episode.truncate(environment_error(error, self.name))


def _checked_agents(agents: Sequence[str]) -> tuple[str, ...]:
    """Names of agents.

    Raises:
        TypeError: they are no list of texts.
        ValueError: one repeats, or can't be the name of a reward.
    """
    if isinstance(agents, str) or not all(isinstance(name, str) for name in agents):
        raise TypeError(f"AgentProgram: agents is a list of names, got {agents!r:.80}.")
    bad = [name for name in agents if not name or agents.count(name) > 1 or len(name) > 60]
    if bad or len(agents) == 1:
        raise ValueError(
            "AgentProgram: agents are two or more different names of at most 60 characters, got "
            f"{list(agents)}."
        )
    return tuple(agents)


@dataclass
class _Agent:
    """The program of one episode, and what it has asked for."""

    session: AgentSession
    branches: Branches
    running: programs.RunningProgram | None = None
    asked: turns.TurnRequest | None = None
    """What the next turn answers."""
    end: ProgramEnd | None = None
    calls: dict[str, int] = field(default_factory=dict)
    """Where the record of a call stands in the episode's, by its id."""

    def close(self, server: AgentServer, reason: str) -> None:
        """Give it back: whatever still waits is refused, and the program stopped."""
        self.session.refuse(reason or "it was given up")
        server.forget(self.session)
        if self.running is not None:
            self.running.stop()
