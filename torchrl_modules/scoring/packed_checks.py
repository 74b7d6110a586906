"""What packed sequences must be to be scored.

Shape legend: N packed tokens, B sequences.
"""

from collections.abc import Sequence

from torch import Tensor

from torchrl_data.ragged.packed import cumulative_lengths, sequence_index
from torchrl_data.templates.image_processor import ImageProcessor


def check_ids(ids: Tensor, lengths: Tensor, vocab_size: int) -> None:
    """Check that packed token ids are in the vocabulary."""
    unknown = (ids < 0) | (ids >= vocab_size)
    if bool(unknown.any()):
        at = int(unknown.nonzero()[0])
        row = int(sequence_index(lengths)[at])
        raise ValueError(
            f"score_packed: token {at - int(lengths[:row].sum())} of sequence {row} has the id "
            f"{int(ids[at])}, but the model's vocabulary ends at {vocab_size - 1}. Was it encoded "
            "with another tokenizer?"
        )


def check_packed(ids: Tensor, lengths: Tensor, target_mask: Tensor) -> None:
    """Check the shapes of packed sequences and of their targets."""
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


def check_images(
    processor: ImageProcessor | None,
    ids: Tensor,
    lengths: Tensor,
    images: Sequence[Sequence[str]] | None,
) -> None:
    """Check that packed sequences have the images that their tokens stand for."""
    if processor is None:
        if images and any(images):
            raise ValueError(
                "score_packed: the sequences have images, and the scorer reads none. Give it the "
                "processor of the vision-language model: TransformersWrapper(processor=...)."
            )
        return
    if images is None and not bool((ids == processor.token_id).any()):
        return
    rows = ids.split(lengths.tolist())
    for i, (row, its) in enumerate(zip(rows, images or [[]] * len(rows), strict=True)):
        if fault := processor.fault(row, its):
            raise ValueError(
                f"score_packed: sequence {i} can't be scored: {fault}. A batch keeps them in "
                "'images', which a loss hands on."
            )
