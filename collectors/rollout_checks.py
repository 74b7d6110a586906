"""What a user's rollout function returns: checked, row by row, before anything is built of it."""

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
    """One rollout of a user's function."""

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
    columns = {str(key): _column(str(key), value, num_rows) for key, value in outputs.items()}
    extra = [key for key in columns if key not in {*REQUIRED, ENV_MASK, TRUNCATED_ROWS}]
    return [
        _row({key: column[row] for key, column in columns.items()}, row, extra, vocab_size)
        for row in range(num_rows)
    ]


def _column(key: str, value: Any, num_rows: int) -> list[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(
            f"rollout_func: {key!r} must be a list with an item per prompt, got "
            f"{type(value).__name__}."
        )
    if len(value) != num_rows:
        raise ValueError(
            f"rollout_func: {key!r} has {len(value)} items for {num_rows} prompts; it needs one "
            "for each, in order."
        )
    return list(value)


def _row(
    values: Mapping[str, Any], row: int, extra: Sequence[str], vocab_size: int | None
) -> RolloutRow:
    prompt = _token_ids(PROMPT_IDS, values[PROMPT_IDS], row, vocab_size)
    if not prompt:
        raise ValueError(f"rollout_func: {PROMPT_IDS!r} of row {row} is empty.")
    completion = _token_ids(COMPLETION_IDS, values[COMPLETION_IDS], row, vocab_size)
    sampled = [True] * len(completion)
    if ENV_MASK in values:
        sampled = _aligned(ENV_MASK, values[ENV_MASK], row, len(completion))
        if any(value not in (0, 1) for value in sampled):
            raise ValueError(f"rollout_func: {ENV_MASK!r} of row {row} must hold 0 and 1 only.")
    log_probs = _aligned(LOG_PROBS, values[LOG_PROBS], row, len(completion))
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
        {key: values[key] for key in extra},
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


def _aligned(key: str, value: Any, row: int, num_tokens: int) -> list[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(
            f"rollout_func: {key!r} of row {row} must be a list with an item per completion token, "
            f"got {type(value).__name__}."
        )
    if len(value) != num_tokens:
        raise ValueError(
            f"rollout_func: {key!r} of row {row} has {len(value)} items, but "
            f"{COMPLETION_IDS!r} has {num_tokens} tokens."
        )
    return list(value)
