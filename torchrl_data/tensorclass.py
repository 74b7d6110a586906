"""Docstrings and attributes of a TensorClass, which tensordict would overwrite."""

from collections.abc import Callable
from textwrap import indent
from typing import Any, TypeVar

from tensordict import (
    LazyStackedTensorDict,
)
from torch import Tensor

_C = TypeVar("_C", bound=type)


def documented(cls: _C) -> _C:
    """Decorate a TensorClass so that it keeps its docstring and how its attributes are read."""
    # TensorClass replaces the docstring by the signature; the class keeps a copy: `_documentation =
    # __doc__`. It also writes its own `__getattr__` over that of the class body, and a class says
    # by `_read_attribute(self, name, generated)` what is read through it.
    # Its `__repr__` lists every field, the empty ones too: the class writes its own, or has none.
    made: Any = cls
    made.__doc__ = made._documentation
    made.__repr__ = getattr(made, "_shown", entries_shown)
    read, generated = getattr(cls, "_read_attribute", None), made.__getattr__
    if read is not None:
        made.__getattr__ = lambda self, name: read(self, name, generated)
        for name in made.__expected_keys__:  # tensordict 0.15: getters, found before `__getattr__`
            if any(name in vars(each) for each in made.__mro__):
                setattr(made, name, _Field(name, made.__getattr__))
    return cls


class _Field:
    """Reads an attribute of an instance as its ``__getattr__`` does."""

    def __init__(self, name: str, read: Callable[[Any, str], Any]) -> None:
        self._name, self._read = name, read

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else self._read(instance, self._name)


def entries_shown(group: Any) -> str:
    """A group as ``print`` shows it: its entries, without those that it has not."""
    lines = [f"{name}: {_entry_shown(group, name)},\n" for name in group._tensordict.keys()]  # noqa: SIM118
    inside = indent("".join(lines), "    ")
    return f"{type(group).__name__}(\n{inside}    batch_size={list(group.batch_size)})"


def _entry_shown(group: Any, name: str) -> str:
    stored = group._tensordict
    rows = [stored] if not isinstance(stored, LazyStackedTensorDict) else stored.unbind(0)
    values = [row.get(name, None) for row in rows]
    if not all(isinstance(value, Tensor) for value in values):
        return repr(stored.get(name))
    if len({value.shape for value in values}) == 1:
        first = values[0]
        shape = [*([len(values)] if stored is not rows[0] else []), *first.shape]
        return f"Tensor(shape={shape}, dtype={first.dtype})"
    lengths = [value.shape[-1] for value in values]
    told = f"{min(lengths)} to {max(lengths)} long, dtype={values[0].dtype}"
    return f"{len(values)} rows, {told}"
