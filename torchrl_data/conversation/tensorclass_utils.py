"""What TensorClass would overwrite: docstrings, and attributes computed when they are read."""

from collections.abc import Callable
from typing import Any, TypeVar

_C = TypeVar("_C", bound=type)


def documented(cls: _C) -> _C:
    """Decorate a TensorClass so that it keeps its docstring."""
    # TensorClass replaces it by the signature; the class keeps a copy: `_documentation = __doc__`.
    cls.__doc__ = cls._documentation  # type: ignore[attr-defined]
    return cls


def attribute_reader(read: Callable[[Any, str, Callable[[Any, str], Any]], Any]) -> Any:
    """Decorate a TensorClass so that its fields are read through a function."""
    # TensorClass writes its own `__getattr__` over that of the class body, so this is done after.

    def decorate(cls: _C) -> _C:
        generated = cls.__getattr__  # type: ignore[attr-defined]

        def __getattr__(self: Any, name: str) -> Any:
            return read(self, name, generated)

        cls.__getattr__ = __getattr__  # type: ignore[attr-defined]
        return cls

    return decorate
