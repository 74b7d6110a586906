"""Parts of a ``TextEnvironment``: an engine, its sampling, named tools."""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, get_type_hints

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from torchrl_envs.rewards.scoring_call import scores_one_rollout
from torchrl_modules import SamplingParameters
from torchrl_modules.engines.engine import Engine

_log = logging.getLogger(__name__)
Tool = Callable[[str], Any]
_IGNORED: Final = frozenset({"pad_token_id", "do_sample", "eos_token_id"})
_NONE: Final = (("min_length", -1), ("min_length", 0), ("top_k", 0.0))
"""What TRL's examples give where there is no bound; no end of a sequence is ``eos_token_id=-1``."""


def engine_of(model: Any) -> Engine:
    """Return what generates: a Transformers model, a policy's engine, or an engine itself.

    Raises:
        TypeError: it is none of them.
    """
    if isinstance(model, PreTrainedModel):
        from torchrl_modules.engines.transformers import TransformersEngine

        return TransformersEngine(model)
    engine = getattr(model, "engine", model)
    if not (hasattr(engine, "generate") and hasattr(engine, "update_weights")):
        raise TypeError(
            "TextEnvironment: model must be a Transformers model, a policy or an engine, got "
            f"{type(model).__name__}."
        )
    return engine


def named_tools(tools: Mapping[str, Tool] | Sequence[Tool]) -> dict[str, Tool]:
    """Tools by name; those of a list are named after their function or class.

    Raises:
        TypeError: one can't be called.
        ValueError: a name is taken, empty, or can't be written in a request.
    """
    named: dict[str, Tool] = {}
    own = ((getattr(tool, "__name__", type(tool).__name__), tool) for tool in tools)
    for name, tool in tools.items() if isinstance(tools, Mapping) else own:
        if not callable(tool):
            raise TypeError(f"TextEnvironment: the tool {name} can't be called: {tool!r:.60}.")
        if not name or set(name) & set("<>"):
            raise ValueError(f"TextEnvironment: a tool can't be named {name!r} in a request.")
        if name in named:
            raise ValueError(
                f"TextEnvironment: two tools are named {name!r}; give tools={{name: tool}}."
            )
        named[name] = tool
    return named


def text_sampling(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    kwargs: Mapping[str, Any] | None,
    own_ends: Sequence[int] = (),
) -> SamplingParameters:
    """Sampling as ``generation_kwargs`` of TRL say it; a policy's own where there are none."""
    own = getattr(model, "sampling", None)
    if kwargs is None and isinstance(own, SamplingParameters):
        return own
    kwargs = dict(kwargs or {})
    ends = kwargs.get("eos_token_id", tokenizer.eos_token_id)
    ends = (ends,) if isinstance(ends, int) else tuple(ends or ())
    if "eos_token_id" not in kwargs:
        ends = tuple(dict.fromkeys([*ends, *own_ends]))
    settings: dict[str, Any] = {"stop_token_ids": tuple(end for end in ends if end != -1)}
    settings |= {k: v for k, v in kwargs.items() if k not in _IGNORED and (k, v) not in _NONE}
    if str(kwargs.get("do_sample", True)).lower() in ("false", "0"):
        settings["temperature"] = 0.0
    return SamplingParameters.from_kwargs(settings)


def scores_one_text(function: Callable[..., Any]) -> bool:
    """Return whether a reward function is of one text, and not of the texts of all episodes.

    It is if :func:`~torchrl_envs.row_reward` marked it, or its first parameter is
    annotated with ``str``.
    """
    if scores_one_rollout(function):
        return True
    try:
        parameters = list(inspect.signature(function).parameters)
        while isinstance(function, functools.partial):
            function = function.func
        own = function if inspect.isroutine(function) else type(function).__call__
        return bool(parameters) and get_type_hints(own).get(parameters[0]) is str
    except (NameError, TypeError, ValueError):  # built-ins, and names that only a checker knows
        return False
