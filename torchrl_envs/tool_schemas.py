"""An environment's methods as tools: found, documented and checked before anything runs."""

import inspect
import types
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

RESERVED: Final = frozenset({"reset", "get_reward", "close"})
"""The lifecycle of an environment; never offered to the model."""


class Tool(NamedTuple):
    """A tool that the model may call."""

    name: str
    schema: dict[str, Any]
    """JSON schema in the format that chat templates show."""
    validator: Validator
    """Checks the arguments of a call."""

    def argument_error(self, arguments: dict[str, Any]) -> str | None:
        """What is wrong with the arguments of a call, or ``None``."""
        error = best_match(self.validator.iter_errors(arguments))
        if error is None:
            return None
        place = "".join(f"[{part!r}]" for part in error.absolute_path)
        return f"arguments{place}: {error.message}"


def environment_tools(environment: type | object) -> dict[str, Tool]:
    """The public methods of an environment, as tools.

    Every public method is one, inherited methods included, but for ``reset``, ``get_reward``,
    ``close``, properties and class methods.

    Args:
        environment: a class, or an instance of one.

    Returns:
        Name to tool, in the order in which the class defines them.

    Raises:
        ValueError: a method lacks a docstring, a type hint or a description of an argument; the
            message names the class, the method and what is missing.
    """
    cls = environment if isinstance(environment, type) else type(environment)
    tools: dict[str, Tool] = {}
    for owner in reversed(cls.__mro__[:-1]):
        for name in vars(owner):
            static = inspect.getattr_static(cls, name)
            if name.startswith("_") or name in RESERVED:
                continue
            if isinstance(static, staticmethod):
                tools[name] = function_tool(static.__func__, owner=cls.__name__)
            elif isinstance(static, types.FunctionType):
                bound = types.MethodType(static, object())
                tools[name] = function_tool(bound, owner=cls.__name__)
    return tools


def function_tool(function: Callable[..., Any], *, owner: str | None = None) -> Tool:
    """A function as a tool.

    Args:
        function: with type hints and a Google docstring.
        owner: its class, named in errors.

    Raises:
        ValueError: a docstring, a type hint or the description of an argument is missing.
    """
    name = function.__name__
    label = f"{owner}.{name}" if owner else name
    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(
            f"The tool {label} can't be offered to a model: {error} A tool needs a docstring with "
            "an `Args:` section that describes each argument, and a type hint for each. Prefix the "
            "name with an underscore if it is not meant as a tool."
        ) from error
    parameters = schema["function"]["parameters"]
    # An argument that the tool does not have is an error, not a Python exception inside it.
    strict = {**parameters, "additionalProperties": False}
    return Tool(name, schema, Draft202012Validator(strict))
