"""Machines by the command lines of docker and podman."""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import ClassVar, Final

from torchrl_envs.processes.worker_process import kept_command

from .folders import Place, digest_of_place, resolved
from .machines import MAX_OUTPUT_BYTES, CommandResult, MachineError, packed

_ASK_S: Final = 30.0
_building: Final = threading.Lock()


class DockerMachine:
    """A container, made of the task's Dockerfile or image.

    Its first process waits for the end of its standard input, which is a pipe of this process: when
    this process is gone, however it ended, the container ends and is removed.

    Args:
        place: what it has to be.
        endpoint: ``host:port`` that is reached inside under the same address, by the network of
            the host.
        readable: has no effect: agents are installed inside.

    Raises:
        MachineError: the program is missing or does not answer, or the task needs what a container
            by it does not have.
    """

    program: ClassVar[str] = "docker"

    def __init__(
        self, place: Place, *, endpoint: str | None = None, readable: Sequence[str] = ()
    ) -> None:
        del readable
        self.place = place
        self._endpoint = endpoint
        self.workdir = place.workdir or "/"
        self._name = f"harbor-{uuid.uuid4().hex[:16]}"
        self._holder: subprocess.Popen[bytes] | None = None
        if reason := _reason_against(self.program):
            raise MachineError(f"machine={self.program}: {reason}")
        if place.network == "allowlist":
            raise MachineError(f"machine={self.program}: network_mode=allowlist can't be kept to.")
        if endpoint is not None and place.network == "no-network":
            raise MachineError(f"machine={self.program}: an agent needs a network to the policy.")
        if place.dockerfile is None and place.image is None:
            raise MachineError(f"{place.folder}: there is neither a Dockerfile nor an image.")

    def start(self) -> None:
        """Build the image, which docker keeps, and start a container of it.

        Raises:
            MachineError: either fails.
        """
        image = self.place.image or self._build()
        command = [self.program, "run", "--rm", "-i", "--init", "--name", self._name]
        if self.place.cpus is not None:
            command += ["--cpus", str(self.place.cpus)]
        if self.place.memory_mb is not None:
            command += ["--memory", f"{self.place.memory_mb}m"]
        if self.place.gpus:
            command += ["--gpus", str(self.place.gpus)]
        if self.place.network == "no-network":
            command += ["--network", "none"]
        elif self._endpoint is not None:
            command += ["--network", "host"]
        try:
            variables = resolved(self.place.variables, os.environ)
        except KeyError as error:
            raise MachineError(str(error.args[0])) from error
        for name, value in variables.items():
            command += ["--env", f"{name}={value}"]
        command += ["--entrypoint", "sh", image, "-c", "echo ready; cat > /dev/null"]
        self._holder = subprocess.Popen(
            kept_command(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        said = self._holder.stdout.readline().decode(errors="replace").strip()
        if said != "ready":
            self.stop()
            raise MachineError(f"{self.program} can't start {image}: {said}")
        if self.place.workdir is None:
            self.workdir = self._call(["exec", self._name, "pwd"]).stdout.decode().strip() or "/"
        self._must(f"mkdir -p '{self.workdir}' /logs/agent /logs/verifier /logs/artifacts")

    def _build(self) -> str:
        tag = f"harbor-{digest_of_place(self.place)[:32]}"
        with _building:
            found = self._call(["image", "inspect", tag])
            if found.returncode != 0:
                words = ["build", "-q", "-t", tag, str(self.place.folder)]
                done = self._call(words, timeout_s=self.place.build_timeout_s)
                if done.returncode != 0:
                    said = done.stderr.decode(errors="replace").strip()[-300:]
                    raise MachineError(f"{self.program} build failed: {said}")
        return tag

    def _call(
        self, words: Sequence[str], *, data: bytes = b"", timeout_s: float = _ASK_S
    ) -> "subprocess.CompletedProcess[bytes]":
        command = kept_command([self.program, *words])
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            out, err = process.communicate(data, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.communicate()
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def _must(self, command: str, data: bytes = b"") -> None:
        words = ["exec", "-i", "-u", "0", self._name, "sh", "-c", command]
        done = self._call(words, data=data, timeout_s=10 * _ASK_S)
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()[-300:]
            raise MachineError(f"`{command:.80}` failed: {said}")

    def run(
        self,
        command: str,
        *,
        timeout_s: float,
        variables: Mapping[str, str] | None = None,
        workdir: str | None = None,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> CommandResult:
        """Run a command by bash.

        Args:
            command: one or several lines.
            timeout_s: after so long it is killed inside.
            variables: environment variables beside the machine's.
            workdir: where it runs; the machine's when not given.
            max_output_bytes: how much of each stream is kept.

        Raises:
            MachineError: the container is gone.
        """
        words = ["exec", "-w", workdir or self.workdir]
        for name, value in (variables or {}).items():
            words += ["-e", f"{name}={value}"]
        # `timeout` inside kills what runs there; the client alone can be killed from outside.
        limited = ["timeout", "-s", "KILL", f"{timeout_s:.3f}", "bash", "-c", command]
        try:
            done = self._call([*words, self._name, *limited], timeout_s=timeout_s + _ASK_S)
        except subprocess.TimeoutExpired:
            return CommandResult("", "", None)
        if self._holder is None or self._holder.poll() is not None:
            raise MachineError("the container is gone")
        out, err = (_cut(each, max_output_bytes) for each in (done.stdout, done.stderr))
        return CommandResult(out, err, None if done.returncode == 137 else done.returncode)

    def upload(self, source: Path, target: str) -> None:
        """Copy a folder's contents, or a file, to a path of the container.

        Args:
            source: here.
            target: there.
        """
        path = PurePosixPath(target)
        if source.is_dir():
            self.upload_tar(packed(source), target)
        else:
            self.upload_tar(packed(source, path.name), str(path.parent))

    def upload_tar(self, data: bytes, target: str) -> None:
        """Unpack a ``.tar`` in a folder of the container.

        Args:
            data: the ``.tar``.
            target: the folder, which is made.
        """
        self._must(f"mkdir -p '{target}' && tar -xf - --no-same-owner -C '{target}'", data)

    def download(self, source: str) -> bytes | None:
        """Return what a path of the container holds, as a ``.tar``; nothing if it is not there.

        Args:
            source: there.
        """
        path = PurePosixPath(source)
        words = [
            "exec",
            "-u",
            "0",
            self._name,
            "tar",
            "-cf",
            "-",
            "-C",
            str(path.parent),
            path.name,
        ]
        done = self._call(words, timeout_s=10 * _ASK_S)
        return done.stdout if done.returncode == 0 else None

    def stop(self) -> None:
        """End the container, which removes it."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._call(["rm", "-f", self._name])
        for pipe in (holder.stdin, holder.stdout):
            if pipe is not None:
                pipe.close()
        holder.terminate()
        holder.wait()


class PodmanMachine(DockerMachine):
    """The same by podman, whose command line is docker's."""

    program = "podman"


@functools.cache
def _reason_against(program: str) -> str | None:
    """Return why containers can't be had by a program; nothing where they can."""
    if shutil.which(program) is None:
        return f"{program} is not installed."
    try:
        done = subprocess.run(
            [program, "info"], capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"`{program} info` does not answer."
    said = done.stderr.strip().rpartition("\n")[2]
    return (
        f"`{program} info` fails: {said}" if done.returncode or "Cannot connect" in said else None
    )


def _cut(data: bytes, most: int) -> str:
    if len(data) > most:
        left_out = len(data) - most
        mark = b"\n[%d bytes are left out]\n" % left_out
        data = data[: most // 2] + mark + data[len(data) - most // 2 :]
    return data.decode("utf-8", errors="replace")
