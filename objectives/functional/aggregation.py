"""From tokens to sequences to the loss, over the whole accumulation window, and to metrics."""

from typing import Final, Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

# Sums and means over the sequences of a batch, the same for both layouts.
#
# Every function of this package that looks at whole sequences takes its tokens in one of two forms:
#
# * **padded**: values ``[B, T]``, ``lengths=None``; a row is a sequence;
# * **packed**: values ``[N]``, the sequences one after the other, and ``lengths`` ``[B]`` that sum
#   to N (a length may be 0).
#
# Both give the same numbers. All shapes are static, so the functions compile into one graph.
#
# A mask says which tokens count; None: all of them do.
#
# Shape legend: B sequences, T tokens of the longest one, N tokens of all of them; ``*shape`` is
# ``[B, T]`` or ``[N]``.


def masked(
    values: Shaped[Tensor, "*shape"], mask: Bool[Tensor, "*shape"] | None, fill: float = 0.0
) -> Shaped[Tensor, "*shape"]:
    """Values with another one outside the mask, whatever they hold there, without gradient."""
    return values if mask is None else values.masked_fill(~mask, fill)


def flagged(
    flag: Bool[Tensor, "*shape"], mask: Bool[Tensor, "*shape"] | None
) -> Bool[Tensor, "*shape"]:
    """A flag, False outside the mask."""
    return flag if mask is None else flag & mask


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


# From one value per token to the loss, or to a metric: where the mean is taken.
#
# This is the main difference between GRPO, DAPO and Dr. GRPO. Each function divides by a count that
# belongs to the whole accumulation window: pass ``num_active_tokens`` or ``num_sequences`` of the
# window, and the losses of its micro-batches **add up** to the loss of the window, however it was
# split. Without them the window is the given batch.
#
# A mask that depends on the policy (KL, entropy quantile, off-policy) belongs into the values, as
# zeros, not into the ``mask`` here: the count must be known before the first micro-batch.
#
# Shape legend: B sequences, T tokens, N packed tokens; ``*shape`` is ``[B, T]`` or ``[N]``.

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length", "sequence_sum", "none"]
AGGREGATIONS: Final[tuple[Aggregation, ...]] = (
    "token_mean",
    "sequence_mean",
    "fixed_length",
    "sequence_sum",
    "none",
)
Count = int | float | Tensor


def _num_sequences(values: Tensor, lengths: Tensor | None, count: Count | None) -> Count:
    if count is not None:
        return count
    return max(values.shape[0] if lengths is None else lengths.shape[0], 1)


def token_mean(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    *,
    num_active_tokens: Count | None = None,
) -> Float[Tensor, ""]:
    """Sum over the active tokens, divided by their number (BNPO, DAPO).

    Args:
        values: ``[B, T]`` or ``[N]``.
        mask: True where a token is active; None for all.
        num_active_tokens: of the whole window; None for those of this batch.

    Returns:
        A scalar; 0 when nothing is active.

    See Also:
        Yu et al., 2025 (DAPO), arXiv:2503.14476, eq. 8.
    """
    total = masked(values, mask).sum()
    if num_active_tokens is None:
        num_active_tokens = max(values.numel(), 1) if mask is None else mask.sum().clamp(min=1)
    return total / num_active_tokens


def mean_of_sequence_means(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
    *,
    num_sequences: Count | None = None,
) -> Float[Tensor, ""]:
    """Mean over the sequences of the mean over their active tokens (GRPO).

    Args:
        values: ``[B, T]`` or ``[N]``.
        mask: True where a token is active; None for all. A sequence without any counts, with 0.
        lengths: ``[B]`` when packed.
        num_sequences: of the whole window; None for B.

    Returns:
        A scalar.

    Raises:
        ValueError: the shapes are neither layout.

    See Also:
        Shao et al., 2024 (GRPO), arXiv:2402.03300, eq. 3.
    """
    total = sequence_mean(values, mask, lengths).sum()
    return total / _num_sequences(values, lengths, num_sequences)


