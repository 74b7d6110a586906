"""Programs that run containers: what they are asked, and whether they can be."""

import functools
import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from torchrl_envs.processes.captured import captured

ASK_S: Final = 30.0
"""Seconds that an engine may take to answer what asks for no work."""
_MAX_BYTES: Final = 1 << 20
_SAID: Final = 300
_making: Final[dict[tuple[str, str], threading.Lock]] = {}
_made: Final = threading.Lock()


class ContainerError(RuntimeError):
    """A container can't be had, or is gone; the message says why."""


class EngineAnswer(NamedTuple):
    """An engine's answer."""

    stdout: bytes
    stderr: str
    status: int | None
    """``None`` where it did not end in time."""

    @property
    def is_good(self) -> bool:
        """It did what it was asked."""
        return self.status == 0

    @property
    def said(self) -> str:
        """Its complaint."""
        return "no answer in time" if self.status is None else self.stderr.strip()[-_SAID:]


@dataclass(frozen=True)
class ContainerEngine:
    """Docker or podman, whose command lines agree in what is asked here.

    Args:
        program: ``"docker"`` or ``"podman"``.
    """

    program: str

    def ask(
        self,
        words: Sequence[str],
        *,
        data: bytes = b"",
        timeout_s: float = ASK_S,
        max_bytes: int = _MAX_BYTES,
    ) -> EngineAnswer:
        """Run one of its commands.

        Args:
            words: what follows the program's name.
            data: the standard input.
            timeout_s: longest time.
            max_bytes: most bytes of an answer.

        Raises:
            ContainerError: the answer is longer.
        """
        done = captured([self.program, *words], data, timeout_s=timeout_s, max_bytes=max_bytes)
        out = done.stdout.whole()
        if out is None:
            raise ContainerError(f"`{self.program} {words[0]}` gives more than {max_bytes} bytes")
        return EngineAnswer(out, done.stderr.text(), done.status)

    def reason_against(self) -> str | None:
        """Return why there are no containers here; nothing where there are."""
        if shutil.which(self.program) is None:
            return f"{self.program} is not installed."
        return _reason_against(self.program)

    @property
    def is_desktop(self) -> bool:
        """The containers are in a virtual machine that Docker Desktop runs."""
        return "Docker Desktop" in _system_of(self.program)

    def had_image(self, name: str, *, timeout_s: float) -> None:
        """Have an image here, which is fetched where it is missing.

        Args:
            name: of a registry, or of this machine.
            timeout_s: longest time that it may take to fetch it.

        Raises:
            ContainerError: it can't be fetched.
        """
        done = self.once(name, lambda: self.ask(["pull", "-q", name], timeout_s=timeout_s))
        if done is not None:
            raise ContainerError(f"{self.program} can't fetch the image {name}: {done.said}")

    def had_image_of(self, folder: Path, tag: str, *, timeout_s: float) -> None:
        """Have the image of a Dockerfile, which is built once.

        Args:
            folder: of the Dockerfile, and what it copies.
            tag: the image's name.
            timeout_s: longest time that the build may take.

        Raises:
            ContainerError: it can't be built.
        """
        words = ["build", "-q", "--force-rm", "-t", tag, str(folder)]
        done = self.once(tag, lambda: self.ask(words, timeout_s=timeout_s))
        if done is not None:
            raise ContainerError(f"{self.program} build failed: {done.said}")

    def inspected(self, kind: str, name: str) -> Mapping[str, Any] | None:
        """Return the record of an image, container or network; nothing if there is none.

        Args:
            kind: ``"image"``, ``"container"`` or ``"network"``.
            name: its name.
        """
        done = self.ask([kind, "inspect", name])
        return json.loads(done.stdout)[0] if done.is_good else None

    def removal(self, name: str) -> list[str]:
        """The command that kills a container and removes it.

        Args:
            name: of the container.
        """
        at_once = ["-t", "0"] if self.program == "podman" else []  # docker asks it for nothing
        return [self.program, "rm", "-f", *at_once, name]

    def once(
        self, name: str, make: Callable[[], EngineAnswer], kind: str = "image"
    ) -> EngineAnswer | None:
        """Make what is to be there once, unless it is.

        Args:
            name: what it is called.
            make: makes it.
            kind: ``"image"`` or ``"network"``.

        Returns:
            The answer where it could not be made; else nothing.
        """
        with _made:
            lock = _making.setdefault((self.program, name), threading.Lock())
        with lock:
            if self.inspected(kind, name) is not None:
                return None
            done = make()  # another process may have made it meanwhile
            return None if done.is_good or self.inspected(kind, name) is not None else done


@functools.cache
def _reason_against(program: str) -> str | None:
    done = ContainerEngine(program).ask(["info"])
    if done.status is None:
        return f"`{program} info` does not answer."
    last = done.stderr.strip().rpartition("\n")[2]
    if done.status or "Cannot connect" in last:
        return f"`{program} info` fails: {last}"
    return None


@functools.cache
def _system_of(program: str) -> str:
    if program != "docker":
        return ""
    words = ["info", "--format", "{{.OperatingSystem}}"]
    return ContainerEngine(program).ask(words).stdout.decode(errors="replace")
