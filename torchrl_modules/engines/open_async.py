"""The class that serves an engine to asyncio."""

from pkgutil import resolve_name
from typing import Any, Final

from .batching_engine import BatchingEngine
from .blocking_engine import BlockingEngine
from .engine import AsyncEngine, Engine

_SERVER: Final = "torchrl_modules.engines.server_engines:AsyncServerEngine"
_ASYNC: Final = {
    "torchrl_modules.engines.transformers.TransformersEngine": (
        "torchrl_modules.engines.async_transformers:AsyncTransformersEngine"
    ),
    "torchrl_modules.engines.agent_engines.AgentEngines": (
        "torchrl_modules.engines.agent_engines:AsyncAgentEngines"
    ),
    "torchrl_modules.engines.adapter_engine.AdapterEngine": (
        "torchrl_modules.engines.adapter_engine:AsyncAdapterEngine"
    ),
    "torchrl_modules.vllm.engine.VLLMEngine": "torchrl_modules.vllm.async_engine:AsyncVLLMEngine",
    "torchrl_modules.vllm.server_engine.VLLMServerEngine": _SERVER,
    "torchrl_modules.sglang.server_engine.SGLangServerEngine": _SERVER,
}
"""By what an engine is served to asyncio; loaded when it is asked for."""


def open_async(engine: object, **options: Any) -> AsyncEngine:
    """Serve an engine to asyncio; it belongs to what is returned until that is closed.

    Args:
        engine: a ``TransformersEngine``, ``VLLMEngine``, ``VLLMServerEngine``,
            ``SGLangServerEngine``, ``AdapterEngine`` or ``SupervisedEngine``; the URL of a vLLM
            server; a list of any of these, which are served as an
            :class:`~torchrl_modules.EngineFleet`; what is an :class:`AsyncEngine` already, or was
            made of one; or any other :class:`Engine`, which draws in batches of those that came
            together (:class:`BatchingEngine`).
        options: of the class that serves it, such as ``stall_timeout_s`` of
            :class:`~torchrl_modules.vllm.async_engine.AsyncVLLMEngine`, or of the client of a URL.

    Raises:
        TypeError: nothing here serves such an engine, or an option is not known.
        RuntimeError: the engine is closed or in use elsewhere.
        ConnectionError: nobody answers at the URL.

    Example:
        >>> import asyncio
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> async def main():
        ...     params = SamplingParameters(max_new_tokens=4, min_tokens=4)
        ...     async with open_async(TransformersEngine(tiny_qwen3(len(tokenizer)))) as engine:
        ...         prompts = [tokenizer.encode(text) for text in ("hello", "What is 2 + 2?")]
        ...         return await asyncio.gather(*(engine.respond(ids, params) for ids in prompts))
        >>> [len(generation.ids) for generation in asyncio.run(main())]
        [4, 4]
    """
    if isinstance(engine, str):
        return resolve_name("torchrl_modules.vllm.bridges:OwnServerEngine")(engine, **options)
    if isinstance(engine, list | tuple):
        return resolve_name("torchrl_modules.engines.fleet:EngineFleet")(engine, **options)
    for cls in type(engine).__mro__:
        home = _ASYNC.get(f"{cls.__module__}.{cls.__qualname__}")
        if home is not None:
            return resolve_name(home)(engine, **options)
    if isinstance(engine, BlockingEngine):
        engine = engine.inside
    if isinstance(engine, AsyncEngine):
        if options:
            raise TypeError(
                f"open_async: {type(engine).__name__} is asynchronous already and takes no "
                f"options, got {sorted(options)}. Give them when you build it."
            )
        return engine
    if isinstance(engine, Engine):
        return BatchingEngine(engine, **options)
    raise TypeError(
        "open_async takes an Engine (version, generate, update_weights), an AsyncEngine (respond, "
        "update_weights, pause, resume, end_session, close), the URL of a vLLM server, or a list "
        f"of these, got {type(engine).__name__}."
    )
