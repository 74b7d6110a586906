"""Several containers that belong together, by ``docker compose``."""

import functools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from torchrl_envs.processes.captured import captured
from torchrl_envs.processes.worker_process import run_afterwards

from .container import LOOKS, Container, workdir_of
from .engine import ASK_S, ContainerEngine, ContainerError, EngineAnswer

MAIN: Final = "main"
"""The service in which commands run."""
_DOWN_S: Final = 60.0
_MAX_BYTES: Final = 1 << 16
_LOGS: Final = ("verifier", "agent", "artifacts")
_built: set[tuple[str, str]] = set()
_building: Final = threading.Lock()


class ComposeProject:
    """The services of a file, made for their owner; they go with this process, however it ends.

    Args:
        engine: runs the containers.
        path: the file of the services, or nothing but ``main``'s own settings where it lacks them.
        tag: names what is built; equal where the files of its folder are.
        main: settings of the service ``main`` that the file may replace.
        over: settings of ``main`` that replace the file's.
        is_closed: nothing outside of the project can be reached, but for this machine.
        variables: what the file may name as ``${NAME}``, beside this process's own.

    Raises:
        ContainerError: there is no compose, or the file can't be used.
    """

    def __init__(
        self,
        engine: ContainerEngine,
        path: Path,
        tag: str,
        *,
        main: Mapping[str, Any],
        over: Mapping[str, Any],
        is_closed: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._engine, self._path, self._tag = engine, path, tag
        self._command = [*compose_command(engine)]
        self._is_plugin = len(self._command) == 2
        self._name = f"torchrl-agents-{uuid.uuid4().hex[:16]}"
        self._document = _read(path)
        self._main, self._over, self._is_closed = dict(main), dict(over), is_closed
        self._variables = dict(variables or {})
        self._folder: str | None = None
        self._after: subprocess.Popen[bytes] | None = None
        if is_closed:
            _check_closed(path, self._document)

    def start(self, *, build_timeout_s: float) -> Container:
        """Build what is built, start all services, and give the container of ``main``.

        Args:
            build_timeout_s: longest time of the build, and of the start.

        Raises:
            ContainerError: either fails.
        """
        self._folder = tempfile.mkdtemp(prefix="compose-")
        try:
            base, over = self._written()
            folder = str(self._path.parent)
            self._command += ["-p", self._name, "--project-directory", folder]
            for path in (base, self._path, over):
                self._command += ["-f", str(path)]
            down = [*self._command, "down", "-v", "--remove-orphans", "-t", "0"]
            self._after = run_afterwards(down, folder=self._folder, variables=self._environment())
            self._build(build_timeout_s)
            waits = ["--wait"] if self._is_plugin else []  # until services are healthy
            done = self._ask(["up", "-d", "--no-build", *waits], build_timeout_s)
            if not done.is_good:
                raise ContainerError(f"{self._path}: the services do not start: {done.said}")
            return self._main_container()
        except BaseException:
            self.stop()
            raise

    def _main_container(self) -> Container:
        name = self._ask(["ps", "-q", MAIN], ASK_S).stdout.decode().strip()
        container = Container(self._engine, name)
        done = self._engine.ask(["exec", name, "sh", "-c", LOOKS])
        lines = done.stdout.decode(errors="replace").splitlines()
        workdir = workdir_of(lines, f"the image of the service {MAIN}") if done.is_good else None
        if workdir is None:
            raise ContainerError(f"{self._path}: the service {MAIN} does not run: {done.said}")
        container.workdir = workdir
        return container

    def _written(self) -> tuple[Path, Path]:
        """Return the files before and after the task's own."""
        assert self._folder is not None
        folder = Path(self._folder)
        before: dict[str, Any] = {"services": {MAIN: self._main}}
        services: dict[str, Any] = {MAIN: self._over}
        after: dict[str, Any] = {"services": services}
        for name, service in self._document["services"].items():
            if name != MAIN and service.get("build") is not None and not service.get("image"):
                services[name] = {"image": f"{self._tag}-{name}"}
        if self._is_closed:
            names = {"default", *(self._document.get("networks") or {})}
            after["networks"] = {name: {"internal": True} for name in names}
        if "version" in self._document:  # the first release of compose wants them to agree
            before["version"] = after["version"] = self._document["version"]
        for name in _LOGS:
            (folder / name).mkdir()
            (folder / name).chmod(0o777)
        paths = folder / "before.json", folder / "after.json"
        for path, document in zip(paths, (before, after), strict=True):
            path.write_text(json.dumps(document))
        return paths

    def _environment(self) -> dict[str, str]:
        """Return the variables that the files may name, as Harbor gives them."""
        own = {"CONTEXT_DIR": str(self._path.parent), "MAIN_IMAGE_NAME": self._tag}
        for name in _LOGS:
            key = name.upper() if name == "artifacts" else f"{name.upper()}_LOGS"
            own[f"HOST_{key}_PATH"] = f"{self._folder}/{name}"
            own[f"ENV_{key}_PATH"] = f"/logs/{name}"
        return {**os.environ, **self._variables, **own}

    def _build(self, timeout_s: float) -> None:
        key = self._engine.program, self._tag
        with _building:
            if key in _built:
                return
            cleans = [] if self._is_plugin else ["--force-rm"]  # what a failed build would leave
            done = self._ask(["build", "-q", *cleans], timeout_s)
            if not done.is_good:
                raise ContainerError(f"{self._path}: the build failed: {done.said}")
            _built.add(key)

    def _ask(self, words: Sequence[str], timeout_s: float) -> EngineAnswer:
        done = captured(
            [*self._command, *words],
            timeout_s=timeout_s,
            max_bytes=_MAX_BYTES,
            variables=self._environment(),
        )
        return EngineAnswer(done.stdout.text().encode(), done.stderr.text(), done.status)

    def stop(self) -> None:
        """End all of it and remove what it has; a second time it does nothing."""
        after, self._after = self._after, None
        if after is not None:
            assert after.stdin is not None
            after.stdin.close()
            try:
                after.wait(timeout=_DOWN_S)
            except subprocess.TimeoutExpired:
                return  # it goes on by itself
        elif self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None


@functools.cache
def compose_command(engine: ContainerEngine) -> tuple[str, ...]:
    """The command line of compose: the engine's plugin, or a program of its own.

    Args:
        engine: runs the containers.

    Raises:
        ContainerError: there is none.
    """
    program = engine.program
    if engine.ask(["compose", "version"]).is_good:
        return program, "compose"
    if shutil.which(f"{program}-compose"):
        return (f"{program}-compose",)
    raise ContainerError(
        f"the task has several containers: machine={program} needs `{program} compose` (Docker's "
        f"plugin docker-compose-plugin) or {program}-compose."
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ContainerError(f"{path} can't be read: {error}") from error
    services = document.get("services") if isinstance(document, dict) else None
    if not isinstance(services, dict) or not all(
        isinstance(x, dict | None) for x in services.values()
    ):
        raise ContainerError(f"{path} must have a table of services.")
    document["services"] = {name: service or {} for name, service in services.items()}
    return document


def _check_closed(path: Path, document: Mapping[str, Any]) -> None:
    """Refuse what would reach a network all the same."""
    for name, service in document["services"].items():
        mode = service.get("network_mode")
        if mode not in (None, "none"):
            raise ContainerError(
                f"{path}: the task says no-network, and the service {name} network_mode={mode}."
            )
    for name, network in (document.get("networks") or {}).items():
        if isinstance(network, dict) and network.get("external"):
            raise ContainerError(
                f"{path}: the task says no-network, and the network {name} is an outside one."
            )
