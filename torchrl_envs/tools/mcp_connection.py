"""A session with an MCP server: the one door to the ``mcp`` library.

Everything here runs on one event loop. A session lives in a task of its own, because the
library's contexts have to be left by the task that entered them.
"""

import asyncio
import contextlib
import functools
import json
import os
import pickle
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from operator import methodcaller
from typing import Any, Final, TypeVar

from torchrl_data import import_package
from torchrl_envs.processes import kept_command

T = TypeVar("T")

MAX_RESTARTS: Final = 2
"""How often in a row a server that died is started again at once."""
RETRY_S: Final = 10.0
"""Then it is left alone for so long: what can't be started now may be there again later."""
MAX_TOOLS: Final = 1000
"""Most tools of one server: a model can't choose among more, and each has to be checked."""
MAX_PAGES: Final = 100
"""Most pages in which a server lists them."""
MAX_LISTING_BYTES: Final = 16 << 20
"""Most bytes of JSON of their definitions."""
_BACKOFF_S: Final = 0.2
_CLOSE_S: Final = 15.0
"""The library stops a server within seconds; this is for when it does not."""
_KEYS: Final = {
    "command": frozenset({"command", "args", "env", "cwd", "encoding"}),
    "url": frozenset({"url", "headers"}),
}
"""The one that a description must have, with all that it may."""


class MCPServerError(RuntimeError):
    """A server can't be reached, does not answer, or died."""


class MCPToolError(RuntimeError):
    """A tool of a server failed; the message is the server's."""


class MCPToolsChangedError(RuntimeError):
    """A server no longer offers a tool as it did when the environment was built."""


