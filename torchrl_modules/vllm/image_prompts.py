"""Prompts with images for vLLM, which takes one placeholder an image and expands it itself.

Our rows hold the expanded tokens. vLLM is given the inverse, and what it expands that to is
compared with the row: a response is drawn for these tokens or for none.
"""

import hashlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final

import torch

from torchrl_data.images import as_rgb_url, decoded, noise_image
from torchrl_data.templates.image_processor import ImageProcessor

from .weights import takes_images

_PROBE_SIZES: Final = ((64, 64), (48, 96))
_FLOAT_STEPS: Final = 8
"""Of the floating point type that vLLM keeps pixels in, at 1: the most that they may be apart."""


def as_image_processor(processor: Any) -> ImageProcessor:
    """A processor of Transformers, or one that is wrapped already; `TypeError`: it is none."""
    return processor if isinstance(processor, ImageProcessor) else ImageProcessor(processor)


def image_names(images: Sequence[str], label: str) -> list[str]:
    """Names by which vLLM caches images; under each name of weights they are other ones.

    So that what a vision tower made of an image is never met by requests of later weights.

    Args:
        images: in base 64.
        label: of the weights.
    """
    return [f"{hashlib.sha256(image.encode()).hexdigest()}-{label}" for image in images]


def check_expanded(expected: Sequence[int], found: Sequence[int] | None) -> None:
    """Check that vLLM reads the tokens that a row holds.

    Args:
        expected: of the row.
        found: what vLLM says that it reads; ``None`` where it does not say.

    Raises:
        ValueError: it reads other ones.
    """
    if found is None:
        raise ValueError(
            "the vLLM that answers does not say which tokens it made of a prompt with images "
            "(0.32 does), so that they can't be compared with those of the row"
        )
    if list(found) == list(expected):
        return
    pairs = zip(expected, found, strict=False)
    shorter = min(len(expected), len(found))
    place = next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)
    raise ValueError(
        f"vLLM makes {len(found)} tokens of a prompt with images, and the row has {len(expected)}; "
        f"they differ from token {place} on: {list(found[place : place + 4])} in the place of "
        f"{list(expected[place : place + 4])}. Its processor is another one than the policy's: "
        "give both the same folder"
    )


def rendered(
    llm_engine: Any,
    processor: ImageProcessor,
    ids: Sequence[int],
    images: Sequence[str],
    label: str,
) -> Any:
    """A prompt for ``LLMEngine.add_request``, with the pixels that vLLM's own processor gives.

    Args:
        llm_engine: of this process.
        processor: of the policy.
        ids: of the row.
        images: of the row in order, in base 64.
        label: of the weights.

    Raises:
        ValueError: the tokens are not those of the images, or vLLM would read other ones.
    """
    prompt = {
        "prompt_token_ids": processor.collapse(ids, images),
        "multi_modal_data": {"image": [decoded(image) for image in images]},
        "multi_modal_uuids": {"image": image_names(images, label)},
        "cache_salt": label,
    }
    # The other cache leaves out what the core of the engine should have by now.
    try:
        (found,) = llm_engine.renderer.render_cmpl([prompt], skip_mm_cache=True)
    except RuntimeError as error:  # that it finds no placeholder of its own, say
        raise ValueError(f"vLLM's processor does not take the prompt: {error}") from error
    check_expanded(ids, found["prompt_token_ids"])
    return found


def request_fields(
    processor: ImageProcessor, ids: Sequence[int], images: Sequence[str]
) -> dict[str, Any]:
    """Fields of a request to ``/inference/v1/generate`` that stand for a prompt with images.

    :func:`name_images` completes them, and the answer's ``prompt_token_ids`` have to pass
    :func:`check_expanded`. Takes and raises what :func:`rendered` does.
    """
    return {
        "token_ids": processor.collapse(ids, images),
        "content_parts": [{"type": "image_url", "url": as_rgb_url(image)} for image in images],
        "return_token_ids": True,
    }


def name_images(fields: Mapping[str, Any], images: Sequence[str], label: str) -> None:
    """Name the images of a request by the weights that serve as it is sent."""
    for part, name in zip(fields["content_parts"], image_names(images, label), strict=True):
        part["uuid"] = name


def probe_prompts(processor: ImageProcessor) -> list[tuple[list[int], list[str]]]:
    """Tokens and images of prompts of an image of noise each, of different sizes."""
    images = [noise_image(seed, size) for seed, size in enumerate(_PROBE_SIZES)]
    return [(processor.process([image]).ids, [image]) for image in images]


def check_reads_images(llm_engine: Any, processor: ImageProcessor, *, who: str) -> None:
    """Check that an engine of this process reads images, and as the policy's processor does.

    Raises:
        ValueError: it does not.
    """
    config = llm_engine.vllm_config.model_config
    if not config.is_multimodal_model:
        raise ValueError(
            f"{who}: processor= is given, and vLLM reads no images with "
            f"{', '.join(config.architectures)}. Leave it out, or take a vision-language model."
        )
    if not takes_images(config) or not hasattr(llm_engine, "renderer"):
        lack = "was built with skip_tokenizer_init" if config.skip_tokenizer_init else "is too old"
        raise ValueError(
            f"{who}: processor= is given, and this LLM {lack}, with which vLLM reads no images. "
            "Build it with skip_tokenizer_init=False, by vLLM 0.32."
        )
    for ids, images in probe_prompts(processor):
        try:
            given = rendered(llm_engine, processor, ids, images, "probe")
        except ValueError as error:
            raise ValueError(f"{who}: images can't be read: {error}") from error
        [item], own = given["mm_kwargs"]["image"], processor.process(images).tensors
        for name, theirs in item.get_data().items():
            ours = own.get(name)
            if isinstance(theirs, torch.Tensor) and ours is not None:
                _check_equal(name, ours, theirs, who)


def _check_equal(name: str, ours: torch.Tensor, theirs: torch.Tensor, who: str) -> None:
    if ours.numel() != theirs.numel():  # in another layout
        return
    step = torch.finfo(theirs.dtype).eps if theirs.is_floating_point() else 0.0
    ours, theirs = (each.to(theirs.dtype).double().flatten() for each in (ours, theirs))
    gap = float((ours - theirs).abs().max())
    if gap > _FLOAT_STEPS * step * max(1.0, float(ours.abs().max())):
        raise ValueError(
            f"{who}: vLLM's processor makes other {name} of an image than the policy's, by up to "
            f"{gap:.2g}. Give both the same folder and the same kind of image processor."
        )


def missing_torchvision(error: BaseException) -> str:
    """Return what to say where vLLM does not load a vision-language model; perhaps nothing."""
    if find_spec("torchvision") is not None or "inspected" not in str(error):
        return ""
    return (
        " It may import torchvision for this class, which is not installed here: the installation "
        "for a CPU lacks it. Without it vLLM loads Idefics3, SmolVLM and PaliGemma, for instance."
    )
