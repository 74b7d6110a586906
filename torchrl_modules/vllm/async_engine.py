"""The engine of this process, served to asyncio: streams, aborts, and updates in flight.

An `EngineThread` steps vLLM while there are requests, and runs commands (new requests, aborts,
weight updates) between two steps. So the version of each token is exact.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor

from torchrl_modules.engines.engine import EngineLoad, Generation
from torchrl_modules.engines.engine_thread import EngineThread, SteppedEngine
from torchrl_modules.engines.responding_engine import RespondingEngine
from torchrl_modules.engines.whole_batch_engine import KeptAdapters, Row
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.weights.adapter_weights import AdapterWeights

from .engine import VLLMEngine
from .generation_stream import Delta, GenerationStream
from .requests import read_output


class AsyncVLLMEngine(SteppedEngine, RespondingEngine):
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
        self, engine: VLLMEngine, *, stall_timeout_s: float = 30.0, update_timeout_s: float = 600.0
    ) -> None:
        self._engine = self._inside = engine
        with ExitStack() as lease:
            llm_engine: Any = lease.enter_context(engine.used_by("AsyncVLLMEngine"))
            self._steps = _Steps(engine, llm_engine)
            self._thread = EngineThread(
                self._steps,
                who="AsyncVLLMEngine",
                stall_timeout_s=stall_timeout_s,
                command_timeout_s=update_timeout_s,
            )
            self._lease = lease.pop_all()
        if torch.cuda.is_initialized():
            device = torch.cuda.current_device()  # the caller's, and not the thread's own
            self._thread.put(lambda: torch.cuda.set_device(device), lambda _: None)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        *,
        max_new_tokens: int | None = None,
        images: Sequence[str] = (),
    ) -> GenerationStream:
        """Begin a response; to be called in an event loop.

        Args:
            prompt: token ids. One that cannot be served ends with ``finish_reason="error"``.
            params: the distribution, as for `VLLMEngine.generate`.
            max_new_tokens: overrides the budget in ``params``.
            images: of the prompt in order, in base 64.

        Returns:
            The stream of its tokens.

        Raises:
            EngineDied: the engine died.
            RuntimeError: it is closed.
            ValueError: the engine can't draw from this distribution.
        """
        return self._submit(self._row(prompt, params, max_new_tokens, images), params)

    def _submit(self, row: Row, params: SamplingParameters) -> GenerationStream:
        steps = self._steps

        def abort(stream: GenerationStream) -> None:
            with suppress(RuntimeError):  # The engine has ended, and so has the stream.
                self._thread.put(lambda: steps.abort(stream), lambda _: None)

        stream = GenerationStream(
            abort, self._thread.check_progress, self._thread.stall_timeout_s, params.stop_matcher
        )
        self._thread.put(
            lambda: steps.add(stream, row, params), lambda error: steps.send(stream, error)
        )
        return stream

    async def draw(self, row: Row, params: SamplingParameters) -> Generation:
        """See `RespondingEngine.draw`."""
        async with self._submit(row, params) as stream:
            drawn = await stream.result()
        return drawn.generation._replace(versions=drawn.versions)

    async def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        recompute: bool = True,
    ) -> None:
        """Replace the weights, all or none, between two tokens of the responses in flight.

        Args:
            state_dict: as for `VLLMEngine.update_weights`. With adapters responses in flight are
                drawn to their ends by those that they began with.
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
            self._steps.settle()
            self._engine.load(state_dict, version)
            if recompute and not isinstance(state_dict, AdapterWeights):
                self._steps.forget()

        await self._thread.call(update, spares=lambda _: not self._engine.mixed)

    async def keep_adapters(self, weights: AdapterWeights) -> KeptAdapters:
        """See `WholeBatchEngine.keep_adapters`."""
        return await self._thread.call(
            lambda: self._engine.load_kept(weights), spares=lambda _: True
        )

    async def drop_adapters(self, kept: KeptAdapters) -> None:
        """See `WholeBatchEngine.drop_adapters`."""
        await self._thread.call(lambda: self._engine.unload_kept(kept), spares=lambda _: True)

    tells_load = can_keep_caches = True
    """`measure_load` may be called, and `update_weights` takes ``recompute=False``."""

    async def measure_load(self) -> EngineLoad:
        """Return how full the cache is between two steps. Raises as `submit`."""
        return await self._thread.call(self._steps.measure_load, spares=lambda _: True)

    def close(self) -> None:
        """Abort what is in flight, end the thread and give the engine back. May be called twice.

        Raises:
            EngineDied: a step, or a command between two, does not end; the engine stays in use.
        """
        self._thread.close()
        self._lease.close()


