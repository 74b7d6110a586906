"""Which class serves an engine to asyncio."""

from importlib import import_module
from typing import Any, Final

from .async_protocol import AsyncEngine
from .blocking_engine import BlockingEngine

_SERVER: Final = "torchrl_modules.vllm.bridges.AsyncServerEngine"
_ASYNC: Final = {
    "torchrl_modules.engines.transformers_engine.TransformersEngine": (
        "torchrl_modules.engines.async_transformers.AsyncTransformersEngine"
    ),
    "torchrl_modules.vllm.engine.VLLMEngine": "torchrl_modules.vllm.async_engine.AsyncVLLMEngine",
    "torchrl_modules.vllm.client.VLLMServerEngine": _SERVER,
    "torchrl_modules.vllm.supervised.SupervisedEngine": _SERVER,
}
"""By what an engine is served to asyncio; loaded when it is asked for."""
_URL: Final = "torchrl_modules.vllm.bridges.OwnServerEngine"
_FLEET: Final = "torchrl_modules.engines.fleet.engine_fleet.EngineFleet"


def open_async(engine: object, **options: Any) -> AsyncEngine:
    """Serve an engine to asyncio; it belongs to what is returned until that is closed.

    Args:
        engine: a ``TransformersEngine``, ``VLLMEngine``, ``VLLMServerEngine`` or
            ``SupervisedEngine``; the URL of a vLLM server; a list of any of these, which are served
            as an :class:`~torchrl_modules.EngineFleet`; or what is an :class:`AsyncEngine` already,
            or was made of one.
        options: of the class that serves it, such as ``stall_timeout_s`` of
            :class:`~torchrl_modules.vllm.async_engine.AsyncVLLMEngine`, or of the client of a URL.

    Raises:
        TypeError: nothing here serves such an engine, or an option is not known.
        RuntimeError: the engine is closed or in use elsewhere.
        ConnectionError: nobody answers at the URL.
    """
    if isinstance(engine, str):
        return _load(_URL)(engine, **options)
    if isinstance(engine, list | tuple):
        return _load(_FLEET)(engine, **options)
    for cls in type(engine).__mro__:
        home = _ASYNC.get(f"{cls.__module__}.{cls.__qualname__}")
        if home is not None:
            return _load(home)(engine, **options)
    if isinstance(engine, BlockingEngine):
        engine = engine.inside
    if isinstance(engine, AsyncEngine):
        if options:
            raise TypeError(
                f"open_async: {type(engine).__name__} is asynchronous already and takes no "
                f"options, got {sorted(options)}. Give them when you build it."
            )
        return engine
    taken = sorted(name.rpartition(".")[2] for name in _ASYNC)
    raise TypeError(
        f"open_async takes one of {taken}, a URL, a list of these, or an AsyncEngine (respond, "
        f"update_weights, pause, resume, end_session, close), got {type(engine).__name__}."
    )


def _load(home: str) -> Any:
    module, _, name = home.rpartition(".")
    return getattr(import_module(module), name)
