"""Rows with images, read by a model's own forward: those of one length and shape together.

Shape legend: N packed tokens, B sequences, K target tokens, L tokens of a row, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_data.devices import on_device
from torchrl_data.images import noise_image
from torchrl_data.ragged.packed import pack, sequence_index
from torchrl_data.templates.image_processor import ImageProcessor
from torchrl_modules.transformers_releases import forward_parameters

from .model_reader import ModelReader, targets_of
from .trial import ReadingTrial, own_log_probs, trial_rows
from .wrapped_models import evaluation_mode


def alike(
    processor: ImageProcessor, lengths: Sequence[int], images: Sequence[Sequence[str]]
) -> list[list[int]]:
    """Rows that can be one batch: of one length, with images of one shape."""
    groups: dict[Any, list[int]] = {}
    for row, (length, its) in enumerate(zip(lengths, images, strict=True)):
        groups.setdefault((length, processor.shape(its)), []).append(row)
    return list(groups.values())


def read_with_images(
    reader: ModelReader,
    processor: ImageProcessor,
    packed: tuple[Tensor, Tensor, Tensor],
    images: Sequence[Sequence[str]],
) -> Tensor:
    """What predicts the targets, ``[K, ...]``; rows without images are read as ever."""
    # packed: ids [N], lengths [B], target mask [N], on the host.
    # images: of each row, base 64; perhaps none.
    ids, lengths, mask = packed
    sequence = sequence_index(lengths)
    rows_of_targets = sequence[mask]
    has_images = torch.tensor([bool(its) for its in images])
    parts, places = [], []
    plain = ~has_images[sequence]
    if bool(mask[plain].any()):
        targets = targets_of(ids[plain], lengths[~has_images], mask[plain])
        parts.append(reader.read(targets))
        places.append((~has_images[rows_of_targets]).nonzero().squeeze(1))
    with_images: list[int] = has_images.nonzero().squeeze(1).tolist()
    rows, masks = ids.split(lengths.tolist()), mask.split(lengths.tolist())
    with own_positions(reader.model):
        for group in alike(
            processor, [len(rows[i]) for i in with_images], [images[i] for i in with_images]
        ):
            members = [with_images[k] for k in group]
            # The token at position t is predicted by what was read at t - 1.
            at = torch.stack([masks[i][1:] for i in members]).nonzero()
            if not len(at):
                continue
            stacked = on_device(torch.stack([rows[i] for i in members]), reader.model.device)
            media = model_inputs(reader.model, processor, stacked, [images[i] for i in members])
            parts.append(reader.pick({"input_ids": stacked, **media}, at[:, 0], at[:, 1]))
            places += [(rows_of_targets == i).nonzero().squeeze(1) for i in members]
    return torch.cat(parts)[on_device(torch.cat(places).argsort(), reader.model.device)]


def model_inputs(
    model: PreTrainedModel, processor: ImageProcessor, ids: Tensor, images: Sequence[Sequence[str]]
) -> dict[str, Tensor]:
    """What a model takes beside token ids ``[B, L]``, in its precision."""
    return {
        name: value.to(model.dtype) if value.is_floating_point() else value
        for name, value in processor.inputs(ids, images).items()
    }


class RowPositions:
    """What a model keeps of the positions of the rows that it read last, beside its cache.

    Models with positions in three dimensions count on from where the images ended.
    """

    def __init__(self, model: nn.Module) -> None:
        self._holders: list[Any] = [m for m in model.modules() if hasattr(m, "rope_deltas")]

    def take(self, index: Tensor) -> None:
        """Go on with some of the rows."""
        for holder in self._holders:
            if isinstance(holder.rope_deltas, Tensor):
                holder.rope_deltas = holder.rope_deltas[index]

    def forget(self) -> None:
        """The next rows have positions of their own."""
        for holder in self._holders:
            holder.rope_deltas = None


@contextmanager
def own_positions(model: nn.Module) -> Iterator[RowPositions]:
    """Inside, rows with images are read; others that come later are not placed like them."""
    positions = RowPositions(model)
    try:
        yield positions
    finally:
        positions.forget()


def run_image_trial(model: PreTrainedModel, processor: ImageProcessor, *, who: str) -> ReadingTrial:
    """Try a model's own forward on rows with images, one at a time."""
    # The first two rows differ in their images alone.
    name = type(model).__name__
    if "pixel_values" not in forward_parameters(model):
        raise TypeError(
            f"{who}: the forward of {name} takes no pixel_values, so it reads no images. Leave "
            "processor= out, or load the model with AutoModelForImageTextToText."
        )
    images = [[noise_image(seed)] for seed in (0, 1, 0)]
    text = trial_rows(model)
    rows = [
        torch.cat([words[:3], words.new_tensor(processor.process(its).ids), words[3:]])
        for words, its in zip((text[0], text[0], text[1]), images, strict=True)
    ]
    with evaluation_mode(model), own_positions(model) as positions:

        def inputs(i: int) -> dict[str, Tensor]:
            positions.forget()
            return model_inputs(model, processor, rows[i][None], [images[i]])

        failure = (
            f"{who}: the forward of {name} fails for a row with an image as "
            f"{type(processor.processor).__name__} processes it (do they belong together?)"
        )
        return own_log_probs(model, rows, inputs, failure, images)


@torch.no_grad()
def check_image_reading(reader: ModelReader, processor: ImageProcessor, *, who: str) -> None:
    """Check that rows with images, read together, get what the model says of each alone."""
    model = reader.model
    trial = run_image_trial(model, processor, who=who)
    ids, lengths = pack([row.cpu() for row in trial.rows])
    mask = torch.cat([torch.arange(len(row)) >= len(row) - 2 for row in trial.rows])
    with evaluation_mode(model):
        outputs = read_with_images(reader, processor, (ids, lengths, mask), trial.images)
        logits = outputs if reader.head is None else reader.head(outputs)
    targets = on_device(ids[mask], logits.device)
    log_p = logits.double().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    difference = trial.difference(log_p.split(2))
    if not trial.allows(difference):
        raise ValueError(
            f"{who}: rows with images that {type(model).__name__} reads together get other "
            f"log-probs than each alone: off by {difference}."
        )
