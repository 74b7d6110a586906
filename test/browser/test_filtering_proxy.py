"""The proxy by itself: who may use it, and where it connects."""

import asyncio
import base64

import pytest

from torchrl_envs.browser.allowed_hosts import AllowedHosts
from torchrl_envs.browser.filtering_proxy import FilteringProxy


@pytest.mark.parametrize(
    ("target", "password", "status"),
    [
        ("GET http://127.0.0.1:{good}/", "right", "200"),
        ("CONNECT 127.0.0.1:{good}", "right", "200"),
        ("GET http://127.0.0.1:{good}/", "wrong", "407"),
        ("GET http://127.0.0.1:{good}/", None, "407"),
        ("GET http://127.0.0.1:{other}/", "right", "403"),
        ("CONNECT 127.0.0.1:{other}", "right", "403"),
        ("GET http://2130706433:{good}/", "right", "403"),
        ("GET file:///etc/passwd", "right", "400"),
        ("GET /", "right", "400"),
        ("nonsense", "right", "400"),
    ],
)
def test_answers(target, password, status):
    seen = []

    async def serve(reader, writer):
        seen.append(await reader.readuntil(b"\r\n\r\n") if target.startswith("GET") else b"")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def ask():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        good = server.sockets[0].getsockname()[1]
        proxy = FilteringProxy(AllowedHosts([f"127.0.0.1:{good}"]))
        await proxy.start()
        try:
            port = int(proxy.url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            given = {"right": proxy.password, "wrong": "x"}.get(password)
            line = f"{target.format(good=good, other=port)} HTTP/1.1\r\n"
            if given is not None:
                token = base64.b64encode(f"browser:{given}".encode()).decode()
                line += f"Proxy-Authorization: Basic {token}\r\n"
            writer.write(f"{line}\r\n".encode())
            answer = await asyncio.wait_for(reader.readline(), 10)
            writer.close()
            return answer.decode()
        finally:
            await proxy.close()
            server.close()

    assert asyncio.run(ask()).split(" ")[1] == status
    assert len(seen) == (status == "200")
    assert b"roxy" not in b"".join(seen)