class _Steps:
    """Part that the thread steps; called in that thread alone."""

    def __init__(self, engine: VLLMEngine, llm_engine: Any) -> None:
        self._engine = engine
        self._llm_engine = llm_engine
        self._streams: dict[str, GenerationStream] = {}
        self._scheduler = llm_engine.engine_core.engine_core.scheduler
        self._preempted: dict[str, int] = {}  # how often each request was, at the last look
        self._num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether anybody waits for tokens."""
        return bool(self._streams)

    def add(self, stream: GenerationStream, row: Row, params: SamplingParameters) -> None:
        """Begin a response."""
        try:
            request_id = self._engine.submit(row, params, stream=True)
        except ValueError as error:
            self.send(stream, Generation([], [], "error", str(error)))
        else:
            stream.request_id, stream.has_masks = request_id, params.sampling_mask
            if self._engine.max_adapters:  # it keeps them to its end
                stream.version = self._engine.version
            self._streams[request_id] = stream

    def step(self) -> None:
        """A step; its tokens are sent to those who wait for them."""
        now = self._engine.version
        sent: dict[asyncio.AbstractEventLoop, list[Any]] = defaultdict(list)
        outputs = self._engine.step()
        self._num_preemptions += self._newly_preempted()
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:  # aborted
                continue
            new = read_output(output, self._engine.masks if stream.has_masks else None)
            if new.ids:
                version = now if stream.version is None else stream.version
                delta = Delta(new.ids, new.log_probs, version, new.sampling_masks)
                sent[stream.loop].append((stream, delta))
            completed = stream.completes_stop_string(new.ids)
            if completed and not output.finished:
                self._llm_engine.abort_request([output.request_id])
            if completed or output.finished:
                del self._streams[output.request_id]
                reason = "stop" if completed else new.finish_reason
                sent[stream.loop].append((stream, Generation([], [], reason, new.error)))
        for loop, items in sent.items():
            self._post(loop, items)

    def settle(self) -> None:
        """Send what is under way, of the weights that drew it."""
        # With asynchronous scheduling (GPU) a step may be.
        core = self._llm_engine.engine_core.engine_core
        if not core.batch_queue:
            return
        core.pause_scheduler("keep", clear_cache=False)
        try:
            while core.batch_queue:
                self.step()
        finally:
            core.resume_scheduler()

    def forget(self) -> None:
        """Let running requests be read again, by the weights as they are now."""
        self._llm_engine.reset_prefix_cache(reset_running_requests=True)
        self._engine.forget_images()
        self._newly_preempted()  # not for want of room

    def measure_load(self) -> EngineLoad:
        """Return how full the cache is."""
        return EngineLoad(self._scheduler.kv_cache_manager.usage, self._num_preemptions)

    def _newly_preempted(self) -> int:
        """Return how many requests were preempted since the last look."""
        now = {name: each.num_preemptions for name, each in self._scheduler.requests.items()}
        before, self._preempted = self._preempted, now
        return sum(number - before.get(name, 0) for name, number in now.items())

    def abort(self, stream: GenerationStream) -> None:
        """Let a request go."""
        if stream.request_id is None or self._streams.pop(stream.request_id, None) is None:
            return
        self._llm_engine.abort_request([stream.request_id])
        self.send(stream, Generation([], [], "abort"))

    def end(self, error: BaseException | None) -> None:
        """Everybody who waits is told, and who asks later."""
        if error is not None and not self._engine.mixed:
            self._engine.fail(f"a step failed: {error.__cause__!r}")
        for stream in list(self._streams.values()):
            if error is not None:
                self.send(stream, error)
            if error is None or self._engine.mixed:
                self.abort(stream)  # Its weights may be repaired: leave no request behind.

    def send(self, stream: GenerationStream, item: "Generation | BaseException") -> None:
        """Hand over what ends a response."""
        self._post(stream.loop, [(stream, item)])

    def _post(
        self, loop: asyncio.AbstractEventLoop, items: list[tuple[GenerationStream, Any]]
    ) -> None:

        def deliver() -> None:
            for stream, item in items:
                stream.deliver(item)

        try:
            loop.call_soon_threadsafe(deliver)
        except RuntimeError:  # The loop is closed, and nobody waits for these.
            for stream, _ in items:
                if stream.request_id in self._streams:
                    del self._streams[stream.request_id]
                    self._llm_engine.abort_request([stream.request_id])
