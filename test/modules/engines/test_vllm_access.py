"""Who may ask a vLLM server: its token, pages of other origins, bodies that are no JSON."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from torchrl_modules import SamplingParameters, VLLMServerEngine
from torchrl_modules.engines.json_client import JSONClient
from torchrl_modules.vllm import server
from torchrl_modules.vllm.access_control import TOKEN_VARIABLE, AccessControl

PARAMS = SamplingParameters(max_new_tokens=4, stop_token_ids=())
TOKEN = "a secret of many letters"
ROUTES = [
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/weight_info"),
    ("GET", "/v1/models"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/sleep"),
    ("POST", "/collective_rpc"),
    ("POST", "/update_weight_version"),
    ("POST", "/update_weights"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/abort_requests"),
    ("POST", "/nothing"),
    ("OPTIONS", "/pause"),
]


def ask(headers, *, method="POST", path="/pause", kind="http"):
    """The status that a guarded application answers; 200: it was let through."""
    sent = []

    async def inside(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    async def send(message):
        sent.append(message)

    scope = {
        "type": kind,
        "method": method,
        "path": path,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    asyncio.run(AccessControl(inside)(scope, None, send))
    return sent[0].get("status", sent[0].get("code"))


GOOD = {"authorization": f"Bearer {TOKEN}", "host": "127.0.0.1:8000"}
BODY = {"content-length": "2", "content-type": "application/json"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param(GOOD, 200, id="the token"),
        pytest.param({}, 401, id="none"),
        pytest.param({"authorization": TOKEN}, 401, id="no Bearer"),
        pytest.param({"authorization": f"Bearer {TOKEN}x"}, 401, id="a longer one"),
        pytest.param({"authorization": "Bearer "}, 401, id="an empty one"),
        pytest.param({"authorization": "Bearer ü"}, 401, id="letters beyond ASCII"),
        pytest.param({**GOOD, "origin": "http://evil.example"}, 403, id="a page elsewhere"),
        pytest.param({**GOOD, "origin": "null"}, 403, id="a page of a file"),
        pytest.param({**GOOD, "origin": "http://127.0.0.1:8001"}, 403, id="another port"),
        pytest.param({**GOOD, "origin": "http://127.0.0.1:8000"}, 200, id="its own page"),
        pytest.param({**GOOD, **BODY}, 200, id="JSON"),
        pytest.param(
            {**GOOD, **BODY, "content-type": "application/json; charset=utf-8"}, 200, id="charset"
        ),
        pytest.param({**GOOD, **BODY, "content-type": "text/plain"}, 415, id="text"),
        pytest.param({**GOOD, "content-length": "2"}, 415, id="a body of no type"),
        pytest.param({**GOOD, "transfer-encoding": "chunked"}, 415, id="chunks of no type"),
        pytest.param({**GOOD, "content-length": "0"}, 200, id="no body"),
    ],
)
def test_a_request_is_let_through_or_answered(monkeypatch, headers, status):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert ask(headers) == status


def test_without_a_token_a_socket_file_guards_and_pages_are_refused_still(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert ask({}) == 200
    assert ask({"origin": "http://evil.example", "host": "localhost"}) == 403
    assert ask({**BODY, "content-type": "text/plain"}) == 415


def test_a_websocket_needs_the_token_too(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert ask({}, kind="websocket") == 1008
    assert ask(GOOD, kind="websocket") == 200


GUARDED = """
import os, signal, sys, tempfile
from torchrl_modules.engines.server_process import guard_server

folder = tempfile.mkdtemp(prefix="vllm-", dir=sys.argv[1])
open(f"{folder}/socket", "w").close()
guard_server(os.getpid(), folder)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folder_of_a_server_that_is_killed_at_once_does_not_stay(tmp_path):
    """Before its guardian has looked at it."""
    command = [sys.executable, "-c", GUARDED, str(tmp_path)]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while any(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "token", "expected"),
    [
        pytest.param([], "", "--uds", id="a socket file by default"),
        pytest.param(["--uds=/x"], "", None, id="a socket file by hand"),
        pytest.param(["--port", "80"], TOKEN, None, id="a port and a token"),
        pytest.param(["--port=80"], "", SystemExit, id="a port alone"),
        pytest.param(["--host", "0.0.0.0"], "", SystemExit, id="an address alone"),
        pytest.param(["--port=80"], "short", SystemExit, id="a token that can be guessed"),
    ],
)
def test_where_a_server_listens(monkeypatch, capsys, tmp_path, words, token, expected):
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    monkeypatch.setattr(sys, "argv", ["launch", "--model", "x", *words])
    if expected is SystemExit:
        with pytest.raises(SystemExit, match=TOKEN_VARIABLE):
            server._access(server._command_line_options(), str(tmp_path))
        return
    options = server._access(server._command_line_options(), str(tmp_path))
    assert options[:2] == ["--middleware", "torchrl_modules.vllm.access_control.AccessControl"]
    assert options[2:] == ([expected, f"{tmp_path}/socket"] if expected else [])
    assert capsys.readouterr().out == (f"unix://{tmp_path}/socket\n" if expected else "")


@pytest.mark.vllm
@pytest.mark.slow
def test_every_route_of_a_real_server_asks_for_the_token(model_directory, model, other_model):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--dtype=float32", "--max-model-len=128", f"--kv-cache-memory-bytes={16 << 20}"]
    module = [sys.executable, "-m", "torchrl_modules.vllm.server"]
    process = subprocess.Popen(
        [*module, model_directory, f"--port={port}", *options],
        env=os.environ | {TOKEN_VARIABLE: TOKEN},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        engine = VLLMServerEngine(url, token=TOKEN, wait_s=240, num_connections=8)
        listening = {
            connection.laddr.ip
            for one in [process.pid, *psutil.Process(process.pid).children(recursive=True)]
            for connection in psutil.Process(getattr(one, "pid", one)).net_connections()
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}
        for token in (None, "another secret of letters"):
            stranger = JSONClient(url, 30.0, token=token)
            for method, path in ROUTES:
                assert stranger.request(method, path)[0] == 401, (method, path)
            with pytest.raises(PermissionError, match=TOKEN_VARIABLE):
                VLLMServerEngine(url, token=token)
            stranger.close()
        for headers, status in [
            ({"Origin": "http://evil.example"}, 403),
            ({"Content-Type": "text/plain"}, 415),
        ]:
            page = JSONClient(url, 30.0, token=TOKEN)
            page._headers |= headers
            rpc = {"method": "torchrl_limits", "args": []}
            assert page.request("POST", "/collective_rpc", rpc)[0] == status
            page.close()
        engine.update_weights(other_model.state_dict())
        assert engine.version == 1
        assert [row.finish_reason for row in engine.generate([[5, 6]], PARAMS)] == ["length"]
        engine.close()
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait(timeout=30)
