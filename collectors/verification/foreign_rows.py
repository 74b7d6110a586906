"""Rollouts of TRL and verl as rows to verify, read as data: neither has to be installed.

Shape legend: B rows, P tokens of the longest prompt, R of the longest response (padded).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from .sampled_row import SampledRow

_TRL: Final = ("prompt_ids", "completion_ids")
_VERL: Final = ("prompts", "responses", "attention_mask")
_LOG_PROBS: Final = ("sampling_per_token_logps", "logprobs", "old_per_token_logps")
_SUFFIXES: Final = (".json", ".jsonl", ".pt", ".safetensors")


def read_foreign_rows(path: Path) -> list[SampledRow]:
    """The rows of a file of TRL or verl.

    Args:
        path: a ``.pt`` or ``.safetensors`` file with the tensors of a batch, or a ``.json`` or
            ``.jsonl`` file with lists in their place, a batch or a row a line. A batch is what
            TRL's ``GRPOTrainer`` trains on (``prompt_ids``, ``completion_ids``, their masks,
            ``sampling_per_token_logps``, ``tool_mask``), what its ``rollout_func`` returns
            (``prompt_ids``, ``completion_ids``, ``logprobs``, ``env_mask``), or the ``batch`` of a
            verl ``DataProto`` (``prompts``, ``responses``, ``attention_mask``, ``response_mask``,
            ``rollout_log_probs``). Nothing is unpickled but tensors.

    Raises:
        ValueError: the file is of another kind, or a batch is none of these, or a column has not
            one value for each token.
    """
    found: list[SampledRow] = []
    for number, batch in enumerate(_batches(path), 1):
        found += rows_of_batch(batch, name=f"{path.name}, batch {number}")
    if not found:
        raise ValueError(f"{path} holds no row.")
    return found


def _batches(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"{path} must end in one of {', '.join(_SUFFIXES)}.")
    if path.suffix == ".safetensors":
        yield load_file(path)
    elif path.suffix == ".pt":
        loaded = torch.load(path, weights_only=True, map_location="cpu")
        yield from loaded if isinstance(loaded, list) else [loaded]
    else:
        text = path.read_text(encoding="utf-8")
        pieces = text.splitlines() if path.suffix == ".jsonl" else [text]
        for piece in filter(str.strip, pieces):
            value = json.loads(piece)
            yield from value if isinstance(value, list) else [value]


def rows_of_batch(batch: Mapping[str, Any], *, name: str = "batch") -> list[SampledRow]:
    """A batch of TRL or verl, or one row of it, as rows to verify.

    Args:
        batch: columns by name, see :func:`read_foreign_rows`.
        name: of the batch, for people.

    Raises:
        ValueError: it is of neither, has no log-probs, or a column has not one value for each
            token.
    """
    if all(key in batch for key in _TRL):
        columns = _columns_of_trl(batch)
    elif all(key in batch for key in _VERL):
        columns = _columns_of_verl(batch)
    else:
        known = f"{', '.join(_TRL)} (TRL) nor {', '.join(_VERL)} (verl)"
        raise ValueError(f"{name} has neither {known}; it has {sorted(map(str, batch))[:12]}.")
    rows = []
    for number, (prompt, response, log_probs, mask) in enumerate(zip(*columns, strict=True)):
        where = f"{name}, row {number}"
        if not len(response) == len(log_probs) == len(mask):
            raise ValueError(
                f"{where}: {len(response)} tokens of a response, but {len(log_probs)} log-probs "
                f"and {len(mask)} in its mask. Were the tokens encoded again after sampling?"
            )
        if not any(mask):
            continue
        before = len(prompt)
        rows.append(
            SampledRow(
                name=where,
                ids=[*prompt, *response],
                sampled=[False] * before + [bool(each) for each in mask],
                log_probs=[math.nan] * before + [float(each) for each in log_probs],
                versions=[None] * (before + len(response)),
                batch=name,
            )
        )
    return rows


_Columns = tuple[list[list[int]], list[list[int]], list[list[float]], list[list[int]]]


def _columns_of_trl(batch: Mapping[str, Any]) -> _Columns:
    """Prompts, completions, log-probs and masks; padding, where there are masks of it, is gone."""
    name = next((name for name in _LOG_PROBS if batch.get(name) is not None), None)
    if name is None:
        raise ValueError(f"a batch of TRL has none of {', '.join(_LOG_PROBS)}: record one of them.")
    prompts, completions = (_lists(batch[key]) for key in _TRL)
    log_probs = _lists(batch[name])
    is_prompt = _mask_of(batch, "prompt_mask", prompts)
    is_completion = _mask_of(batch, "completion_mask", completions)
    own = batch.get("tool_mask", batch.get("env_mask"))
    sampled = is_completion if own is None else _lists(own)
    return (
        _kept(prompts, is_prompt),
        _kept(completions, is_completion),
        _kept(log_probs, is_completion),
        _kept(sampled, is_completion),
    )


def _columns_of_verl(batch: Mapping[str, Any]) -> _Columns:
    """The same of verl, whose prompts are padded on the left and responses on the right."""
    if batch.get("rollout_log_probs") is None:
        raise ValueError(
            "a batch of verl has no rollout_log_probs: set "
            "actor_rollout_ref.rollout.calculate_log_probs=true."
        )
    prompts, responses = _lists(batch["prompts"]), _lists(batch["responses"])
    attended = _lists(batch["attention_mask"])
    is_prompt = [row[: len(own)] for row, own in zip(attended, prompts, strict=True)]
    is_response = [row[len(own) :] for row, own in zip(attended, prompts, strict=True)]
    sampled = is_response
    if batch.get("response_mask") is not None:
        sampled = _lists(batch["response_mask"])
    return (
        _kept(prompts, is_prompt),
        _kept(responses, is_response),
        _kept(_lists(batch["rollout_log_probs"]), is_response),
        _kept(sampled, is_response),
    )


def _lists(values: Any) -> list[list[Any]]:
    """Rows of a column; one of a single row is a column of one."""
    if isinstance(values, Tensor):
        values = values.tolist()
    rows: Sequence[Any] = values if len(values) and isinstance(values[0], list) else [values]
    return [list(row) for row in rows]


def _mask_of(batch: Mapping[str, Any], name: str, rows: list[list[int]]) -> list[list[int]]:
    given = batch.get(name)
    return [[1] * len(row) for row in rows] if given is None else _lists(given)


def _kept(rows: list[list[Any]], masks: list[list[int]]) -> list[list[Any]]:
    """What a mask leaves of each row; a row of another length than its mask is left as it is."""
    return [
        [value for value, here in zip(row, mask, strict=True) if here]
        if len(row) == len(mask)
        else row
        for row, mask in zip(rows, masks, strict=True)
    ]
