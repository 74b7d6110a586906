"""Dockerfiles that a sandbox can follow: Debian's programs, files, and what commands do to them."""

import json
import re
import shlex
from pathlib import Path
from typing import Final, NamedTuple

_BASES: Final = ("debian", "ubuntu", "python", "scratch")
_NOTHING: Final = ("LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL")
_VARIABLE: Final = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")


class Instruction(NamedTuple):
    """An instruction."""

    name: str
    text: str
    line: int


class DockerfileError(ValueError):
    """An instruction that a sandbox can't follow; the message names the line."""


def instructions(path: Path) -> list[Instruction]:
    """The instructions of a Dockerfile, with continued lines joined.

    Args:
        path: of the file.

    Raises:
        DockerfileError: it is empty, or has a here-document.
    """
    found: list[Instruction] = []
    parts: list[str] = []
    begin = 0
    lines = [
        (number, line.rstrip())
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")  # they end no continued line
    ]
    for place, (number, line) in enumerate(lines, 1):
        begin = begin if parts else number
        parts.append(line.removesuffix("\\"))
        if line.endswith("\\") and place < len(lines):
            continue
        name, _, text = " ".join(parts).strip().partition(" ")
        if "<<" in text and name.upper() in ("RUN", "COPY"):
            raise DockerfileError(f"line {begin}: a here-document can't be read here")
        found.append(Instruction(name.upper(), text.strip(), begin))
        parts = []
    if not found:
        raise DockerfileError("it has no instruction")
    return found


def check_base(text: str, python: str) -> None:
    """Check that the programs of this machine can stand in for an image's.

    Args:
        text: of ``FROM``.
        python: the version of the machine's Python, as ``3.11``.

    Raises:
        DockerfileError: the image is another one.
    """
    words = [word for word in text.split() if not word.startswith("--")]
    name, _, tag = (words[0] if words else "").partition(":")
    short = name.removeprefix("docker.io/").removeprefix("library/")
    if len(words) > 1:
        raise DockerfileError(f"FROM {text}: images of several stages are not built in a sandbox")
    if short not in _BASES:
        raise DockerfileError(
            f"FROM {text}: a sandbox has the programs of this machine, which stand in for "
            f"{', '.join(_BASES[:-1])} alone"
        )
    wanted = re.match(r"3\.\d+", tag)
    if short == "python" and wanted is not None and wanted[0] != python:
        raise DockerfileError(f"FROM {text}: the Python of this machine is {python}")


def copied(text: str, line: int) -> tuple[list[str], str]:
    """Return what COPY or ADD copies, and where to.

    Args:
        text: of the instruction.
        line: of it, for the error.

    Raises:
        DockerfileError: it copies from elsewhere.
    """
    try:
        words = json.loads(text) if text.startswith("[") else shlex.split(text)
    except ValueError as error:
        raise DockerfileError(f"line {line}: {error}") from error
    flags = [word for word in words if word.startswith("--")]
    paths = [word for word in words if not word.startswith("--")]
    for flag in flags:
        if not flag.startswith(("--chmod", "--chown")):
            raise DockerfileError(f"line {line}: {flag} can't be followed in a sandbox")
    if len(paths) < 2:
        raise DockerfileError(f"line {line}: COPY needs a source and a target, got {text!r}")
    for source in paths[:-1]:
        if "://" in source or source.startswith("git@"):
            raise DockerfileError(f"line {line}: {source} is on a network, which a sandbox lacks")
    return paths[:-1], paths[-1]


def variables_of(text: str, line: int) -> dict[str, str]:
    """Return what ENV or ARG sets.

    Args:
        text: of the instruction.
        line: of it, for the error.

    Raises:
        DockerfileError: it can't be read.
    """
    first, _, rest = text.partition(" ")
    if "=" not in first:  # the older form of one variable
        return {first: rest.strip()} if rest else {}
    try:
        pairs = [word.partition("=") for word in shlex.split(text)]
    except ValueError as error:
        raise DockerfileError(f"line {line}: {error}") from error
    return {name: value for name, _, value in pairs}


def expanded(text: str, variables: dict[str, str]) -> str:
    """A text with its variables in it.

    Args:
        text: may have ``$NAME``, ``${NAME}`` and ``${NAME:-default}``.
        variables: by name; others are empty.
    """

    def value(found: re.Match[str]) -> str:
        return variables.get(found[1] or found[3]) or found[2] or ""

    return _VARIABLE.sub(value, text)


def leaves_out(folder: Path) -> bool:
    """Return whether a ``.dockerignore`` keeps files out of what ``COPY`` and ``ADD`` see.

    Args:
        folder: with the Dockerfile.
    """
    files = [folder / name for name in ("Dockerfile.dockerignore", ".dockerignore")]
    lines = next((path.read_text(encoding="utf-8") for path in files if path.is_file()), "")
    return any(line.strip() and not line.startswith("#") for line in lines.splitlines())


def is_without_effect(name: str) -> bool:
    """Return whether an instruction says nothing about the files of a machine.

    Args:
        name: of the instruction.
    """
    return name in _NOTHING or name in ("CMD", "ENTRYPOINT", "HEALTHCHECK")
