"""A container that is there: commands in it, and files to it and from it."""

import contextlib
import queue
import shlex
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Final, NamedTuple

from torchrl_envs.processes.capped_output import CappedOutput
from torchrl_envs.processes.captured import captured
from torchrl_envs.processes.worker_process import kept_command, run_afterwards

from .engine import ASK_S, ContainerEngine, ContainerError

MAX_OUTPUT_BYTES: Final = 1 << 16
"""Bytes of a command's output that are kept, of its start and its end, by default."""
MAX_FILES_BYTES: Final = 1 << 30
"""Most bytes that are read out of a container at once."""
NEEDED: Final = ("bash", "timeout", "tar", "mkdir")
"""Programs that an image has to bring."""
_KILLED: Final = 137
_FILES_S: Final = 300.0
_GRACE_S: Final = 1.0
_SAID: Final = 400
_READ_BYTES: Final = 1 << 12
_READY: Final = "container-is-ready"
_MISSING: Final = "container-lacks"
LOOKS: Final = (
    f'for p in {" ".join(NEEDED)}; do command -v $p > /dev/null || echo "{_MISSING} $p"; done; '
    f'echo "{_READY} $PWD"'
)
"""A script of `sh` whose lines :func:`workdir_of` reads."""
# Of `sh`, which nobody inside can kill, as it is the first process, and which buries orphans while
# it waits for the end of its input; who kills what it waits by gets another one.
_WAITS: Final = f"{LOOKS}; until cat > /dev/null; do :; done; exit 0"


class CommandResult(NamedTuple):
    """The result of a command."""

    stdout: str
    stderr: str
    status: int | None
    """Its exit status; the negative number of a signal; ``None`` where it was stopped as late."""


def workdir_of(lines: Iterable[str], whose: str) -> str | None:
    """The working directory that an image says by :data:`LOOKS`; nothing if it does not get there.

    Args:
        lines: that it prints, perhaps after others.
        whose: image it is, for the error.

    Raises:
        ContainerError: it lacks programs.
    """
    missing = []
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == _MISSING:
            missing.append(rest)
        elif word == _READY and missing:
            what = f"{whose} has no {', '.join(missing)}, which commands in it need"
            raise ContainerError(f"{what}: install it in the Dockerfile.")
        elif word == _READY:
            return rest or "/"
    return None


class Container:
    """A container that runs.

    Args:
        engine: runs it.
        name: its name or id.
        workdir: where commands run, absolute.
    """

    def __init__(self, engine: ContainerEngine, name: str, *, workdir: str = "/") -> None:
        self.engine, self.name, self.workdir = engine, name, workdir

    def run(
        self,
        command: str,
        *,
        timeout_s: float,
        variables: Mapping[str, str] | None = None,
        workdir: str | None = None,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        user: str | int | None = None,
    ) -> CommandResult:
        """Run a command by bash; what it leaves running goes on.

        Args:
            command: one or several lines.
            timeout_s: after so long it is killed inside, with its process group.
            variables: environment variables beside the container's.
            workdir: where it runs; the container's when not given.
            max_output_bytes: how much of each stream is kept.
            user: who runs it; the image's when not given.

        Raises:
            ContainerError: the container is gone.
        """
        words = ["exec", "-w", workdir or self.workdir]
        words += [] if user is None else ["-u", str(user)]
        for name, value in (variables or {}).items():
            words += ["-e", f"{name}={value}"]
        # The engine waits for everybody who holds the streams; a line of its own says that the
        # command itself has ended, and how.
        mark = f"\n{uuid.uuid4().hex} "
        # What `sh` says of a command that was killed is nobody's output.
        script = 'exec 3>&2 2> /dev/null; (timeout -s KILL "$1" bash -c "$2" 2>&3 3>&-); '
        script += 'printf "%s%s\\n" "$3" $? >&3'
        limited = ["sh", "-c", script, "sh", f"{timeout_s:.3f}", command, mark]
        began = time.monotonic()
        done = captured(
            [self.engine.program, *words, self.name, *limited],
            timeout_s=timeout_s + ASK_S,
            max_bytes=max_output_bytes,
            mark=mark.encode(),
        )
        out, err = done.stdout.text(), done.stderr.text()
        if done.mark is None:
            if done.status is None or self.is_there:  # it has killed what would have told
                return CommandResult(out, err, done.status)
            raise ContainerError(f"the container {self.name} is gone: {err.strip()[-300:]}")
        status = int(done.mark)
        is_late = status == _KILLED and time.monotonic() - began >= timeout_s
        return CommandResult(out, err, None if is_late else status)

    @property
    def is_there(self) -> bool:
        """It runs."""
        found = self.engine.inspected("container", self.name)
        return found is not None and bool(found["State"]["Running"])

    def make_folders(self, folders: Sequence[str]) -> None:
        """Make folders in which everybody can write, where there are none.

        Args:
            folders: absolute paths.

        Raises:
            ContainerError: they can't be made.
        """
        made = 'for p in "$@"; do [ -d "$p" ] || { mkdir -p "$p" && chmod 777 "$p"; }; done'
        words = ["exec", "-u", "0", "-w", "/", self.name, "sh", "-ec", made, "sh"]
        done = self.engine.ask([*words, *folders])
        if not done.is_good:
            what = ", ".join(folders)
            raise ContainerError(f"{what} can't be made in {self.name}: {done.said}")

    def upload_tar(self, data: bytes, target: str) -> None:
        """Unpack a ``.tar`` in a folder of the container.

        Args:
            data: the ``.tar``.
            target: the folder, which is made.

        Raises:
            ContainerError: it can't be unpacked there.
        """
        into = shlex.quote(target)
        command = f"mkdir -p {into} && tar -xof - -C {into}"
        words = ["exec", "-i", "-u", "0", "-w", "/", self.name, "sh", "-c", command]
        done = self.engine.ask(words, data=data, timeout_s=_FILES_S)
        if not done.is_good:
            raise ContainerError(f"`{command:.80}` failed in {self.name}: {done.said}")

    def download(self, source: str) -> bytes | None:
        """Return what a path of the container holds, as a ``.tar``; nothing if it is not there.

        Args:
            source: there, absolute.

        Raises:
            ContainerError: it is larger than can be read at once.
        """
        folder, _, name = source.rstrip("/").rpartition("/")
        words = ["exec", "-u", "0", "-w", "/", self.name, "tar", "-cf", "-", "-C", folder or "/"]
        done = self.engine.ask([*words, "--", name], timeout_s=_FILES_S, max_bytes=MAX_FILES_BYTES)
        return done.stdout if done.is_good else None


