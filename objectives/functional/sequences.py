"""Sums and means over the sequences of a batch, the same for both layouts.

Every function of this package that looks at whole sequences takes its tokens in one of two forms:

* **padded**: values ``[B, T]``, ``lengths=None``; a row is a sequence;
* **packed**: values ``[N]``, the sequences one after the other, and ``lengths`` ``[B]`` that sum
  to N (a length may be 0).

Both give the same numbers. All shapes are static, so the functions compile into one graph.

A mask says which tokens count; None: all of them do.

Shape legend: B sequences, T tokens of the longest one, N tokens of all of them; ``*shape`` is
``[B, T]`` or ``[N]``.
"""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


def masked(
    values: Shaped[Tensor, "*shape"], mask: Bool[Tensor, "*shape"] | None, fill: float = 0.0
) -> Shaped[Tensor, "*shape"]:
    """Values with another one outside the mask, whatever they hold there, without gradient.

    Raises:
        TypeError: the mask is not of booleans.
        ValueError: it has another number of dimensions than the values.
    """
    if mask is None:
        return values
    check_mask(mask)
    check_alike(values=values, mask=mask)
    return values.masked_fill(~mask, fill)


def flagged(
    flag: Bool[Tensor, "*shape"], mask: Bool[Tensor, "*shape"] | None
) -> Bool[Tensor, "*shape"]:
    """A flag, False outside the mask."""
    if mask is None:
        return flag
    check_mask(mask)
    return flag & mask


def check_mask(mask: Tensor, name: str = "mask") -> None:
    """Check that a mask is of booleans: ``~`` of other numbers is no negation.

    Raises:
        TypeError: it is not.
    """
    if mask.dtype != torch.bool:
        raise TypeError(
            f"{name} must be of booleans, got {mask.dtype}. Of a mask of 0 and 1 give {name}.bool()"
            ", of labels with -100 labels != -100."
        )


def check_alike(**tensors: Tensor) -> None:
    """Check that tensors of one value per token have one number of dimensions.

    Values ``[B]`` beside ``[B, T]`` would go by the columns where B is T. A scalar goes with all.

    Raises:
        ValueError: they differ.
    """
    shapes = {name: tuple(each.shape) for name, each in tensors.items() if each.ndim}
    if len({len(shape) for shape in shapes.values()}) > 1:
        raise ValueError(
            "Tensors of one value per token need one number of dimensions, found "
            f"{', '.join(f'{name} {list(shape)}' for name, shape in shapes.items())}. Of one value "
            "per sequence, [B], make values[:, None]; of packed tokens, [N], spread(values, like, "
            "lengths)."
        )


def check_layout(values: Tensor, lengths: Tensor | None) -> None:
    """Check that values and lengths are one of the two layouts."""
    expected = 2 if lengths is None else 1
    if values.ndim != expected:
        raise ValueError(
            f"Tokens are [B, T] without lengths, or packed [N] with them; found shape "
            f"{tuple(values.shape)} {'without' if lengths is None else 'with'} lengths. "
            "Add a batch dimension, or pass lengths."
        )
    if lengths is not None:
        check_lengths(lengths, values.shape[0])


def check_lengths(lengths: Int[Tensor, " B"], num_tokens: int) -> None:
    """Check that lengths sum to the tokens: on the CPU, elsewhere it would wait for the device."""
    if torch.compiler.is_compiling() or lengths.device.type != "cpu":
        return
    if int(lengths.sum()) != num_tokens:
        raise ValueError(
            f"Packed lengths must sum to the {num_tokens} tokens, got {int(lengths.sum())}."
        )


def sequence_index(lengths: Int[Tensor, " B"], num_tokens: int) -> Int[Tensor, " N"]:
    """Return which sequence each packed token belongs to.

    Args:
        lengths: tokens of each sequence, shape ``[B]``; a length may be 0.
        num_tokens: N, the sum of the lengths.

    Returns:
        int64 ``[N]``, in ``[0, B)``.

    Raises:
        ValueError: the lengths do not sum to N; checked on the CPU only.
    """
    check_lengths(lengths, num_tokens)
    positions = torch.arange(num_tokens, device=lengths.device)
    return torch.searchsorted(lengths.cumsum(0), positions, right=True)


def sequence_sum(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, " B"]:
    """Sum over the active tokens of each sequence.

    Args:
        values: ``[B, T]`` or ``[N]``; may hold anything where the mask is False, NaN included.
        mask: True where a token counts, same shape; None for all.
        lengths: ``[B]`` when packed.

    Returns:
        ``[B]``; 0 for a sequence without active tokens.

    Raises:
        ValueError: the shapes are neither layout.
    """
    check_layout(values, lengths)
    active = masked(values, mask)
    if lengths is None:
        return active.sum(-1)
    index = sequence_index(lengths, active.shape[0])
    return active.new_zeros(lengths.shape[0]).index_add(0, index, active)


def sequence_count(
    mask: Bool[Tensor, "*shape"],
    lengths: Int[Tensor, " B"] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " B"]:
    """Number of active tokens of each sequence.

    Args:
        mask: ``[B, T]`` or ``[N]``.
        lengths: ``[B]`` when packed.
        dtype: of the result.

    Returns:
        ``[B]``.

    Raises:
        ValueError: the shapes are neither layout.
    """
    return sequence_sum(mask.to(dtype), lengths=lengths)


def sequence_mean(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, " B"]:
    """Mean over the active tokens of each sequence.

    Args:
        values: ``[B, T]`` or ``[N]``; may hold anything where the mask is False.
        mask: True where a token counts; None for all.
        lengths: ``[B]`` when packed.

    Returns:
        ``[B]``; 0 for a sequence without active tokens.

    Raises:
        ValueError: the shapes are neither layout.
    """
    count = sequence_sum(masked(torch.ones_like(values), mask), lengths=lengths)
    return sequence_sum(values, mask, lengths) / count.clamp(min=1)


def spread(
    per_sequence: Float[Tensor, " B"], like: Tensor, lengths: Int[Tensor, " B"] | None = None
) -> Float[Tensor, "*shape"]:
    """Give each token the value of its sequence.

    Args:
        per_sequence: ``[B]``.
        like: a tensor of the shape to fill, ``[B, T]`` or ``[N]``; its values are not read.
        lengths: ``[B]`` when packed.

    Returns:
        The shape of ``like``.

    Raises:
        ValueError: the shapes are neither layout.
    """
    check_layout(like, lengths)
    if lengths is None:
        return per_sequence.unsqueeze(-1).expand(like.shape)
    # Indices repeat: the backward of indexing would add in any order, that of this does not.
    return per_sequence.index_select(0, sequence_index(lengths, like.shape[0]))


def at_least_float32(values: Tensor) -> Tensor:
    """The values in float32, or as they are when they are wider."""
    return values if values.dtype == torch.float64 else values.float()
