"""A model, its tokenizer and its processor, loaded as the settings say."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from torchrl_agents.settings.errors import SettingsError, refusing
from torchrl_agents.settings.schema import PolicyConfig
from torchrl_data import page
from torchrl_data.pretrained import load_pretrained
from torchrl_data.templates.registry import (
    DEFAULT_TEMPLATE,
    control_literals,
    family_of,
    own_template,
    resolve_template,
)
from torchrl_modules.policies.loading import OF_BOTH, load_causal_lm, sees_images
from torchrl_modules.quantized_forward import quantize_forward
from torchrl_modules.weights.quantized_weights import four_bit_config

_LOG = logging.getLogger("torchrl_agents")


@contextmanager
def refusing_to_load(who: str, source: str) -> Iterator[None]:
    """Tell that a model, its tokenizer or its processor can't be loaded as a fault of a setting.

    Args:
        who: the setting that names the model.
        source: hub id or path.

    Raises:
        SettingsError: in place of what the loading raises.
    """
    try:
        yield
    except SettingsError:
        raise
    except (OSError, ValueError, TypeError, ImportError, SafetensorError) as error:
        kind = "" if Path(source).is_dir() else " (no folder of that name is here)"
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if not kind and not Path(source, "config.json").is_file():
            first = "the folder has no config.json, so it holds no model"
        raise SettingsError(f"{who}={source!r}{kind} can't be loaded: {first}") from error


def load_model(
    cfg: PolicyConfig,
    source: str,
    *,
    who: str = "policy.model",
    load: Callable[..., PreTrainedModel] = load_causal_lm,
    images: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer.

    Args:
        cfg: device, dtype, attention and further arguments.
        source: hub id or path.
        who: names it.
        load: gives the model; a dry run has it without weights.
        images: whether it may be one that reads images.

    Raises:
        SettingsError: there is no such model, or it can't be loaded so.
    """
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    arguments: dict[str, Any] = dict(cfg.model_kwargs)
    if cfg.attn_implementation is not None:
        arguments["attn_implementation"] = cfg.attn_implementation
    if cfg.load_in_4bit:
        arguments["quantization_config"] = four_bit_config(getattr(torch, cfg.dtype))
    with refusing_to_load(who, source):
        tokenizer = load_tokenizer(cfg, source)
        auto, config = AutoModelForCausalLM, load_pretrained(AutoConfig, source, **place_of(cfg))
        if sees_images(config, is_asked=False):
            auto = AutoModelForImageTextToText
            if not images:
                raise ValueError(
                    f"it is a vision-language model, and {who} has to be a text model. See "
                    f"{page('docs/images.md')}."
                )
        model = load(source, auto, dtype=getattr(torch, cfg.dtype), **arguments)
        if cfg.add_control_tokens:
            name = cfg.chat_template_name
            template = resolve_template(tokenizer, chat_template_name=name)
            add_tokens(model, tokenizer, control_literals(template, of_turns=True))
        if cfg.quantization is not None:
            quantize_forward(model, cfg.quantization)
        model.to(device)  # type: ignore[arg-type]
        if cfg.gradient_checkpointing:
            recompute_activations(model)
    return model, tokenizer


def recompute_activations(model: Any) -> None:
    """Have a model compute its layers again in the backward pass, and leave nothing out of them.

    Layers do so in training mode alone, in which dropout would make the log-probs of a token differ
    from those that it was sampled with: only they are in it, and theirs is set to 0.

    Args:
        model: of Transformers, in evaluation mode.
    """
    model.gradient_checkpointing_enable()
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
            for name, value in [*vars(module).items()]:
                if "drop" in name and isinstance(value, float):
                    setattr(module, name, 0.0)


def place_of(cfg: PolicyConfig) -> dict[str, Any]:
    """Arguments of loading that say where files are and what is trusted; of tokenizers, too."""
    return {name: value for name, value in cfg.model_kwargs.items() if name in OF_BOTH}


def load_tokenizer(cfg: PolicyConfig, source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with the chat template that the settings give it.

    Args:
        cfg: which template.
        source: hub id or path.
    """
    tokenizer = load_pretrained(AutoTokenizer, source, **place_of(cfg))
    if cfg.chat_template is not None:
        tokenizer.chat_template = cfg.chat_template
    elif cfg.chat_template_name is None and cfg.model is not None and not own_template(tokenizer):
        _LOG.info(
            "%s has no chat template of its own; it gets %r. policy.chat_template_name= and "
            "policy.chat_template= give it another one.",
            source,
            family_of(tokenizer) or DEFAULT_TEMPLATE,
        )
    return tokenizer


def load_processor(cfg: PolicyConfig, source: str) -> Any:
    """The processor of a model that reads images; ``None`` of one that does not.

    Args:
        cfg: says where files are.
        source: hub id or path.

    Raises:
        SettingsError: its folder has no processor.
    """
    place = place_of(cfg)
    if not sees_images(load_pretrained(AutoConfig, source, **place), is_asked=False):
        return None
    with refusing(f"the processor of policy.model={source!r}", foreign=True):
        return load_pretrained(AutoProcessor, source, **place)


@torch.no_grad()
def add_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]
) -> None:
    """Add control tokens to a vocabulary; each gets the mean of all rows, in and out.

    Args:
        model: its embeddings grow where they have no room.
        tokenizer: of the model.
        tokens: those that it knows are left as they are.
    """
    known = tokenizer.get_vocab()
    new: list[Any] = [token for token in tokens if token not in known]
    if not new:
        return
    num_known = len(tokenizer)
    tokenizer.add_tokens(new, special_tokens=True)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:  # type: ignore[union-attr]
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = getattr(layer, "weight", None)
        if weight is not None:
            weight[num_known : len(tokenizer)] = weight[:num_known].mean(0)
    _LOG.info("added to the vocabulary: %s", ", ".join(new))
