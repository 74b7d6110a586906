"""Users' functions get the arguments that they name."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def accepted_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, drop: str = ""
) -> dict[str, Any]:
    """The arguments that a function names, or all but ``drop`` if it takes ``**kwargs``."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {
        name: value
        for name, value in arguments.items()
        if name in parameters or (takes_any and name != drop)
    }
