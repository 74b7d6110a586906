"""Guard in front of a server's routes: a request needs the token."""

import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from .json_client import TOKEN_VARIABLE

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class AccessControl:
    """ASGI middleware in front of every route: who may ask, and how."""

    # With a token in the environment every request needs it. A browser's page of another origin is
    # refused, and a body that is not JSON, which such a page could send unasked.

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._token = os.environ.get(TOKEN_VARIABLE, "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        status, reason = self._refusal(scope, headers)
        if not status:
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        body = json.dumps({"error": {"message": reason}}).encode()
        kind = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": kind})
        return await send({"type": "http.response.body", "body": body})

    def _refusal(self, scope: Scope, headers: dict[bytes, str]) -> tuple[int, str]:
        sent = headers.get(b"authorization", "").encode()
        if self._token and not secrets.compare_digest(sent, f"Bearer {self._token}".encode()):
            return 401, f"This server asks for its token: set {TOKEN_VARIABLE}, or token=..."
        origin = headers.get(b"origin")
        if origin is not None and urlsplit(origin).netloc != headers.get(b"host"):
            return 403, f"Pages of another origin, {origin}, may not use this server."
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        has_body = headers.get(b"content-length", "0") != "0" or b"transfer-encoding" in headers
        if scope["type"] == "http" and has_body and kind != "application/json":
            return 415, f"A body has to be application/json, not {kind or 'of no type'}."
        return 0, ""
