"""Models with a head of one number, as Transformers' reward models have it, for critics."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from torchrl_data.pretrained import load_pretrained
from torchrl_modules.policies.loading import OF_BOTH, has_value_head, load_causal_lm
from torchrl_modules.scoring.value_scorer import value_head
from torchrl_modules.scoring.wrapped_models import unwrapped
from torchrl_modules.weights.quantized_weights import quantization_of


def value_model_of(model: nn.Module, *, random_head: bool = False) -> PreTrainedModel:
    """A value model with the decoder of a causal language model, copied, and a new head.

    A head of zeros says 0 at first, so that advantages are returns until it has learnt something.
    What the decoder learns through it is small as long as the head is: a reward model, which learns
    at the learning rate of a decoder, learns faster with a head of random numbers.

    Args:
        model: of Transformers, with or without adapters of PEFT, which become part of the copy.
        random_head: draw the head as Transformers does, by the ``initializer_range`` of the
            configuration; it is 0 otherwise.

    Returns:
        A model for sequence classification with one label, on the device and of the type of
        ``model``, in evaluation mode.

    Raises:
        ValueError: its weights are quantised, or Transformers has no such class of its family.

    Example:
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> critic = value_model_of(tiny_qwen3(len(tokenizer)))
        >>> type(critic).__name__, critic.score.weight.shape
        ('Qwen3ForSequenceClassification', torch.Size([1, 64]))
    """
    plain: Any = unwrapped(model, who="value_model_of")
    name = type(plain).__name__
    if quantization_of(plain) is not None:
        raise ValueError(
            f"value_model_of: the weights of {name} are quantised, and a critic trains all of its "
            "own. Load one from whole weights: load_value_model(path)."
        )
    config = copy.deepcopy(plain.config)
    check_value_config(config, who=f"value_model_of: {name}")
    config.num_labels = 1
    whole: Any = copy.deepcopy(model) if hasattr(model, "merge_and_unload") else None
    decoder = plain.base_model if whole is None else whole.merge_and_unload().base_model
    if config._attn_implementation not in ("eager", "sdpa"):
        config._attn_implementation = "sdpa"
    # Most weights are replaced at once: what is drawn for them is drawn beside the random numbers.
    with torch.device(plain.device), torch.random.fork_rng(_devices(plain.device)):
        made: Any = AutoModelForSequenceClassification.from_config(config, dtype=plain.dtype)
    made.base_model.load_state_dict(decoder.state_dict())
    head = value_head(made, who="value_model_of")
    if not random_head:
        nn.init.zeros_(head.weight)
    made.requires_grad_(True)
    return made.eval()


def _devices(device: torch.device) -> list[torch.device]:
    """Those beside the CPU that have random numbers of their own."""
    return [device] if device.type == "cuda" else []


def load_value_model(path: str, *, random_head: bool = False, **arguments: Any) -> PreTrainedModel:
    """A value model from a hub id or a folder.

    Args:
        path: of a model for sequence classification with one label, such as a reward model of TRL
            or a critic that a run left; or of a causal language model, which gets a new head.
        random_head: of a causal language model, see :func:`value_model_of`.
        **arguments: of ``from_pretrained``, such as ``dtype``.

    Raises:
        ValueError: its head has several labels, weights are missing or not finite, or Transformers
            has no such class of its family.
    """
    place = {name: value for name, value in arguments.items() if name in OF_BOTH}
    config = load_pretrained(AutoConfig, path, **place)
    check_value_config(config, who=f"load_value_model: {path}")
    if has_value_head(config):
        return load_causal_lm(path, AutoModelForSequenceClassification, **arguments).eval()
    return value_model_of(load_causal_lm(path, **arguments), random_head=random_head)


def check_value_config(config: Any, *, who: str) -> None:
    """Check that a model can be a critic, by its configuration.

    Args:
        config: of Transformers: of a model for sequence classification, or of another one that
            would get a head.
        who: names the model.

    Raises:
        ValueError: its head has several labels, or Transformers has no such class of its family.
    """
    if has_value_head(config) and config.num_labels != 1:
        raise ValueError(
            f"{who} has {config.num_labels} labels, and a critic gives one number, as a reward "
            "model does. Give a model with num_labels=1, or a causal language model."
        )
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"{who} is a {config.model_type}, of which Transformers has no class for sequence "
            "classification, so it can't be a critic or a reward model. Give one of another family."
        )
