"""A machine by bubblewrap: this machine's programs, and files of its own in memory."""

import contextlib
import functools
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from glob import glob
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

from torchrl_envs.processes.worker_process import kept_command, relayed_command
from torchrl_envs.sandbox.users import UNPRIVILEGED_USER

from . import dockerfile
from .folders import Place, digest_of_place, resolved
from .machines import MAX_OUTPUT_BYTES, CommandResult, MachineError, packed

_MIB: Final = 1 << 20
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LINKS: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC: Final = ("ld.so.cache", "alternatives", "ssl", "ca-certificates", "mime.types")
_FOLDERS: Final = ("/tmp", "/root", "/home", "/opt", "/srv", "/var/tmp", "/var/log", "/run", "/mnt")
_FILES: Final = {
    "/etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/:/usr/sbin/nologin\n",
    "/etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost task\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_DISK_BYTES: Final = 512 * _MIB
_NUM_PROCESSES: Final = 512
_FOLLOWED: Final = ("RUN", "WORKDIR", "SHELL", "VOLUME")
_LATE_S: Final = 5.0
_END_S: Final = 5.0
_BUILD: Final = "/run/build"
_APT: Final = """#!/bin/bash
# apt-get where nothing can be installed: fine as long as it asks for what is there.
verb=""; missing=""
for word in "$@"; do
  case "$word" in
    -*|*=*) [[ "$word" == *=* && "$word" != -* ]] || continue ;;
  esac
  if [ -z "$verb" ]; then verb="$word"; continue; fi
  name="${word%%=*}"; name="${name%%:*}"
  grep -qxF -- "$name" /run/build/packages || missing="$missing $name"
done
[ "$verb" = install ] && [ -n "$missing" ] && {
  echo "the Debian package$missing is not installed on this machine" >&2; exit 100; }
exit 0
"""
_built: dict[str, tuple[bytes, dict[str, str], str]] = {}
"""Files, variables and working folder of environments, by their digest."""
_building = threading.Lock()
_MOST_BUILT: Final = 64


class BubblewrapMachine:
    """A machine in namespaces of its own: no network, no files but its own and the system's.

    The programs are those of this machine, read-only; everything else is in memory, at most 512
    MiB or the ``storage_mb`` of the task if that is less, and goes with it. Programs see
    themselves as root and are an unprivileged user without capabilities. They end with the
    machine, which ends with this process, also if that is killed. Memory in sum and CPU time are
    not limited; ``memory_mb`` bounds each process.

    Args:
        place: a Dockerfile of Debian's or Ubuntu's packages that this machine has, files, and
            commands that need no network.
        endpoint: ``host:port`` that is reached inside as ``127.0.0.1:port``.
        readable: folders of this machine that can be read inside, under the same paths.

    Raises:
        MachineError: the task needs an image, packages, GPUs or a network; or bubblewrap is
            missing.
    """

    has_own_programs = False

    def __init__(
        self, place: Place, *, endpoint: str | None = None, readable: Sequence[str] = ()
    ) -> None:
        self.place = place
        self.endpoint = endpoint
        self._readable = tuple(readable)
        self._process: subprocess.Popen[bytes] | None = None
        self._door: tempfile.TemporaryDirectory[str] | None = None
        self._lock = threading.Lock()
        self._variables = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8"}
        self.workdir = "/"
        if shutil.which("bwrap") is None:
            raise MachineError("bubblewrap is not installed (apt-get install bubblewrap).")
        self._user = UNPRIVILEGED_USER if os.geteuid() == 0 else None
        self._python = _python()
        self._check()

    def _check(self) -> None:
        """Refuse by name what a sandbox can't be."""
        place = self.place
        if place.compose is not None:
            self._refuse("the task needs several containers")
        if place.network in ("public", "allowlist"):
            self._refuse(
                f"the task says network_mode={place.network}, and a sandbox has no network"
            )
        if place.gpus:
            self._refuse("the task needs a GPU")
        if others := [user for user in place.users if user not in ("root", 0)]:
            self._refuse(f"the task has the user {others[0]}, and a sandbox has one, root")
        if place.image is not None:
            self._refuse(f"the task needs the image {place.image}")
        if place.dockerfile is None:
            self._refuse("there is no Dockerfile")
        try:
            self._instructions = dockerfile.instructions(place.folder / "Dockerfile")
            for each in self._instructions:
                self._check_instruction(each)
        except (dockerfile.DockerfileError, UnicodeDecodeError) as error:
            self._refuse(f"Dockerfile: {error}")

    def _check_instruction(self, each: dockerfile.Instruction) -> None:
        if each.name == "FROM":
            dockerfile.check_base(each.text, _version_of(self._python))
        elif each.name in ("COPY", "ADD"):
            dockerfile.copied(each.text, each.line)
            if dockerfile.leaves_out(self.place.folder):
                what = f"line {each.line}: .dockerignore is not followed in a sandbox"
                raise dockerfile.DockerfileError(what)
        elif each.name in ("ENV", "ARG"):
            dockerfile.variables_of(each.text, each.line)
        elif each.name == "USER":
            if each.text not in ("root", "0"):
                what = f"line {each.line}: USER {each.text}: a sandbox has one user, root"
                raise dockerfile.DockerfileError(what)
        elif each.name not in _FOLLOWED and not dockerfile.is_without_effect(each.name):
            what = f"line {each.line}: {each.name} can't be followed in a sandbox"
            raise dockerfile.DockerfileError(what)

    def _refuse(self, what: str) -> None:
        raise MachineError(
            f"{self.place.folder.parent.name}: {what}. machine=bubblewrap can't run it; "
            "machine=docker or podman may."
        )

    # Its life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it with the environment's files, which are built once for equal environments.

        Raises:
            MachineError: a command of the Dockerfile fails, or the namespaces can't be made.
        """
        self._start_process()
        try:
            digest = digest_of_place(self.place)
            with _building:
                built = _built.get(digest)
                if built is None:
                    self._build()
                    files = self._tar_of_all()
                    _built[digest] = files, dict(self._variables), self.workdir
                    while len(_built) > _MOST_BUILT:
                        del _built[next(iter(_built))]
            if built is not None:
                self.upload_tar(built[0], "/")
                self._variables, self.workdir = dict(built[1]), built[2]
            try:
                self._variables |= resolved(self.place.variables, os.environ)
            except KeyError as error:
                raise MachineError(str(error.args[0])) from error
            self.workdir = self.place.workdir or self.workdir
            self._must(
                f"mkdir -p {_quoted(self.workdir)} /logs/agent /logs/verifier /logs/artifacts"
            )
        except BaseException:
            self.stop()
            raise

    def _start_process(self) -> None:  # noqa: C901
        size = min(_DISK_BYTES, (self.place.storage_mb or 1 << 20) * _MIB)
        command = [str(shutil.which("bwrap")), "--unshare-all", "--unshare-user", "--uid", "0"]
        command += ["--gid", "0", "--disable-userns", "--cap-drop", "ALL", "--die-with-parent"]
        command += ["--new-session", "--hostname", "task", "--clearenv"]
        command += ["--size", str(size), "--tmpfs", "/", "--ro-bind", "/usr", "/usr"]
        for name in _LINKS:
            if os.path.islink(f"/{name}"):
                command += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
            elif os.path.isdir(f"/{name}"):
                command += ["--ro-bind", f"/{name}", f"/{name}"]
        command += ["--dir", "/etc"]
        for name in _ETC:
            command += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        for folder in _FOLDERS:
            command += ["--dir", folder]
        for path in self._readable:
            command += ["--ro-bind", path, path]
        prefix = _prefix_of(self._python)
        if prefix is not None:
            command += ["--ro-bind", prefix, prefix]
            self._variables["PATH"] = f"{_PATH}:{prefix}/bin"
        door, outside, socket = None, list[str](), ""
        if self.endpoint is not None:
            self._door = tempfile.TemporaryDirectory(prefix="door-")
            if self._user is not None:
                os.chmod(self._door.name, 0o711)
            socket = f"{self._door.name}/policy"
            door = [urlsplit(f"//{self.endpoint}").port, "/run/door/policy"]
            command += ["--ro-bind", self._door.name, "/run/door"]
            outside = relayed_command(socket, self.endpoint, [])
        limits: dict[str, int] = {"RLIMIT_NPROC": _NUM_PROCESSES, "RLIMIT_CORE": 0}
        limits["RLIMIT_FSIZE"] = size
        if self.place.memory_mb is not None and self.endpoint is None:  # Node maps far more
            limits["RLIMIT_AS"] = max(self.place.memory_mb, 256) * _MIB
        settings = json.dumps({"limits": limits, "door": door})
        command += ["--proc", "/proc", "--dev", "/dev", "--", self._python, "-I", "-S", "-c"]
        command += [_inside(), settings]
        if outside:
            if self._user is not None:
                user = str(self._user)
                become = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
                waits = [
                    "bash",
                    "-c",
                    'while [ ! -S "$0" ]; do sleep 0.01; done; chmod 777 "$0"; exec "$@"',
                    socket,
                ]  # type: ignore[union-attr]
                command = [*waits, *become, *command]
            command = kept_command([*outside, *command])
        else:
            command = kept_command(command, user=self._user)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        os.set_blocking(self._process.stdin.fileno(), False)  # type: ignore[union-attr]
        try:
            for path, text in _FILES.items():
                self._write(path, text)
        except MachineError as error:
            self.stop()
            raise MachineError(f"bubblewrap can't make a machine here: {error}") from error

    def _build(self) -> None:
        """Follow the Dockerfile."""
        arguments: dict[str, str] = {}
        self._write(f"{_BUILD}/packages", "\n".join(_installed_packages()))
        for name in ("apt-get", "apt"):
            self._write(f"{_BUILD}/bin/{name}", _APT)
        self._must(f"chmod +x {_BUILD}/bin/*")
        shell = ["/bin/sh", "-c"]
        deadline = time.monotonic() + self.place.build_timeout_s
        for each in self._instructions:
            known = {**arguments, **self._variables}
            where = f"Dockerfile, line {each.line}"
            if each.name == "WORKDIR":
                path = PurePosixPath(
                    self.workdir, dockerfile.expanded(each.text.strip("\"'"), known)
                )
                self.workdir = str(path)
                self._must(f"mkdir -p {_quoted(self.workdir)}")
            elif each.name == "ENV":
                new = dockerfile.variables_of(each.text, each.line)
                self._variables |= {k: dockerfile.expanded(v, known) for k, v in new.items()}
            elif each.name == "ARG":
                arguments |= dockerfile.variables_of(each.text, each.line)
            elif each.name == "SHELL":
                shell = json.loads(each.text)
            elif each.name in ("COPY", "ADD"):
                self._copy(each, known)
            elif each.name == "RUN":
                argv = json.loads(each.text) if each.text.startswith("[") else [*shell, each.text]
                paths = {"PATH": f"{_BUILD}/bin:{self._variables['PATH']}", **arguments}
                left = max(0.1, deadline - time.monotonic())
                paths |= {"DEBIAN_FRONTEND": "noninteractive"}
                done = self._ask(argv, timeout_s=left, variables={**self._variables, **paths})
                if done.status != 0:
                    said = (done.stderr or done.stdout).strip().rpartition("\n")[2]
                    late = f"took more than {self.place.build_timeout_s:g} s"
                    how = late if done.status is None else f"ended with status {done.status}"
                    self._refuse(f"{where}: `{each.text:.120}` {how}: {said:.300}")
        self._must(f"rm -rf {_BUILD}")

    def _copy(self, each: dockerfile.Instruction, known: dict[str, str]) -> None:
        sources, target = dockerfile.copied(dockerfile.expanded(each.text, known), each.line)
        top = self.place.folder
        found = []
        for source in sources:
            names = (
                [top]
                if source in (".", "./", "/")
                else sorted(Path(path) for path in glob(str(top / source.lstrip("/"))))
            )
            if not names or not all(path.resolve().is_relative_to(top) for path in names):
                self._refuse(f"Dockerfile, line {each.line}: there is no {source} in environment/")
            found += names
        into = str(PurePosixPath(self.workdir, target))
        is_folder = target.endswith(("/", ".")) or len(found) > 1
        for path in found:
            if path.is_dir():
                self.upload(path, into)
            else:
                self.upload(path, f"{into}/{path.name}" if is_folder else into)

    def _tar_of_all(self) -> bytes:
        """Everything that was written, but for the system's own folders."""
        shown = ["usr", "proc", "dev", "run/door", *(f"etc/{name}" for name in _ETC)]
        shown += [path.lstrip("/") for path in (*self._readable, _prefix_of(self._python) or "usr")]
        left_out = [f"--exclude=./{path}" for path in shown]
        found = self._ask(
            ["/usr/bin/tar", "-C", "/", "-cf", "-", "--one-file-system", *left_out, "."],
            timeout_s=60.0,
            most=2 * _DISK_BYTES,
        )
        if found.status != 0:
            raise MachineError("the environment's files can't be read back")
        return found.stdout  # type: ignore[return-value]

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
            timeout_s: after so long it is killed, with all of its session.
            variables: environment variables beside the machine's.
            workdir: where it runs; the machine's when not given.
            max_output_bytes: how much of each stream is kept.
            user: has no effect: there is one, root.

        Raises:
            MachineError: the machine is lost.
        """
        del user
        return self._ask(
            ["/bin/bash", "-c", command],
            timeout_s=timeout_s,
            variables={**self._variables, **(variables or {})},
            workdir=workdir or self.workdir,
            most=max_output_bytes,
            is_text=True,
        )

    def _ask(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        variables: Mapping[str, str] | None = None,
        workdir: str | None = None,
        data: bytes = b"",
        most: int = MAX_OUTPUT_BYTES,
        is_text: bool = False,
    ) -> CommandResult:
        asked: dict[str, Any] = {"argv": list(argv), "timeout_s": timeout_s, "most": most}
        asked["variables"] = dict(self._variables if variables is None else variables)
        asked |= {"workdir": workdir or self.workdir, "size": len(data)}
        head = json.dumps(asked).encode()
        with self._lock:
            process = self._process
            if process is None or process.stdin is None or process.stdout is None:
                raise MachineError("the machine is stopped")
            deadline = time.monotonic() + timeout_s + _LATE_S + len(data) / (10 * _MIB)
            try:
                self._send(process, struct.pack(">I", len(head)) + head + data, deadline)
                (size,) = struct.unpack(">I", self._receive(process, 4, deadline))
                answer = json.loads(self._receive(process, size, deadline))
                out, err = (self._receive(process, n, deadline) for n in answer["sizes"])
            except (OSError, EOFError, TimeoutError) as error:
                self._errors.seek(0)
                said = self._errors.read().decode(errors="replace").strip()
                self._end()
                raise MachineError(f"the machine was lost: {said or error}") from error
        if not is_text and most > MAX_OUTPUT_BYTES:
            return CommandResult(out, err, answer["status"])  # type: ignore[arg-type]
        shown, said = (each.decode("utf-8", errors="replace") for each in (out, err))
        return CommandResult(shown, said, answer["status"])

    @staticmethod
    def _send(process: subprocess.Popen[bytes], data: bytes, deadline: float) -> None:
        number = process.stdin.fileno()  # type: ignore[union-attr]
        view = memoryview(data)
        while view:
            if not _is_ready(number, select.POLLOUT, deadline):
                raise TimeoutError("it does not read")
            view = view[os.write(number, view[: 1 << 16]) :]

    @staticmethod
    def _receive(process: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
        number, data = process.stdout.fileno(), bytearray()  # type: ignore[union-attr]
        while len(data) < size:
            if not _is_ready(number, select.POLLIN, deadline):
                raise TimeoutError("it does not answer")
            part = os.read(number, min(size - len(data), 1 << 20))
            if not part:
                raise EOFError("its first process has ended")
            data += part
        return bytes(data)

    def _must(self, command: str, data: bytes = b"") -> None:
        done = self._ask(["/bin/bash", "-c", command], timeout_s=60.0, workdir="/", data=data)
        if done.status != 0:
            raise MachineError(f"`{command:.80}` failed: {done.stderr.strip():.300}")

    def _write(self, path: str, text: str) -> None:
        folder = _quoted(str(PurePosixPath(path).parent))
        self._must(f"mkdir -p {folder} && cat > {_quoted(path)}", text.encode())

    def upload(self, source: Path, target: str) -> None:
        """Copy a folder's contents, or a file, to a path of the machine.

        Args:
            source: here.
            target: there: the folder that gets the contents, or the file.

        Raises:
            MachineError: there is no room for it.
        """
        if source.is_dir():
            self.upload_tar(packed(source), target)
        else:
            path = PurePosixPath(target)
            self.upload_tar(packed(source, path.name), str(path.parent))

    def upload_tar(self, data: bytes, target: str) -> None:
        """Unpack a ``.tar`` in a folder of the machine.

        Args:
            data: the ``.tar``.
            target: the folder, which is made.

        Raises:
            MachineError: there is no room for it.
        """
        into = _quoted(target)
        # Nothing is written through a link that somebody left there.
        self._must(
            f"mkdir -p {into} && /usr/bin/tar -xf - --no-same-owner --no-overwrite-dir -C {into}",
            data,
        )

    def download(self, source: str) -> bytes | None:
        """Return what a path of the machine holds, as a ``.tar``; nothing if it is not there.

        Args:
            source: there.
        """
        path = PurePosixPath(source)
        done = self._ask(
            ["/usr/bin/tar", "-cf", "-", "-C", str(path.parent), path.name],
            timeout_s=60.0,
            workdir="/",
            most=2 * _DISK_BYTES,
        )
        return done.stdout if done.status == 0 else None  # type: ignore[return-value]

    def stop(self) -> None:
        """Kill everything inside."""
        with self._lock:
            self._end()
        if self._door is not None:
            self._door.cleanup()
            self._door = None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()  # the keeper kills the others first
        try:
            process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        self._errors.close()


def _quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"


@functools.cache
def _inside() -> str:
    return Path(__file__).with_name("inside.py").read_text(encoding="utf-8")


@functools.cache
def _python() -> str:
    """A Python that the unprivileged user can run: the system's, or this one."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(path, os.X_OK):
            return path
    own = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    if own.startswith("/usr/") or os.geteuid() != 0:
        return own
    raise MachineError(
        "a machine by bubblewrap needs a Python in /usr/bin (apt-get install python3), because it "
        f"runs as another user than root, who can't read {own}."
    )


def _prefix_of(python: str) -> str | None:
    """Return what has to be shown for a Python outside of ``/usr``."""
    return None if python.startswith("/usr/") else str(Path(python).parents[1])


@functools.cache
def _version_of(python: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run(
        [python, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@functools.cache
def _installed_packages() -> tuple[str, ...]:
    """Debian's packages on this machine; none where it is no Debian."""
    program = shutil.which("dpkg-query")
    if program is None:
        return ()
    form = "${db:Status-Status} ${Package}\n"
    done = subprocess.run([program, "-W", "-f", form], capture_output=True, text=True, check=False)
    pairs = (line.split(" ", 1) for line in done.stdout.splitlines())
    return tuple(name for status, name in pairs if status == "installed")


def _is_ready(number: int, event: int, deadline: float) -> bool:
    """Wait until a pipe can be read or written, or has broken; `False` if it takes too long."""
    poll = select.poll()  # and not `select`, which knows the first 1,024 open files alone
    poll.register(number, event)
    return bool(poll.poll(1e3 * max(0.0, deadline - time.monotonic())))
