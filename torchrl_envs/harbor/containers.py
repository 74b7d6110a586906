"""Machines by docker and podman."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Final

from torchrl_envs.containers.compose import ComposeProject, compose_command
from torchrl_envs.containers.container import Container, HeldContainer
from torchrl_envs.containers.door import Door, closed_network
from torchrl_envs.containers.engine import ContainerEngine, ContainerError

from .allowed_network import AllowedNetwork, ListedHosts
from .folders import Place, digest_of_place, resolved
from .machines import MAX_OUTPUT_BYTES, CommandResult, MachineError, packed

_NUM_PROCESSES: Final = 4096
_FOLDERS: Final = ("/logs/agent", "/logs/verifier", "/logs/artifacts")


class DockerMachine:
    """A container of the task's Dockerfile or image, or the containers of its services.

    It ends with this process, however that ends. With ``cpus``, ``memory_mb`` and ``gpus`` as the
    task has them, and 4096 processes at most; ``storage_mb`` has no effect, as engines bound files
    on few file systems alone.

    Args:
        place: what it has to be.
        endpoint: ``host:port`` of the policy. A task without a network then reaches this machine,
            and nothing else; one with listed hosts reaches those by a proxy that variables name.
        readable: has no effect: agents are installed inside.

    Raises:
        MachineError: the program is missing or does not answer, or the task needs what a container
            by it does not have.
    """

    program: ClassVar[str] = "docker"
    has_own_programs = True

    def __init__(
        self, place: Place, *, endpoint: str | None = None, readable: Sequence[str] = ()
    ) -> None:
        del readable
        self.place = place
        self.workdir = place.workdir or "/"
        self.endpoint: str | None = None
        self._asked_for = endpoint
        self._engine = ContainerEngine(self.program)
        self._project: ComposeProject | None = None
        self._container: Container | None = None
        self._doors: list[Door] = []
        self._allowed: AllowedNetwork | None = None
        self._proxies: dict[str, str] = {}
        self._network: str | None = None
        if reason := self._engine.reason_against():
            raise MachineError(f"machine={self.program}: {reason}")
        self._is_closed = place.network in ("no-network", "allowlist")
        try:
            ListedHosts(place.allowed_hosts)
        except ValueError as error:
            raise MachineError(f"{place.folder.parent.name}: {error}") from error
        with self._told():
            if place.compose is not None:
                compose_command(self._engine)
            elif self._is_closed:
                needs_door = endpoint is not None or place.network == "allowlist"
                self._network = closed_network(self._engine) if needs_door else "none"
        if place.dockerfile is None and place.image is None and place.compose is None:
            raise MachineError(f"{place.folder}: there is neither a Dockerfile nor an image.")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say which machine an error is of."""
        try:
            yield
        except ContainerError as error:
            raise MachineError(f"machine={self.program}: {error}") from error

    def start(self) -> None:
        """Build or fetch the image, which the engine keeps, and start a container of it.

        Raises:
            MachineError: either fails.
        """
        try:
            variables = resolved(self.place.variables, os.environ)
        except KeyError as error:
            raise MachineError(str(error.args[0])) from error
        try:
            with self._told():
                make = self._single if self.place.compose is None else self._several
                self._container = make(variables)
                if self.place.workdir is None:
                    self.workdir = self._container.workdir
                self._container.make_folders([self.workdir, *_FOLDERS])
                self._container.workdir = self.workdir
                if self._asked_for is not None:
                    self.endpoint = self._opened(self._asked_for)
                if self.place.network == "allowlist":
                    self._allowed = AllowedNetwork(self.place.allowed_hosts)
                    place = self._opened(self._allowed.endpoint)
                    self._proxies = self._allowed.variables(place, [place.rpartition(":")[0]])
        except BaseException:
            self.stop()
            raise

    def _opened(self, endpoint: str) -> str:
        """Return where a server of this machine is reached inside."""
        self._doors.append(Door(self._running, endpoint))
        return self._doors[-1].address

    def _single(self, variables: Mapping[str, str]) -> Container:
        place, options = self.place, ["--pids-limit", str(_NUM_PROCESSES)]
        image = place.image
        if image is None:
            image = self._tag
            self._engine.had_image_of(place.folder, image, timeout_s=place.build_timeout_s)
        else:
            self._engine.had_image(image, timeout_s=place.build_timeout_s)
        if place.cpus is not None:
            options += ["--cpus", str(place.cpus)]
        if place.memory_mb is not None:
            options += ["--memory", f"{place.memory_mb}m"]
        options += self._gpus(place.gpus)
        if self._network is not None:
            options += ["--network", self._network]
        for name, value in variables.items():
            options += ["--env", f"{name}={value}"]
        container = HeldContainer(self._engine, prefix="harbor")
        container.start(image, options, timeout_s=place.build_timeout_s)
        return container

    def _several(self, variables: Mapping[str, str]) -> Container:
        place = self.place
        assert place.compose is not None
        main: dict[str, Any] = {"command": ["sh", "-c", "while :; do sleep 3600; done"]}
        if place.image is not None:
            main["image"] = place.image
        elif place.dockerfile is not None:
            main |= {"image": self._tag, "build": {"context": str(place.folder)}}
        over: dict[str, Any] = {"environment": dict(variables)}
        if place.cpus is not None:
            over["cpus"] = float(place.cpus)
        if place.memory_mb is not None:
            over["mem_limit"] = f"{place.memory_mb}m"
        if place.gpus:
            device = {"driver": "nvidia", "count": place.gpus, "capabilities": ["gpu"]}
            over["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
        self._project = ComposeProject(
            self._engine,
            place.compose,
            self._tag,
            main=main,
            over=over,
            is_closed=self._is_closed,
            variables=variables,
        )
        return self._project.start(build_timeout_s=place.build_timeout_s)

    @cached_property
    def _tag(self) -> str:
        return f"harbor-{digest_of_place(self.place)[:32]}"

    @staticmethod
    def _gpus(number: int) -> list[str]:
        return ["--gpus", str(number)] if number else []

    @property
    def _running(self) -> Container:
        if self._container is None:
            raise MachineError("the machine is stopped")
        return self._container

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
            variables: environment variables beside the machine's.
            workdir: where it runs; the machine's when not given.
            max_output_bytes: how much of each stream is kept.
            user: who runs it; the image's when not given.

        Raises:
            MachineError: the container is gone.
        """
        with self._told():
            return self._running.run(
                command,
                timeout_s=timeout_s,
                variables={**self._proxies, **(variables or {})},
                workdir=workdir,
                max_output_bytes=max_output_bytes,
                user=user,
            )

    def upload(self, source: Path, target: str) -> None:
        """Copy a folder's contents, or a file, to a path of the container.

        Args:
            source: here.
            target: there.

        Raises:
            MachineError: it can't be put there.
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

        Raises:
            MachineError: it can't be unpacked there.
        """
        with self._told():
            self._running.upload_tar(data, target)

    def download(self, source: str) -> bytes | None:
        """Return what a path of the container holds, as a ``.tar``; nothing if it is not there.

        Args:
            source: there.

        Raises:
            MachineError: it is larger than 1 GiB.
        """
        with self._told():
            return self._running.download(source)

    def stop(self) -> None:
        """End the container, which removes it; a second time it does nothing."""
        container, self._container = self._container, None
        for door in self._doors:
            door.close()
        if self._allowed is not None:
            self._allowed.close()
        if self._project is not None:
            self._project.stop()
        elif isinstance(container, HeldContainer):
            container.stop()


class PodmanMachine(DockerMachine):
    """The same by podman, whose command line is docker's."""

    program = "podman"

    @staticmethod
    def _gpus(number: int) -> list[str]:
        return [word for i in range(number) for word in ("--device", f"nvidia.com/gpu={i}")]
