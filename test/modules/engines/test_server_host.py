"""Servers that are started on another machine, by a host that runs here."""

import socket
import threading
import time
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from torchrl_modules.engines.server_host import HostedServer, ServerHost, reserved_port

TOKEN = "a secret of the job"


class Page(BaseHTTPRequestHandler):
    """Answers with the files of the model."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.text)

    def log_message(self, *args):
        """Nothing is logged."""


@contextmanager
def start_pages(model, *, devices, address, start_timeout_s, text="", fails=""):
    """A server as a library for inference starts one: on its address, until it is left."""
    if fails:
        raise RuntimeError(f"the pages did not start: {fails}")
    with HTTPServer(address, Page) as server:
        files = sorted(f"{p.name}={p.read_text()}" for p in Path(model).iterdir())
        server.text = f"{files} {devices} {text} {start_timeout_s}".encode()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://:own@127.0.0.1:{address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def host():
    with ServerHost({"pages": start_pages}, token=TOKEN) as host:
        thread = threading.Thread(target=host.serve_forever)
        thread.start()
        yield host
        host.shutdown()
        thread.join()


def hosted(host, **changes):
    asked = {"machine": "localhost", "port": host.port, "token": TOKEN, "library": "pages"}
    return HostedServer(**{**asked, "model": {"a": b"1"}, "devices": ["2", "3"], **changes})


def read(url):
    with urllib.request.urlopen(url.replace(":own@", ""), timeout=10) as answer:
        return answer.read().decode()


def test_a_server_is_there_as_long_as_it_is_entered_and_can_be_started_again(host):
    start = hosted(host, options={"text": "said"}, start_timeout_s=7.0, number=4)
    assert start.name == "localhost, server 4"
    for _ in range(2):
        with start() as url:
            assert url.startswith("http://:own@localhost:")
            assert read(url) == "['a=1'] ['2', '3'] said 7.0"
        with pytest.raises(OSError, match="refused"):  # it ended before this goes on
            read(url)


def test_a_server_ends_with_the_connection_and_with_its_host(host):
    for killed in (True, False):
        entered = hosted(host)()
        url = entered.__enter__()
        assert read(url)
        if not killed:
            host.server_close()
        else:
            connection = entered.gen.gi_frame.f_locals["connection"]
            connection.shutdown(socket.SHUT_RDWR)  # as of a process that was killed
        deadline = time.monotonic() + 20
        while True:
            try:
                read(url)
            except OSError:
                break
            assert time.monotonic() < deadline
        entered.__exit__(None, None, None)


def test_what_fails_there_names_the_machine_and_says_why(host):
    with (
        pytest.raises(RuntimeError, match=r"localhost, server 0: RuntimeError: the pages.*smoke"),
        hosted(host, options={"fails": "smoke"})(),
    ):
        pass
    with (
        pytest.raises(RuntimeError, match=r"localhost, server 0: PermissionError: .*token"),
        hosted(host, token="another secret")(),
    ):
        pass
    with reserved_port() as nobody, pytest.raises(ConnectionError, match=f"at port {nobody} of"):
        hosted(host, port=nobody)().__enter__()
    assert TOKEN not in repr(hosted(host))


def test_a_reserved_port_is_given_to_nobody_else_and_can_be_listened_on():
    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        with HTTPServer(("0.0.0.0", port), Page) as server:
            assert server.server_address[1] == port


def test_a_short_token_is_none():
    with pytest.raises(ValueError, match="at least 16 letters"):
        ServerHost({}, token="short")
