"""vLLM's control of a weight transfer, over HTTP and in this process; see `TransferClient`."""

from collections.abc import Callable
from typing import Any


class HTTPTransferClient:
    """Of a server.

    Args:
        post: posts JSON to a route.
        rpc: calls a method of the workers.
    """

    def __init__(self, post: Callable[..., Any], rpc: Callable[..., Any]) -> None:
        self._post = post
        self._rpc = rpc

    def num_workers(self) -> int:
        """How many workers receive the weights."""
        return self._rpc("torchrl_limits")["num_workers"]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers join."""
        self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._post("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the workers receive."""
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self) -> None:
        """Let the workers load what they have received."""
        self._post("/finish_weight_update")

    def transfer_outcome(self) -> dict[str, str] | None:
        """How it went."""
        return self._rpc("torchrl_transfer_outcome")


class InProcessTransferClient:
    """Of a ``vllm.LLM`` in this process.

    Args:
        llm: runs the workers.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def num_workers(self) -> int:
        """How many workers receive the weights."""
        return self._llm.collective_rpc("torchrl_limits")[0]["num_workers"]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers join."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the workers receive."""
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self) -> None:
        """Let the workers load what they have received."""
        self._llm.finish_weight_update()

    def transfer_outcome(self) -> dict[str, str] | None:
        """How it went."""
        return self._llm.collective_rpc("torchrl_transfer_outcome")[0]
