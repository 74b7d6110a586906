"""A session of an OpenEnv server over one WebSocket."""

import asyncio
import contextlib
import random
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final, Self
from urllib.parse import urlsplit, urlunsplit

from torchrl_data.checks import POSITIVE, check_numbers
from torchrl_envs.concurrency.event_loop import import_aside

from .errors import (
    OpenEnvCapacityError,
    OpenEnvConnectionError,
    OpenEnvProtocolError,
    OpenEnvServerError,
    OpenEnvTimeoutError,
    SessionNotResetError,
)
from .messages import CAPACITY_REACHED, FATAL_CODES, EnvResult, answer_data, env_result, request

MAX_ATTEMPTS: Final = 4
"""One attempt to open a session and three more."""
MAX_MESSAGE_BYTES: Final = 100 * 2**20
_CLOSE_S: Final = 2.0
_FIRST_PAUSE_S: Final = 0.075
"""Before the second attempt at most; each pause may be twice as long as the one before."""
_LAST_PAUSE_S: Final = 3.0
_JITTER: Final = random.Random()
_SCHEMES: Final = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


def websocket_url(base_url: str) -> str:
    """Return where the sessions of a server are."""
    parts = urlsplit(base_url)
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise ValueError(
            "OpenEnvSession: base_url must be http://, https://, ws:// or wss:// and a host, got "
            f"{shown_url(base_url)!r}."
        )
    path = f"{parts.path.rstrip('/')}/ws"
    return urlunsplit((_SCHEMES[parts.scheme], parts.netloc, path, parts.query, ""))


