"""Folders of tasks in Harbor's format, as the package ``harbor`` 0.26 defines it.

A task is a folder with ``task.toml``, ``instruction.md``, ``environment/``, ``tests/test.sh`` and,
most often, ``solution/solve.sh``. One of several steps has ``steps/<name>/`` with an instruction
and tests each. Nothing of the package is needed to read them.
"""

import hashlib
import math
import re
import shutil
import tarfile
import tempfile
import tomllib
import unicodedata
import weakref
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

CONFIG: Final = "task.toml"
_CANARY: Final = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_STEP_NAME: Final = re.compile(r'[^<>:"/\\|?*\x00-\x1f\x7f]{1,255}')
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_COMPOSE: Final = ("docker-compose.yaml", "docker-compose.yml")
NetworkMode = Literal["no-network", "public", "allowlist"]
_PHASE: Final = ("timeout_sec", "user", "network_mode", "allowed_hosts")
_KEYS: Final = {
    "": (
        *("schema_version", "version", "task", "metadata", "verifier", "agent", "environment"),
        *("solution", "source", "multi_step_reward_strategy", "steps", "artifacts"),
    ),
    "agent": _PHASE,
    "verifier": (*_PHASE, "env", "environment_mode", "environment", "collect"),
    "environment": (
        *("build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "memory", "storage_mb"),
        *("storage", "gpus", "gpu_types", "tpu", "mcp_servers", "env", "skills_dir", "healthcheck"),
        *("workdir", "allow_internet", "network_mode", "allowed_hosts"),
    ),
    "solution": ("env",),
    "steps": ("name", "agent", "verifier", "min_reward", "healthcheck", "artifacts"),
}
"""Keys of ``task.toml`` by table, whatever comes of them here."""


class TaskFolderError(ValueError):
    """A folder that is no task of Harbor's, or a broken one; the message names the folder."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """A command that has to succeed before the agent begins."""

    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    start_interval_s: float = 5.0
    retries: int = 3


@dataclass(frozen=True, kw_only=True)
class Place:
    """The requirements of a task, or of its tests, on their environment."""

    folder: Path
    """``environment/``, or the folder of the tests that bring a Dockerfile."""
    image: str | None = None
    """A built image that replaces the Dockerfile."""
    workdir: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables; ``${NAME}`` is taken from this process."""
    build_timeout_s: float = 600.0
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int = 0
    network: NetworkMode | None = None
    """``None`` where the task does not say, which Harbor reads as ``"public"``."""
    allowed_hosts: tuple[str, ...] = ()
    """Of ``"allowlist"``."""
    health: Health | None = None
    has_tests: bool = False
    """The image of the tests brings its own ``/tests``."""
    users: tuple[str | int, ...] = ()
    """Who runs commands in it, where the task names somebody."""

    @property
    def dockerfile(self) -> Path | None:
        """The Dockerfile, if there is one."""
        path = self.folder / "Dockerfile"
        return path if path.is_file() else None

    @property
    def compose(self) -> Path | None:
        """The file of its services, if it has several containers; ``main`` is the agent's."""
        paths = (self.folder / name for name in _COMPOSE)
        return next((path for path in paths if path.is_file()), None)


@dataclass(frozen=True, kw_only=True)
class Tests:
    """The tests by which a task, or a step of one, is scored."""

    folders: tuple[Path, ...]
    """What is copied to ``/tests``, one over the other."""
    script: str
    """Its path below ``/tests``."""
    timeout_s: float = 600.0
    variables: Mapping[str, str] = field(default_factory=dict)
    place: Place | None = None
    """A machine of their own; ``None`` runs them in the agent's."""
    artifacts: tuple[str, ...] = ()
    """Absolute paths that are copied from the agent's machine to that of the tests."""
    user: str | int | None = None
    """Who runs them; the image's user when not given."""
    collect: tuple[tuple[str, float, str | int | None], ...] = ()
    """Commands of the agent's machine before that, each with a deadline in seconds and its user."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """An instruction, and how what comes of it is scored."""

    name: str
    instruction: str
    tests: Tests
    timeout_s: float | None = None
    """Longest time of the agent."""
    user: str | int | None = None
    """Who the agent is; the image's user when not given."""
    solution: Path | None = None
    """The folder of the reference solution, which holds ``solve.sh``."""
    workdir: Path | None = None
    """Files that are copied into the working directory before the step."""
    min_reward: Mapping[str, float] = field(default_factory=dict)
    """A reward below one of these ends the task after this step."""
    health: Health | None = None


@dataclass(frozen=True, kw_only=True)
class HarborTask:
    """A task as its folder has it."""

    folder: Path
    name: str
    place: Place
    steps: tuple[Step, ...]
    """One for a task without steps, whose name is empty."""
    strategy: Literal["mean", "final"] = "mean"
    """How the rewards of several steps become one."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    solution_variables: Mapping[str, str] = field(default_factory=dict)
    unknown_keys: tuple[str, ...] = ()
    """Keys of ``task.toml`` that Harbor does not have either: slips, most often."""

    @property
    def has_steps(self) -> bool:
        """Whether the task says that it has steps."""
        return bool(self.steps[0].name)

    @cached_property
    def digest(self) -> str:
        """A digest of the environment's files and settings: equal where the machines are."""
        return digest_of_place(self.place)


def digest_of_place(place: Place) -> str:
    """A digest of what a machine is made of.

    Args:
        place: the definition.
    """
    found = hashlib.sha256(repr((place.image, place.workdir, sorted(place.variables))).encode())
    for path in sorted(place.folder.rglob("*")) if place.folder.is_dir() else ():
        found.update(str(path.relative_to(place.folder)).encode() + b"\0")
        if path.is_file():
            found.update(f"{path.stat().st_mode & 0o111} ".encode() + path.read_bytes())
    return found.hexdigest()


def load_tasks(
    path: str | Path, *, skip_bad: bool = False
) -> tuple[list[HarborTask], dict[str, str]]:
    """The tasks of a folder or an archive.

    Args:
        path: a task, a folder that holds tasks at any depth, or a ``.tar``, ``.tar.gz``, ``.tgz``
            or ``.zip`` of either, which is unpacked for as long as one of its tasks is used.
        skip_bad: leave out tasks that can't be read.

    Returns:
        The tasks in the order of their paths, and why others were left out, by their path.

    Raises:
        FileNotFoundError: there is no such path.
        TaskFolderError: there is no task, or one is broken and ``skip_bad`` is false.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"harbor: there is no folder or archive {str(path)!r}.")
    kept = None if path.is_dir() else _unpacked(path)
    top = path.resolve() if kept is None else Path(kept.name).resolve()
    folders = [top] if (top / CONFIG).is_file() else _folders_of_tasks(top)
    if not folders:
        raise TaskFolderError(
            f"harbor: {path} holds no task: no folder in it has a {CONFIG}. A task is a folder "
            f"with {CONFIG}, instruction.md, environment/ and tests/test.sh."
        )
    tasks, faults = [], {}
    for folder in folders:
        try:
            task = read_task(folder)
        except TaskFolderError as error:
            faults[str(folder.relative_to(top)) if folder != top else folder.name] = str(error)
            continue
        if kept is not None:
            weakref.finalize(task, hold, kept)
        tasks.append(task)
    told_faults(faults, len(folders), f"tasks of {path}", skip_bad=skip_bad)
    return tasks, faults


def told_faults(faults: Mapping[str, str], number: int, what: str, *, skip_bad: bool) -> None:
    """Say which tasks can't be read.

    Args:
        faults: why, by what names the task.
        number: of all of them.
        what: they are.
        skip_bad: they are left out, as long as there are others.

    Raises:
        TaskFolderError: there are such, and they are not left out, or no others.
    """
    if faults and not skip_bad:
        told = "\n".join(f"  {error}" for error in [*faults.values()][:10])
        more = f"\n  and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise TaskFolderError(
            f"harbor: {len(faults)} of {number} {what} can't be read. Mend them, or leave them out "
            f"with skip_bad_tasks=true:\n{told}{more}"
        )
    if len(faults) == number:
        raise TaskFolderError(f"harbor: none of the {number} {what} can be read.")


def hold(kept: "TaskFolder") -> None:
    """Keep a folder for as long as a task of it is there: what a task's finalizer refers to.

    Args:
        kept: the folder.
    """
    del kept


def _folders_of_tasks(top: Path) -> list[Path]:
    found: list[Path] = []
    for path in sorted(top.rglob(CONFIG)):
        if not any(path.is_relative_to(task) for task in found):  # files of that task
            found.append(path.parent)
    return found


class TaskFolder:
    """A folder of tasks that goes with the last task that is in it."""

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp(prefix="harbor-")
        self._end = weakref.finalize(self, shutil.rmtree, self.name, ignore_errors=True)


def _unpacked(path: Path) -> TaskFolder:
    kept = TaskFolder()
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for member in archive.infolist():
                    where = Path(archive.extract(member, kept.name))
                    if mode := member.external_attr >> 16 & 0o777:
                        where.chmod(mode | 0o600)
        elif tarfile.is_tarfile(path):
            with tarfile.open(path) as archive:
                archive.extractall(kept.name, filter="data")
        else:
            raise TaskFolderError(f"harbor: {path} is no folder, no .tar or .tar.gz, and no .zip.")
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError) as error:
        raise TaskFolderError(f"harbor: {path} can't be unpacked: {error}") from error
    return kept


def read_task(folder: str | Path) -> HarborTask:
    """A task's folder, with everything checked that can be without running it.

    Args:
        folder: with a ``task.toml``.

    Raises:
        TaskFolderError: a file is missing or can't be read, or a setting is out of range.
    """
    folder = Path(folder).resolve()
    return _Reader(folder).task()


class _Reader:
    """Reads one folder; every error names it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = self._text(folder / CONFIG)
        try:
            self.config = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise self.error(f"{CONFIG} is no TOML: {error}") from error

    def error(self, what: str) -> TaskFolderError:
        return TaskFolderError(f"{self.folder}: {what}")

    def task(self) -> HarborTask:
        package = self._table(self.config, "task", CONFIG)
        name = package.get("name", self.folder.name)
        if not isinstance(name, str) or not name:
            raise self.error(f"[task] name must be a string, got {name!r}.")
        if (self.folder / "trajectory.json").exists():
            raise self.error("it begins from a trajectory.json, which can't be loaded here.")
        place = self._place(self._table(self.config, "environment", CONFIG), "environment")
        if not place.folder.is_dir() and place.image is None:
            raise self.error("there is no environment/, and [environment] names no docker_image.")
        self._contained("tests", "solution", "steps", "environment")
        steps = self._list(self.config, "steps")
        strategy = self.config.get("multi_step_reward_strategy") or "mean"
        if strategy not in ("mean", "final"):
            raise self.error(f"multi_step_reward_strategy must be mean or final, got {strategy!r}.")
        made = self._steps(steps, place) if steps else (self._single(place),)
        users = [step.user for step in made]
        for tests in (step.tests for step in made):
            users += [user for _, _, user in tests.collect]
            users += [tests.user] if tests.place is None else []
        named = tuple(dict.fromkeys(user for user in users if user is not None))
        return HarborTask(
            folder=self.folder,
            name=name,
            place=replace(place, users=named),
            steps=made,
            strategy=strategy,
            metadata=self._table(self.config, "metadata", CONFIG),
            solution_variables=self._variables(self.config, "solution"),
            unknown_keys=tuple(_unknown_keys(self.config)),
        )

    def _single(self, place: Place) -> Step:
        return self._step("", self.folder, {}, place)

    def _steps(self, given: Sequence[Any], place: Place) -> tuple[Step, ...]:
        steps, seen = [], set()
        for number, table in enumerate(given, 1):
            name = table.get("name") if isinstance(table, dict) else None
            plain = (
                isinstance(name, str) and _STEP_NAME.fullmatch(name) and name == name.strip(". ")
            )
            if not plain:
                raise self.error(
                    f"step {number} needs a name that a folder can have, got {name!r}."
                )
            key = unicodedata.normalize("NFC", str(name)).casefold()
            if key in seen:
                raise self.error(f"two steps have the name {name!r}.")
            seen.add(key)
            folder = self.folder / "steps" / str(name)
            if not folder.is_dir():
                raise self.error(f"there is no folder steps/{name} for the step {name!r}.")
            if (folder / "trajectory.json").exists():
                raise self.error(f"steps/{name} has a trajectory.json, which can't be loaded here.")
            steps.append(self._step(str(name), folder, table, place))
        return tuple(steps)

    def _step(self, name: str, folder: Path, own: dict[str, Any], place: Place) -> Step:
        where = f"steps/{name}" if name else "the task"
        instruction = without_canary(self._text(folder / "instruction.md"))
        if not instruction.strip():
            raise self.error(f"instruction.md of {where} is empty.")
        agents = [self._table(x, "agent", where) for x in (own, self.config)]
        self._network_of_phase(agents, f"[agent] of {where}", place)
        limits = [self._number(x, "timeout_sec", f"[agent] of {where}") for x in agents]
        solutions = [path / "solution" for path in dict.fromkeys((folder, self.folder))]
        solution = next((path for path in solutions if (path / "solve.sh").is_file()), None)
        given: Any = own.get("min_reward")
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        least: Any = {"reward": float(given)} if is_number else given
        is_table = isinstance(least, dict) and all(
            isinstance(x, int | float) for x in least.values()
        )
        if least is not None and not is_table:
            raise self.error(f"min_reward of {where} must be a number or a table, got {least!r}.")
        files = folder / "workdir"
        return Step(
            name=name,
            instruction=instruction,
            tests=self._tests(folder, own, place, where),
            timeout_s=next((limit for limit in limits if limit is not None), None),
            user=self._user(agents, f"[agent] of {where}"),
            solution=solution,
            workdir=files if name and files.is_dir() else None,
            min_reward=least or {},
            health=self._health(own, where),
        )

    def _tests(self, folder: Path, own: dict[str, Any], place: Place, where: str) -> Tests:
        is_step = folder != self.folder
        tables = [self._table(x, "verifier", where) for x in (own, self.config)]
        folders = [path / "tests" for path in dict.fromkeys((self.folder, folder))]
        found = [path for path in folders if path.is_dir()]
        mode = self._mode(tables, where)
        separate = None
        if mode == "separate":
            separate = self._place_of_tests(tables, folders, place)
        scripts = [path / "test.sh" for path in reversed(found) if (path / "test.sh").is_file()]
        if not scripts and not (separate is not None and separate.has_tests):
            expected = f"steps/{folder.name}/tests/test.sh or " if is_step else ""
            raise self.error(f"{where} has no {expected}tests/test.sh, which would score it.")
        of_verifier = [(t, f"[verifier] of {where}") for t in tables]
        limits = [self._number(t, "timeout_sec", w) for t, w in of_verifier]
        variables: dict[str, str] = {}
        for holder in (self.config, own) if is_step else (self.config,):
            variables |= self._variables(holder, "verifier")
        user = self._user(tables, f"[verifier] of {where}")
        if separate is None:
            self._network_of_phase(tables, f"[verifier] of {where}", place)
        else:
            own_table = next((t for t in tables if t.get("network_mode") is not None), None)
            network = {} if own_table is None else self._network(own_table, f"verifier of {where}")
            separate = replace(separate, users=() if user is None else (user,), **network)
        return Tests(
            folders=() if separate is not None and separate.has_tests else tuple(found),
            script="test.sh",
            timeout_s=next((limit for limit in limits if limit is not None), 600.0),
            variables=variables,
            place=separate,
            artifacts=self._artifacts(own, where),
            user=user,
            collect=tuple(hook for table in tables for hook in self._hooks(table, where)),
        )

    def _network_of_phase(self, tables: Sequence[dict[str, Any]], where: str, place: Place) -> None:
        """Refuse a network that would change within a machine's life."""
        table = next((table for table in tables if table.get("network_mode") is not None), None)
        if table is None:
            return
        own = self._network(table, where)
        has = {"network": place.network or "public", "allowed_hosts": place.allowed_hosts}
        if own != has:
            raise self.error(
                f"{where} network_mode={own['network']} is not that of [environment] "
                f"({has['network']}): a machine keeps its network here."
            )

    def _user(self, tables: Sequence[dict[str, Any]], where: str) -> str | int | None:
        """Return the first user that is named."""
        for table in tables:
            user = table.get("user")
            if isinstance(user, bool) or not isinstance(user, str | int | None) or user == "":
                raise self.error(f"user of {where} must be a name or a number, got {user!r}.")
            if user is not None:
                return user
        return None

    def _mode(self, tables: Sequence[dict[str, Any]], where: str) -> str:
        for table in tables:
            mode = table.get("environment_mode")
            if mode not in (None, "shared", "separate"):
                raise self.error(
                    f"environment_mode of {where} must be shared or separate, got {mode!r}."
                )
            if mode == "shared" and table.get("environment") is not None:
                raise self.error(f"{where}: environment_mode=shared has no [verifier.environment].")
            if mode is not None or table.get("environment") is not None:
                return mode or "separate"
        return "shared"

    def _place_of_tests(
        self, tables: Sequence[dict[str, Any]], folders: Sequence[Path], place: Place
    ) -> Place:
        for table, folder in zip(tables, reversed(folders), strict=False):
            own = table.get("environment")
            brings = any((folder / name).is_file() for name in ("Dockerfile", *_COMPOSE))
            if isinstance(own, dict) and own.get("docker_image"):
                return self._place(own, "verifier.environment", folder, has_tests=True)
            if brings:
                return self._place(own or {}, "verifier.environment", folder, has_tests=True)
        own = next((t["environment"] for t in tables if t.get("environment") is not None), None)
        if own is None:
            return place
        return self._place({"docker_image": place.image, **own}, "verifier.environment")

    def _artifacts(self, own: dict[str, Any], where: str) -> tuple[str, ...]:
        paths = ["/logs/artifacts"]
        for given in [*self._list(self.config, "artifacts"), *self._list(own, "artifacts")]:
            table = {"source": given} if isinstance(given, str) else given
            source = table.get("source") if isinstance(table, dict) else None
            if not isinstance(source, str) or not source or ".." in PurePosixPath(source).parts:
                raise self.error(f"an artifact of {where} must be a path, got {given!r}.")
            if table.get("service") not in (None, "main"):
                raise self.error(f"the artifact {source} is of the service {table['service']!r}.")
            if table.get("exclude"):
                raise self.error(f"the artifact {source}: exclude is not supported here.")
            paths.append(source if source.startswith("/") else f"/logs/artifacts/{source}")
        return tuple(dict.fromkeys(paths))

    def _hooks(
        self, table: dict[str, Any], where: str
    ) -> list[tuple[str, float, str | int | None]]:
        hooks = []
        for hook in self._list(table, "collect"):
            command = hook.get("command") if isinstance(hook, dict) else None
            if not isinstance(command, str):
                raise self.error(f"a collect hook of {where} needs a command, got {hook!r}.")
            if hook.get("service", "main") != "main":
                raise self.error(
                    f"a collect hook of {where} is of the service {hook['service']!r}."
                )
            limit_s = self._number(hook, "timeout_sec", "a collect hook") or 60.0
            hooks.append((command, limit_s, self._user([hook], f"a collect hook of {where}")))
        return hooks

    def _place(
        self,
        table: dict[str, Any],
        where: str,
        folder: Path | None = None,
        *,
        has_tests: bool = False,
    ) -> Place:
        folder = self.folder / "environment" if folder is None else folder
        system = str(table.get("os", "linux")).lower()
        if system != "linux":
            raise self.error(f"[{where}] os={system!r}: only Linux tasks can be run.")
        for name in ("mcp_servers", "skills_dir", "tpu", "gpu_types"):
            if table.get(name):
                raise self.error(f"[{where}] {name} is not supported here.")
        image, workdir = table.get("docker_image"), table.get("workdir")
        for name, value in (("docker_image", image), ("workdir", workdir)):
            if not isinstance(value, str | None):
                raise self.error(f"[{where}] {name} must be a string, got {value!r}.")
        sizes: dict[str, Any] = {}
        for name, old in (("memory_mb", "memory"), ("storage_mb", "storage")):
            size = self._number(table, name, f"[{where}]")
            if size is None and isinstance(table.get(old), str):
                size = self._megabytes(table[old], f"[{where}] {old}")
            sizes[name] = None if size is None else int(size)
        return Place(
            folder=folder,
            image=image or None,
            workdir=workdir or None,
            variables=self._variables({"x": table}, "x"),
            build_timeout_s=self._number(table, "build_timeout_sec", f"[{where}]") or 600.0,
            cpus=self._number(table, "cpus", f"[{where}]"),
            gpus=int(self._number(table, "gpus", f"[{where}]", least=0) or 0),
            **self._network(table, where),
            health=self._health(table, where),
            has_tests=has_tests,
            **sizes,
        )

    def _network(self, table: dict[str, Any], where: str) -> dict[str, Any]:
        """Return what of the network a place may reach."""
        network = table.get("network_mode")
        if network is None and table.get("allow_internet") is not None:  # its name before 1.2
            network = "public" if table["allow_internet"] else "no-network"
        if network not in (None, "no-network", "public", "allowlist"):
            raise self.error(
                f"[{where}] network_mode must be no-network, public or allowlist, got {network!r}."
            )
        hosts = self._list(table, "allowed_hosts")
        if not all(isinstance(host, str) and host.strip() for host in hosts):
            raise self.error(f"[{where}] allowed_hosts must be names or addresses, got {hosts!r}.")
        if hosts and network != "allowlist":
            raise self.error(f"[{where}] allowed_hosts are for network_mode = 'allowlist'.")
        return {"network": network, "allowed_hosts": tuple(hosts)}

    def _health(self, table: dict[str, Any], where: str) -> Health | None:
        given = self._table(table, "healthcheck", where)
        if not given:
            return None
        if not isinstance(given.get("command"), str):
            raise self.error(f"the healthcheck of {where} needs a command.")
        names = ("interval", "timeout", "start_period", "start_interval")
        values = {
            f"{name}_s": self._number(given, f"{name}_sec", f"the healthcheck of {where}", least=0)
            for name in names
        }
        values["retries"] = self._number(given, "retries", f"the healthcheck of {where}")
        kept: Any = {name: value for name, value in values.items() if value is not None}
        return Health(command=given["command"], **kept)

    # Values -------------------------------------------------------------------------------------

    def _text(self, path: Path) -> str:
        name = path.relative_to(self.folder)
        try:
            return path.read_text(encoding="utf-8-sig")  # some editors begin with a mark
        except FileNotFoundError:
            raise self.error(f"{name} is missing.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise self.error(f"{name} can't be read: {error}") from error

    def _table(self, holder: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
        value = holder.get(name)
        if not isinstance(value, dict | None):
            raise self.error(f"{name} of {where} must be a table, got {value!r:.80}.")
        return value or {}

    def _list(self, holder: Mapping[str, Any], name: str) -> list[Any]:
        value = holder.get(name) or []
        if not isinstance(value, list):
            raise self.error(f"{name} must be a list, got {value!r:.80}.")
        return value

    def _number(
        self, holder: Mapping[str, Any], name: str, where: str, *, least: float | None = None
    ) -> float | None:
        value = holder.get(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0 or (least is None and value == 0):
            wanted = "positive" if least is None else "at least 0"
            raise self.error(f"{name} of {where} must be a {wanted} number, got {value!r}.")
        return value

    def _megabytes(self, text: str, where: str) -> float:
        found = re.fullmatch(r"\s*([0-9.]+)\s*([GMK])\s*", text, re.IGNORECASE)
        if found is None:
            raise self.error(f"{where} must be a size such as 2G or 512M, got {text!r}.")
        return float(found[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[found[2].upper()]

    def _variables(self, holder: Mapping[str, Any], name: str) -> dict[str, str]:
        given = self._table(self._table(holder, name, CONFIG), "env", name)
        for key, value in given.items():
            if not isinstance(value, str):
                raise self.error(f"[{name}.env] {key} must be a string, got {value!r}.")
        return given

    def _contained(self, *names: str) -> None:
        """No link of the task leads out of it."""
        for path in (path for name in names for path in (self.folder / name).rglob("*")):
            if path.is_symlink() and not path.resolve().is_relative_to(self.folder):
                raise self.error(f"{path.relative_to(self.folder)} is a link out of the task.")


def _unknown_keys(config: Mapping[str, Any]) -> Iterator[str]:
    """Keys that no table of a ``task.toml`` has."""
    tables = {name: [config.get(name)] for name in ("agent", "verifier", "environment", "solution")}
    tables |= {"": [config], "steps": list(config.get("steps") or [])}
    found = dict[str, None]()
    for name, given in tables.items():
        for table in given:
            keys = table if isinstance(table, dict) else {}
            prefix = f"{name}." if name else ""
            found |= dict.fromkeys(f"{prefix}{key}" for key in keys if key not in _KEYS[name])
    yield from found


def without_canary(text: str) -> str:
    """An instruction without the lines at its start by which benchmarks mark themselves.

    Args:
        text: of ``instruction.md``.
    """
    lines = text.split("\n")
    start = 0
    while start < len(lines) and _CANARY.fullmatch(lines[start].strip()):
        start += 1
    while start < len(lines) and not lines[start].strip():
        start += 1
    return "\n".join(lines[start:])


def resolved(variables: Mapping[str, str], host: Mapping[str, str]) -> dict[str, str]:
    """Variables of a task with what they take from this process.

    Args:
        variables: values may hold ``${NAME}`` or ``${NAME:-default}``.
        host: the variables of this process.

    Raises:
        KeyError: a variable without a default is not set.
    """

    def value(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        if name not in host and default is None:
            raise KeyError(f"the task needs the environment variable {name}, which is not set")
        return host.get(name, default or "")

    return {name: _VARIABLE.sub(value, text) for name, text in variables.items()}
