"""Sessions of a real OpenEnv server: concurrent, bounded, and never stepped without a reset."""

import asyncio
import contextlib
import json
import socket
import time

import pytest
from process import ServerProcess

from torchrl_envs.openenv import (
    OpenEnvCapacityError,
    OpenEnvConnectionError,
    OpenEnvProtocolError,
    OpenEnvServerError,
    OpenEnvSession,
    OpenEnvTimeoutError,
    SessionNotResetError,
)
from torchrl_envs.openenv import session as session_module
from torchrl_envs.openenv.actions import fetch_schema
from torchrl_envs.openenv.session import MAX_ATTEMPTS, websocket_url


def test_an_episode(servers):
    async def episode():
        async with OpenEnvSession(f"{servers}/wordle") as session:
            first = await session.reset(word="crane")
            second = await session.step({"message": "[cargo]"})
            won = await session.step({"message": "[crane]"})
            return first, second, won, await session.state()

    first, second, won, state = asyncio.run(episode())
    assert first.observation["messages"][0]["content"].startswith("You have 6 guesses")
    assert "C A R G O\nG Y Y X X" in second.observation["messages"][0]["content"]
    assert (second.reward, second.done) == (0.0, False)
    assert (won.reward, won.done) == (1.0, True)
    assert state["step_count"] == 2


def test_64_sessions_step_at_once(servers):
    async def run():
        sessions = [OpenEnvSession(f"{servers}/echo") for _ in range(64)]
        firsts = await asyncio.gather(*(s.reset(seed=i) for i, s in enumerate(sessions)))
        before = time.monotonic()
        for turn in range(2):
            results = await asyncio.gather(
                *(
                    s.step({"message": f"{i}.{turn}", "sleep_s": 0.5})
                    for i, s in enumerate(sessions)
                )
            )
        elapsed = time.monotonic() - before
        await asyncio.gather(*(s.close() for s in sessions))
        return firsts, results, elapsed

    firsts, results, elapsed = asyncio.run(run())
    assert [r.observation["echoed_message"] for r in firsts] == [
        f"ready, seed {i}" for i in range(64)
    ]
    # Each row talked to an environment of its own: its second step, its own words.
    assert [(r.observation["echoed_message"], r.observation["num_steps"]) for r in results] == [
        (f"{i}.1", 2) for i in range(64)
    ]
    assert elapsed < 16  # one after the other they would sleep for 64 s


def test_a_step_needs_a_reset(servers):
    async def run():
        async with OpenEnvSession(f"{servers}/echo") as session:
            with pytest.raises(SessionNotResetError, match=r"step .* was not|is dead"):
                await session.step({"message": "hi"})
            await session.reset()
            await session.close()
            with pytest.raises(SessionNotResetError):
                await session.step({"message": "hi"})

    asyncio.run(run())


def test_after_a_missed_deadline_the_session_is_dead_until_reset(servers):
    async def run():
        async with OpenEnvSession(f"{servers}/echo") as session:
            await session.reset()
            session.message_timeout_s = 0.5  # for the one that comes late
            with pytest.raises(OpenEnvTimeoutError, match=r"no answer to step within 0\.5 s"):
                await session.step({"message": "late", "sleep_s": 30.0})
            session.message_timeout_s = 60.0
            with pytest.raises(SessionNotResetError, match="is dead"):
                await session.step({"message": "next"})
            await session.reset(seed=3)
            return await session.step({"message": "again"})

    result = asyncio.run(run())
    # Neither the late answer nor an environment that was never reset.
    assert result.observation["echoed_message"] == "again"
    assert result.observation["num_steps"] == 1
    assert result.observation["was_reset"]


def test_a_cancelled_step_kills_the_session(servers):
    async def run():
        async with OpenEnvSession(f"{servers}/echo") as session:
            await session.reset()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await session.step({"message": "late", "sleep_s": 30.0})
            assert not session.is_reset

    asyncio.run(run())


def test_errors_of_the_environment_leave_the_session(servers):
    async def run():
        async with OpenEnvSession(f"{servers}/echo") as session:
            await session.reset()
            with pytest.raises(OpenEnvServerError, match=r"EXECUTION_ERROR: step was told to fail"):
                await session.step({"message": "x", "fail": True})
            with pytest.raises(OpenEnvServerError, match=r"message: Field required") as caught:
                await session.step({"text": "x"})
            assert caught.value.code == "VALIDATION_ERROR"
            return await session.step({"message": "x"})

    assert asyncio.run(run()).observation["num_steps"] == 1


def test_a_refused_reset_leaves_nothing_to_step(servers):
    async def run():
        async with OpenEnvSession(f"{servers}/echo") as session:
            await session.reset()
            with pytest.raises(OpenEnvServerError, match="reset was told to fail"):
                await session.reset(fail=True)
            with pytest.raises(SessionNotResetError):
                await session.step({"message": "x"})

    asyncio.run(run())


def test_capacity_is_waited_for(servers):
    async def run():
        first = OpenEnvSession(f"{servers}/single")
        await first.reset()
        impatient = OpenEnvSession(f"{servers}/single", capacity_timeout_s=0.2)
        with pytest.raises(OpenEnvCapacityError):
            await impatient.reset()
        waiting = OpenEnvSession(f"{servers}/single", capacity_timeout_s=20)
        reset = asyncio.create_task(waiting.reset(seed=1))
        await asyncio.sleep(0.3)
        assert not reset.done()
        await first.close()
        result = await reset
        await waiting.close()
        return result

    assert asyncio.run(run()).observation["echoed_message"] == "ready, seed 1"


