"""An engine in another process that is replaced when it dies, and loses no request."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrl_modules.engines.engine_state import EngineState, Supervision
from torchrl_modules.engines.load import EngineLoad
from torchrl_modules.engines.protocol import EngineDied, Generation
from torchrl_modules.sampling.params import SamplingParameters

from .base import EngineOver, Row, WholeBatchEngine
from .client import VLLMServerEngine
from .engine import VLLMEngine
from .http import Interrupt
from .launch import start_server


class SupervisedEngine(EngineOver, WholeBatchEngine):
    """An :class:`~torchrl_modules.engines.protocol.Engine` that outlives its processes.

    When the engine is killed, or draws no token for ``stall_timeout_s``, it is ended and another
    one is started; one that does not start counts as one that died. It serves once it has
    acknowledged the weights that the last one had; what was in flight is drawn again, with the same
    seeds. Rows that were finished stay.

    Args:
        start: gives a context manager that starts an engine, gives its URL, and ends it on leaving,
            such as ``partial(start_server, "Qwen/Qwen3-0.6B")``.
        max_restarts: how many engines in a row may die without finishing a row.
        client_settings: of :class:`~torchrl_modules.vllm.client.VLLMServerEngine`, for instance
            ``stall_timeout_s``.

    Raises:
        RuntimeError: the first engine can't be started.
        ValueError: ``max_restarts`` is negative.
    """

    def __init__(
        self,
        start: Callable[[], AbstractContextManager[str]],
        *,
        max_restarts: int = 3,
        **client_settings: Any,
    ) -> None:
        if max_restarts < 0:
            raise ValueError(f"SupervisedEngine: max_restarts must be at least 0: {max_restarts}.")
        self._start_process = start
        self._max_restarts = max_restarts
        self._client_settings = client_settings
        self._lock = threading.RLock()
        self._pushing = threading.Lock()
        self._process = ExitStack()
        self.url = ""
        """Of the present engine."""
        self._weights: dict[str, Tensor] | None = None
        self._failures = 0
        self._is_paused = False
        self.num_restarts = 0
        """Engines that were replaced."""
        self.supervision = Supervision()
        """What is known of the present engine."""
        self._start()

    @property
    def version(self) -> int:
        """Of the weights that serve, or that the engine gets before it serves again."""
        return self.supervision.wanted

    def _draw(self, rows: list[Row], params: SamplingParameters) -> list[Generation]:
        drawn = torch.randint(1 << 31, (len(rows),)).tolist()  # A replacement draws the same.
        seeds = [
            own if row.seed is None else row.seed for row, own in zip(rows, drawn, strict=True)
        ]
        results: list[Generation | None] = [None] * len(rows)
        while True:
            lost = [index for index, result in enumerate(results) if result is None]
            if not lost:
                return [result for result in results if result is not None]
            engine, incarnation = self._present()
            asked = [rows[index] for index in lost]
            try:
                drawn = engine.generate(
                    [row.prompt for row in asked],
                    params,
                    max_new_tokens=[row.budget for row in asked],
                    seeds=[seeds[index] for index in lost],
                )
            except EngineDied as error:
                for index, result in zip(lost, error.results or [None] * len(lost), strict=True):
                    results[index] = result
                self._replace(incarnation, error, results)
            except RuntimeError as error:
                if not engine.mixed:
                    raise
                self._replace(incarnation, error, results)
            else:
                self._failures = 0
                for index, result in zip(lost, drawn, strict=True):
                    results[index] = result

    def draw_one(self, row: Row, params: SamplingParameters, interrupt: Interrupt) -> Generation:
        """Draw one row, for a caller that may let it go; one that is lost is drawn again.

        Args:
            row: what is asked for.
            params: the distribution.
            interrupt: when it is called, the engine stops drawing, and this raises.

        Raises:
            EngineDied: it was interrupted, or too many engines died in a row.
        """
        if row.seed is None:
            row = row._replace(seed=int(torch.randint(1 << 31, ())))
        while True:
            engine, incarnation = self._present()
            try:
                generation = engine.draw_one(row, params, interrupt)
            except EngineDied as error:
                if interrupt.is_set:
                    raise
                self._replace(incarnation, error, None)
            except RuntimeError as error:
                if not engine.mixed:
                    raise
                self._replace(incarnation, error, None)
            else:
                self._failures = 0
                return generation

    def pause(self, *, paused: bool = True) -> None:
        """Draw no more tokens, or go on; an engine that takes its place does the same.

        Raises:
            EngineDied: too many engines died in a row.
        """
        with self._pushing:
            self._is_paused = paused
            engine, incarnation = self._present()
            try:
                engine.pause(paused=paused)
            except (ConnectionError, EngineDied) as error:
                self._replace(incarnation, error, None)

    def check_health(self) -> None:
        """Whether it serves, or will once its engine is replaced, which its callers see to.

        Raises:
            EngineDied: it is closed, or too many engines died in a row.
        """
        if self.supervision.state is EngineState.DEAD and self._failures > self._max_restarts:
            raise EngineDied(f"SupervisedEngine: {self._failures} engines in a row died.")

    @property
    def tells_load(self) -> bool:
        """See :attr:`VLLMServerEngine.tells_load`."""
        return self._inside.tells_load

    def measure_load(self) -> EngineLoad:
        """See :meth:`VLLMServerEngine.measure_load`; also raises while the engine is replaced."""
        return self._present()[0].measure_load()

    def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        recompute: bool = True,
    ) -> None:
        """Replace the weights, all or none; they are kept for engines to come.

        Args:
            state_dict: as for `VLLMEngine.update_weights`.
            version: as for `VLLMEngine.update_weights`.
            recompute: as for `VLLMServerEngine.update_weights`.

        Raises:
            EngineDied: too many engines died in a row.
            RuntimeError: the engine failed in the middle of loading; it is replaced by one that
                serves the old weights.
            UpdateRefused: a name, type, shape or value is wrong; the old weights keep serving.
        """
        with self._pushing:
            while not self._push(state_dict, version, recompute):
                pass

    def _push(self, state_dict: Mapping[str, Tensor], version: int | None, recompute: bool) -> bool:
        engine, incarnation = self._present()
        try:
            engine.update_weights(state_dict, version=version, recompute=recompute)
        except EngineDied as error:
            self._replace(incarnation, error, None)
            return False
        except RuntimeError as error:
            if engine.mixed:
                self._replace(incarnation, error, None)
            raise
        with self._lock:
            self._weights = {name: v.detach().cpu().clone() for name, v in state_dict.items()}
            self.supervision = self.supervision.acknowledged(incarnation, engine.version)
            self._failures = 0
        return True

    def _present(self) -> tuple[VLLMServerEngine, int]:
        with self._lock:
            if not self.supervision.may_serve:
                raise EngineDied(f"SupervisedEngine: its engine is {self.supervision.state.value}.")
            return self._inside, self.supervision.incarnation

    def _replace(
        self, incarnation: int, error: Exception, results: "list[Generation | None] | None"
    ) -> None:
        with self._lock:
            if incarnation != self.supervision.incarnation:
                return  # Somebody else has seen it die, and it is replaced already.
            if any(result is not None for result in getattr(error, "results", None) or ()):
                self._failures = 0
            while True:
                self._end()
                self._failures += 1
                if self._failures > self._max_restarts:
                    raise EngineDied(
                        f"SupervisedEngine: {self._failures} engines in a row died without "
                        f"finishing a row. The last one: {error}",
                        results=results,
                    ) from error
                self.num_restarts += 1
                try:
                    self._start()
                except Exception as next_error:  # Whatever keeps it from serving, it does not.
                    error = next_error
                else:
                    return

    def _start(self) -> None:
        """Start an engine that has the weights, or leave none behind."""
        with ExitStack() as stack:
            url = stack.enter_context(self._start_process())
            engine = VLLMServerEngine(url, **self._client_settings)
            self.supervision = self.supervision.started()
            known = self.supervision
            try:
                if self._weights is not None:
                    engine.update_weights(self._weights, version=known.wanted)
                if self._is_paused:
                    engine.pause()
            except BaseException:
                self.supervision = known.died(known.incarnation)
                engine.close()
                raise
            self.supervision = known.acknowledged(known.incarnation, engine.version)
            self.url, self._inside = url, engine
            self._process = stack.pop_all()

    def close(self) -> None:
        """End the engine. May be called twice; nobody may be waiting."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        self.supervision = self.supervision.died(self.supervision.incarnation)
        self._process.close()  # first, so that nobody waits for it any more
        self._inside.close()


