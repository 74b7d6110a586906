"""Functions and methods as tools: found, documented and checked before anything runs."""

import inspect
import re
import time
import types
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator
from referencing.exceptions import Unresolvable
from transformers.utils import chat_template_utils

from torchrl_data import page
from torchrl_data.tool_calls.strict_json import read_json

from .schema_checks import DEADLINE_S, SlowSchemaError, make_validator, now

RESERVED: Final = frozenset({"reset", "get_reward", "close"})
"""The lifecycle of an environment; never offered to the model."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_OF_USER: Final = "_is_tool_of_user"
"""The attribute of a method that is a tool of the simulated user's."""
_UNREADABLE: Final = (
    chat_template_utils.DocstringParsingException,
    chat_template_utils.TypeHintParsingException,
)
_NOT_BY_NAME: Final = {
    inspect.Parameter.POSITIONAL_ONLY: "",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


class Tool(NamedTuple):
    """A tool that the model may call."""

    name: str
    schema: dict[str, Any]
    """JSON schema in the format that chat templates show."""
    validator: Validator
    """Checks the arguments of a call."""
    plain_types: Mapping[str, type]
    """The arguments of which the schema says no more than their type, where that is a scalar."""
    required: frozenset[str]
    """The arguments that a call must have."""

    def typed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments from their text, as the schema says; for formats that do not quote them."""
        return typed_arguments(arguments, self.schema["function"]["parameters"])

    def __reduce__(self) -> "tuple[Callable[[dict[str, Any]], Tool], tuple[dict[str, Any]]]":
        """Validators can't be pickled; a copy has one made from the schema."""
        return schema_tool, (self.schema,)

    def argument_error(self, arguments: dict[str, Any]) -> str | None:
        """Return what is wrong with the arguments of a call, or ``None``."""
        # Most calls are right, which is soon seen; the validator is asked about the others.
        types = self.plain_types
        if self.required <= arguments.keys() and all(
            type(value) is types.get(name) for name, value in arguments.items()
        ):
            return None
        now.deadline = time.monotonic() + DEADLINE_S
        try:
            error = best_match(self.validator.iter_errors(arguments))
        except (Unresolvable, RecursionError, SlowSchemaError) as unresolved:
            return f"the tool's own schema can't be used: {unresolved!s:.200}"
        finally:
            del now.deadline
        if error is None:
            return None
        place = "".join(f"[{part!r}]" for part in error.absolute_path)
        return f"arguments{place}: {error.message}"


def typed_arguments(arguments: Mapping[str, Any], parameters: Any) -> dict[str, Any]:
    """The same for a schema that nobody has checked: what it does not say stays text."""
    known = parameters.get("properties") if isinstance(parameters, dict) else None
    known = known if isinstance(known, dict) else {}
    return {name: _typed(text, known.get(name)) for name, text in arguments.items()}


_WORDS: Final = {"true": True, "false": False, "none": None, "null": None}


def _typed(text: Any, schema: Any) -> Any:
    """Value of the text of an argument; the text itself if its type says so or it is none.

    Templates that do not quote strings write ``True`` and ``None`` as Python does.
    """
    written: Any = schema.get("type", ()) if isinstance(schema, dict) else ()
    listed = [written] if isinstance(written, str) else written
    types = {t for t in listed if isinstance(t, str)} if isinstance(listed, list | tuple) else set()
    if isinstance(schema, dict) and schema.get("nullable"):
        types.add("null")
    word = text.strip().lower() if isinstance(text, str) and len(text) < 32 else ""
    if word in _WORDS and ("null" if _WORDS[word] is None else "boolean") in types:
        return _WORDS[word]
    if "string" in types or not isinstance(text, str):
        return text
    try:
        return read_json(text)
    except ValueError:
        return text


def user_tool(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method of an environment as a tool of the simulated user, and not of the policy.

    Args:
        method: public, with type hints and a docstring as any tool.

    Raises:
        TypeError: it is no function.

    Example:
        >>> class Phone:
        ...     def reset(self, **row):
        ...         self.is_on = False
        ...     def line_is_up(self) -> bool:  # a tool of the policy's
        ...         '''Say whether the line is up.'''
        ...         return self.is_on
        ...     @user_tool
        ...     def switch_on(self) -> str:
        ...         '''Switch the phone on.'''
        ...         self.is_on = True
        ...         return "on"
        >>> [*environment_tools(Phone)], [*environment_tools(Phone, of_user=True)]
        (['line_is_up'], ['switch_on'])
    """
    if not isinstance(method, types.FunctionType):
        raise TypeError(
            f"user_tool marks a method of an environment, got {type(method).__name__}: "
            f"{method!r:.80}. Write @user_tool directly above def."
        )
    setattr(method, _OF_USER, True)
    return method


def environment_tools(environment: type | object, *, of_user: bool = False) -> dict[str, Tool]:
    """The public methods of an environment, as tools.

    Args:
        environment: its class, or an object of it.
        of_user: those that :func:`user_tool` marks; when not given, the others.
    """
    # As with TRL: methods and class methods, inherited ones included, but for `reset`,
    # `get_reward` and `close`; properties and static methods are none.
    cls = environment if isinstance(environment, type) else type(environment)
    tools: dict[str, Tool] = {}
    for owner in reversed(cls.__mro__[:-1]):
        for name in vars(owner):
            static = inspect.getattr_static(cls, name)
            if name.startswith("_") or name in RESERVED:
                continue
            method = static.__func__ if isinstance(static, classmethod) else static
            if not isinstance(method, types.FunctionType):
                continue
            if getattr(method, _OF_USER, False) == of_user:
                bound = types.MethodType(method, object())
                tools[name] = function_tool(bound, owner=cls.__name__)
    return tools


def function_tool(
    function: Callable[..., Any], *, owner: str | None = None, name: str | None = None
) -> Tool:
    """A function as a tool."""
    if not inspect.isroutine(function):
        raise TypeError(
            f"A tool is a function or a method, got {type(function).__name__}: {function!r:.80}. "
            "Define one with def, type hints and a docstring."
        )
    name = name or function.__name__
    label = f"{owner}.{name}" if owner else name
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"The tool {label!r:.80} can't be called by that name: use 1 to 64 letters, digits, "
            "'_', '-' and '.'."
        )
    for argument, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in _NOT_BY_NAME:
            raise ValueError(
                f"The tool {label} can't be offered to a model: its argument "
                f"{_NOT_BY_NAME[parameter.kind]}{argument} is {parameter.kind.description}, but a "
                "model gives each argument by its name. Write the arguments out."
            )
    try:
        schema = chat_template_utils.get_json_schema(function)
    except _UNREADABLE as error:
        raise ValueError(
            f"The tool {label} can't be offered to a model: {error} A tool needs a docstring with "
            "an `Args:` section that describes each argument, and a type hint for each. Prefix the "
            f"name with an underscore if it is not meant as a tool. See {page('docs/tools.md')}."
        ) from error
    schema["function"]["name"] = name
    return schema_tool(schema)


def offered_name(name: str) -> str:
    """A name that models and templates can write, close to the one given."""
    written = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
    if not _NAME.fullmatch(written):
        raise ValueError(f"A tool can't be named {name!r:.80}: use 1 to 64 characters.")
    return written


def schema_tool(schema: dict[str, Any], *, is_strict: bool = True) -> Tool:
    """A tool from a schema in the format that chat templates show."""
    function = schema["function"]
    parameters = function["parameters"]
    # An argument that the tool does not have is an error, not a Python exception inside it.
    checked = {"additionalProperties": False, **parameters} if is_strict else dict(parameters)
    for name, its in (properties := dict(parameters.get("properties", {}))).items():
        if isinstance(its, dict) and its.get("nullable"):  # OpenAPI's word for what accepts null
            properties[name] = {"anyOf": [its, {"type": "null"}]}
    if properties:
        checked["properties"] = properties
    return Tool(function["name"], schema, make_validator(checked), *_plain(checked))


_SCALARS: Final = {"string": str, "integer": int, "number": float, "boolean": bool}
_SAYS_NO_MORE: Final = frozenset({"type", "description", "title", "default"})


def _plain(parameters: Mapping[str, Any]) -> tuple[dict[str, type], frozenset[str]]:
    """Return what of a schema is no more than types of scalars, and which arguments it requires."""
    simple = {"type", "properties", "required", "additionalProperties", "title", "description"}
    if parameters.get("type") != "object" or not parameters.keys() <= simple:
        # Something else may forbid what the types allow: an argument that no value has.
        return {}, frozenset([""])
    plain = {
        name: _SCALARS[schema["type"]]
        for name, schema in parameters.get("properties", {}).items()
        if isinstance(schema, dict)
        and schema.keys() <= _SAYS_NO_MORE
        and isinstance(schema.get("type"), str)
        and schema["type"] in _SCALARS
    }
    return plain, frozenset(parameters.get("required", ()))
