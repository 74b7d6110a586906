"""A run and its surroundings.

Its folder, its log, signals that stop it, and the run that it continues.
"""

import fcntl
import glob
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final, NamedTuple
from uuid import uuid4

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torchrl.record.loggers import Logger

from collectors.checkpoint.errors import CheckpointError
from collectors.checkpoint.files import sha256
from collectors.checkpoint.retention import stored
from collectors.resume.identity import installed_versions
from objectives import Ranks

from .settings import program
from .settings.command_line import AUTO, OF_RANKS, RECORD, read_record
from .settings.schema import Recipe, SettingsError, check_path_parts

# Which run goes on, and whether its settings are those that it began with.

CHECKPOINTS: Final = "checkpoints"
_MAY_DIFFER: Final = (
    *("checkpoint", "dry_run", "evaluate.num_shown", "hydra", "logger", "overwrite", "resume"),
    *("collector.verify_every", "push_to_hub"),
    *("train.num_steps", "train.timeout_s", "train.wait_s"),
    *(f"train.{name}" for name in OF_RANKS),
)
"""Settings that change nothing of the steps that were made."""
FINISHED: Final = "finished"


class LastTestError(RuntimeError):
    """The test after training failed; the model is left all the same."""


def plain_settings(cfg: DictConfig) -> dict[str, Any]:
    """Return what decides a run, by the setting's path.

    Args:
        cfg: the settings as they were composed.
    """
    whole = OmegaConf.to_container(cfg, throw_on_missing=False)
    assert isinstance(whole, dict)
    return {
        name: OmegaConf.select(cfg, name) if "${" in str(value) else value
        for name, value in _leaves(whole)
        if not any(name == other or name.startswith(f"{other}.") for other in _MAY_DIFFER)
    }


