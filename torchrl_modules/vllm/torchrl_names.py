"""Where vLLM runs: in this process, or on chosen devices in a process of its own."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from .engine import VLLMEngine
from .launch import start_server
from .supervised import SupervisedEngine


class LLMOnDevice(SupervisedEngine):
    """vLLM on chosen devices, in a process of its own, which is replaced when it dies.

    TorchRL's class of this name was a ``vllm.LLM`` that could be placed when it ran as a Ray actor.
    Here the process is one of this machine, and the class is an engine for
    :class:`~torchrl_modules.vLLMWrapper`; inside a Ray actor it uses the devices of that one.

    Args:
        model: a model's id on the hub, or a directory.
        devices: the GPUs that it uses, by number or UUID; those of this process when not given.
        max_restarts: as for :class:`~torchrl_modules.vllm.supervised.SupervisedEngine`.
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
