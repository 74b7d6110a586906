"""An environment whose actions are tools of MCP."""

from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server import Observation, State
from openenv.core.env_server.mcp_environment import MCPEnvironment


class Calculator(MCPEnvironment):
    """Adds, and keeps the last sum."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("calculator")
        self._last = 0

        @server.tool
        def add(a: int, b: int) -> str:
            """Add two integers."""
            self._last = a + b
            return str(self._last)

        @server.tool
        def last() -> str:
            """The last sum."""
            return str(self._last)

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        self._last = 0
        return Observation(metadata={"text": "ready"})

    def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        raise ValueError(f"not a tool call: {action}")

    @property
    def state(self) -> State:
        return State()
