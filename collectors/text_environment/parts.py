"""What a ``TextEnvironment`` is made from: an engine, its sampling, named tools."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, get_type_hints

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from torchrl_envs.rewards.calls import scores_one_rollout
from torchrl_modules import SamplingParameters
from torchrl_modules.engines.protocol import Engine

Tool = Callable[[str], Any]
_IGNORED: Final = frozenset({"pad_token_id", "do_sample", "eos_token_id"})


def tokenizer_of(model: Any, given: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    """The tokenizer that is given, or the model's own.

    Raises:
        TypeError: there is neither.
    """
    tokenizer = given if given is not None else getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise TypeError("TextEnvironment needs the tokenizer of the model: tokenizer=...")
    return tokenizer


def engine_of(model: Any) -> Engine:
    """What generates: a Transformers model, a policy's engine, or an engine itself.

    Raises:
        TypeError: it is none of them.
    """
    if isinstance(model, PreTrainedModel):
        from torchrl_modules.engines.transformers_engine import TransformersEngine

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
    pairs = list(tools.items()) if isinstance(tools, Mapping) else [(_name(t), t) for t in tools]
    named: dict[str, Tool] = {}
    for name, tool in pairs:
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


def _name(tool: Any) -> str:
    own = getattr(tool, "__name__", None)
    return own if isinstance(own, str) else type(tool).__name__


def sampling_of(
    model: Any, tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any] | None
) -> SamplingParameters:
    """Sampling as ``generation_kwargs`` of TRL say it; a policy's own where there are none."""
    own = getattr(model, "sampling", None)
    if kwargs is None and isinstance(own, SamplingParameters):
        return own
    kwargs = dict(kwargs or {})
    settings = {name: value for name, value in kwargs.items() if name not in _IGNORED}
    if str(kwargs.get("do_sample", True)).lower() in ("false", "0"):
        settings["temperature"] = 0.0
    ends = kwargs.get("eos_token_id", tokenizer.eos_token_id)
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    if "stop_token_ids" not in settings:
        settings["stop_token_ids"] = tuple(ends)
    return SamplingParameters.from_kwargs(settings)


def scores_one_text(function: Callable[..., Any]) -> bool:
    """Whether a reward function is of one text, and not of the texts of all episodes.

    It is if :func:`~torchrl_envs.rewards.calls.row_reward` marked it, or its first parameter is
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
