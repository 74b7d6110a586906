"""Harbor's own environments (Daytona, E2B, Modal, Kubernetes, ...) as machines."""

import asyncio
import functools
import io
import tarfile
import tempfile
import threading
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from .folders import Place
from .machines import MAX_OUTPUT_BYTES, CommandResult, MachineError, packed


def foreign_machine(path: str) -> type[Any]:
    """A kind of machine by one of Harbor's classes.

    Args:
        path: ``package.module:class``, of a subclass of ``harbor.environments.base``'s
            ``BaseEnvironment``.

    Raises:
        ValueError: it can't be imported, or is no such class.
    """
    module, _, name = path.partition(":")
    try:
        cls = getattr(import_module(module), name)
        base = import_module("harbor.environments.base").BaseEnvironment
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"harbor: machine={path!r} can't be imported: {error}. Harbor's classes need Python "
            "3.12 and `pip install harbor`, with the extra of the provider."
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ValueError(f"harbor: machine={path!r} is no environment of Harbor's: {cls!r:.80}.")
    made: Any = functools.partial(ForeignMachine, cls)
    made.has_own_programs = True
    return made


class ForeignMachine:
    """An environment of Harbor's as a machine.

    Where it runs elsewhere, it is stopped by :meth:`stop`; after a kill of this process it ends by
    the provider's own time limit.

    Args:
        cls: Harbor's class.
        place: what it has to be.
        endpoint: programs inside would have to reach the policy by a network of their own.
        readable: has no effect there.

    Raises:
        MachineError: an endpoint is wanted, or the class refuses the task.
    """

    has_own_programs = True
    endpoint: str | None = None

    def __init__(
        self,
        cls: type[Any],
        place: Place,
        *,
        endpoint: str | None = None,
        readable: Sequence[str] = (),
    ) -> None:
        del readable
        if endpoint is not None:
            raise MachineError(
                f"{cls.__name__}: agents by name can't run in it, as it does not reach the policy "
                "of this machine; leave task.agent out, or take machine=bubblewrap or docker."
            )
        config = import_module("harbor.models.task.config")
        paths = import_module("harbor.models.trial.paths")
        self._folder = tempfile.TemporaryDirectory(prefix="harbor-trial-")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        trial = paths.TrialPaths(trial_dir=Path(self._folder.name))
        trial.mkdir()
        settings: dict[str, Any] = {"docker_image": place.image, "workdir": place.workdir}
        settings |= {"cpus": place.cpus, "memory_mb": place.memory_mb, "gpus": place.gpus or None}
        settings |= {"storage_mb": place.storage_mb, "env": dict(place.variables)}
        settings |= {"network_mode": place.network} if place.network else {}
        settings |= {"allowed_hosts": list(place.allowed_hosts)} if place.allowed_hosts else {}
        name = place.folder.parent.name
        try:
            self._environment = cls(
                environment_dir=place.folder,
                environment_name=name,
                session_id=f"{name}__{uuid.uuid4().hex[:8]}",
                trial_paths=trial,
                task_env_config=config.EnvironmentConfig(**settings),
            )
        except Exception as error:  # of a provider's package
            self._close()
            raise MachineError(f"{cls.__name__} refuses {name}: {error}") from error
        self.workdir = place.workdir or "/"
        self._place = place

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except Exception as error:  # of a provider's package
            raise MachineError(f"{type(self._environment).__name__}: {error}") from error

    def start(self) -> None:
        """Start it as Harbor does.

        Raises:
            MachineError: it can't be started.
        """
        self._do(self._environment.start(force_build=False))
        if self._place.workdir is None:
            self.workdir = self.run("pwd", timeout_s=60.0).stdout.strip() or "/"
        self.run("mkdir -p /logs/agent /logs/verifier /logs/artifacts", timeout_s=60.0, workdir="/")

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
        """Run a command there.

        Args:
            command: one or several lines.
            timeout_s: rounded up to whole seconds, as Harbor takes them.
            variables: environment variables beside the machine's.
            workdir: where it runs.
            max_output_bytes: how much of each stream is kept, at its start.
            user: who runs it.

        Raises:
            MachineError: it is lost.
        """
        limit = max(1, -int(-timeout_s // 1))
        cwd = workdir or (self.workdir if self.workdir != "/" else None)
        given: dict[str, Any] = {"cwd": cwd, "env": dict(variables or {})}
        given |= {} if user is None else {"user": user}
        work = self._environment.exec(command=command, timeout_sec=limit, **given)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            done = future.result(limit + 30.0)
        except TimeoutError:
            future.cancel()
            return CommandResult("", "", None)
        except Exception as error:  # some providers raise where others return
            if "timed out" in str(error).lower():
                return CommandResult("", "", None)
            raise MachineError(f"{type(self._environment).__name__}: {error}") from error
        out, err = ((text or "")[:max_output_bytes] for text in (done.stdout, done.stderr))
        return CommandResult(out, err, done.return_code)

    def upload(self, source: Path, target: str) -> None:
        """Copy a folder's contents, or a file.

        Args:
            source: here.
            target: there.
        """
        if source.is_dir():
            self._do(self._environment.upload_dir(source_dir=source, target_dir=target))
        else:
            self._do(self._environment.upload_file(source_path=source, target_path=target))

    def upload_tar(self, data: bytes, target: str) -> None:
        """Unpack a ``.tar`` here, and copy what it holds.

        Args:
            data: the ``.tar``.
            target: the folder there.
        """
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                archive.extractall(folder, filter="data")
            self.upload(Path(folder), target)

    def download(self, source: str) -> bytes | None:
        """Return what a path there holds, as a ``.tar``; nothing if it is not there.

        Args:
            source: there.
        """
        name = PurePosixPath(source).name
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / name
            if self._do(self._environment.is_dir(source)):
                self._do(self._environment.download_dir(source, target))
            elif self._do(self._environment.is_file(source)):
                self._do(self._environment.download_file(source, target))
            else:
                return None
            return packed(target, name)

    def stop(self) -> None:
        """Stop and delete it."""
        if self._loop.is_closed():
            return
        try:
            self._do(self._environment.stop(delete=True))
        finally:
            self._close()

    def _close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._folder.cleanup()
