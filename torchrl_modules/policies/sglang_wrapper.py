"""A policy over SGLang: the same layout as over Transformers."""

from functools import partial
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from torchrl_data.pretrained import load_pretrained
from torchrl_modules.engines.blocking_engine import BlockingEngine
from torchrl_modules.engines.engine import Engine
from torchrl_modules.engines.fleet import EngineFleet
from torchrl_modules.sampling.parameters import requested_sampling
from torchrl_modules.sglang.own_server import OwnSGLangServer
from torchrl_modules.sglang.requests import check_told
from torchrl_modules.sglang.server import start_sglang_server
from torchrl_modules.sglang.server_engine import SGLangServerEngine

from .base import LLMWrapperBase
from .loading import check_head
from .model_files import local_model


class SGLangWrapper(LLMWrapperBase):
    """Samples with SGLang: token ids in, token ids and log-probs out.

    SGLang runs in processes of its own, and in an environment of its own where it needs other
    releases of packages than training does. It draws tokens and nothing else: score with a
    :class:`~torchrl_modules.TransformersWrapper`.

    Args:
        model: a hub id or a folder: a server is started for it, and again when it dies. A URL: a
            server that runs already; a list of URLs: a fleet of them. Or an engine, such as a
            `SGLangServerEngine`.
        tokenizer: the model's tokenizer; loaded beside it when ``model`` is an id or a path.
        engine_kwargs: of :func:`~torchrl_modules.start_sglang_server` when ``model`` is an id or a
            path; else of `SGLangServerEngine`.
        generate: only ``True``; for scores see above.
        **kwargs: see :class:`~torchrl_modules.policies.base.LLMWrapperBase`.

    Raises:
        ConnectionError: nobody answers at the URL.
        RuntimeError: a server can't be started, or can't be drawn from exactly.
        TypeError: no tokenizer is given with an engine or a URL, or ``engine_kwargs`` with an
            engine, which is built already; or ``generate`` is false.
        ValueError: SGLang can't draw from the distribution, or can't report what is asked for.

    Example:
        >>> policy = SGLangWrapper(  # doctest: +SKIP
        ...     "Qwen/Qwen3-0.6B",
        ...     engine_kwargs={"context_length": 2048, "mem_fraction_static": 0.5},
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
        **kwargs: Any,
    ) -> None:
        if not generate:
            raise TypeError(
                "SGLangWrapper(generate=False): this class draws tokens alone. Score with "
                "TransformersWrapper(model, tokenizer=..., generate=False) of the same weights."
            )
        check_told(
            requested_sampling(
                kwargs.get("generate_kwargs"),
                untempered_log_probs=kwargs.get("untempered_log_probs", False),
                entropy=kwargs.get("entropy", False),
            )
        )
        if not isinstance(model, str | list) and engine_kwargs is not None:
            raise TypeError(
                "SGLangWrapper: engine_kwargs= applies only when the wrapper builds the engine, "
                f"and got a {type(model).__name__}. Pass a hub id, a path or URLs, or build it so."
            )
        settings = dict(engine_kwargs or {})
        if isinstance(model, str) and "://" not in model:
            model = local_model(model)
            place = {"trust_remote_code": bool(settings.get("trust_remote_code"))}
            tokenizer = tokenizer or load_pretrained(AutoTokenizer, model, **place)
            check_head(load_pretrained(AutoConfig, model, **place), None, model)
        if tokenizer is None:
            raise TypeError("SGLangWrapper needs the tokenizer of the model: tokenizer=...")
        super().__init__(sglang_engine(model, **settings), tokenizer=tokenizer, **kwargs)


def sglang_engine(model: Any, **settings: Any) -> Engine:
    """The engine that a user means."""
    if isinstance(model, str) and "://" in model:
        return SGLangServerEngine(model, **settings)
    if isinstance(model, str | list):
        servers = [partial(OwnSGLangServer, url, **settings) for url in model]
        if isinstance(model, str):
            servers = [partial(OwnSGLangServer, partial(start_sglang_server, model, **settings))]
        model = EngineFleet(servers)
    return BlockingEngine(model) if isinstance(model, EngineFleet) else model