class MCPConnection:
    """A session with one server; opened when it is needed, and again when the server died."""

    def __init__(
        self,
        name: str,
        server: Any,
        *,
        timeout_s: float,
        max_tools: int = MAX_TOOLS,
        images: bool = False,
    ) -> None:
        if isinstance(server, Mapping) and not any(
            needed in server and server.keys() <= known for needed, known in _KEYS.items()
        ):
            raise ValueError(
                f"{name} is described by {sorted(server)}. Give 'command' (with 'args', 'env', "
                "'cwd', 'encoding' as needed) for a process, or 'url' (with 'headers') for HTTP."
            )
        self.name = name
        self.server = server
        self.timeout_s = timeout_s
        self.max_tools = max_tools
        self.images = images
        self._client: Any = None
        self._owner: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._opening = asyncio.Lock()
        self._listing = asyncio.Lock()
        self._expected: dict[str, dict[str, Any]] | None = None
        self._offered: dict[str, dict[str, Any]] = {}
        self.is_stale = False
        """Whether to ask for the tools before the next call: others now, or nobody answers."""
        self._num_changes = 0
        self._num_failures = 0
        self._failed_s = 0.0

    async def tools(self) -> dict[str, dict[str, Any]]:
        """The server's tools, as the schemas that chat templates show, by name."""
        # Those of the first time are expected from then on: a call of one that changed is refused.
        if not await self._open():  # which lists them too
            await self._refresh(always=True)
        if self._expected is None:
            self._expected = dict(self._offered)
        return self._offered

    @property
    def _options(self) -> Any:
        return {"timeout_s": self.timeout_s, "max_tools": self.max_tools, "images": self.images}

    def another(self) -> "MCPConnection":
        """A session of its own with the same server, which expects the same tools."""
        made = MCPConnection(self.name, self.server, **self._options)
        made._expected = self._expected
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is not open."""
        try:
            pickle.dumps(self.server)
        except Exception as error:  # it is the server's own code that says so
            raise TypeError(
                f"A connection to {self.name} can't be copied or sent to another process: that is "
                f"an object of this one ({error}). Give a function of a module, which returns it."
            ) from error
        make = functools.partial(type(self), **self._options)
        return make, (self.name, self.server), {"_expected": self._expected}

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Call a tool; a call is never made twice.

        Raises:
            MCPToolsChangedError: the server no longer offers it as it did at first, also where it
                has said so while the tool ran.
            MCPToolError: the tool failed.
            MCPServerError: the server can't be reached, or died.
        """
        await self._open()
        await self._refresh()
        self._check(tool)
        changes = self._num_changes
        try:
            result = await self._request(methodcaller("call_tool", tool, arguments))
            self._num_failures = 0
            content = _content(result, images=self.images)
        except MCPToolError:
            # Not every server says that its tools changed.
            await self._refresh(always=True)
            self._check(tool)
            raise
        if self._num_changes != changes:
            await self._refresh()
            self._check(tool)
        return content

    def _check(self, tool: str) -> None:
        if self._expected is not None and self._offered.get(tool) != self._expected.get(tool):
            state = "has another schema" if tool in self._offered else "is gone"
            raise MCPToolsChangedError(f"the tool {tool} of {self.name} {state}")

    async def close(self) -> None:
        """End the session and the server's process; may be called twice."""
        owner, self._owner, self._client = self._owner, None, None
        if owner is None:
            return
        self._stop.set()
        _, pending = await asyncio.wait([owner], timeout=_CLOSE_S)
        if pending:
            owner.cancel()
            await asyncio.wait([owner], timeout=_CLOSE_S)

    # How it works -------------------------------------------------------------------------------

    async def _open(self) -> bool:
        """Open a session if there is none; whether this one is new."""
        async with self._opening:
            if self._client is not None:
                return False
            await self.close()
            failures = self._num_failures
            if failures > MAX_RESTARTS and time.monotonic() - self._failed_s < RETRY_S:
                raise MCPServerError(
                    f"{self.name} died or could not be reached {failures} times in a row; it is "
                    f"not started again within {RETRY_S:g} s"
                )
            await asyncio.sleep(_BACKOFF_S * min(failures, MAX_RESTARTS))
            self._stop = asyncio.Event()
            ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            owner = self._owner = asyncio.create_task(self._own(ready, self._stop))
            try:
                self._client = await asyncio.wait_for(ready, self.timeout_s)
                await self._list()
            except BaseException as error:
                self._num_failures, self._failed_s = failures + 1, time.monotonic()
                owner.cancel()
                await self.close()
                if isinstance(error, TimeoutError):
                    late = f"{self.name} did not answer within {self.timeout_s:g} s"
                    raise MCPServerError(late) from error
                raise
            return True

    async def _own(self, ready: "asyncio.Future[Any]", stop: asyncio.Event) -> None:
        try:
            async with make_client(self.server, self._on_message) as client:
                ready.set_result(client)
                await stop.wait()
        except BaseException as error:
            # The end of a session that was in use; whoever uses it has seen that.
            if not ready.done():
                cause = error
                while isinstance(cause, BaseExceptionGroup):
                    cause = cause.exceptions[0]
                reason = str(cause) if isinstance(cause, MCPServerError) else repr(cause)
                ready.set_exception(MCPServerError(f"{self.name} can't be reached: {reason:.500}"))
            if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
                raise

    async def _on_message(self, message: Any) -> None:
        if type(message).__name__ == "ToolListChangedNotification":
            self.is_stale, self._num_changes = True, self._num_changes + 1

    async def _refresh(self, *, always: bool = False) -> None:
        """List the tools again if they may be others; all calls wait for a listing under way."""
        async with self._listing:
            if always or self.is_stale:
                await self._list()

    async def _list(self) -> None:
        self.is_stale = False
        try:
            self._offered = await self._read_tools()
        except BaseException:
            self.is_stale = True
            raise

    async def _read_tools(self) -> dict[str, dict[str, Any]]:
        """Read all pages of tools, within bounds.

        Raises:
            MCPServerError: there are more of them, or of their pages or bytes, than a model could
                use; or they take too long.
        """
        offered: dict[str, dict[str, Any]] = {}
        cursor, size, deadline_s = None, 0, time.monotonic() + 0.9 * self.timeout_s
        for _ in range(MAX_PAGES):
            ask = methodcaller("list_tools", cursor=cursor, cache_mode="bypass")
            # What answers nobody is known as such before the deadline of the call that waits.
            try:
                page = await self._request(ask, max(0.0, deadline_s - time.monotonic()))
            except MCPServerError as error:
                if cursor is None or not isinstance(error.__cause__, TimeoutError):
                    raise
                late = f"takes more than {0.9 * self.timeout_s:g} s"
                raise self._too_much(late, "timeout_s=") from error
            if len(offered) + len(page.tools) > self.max_tools:
                raise self._too_much(f"has more than {self.max_tools} tools", "max_tools=")
            for tool in page.tools:
                about = tool.description or tool.title or ""
                schema = {"name": tool.name, "description": about, "parameters": tool.input_schema}
                if tool.name in offered:
                    raise MCPServerError(f"{self.name} lists the tool {tool.name!r} twice")
                offered[tool.name] = {"type": "function", "function": schema}
                size += len(json.dumps(schema))
            if size > MAX_LISTING_BYTES:
                mib = MAX_LISTING_BYTES >> 20
                raise self._too_much(f"has definitions of more than {mib} MiB of JSON")
            if not (cursor := page.next_cursor):
                return offered
        raise self._too_much(f"has more than {MAX_PAGES} pages")

    def _too_much(self, what: str, setting: str | None = None) -> MCPServerError:
        remedy = "Start the server with fewer tools" + (f", or raise {setting}" if setting else "")
        return MCPServerError(f"the list of tools of {self.name} {what}. {remedy}.")

    async def _request(self, ask: Callable[[Any], Any], within_s: float | None = None) -> Any:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        client = self._client
        try:
            return await asyncio.wait_for(ask(client), within_s)
        except asyncio.CancelledError:
            self.is_stale = True  # a slow tool, or a server that answers nobody
            raise
        except Exception as error:
            if isinstance(error, MCPError) and error.code != CONNECTION_CLOSED:
                raise MCPToolError(str(error)) from error
            if self._client is client is not None:  # all that were under way fail: it died once
                self._client = None  # The next call opens another session.
                self._num_failures, self._failed_s = self._num_failures + 1, time.monotonic()
            late = isinstance(error, TimeoutError) and within_s is not None
            why = (
                f"it did not answer within {within_s:.1f} s" if late else str(error) or repr(error)
            )
            raise MCPServerError(f"the connection to {self.name} was lost: {why}") from error


