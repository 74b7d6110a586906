"""The folder of a run: named, its own, never overwritten unless that is asked for."""

import fcntl
import glob
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import IO, Any, Final
from uuid import uuid4

from omegaconf import DictConfig, OmegaConf
from torchrl.record.loggers import Logger

from collectors.checkpoint.errors import CheckpointError
from collectors.checkpoint.files import sha256
from collectors.checkpoint.retention import stored
from collectors.resume.identity import installed_versions
from objectives import Ranks
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.recorded_arguments import AUTO, RECORD, read_record
from torchrl_agents.settings.rules import check_path_parts

from .found_run import CHECKPOINTS, FINISHED, check_same_settings, find_run, plain_settings
from .run_log import RunLog
from .settings import program
from .stop_signals import StopSignals


class LastTestError(RuntimeError):
    """The test after training failed; the model is left all the same."""


ROOT: Final = Path("outputs")
LEFT_BY_A_RUN: Final = (
    *(CHECKPOINTS, "not_finite", "rollouts", "csv", "tensorboard", "wandb"),
    *("adapter", "agents", "base", "model"),
    *("adapter.partial", "agents.partial", "base.partial", "model.partial"),
    *("config.yaml", "evaluations.jsonl", "metrics.jsonl", "learning_curve.png", "timeline.json"),
)
_SECOND: Final = "%Y-%m-%d_%H-%M-%S"
_TIME: Final = "%Y-%m-%dT%H:%M:%S%z"
_LOG = logging.getLogger("torchrl_agents")


@cache  # Hydra asks several times for one and the same run
def claim_folder(recipe: str, *, _root_: DictConfig) -> str:
    """A new numbered folder, the last one of that name, or that of a run that goes on.

    Args:
        recipe: its name.
        _root_: all settings. ``name`` is the run's, ``None`` for ``seed<seed>``; ``overwrite``
            takes the last run's folder, and ``resume`` is that of the run that goes on, or
            ``"auto"``.

    Raises:
        SystemExit: no folder can be made here, or of that name.
    """
    if os.environ.get("RANK", "0") != "0":  # of torchrun: the folder is rank 0's
        return tempfile.mkdtemp(prefix="torchrl-agents-rank-")
    if _root_.resume not in (None, AUTO):
        return str(_root_.resume)
    try:
        check_path_parts(_root_.name, _root_.task.id)
    except SettingsError as error:  # inside Hydra, which would tell another error
        raise SystemExit(f"{program(recipe)}: {error}") from error
    label = _root_.name or f"seed{_root_.seed}"
    parent = ROOT / recipe / _root_.task.id
    try:
        parent.mkdir(parents=True, exist_ok=True)
        tails = {
            path: path.name.removeprefix(f"{label}-")
            for path in parent.glob(f"{glob.escape(label)}-*")
        }
        runs = {int(tail) if tail.isdecimal() else 0: path for path, tail in tails.items()}
        last = max(runs, default=0)
        if _root_.resume == AUTO:
            found = find_run([runs[n] for n in sorted(runs)], plain_settings(_root_))
            if found is not None:
                return str(found)
        if _root_.overwrite and last:
            return str(parent / f"{label}-{last:03}")
        return _first_new(parent / f"{label}-{number:03}" for number in count(last + 1))
    except OSError as error:
        raise _no_folder(recipe, error, "hydra.run.dir=") from error


@cache  # Hydra asks again for each of the runs
def claim_sweep_folder(recipe: str) -> str:
    """A new folder for the runs of one ``--multirun``, named after the time.

    Args:
        recipe: its name.

    Raises:
        SystemExit: no folder can be made here.
    """
    begun = ROOT / recipe / "multirun" / time.strftime(_SECOND)
    try:
        begun.parent.mkdir(parents=True, exist_ok=True)
        later = (begun.with_name(f"{begun.name}-{number}") for number in count(2))
        return _first_new(chain([begun], later))  # others may have begun in this second
    except OSError as error:
        raise _no_folder(recipe, error, "hydra.sweep.dir=") from error


