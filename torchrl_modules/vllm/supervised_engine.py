"""An engine in another process that is replaced when it dies, and loses no request."""

from collections.abc import Callable, Sequence
from contextlib import (
    AbstractContextManager,
)
from functools import partial
from typing import Any

from torchrl_modules.engines.blocking_engine import BlockingEngine
from torchrl_modules.engines.fleet import EngineFleet

from .bridges import OwnServerEngine
from .engine import VLLMEngine
from .server import start_server


class SupervisedEngine(BlockingEngine):
    """An :class:`~torchrl_modules.engines.engine.Engine` that outlives its processes.

    It is a fleet (:class:`~torchrl_modules.EngineFleet`) of one server, ``inside``, of which
    ``inside.health()`` tells the state. When the engine is killed, or draws no token for
    ``stall_timeout_s``, it is ended and another one is started; one that does not start, or fails
    in the midst of an update, counts as one that died. It serves once it has acknowledged the
    weights that the last one had, or that are pushed then; what was in flight is drawn again, with
    the same seeds. Rows that were finished stay.

    Args:
        start: gives a context manager that starts an engine, gives its URL, and ends it on leaving,
            such as ``partial(start_server, "Qwen/Qwen3-0.6B")``.
        max_restarts: how many engines in a row may die without finishing a row.
        client_settings: of :class:`~torchrl_modules.VLLMServerEngine`, for instance
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
        open_server = partial(OwnServerEngine, start, **client_settings)
        super().__init__(EngineFleet([open_server], max_restarts=max_restarts))


class LLMOnDevice(SupervisedEngine):
    """vLLM on chosen devices, in a process of its own, which is replaced when it dies.

    TorchRL's class of this name was a ``vllm.LLM`` that could be placed when it ran as a Ray actor.
    Here the process is one of this machine, and the class is an engine for
    :class:`~torchrl_modules.vLLMWrapper`; inside a Ray actor it uses the devices of that one.

    Args:
        model: a model's id on the hub, or a directory.
        devices: the GPUs that it uses, by number or UUID; those of this process when not given.
        max_restarts: as for `SupervisedEngine`.
        stall_timeout_s: as for :class:`~torchrl_modules.VLLMServerEngine`.
        processor: as for :class:`~torchrl_modules.VLLMServerEngine`.
        options: of :func:`start_server`.

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
        processor: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(
            partial(start_server, model, devices=devices, **options),
            max_restarts=max_restarts,
            stall_timeout_s=stall_timeout_s,
            processor=processor,
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

    Example:
        >>> engine = make_vllm_worker("Qwen/Qwen3-0.6B", devices=[1])  # doctest: +SKIP
        >>> policy = vLLMWrapper(engine, tokenizer=tokenizer)  # doctest: +SKIP
        >>> engine.update_weights(trained.state_dict())  # doctest: +SKIP
        >>> engine.version  # doctest: +SKIP
        1
    """
    if devices is None:
        return VLLMEngine(model_name, **options)
    return LLMOnDevice(model_name, devices=devices, **options)
