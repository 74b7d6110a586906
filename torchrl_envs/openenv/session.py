"""A thin client of OpenEnv's WebSocket protocol: one session, its messages and errors."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final, NamedTuple, Self
from urllib.parse import urlsplit, urlunsplit

from torchrl_data.checks import POSITIVE, check_numbers
from torchrl_envs.concurrency.outcome import EpisodeLostError

# What can go wrong with a session of an OpenEnv server, as types.


class OpenEnvError(Exception):
    """The server or the connection to it failed."""


class OpenEnvConnectionError(OpenEnvError, EpisodeLostError):
    """No session could be opened, or the connection was lost; the session is dead."""


class OpenEnvCapacityError(OpenEnvConnectionError):
    """The server had no free session for as long as the client was willing to wait."""


class OpenEnvTimeoutError(OpenEnvConnectionError, TimeoutError):
    """The server did not answer before the deadline; the session is dead."""


class OpenEnvProtocolError(OpenEnvError, EpisodeLostError):
    """The server said something that is not an answer; the session is dead."""


class SessionNotResetError(OpenEnvError, EpisodeLostError):
    """A step was asked of a session that was never reset, or that is dead."""


class OpenEnvServerError(OpenEnvError):
    """The server answered with an error; the session lives on.

    Args:
        code: one of the server's codes (``VALIDATION_ERROR``, ``EXECUTION_ERROR``, ...).
        message: what it says.
        details: the rest of its answer.
    """

    def __init__(self, code: str, message: str, details: Any = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.details = details


# The JSON messages of an OpenEnv server: built and read, without any connection.
#
# Requests are ``{"type": "reset" | "step" | "state" | "mcp" | "close", "data": {...}}``; answers
# are ``{"type": "observation" | "state" | "mcp" | "error", "data": {...}}``.

CAPACITY_REACHED: Final = "CAPACITY_REACHED"
FATAL_CODES: Final = frozenset({CAPACITY_REACHED, "FACTORY_ERROR", "SESSION_ERROR"})
"""Errors after which the server closes the session."""
ANSWERS: Final = {"reset": "observation", "step": "observation", "state": "state", "mcp": "mcp"}
"""The type of the answer to each type of request."""


class EnvResult(NamedTuple):
    """What an environment answers to ``reset`` and ``step``."""

    observation: dict[str, Any]
    """The fields of the environment's own observation."""
    reward: float | None = None
    """Reward of the step; ``None`` where the environment gives none."""
    done: bool = False
    """Whether the episode is over."""
    metadata: dict[str, Any] = {}  # noqa: RUF012
    """What else the server says."""


def request(kind: str, data: Mapping[str, Any] | None = None) -> str:
    """A request as JSON."""
    message: dict[str, Any] = {"type": kind}
    if data is not None:
        message["data"] = dict(data)
    return json.dumps(message, allow_nan=False)


def answer_data(raw: str | bytes, *, kind: str) -> dict[str, Any]:
    """The data of an answer."""
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise OpenEnvProtocolError(f"the server's answer is not JSON: {raw[:80]!r}") from error
    found = message.get("type") if isinstance(message, dict) else None
    data = message.get("data") if isinstance(message, dict) else None
    if found == "error" and isinstance(data, dict):
        rest = {key: value for key, value in data.items() if key not in ("code", "message")}
        code, text = str(data.get("code", "UNKNOWN")), str(data.get("message", ""))
        for each in errors if isinstance(errors := rest.get("errors"), list) else ():
            if isinstance(each, dict):  # what is wrong with a field
                each = f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg', each)}"
            text += f"; {each}"
        raise OpenEnvServerError(code, text, rest)
    if found != ANSWERS[kind] or not isinstance(data, dict):
        raise OpenEnvProtocolError(
            f"the server answered {kind!r} with {raw[:80]!r}, not with a message of type "
            f"{ANSWERS[kind]!r}"
        )
    return data


def env_result(data: Mapping[str, Any]) -> EnvResult:
    """The answer to ``reset`` or ``step``."""
    observation, reward = data.get("observation"), data.get("reward")
    done, metadata = data.get("done", False), data.get("metadata") or {}
    if not isinstance(observation, dict) or not isinstance(reward, int | float | None):
        raise OpenEnvProtocolError(
            "the server's answer must hold an observation (an object) and a reward (a number or "
            f"null), got {dict(data)!r:.200}"
        )
    if not isinstance(done, bool | None) or not isinstance(metadata, dict):
        raise OpenEnvProtocolError(
            f"the server's answer must hold done (true or false), got {dict(data)!r:.200}"
        )
    reward = None if reward is None else float(reward)
    return EnvResult(observation, reward, bool(done), dict(metadata))


# One session of an OpenEnv server over one WebSocket.

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
    """Where the sessions of a server are."""
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