def _leaves(settings: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def find_run(folders: Sequence[Path], settings: Mapping[str, Any]) -> Path | None:
    """The newest run that was stopped, has a checkpoint and the same settings.

    Where there is none, what keeps the newest other one from going on is logged.

    Args:
        folders: of runs, the newest last.
        settings: what :func:`plain_settings` gave.
    """
    why = []
    for folder in reversed(folders):
        # One that was killed while it wrote its first checkpoint has none.
        is_there = (folder / RECORD).exists() and stored(folder / CHECKPOINTS)
        if is_there and read_record(folder)["status"] != FINISHED:
            try:
                check_same_settings(folder, settings)
                return folder
            except SettingsError as error:
                why.append(error)
    if why:
        _LOG.warning("resume=auto begins a new run, for the last one can't go on. %s", why[0])
    return None


def check_same_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Check that a run goes on with the settings that it began with.

    Args:
        folder: of the run.
        settings: what :func:`plain_settings` gave.

    Raises:
        SettingsError: some differ; the message names them.
    """
    record = read_record(folder)
    saved = record.get("settings", {})
    differ = [
        f"{name} was {saved.get(name)!r} and is {settings.get(name)!r}"
        for name in sorted({*saved, *settings})
        if saved.get(name) != settings.get(name)
    ]
    if differ:
        raise SettingsError(
            f"resume={folder}: a run goes on with its own settings, and {'; '.join(differ[:5])}. "
            f"Leave them out, go on with its commit {record.get('commit')}, or begin a new run."
        )


# The folder of a run: named, its own, never overwritten unless that is asked for.

ROOT: Final = Path("outputs")
LEFT_BY_A_RUN: Final = (
    *(CHECKPOINTS, "not_finite", "rollouts", "csv", "tensorboard", "wandb"),
    *("adapter", "base", "model", "adapter.partial", "base.partial", "model.partial"),
    *("config.yaml", "evaluations.jsonl", "metrics.jsonl", "learning_curve.png", "timeline.json"),
)
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
        while True:
            last += 1
            folder = parent / f"{label}-{last:03}"
            with suppress(FileExistsError):  # another run was faster
                folder.mkdir()
                return str(folder)
    except OSError as error:  # inside Hydra, which would tell another error
        raise SystemExit(
            f"{program(recipe)}: no folder for the run can be made in {Path.cwd()}: {error}. Start "
            "it where you can write, or give a folder with hydra.run.dir=."
        ) from error


OmegaConf.register_new_resolver("run_folder", claim_folder, replace=True)


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


# What a run tells while it goes on.

_TELL_EVERY_S: Final = 20.0
_SHOWN: Final = {"reward": ".3f", "loss": ".4f", "entropy": ".3f", "grad_norm": ".3f"}


class RunLog:
    """The log file and the terminal: phases by name, a line for each step, and how long it takes.

    Args:
        path: of the log file. Warnings of all libraries go there too.
    """

    def __init__(self, path: Path) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._file = logging.FileHandler(path, encoding="utf-8")
        self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._handlers: Sequence[logging.Handler] = ()
        self._root = logging.getLogger()

    def __enter__(self) -> "RunLog":
        self._bar.start()
        screen = logging.StreamHandler()  # to standard error, which is above a bar from here on
        # A bar says some of it itself.
        screen.addFilter(lambda record: self._bar.disable or not record.__dict__.get("bar"))
        self._handlers = (self._file, screen)
        _LOG.setLevel(logging.INFO)
        for handler in self._handlers:
            _LOG.addHandler(handler)
        _LOG.propagate = False
        self._root.addHandler(self._file)
        logging.captureWarnings(True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *what: Any) -> None:
        self._bar.stop()
        if kind is not None and kind is not SystemExit:
            self._root.error("the run failed", exc_info=(kind, *what))  # type: ignore[arg-type]
        logging.captureWarnings(False)
        self._root.removeHandler(self._file)
        for handler in self._handlers:
            _LOG.removeHandler(handler)
        _LOG.propagate = True
        self._file.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say what goes on now, that it still does, and how long it took."""
        start, over = time.monotonic(), threading.Event()

        def tell() -> None:
            while not over.wait(_TELL_EVERY_S):
                passed = timedelta(seconds=round(time.monotonic() - start))
                _LOG.info("%s: %s so far ...", name, passed, extra={"bar": True})

        _LOG.info("%s ...", name)
        bar = self._bar.add_task(name, total=None, text="")
        teller = threading.Thread(target=tell, name="phase", daemon=True)
        teller.start()
        try:
            yield
        finally:
            over.set()
            teller.join()
            self._bar.remove_task(bar)
        _LOG.info("%s: %.1f s", name, time.monotonic() - start)

    def steps(self, name: str, total: int) -> Callable[..., None]:
        """A loop whose steps are told one by one.

        Returns:
            What is called after each step, with its number, from 1, and its metrics, of which the
            best known are shown; ``quiet=True`` only moves the bar, and writes a line every 20 s.
            The first step, which takes longer than others, says nothing of the time that is left.
        """
        bar = self._bar.add_task(name, total=total, text="")
        times: deque[float] = deque(maxlen=20)
        told = time.monotonic()

        def done(step: int, metrics: Mapping[str, float], *, quiet: bool = False) -> None:
            nonlocal told
            times.append(time.monotonic())
            shown = {key: form for key, form in _SHOWN.items() if key in metrics}
            text = "  ".join(f"{key} {metrics[key]:{form}}" for key, form in shown.items())
            self._bar.update(bar, completed=step, text=text)
            if quiet and times[-1] - told < _TELL_EVERY_S:
                return
            told = times[-1]
            if len(times) > 1:
                seconds = (times[-1] - times[0]) / (len(times) - 1)
                pace = f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"
                left = timedelta(seconds=round(seconds * (total - step)))
                text += f"  ({pace} s a step, {left} left)"
            _LOG.info("%s step %d/%d  %s", name, step, total, text, extra={"bar": True})

        return done


def has_signal(metrics: Mapping[str, float], *, needs_groups: bool) -> bool:
    """Return whether something could be learnt in a step.

    Args:
        metrics: of the step.
        needs_groups: rollouts of a group with equal rewards teach nothing.
    """
    # NaN where no rollout was scored.
    is_flat = needs_groups and not metrics["groups/without_signal_fraction"] < 1
    return not is_flat and metrics.get("kept_fraction") != 0


def tell_of_no_signal(metrics: Mapping[str, float], num_steps: int) -> None:
    """Say why nothing could be learnt in a step.

    Args:
        metrics: of the step, or of the first test.
        num_steps: so many such steps there were; it is told of the 1st, 2nd, 4th, 8th, ... Before
            the first step, 0.
    """
    if num_steps & (num_steps - 1):  # not a power of two
        return
    level, what = logging.WARNING, "No signal"
    if metrics.get("reward/unscorable_fraction") == 1:
        stops = {k.removeprefix("stop/"): v for k, v in metrics.items() if k.startswith("stop/")}
        ends = ", ".join(f"{reason} {share:.0%}" for reason, share in stops.items())
        why = (
            f"no rollout could be scored, so no update is made. They ended by {ends}; rollouts/ "
            "has the stop_reason and reward_errors of each. A reward function that gives None does "
            "not apply: where each does, nothing is scored."
        )
    elif metrics.get("kept_fraction") == 0:
        why = (
            "a filter left nothing to train (kept_fraction is 0): look at loss.drop_truncated and "
            f"truncated_fraction ({metrics.get('truncated_fraction', 0):.0%} of the rollouts), and "
            "at the other filters of the loss."
        )
    elif metrics.get("groups/solve_all_fraction") == 1:
        level, what = logging.INFO, "Nothing left to learn"
        why = (
            "every rollout was right, so no update was made. train.stop_at=0.99 with "
            "evaluate.every=5 ends a run that is done."
        )
    else:
        why = (
            "in each group all rollouts have the same reward "
            f"(mean {metrics['reward']:.3g}), so no update was made. The task may be too hard or "
            "too easy for this model: warm it up, take easier settings of the task, larger groups "
            "or a higher temperature, or give partial rewards."
        )
    where = f"{num_steps} step(s)" if num_steps else "the first test"
    _LOG.log(level, "%s in %s: %s", what, where, why)


# Ctrl-C, SIGTERM and SLURM's warning: what was trained is saved before the run ends.

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""SLURM sends the last before it takes a machine away: ``sbatch --signal=USR1@120``."""
AT_ONCE_S: Final = 2.0
"""After a second signal the run may give back what it holds for so long."""
ONE_S: Final = 0.3
"""What comes so soon after the first signal is the same one: ``timeout`` and others send it to a
process and to its group."""
_WAKES: Final = signal.SIGURG
_FIRST_S: Final = 0.2


class StopRequested(BaseException):
    """A signal came while something ran that is not worth waiting for."""


class StopSignals:
    """Turns signals into a request that the loop reads; outside of :meth:`held` they end the run.

    A second signal ends the run wherever it is, be that in native code that never comes back:
    a thread hears of signals though the main thread does not.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The signal that asked to stop."""
        self._received_s = 0.0
        self._is_held = self._may_break = False
        self._before: dict[signal.Signals, Any] = {}
        self._wakes_before: tuple[int, Any] = (-1, None)
        self._pipe: int | None = None

    @property
    def status(self) -> int:
        """The exit status: 128 and the signal's number, as a shell has it; 0 without a signal."""
        return 0 if self.received is None else 128 + self.received

    def __enter__(self) -> "StopSignals":
        # Who starts a run with nohup, or behind a shell's "&", wants it to be left alone.
        heard = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._receive) for number in heard}
        read, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        wakes = signal.signal(_WAKES, lambda *_: None)
        # The numbers of signals are written here, whatever the main thread does.
        self._wakes_before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False), wakes
        # What reaches a child is not for this process.
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._watch, args=(read,), name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakes_before[0])
            signal.signal(_WAKES, self._wakes_before[1])
            os.close(self._pipe)
            self._pipe = None
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A signal in here is only noted."""
        for number in self._before:  # A library may have taken one: Ray takes SIGTERM.
            signal.signal(number, self._receive)
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def check(self) -> None:
        """Raise :class:`StopRequested` if a signal came."""
        if self.received is not None:
            raise StopRequested

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """A signal in here raises :class:`StopRequested`; so does one that came before."""
        self._may_break = True
        try:
            self.check()
            yield
        finally:
            self._may_break = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        again, now_s = self.received is not None, time.monotonic()
        if again and now_s - self._received_s < ONE_S:
            return
        self.received, self._received_s = signal.Signals(number), now_s
        if again or not self._is_held:
            _LOG.warning("%s: stopping now", self.received.name)
            raise SystemExit(self.status)
        _LOG.warning("%s: saving; once more stops at once", self.received.name)
        if self._may_break:
            self._may_break = False
            raise StopRequested

    def _forget(self) -> None:
        if self._pipe is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)

    def _watch(self, read: int) -> None:
        """Wake the main thread, and end the process after a second signal.

        Python handles signals between two steps of its main thread. That may wait, and not be woken
        by one that came just before; it is woken again. It may be in native code that does not come
        back.
        """
        count, pause_s, first_s = 0, _FIRST_S, -ONE_S
        poll = select.poll()  # and not `select`, which knows the first 1,024 open files alone
        poll.register(read, select.POLLIN)
        while True:
            is_unheard = count > 0 and self.received is None
            if not poll.poll(1e3 * pause_s if is_unheard else None):
                pause_s *= 2
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, _WAKES)
                continue
            number = os.read(read, 1)
            if not number:
                break
            if number[0] not in SIGNALS or time.monotonic() - first_s < ONE_S:
                continue
            count, first_s = count + 1, time.monotonic() if count == 0 else first_s
            if count == 2:
                time.sleep(AT_ONCE_S)
                os._exit(128 + number[0])
        os.close(read)


# Where a model comes from, and what it takes along from the run that left it.

_PROMPTS: Final = (
    *("chat_template_name", "show_tool_schemas", "tool_call_format", "max_new_tokens", "stop"),
)
"""Of ``policy``: what the prompts and turns were that a model was trained with."""


class Origin(NamedTuple):
    """The origin of a model, which is known before it is loaded."""

    model: str | None
    """What the first of the runs began with that led to it; ``None`` is the embedded model."""
    task: str | None
    """What its last run trained it on; ``None`` where no run did."""
    settings: Mapping[str, Any]
    """Of that run, by their paths: how prompts show tools, and how long turns are."""


def origin_of(model: str | None) -> Origin:
    """Return where a model comes from.

    Args:
        model: ``policy.model``: a run's folder (or the ``model`` in it), a hub id, another path;
            ``None`` is the embedded one.
    """
    last = {} if model is None else _settings_of(model)
    policy = last.get("policy") or {}
    found = {f"policy.{name}": policy[name] for name in _PROMPTS if policy.get(name) is not None}
    run = last
    while run:
        model = (run.get("policy") or {}).get("model")
        run = {} if model is None else _settings_of(model)
    return Origin(model, (last.get("task") or {}).get("id"), found)


def _settings_of(model: str) -> dict[str, Any]:
    """The settings of the run that left a model; nothing where none did."""
    path = Path(model)
    folder = path.parent if path.name == "model" else path
    if not (folder / "config.yaml").is_file():
        return {}
    settings: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    return settings if isinstance(settings, dict) else {}
