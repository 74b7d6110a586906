"""The machine of a task: what every kind of one can do, and their names."""

import io
import tarfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import ClassVar, Final, Protocol

from torchrl_envs.containers.container import MAX_OUTPUT_BYTES as MAX_OUTPUT_BYTES
from torchrl_envs.containers.container import CommandResult as CommandResult

from .folders import Place

MACHINES: Final = {
    "bubblewrap": "bubblewrap:BubblewrapMachine",
    "docker": "containers:DockerMachine",
    "podman": "containers:PodmanMachine",
}
"""``module:class`` by name; any other name is ``package.module:class`` of one of Harbor's."""


class MachineError(RuntimeError):
    """A machine can't be made, or was lost; the message says why."""


class Machine(Protocol):
    """Files and processes of one rollout, apart from all others.

    Whoever makes one calls :meth:`start` first and :meth:`stop` at the end. All of it ends with
    this process, too, however that ends.
    """

    has_own_programs: ClassVar[bool]
    """The programs inside are those of an image, and not those of this machine."""

    def __init__(
        self, place: Place, *, endpoint: str | None = None, readable: Sequence[str] = ()
    ) -> None:
        """Check what can be checked without starting anything.

        Args:
            place: what it has to be.
            endpoint: ``host:port`` of the policy, which programs inside can then reach.
            readable: folders of this machine that programs inside can read.

        Raises:
            MachineError: this kind of machine can't be that.
        """

    @property
    def workdir(self) -> str:
        """Folder in which commands run."""
        ...

    @property
    def endpoint(self) -> str | None:
        """``host:port`` by which programs inside reach the policy, once it is started."""
        ...

    def start(self) -> None:
        """Make it, with the files of the environment.

        Raises:
            MachineError: it can't be made.
        """

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
        """Run a command by bash.

        Args:
            command: one or several lines.
            timeout_s: after so long it is killed, with all of its session.
            variables: environment variables beside the machine's.
            workdir: where it runs; the machine's when not given.
            max_output_bytes: how much of each stream is kept.
            user: who runs it: ``"root"``, or one of the place's; the image's when not given.

        Raises:
            MachineError: the machine is lost.
        """
        ...

    def upload(self, source: Path, target: str) -> None:
        """Copy a folder's contents, or a file, to a path of the machine.

        Args:
            source: here.
            target: there, absolute: the folder that gets the contents, or the file.
        """

    def download(self, source: str) -> bytes | None:
        """Return what a path of the machine holds, as a ``.tar`` of it; nothing if it is not there.

        Args:
            source: there, absolute.
        """
        ...

    def upload_tar(self, data: bytes, target: str) -> None:
        """Unpack what :meth:`download` gave.

        Args:
            data: a ``.tar``.
            target: the folder there.
        """

    def stop(self) -> None:
        """End all of it; a second time it does nothing."""


def machine_type(name: str) -> type[Machine]:
    """The class of a machine.

    Args:
        name: one of :data:`MACHINES`, or ``package.module:class``.

    Raises:
        ValueError: there is no such kind.
    """
    if name in MACHINES:
        module, _, cls = MACHINES[name].partition(":")
        return getattr(import_module(f"{__package__}.{module}"), cls)
    if ":" not in name:
        raise ValueError(
            f"harbor: machine must be one of {', '.join(MACHINES)}, or package.module:class of one "
            f"of Harbor's environments (harbor.environments.daytona:...), got {name!r}."
        )
    return import_module(f"{__package__}.foreign").foreign_machine(name)


def packed(source: Path, name: str = ".") -> bytes:
    """A folder's contents, or a file, as a ``.tar``.

    Args:
        source: the folder or file.
        name: it has in the ``.tar``.
    """

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.add(source, name, filter=plain)
    return data.getvalue()


def file_of(data: bytes | None, name: str, *, max_bytes: int = 1 << 20) -> bytes | None:
    """A regular file of what :meth:`Machine.download` gave; nothing if it has none.

    Args:
        data: a ``.tar`` of one path.
        name: the path's last part.
        max_bytes: a longer one counts as none.
    """
    if data is None:
        return None
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            is_it = PurePosixPath(member.name).name == name and member.isreg()
            if is_it and member.size <= max_bytes and (file := archive.extractfile(member)):
                return file.read()
    return None
