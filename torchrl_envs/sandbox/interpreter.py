"""Python interpreter that runs inside, and the parts of the file system that it needs."""

import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import CodeType

_PACKAGE = "inside"
_BOTH = ("kernel", "frames", "landlock", "asking", "disk", "memory")
CODE = (*_BOTH, "threads", "worker", "supervisor")
"""Modules that run code, in the order in which they import each other; the last has the `main`."""
PROGRAMS = (*_BOTH, "sockets", "signals", "attributes", "watcher")
"""The same of those that run an agent's program."""
_RECEIVE = f"""
import marshal, os, sys, types
def read(size):
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            os._exit(0)
        data += part
    return data
modules = marshal.loads(read(int.from_bytes(read(4), "big")))
parent = sys.modules["{_PACKAGE}"] = types.ModuleType("{_PACKAGE}")
parent.__path__ = []
for name, code in modules.items():
    made = sys.modules["{_PACKAGE}." + name] = types.ModuleType("{_PACKAGE}." + name)
    made.__package__ = "{_PACKAGE}"
    exec(code, made.__dict__)
    setattr(parent, name, made)
made.main()
"""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_LOADER_CACHE = "/etc/ld.so.cache"
_FORBIDDEN = ("/", "/etc", "/home", "/root", "/var", "/proc", "/sys", "/dev", "/run", "/tmp")


@dataclass(frozen=True)
class Interpreter:
    """An interpreter and the directories that it reads, all without symbolic links.

    Attributes:
        executable: absolute path.
        prefix: the directory of its installation.
        packages: directories that are added to ``sys.path``.
    """

    executable: str
    prefix: str
    packages: tuple[str, ...] = ()

    @classmethod
    def current(cls, packages: Sequence[str | Path] = ()) -> "Interpreter":
        """The interpreter that this process runs, outside of its virtual environment."""
        # packages: directories to import from, such as a `site-packages`; everything in them can be
        # read inside.
        executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        found = tuple(_directory(path) for path in packages)
        return cls(executable, _directory(sys.base_prefix), found)

    @property
    def readable(self) -> tuple[str, ...]:
        """Paths that have to be readable inside."""
        return (*_SYSTEM, _LOADER_CACHE, self.prefix, *self.packages)

    def command(self) -> list[str]:
        """Command line that runs what comes first on its standard input: :func:`inside_program`."""
        return [self.executable, "-I", "-S", "-B", "-c", _RECEIVE]


def _directory(path: str | Path) -> str:
    real = os.path.realpath(path)
    if not os.path.isdir(real):
        raise ValueError(f"The sandbox can't offer {str(path)!r}: it is not a directory.")
    if real.startswith("/dev/"):
        raise ValueError(
            f"The sandbox can't offer {real!r}: there are other files in /dev inside. Put the "
            "packages somewhere else."
        )
    home = os.path.realpath(os.path.expanduser("~"))
    if real in _FORBIDDEN or home == real or home.startswith(real + os.sep):
        raise ValueError(
            f"The sandbox won't offer {real!r}: everything in it could be read inside. Name the "
            "directory of the packages themselves."
        )
    return real


@functools.cache
def inside_program(modules: tuple[str, ...] = CODE) -> dict[str, CodeType]:
    """The supervisor's modules, compiled by this interpreter, which is the one that runs inside."""
    # They are sent, so that no file of this project has to be readable, and compiled, because that
    # takes longer than all the rest.
    sources = files(str(__package__)) / _PACKAGE
    return {
        name: compile((sources / f"{name}.py").read_text("utf-8"), f"{_PACKAGE}.{name}", "exec")
        for name in modules
    }
