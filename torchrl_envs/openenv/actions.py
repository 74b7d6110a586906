"""How a tool call becomes an action of an OpenEnv server, and what it answers becomes text."""

import json
import re
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from torchrl_data.tool_calls.parse import ToolCall
from torchrl_envs.tool_calls.schemas import Tool, function_tool, schema_tool

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

    def made_by(function: Callable[..., Any]) -> Callable[[ToolCall], Mapping[str, Any]]:
        def make(call: ToolCall) -> Mapping[str, Any]:
            action = function(**call.arguments)
            if hasattr(action, "model_dump"):
                action = action.model_dump()
            if not isinstance(action, Mapping):
                raise TypeError(
                    f"{function.__name__} must return the fields of an action, got "
                    f"{type(action).__name__}"
                )
            return action

        return make

    return [Action(function_tool(function), made_by(function)) for function in functions]


async def actions_of_server(session: OpenEnvSession) -> list[Action]:
    """What a server says that it can do: its MCP tools, or one tool for its one kind of action."""
    try:
        listed = await session.list_tools()
    finally:
        await session.close()
    if listed:
        return [_mcp_action(tool) for tool in listed]
    return [_schema_action(fetch_schema(session.url, session.connect_timeout_s)["action"])]


def _mcp_action(listed: Mapping[str, Any]) -> Action:
    name = str(listed["name"])
    parameters = dict(listed.get("inputSchema") or listed.get("input_schema") or {})
    description = str(listed.get("description") or name)
    return Action(
        _tool(name, description, parameters),
        lambda call: {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments},
    )


def _schema_action(schema: Mapping[str, Any]) -> Action:
    title = str(schema.get("title") or "Act")
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", title.removesuffix("Action") or "Act").lower()
    name = re.sub(r"[^a-z0-9_]+", "_", name)
    properties = {
        field: value
        for field, value in schema.get("properties", {}).items()
        if field not in _HIDDEN
    }
    parameters = {
        key: value
        for key, value in schema.items()
        if key not in ("title", "description", "properties")
    }
    parameters["properties"] = properties
    description = str(schema.get("description") or title).partition("\n\n")[0]
    return Action(_tool(name, description, parameters), lambda call: call.arguments)


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
    fields = {
        key: value
        for key, value in result.observation.items()
        if key not in _HIDDEN and value not in (None, "", [], {})
    }
    if "tool_name" in fields:
        return _mcp_text(fields)
    texts = [value for value in fields.values() if isinstance(value, str)]
    if len(texts) == 1 and len(fields) == 1:
        return texts[0]
    return json.dumps(fields, ensure_ascii=False) if fields else ""


def _mcp_text(fields: Mapping[str, Any]) -> str:
    error = fields.get("error")
    if error:
        message = error.get("message") if isinstance(error, dict) else error
        raise ValueError(f"{fields['tool_name']}: {message}")
    value = fields.get("result")
    if isinstance(value, dict) and "data" in value:
        value = value["data"]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