def shown_url(url: str) -> str:
    """A URL without what may be secret in it."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


class OpenEnvSession:
    """An environment on an OpenEnv server, for one rollout.

    All methods are coroutines of one event loop, so that many sessions step at the same time. A
    session is opened by :meth:`reset`. When an answer does not come before the deadline, or the
    connection is lost, the session is dead: no step reaches a server until :meth:`reset` has opened
    a new session, and no step is ever sent twice.

    Args:
        base_url: of the server.
        connect_timeout_s: deadline of one attempt to connect.
        message_timeout_s: deadline of one answer.
        capacity_timeout_s: how long to wait, with growing pauses, for a server whose sessions are
            all taken.
        headers: HTTP headers of the connection, an authorisation say.

    Raises:
        ValueError: the URL is not one of a server, or a duration is not positive.
        ImportError: websockets is not installed.

    Examples:
        >>> session = OpenEnvSession("http://localhost:8000")
        >>> session.is_reset
        False
    """

    def __init__(
        self,
        base_url: str,
        *,
        connect_timeout_s: float = 10.0,
        message_timeout_s: float = 60.0,
        capacity_timeout_s: float = 60.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        check_numbers("OpenEnvSession", POSITIVE, connect_timeout_s=connect_timeout_s)
        check_numbers("OpenEnvSession", POSITIVE, message_timeout_s=message_timeout_s)
        check_numbers("OpenEnvSession", POSITIVE, capacity_timeout_s=capacity_timeout_s)
        if find_spec("websockets") is None:
            raise ImportError(
                "OpenEnvSession needs websockets, not installed here: pip install "
                "torchrl-agents[tools]."
            )
        self.url = websocket_url(base_url)
        self.name = shown_url(self.url)
        """The URL as it is shown in errors: without a password or a query."""
        self.connect_timeout_s = connect_timeout_s
        self.message_timeout_s = message_timeout_s
        self.capacity_timeout_s = capacity_timeout_s
        self.headers = dict(headers or {})
        self.is_reset = False
        """Whether a step would reach an environment that was reset."""
        self._socket: Any = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # Requests -----------------------------------------------------------------------------------

    async def reset(self, **arguments: Any) -> EnvResult:
        """Begin an episode, in a new session if this one is dead or was never opened.

        A failed connection, an answer with a status of 500 or more and a missed deadline are tried
        again, three times at most; a server without a free session for ``capacity_timeout_s``.

        Args:
            **arguments: of the environment's own ``reset`` (``seed``, ``episode_id``, ...).

        Raises:
            OpenEnvServerError: the environment refused.
            OpenEnvCapacityError: no session came free in time.
            OpenEnvConnectionError: the server can't be reached.
            OpenEnvProtocolError: the answer is not one of an OpenEnv server.
        """
        async with self._lock:
            self.is_reset, num_failures, longest_pause_s = False, 0, _FIRST_PAUSE_S
            deadline = time.monotonic() + self.capacity_timeout_s
            while True:
                pause_s = longest_pause_s * _JITTER.uniform(1 / 3, 1)  # clients don't march
                try:
                    if self._socket is None:
                        await self._connect()
                    result = env_result(await self._exchange("reset", arguments))
                    self.is_reset = True
                    return result
                except OpenEnvServerError as error:
                    if error.code != CAPACITY_REACHED:
                        raise
                    if time.monotonic() + pause_s > deadline:
                        raise OpenEnvCapacityError(f"{self.name}: {error.message}") from error
                except OpenEnvConnectionError as error:
                    num_failures += 1
                    response = getattr(error.__cause__, "response", None)
                    is_refused = response is not None and response.status_code < 500
                    if is_refused or num_failures == MAX_ATTEMPTS:
                        raise
                await asyncio.sleep(pause_s)
                longest_pause_s = min(2 * longest_pause_s, _LAST_PAUSE_S)

    async def step(self, action: Mapping[str, Any]) -> EnvResult:
        """Act.

        Args:
            action: the fields of the environment's action.

        Raises:
            SessionNotResetError: the session was never reset, or is dead.
            OpenEnvServerError: the environment refused the action or raised; it can go on.
            OpenEnvTimeoutError: no answer before the deadline; the session is dead.
            OpenEnvConnectionError: the connection was lost; the session is dead.
        """
        async with self._lock:
            return env_result(await self._exchange("step", action))

    async def state(self) -> dict[str, Any]:
        """The environment's state; raises what :meth:`step` does."""
        async with self._lock:
            return await self._exchange("state")

    async def list_tools(self) -> list[dict[str, Any]]:
        """The tools of an environment that speaks MCP: ``name``, ``description``, ``inputSchema``.

        Returns:
            The tools; none for an environment without MCP.

        Raises:
            OpenEnvConnectionError: there is no connection, or it was lost.
            OpenEnvProtocolError: the answer is not one of MCP's.
        """
        async with self._lock:
            if self._socket is None:
                await self._connect()
            rpc = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
            answer = await self._exchange("mcp", rpc)
        if answer.get("error") is not None:
            return []
        tools = (answer.get("result") or {}).get("tools")
        if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
            raise OpenEnvProtocolError(f"{self.name}: not a list of tools: {answer!r:.200}")
        return tools

    async def close(self) -> None:
        """Give the session back to the server."""
        socket, self._socket, self.is_reset = self._socket, None, False
        if socket is None:
            return
        from websockets.exceptions import ConnectionClosed

        try:
            async with asyncio.timeout(_CLOSE_S):
                await socket.send(request("close"))
                await socket.close()
        except (TimeoutError, ConnectionClosed, OSError):
            socket.transport.abort()

    # The connection -----------------------------------------------------------------------------

    async def _connect(self) -> None:
        await import_aside("websockets.asyncio.client")
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake

        try:
            async with asyncio.timeout(self.connect_timeout_s):
                # No retries inside: they are counted here.
                self._socket = await connect(
                    self.url,
                    additional_headers=self.headers,
                    open_timeout=None,
                    close_timeout=_CLOSE_S,
                    max_size=MAX_MESSAGE_BYTES,
                )
        except (OSError, TimeoutError, InvalidHandshake, EOFError) as error:
            reason = f"no connection: {type(error).__name__}: {error}"
            raise OpenEnvConnectionError(f"{self.name}: {reason}") from error

    async def _exchange(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request and wait for its answer; anything but an answer kills the session."""
        from websockets.exceptions import ConnectionClosed

        if kind in ("step", "state") and not self.is_reset:
            raise SessionNotResetError(
                f"{self.name}: {kind} needs a session that was reset, and this one "
                f"{'is dead' if self._socket is None else 'was not'}. Call reset() first."
            )
        message = request(kind, data)
        was_reset, self.is_reset = self.is_reset, False
        answered = False
        try:
            async with asyncio.timeout(self.message_timeout_s):
                with contextlib.suppress(ConnectionClosed):
                    # A server that refuses a session says why, and closes.
                    await self._socket.send(message)
                raw = await self._socket.recv()
            answer = answer_data(raw, kind=kind)
            answered = True
        except TimeoutError as error:
            raise OpenEnvTimeoutError(
                f"{self.name}: no answer to {kind} within {self.message_timeout_s:g} s"
            ) from error
        except ConnectionClosed as error:
            raise OpenEnvConnectionError(f"{self.name}: connection lost in {kind}") from error
        except OpenEnvServerError as error:
            answered = error.code not in FATAL_CODES
            raise
        finally:
            # A late answer must not be taken for that to another request: also on cancellation.
            if answered:
                self.is_reset = was_reset
            elif (socket := self._socket) is not None:  # else it was closed meanwhile
                self._socket = None
                socket.transport.abort()
        return answer
