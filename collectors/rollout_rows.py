"""Rows that a user's rollout function returns, checked before anything is built of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

PROMPT_IDS: Final = "prompt_ids"
COMPLETION_IDS: Final = "completion_ids"
LOG_PROBS: Final = "logprobs"
ENV_MASK: Final = "env_mask"
TRUNCATED_ROWS: Final = "truncated"
REQUIRED: Final = (PROMPT_IDS, COMPLETION_IDS, LOG_PROBS)
_ROUNDING: Final = 1e-6


class RolloutRow(NamedTuple):
    """A rollout of a user's function."""

    prompt_ids: list[int]
    completion_ids: list[int]
    log_probs: list[float]
    """One per completion token, in nats; 0 where the policy did not sample."""
    sampled: list[bool]
    """One per completion token: the policy sampled it."""
    truncated: bool
    extra: dict[str, Any]
    """The fields that reward functions get."""


def check_rollouts(
    outputs: Any, num_rows: int, *, vocab_size: int | None = None
) -> list[RolloutRow]:
    """Check what a rollout function returned.

    Args:
        outputs: a mapping of lists with an item per prompt: ``prompt_ids``, ``completion_ids``,
            ``logprobs``; ``env_mask`` (1 where the policy sampled the completion's token; all of
            them when absent), ``truncated`` (whether a rollout was cut) and any other fields.
        num_rows: prompts that the function was given.
        vocab_size: token ids are below it; ``None`` if nobody knows.

    Returns:
        One row per prompt.

    Raises:
        TypeError: something has the wrong type; the message names the key and the row.
        ValueError: a key is missing, a length is wrong, or a value is out of range; the message
            names the key and the row.
    """
    if not isinstance(outputs, Mapping):
        raise TypeError(
            f"rollout_func must return a dictionary of lists, got {type(outputs).__name__}."
        )
    missing = [key for key in REQUIRED if key not in outputs]
    if missing:
        raise ValueError(
            f"rollout_func must return {list(REQUIRED)}; {missing} are missing, and there are "
            f"{sorted(map(str, outputs))}."
        )
    named = {str(key): value for key, value in outputs.items()}
    columns = {key: _items(repr(key), value, num_rows, "prompt") for key, value in named.items()}
    rows = [{key: column[row] for key, column in columns.items()} for row in range(num_rows)]
    return [_row(values, row, vocab_size) for row, values in enumerate(rows)]


def _items(what: str, value: Any, num_items: int, per: str) -> list[Any]:
    """A list with so many items, whatever it was."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(
            f"rollout_func: {what} must be a list with an item per {per}, got "
            f"{type(value).__name__}."
        )
    if len(value) != num_items:
        raise ValueError(
            f"rollout_func: {what} has {len(value)} items for {num_items} {per}s; it needs one "
            "for each, in order."
        )
    return list(value)


def _row(values: Mapping[str, Any], row: int, vocab_size: int | None) -> RolloutRow:
    prompt = _token_ids(PROMPT_IDS, values[PROMPT_IDS], row, vocab_size)
    if not prompt:
        raise ValueError(f"rollout_func: {PROMPT_IDS!r} of row {row} is empty.")
    completion = _token_ids(COMPLETION_IDS, values[COMPLETION_IDS], row, vocab_size)
    aligned = {
        key: _items(f"{key!r} of row {row}", values[key], len(completion), "completion token")
        for key in (LOG_PROBS, ENV_MASK)
        if key in values
    }
    log_probs, sampled = aligned[LOG_PROBS], aligned.get(ENV_MASK, [True] * len(completion))
    if any(value not in (0, 1) for value in sampled):
        raise ValueError(f"rollout_func: {ENV_MASK!r} of row {row} must hold 0 and 1 only.")
    for i, (value, own) in enumerate(zip(log_probs, sampled, strict=True)):
        if not isinstance(value, int | float):
            raise TypeError(
                f"rollout_func: {LOG_PROBS!r} of row {row} must hold a number per token, got "
                f"{value!r:.60} for token {i}."
            )
        if own and not (math.isfinite(value) and value <= _ROUNDING):
            raise ValueError(
                f"rollout_func: {LOG_PROBS!r} of row {row} must be finite and at most 0 where the "
                f"policy sampled, got {value} for token {i}."
            )
    truncated = values.get(TRUNCATED_ROWS, False)
    if truncated not in (0, 1):
        raise TypeError(f"rollout_func: {TRUNCATED_ROWS!r} of row {row} must be True or False.")
    return RolloutRow(
        prompt,
        completion,
        [min(float(v), 0.0) if own else 0.0 for v, own in zip(log_probs, sampled, strict=True)],
        [bool(own) for own in sampled],
        bool(truncated),
        {k: v for k, v in values.items() if k not in (*REQUIRED, ENV_MASK, TRUNCATED_ROWS)},
    )


def _token_ids(key: str, value: Any, row: int, vocab_size: int | None) -> list[int]:
    value = value.tolist() if hasattr(value, "tolist") else value
    ids = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else None
    if ids is None or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise TypeError(
            f"rollout_func: {key!r} of row {row} must be a list of token ids, got {value!r:.60}."
        )
    bad = [i for i in ids if i < 0 or (vocab_size is not None and i >= vocab_size)]
    if bad:
        limit = "" if vocab_size is None else f"; the vocabulary has {vocab_size}"
        raise ValueError(f"rollout_func: {key!r} of row {row} holds the token id {bad[0]}{limit}.")
    return ids
