"""Which Python runs inside, and what of the file system it needs."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

_PACKAGE = "inside"
_MODULES = ("kernel", "frames", "landlock", "enter", "worker", "supervisor")
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
        """The interpreter that this process runs, outside of its virtual environment.

        Args:
            packages: directories to import from, such as a ``site-packages``; everything in them
                can be read inside.

        Raises:
            ValueError: a directory does not exist, or holds more than packages.
        """
        executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        found = tuple(_directory(path) for path in packages)
        return cls(executable, _directory(sys.base_prefix), found)

    @property
    def readable(self) -> tuple[str, ...]:
        """What has to be readable inside."""
        return (*_SYSTEM, _LOADER_CACHE, self.prefix, *self.packages)

    def command(self) -> list[str]:
        """Command line that runs the supervisor inside.

        Its source travels as an argument, so that no file of this project has to be readable.
        """
        return [self.executable, "-I", "-S", "-B", "-c", _bootstrap()]


def _directory(path: str | Path) -> str:
    real = os.path.realpath(path)
    if not os.path.isdir(real):
        raise ValueError(f"The sandbox can't offer {str(path)!r}: it is not a directory.")
    if real.startswith(("/tmp/", "/dev/shm/")):
        raise ValueError(
            f"The sandbox can't offer {real!r}: /tmp and /dev/shm are private inside. Put the "
            "packages somewhere else."
        )
    home = os.path.realpath(os.path.expanduser("~"))
    if real in _FORBIDDEN or home == real or home.startswith(real + os.sep):
        raise ValueError(
            f"The sandbox won't offer {real!r}: everything in it could be read inside. Name the "
            "directory of the packages themselves."
        )
    return real


def _bootstrap() -> str:
    sources = files(str(__package__)) / _PACKAGE
    modules = {name: (sources / f"{name}.py").read_text("utf-8") for name in _MODULES}
    return (
        "import sys, types\n"
        f"def module(name, source):\n"
        "    made = sys.modules[name] = types.ModuleType(name)\n"
        f"    made.__package__ = {_PACKAGE!r}\n"
        f"    exec(compile(source, name, 'exec', dont_inherit=True), made.__dict__)\n"
        "    return made\n"
        f"parent = sys.modules[{_PACKAGE!r}] = types.ModuleType({_PACKAGE!r})\n"
        "parent.__path__ = []\n"
        f"for name, source in {modules!r}.items():\n"
        f"    setattr(parent, name, module({_PACKAGE!r} + '.' + name, source))\n"
        "parent.supervisor.main()\n"
    )
