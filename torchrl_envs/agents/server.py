"""The HTTP server that programs ask: protocols of two companies, a session for each key."""

import asyncio
import contextlib
import json
import resource
import socket
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from torchrl_data import import_package
from torchrl_envs.datasets.row_checks import is_text

from .branches import named_by_header
from .protocols import Protocol, anthropic_messages, chat_completions, openai_responses
from .session import AgentSession, SessionOver
from .turns import Accepted, RequestError, RequestTooLargeError, TurnReply, TurnRequest

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


_PROTOCOLS: Final[Mapping[str, Protocol]] = {
    "/v1/chat/completions": chat_completions,
    "/v1/responses": openai_responses,
    "/v1/messages": anthropic_messages,
}
"""What reads requests and writes answers, by path."""
_EVERYWHERE: Final = ("", "0.0.0.0", "::")
_OPEN_FILES: Final = 65536
_KEEP_ALIVE_S: Final = 3600
_STOP_S: Final = 5
_WRONG_KEY: Final = "the key is that of no episode that runs"
_BODY_S: Final = 60
"""How long a program may take to send a request."""
_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
}


class AgentServer:
    """Answers the programs of all episodes of an environment, on a thread of its own.

    Args:
        host: where it listens.
        port: 0 for any that is free.
        model: the name that it gives the policy.
        accepted: what requests may say about how tokens are drawn.
        max_request_bytes: a longer request is answered with 413, and not kept. A first line or
            headers of more than 64 KiB are answered with 414 or 431, before a key is asked for.
        head_timeout_s: headers that have not arrived whole after so long are answered with 408.

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
        accepted: Accepted,
        max_request_bytes: int,
        head_timeout_s: float = 20.0,
    ) -> None:
        for package in ("uvicorn", "starlette.applications"):
            install = "pip install 'torchrl-agents[tools]'"
            import_package(package, who="AgentProgram", install=install)
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        from .http import MAX_HEAD_BYTES, BoundedHeads

        self.model = model
        self._accepted = accepted
        self._max_request_bytes = max_request_bytes
        self._sessions: dict[str, AgentSession] = {}
        routes = [Route(path, self._answer, methods=["POST"]) for path in _PROTOCOLS]
        models = ("/v1/models", "/v1/models/{model}")
        routes += [Route(path, self._show_models, methods=["GET"]) for path in models]
        routes.append(Route("/{path:path}", self._not_found, methods=["GET", "POST"]))
        config = uvicorn.Config(
            Starlette(routes=routes),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            http=type("Heads", (BoundedHeads,), {"head_s": head_timeout_s}),
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            # A tool of the program may take its time; whoever closes first, the other one fails.
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_STOP_S,
        )
        self._server = uvicorn.Server(config)
        self._socket, self.url = _listen(host, port)
        """Where it listens; OpenAI's clients take it with ``/v1``."""
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

    def stop(self) -> None:
        """Begin to stop; nobody is answered any more."""
        for session in list(self._sessions.values()):
            session.refuse("the environment is closed")
        self._server.should_exit = True

    def close(self) -> None:
        """Stop listening."""
        self.stop()
        self._thread.join(timeout=_STOP_S)
        self._socket.close()

    # What it answers ----------------------------------------------------------------------------

    async def _answer(self, request: "Request") -> "Response":
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse, StreamingResponse

        protocol = _PROTOCOLS[request.url.path]
        session = self._sessions.get(_key_of(request))
        if session is None:
            return _error(401, _WRONG_KEY)
        try:
            body = json.loads(await _read_body(request, self._max_request_bytes))
            if not is_text(body):
                raise RequestError("the body holds half of a character, which is no text")
            asked = protocol.read_request(body, self._accepted)
            asked = asked._replace(agent=named_by_header(request.headers))
            del body
            reply = await _reply(session, asked, request)
        except RequestError as error:
            return _error(error.status, str(error), error.code)
        except TimeoutError:
            return _error(408, f"the request had not arrived whole after {_BODY_S} s")
        except (ValueError, RecursionError) as error:
            return _error(400, f"the body is no JSON: {error}")
        except ClientDisconnect:
            return _error(400, "the program hung up before it had asked")  # which nobody hears
        except SessionOver as over:
            return _error(403, f"the episode is over: {over}")
        if asked.streams:
            stream = protocol.stream_reply(reply, asked, self.model)
            return StreamingResponse(map(_event, stream), media_type="text/event-stream")
        return JSONResponse(protocol.write_reply(reply, asked, self.model))

    async def _show_models(self, request: "Request") -> "Response":
        from starlette.responses import JSONResponse

        if _key_of(request) not in self._sessions:
            return _error(401, _WRONG_KEY)
        own = {"id": self.model, "object": "model", "created": 0, "owned_by": "torchrl-agents"}
        named = request.path_params.get("model")
        if named not in (None, self.model):
            return _error(404, f"there is one model here, {self.model!r}")
        return JSONResponse({"object": "list", "data": [own]} if named is None else own)

    async def _not_found(self, request: "Request") -> "Response":
        path = f"{request.url.path:.80}"
        return _error(404, f"there is no {path} here, only {', '.join(_PROTOCOLS)}")