def test_a_server_may_be_full_for_hours(monkeypatch):
    from websockets.asyncio.server import serve

    num_asked = 0

    async def talk(connection):
        nonlocal num_asked
        num_asked += 1
        await connection.recv()
        full = {"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}
        free = {"type": "observation", "data": {"observation": {"said": "welcome"}}}
        await connection.send(json.dumps(full if num_asked <= 1100 else free))
        await connection.wait_closed()

    async def run():
        async with serve(talk, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            session = OpenEnvSession(f"ws://127.0.0.1:{port}", capacity_timeout_s=3600)
            result = await session.reset()
            await session.close()
            return result

    # 2 to the power of 1100 is no float: pauses that doubled with each attempt ended the wait.
    monkeypatch.setattr(session_module, "_LAST_PAUSE_S", 0.0)
    assert asyncio.run(run()).observation == {"said": "welcome"}


def test_a_killed_server_is_an_error_and_no_process_is_left():
    with ServerProcess(echo="echo:4") as server:

        async def run():
            async with OpenEnvSession(f"{server.url}/echo") as session:
                await session.reset()
                with pytest.raises(OpenEnvConnectionError, match="connection lost in step"):
                    await session.step({"message": "x", "kill_server": True})
                assert await asyncio.to_thread(server.process.wait, 60) == 1
                with pytest.raises(OpenEnvConnectionError, match="no connection"):
                    await session.reset()

        asyncio.run(run())


class BrokenServer:
    """Accepts connections, answers what it is told to and counts."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.num_connections = 0
        self.tasks = []

    async def handle(self, reader, writer):
        self.num_connections += 1
        self.tasks.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            if self.answer:
                writer.write(self.answer)
                await writer.drain()
            else:
                await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *exception):
        self.server.close()
        await asyncio.gather(*self.tasks)


@pytest.mark.parametrize(
    ("answer", "num_attempts", "timeout_s"),
    [
        pytest.param(
            b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", MAX_ATTEMPTS, 60.0, id="503"
        ),
        pytest.param(b"", MAX_ATTEMPTS, 0.3, id="half-open: accepts and says nothing"),
        pytest.param(
            b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n", 1, 60.0, id="403: not tried again"
        ),
    ],
)
def test_what_is_tried_again(answer, num_attempts, timeout_s):
    async def run():
        async with BrokenServer(answer) as server:
            session = OpenEnvSession(server.url, connect_timeout_s=timeout_s)
            with pytest.raises(OpenEnvConnectionError, match="no connection"):
                await session.reset()
            return server.num_connections

    assert asyncio.run(run()) == num_attempts


def test_a_server_that_speaks_another_protocol():
    from websockets.asyncio.server import serve

    async def talk(connection):
        await connection.recv()
        await connection.send('{"type": "state", "data": {}}')
        await connection.wait_closed()

    async def run():
        async with serve(talk, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            session = OpenEnvSession(f"ws://127.0.0.1:{port}")
            with pytest.raises(OpenEnvProtocolError, match="answered 'reset' with"):
                await session.reset()
            assert not session.is_reset

    asyncio.run(run())


def test_no_server_at_all():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(OpenEnvConnectionError, match="no connection"):
        asyncio.run(OpenEnvSession(url, connect_timeout_s=1).reset())


def test_A18_no_error_shows_a_password():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{probe.getsockname()[1]}"
    url = f"http://user:hunter2@{host}/env?token=hunter2"
    session = OpenEnvSession(url, connect_timeout_s=1)
    with pytest.raises(OpenEnvConnectionError, match=f"^ws://{host}/env/ws: ") as reset:
        asyncio.run(session.reset())
    with pytest.raises(SessionNotResetError) as step:
        asyncio.run(session.step({}))
    with pytest.raises(OpenEnvConnectionError, match=f"^http://{host}/env/schema: ") as schema:
        fetch_schema(session.url, 1.0)
    with pytest.raises(ValueError, match="got 'ftp://h/'") as scheme:
        OpenEnvSession("ftp://user:hunter2@h/?token=hunter2")
    for error in (reset.value, step.value, schema.value, scheme.value):
        while error is not None:
            assert "hunter2" not in f"{error}{error!r}"
            error = error.__cause__ or error.__context__


def test_a_package_that_is_missing_is_named_before_anything_runs(monkeypatch):
    monkeypatch.setattr(session_module, "find_spec", {}.get)
    wanted = r"needs websockets, .*pip install torchrl-agents\[tools\]"
    with pytest.raises(ImportError, match=wanted):
        OpenEnvSession("http://localhost:8000")


def test_mcp_tools_are_listed(servers):
    async def run():
        async with OpenEnvSession(f"{servers}/calculator") as session:
            tools = await session.list_tools()
        async with OpenEnvSession(f"{servers}/echo") as session:
            return tools, await session.list_tools()

    tools, none = asyncio.run(run())
    assert [tool["name"] for tool in tools] == ["add", "last"]
    assert none == []


@pytest.mark.parametrize(
    ("base_url", "expected"),
    [
        ("http://host:8000/", "ws://host:8000/ws"),
        ("https://host/env", "wss://host/env/ws"),
        ("ws://host?session=1", "ws://host/ws?session=1"),
    ],
)
def test_urls(base_url, expected):
    assert websocket_url(base_url) == expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"base_url": "localhost:8000"}, "base_url must be http://"),
        ({"base_url": "http://"}, "and a host"),
        ({"base_url": "http://h", "message_timeout_s": 0}, r"message_timeout_s must be .*\(0, inf"),
        ({"base_url": "http://h", "capacity_timeout_s": float("nan")}, "capacity_timeout_s"),
    ],
)
def test_bad_settings(arguments, named):
    with pytest.raises(ValueError, match=named):
        OpenEnvSession(**arguments)
