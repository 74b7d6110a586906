"""The hidden states of rows: packed, padded, or with images."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_data.messages import noise_image
from torchrl_data.ragged import cumulative_lengths, pack, pad, sequence_index
from torchrl_data.templates.encoder import ImageProcessor

from .models import (
    Trial,
    call,
    evaluation_mode,
    forward_parameters,
    is_linear,
    own_log_probs,
    trial_rows,
)
from .packed_attention import build_trie, can_share, packed_input

# How packed rows go through a model: what they must be, and which tokens it reads together.
#
# Shape legend: N packed tokens, B sequences, T tokens of the longest, K target tokens, D hidden
# size, V vocabulary.


class Layout(Enum):
    """Which tokens a model reads together, the fastest first."""

    PACKED = "packed"
    """All rows one after the other, what they begin with in common once."""
    PADDED = "padded"
    """Rows padded on the right, with a mask."""
    BY_LENGTH = "by length"
    """Rows of one length at a time, as the model computes a row alone."""


class Targets(NamedTuple):
    """What is to be predicted, and from where."""

    ids: Tensor
    """int64 ``[N]``."""
    starts: Tensor
    """int64 ``[B]``, of each row in the packed tokens."""
    ends: Tensor
    """int64 ``[B]``: this many tokens of each row have to be read."""
    rows: Tensor
    """int64 ``[K]``: the row of each target."""
    positions: Tensor
    """int64 ``[K]``, in the row, of the token that predicts each target."""
    lengths: Tensor
    """int64 ``[B]``."""

    def beginnings(self, rows: Tensor) -> list[Tensor]:
        """The tokens of some rows that have to be read."""
        starts, ends = self.starts[rows].tolist(), self.ends[rows].tolist()
        return [self.ids[a : a + n] for a, n in zip(starts, ends, strict=True)]


def targets_of(ids: Tensor, lengths: Tensor, target_mask: Tensor) -> Targets:
    """The targets of packed rows."""
    # ids: int64 [N]; lengths: int64 [B]; target_mask: bool [N]; no first token of a row.
    starts = cumulative_lengths(lengths)[:-1]
    at = target_mask.nonzero().squeeze(1)
    rows = sequence_index(lengths)[at]
    # The token at position t is predicted by the hidden state at t - 1, and what comes after the
    # predictor of a row's last target is needed by nobody.
    positions = at - starts[rows] - 1
    ends = torch.zeros_like(lengths).scatter_reduce(0, rows, positions + 1, "amax")
    return Targets(ids, starts, ends, rows, positions, lengths)


def check_packed(
    ids: Tensor,
    lengths: Tensor,
    target_mask: Tensor,
    vocab_size: int,
    processor: ImageProcessor | None,
    images: Sequence[Sequence[str]] | None,
) -> None:
    """Check packed sequences, their targets, and that they have the images of their tokens."""
    if ids.ndim != 1 or ids.shape != target_mask.shape or int(lengths.sum()) != len(ids):
        raise ValueError(
            f"score_packed takes ids [N], lengths that sum to N and a mask [N]; got ids "
            f"{tuple(ids.shape)}, lengths that sum to {int(lengths.sum())}, mask "
            f"{tuple(target_mask.shape)}."
        )
    if bool((lengths < 1).any()):
        raise ValueError(f"score_packed: a sequence is empty; lengths are {lengths.tolist()}.")
    starts = cumulative_lengths(lengths)[:-1].to(target_mask.device)
    if bool(target_mask[starts].any()):
        raise ValueError(
            "score_packed: the first token of a sequence is a target, but nothing comes before "
            "it to predict it."
        )
    if processor is None and images and any(images):
        raise ValueError(
            "score_packed: the sequences have images, and the scorer reads none. Give it the "
            "processor of the vision-language model: TransformersWrapper(processor=...)."
        )
    if processor is not None and (images is not None or bool((ids == processor.token_id).any())):
        rows = ids.split(lengths.tolist())
        for i, (row, its) in enumerate(zip(rows, images or [[]] * len(rows), strict=True)):
            if fault := processor.fault(row, its):
                raise ValueError(
                    f"score_packed: sequence {i} can't be scored: {fault}. A batch keeps them in "
                    "'images', which a loss hands on."
                )
    unknown = (ids < 0) | (ids >= vocab_size)
    if bool(unknown.any()):
        at = int(unknown.nonzero()[0])
        row = int(sequence_index(lengths)[at])
        raise ValueError(
            f"score_packed: token {at - int(lengths[:row].sum())} of sequence {row} has the id "
            f"{int(ids[at])}, but the model's vocabulary ends at {vocab_size - 1}. Was it encoded "
            "with another tokenizer?"
        )


class ModelReader:
    """Reads packed rows with a model, and gives what predicts their targets."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        layout: Layout,
        head: nn.Linear | None,
        share_prefixes: bool = True,
    ) -> None:
        self.layout = layout
        self.head = head
        self.model = model
        self._share = share_prefixes
        takes = forward_parameters(model)
        any_name = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
        self._no_cache = {"use_cache": False} if any_name or "use_cache" in takes else {}
        self._picks_logits = "logits_to_keep" in takes

    def read(self, targets: Targets) -> Tensor:
        """Hidden states ``[K, D]`` that predict the targets, or float32 logits ``[K, V]``."""
        inputs: dict[str, Any]
        if self.layout is Layout.PACKED:
            share = self._share and can_share(self.model, int(targets.ends.max()))
            trie = build_trie(targets.ids, targets.lengths, targets.ends, share=share)
            at = trie.node[targets.starts[targets.rows] + targets.positions]
            inputs = {"input_ids": trie.ids[None], "position_ids": trie.positions[None]}
            with packed_input():
                return self.pick({**inputs, "trie": trie}, torch.zeros_like(at), at)
        if self.layout is Layout.PADDED:
            used = targets.ends.nonzero().squeeze(1)
            place = torch.zeros_like(targets.ends)
            place[used] = torch.arange(len(used), device=used.device)
            rows = targets.beginnings(used)
            mask = pad([torch.ones_like(row) for row in rows], value=0)
            inputs = {"input_ids": pad(rows, value=0), "attention_mask": mask}
            return self.pick(inputs, place[targets.rows], targets.positions)
        parts, order = [], []
        for end in targets.ends[targets.ends > 0].unique():
            used = (targets.ends == end).nonzero().squeeze(1)
            rows = torch.stack(targets.beginnings(used))
            mine = torch.isin(targets.rows, used).nonzero().squeeze(1)
            place = torch.searchsorted(used, targets.rows[mine])
            parts.append(self.pick({"input_ids": rows}, place, targets.positions[mine]))
            order.append(mine)
        return torch.cat(parts)[torch.cat(order).argsort()]

    def pick(self, inputs: dict[str, Any], rows: Tensor, columns: Tensor) -> Tensor:
        """What the model gives at some rows and columns of its input, ``[K, ...]``."""
        if self.head is not None:
            outputs = self.model.base_model(**inputs, **self._no_cache).last_hidden_state
        else:
            if self._picks_logits:
                inputs["logits_to_keep"], columns = columns.unique(return_inverse=True)
            outputs = call(self.model, **inputs, **self._no_cache).logits.float()
        # One index and not two: its backward pass adds in a fixed order.
        return outputs.flatten(0, 1).index_select(0, rows * outputs.shape[1] + columns)