def _listen(host: str, port: int) -> tuple[socket.socket, str]:
    """A socket that listens, and where programs find it.

    There is room for a connection or more, and an event loop, of each program.

    Raises:
        OSError: it can't listen there.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise OSError(
            error.errno,
            f"AgentProgram can't listen at {host}:{port} ({error.strerror}). Each environment has "
            "a server of its own: port=0 finds each a port",
        ) from error
    if host in _EVERYWHERE:
        # By which address this machine would write to another one; nothing is sent.
        host = "127.0.0.1"
        probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with probe, contextlib.suppress(OSError):  # it may know no other machine
            probe.connect(("192.0.2.1", 9))
            host = str(probe.getsockname()[0])
    shown = f"[{host}]" if ":" in host else host
    return listening, f"http://{shown}:{listening.getsockname()[1]}"


def _key_of(request: "Request") -> str:
    """Key of a request, as OpenAI's clients give it, or as Anthropic's do."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    return request.headers.get("x-api-key", bearer if scheme.lower() == "bearer" else "")


async def _read_body(request: "Request", max_bytes: int) -> bytearray:
    """The body of a request.

    Raises:
        RequestTooLargeError: it is longer; it was read to its end, so that the client hears the
            answer, and none of it was kept.
        TimeoutError: it did not end in time.
    """
    body, num_bytes = bytearray(), 0
    async with asyncio.timeout(_BODY_S):
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes <= max_bytes:
                body += chunk
            else:
                body.clear()
    if num_bytes > max_bytes:
        raise RequestTooLargeError(num_bytes, max_bytes)
    return body


async def _reply(session: AgentSession, asked: TurnRequest, request: "Request") -> TurnReply:
    """The turn that a program asks for; given up when the program hangs up."""
    waiting = session.ask(asked)
    reply = asyncio.wrap_future(waiting.reply)
    hung_up = asyncio.ensure_future(_hung_up(request))
    await asyncio.wait({reply, hung_up}, return_when=asyncio.FIRST_COMPLETED)
    if reply.done():
        hung_up.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await hung_up
        return reply.result()
    session.give_up(waiting)
    reply.cancel()  # here; whether the turn is drawn is the session's affair
    raise SessionOver("the program hung up")


async def _hung_up(request: "Request") -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(event: tuple[str, Any]) -> str:
    """A server-sent event."""
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


def _error(status: int, message: str, code: str = "") -> "Response":
    """An error that the clients of both companies understand."""
    from starlette.responses import JSONResponse

    message = message.encode(errors="backslashreplace").decode()  # of whatever a program sends
    kind = _KINDS.get(status, "invalid_request_error")
    body = {"message": message, "type": kind, "param": None, "code": code or kind}
    return JSONResponse({"type": "error", "error": body}, status_code=status)