def fixed_length_mean(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
    *,
    max_tokens: int,
    num_sequences: Count | None = None,
) -> Float[Tensor, ""]:
    """Sum over the active tokens, divided by B times a constant length (Dr. GRPO).

    Args:
        values: ``[B, T]`` or ``[N]``.
        mask: True where a token is active; None for all.
        lengths: ``[B]`` when packed.
        max_tokens: the constant, the longest response that generation allows.
        num_sequences: of the whole window; None for B.

    Returns:
        A scalar.

    Raises:
        ValueError: ``max_tokens`` is not positive, or the shapes are neither layout.

    See Also:
        Liu et al., 2025 (Dr. GRPO), arXiv:2503.20783, section 3.2.
    """
    if not max_tokens > 0:
        raise ValueError(f"max_tokens must be positive, got {max_tokens}.")
    check_layout(values, lengths)
    total = masked(values, mask).sum()
    return total / (_num_sequences(values, lengths, num_sequences) * max_tokens)


def mean_of_sequence_sums(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
    *,
    num_sequences: Count | None = None,
) -> Float[Tensor, ""]:
    """Mean over the sequences of the sum over their active tokens (LUSPO).

    Args:
        values: ``[B, T]`` or ``[N]``.
        mask: True where a token is active; None for all.
        lengths: ``[B]`` when packed.
        num_sequences: of the whole window; None for B.

    Returns:
        A scalar.

    Raises:
        ValueError: the shapes are neither layout.

    See Also:
        Liu et al., 2026 (LUSPO), arXiv:2602.05261.
    """
    total = sequence_sum(values, mask, lengths).sum()
    return total / _num_sequences(values, lengths, num_sequences)


def aggregate(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
    *,
    aggregation: Aggregation | str,
    max_tokens: int | None = None,
    num_active_tokens: Count | None = None,
    num_sequences: Count | None = None,
) -> Tensor:
    """Reduce by name.

    Args:
        values: ``[B, T]`` or ``[N]``.
        mask: True where a token is active; None for all.
        lengths: ``[B]`` when packed.
        aggregation: ``"token_mean"``, ``"sequence_mean"``, ``"fixed_length"``,
            ``"sequence_sum"``; or ``"none"``: the values, 0 outside the mask.
        max_tokens: the constant of ``"fixed_length"``.
        num_active_tokens: of the whole window, for ``"token_mean"``.
        num_sequences: of the whole window, for the others.

    Returns:
        A scalar, or the shape of the values for ``"none"``.

    Raises:
        ValueError: the name is unknown, ``max_tokens`` is missing, or the shapes are neither
            layout.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {AGGREGATIONS}, got {aggregation!r}.")
    if aggregation == "none":
        return masked(values, mask)
    if aggregation == "token_mean":
        return token_mean(values, mask, num_active_tokens=num_active_tokens)
    if aggregation == "fixed_length":
        if max_tokens is None:
            raise ValueError("aggregation 'fixed_length' divides by max_tokens: pass it.")
        return fixed_length_mean(
            values, mask, lengths, max_tokens=max_tokens, num_sequences=num_sequences
        )
    reduce = mean_of_sequence_means if aggregation == "sequence_mean" else mean_of_sequence_sums
    return reduce(values, mask, lengths, num_sequences=num_sequences)


# Metrics to watch, from the same tensors as the loss; nothing is differentiated -------------------


def effective_sample_fraction(
    log_ratio: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"] | None = None
) -> Float[Tensor, ""]:
    """Effective sample size of the importance weights, as a fraction of the active tokens.

    Args:
        log_ratio: in nats, ``[B, T]`` or ``[N]``.
        mask: True where a token counts; None for all.

    Returns:
        ``(sum r)^2 / (n sum r^2)``, in (0, 1]; 1 when all weights are equal, and when nothing is
        active.

    See Also:
        Kong, 1992, "A note on importance sampling using standardized weights".
    """
    weights = masked(log_ratio.detach(), mask, -torch.inf).flatten()
    count = masked(torch.ones_like(weights), None if mask is None else mask.flatten()).sum()
    # A low number beside them, any number of times, so that there is a finite largest one.
    floor = weights.new_full((1,), -1e30)  # mutate: equivalent (any large number)
    scaled = (weights - torch.cat([weights, floor]).max()).exp()
    fraction = scaled.sum().square() / (count * scaled.square().sum())
    return fraction.masked_fill(count == 0, 1.0)


def flag_fraction(
    flag: Bool[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    *,
    num_active_tokens: Count | None = None,
) -> Float[Tensor, ""]:
    """Fraction of the active tokens that carry a flag, such as a clip.

    Args:
        flag: ``[B, T]`` or ``[N]``.
        mask: True where a token counts; None for all.
        num_active_tokens: of the whole window; None for those of this batch.

    Returns:
        A scalar in [0, 1].
    """
    return token_mean(flagged(flag, mask).float(), mask, num_active_tokens=num_active_tokens)
