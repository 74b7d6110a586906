"""From one value per token to the loss: where the mean is taken.

This is the main difference between GRPO, DAPO and Dr. GRPO. Each function divides by a count that
belongs to the whole accumulation window: pass ``num_active_tokens`` or ``num_sequences`` of the
window, and the losses of its micro-batches **add up** to the loss of the window, however it was
split. Without them the window is the given batch.

A mask that depends on the policy (KL, entropy quantile, off-policy) belongs into the values, as
zeros, not into the ``mask`` here: the count must be known before the first micro-batch.

Shape legend: B sequences, T tokens, N packed tokens; ``*shape`` is ``[B, T]`` or ``[N]``.
"""

from typing import Final, Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

from .sequences import check_layout, masked, sequence_mean, sequence_sum

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
