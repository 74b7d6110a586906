"""A policy over vLLM: the same layout as over Transformers."""

from functools import partial
from typing import Any

from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase

from torchrl_data.pretrained import load_pretrained
from torchrl_modules.engines.blocking_engine import BlockingEngine
from torchrl_modules.engines.engine import Engine
from torchrl_modules.engines.fleet import EngineFleet
from torchrl_modules.sampling.parameters import requested_sampling
from torchrl_modules.vllm.async_engine import AsyncVLLMEngine
from torchrl_modules.vllm.bridges import BlockingVLLMEngine, OwnServerEngine
from torchrl_modules.vllm.engine import VLLMEngine
from torchrl_modules.vllm.requests import check_reported
from torchrl_modules.vllm.server_engine import VLLMServerEngine

from .base import LLMWrapperBase
from .loading import check_head, sees_images
from .model_files import local_model


class vLLMWrapper(LLMWrapperBase):
    """Samples with vLLM, wherever it runs: token ids in, token ids and log-probs out.

    It draws tokens and nothing else: score with a
    :class:`~torchrl_modules.TransformersWrapper`, which has gradients too.

    Args:
        model: a hub id, a folder or a ``.gguf`` file: vLLM is built in this process. A URL
            (``unix:///path/of/the/socket`` or ``http://host:port``): a server that
            ``torchrl_modules.vllm.server`` started on this machine; a list of URLs: a fleet of
            them. Or an engine that runs already: a ``vllm.LLM`` of this process, a `VLLMEngine`, an
            `AsyncVLLMEngine`, an :class:`~torchrl_modules.EngineFleet`, or whatever else has the
            methods of :class:`~torchrl_modules.engines.engine.Engine`.
        tokenizer: the model's tokenizer; loaded beside it when ``model`` is an id or a path.
        engine_kwargs: settings of the engine that is built, see
            :class:`~torchrl_modules.vllm.engine.VLLMEngine` and
            :class:`~torchrl_modules.vllm.server_engine.VLLMServerEngine`.
        generate: only ``True``; for scores see above.
        processor: of a vision-language model, for messages with images; loaded beside a model that
            is nothing else when ``model`` is an id or a path, but with ``language_model_only``.
        **kwargs: see :class:`~torchrl_modules.policies.base.LLMWrapperBase`.

    Raises:
        ConnectionError: nobody answers at the URL.
        ImportError: vLLM is not installed.
        TypeError: no tokenizer is given with an engine or a URL, or ``engine_kwargs`` is given
            with an engine, which is built already, or ``processor``, which is given to that one;
            ``generate`` is false; or ``model`` is none of the above.
        ValueError: ``entropy`` is asked for, or ``untempered_log_probs`` of a distribution that is
            tempered or truncated: vLLM gives neither.

    Example:
        >>> policy = vLLMWrapper(  # doctest: +SKIP
        ...     "Qwen/Qwen3-0.6B",
        ...     engine_kwargs={"max_model_len": 2048},
        ...     generate_kwargs={"max_new_tokens": 64, "temperature": 0.7},
        ... )
        >>> batch = policy(env.reset())  # doctest: +SKIP
        >>> ids = batch[0]["tokens", "response"]  # int64 [T]  # doctest: +SKIP
        >>> batch[0]["log_probs", "response"].shape == ids.shape  # doctest: +SKIP
        True
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        engine_kwargs: dict[str, Any] | None = None,
        generate: bool = True,
        processor: Any = None,
        **kwargs: Any,
    ) -> None:
        if not generate:
            raise TypeError(
                "vLLMWrapper(generate=False): vLLM scores a prompt slowly, under its own softmax "
                "and without gradients, so this class draws tokens alone. Score with "
                "TransformersWrapper(model, tokenizer=..., generate=False) of the same weights."
            )
        check_reported(
            requested_sampling(
                kwargs.get("generate_kwargs"),
                untempered_log_probs=kwargs.get("untempered_log_probs", False),
                entropy=kwargs.get("entropy", False),
            ),
            has_masks=True,  # the engine says whether it does
        )
        if not isinstance(model, str | list) and engine_kwargs is not None:
            raise TypeError(
                "vLLMWrapper: engine_kwargs= applies only when the wrapper builds the engine, and "
                f"got a {type(model).__name__}. Pass a hub id or path, or build it that way."
            )
        if processor is not None and not (isinstance(model, str | list) or _is_llm(model)):
            raise TypeError(
                "vLLMWrapper: processor= applies when the wrapper builds the engine, and got a "
                f"{type(model).__name__}. Build that one with processor=..."
            )
        settings = dict(engine_kwargs or {})
        if isinstance(model, str) and "://" not in model:
            model = local_model(model)
            place = {"trust_remote_code": bool(settings.get("trust_remote_code"))}
            tokenizer = tokenizer or load_pretrained(AutoTokenizer, model, **place)
            config = load_pretrained(AutoConfig, model, **place)
            check_head(config, None, model)
            sees = sees_images(config, is_asked=False) and not settings.get("language_model_only")
            if processor is None and sees:
                processor = load_pretrained(AutoProcessor, model, **place)
        if tokenizer is None:
            raise TypeError("vLLMWrapper needs the tokenizer of the model: tokenizer=...")
        if processor is not None:
            settings["processor"] = processor
        super().__init__(as_engine(model, **settings), tokenizer=tokenizer, **kwargs)


def _is_llm(model: Any) -> bool:
    """Return whether it is a ``vllm.LLM`` that is built already."""
    return hasattr(model, "llm_engine")


def as_engine(model: Any, **settings: Any) -> Engine:
    """The engine that a user means."""
    if isinstance(model, list):
        return BlockingEngine(
            EngineFleet([partial(OwnServerEngine, url, **settings) for url in model])
        )
    if isinstance(model, EngineFleet):
        return BlockingEngine(model)
    if isinstance(model, str):
        return (
            VLLMServerEngine(model, **settings) if "://" in model else VLLMEngine(model, **settings)
        )
    if isinstance(model, AsyncVLLMEngine):
        return BlockingVLLMEngine(model)
    if _is_llm(model):
        return VLLMEngine.from_llm(model, **settings)
    missing = [
        name for name in ("generate", "update_weights", "version") if not hasattr(model, name)
    ]
    if missing:
        raise TypeError(
            "vLLMWrapper takes a model id, a path, a URL or an engine, got "
            f"{type(model).__name__}, which has no {missing[0]!r}."
        )
    return model