def _first_new(folders: Iterator[Path]) -> str:
    """Make the first folder that is not there, whoever else makes them at the same time."""
    for folder in folders:
        with suppress(FileExistsError):
            folder.mkdir()
            return str(folder)
    raise AssertionError("there are always further names")


def _no_folder(recipe: str, error: OSError, setting: str) -> SystemExit:
    """Return what to raise inside Hydra, which would tell another error."""
    return SystemExit(
        f"{program(recipe)}: no folder for the run can be made in {Path.cwd()}: {error}. Start it "
        f"where you can write, or give a folder with {setting}."
    )


OmegaConf.register_new_resolver("run_folder", claim_folder, replace=True)
OmegaConf.register_new_resolver("sweep_folder", claim_sweep_folder, replace=True)


@dataclass
class Failures:
    """Failures of one kind, which a run survives: the 1st, 2nd, 4th, 8th, ... are on the console.

    Args:
        what: fails.
    """

    what: str
    count: int = 0
    """How many there were."""
    last: BaseException | None = None
    """Why the last one failed; ``None`` where it did not."""

    @property
    def told(self) -> str:
        """The last failure in words."""
        kind = "" if isinstance(self.last, CheckpointError) else f"{type(self.last).__name__}: "
        return f"{kind}{self.last} Failures so far: {self.count}."

    def note(self, error: BaseException | None) -> None:
        """Note how it went: say what failed, if it is time to; the same error counts once."""
        again, self.last = error is self.last, error
        if error is None or again:
            return
        self.count += 1
        if self.count.bit_count() == 1:
            _LOG.warning("%s: %s", self.what, self.told)


