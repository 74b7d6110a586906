"""Tools of MCP servers.

Shape legend: B rows.
"""

import asyncio
import functools
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, Literal, TypeVar

from jsonschema import SchemaError

from torchrl_data.checks import check_counts
from torchrl_data.tool_calls.records import ToolCall
from torchrl_envs.concurrency.event_loop import ReplaceableLoop
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeStartError
from torchrl_envs.episode.tool_source import Job, ToolSource
from torchrl_envs.tool_results import MAX_RESULT_BYTES
from torchrl_envs.tool_schemas import Tool, offered_name, schema_tool

from .mcp_connection import MAX_TOOLS, MCPConnection

T = TypeVar("T")

_GRACE_S = 60.0
"""Most time that opening or closing all sessions may take past its own deadlines."""


class MCPToolTransform(ToolSource):
    """Offers the tools of MCP servers.

    The servers are asked for their tools here, so that what is wrong shows before training. Calls
    run at the same time, each with its deadline. A server that died is started again at the next
    call, at most twice in a row and then every 10 s, and so is one that lets a call pass its
    deadline and then does not list its tools; the call that failed is answered with an error and is
    not repeated. A tool that the server has changed since is answered with an error too.

    A server lists at most ``max_tools`` tools, in at most 100 pages, with definitions of at most 16
    MiB, within 0.9 of the deadline.

    Args:
        servers: by name; each a dictionary ``{"command", "args", "env", "cwd"}`` (a process, over
            stdio) or ``{"url", "headers"}`` (streamable HTTP), a URL, or an ``mcp`` server object
            (in memory). A child process gets few environment variables beside ``env``.
        session: ``"shared"``: one session per server for all rows. ``"row"``: one for each row,
            from the beginning of its episode to its end, for servers that keep a state.
        allow: the tools to offer, as the model calls them; all when not given.
        prefix_names: call a tool ``server_tool``, for servers whose tools have the same names.
        images: the policy sees the images that tools return: it is a vision-language model. For
            any other policy a note (``[image: image/png]``) stands in the place of each.
        timeout_s: deadline of one call, in seconds, and of opening a session.
        max_tools: most tools of one server, offered or not.
        max_result_bytes: longer results are cut, with a mark; bytes of UTF-8.
        show_schemas: whether the chat template shows the tools to the model.

    Raises:
        ValueError: there is no server, ``max_tools`` is not positive, two tools have the same name,
            ``allow`` names a tool that does not exist, or a tool has a name or a schema that can't
            be used.
        MCPServerError: a server can't be reached, does not answer, or lists too much.

    Example:
        >>> from mcp.server import MCPServer
        >>> server = MCPServer("calculator")
        >>> @server.tool()
        ... def add(a: int, b: int) -> int:
        ...     '''Add two numbers.'''
        ...     return a + b
        >>> tools = MCPToolTransform({"calculator": server})  # or {"url": ...}, {"command": ...}
        >>> tools.tool_names()
        {'add': "the MCP server 'calculator'"}
        >>> tools.close()
    """

    def __init__(
        self,
        servers: Mapping[str, Any],
        *,
        session: Literal["shared", "row"] = "shared",
        allow: Collection[str] | None = None,
        prefix_names: bool = False,
        images: bool = False,
        timeout_s: float = 30.0,
        max_tools: int = MAX_TOOLS,
        max_result_bytes: int = MAX_RESULT_BYTES,
        show_schemas: bool = True,
    ) -> None:
        check_counts("MCPToolTransform", max_tools=max_tools)
        options: Any = {"timeout_s": timeout_s, "max_tools": max_tools, "images": images}
        super().__init__(
            timeout_s=timeout_s, max_result_bytes=max_result_bytes, show_schemas=show_schemas
        )
        if not servers or session not in ("shared", "row"):
            raise ValueError(
                "MCPToolTransform needs at least one server, and session='shared' or 'row'; got "
                f"{list(servers)} and {session!r}."
            )
        self.session, self.images = session, images
        self.tools: dict[str, Tool] = {}
        self._homes: dict[str, tuple[str, str]] = {}
        self._loop = ReplaceableLoop()
        self._shared = {
            name: MCPConnection(f"the MCP server {name!r}", server, **options)
            for name, server in servers.items()
        }
        try:
            self._list_tools(allow, prefix_names)
            if session == "row":
                self._run(_close_all(self._shared.values()))
        except BaseException:
            self.close()
            raise

    def _list_tools(self, allow: Collection[str] | None, prefix_names: bool) -> None:
        for server, connection in self._shared.items():
            for tool, schema in self._run(connection.tools()).items():
                name = offered_name(f"{server}_{tool}" if prefix_names else tool)
                if name in self._homes:
                    raise ValueError(
                        f"Two tools are named {name!r}: of the MCP servers "
                        f"{self._homes[name][0]!r} and {server!r}. Give prefix_names=True, or "
                        "leave one server out."
                    )
                self._homes[name] = (server, tool)
                if allow is not None and name not in allow:
                    continue
                schema = {**schema, "function": {**schema["function"], "name": name}}
                try:
                    self.tools[name] = schema_tool(schema, is_strict=False)
                except SchemaError as error:
                    raise ValueError(
                        f"The tool {tool!r} of the MCP server {server!r} has an invalid schema: "
                        f"{error.message}"
                    ) from error
        if missing := sorted(set(allow or ()) - self.tools.keys()):
            raise ValueError(
                f"MCPToolTransform: allow names {missing}, which no server offers; there are "
                f"{sorted(self._homes)}."
            )

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.submit(coroutine).result(timeout=2 * self.timeout_s + _GRACE_S)

    @property
    def servers(self) -> dict[str, Any]:
        """By name."""
        return {name: connection.server for name, connection in self._shared.items()}

    def check_policy(self, policy: Any) -> None:
        """Images are for a policy that sees them.

        Raises:
            ValueError: the policy has no image processor.
        """
        encoder = getattr(policy, "encoder", None)
        if self.images and encoder is not None and encoder.images is None:
            raise ValueError(
                "MCPToolTransform(images=True) shows the policy the images that tools return, and "
                "this policy reads text alone. Leave images out, or take a vision-language model "
                "with its processor."
            )

    # Lifecycle ----------------------------------------------------------------------------------

    async def begin(self, episode: Episode) -> None:
        """Open a session for an episode, if each has its own.

        Raises:
            EpisodeStartError: a server can't be reached.
        """
        if self.session == "shared":
            for connection in self._shared.values():
                connection.is_stale = True
            return
        own = {name: connection.another() for name, connection in self._shared.items()}
        close = functools.partial(self._there, _close_all, own.values())
        episode.resources.add(self, own, close=close)
        asks = [functools.partial(self._there, connection.tools) for connection in own.values()]
        opened = await self.call_all(*asks, timeout_s=2 * self.timeout_s + _GRACE_S)
        for server, outcome in zip(own, opened, strict=True):
            if outcome.error is not None:
                raise EpisodeStartError(f"MCP server {server}") from outcome.error

    async def _there(self, function: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        """Run something on the sessions' own loop, which lives as long as they do."""
        return await asyncio.wrap_future(self._loop.submit(function(*arguments)))

    def close(self) -> None:
        """Close all sessions and stop the servers' processes."""
        if self._shared:
            self._run(_close_all(self._shared.values()))
        self._loop.close()

    # Tools --------------------------------------------------------------------------------------

    def tool_names(self) -> dict[str, str]:
        """Every tool, and whose it is."""
        return {name: f"the MCP server {self._homes[name][0]!r}" for name in self.tools}

    def tools_of(self, episode: Episode) -> Mapping[str, Tool]:
        """All tools, for every episode that has a session."""
        return self.tools if self.session == "shared" or self in episode.resources else {}

    def bind(self, episode: Episode, call: ToolCall) -> Job:
        """A call of a server's tool."""
        server, tool = self._homes[call.name]
        connections = self._shared if self.session == "shared" else episode.resources.get(self)
        ask = functools.partial(self._there, connections[server].call, tool, call.arguments)
        return self.job(call, ask)


async def _close_all(connections: Collection[MCPConnection]) -> None:
    await asyncio.gather(*(connection.close() for connection in connections))
