"""OpenEnv server as the environment of every rollout: its actions are tools.

Shape legend: B rows.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from torchrl_data.checks import one_of
from torchrl_data.stop_reason import StopReason
from torchrl_data.tool_calls.records import ToolCall
from torchrl_envs.concurrency.calls import ConcurrentCalls
from torchrl_envs.concurrency.outcome import Outcome
from torchrl_envs.entries.observations import with_observation
from torchrl_envs.entries.rewards import RewardOf, RewardSource, reward_of_steps
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeStartError
from torchrl_envs.episode.tool_source import Answer, Job, ToolSource
from torchrl_envs.tool_schemas import Tool

from .actions import Action, actions_of_functions, actions_of_server, observation_text
from .messages import EnvResult
from .session import MAX_ATTEMPTS, OpenEnvSession

_MARGIN_S: Final = 5.0
"""How much longer than the session's own deadline the call of a tool may take."""


class OpenEnvTools(ToolSource, RewardSource):
    """Gives every rollout a session of an OpenEnv server; the sessions step at the same time.

    ``reset`` gets the group's seed and the columns that are named; what the server says is added to
    the query. A tool call is a step, and the observation its answer. An episode ends when an
    observation says that it is done; one that never acts gets the reward of the reset, 0 where that
    has none. Where the server does not answer in time or is lost, that row alone is truncated and
    can't be scored; nothing is ever sent to a session that was not reset.

    Args:
        base_url: of the server, which must allow as many sessions as there are rows.
        actions: functions that return the action of a tool call, with type hints and a docstring;
            when not given, the server is asked what it can do: each of its MCP tools is a tool, or
            its one kind of action is.
        reset_columns: columns of the data that ``reset`` gets.
        text_of: what the model reads of a reset or a step; ``None`` says nothing.
        reward: ``"sum"`` of the steps' rewards, or the ``"last"`` one that the server gave.
        name: of the reward.
        where: columns and their values: rows with other values have no session here.
        timeout_s: deadline of one answer, in seconds.
        connect_timeout_s: deadline of one attempt to connect.
        capacity_timeout_s: how long to wait for a server whose sessions are all taken.
        headers: HTTP headers of the connections.
        **kwargs: see :class:`~torchrl_envs.episode.tool_source.ToolSource`.

    Raises:
        ValueError: the URL or a setting is wrong, or a function can't be offered to a model.
        OpenEnvError: the server could not be asked for its actions.
    """

    keeps_prompt = True

    def __init__(
        self,
        base_url: str,
        *,
        actions: Sequence[Callable[..., Mapping[str, Any]]] | None = None,
        reset_columns: Sequence[str] = (),
        text_of: Callable[[EnvResult], str | None] = observation_text,
        reward: RewardOf = "sum",
        name: str = "OpenEnv",
        where: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        connect_timeout_s: float = 10.0,
        capacity_timeout_s: float = 60.0,
        headers: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(timeout_s=timeout_s, **kwargs)
        self.reward: RewardOf = one_of("reward", reward, get_args(RewardOf), who="OpenEnvTools")
        self._session = functools.partial(
            OpenEnvSession,
            base_url,
            connect_timeout_s=connect_timeout_s,
            message_timeout_s=timeout_s,
            capacity_timeout_s=capacity_timeout_s,
            headers=headers,
        )
        attempts = MAX_ATTEMPTS * (connect_timeout_s + timeout_s)
        self._reset_timeout_s = capacity_timeout_s + attempts + _MARGIN_S
        self.base_url = base_url
        self.reset_columns = tuple(reset_columns)
        self.text_of = text_of
        self.name = name
        self.where = dict(where or {})
        self.required_columns = (*self.where, *self.reset_columns)
        session = self._session()  # refuses what is wrong with the settings
        if actions is not None:
            found = actions_of_functions(actions)
        else:
            # On a loop of its own: there may be one in this thread already.
            calls = ConcurrentCalls(timeout_s=attempts)
            try:
                outcome = calls.run([[functools.partial(actions_of_server, session)]])[0][0]
            finally:
                calls.close()
            if outcome.error is not None:
                raise outcome.error
            found = outcome.value
        self.actions: dict[str, Action] = {action.tool.name: action for action in found}
        self._tools = {tool: action.tool for tool, action in self.actions.items()}

    @property
    def reward_names(self) -> list[str]:
        """The server's reward."""
        return [self.name]

    def _is_here(self, row: Mapping[str, Any]) -> bool:
        return all(row.get(name) == value for name, value in self.where.items())

    def takes_part_in_row(self, row: Mapping[str, Any]) -> bool:
        """Return whether the episodes that start from a row have a session here."""
        return super().takes_part_in_row(row) and self._is_here(row)

    async def begin(self, episode: Episode) -> None:
        """Open and reset a session; add what the server says to the query.

        Raises:
            EpisodeStartError: the server did not answer, or refused.
        """
        columns = episode.example or {}
        if not self._is_here(columns):
            return
        own = _Session(self._session(), self.text_of)
        episode.resources.add(self, own, close=own.session.close, timeout_s=_MARGIN_S)
        arguments = {"seed": episode.seed, **{name: columns[name] for name in self.reset_columns}}
        reset = functools.partial(own.reset, arguments)
        (outcome,) = await self.call(reset, timeout_s=self._reset_timeout_s)
        if outcome.error is not None:
            raise EpisodeStartError(f"{self.name}: reset") from outcome.error
        query = [] if episode.query is None else episode.query
        episode.query = with_observation(query, outcome.value)

    def tool_names(self) -> dict[str, str]:
        """Every action, and the server that has it."""
        return dict.fromkeys(self._tools, f"the OpenEnv server {self.base_url}")

    def tools_of(self, episode: Episode) -> Mapping[str, Tool]:
        """The actions, in an episode with a session."""
        return self._tools if self in episode.resources else {}

    def bind(self, episode: Episode, call: ToolCall) -> Job:
        """A call of a tool is a step of the episode's session."""
        own: _Session = episode.resources.get(self)
        step = functools.partial(own.step, self.actions[call.name], call)
        job = self.job(call, step, lane=episode.id)

        def phrase(outcome: Outcome) -> Answer:
            answer = job.phrase(outcome)
            over = StopReason.ENVIRONMENT_DONE if own.is_done else ""
            return answer._replace(stop_reason=answer.stop_reason or over)

        return job._replace(phrase=phrase, timeout_s=self.timeout_s + _MARGIN_S)

    def finish(self, episode: Episode) -> None:
        """Add up what the server gave."""
        own: _Session | None = episode.resources.get(self)
        rewards = [] if own is None else own.rewards[1:] or own.rewards
        total = reward_of_steps(rewards, self.reward)
        episode.score.add_outcome(self.name, Outcome(total), who=self.name)


@dataclass
class _Session:
    """An episode's session, and what it has given so far."""

    session: OpenEnvSession
    text_of: Callable[[EnvResult], str | None]
    is_done: bool = False
    rewards: list[float | None] = field(default_factory=lambda: [0.0])
    """What the reset gave (0 where it gave none), and each step."""

    async def reset(self, arguments: Mapping[str, Any]) -> str | None:
        result = await self.session.reset(**arguments)
        self.rewards = [result.reward or 0.0]
        return self.text_of(result)

    async def step(self, action: Action, call: ToolCall) -> str:
        if self.is_done:
            raise ValueError("the episode is over")
        result = await self.session.step(action.make(call))
        self.is_done = result.done
        self.rewards.append(result.reward)
        return self.text_of(result) or ""
