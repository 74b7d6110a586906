"""A policy over vLLM: the same layout as over Transformers."""

from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .sampling import requested_sampling
from .vllm_engine import VLLMEngine
from .vllm_requests import check_reported
from .wrapper_base import LLMWrapperBase


class vLLMWrapper(LLMWrapperBase):
    """Samples with vLLM in this process.

    It draws tokens and nothing else: score with a
    :class:`~torchrl_modules.transformers_wrapper.TransformersWrapper`, which has gradients too.

    Args:
        model: a hub id or a local path, or an engine that runs already.
        tokenizer: the model's tokenizer; loaded beside it when ``model`` is a string.
        engine_kwargs: settings of the engine, see
            :class:`~torchrl_modules.vllm_engine.VLLMEngine`.
        **kwargs: see :class:`~torchrl_modules.wrapper_base.LLMWrapperBase`.

    Raises:
        ImportError: vLLM is not installed.
        TypeError: ``model`` is an engine and no tokenizer is given.
        ValueError: ``entropy`` is asked for, or ``untempered_log_probs`` of a distribution that is
            tempered or truncated: vLLM gives neither.
    """

    def __init__(
        self,
        model: str | VLLMEngine,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        engine_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        check_reported(
            requested_sampling(
                "vLLMWrapper",
                kwargs.get("generate_kwargs"),
                kwargs.get("sampling"),
                untempered_log_probs=kwargs.get("untempered_log_probs", False),
                entropy=kwargs.get("entropy", False),
            )
        )
        if isinstance(model, str):
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
            model = VLLMEngine(model, **(engine_kwargs or {}))
        if tokenizer is None:
            raise TypeError("vLLMWrapper needs the tokenizer of the model: tokenizer=...")
        super().__init__(model, tokenizer=tokenizer, **kwargs)
