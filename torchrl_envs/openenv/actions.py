"""Actions of an OpenEnv server: made of tool calls, and their observations as text."""

import functools
import json
import re
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from torchrl_data.tool_calls.records import ToolCall
from torchrl_envs.tool_schemas import Tool, function_tool, schema_tool

from .errors import OpenEnvConnectionError, OpenEnvProtocolError
from .messages import EnvResult
from .session import OpenEnvSession, shown_url

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
    """Actions of a server: its MCP tools, or one tool for its one kind of action."""
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
    """Return what the model reads of an observation, where nothing else is asked for."""
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