@contextlib.asynccontextmanager
async def make_client(server: Any, on_message: Any) -> AsyncIterator[Any]:
    """A session of the library's own client."""
    # server: `{"command", "args", "env", "cwd"}` (a process, over stdio), `{"url", "headers"}` or a
    # URL (streamable HTTP), an `MCPServer` or `Server` object (in memory), or a function without
    # arguments that returns one of these or a transport.
    # On a thread: a loop that imports for long is taken for blocked.
    load = functools.partial(import_package, who="An MCP server", install="pip install 'mcp>=2'")
    for module in ("mcp", "mcp.client.streamable_http"):
        await asyncio.to_thread(load, module)
    try:
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client
    except ImportError as error:  # of another version, whose names are others
        raise ImportError(
            f"An MCP server needs mcp 2, and the one installed is another: {error}. pip install "
            "'mcp>=2'."
        ) from error

    if callable(server) and not hasattr(server, "list_tools"):
        server = server()
    async with contextlib.AsyncExitStack() as stack:
        target: Any = server
        if isinstance(server, Mapping) and "command" in server:
            server = StdioServerParameters(**server)
        if isinstance(server, StdioServerParameters):
            if sys.__stderr__ is None:
                raise MCPServerError("this process has no stderr, which a server's process needs")
            # What the server writes to stderr is shown, as it is for any child process.
            target = stdio_client(_kept(server), errlog=sys.__stderr__)
        elif isinstance(server, Mapping):
            http = create_mcp_http_client(headers=dict(server.get("headers", {})))
            http = await stack.enter_async_context(http)
            target = streamable_http_client(server["url"], http_client=http)
        client = Client(target, cache=None, message_handler=on_message)
        yield await stack.enter_async_context(client)


def _kept(server: Any) -> Any:
    """A server whose process, and what that starts, ends with this process."""
    from mcp.client.stdio import get_default_environment

    path = (get_default_environment() | (server.env or {})).get("PATH")
    where = os.path.join(server.cwd or "", server.command)
    command = where if os.path.dirname(server.command) else server.command
    if shutil.which(command, path=path) is None:
        raise MCPServerError(f"there is no program {server.command!r} that can be run")
    command, *args = kept_command([server.command, *server.args])
    return server.model_copy(update={"command": command, "args": args})


def _content(result: Any, *, images: bool) -> Any:
    """Return what a tool said: its text, images or a note for what is not text, or its data."""
    pieces: list[str | dict[str, Any]] = []
    for block in result.content:
        its = getattr(block, "resource", block)  # what a block embeds, or itself
        text, mime_type = getattr(its, "text", None), getattr(its, "mime_type", None)
        data = getattr(its, "data", None) or getattr(its, "blob", None)
        if isinstance(text, str) or block.type == "text":
            pieces.append(text or "")
        elif images and not result.is_error and data and str(mime_type).startswith("image/"):
            pieces.append({"type": "image", "data": data})
        else:
            pieces.append(f"[{block.type}: {mime_type or getattr(its, 'uri', None) or 'no text'}]")
    if result.is_error:
        raise MCPToolError("\n".join(map(str, pieces)) or "the tool failed")
    if not pieces and result.structured_content is not None:
        return result.structured_content
    has_images = not all(isinstance(piece, str) for piece in pieces)
    return pieces if has_images else "\n".join(map(str, pieces))
