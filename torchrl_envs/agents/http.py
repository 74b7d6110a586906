"""Bounds on the head of a request, which is read before anybody is asked for a key."""

import json
import sys
from asyncio import TimerHandle, Transport
from http import HTTPStatus
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEAD_BYTES: Final = 1 << 16
"""Most bytes of a request's first line and headers."""
_LINGER_S: Final = 1.0
"""A client that is refused while it writes may go on for so long, and hears the answer."""
_KINDS: Final = {408: "timeout_error"}


class BoundedHeads(H11Protocol):
    """HTTP/1.1 whose heads are short and come soon: 414, 431 and 408 otherwise.

    The state of a connection is uvicorn's and h11's; what is read of a head is never more than
    :data:`MAX_HEAD_BYTES` and one read of the socket.
    """

    head_s: float
    """How long a program may take to send a head."""
    _head_timer: TimerHandle | None = None
    _is_refused = False

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """A head is to come."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more is to come."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in what comes, and see whether the head of a request is whole."""
        if self._is_refused:
            return
        super().data_received(data)
        self._await_head()

    def on_response_complete(self) -> None:
        """A request was answered; the next one may have begun."""
        super().on_response_complete()
        self._await_head()

    def _await_head(self) -> None:
        """Give a head that has begun, or that a new connection owes, its time."""
        if self._is_refused or self.transport.is_closing():
            return
        is_owed = self.conn.their_state is h11.IDLE and (
            bool(self.conn.trailing_data[0]) or self.cycle is None
        )
        if not is_owed:
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_s, self._refuse_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_late(self) -> None:
        self._head_timer = None
        if self.conn.trailing_data[0]:
            self._refuse(408, f"the request's headers had not arrived after {self.head_s:g} s")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request; uvicorn calls it where h11 has said what is wrong."""
        error = sys.exception()
        hint = getattr(error, "error_status_hint", 400)
        if hint != 431:
            self._refuse(400, f"{msg} ({error})" if error is not None else msg)
        elif b"\n" in self.conn.trailing_data[0]:
            self._refuse(431, f"the headers are longer than {MAX_HEAD_BYTES} bytes")
        else:
            self._refuse(414, f"the first line is longer than {MAX_HEAD_BYTES} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Answer, read and drop what is still written for a moment, and hang up."""
        self._is_refused = True
        self._stop_timer()
        kind = _KINDS.get(status, "invalid_request_error")
        error: dict[str, Any] = {"message": message, "type": kind, "param": None, "code": kind}
        body = json.dumps({"type": "error", "error": error}).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)
