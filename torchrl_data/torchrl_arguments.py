"""Arguments of TorchRL's classes of the same names, and what to write for each here."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from . import page

Thing = TypeVar("Thing")


@functools.cache
def torchrl_arguments() -> Mapping[str, Mapping[str, str]]:
    """The tables of ``docs/torchrl-arguments.md``: by class and argument, what to write here."""
    packaged = Path(__file__).with_name("torchrl-arguments.md")
    there = Path(__file__).parents[1] / "docs/torchrl-arguments.md"  # of a checkout
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for line in (packaged if packaged.exists() else there).read_text(encoding="utf-8").splitlines():
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        if len(cells) == 3:
            classes, arguments = (re.findall(r"`([^`]+)`", cell) for cell in cells[:2])
            here = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", cells[2]).strip()
            for name in classes:
                found[name] |= dict.fromkeys(arguments, here)
    return found


def knows_torchrl(thing: Thing) -> Thing:
    """Let a class say what to write for an argument that it has in TorchRL alone."""
    init: Any = getattr(thing, "__init__", None)
    name = getattr(thing, "__name__", "")
    if not isinstance(thing, type) or name not in torchrl_arguments() or hasattr(init, "_telling"):
        return thing

    here = torchrl_arguments()[name]

    @functools.wraps(init)
    def told(self: Any, *args: Any, **kwargs: Any) -> None:
        for argument in kwargs.keys() & here.keys():
            words = f"{type(self).__name__}: {argument}= is an argument of TorchRL's. Here"
            more = page("docs/torchrl-arguments.md")
            raise TypeError(f"{words}: {here[argument]}. See {more}.")
        init(self, *args, **kwargs)

    # A mark, not the method: who wraps this one (Ray, for an actor's class) pickles what it holds.
    told._telling = True  # type: ignore[attr-defined]
    thing.__init__ = told  # type: ignore[misc]
    return thing
