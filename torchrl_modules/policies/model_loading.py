"""A model from a hub id or a path, as it is trained: where, in which type, with which attention."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedModel,
)

_OF_BOTH: Final = ("revision", "trust_remote_code", "cache_dir", "token", "local_files_only")
"""Arguments that say where files are, for the tokenizer too."""
_SHOWN_KEYS: Final = 5


class Loading(NamedTuple):
    """What a user says of a model that is to be loaded."""

    device: torch.device | str | None
    dtype: torch.dtype | str | None
    attn_implementation: str | None
    model_kwargs: Mapping[str, Any] | None
    processor: Any = None

    def refuse(self, name: str) -> None:
        """A model is given that is built already."""
        given = {key: value for key, value in self._asdict().items() if key != "processor"}
        options = [key for key, value in given.items() if value is not None]
        if options:
            raise TypeError(
                f"TransformersWrapper: {', '.join(options)} say how a model is loaded, but "
                f"{name} is built already. Give its hub id or path, or build it like that."
            )

    def for_tokenizer(self) -> dict[str, Any]:
        """Those of the arguments that load the tokenizer too."""
        return {k: v for k, v in (self.model_kwargs or {}).items() if k in _OF_BOTH}

    def load(self, path: str) -> nn.Module:
        """Load a model in evaluation mode."""
        more = dict(self.model_kwargs or {})
        twice = {"device_map", "torch_dtype", "dtype", "attn_implementation", "device"} & set(more)
        if twice:
            raise TypeError(
                f"TransformersWrapper: model_kwargs has {sorted(twice)}. The wrapper's own "
                "device, dtype and attn_implementation say that."
            )
        attention = self.attn_implementation
        if attention is not None:
            self._check_attention(path, attention)
            more["attn_implementation"] = attention
        dtype = torch.float32 if self.dtype is None else self.dtype
        auto = AutoModelForImageTextToText if self.reads_images(path) else AutoModelForCausalLM
        model: Any = load_causal_lm(path, auto, dtype=dtype, **more)
        return model.to(accelerator() if self.device is None else self.device)

    def reads_images(self, path: str) -> bool:
        """Whether to load a vision-language model; one that is a text model too if asked to."""
        config = type(AutoConfig.from_pretrained(path, **self.for_tokenizer()))
        asked = self.processor is not None or config not in MODEL_FOR_CAUSAL_LM_MAPPING
        return asked and config in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    def load_processor(self, path: str) -> Any:
        """That of a vision-language model, or ``None`` beside another one."""
        if self.processor is not None or not self.reads_images(path):
            return self.processor
        return AutoProcessor.from_pretrained(path, **self.for_tokenizer())

    def _check_attention(self, path: str, attention: str) -> None:
        config = AutoConfig.from_pretrained(path, **self.for_tokenizer()).get_text_config()
        cap = getattr(config, "attn_logit_softcapping", None)
        if cap is not None and attention == "sdpa":
            raise ValueError(
                f"TransformersWrapper: {path} caps its attention scores at {cap}, which "
                "attn_implementation='sdpa' leaves out and vLLM does not. Leave it away, or give "
                "'eager'."
            )


def load_causal_lm(
    path: str, auto: Any = AutoModelForCausalLM, **arguments: Any
) -> PreTrainedModel:
    """A causal language model with all of its weights; ``arguments`` are ``from_pretrained``'s."""
    loaded: Any = auto.from_pretrained(path, output_loading_info=True, **arguments)
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        more = "" if len(missing) <= _SHOWN_KEYS else f" and {len(missing) - _SHOWN_KEYS} more"
        raise ValueError(
            f"The files of {path!r} lack {len(missing)} of the model's weights: "
            f"{', '.join(missing[:_SHOWN_KEYS])}{more}. They would be random numbers. Is the "
            "checkpoint whole, and the model's class that of its config?"
        )
    return model


def accelerator() -> torch.device:
    """The device of this process: the accelerator, if there is one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())
