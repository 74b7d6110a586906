"""A real MCP server: over stdio, or over HTTP on a port of the loopback (``python FILE PORT``)."""

import asyncio
import os
import signal
import subprocess
import sys
import time

from mcp.server import MCPServer


def stop() -> None:
    """Stop the server's process in the middle of a call, which does not end."""
    os.kill(os.getpid(), signal.SIGSTOP)


def build() -> MCPServer:
    """The server."""
    server = MCPServer("test", log_level="CRITICAL")
    state = {"count": 0}

    @server.tool()
    def add(a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    def count() -> int:
        """How often this was called."""
        state["count"] += 1
        return state["count"]

    @server.tool()
    def pid() -> int:
        """The server's process."""
        return os.getpid()

    @server.tool()
    def fail() -> str:
        """Fail."""
        raise ValueError("no such file")

    @server.tool()
    def die() -> str:
        """End the server's process in the middle of a call."""
        os._exit(1)

    server.tool()(stop)

    @server.tool()
    async def pause(seconds: float) -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return "rested"

    @server.tool()
    def say(text: str, times: int) -> str:
        """Repeat a text."""
        return text * times

    @server.tool()
    def change() -> str:
        """Offer ``add`` with other arguments from now on."""

        def other(x: str) -> str:
            return x

        server.remove_tool("add")
        server.add_tool(other, name="add", description="Add two numbers.")
        return "changed"

    return server


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "mute":
        time.sleep(600)
    elif len(sys.argv) > 1 and sys.argv[1] == "stubborn":
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        build().run("stdio")
        time.sleep(600)
    elif len(sys.argv) > 1:
        build().run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        if os.environ.get("NOISE"):
            sys.stdout.write("not a message\n")
            sys.stdout.flush()
        build().run("stdio")