def plain_head(model: PreTrainedModel) -> nn.Linear | None:
    """The head, if the logits may be this product with the decoder's output and nothing else."""
    head = model.get_output_embeddings()
    # A head inside another module comes after something else; a model may be its own base.
    is_last = any(child is head for child in model.children()) and model.base_model is not model
    return head if is_linear(head) and is_last else None


# Rows with images, read by a model's own forward: those of one length and shape together.
#
# Shape legend: N packed tokens, B sequences, K target tokens, L tokens of a row, V vocabulary.


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
    # packed: ids [N], lengths [B], target mask [N].
    # images: of each row, base 64; perhaps none.
    ids, lengths, mask = packed
    sequence = sequence_index(lengths)
    rows_of_targets = sequence[mask]
    has_images = torch.tensor([bool(its) for its in images], device=ids.device)
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
            stacked = torch.stack([rows[i] for i in members])
            media = model_inputs(reader.model, processor, stacked, [images[i] for i in members])
            parts.append(reader.pick({"input_ids": stacked, **media}, at[:, 0], at[:, 1]))
            places += [(rows_of_targets == i).nonzero().squeeze(1) for i in members]
    return torch.cat(parts)[torch.cat(places).argsort()]


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


def run_image_trial(model: PreTrainedModel, processor: ImageProcessor, *, who: str) -> Trial:
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
    ids, lengths = pack(trial.rows)
    lengths = lengths.to(ids.device)
    tails = [torch.arange(len(row)) >= len(row) - 2 for row in trial.rows]
    mask = torch.cat(tails).to(ids.device)
    with evaluation_mode(model):
        outputs = read_with_images(reader, processor, (ids, lengths, mask), trial.images)
        logits = outputs if reader.head is None else reader.head(outputs)
    log_p = logits.double().log_softmax(-1).gather(1, ids[mask][:, None]).squeeze(1)
    difference = trial.difference(log_p.split(2))
    if not trial.allows(difference):
        raise ValueError(
            f"{who}: rows with images that {type(model).__name__} reads together get other "
            f"log-probs than each alone: off by {difference}."
        )
