"""Checks of what an engine is asked and gives, where a policy reads it: it may be anybody's."""

import inspect
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from torchrl_data import page
from torchrl_data.checks import takes_argument
from torchrl_data.conversation import stream_number
from torchrl_data.keys import SAMPLING_MASK
from torchrl_modules.sampling.parameters import SamplingParameters

from .engine import AsyncEngine, Engine, Generation, VersionSpan

_ROUNDING: Final = 1e-3
"""A log-prob above 0 by less is one of 0, in the precision of the engine."""


def check_engine(engine: Any, *, who: str) -> None:
    """Check that an object has what a policy asks of an engine, for batches or for each caller.

    Args:
        engine: the object; what it gives is checked by :func:`checked`.
        who: takes it; named in the error.

    Raises:
        TypeError: something is missing; the message says what.
    """
    faults = [] if hasattr(engine, "version") else ["has no version"]
    for_batches = hasattr(engine, "generate") or not hasattr(engine, "respond")
    draws = "generate" if for_batches else "respond"
    for name, option in ((draws, "max_new_tokens"), ("update_weights", "version")):
        method = getattr(engine, name, None)
        if not callable(method):
            faults.append(f"has no method {name}")
        elif not takes_argument(method, option):
            faults.append(f"has a {name} that does not take {option}=")
    if faults:
        raise TypeError(
            f"{who}: the engine {type(engine).__name__} {' and '.join(faults)}. An engine has a "
            "version, generate(prompts, params, *, max_new_tokens=None) and "
            f"update_weights(state_dict, *, version=None). See {page('docs/policies.md')}."
        )


def checked(
    engine: Engine | AsyncEngine, given: Any, params: SamplingParameters, num_prompts: int
) -> list[Generation]:
    """Return what an engine gave, if it is what an engine promises.

    Args:
        engine: whose; no token is of a later version than its own.
        given: by ``generate``, or in a list by ``respond``.
        params: what it was asked for.
        num_prompts: as many responses are due.

    Raises:
        ValueError: it is something else; the message says what, and what is due.
    """
    found = len(given) if isinstance(given, list | tuple) else type(given).__name__
    faults: Iterable[str] = [f"it gave {found}"]
    if found == num_prompts:
        faults = (_fault_of(row, each, params, engine) for row, each in enumerate(given))
    if fault := next(filter(None, faults), ""):
        raise ValueError(
            f"{type(engine).__name__} does not do what an engine promises, for {num_prompts} "
            f"prompts: {fault}. Give one Generation per prompt, in order, of plain lists: see "
            "torchrl_modules.Engine and AsyncEngine."
        )
    return list(given)


def _fault_of(row: int, given: Any, params: SamplingParameters, engine: Any) -> str:
    """Return what is wrong with a response, or nothing."""
    if not isinstance(given, Generation):
        return f"response {row} is a {type(given).__name__}, not a Generation"
    columns: dict[str, Any] = {"ids": given.ids, "log_probs": given.log_probs}
    columns |= given.reported(params)
    if params.sampling_mask:
        columns[SAMPLING_MASK] = given.sampling_masks
    sizes = [len(each) if isinstance(each, Sequence) else -1 for each in columns.values()]
    if given.finish_reason not in (("error",) if given.error else ("stop", "length", "abort")):
        return f"response {row} has finish_reason {given.finish_reason!r}, error={given.error!r}"
    if set(sizes) != {max(sizes[0], 0)}:
        return f"response {row} has no lists of one length, {columns!r:.200}"
    if not {int}.issuperset(map(type, given.ids)) or min(given.ids, default=0) < 0:
        return f"response {row} has ids that are none of tokens, {given.ids!r:.80}"
    spans = given.versions or ()  # an engine need not know
    known = all(isinstance(s, VersionSpan) and 0 <= s[0] <= engine.version for s in spans)
    if not known or len(given.token_versions(0)) != len(given.ids):
        return f"response {row} has {spans!r:.200}, and the engine has version {engine.version}"
    fault = log_prob_fault(given) if given.error is None else ""
    return fault and f"response {row} {fault}"


def check_prompt(prompt: Sequence[int], *, vocab_size: int | None, max_model_len: int) -> list[int]:
    """Give the token ids of a row that an engine can serve.

    Args:
        prompt: the ids.
        vocab_size: ids are below it; ``None`` for any.
        max_model_len: most tokens of a prompt and its response.

    Raises:
        ValueError: there are none, too many, or one is no token.
    """
    try:
        ids = array("q", prompt).tolist()
    except (TypeError, OverflowError) as error:
        raise ValueError(f"The prompt is not a sequence of token ids: {error}.") from error
    if not ids:
        raise ValueError("The prompt is empty.")
    if len(ids) >= max_model_len:
        raise ValueError(
            f"The prompt has {len(ids)} tokens, which leaves no room for a response: "
            f"max_model_len is {max_model_len}."
        )
    for token in (min(ids), max(ids)):
        if not 0 <= token < (vocab_size or math.inf):
            raise ValueError(
                f"The prompt holds the token id {token}; the vocabulary has {vocab_size}."
            )
    return ids


def log_prob_fault(given: Generation) -> str:
    """Return what is wrong with the log-probs of a response, or nothing."""
    if len(given.log_probs) != len(given.ids):
        return f"has {len(given.log_probs)} log-probs for {len(given.ids)} tokens"
    wrong = [x for x in given.log_probs if not -math.inf < x < _ROUNDING]
    return f"has a log-prob that is no finite number of at most 0: {wrong[0]}" if wrong else ""


def seeded(
    engine: Engine, params: SamplingParameters, seeds: Sequence[int] | None
) -> tuple[SamplingParameters, dict[str, Any]]:
    """With what an engine draws each row by a seed of its own.

    Args:
        engine: whose ``generate`` takes ``seeds=``, or not.
        params: the distribution.
        seeds: one per prompt; ``None`` without.

    Returns:
        Its parameters and further arguments. An engine that takes no seeds gets one that follows
        from all of them.
    """
    if not seeds:
        return params, {}
    if "seeds" in inspect.signature(engine.generate).parameters:
        return params, {"seeds": list(seeds)}
    return replace(params, seed=stream_number(*seeds)), {}
