"""The engine of this process, served to asyncio: streams, aborts, and updates in flight.

One thread steps vLLM while there are requests, and runs commands (new requests, aborts, weight
updates) between two steps. So a command never meets a step half done, and the version of each
token is exact.
"""

import asyncio
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from torchrl_modules.engines.protocol import EngineDied, Generation
from torchrl_modules.sampling.params import SamplingParameters

from .base import Row
from .engine import VLLMEngine
from .requests import read_output
from .stream import Delta, GenerationStream, RespondingEngine, VersionedGeneration

T = TypeVar("T")
_CLOSE_TIMEOUT_S = 10.0


class _Command(NamedTuple):
    run: Callable[[], object]
    """Called between two steps."""
    refuse: Callable[[BaseException], object]
    """Called instead, or after it raised, when the engine ends."""


class AsyncVLLMEngine(RespondingEngine):
    """Draws many responses at once, each with its own stream; none waits for another.

    It has the engine to itself until it is closed; the engine can be used again after that.
    Sampling draws from the generator of the device from a thread of its own, so a seed does not
    make it repeat.

    Args:
        engine: steps are made in this one.
        stall_timeout_s: an engine that has requests, is not paused and makes no step for so long
            is taken for stuck.
        update_timeout_s: the same for a command between two steps, such as loading weights.

    Raises:
        RuntimeError: the engine is closed or in use elsewhere.
    """

    def __init__(
        self,
        engine: VLLMEngine,
        *,
        stall_timeout_s: float = 30.0,
        update_timeout_s: float = 600.0,
    ) -> None:
        self._engine = self._inside = engine
        self._lease = ExitStack()
        self._llm_engine: Any = self._lease.enter_context(engine.used_by("AsyncVLLMEngine"))
        self._stall_timeout_s = stall_timeout_s
        self._update_timeout_s = update_timeout_s
        self._in_command = False
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._streams: dict[str, GenerationStream] = {}
        self._paused = self._closing = False
        self._error: BaseException | None = None
        self._gate = threading.Lock()
        self._progress_s = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="vllm-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        *,
        max_new_tokens: int | None = None,
    ) -> GenerationStream:
        """Begin a response; to be called in an event loop.

        Args:
            prompt: token ids. One that cannot be served ends with ``finish_reason="error"``.
            params: the distribution, as for `VLLMEngine.generate`.
            max_new_tokens: overrides the budget in ``params``.

        Returns:
            The stream of its tokens.

        Raises:
            EngineDied: the engine died.
            RuntimeError: it is closed.
            ValueError: the engine can't draw from this distribution.
        """
        return self._submit(self._row(prompt, params, max_new_tokens), params)

    def _submit(self, row: Row, params: SamplingParameters) -> GenerationStream:
        stream = GenerationStream(
            self._request_abort, self._check_progress, self._stall_timeout_s, params.stop_matcher
        )

        def add() -> None:
            try:
                request_id = self._engine.submit(row, params, stream=True)
            except ValueError as error:
                self._send(stream, Generation([], [], "error", str(error)))
            else:
                stream.request_id = request_id
                self._streams[request_id] = stream

        self._put(_Command(add, lambda error: self._send(stream, _died(error))))
        return stream

    async def draw(self, row: Row, params: SamplingParameters) -> VersionedGeneration:
        """Draw one response as `generate` does, with a seed of its own."""
        async with self._submit(row, params) as stream:
            return await stream.result()

    async def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        recompute: bool = True,
    ) -> None:
        """Replace the weights, all or none, between two tokens of the responses in flight.

        Args:
            state_dict: as for `VLLMEngine.update_weights`.
            version: as for `VLLMEngine.update_weights`.
            recompute: responses in flight go on as if the new weights had read their tokens so
                far, and the log-probs of their further tokens are those of the new weights.
                ``False`` keeps the old weights' cache, which is faster, and the log-probs are of
                neither version alone. New requests never meet the old cache.

        Raises:
            UpdateRefused: as for `VLLMEngine.update_weights`; the old weights keep serving.
            EngineDied: the engine died.
            RuntimeError: it is closed.
        """

        def update() -> None:
            self._settle()
            self._engine.load(state_dict, version)
            if recompute:
                self._llm_engine.reset_prefix_cache(reset_running_requests=True)

        await self._call(update)

    async def pause(self) -> None:
        """Stop making steps; requests wait, and new ones are taken on. Raises as `submit`."""
        await self._call(lambda: self._set_paused(True))

    async def resume(self) -> None:
        """Go on after `pause`. Raises as `submit`."""
        await self._call(lambda: self._set_paused(False))

    async def check_health(self) -> None:
        """Say whether it is there.

        Raises:
            EngineDied: it died.
            RuntimeError: it is closed.
        """
        self._check_alive()

    def close(self) -> None:
        """Abort what is in flight, end the thread and give the engine back. May be called twice.

        Raises:
            EngineDied: a step, or a command between two, does not end; the engine stays in use.
        """
        with self._gate:
            self._closing = True
            self._commands.put(_Command(lambda: None, lambda _: None))  # wakes the thread
        timeout_s = self._update_timeout_s if self._in_command else self._stall_timeout_s
        self._thread.join(timeout_s + _CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise EngineDied(
                f"AsyncVLLMEngine: its thread has not ended {timeout_s + _CLOSE_TIMEOUT_S:.0f} s "
                "after it was closed. It is stuck; end this process."
            )
        self._lease.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.close)

    # The caller's side.

    async def _call(self, function: Callable[[], T]) -> T:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
                if self._engine.mixed:
                    raise

        def refuse(error: BaseException) -> None:
            if not future.done():
                future.set_exception(_died(error))

        self._put(_Command(run, refuse))
        done = asyncio.wrap_future(future)
        while not (await asyncio.wait({done}, timeout=self._stall_timeout_s))[0]:
            self._check_progress()
        return done.result()

    def _put(self, command: _Command) -> None:
        with self._gate:  # Once the thread has ended, nobody would run it.
            self._check_alive()
            self._commands.put(command)

    def _request_abort(self, stream: GenerationStream) -> None:
        self._commands.put(_Command(lambda: self._abort(stream), lambda _: None))

    def _check_alive(self) -> None:
        if self._error is not None:
            raise _died(self._error)
        if self._closing:
            raise RuntimeError("AsyncVLLMEngine is closed.")

    def _check_progress(self) -> None:
        self._check_alive()
        name = "update_timeout_s" if self._in_command else "stall_timeout_s"
        timeout_s = self._update_timeout_s if self._in_command else self._stall_timeout_s
        idle_s = time.monotonic() - self._progress_s
        if idle_s >= timeout_s and (self._in_command or not self._paused):
            raise EngineDied(
                f"AsyncVLLMEngine has made no step for {idle_s:.0f} s, though it has requests. It "
                f"is stuck; end this process, or raise {name} if it may take longer."
            )

    # The thread's side.

    def _serve(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        try:
            while not self._closing:
                self._run_commands()
                if self._streams and not self._paused and not self._closing:
                    self._step()
        except BaseException as error:
            self._error = error
            if not self._engine.mixed:
                self._engine.fail(f"a step failed: {error!r}")
        self._end_all()

    def _run_commands(self) -> None:
        waiting = self._paused or not self._streams
        while not self._closing:
            try:
                command = self._commands.get(block=waiting)
            except queue.Empty:
                return
            # The order lets nobody take a command's time for a step's, or the other way round.
            self._progress_s = time.monotonic()
            self._in_command = True
            try:
                command.run()
            except BaseException as error:
                command.refuse(error)
                raise
            self._progress_s = time.monotonic()
            self._in_command = False
            waiting = False

    def _step(self) -> None:
        version = self._engine.version
        sent: dict[asyncio.AbstractEventLoop, list[tuple[GenerationStream, Any]]]
        sent = defaultdict(list)
        for output in self._llm_engine.step():
            stream = self._streams.get(output.request_id)
            if stream is None:  # aborted
                continue
            new = read_output(output)
            if new.ids:
                sent[stream.loop].append((stream, Delta(new.ids, new.log_probs, version)))
            completed = stream.completes_stop_string(new.ids)
            if completed and not output.finished:
                self._llm_engine.abort_request([output.request_id])
            if completed or output.finished:
                del self._streams[output.request_id]
                reason = "stop" if completed else new.finish_reason
                end = Generation([], [], reason, new.error)
                sent[stream.loop].append((stream, end))
        self._progress_s = time.monotonic()
        for loop, items in sent.items():
            self._post(loop, items)

    def _settle(self) -> None:
        # With asynchronous scheduling (GPU) a step may be under way: its tokens are of the old
        # weights and have to be sent as such.
        core = self._llm_engine.engine_core.engine_core
        if not core.batch_queue:
            return
        core.pause_scheduler("keep", clear_cache=False)
        try:
            while core.batch_queue:
                self._step()
        finally:
            core.resume_scheduler()

    def _abort(self, stream: GenerationStream) -> None:
        if stream.request_id is None or self._streams.pop(stream.request_id, None) is None:
            return
        self._llm_engine.abort_request([stream.request_id])
        self._send(stream, Generation([], [], "abort"))

    def _set_paused(self, paused: bool) -> None:
        self._progress_s = time.monotonic()  # before anybody can take the pause for a stall
        self._paused = paused

    def _end_all(self) -> None:
        with self._gate:
            self._closing = True
        for stream in list(self._streams.values()):
            if self._error is not None:
                self._send(stream, _died(self._error))
            if self._error is None or self._engine.mixed:
                self._abort(stream)  # Its weights may be repaired: leave no request behind.
        while not self._commands.empty():
            self._commands.get().refuse(self._error or RuntimeError("it was closed"))

    def _send(self, stream: GenerationStream, item: "Generation | BaseException") -> None:
        self._post(stream.loop, [(stream, item)])

    def _post(
        self, loop: asyncio.AbstractEventLoop, items: list[tuple[GenerationStream, Any]]
    ) -> None:
        try:
            loop.call_soon_threadsafe(_deliver, items)
        except RuntimeError:  # The loop is closed, and nobody waits for these.
            for stream, _ in items:
                if stream.request_id in self._streams:
                    del self._streams[stream.request_id]
                    self._llm_engine.abort_request([stream.request_id])


def _deliver(items: list[tuple[GenerationStream, Any]]) -> None:
    for stream, item in items:
        stream.deliver(item)


def _died(error: BaseException) -> EngineDied:
    return EngineDied(f"AsyncVLLMEngine: the engine has ended: {error!r}.")
