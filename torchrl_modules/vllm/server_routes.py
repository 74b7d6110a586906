"""Routes of a vLLM server that an engine asks."""

import asyncio
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

import torch

from torchrl_modules.engines.engine import EngineDied, EngineLoad
from torchrl_modules.engines.engine_load import read_load
from torchrl_modules.engines.json_client import AnswerTimeout, JSONClient
from torchrl_modules.weight_transfer.broadcast_group import own_address
from torchrl_modules.weight_transfer.c10d import C10dWeightTransfer


class Turnstile:
    """Lets rows through; held, it lets those inside end and others wait. In one event loop."""

    def __init__(self) -> None:
        self._inside = 0
        self._is_open, self._is_empty = asyncio.Event(), asyncio.Event()
        self._is_open.set()
        self._is_empty.set()

    async def __aenter__(self) -> None:
        while not self._is_open.is_set():
            await self._is_open.wait()
        self._inside += 1
        self._is_empty.clear()

    async def __aexit__(self, *exc_info: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._is_empty.set()

    async def hold(self) -> None:
        """Wait until nobody is inside; whoever comes waits for `release`."""
        self._is_open.clear()
        await self._is_empty.wait()

    async def release(self) -> None:
        """Let those who wait go on."""
        self._is_open.set()


class ServerRoutes:
    """Asks a server, and says what it answers; meets its workers."""

    _client: JSONClient
    _prober: JSONClient
    _missing = ""
    _lock: threading.Lock
    mixed = _sleeps = _broadcasts = False
    max_adapters = 0
    _transfer: C10dWeightTransfer | None = None
    _meeting: Mapping[str, Any] = {}

    def _check_health(self) -> None:
        status, _ = self._prober.request("GET", "/health")
        if status != 200:
            raise ConnectionError(f"The engine behind {self._prober.url} has died ({status}).")

    def check_health(self) -> None:
        """Ask the server whether it is well; ``EngineDied``, ``AnswerTimeout``: it is not."""
        try:
            self._check_health()
        except AnswerTimeout:
            raise
        except ConnectionError as error:
            raise EngineDied(f"VLLMServerEngine: {error}") from error

    def _read_metrics(self) -> str:
        return str(self._prober.request("GET", "/metrics")[1])

    @property
    def tells_load(self) -> bool:
        """Whether the server reports how full its cache is; it is asked."""
        return read_load(self._read_metrics()) is not None

    def measure_load(self) -> EngineLoad:
        """Load of the fullest of its caches; recomputing after an update is preemption, too.

        Raises:
            ConnectionError: it did not answer.
            RuntimeError: it does not report that.
        """
        load = read_load(self._read_metrics())
        if load is None:
            raise RuntimeError(f"VLLMServerEngine: {self._prober.url}/metrics tells no load.")
        return load

    def _rpc(self, method: str, *args: Any) -> dict[str, Any]:
        results = self._post("/collective_rpc", {"method": method, "args": list(args)})["results"]
        kinds = {str(list(result)) for result in results}
        if len(kinds) > 1:
            return {"failed": f"the workers' answers to {method} differ: {results}"}
        return results[0]

    def _post(self, path: str, body: object = None, *, method: str = "POST", **query: str) -> Any:
        if query:
            path = f"{path}?{urlencode(query)}"
        status, answer = self._client.request(method, path, body)
        if status != 200:
            raise RuntimeError(
                f"VLLMServerEngine: {path} at {self._client.url} answers {status}: {answer}. Was "
                "the server started by `python -m torchrl_modules.vllm.server`?"
            )
        return answer

    def _check_updatable(self) -> None:
        if self._missing:
            raise RuntimeError(
                f"VLLMServerEngine: the server at {self._client.url} can be drawn from, but its "
                f"weights can't be updated: it lacks {self._missing}. Start it with the same "
                "options by `python -m torchrl_modules.vllm.server`, which adds it."
            )

    def join(
        self,
        *,
        master_address: str | None = None,
        master_port: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Meet the server's workers, to which all later updates are broadcast, a bucket at a time.

        By NCCL between GPUs and by gloo between CPUs, of one or several machines; the workers take
        their shares of each bucket as it comes. An update that breaks off leaves the server
        paused; the next one meets anew. Without this call, the first update that is broadcast does
        it (``weight_transfer``).

        Args:
            master_address: of this process, as the workers reach it; the address of this machine on
                the way to the server when not given.
            master_port: where they meet; a free one when not given.
            device: what sends; this process's GPU where it has one and the workers compute on GPUs.

        Raises:
            RuntimeError: the server is a plain ``vllm serve``, or the workers did not come.
        """
        self._check_updatable()
        self.leave()
        self._broadcasts = True
        host = urlsplit(self._client.url).hostname or "127.0.0.1"
        self._meeting = {
            "master_address": master_address or own_address(host),
            "master_port": master_port,
            "device": device,
        }
        self._transfer = C10dWeightTransfer(self._rpc, **self._meeting)

    def leave(self) -> None:
        """Close the group that :meth:`join` opened. May be called twice."""
        if self._transfer is not None:
            self._transfer.close()

    def sleep(self) -> None:
        """Lend the memory of the weights and the cache, until the next update wakes it.

        The weights are forgotten (vLLM's level 2); those under adapters wait in the host's memory
        (level 1). The server of a GPU has to be started with
        ``--enable-sleep-mode``.

        Raises:
            ConnectionError: the server is gone.
            RuntimeError: it is a plain ``vllm serve``, or can't sleep.
        """
        self._check_updatable()
        with self._lock:
            self._post("/sleep", level="1" if self.max_adapters else "2")
            self.mixed = self._sleeps = True

    def wake(self) -> None:
        """Take the memory back that `sleep` lent, with the weights under adapters as they were.

        A server that is awake stays as it is.

        Raises:
            ConnectionError: the server is gone.
            RuntimeError: it takes whole weights, which it has forgotten: an update wakes it.
        """
        with self._lock:
            if not self._sleeps:
                return
            if not self.max_adapters:
                raise RuntimeError(
                    "VLLMServerEngine.wake: the server has forgotten its weights. Update them, "
                    "which wakes it."
                )
            self._post("/wake_up")
            self.mixed = self._sleeps = False