class HeldContainer(Container):
    """A container that is made for its owner, and goes with this process, however that ends.

    Its first process waits for the end of its standard input, which is a pipe of this process.

    Args:
        engine: runs it.
        prefix: of its name.
    """

    def __init__(self, engine: ContainerEngine, *, prefix: str = "torchrl-agents") -> None:
        super().__init__(engine, f"{prefix}-{uuid.uuid4().hex[:16]}")
        self._holder: subprocess.Popen[bytes] | None = None
        self._after: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors = CappedOutput(_SAID)
        self._readers: list[threading.Thread] = []

    def start(
        self,
        image: str,
        options: Sequence[str] = (),
        *,
        timeout_s: float,
    ) -> None:
        """Start it of an image that is here; its entry point gets a command that waits.

        Args:
            image: its name.
            options: of the engine's ``run``.
            timeout_s: longest time until it is there.

        Raises:
            ContainerError: it can't be started, or the image lacks what commands need.
        """
        command = [self.engine.program, "run", "--rm", "-i", "--pull", "never"]
        command += ["--log-driver", "none", "--name", self.name, *options]
        if self.engine.program == "podman":  # whose command, if killed, leaves the input open
            self._after = run_afterwards(self.engine.removal(self.name))
        self._holder = subprocess.Popen(
            kept_command([*command, image, "sh", "-c", _WAITS]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=tempfile.gettempdir(),  # where podman leaves a note of a lack of memory
            start_new_session=True,
        )
        # What its first processes print is read for as long as it is there: nobody waits for room.
        for read, stream in ((self._read_lines, "stdout"), (self._read_errors, "stderr")):
            given = (getattr(self._holder, stream),)
            self._readers.append(threading.Thread(target=read, args=given, daemon=True))
            self._readers[-1].start()
        try:
            self.workdir = self._awaited(image, time.monotonic() + timeout_s)
        except BaseException:
            self.stop()
            raise

    def _awaited(self, image: str, deadline: float) -> str:
        """Return the working directory, once it is ready; its entry point may print lines before.

        Raises:
            ContainerError: it does not get ready, or lacks programs.
        """
        workdir = workdir_of(self._lines_until(deadline), f"the image {image}")
        if workdir is None:
            self._readers[1].join(_GRACE_S)
            said = self._errors.text().strip() or "it does not get ready"
            raise ContainerError(f"{self.engine.program} can't start {image}: {said}")
        return workdir

    def _lines_until(self, deadline: float) -> Iterator[str]:
        with contextlib.suppress(queue.Empty):
            while True:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
                if line is None:
                    return
                yield line

    def _read_lines(self, stream: IO[bytes]) -> None:
        is_ready, rest = False, b""
        while part := stream.read(_READ_BYTES):
            if is_ready:
                continue
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                text = line.decode(errors="replace").strip()
                is_ready = is_ready or text.startswith(f"{_READY} ")
                self._lines.put(text)
        self._lines.put(None)

    def _read_errors(self, stream: IO[bytes]) -> None:
        while part := stream.read(_READ_BYTES):
            self._errors.add(part)

    def stop(self) -> None:
        """End it, which removes it; a second time it does nothing."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        if self._after is None:
            self.engine.ask(self.engine.removal(self.name)[1:])
        else:
            assert self._after.stdin is not None
            self._after.stdin.close()
            self._after.wait()
        holder.terminate()
        holder.wait()
        for reader in self._readers:
            reader.join()
        for pipe in (holder.stdin, holder.stdout, holder.stderr):
            if pipe is not None:
                pipe.close()