class LLMOnDevice(SupervisedEngine):
    """vLLM on chosen devices, in a process of its own, which is replaced when it dies.

    TorchRL's class of this name was a ``vllm.LLM`` that could be placed when it ran as a Ray actor.
    Here the process is one of this machine, and the class is an engine for
    :class:`~torchrl_modules.vLLMWrapper`; inside a Ray actor it uses the devices of that one.

    Args:
        model: a model's id on the hub, or a directory.
        devices: the GPUs that it uses, by number or UUID; those of this process when not given.
        max_restarts: as for `SupervisedEngine`.
        stall_timeout_s: as for :class:`~torchrl_modules.vllm.client.VLLMServerEngine`.
        options: of :func:`~torchrl_modules.vllm.launch.start_server`.

    Raises:
        RuntimeError: the engine can't be started.
    """

    def __init__(
        self,
        model: str,
        *,
        devices: Sequence[int | str] | None = None,
        max_restarts: int = 3,
        stall_timeout_s: float = 30.0,
        **options: Any,
    ) -> None:
        super().__init__(
            partial(start_server, model, devices=devices, **options),
            max_restarts=max_restarts,
            stall_timeout_s=stall_timeout_s,
        )


def make_vllm_worker(
    model_name: str, *, devices: Sequence[int | str] | None = None, **options: Any
) -> VLLMEngine | LLMOnDevice:
    """An engine whose weights a trainer can update, for :class:`~torchrl_modules.vLLMWrapper`.

    Args:
        model_name: a model's id on the hub, or a directory.
        devices: the GPUs of an engine in a process of its own; without, it is built in this
            process.
        options: of :class:`~torchrl_modules.vllm.engine.VLLMEngine`, or of
            :class:`LLMOnDevice` with ``devices``.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: the engine can't be started.
    """
    if devices is None:
        return VLLMEngine(model_name, **options)
    return LLMOnDevice(model_name, devices=devices, **options)
