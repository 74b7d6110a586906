"""The HTTP server that programs ask: OpenAI's chat completions, a session for each key."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from .chat_protocol import (
    RequestError,
    TurnReply,
    TurnRequest,
    completion,
    events,
    read_request,
)
from .session import AgentSession, SessionOver

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_PATH: Final = "/v1/chat/completions"
_STOP_S: Final = 5.0


class AgentServer:
    """Answers the programs of all episodes of an environment, on a thread of its own.

    Args:
        host: where it listens.
        port: 0 for any that is free.
        model: the name that it gives the policy.
        allowed: see :func:`read_request`; asked for anew at each request.
        ignored: see :func:`read_request`.

    Raises:
        ImportError: ``starlette`` or ``uvicorn`` is missing.
        OSError: it can't listen there.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        model: str,
        allowed: Callable[[], Mapping[str, Any]],
        ignored: Sequence[str],
    ) -> None:
        try:
            import uvicorn
            from starlette.applications import Starlette
            from starlette.routing import Route
        except ImportError as error:
            raise ImportError(
                "AgentProgram needs starlette and uvicorn: pip install 'torchrl-agents[tools]'."
            ) from error
        self.model = model
        self._allowed, self._ignored = allowed, ignored
        self._sessions: dict[str, AgentSession] = {}
        routes = [
            Route(_PATH, self._complete, methods=["POST"]),
            Route("/v1/models", self._list_models, methods=["GET"]),
            Route("/{path:path}", self._not_found, methods=["GET", "POST"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_level="warning", lifespan="off", access_log=False
        )
        self._server = uvicorn.Server(config)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=1024)
        port = self._socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        """The base URL that OpenAI's clients take."""
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="agent-server", daemon=True
        )
        self._thread.start()

    def open(self) -> AgentSession:
        """A session for a program, known by its key."""
        session = AgentSession()
        self._sessions[session.key] = session
        return session

    def forget(self, session: AgentSession) -> None:
        """A session is over, and its key unknown from now on."""
        self._sessions.pop(session.key, None)

    def close(self) -> None:
        """Stop listening; nobody is answered any more."""
        for session in list(self._sessions.values()):
            session.refuse("the environment is closed")
        self._server.should_exit = True
        self._thread.join(timeout=_STOP_S)
        self._socket.close()

    # What it answers ----------------------------------------------------------------------------

    async def _complete(self, request: "Request") -> "Response":
        from starlette.responses import JSONResponse, StreamingResponse

        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        session = self._sessions.get(key)
        if session is None:
            return _error(401, "the key is that of no episode that runs", "invalid_api_key")
        try:
            body = json.loads(await request.body())
            asked = read_request(body, allowed=self._allowed(), ignored=self._ignored)
        except RequestError as error:
            return _error(400, str(error), "invalid_request")
        except ValueError as error:
            return _error(400, f"the body is no JSON: {error}", "invalid_request")
        try:
            reply = await _answer(session, asked, request)
        except SessionOver as over:
            return _error(403, f"the episode is over: {over}", "episode_over")
        if asked.streams:
            return StreamingResponse(
                events(reply, asked, self.model), media_type="text/event-stream"
            )
        return JSONResponse(completion(reply, self.model))

    async def _list_models(self, request: "Request") -> "Response":
        from starlette.responses import JSONResponse

        del request
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "torchrl-agents"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _not_found(self, request: "Request") -> "Response":
        return _error(404, f"there is no {request.url.path} here, only {_PATH}", "not_found")


async def _answer(session: AgentSession, asked: TurnRequest, request: "Request") -> TurnReply:
    """The turn that a program asks for; given up when the program hangs up."""
    future: Future[TurnReply] = session.ask(asked)
    reply = asyncio.wrap_future(future)
    hung_up = asyncio.ensure_future(_hung_up(request))
    await asyncio.wait({reply, hung_up}, return_when=asyncio.FIRST_COMPLETED)
    if reply.done():
        hung_up.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await hung_up
        return reply.result()
    reply.cancel()
    raise SessionOver("the program hung up")


async def _hung_up(request: "Request") -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(status: int, message: str, code: str) -> "Response":
    from starlette.responses import JSONResponse

    kind = "invalid_request_error"
    body = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": body}, status_code=status)
