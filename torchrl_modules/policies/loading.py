"""Loading of a model as it is trained: on which device, in which type, with which attention."""

from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any, Final

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from torchrl_data.devices import accelerator
from torchrl_data.pretrained import load_pretrained

OF_BOTH: Final = ("revision", "trust_remote_code", "cache_dir", "token", "local_files_only")
"""Arguments that say where files are, for the tokenizer too."""
_SHOWN_KEYS: Final = 5


def load_policy_model(
    path: str, tokenizer: PreTrainedTokenizerBase | None, processor: Any, options: Mapping[str, Any]
) -> tuple[nn.Module, PreTrainedTokenizerBase, Any]:
    """A model in evaluation mode, its tokenizer, and its processor where it reads images."""
    # options: device, dtype, attn_implementation and model_kwargs, each perhaps `None`.
    more = dict(options["model_kwargs"] or {})
    twice = {"device_map", "torch_dtype", "dtype", "attn_implementation", "device"} & set(more)
    if twice:
        raise TypeError(
            f"TransformersWrapper: model_kwargs has {sorted(twice)}. The wrapper's own "
            "device, dtype and attn_implementation say that."
        )
    place = {key: value for key, value in more.items() if key in OF_BOTH}
    config = load_pretrained(AutoConfig, path, **place)
    if options["attn_implementation"] is not None:
        more["attn_implementation"] = options["attn_implementation"]
        cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
        if cap is not None and options["attn_implementation"] == "sdpa":
            raise ValueError(
                f"TransformersWrapper: {path} caps its attention scores at {cap}, which "
                "attn_implementation='sdpa' leaves out and vLLM does not. Leave it away, or give "
                "'eager'."
            )
    reads_images = sees_images(config, is_asked=processor is not None)
    if processor is None and reads_images:
        processor = load_pretrained(AutoProcessor, path, **place)
    words: Any = tokenizer or load_pretrained(AutoTokenizer, path, **place)
    auto = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    dtype = torch.float32 if options["dtype"] is None else options["dtype"]
    model: Any = load_causal_lm(path, auto, dtype=dtype, **more)
    device = accelerator() if options["device"] is None else options["device"]
    return model.to(device), words, processor


def sees_images(config: Any, *, is_asked: bool) -> bool:
    """Return whether a model is loaded as one that reads images.

    Args:
        config: of the model.
        is_asked: by a processor; one that is a text model too reads images only then.
    """
    is_asked = is_asked or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return is_asked and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def load_causal_lm(
    path: str, auto: Any = AutoModelForCausalLM, **arguments: Any
) -> PreTrainedModel:
    """A causal language model with all of its weights, each of its shape and finite.

    Args:
        path: hub id or folder.
        auto: which of Transformers' loaders.
        **arguments: those of ``from_pretrained``.

    Raises:
        ValueError: weights are missing, of another shape or not finite; or are pickled objects; or
            it is a reward model, and something else is asked for.
    """
    takes_any_shape = arguments.pop("ignore_mismatched_sizes", False)
    options = {**arguments, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model, found = load_pretrained(auto, path, **options)
    except UnpicklingError as error:
        raise ValueError(
            f"The weights of {path!r} are a pickle that holds more than tensors, and reading it "
            "could run any program. Save them as safetensors."
        ) from error
    check_head(model.config, auto, path)
    wrong = [f"{name} is missing" for name in sorted(found["missing_keys"])]
    if not takes_any_shape:
        shapes = sorted((name, tuple(has), tuple(to)) for name, has, to in found["mismatched_keys"])
        wrong += [f"{name} has shape {has}, not {to}" for name, has, to in shapes]
    for name, weight in model.named_parameters():
        if not weight.is_meta and not weight.isfinite().all():
            wrong.append(f"{name} holds values that are not finite")
    if wrong:
        more = "" if len(wrong) <= _SHOWN_KEYS else f" and {len(wrong) - _SHOWN_KEYS} more"
        raise ValueError(
            f"Weights of {path!r} can't be used: {'; '.join(wrong[:_SHOWN_KEYS])}{more}. Is the "
            "checkpoint whole, and the model's class that of its config?"
        )
    return model


def has_value_head(config: Any) -> bool:
    """Return whether a model is one for sequence classification, by its configuration.

    Args:
        config: of Transformers.
    """
    classes = [str(each) for each in getattr(config, "architectures", None) or ()]
    return any(each.endswith("ForSequenceClassification") for each in classes)


def check_head(config: Any, auto: Any, path: str) -> None:
    """Check that no reward model is taken for a language model.

    Its weights would load where the embeddings are the language head, too, and what it then says
    is nothing that it learnt.

    Args:
        config: of the model.
        auto: which of Transformers' loaders is to load it.
        path: hub id or folder.

    Raises:
        ValueError: it is one.
    """
    if auto is AutoModelForSequenceClassification or not has_value_head(config):
        return
    raise ValueError(
        f"{path!r} is a reward model or a critic ({config.architectures[0]}), which gives numbers "
        "and says nothing. Give the language model that it began as. A reward model is given as "
        "task.rewards= or critic.model= of a recipe, or to RewardModel(...)."
    )