class Run(AbstractContextManager["Run", None]):
    """A run: a folder in which it and no other writes, and what is around its steps.

    Args:
        folder: where; Hydra has made it.
        settings: what decides the run, see :func:`plain_settings`.
        overwrite: whether to delete what an earlier run left there.
        resume: whether to go on with the run that is there, if there is one.
        command: with which it goes on by itself; that of this process when not given.
        ranks: the processes that train; this one by itself when not given.

    Raises:
        SettingsError: another run has left its results there, has other settings, or is writing
            there.
    """

    recipe: Recipe
    """Whose run it is."""
    log: "RunLog"
    """What it tells while it goes on."""
    stop: "StopSignals"
    """What may end it early."""

    def __init__(
        self,
        folder: Path,
        *,
        settings: Mapping[str, Any],
        overwrite: bool,
        resume: bool = False,
        command: Sequence[str] = (),
        ranks: Ranks | None = None,
    ) -> None:
        self.folder = folder
        self.ranks = ranks or Ranks.alone()
        """The processes that train."""
        self.loggers: Sequence[Logger] = ()
        """TorchRL's, where its metrics go."""
        self.ends = ExitStack()
        """Closed at its end, however it comes: servers that were started for it."""
        self.failures: dict[str, Failures] = {}
        """What could not be saved, by what it is; the run goes on without it."""
        self.record: dict[str, Any] = {
            "status": "running",
            "id": uuid4().hex[:8],
            "command": list(command or sys.argv),
            "started": time.strftime(_TIME),
            "ended": None,
            **_code(),
            "settings": dict(settings),
        }
        """What ``run.json`` says: ``id`` is of this run and no other, also where it goes on, and
        trackers know it by that; ``settings`` are what decides it, by the setting's path."""
        path = folder / RECORD
        existed = path.exists()
        self.goes_on = resume and existed
        """Whether an earlier run goes on."""
        self.had_finished = False
        """Whether it had come to its end."""
        if self.goes_on:
            if not stored(folder / CHECKPOINTS):
                raise SettingsError(
                    f"resume={folder}: the run was stopped before its first checkpoint. Begin "
                    "another one, or say overwrite=true and leave resume= out."
                )
            check_same_settings(folder, settings)
            before = read_record(folder)
            self.had_finished = before["status"] == FINISHED
            again = {"command": sys.argv, "at": time.strftime(_TIME)}
            self.record |= before | {"resumed": [*before.get("resumed", []), again]}
        elif existed and not overwrite:
            raise SettingsError(f"{folder} holds a run already. Say overwrite=true, or leave it.")
        self._file: IO[bytes] = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise SettingsError(f"Another run is writing in {folder} just now.") from error
        if existed and not self.goes_on:
            for left in (*(folder / name for name in LEFT_BY_A_RUN), *folder.glob("*.log")):
                remove(left)
        self.set_status("running")

    def note_files(self) -> None:
        """Warn of files that have changed since the run began: data that settings name, and code.

        Code is whatever was imported, but for Python's own modules and installed packages.
        """
        paths = {name: getattr(part, "__file__", None) for name, part in [*sys.modules.items()]}
        paths |= {f"{name}={value}": value for name, value in self.record["settings"].items()}
        python, files = str(Path(os.__file__).parent), dict[str, str]()
        for name, path in paths.items():
            own = str(path)
            if os.path.isfile(own) and "-packages" not in own and not own.startswith(python):
                files[name] = sha256(Path(own).resolve())
        before = self.record.setdefault("files", files)
        if changed := sorted(n for n, digest in files.items() if before.get(n, digest) != digest):
            self.record["resumed"][-1]["changed"] = changed
            words = "%d files have changed since this run began, and are used as they are now: %s"
            _LOG.warning(words, len(changed), ", ".join(changed[:9]))
        self.set_status("running")

    @property
    def label(self) -> str:
        """Name for trackers: its folder, and the sweep if --multirun has numbered it."""
        name = self.folder.name
        return f"{self.folder.parent.name}-{name}" if name.isdecimal() else name

    def set_status(self, status: str) -> None:
        """Write down how the run is.

        Args:
            status: ``running``, ``checked``, ``finished``, ``interrupted`` or ``failed``.
        """
        self.record["status"] = status
        self.record["ended"] = None if status == "running" else time.strftime(_TIME)
        text, file = json.dumps(self.record, indent=2).encode(), self._file.fileno()
        # Whenever it is killed, the old record is there or the new one.
        os.pwrite(file, text.ljust(os.fstat(file).st_size), 0)
        os.ftruncate(file, len(text))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.ends.close()
        if self.record["status"] == "running":
            # What refuses to go on with a run that had finished has changed nothing of it.
            failed = FINISHED if self.had_finished and kind is SettingsError else "failed"
            self.set_status("interrupted" if kind is SystemExit else failed)
        self._file.close()

    def link(self) -> None:
        """Let ``outputs/<recipe>/<task>/<name>`` show to this run, the latest with a model."""
        name, dash, number = self.folder.name.rpartition("-")
        if not (dash and number.isdecimal() and ROOT.resolve() in self.folder.resolve().parents):
            return  # a folder of the user's own
        link = self.folder.parent / name
        if link.exists() and not link.is_symlink():
            _LOG.warning("%s is a folder, so it does not show to %s", link, self.folder)
            return
        new = self.folder.parent / f".{self.folder.name}.link"
        new.symlink_to(self.folder.name)
        os.replace(new, link)


def remove(path: Path) -> None:
    """Delete a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _code() -> dict[str, Any]:
    """The versions of what a run uses, and the commit of this code, which says if files differ."""
    found = installed_versions("torchrl-agents", "datasets", "reasoning-gym")
    versions = {"python": sys.version.split()[0], **found}
    commit = None
    if (git := shutil.which("git")) is not None:
        command = [git, "describe", "--always", "--dirty", "--abbrev=40"]
        where = Path(__file__).parent
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
        commit = done.stdout.strip() or None
    return {"commit": commit, "versions": versions}
