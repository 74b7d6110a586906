"""The actions of an OpenEnv environment as tools, one session per episode."""

import functools
import json
import re
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, get_args
from urllib.parse import unquote, urlsplit, urlunsplit

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
from torchrl_envs.tool_schemas import Tool, function_tool, schema_tool

from .session import (
    MAX_ATTEMPTS,
    EnvResult,
    OpenEnvConnectionError,
    OpenEnvProtocolError,
    OpenEnvSession,
    shown_url,
)

# How a tool call becomes an action of an OpenEnv server, and what it answers becomes text.

_HTTP: Final = {"ws": "http", "wss": "https"}
_HIDDEN: Final = frozenset({"metadata"})
"""Fields that every action of OpenEnv has, and no model fills in."""


class Action(NamedTuple):
    """A tool that stands for an action."""

    tool: Tool
    make: Callable[[ToolCall], Mapping[str, Any]]
    """The action of a call whose arguments fit the tool's schema."""


def actions_of_functions(functions: Sequence[Callable[..., Mapping[str, Any]]]) -> list[Action]:
    """Functions that take a tool's arguments and return an action."""
    # functions: with type hints and a Google docstring, which the model is shown; each returns the
    # action's fields.

    def make(function: Callable[..., Any], call: ToolCall) -> Mapping[str, Any]:
        action = function(**call.arguments)
        if hasattr(action, "model_dump"):
            action = action.model_dump()
        if not isinstance(action, Mapping):
            made = f"the fields of an action, got {type(action).__name__}"
            raise TypeError(f"{function.__name__} must return {made}")
        return action

    return [Action(function_tool(f), functools.partial(make, f)) for f in functions]


async def actions_of_server(session: OpenEnvSession) -> list[Action]:
    """What a server says that it can do: its MCP tools, or one tool for its one kind of action."""
    try:
        listed = await session.list_tools()
    finally:
        await session.close()
    actions = []
    for tool in listed:
        name = str(tool["name"])
        parameters = dict(tool.get("inputSchema") or tool.get("input_schema") or {})
        offered = _tool(name, str(tool.get("description") or name), parameters)
        actions.append(
            Action(
                offered,
                lambda c: {"type": "call_tool", "tool_name": c.name, "arguments": c.arguments},
            )
        )
    if actions:
        return actions
    schema = fetch_schema(session.url, session.connect_timeout_s)["action"]
    title = str(schema.get("title") or "Act")
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", title.removesuffix("Action") or "Act").lower()
    name = re.sub(r"[^a-z0-9_]+", "_", name)
    shown = schema.get("properties", {}).items()
    properties = {field: value for field, value in shown if field not in _HIDDEN}
    others = {k: v for k, v in schema.items() if k not in ("title", "description", "properties")}
    description = str(schema.get("description") or title).partition("\n\n")[0]
    offered = _tool(name, description, {**others, "properties": properties})
    return [Action(offered, lambda call: call.arguments)]


def _tool(name: str, description: str, parameters: dict[str, Any]) -> Tool:
    function = {"name": name, "description": description.strip(), "parameters": parameters}
    return schema_tool({"type": "function", "function": function})


def fetch_schema(session_url: str, timeout_s: float) -> dict[str, Any]:
    """The JSON schemas that a server publishes: ``action``, ``observation`` and ``state``."""
    parts = urlsplit(session_url)
    path = f"{parts.path.removesuffix('/ws')}/schema"
    login, _, host = parts.netloc.rpartition("@")
    url = urlunsplit((_HTTP[parts.scheme], host, path, parts.query, ""))
    asked = urllib.request.Request(url)
    if login:
        asked.add_header("Authorization", f"Basic {b64encode(unquote(login).encode()).decode()}")
    url = shown_url(url)  # in errors
    try:
        with urllib.request.urlopen(asked, timeout=timeout_s) as response:
            schemas = json.loads(response.read())
    except OSError as error:
        raise OpenEnvConnectionError(f"{url}: {error}") from error
    except ValueError as error:
        raise OpenEnvProtocolError(f"{url}: not JSON: {error}") from error
    if not isinstance(schemas, dict) or not isinstance(schemas.get("action"), dict):
        raise OpenEnvProtocolError(f"{url}: no schema of an action: {schemas!r:.200}")
    return schemas


def observation_text(result: EnvResult) -> str:
    """What the model reads of an observation, where nothing else is asked for."""
    # Gives the value of a tool of MCP; the text of an observation with one text field; else all of
    # its fields but for empty ones, as JSON.
    told = ((key, value) for key, value in result.observation.items() if key not in _HIDDEN)
    fields = {key: value for key, value in told if value not in (None, "", [], {})}
    shown: Any = next(iter(fields.values())) if len(fields) == 1 else fields
    if "tool_name" in fields:
        if error := fields.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            raise ValueError(f"{fields['tool_name']}: {message}")
        shown = fields.get("result")
        if isinstance(shown, dict) and "data" in shown:
            shown = shown["data"]
    elif not isinstance(shown, str):
        shown = fields or ""
    return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


# An OpenEnv server as the environment of every rollout: its actions are tools.
#
# Shape legend: B rows.

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
        """Whether the episodes that start from a row have a session here."""
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
    """One episode's session, and what it has given so far."""

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
