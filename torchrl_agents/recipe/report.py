"""What a run tells while it goes on."""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_LOG: Final = logging.getLogger("torchrl_agents")
_TELL_EVERY_S: Final = 20.0
_SHOWN: Final = {"reward": ".3f", "loss": ".4f", "entropy": ".3f", "grad_norm": ".3f"}


class RunLog:
    """The log file and the terminal: phases by name, a line for each step, and how long it takes.

    Args:
        path: of the log file. Warnings of all libraries go there too.
    """

    def __init__(self, path: Path) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=self._console,
            disable=not sys.stderr.isatty(),
        )
        self._file = logging.FileHandler(path, encoding="utf-8")
        self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._screen = logging.StreamHandler(_Above(self._bar))
        self._screen.setFormatter(logging.Formatter("%(message)s"))
        self._screen.addFilter(lambda record: not (record.__dict__.get("bar") and self._has_bar))
        self._root = logging.getLogger()
        self._times: deque[float] = deque(maxlen=20)

    @property
    def _has_bar(self) -> bool:
        return not self._bar.disable

    def __enter__(self) -> "RunLog":
        _LOG.setLevel(logging.INFO)
        for handler in (self._file, self._screen):
            _LOG.addHandler(handler)
        _LOG.propagate = False
        self._root.addHandler(self._file)
        logging.captureWarnings(True)
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *what: Any) -> None:
        self._bar.stop()
        if kind is not None and kind is not SystemExit:
            self._root.error("the run failed", exc_info=(kind, *what))  # type: ignore[arg-type]
        logging.captureWarnings(False)
        self._root.removeHandler(self._file)
        for handler in (self._file, self._screen):
            _LOG.removeHandler(handler)
        _LOG.propagate = True
        self._file.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say what goes on now, that it still does, and how long it took."""
        start, over = time.monotonic(), threading.Event()

        def tell() -> None:
            while not over.wait(_TELL_EVERY_S):
                passed = _duration(time.monotonic() - start)
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

    @contextmanager
    def steps(self, name: str, total: int) -> Iterator["Steps"]:
        """A loop whose steps are told one by one."""
        bar = self._bar.add_task(name, total=total, text="")
        yield Steps(self._bar, bar, name, total)


class Steps:
    """Tells the steps of one loop."""

    def __init__(self, bar: Progress, task: Any, name: str, total: int) -> None:
        self._bar, self._task, self._name, self._total = bar, task, name, total
        self._times: deque[float] = deque([time.monotonic()], maxlen=20)
        self._told = self._times[0]

    def done(self, step: int, metrics: Mapping[str, float], *, quiet: bool = False) -> None:
        """A step has ended.

        Args:
            step: its number, from 1.
            metrics: of which the best known are shown.
            quiet: only move the bar, where there is one; else a line every 20 seconds.
        """
        self._times.append(time.monotonic())
        quiet = quiet and self._times[-1] - self._told < _TELL_EVERY_S
        seconds = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        text = "  ".join(
            f"{name} {metrics[name]:{form}}" for name, form in _SHOWN.items() if name in metrics
        )
        self._bar.update(self._task, completed=step, text=text)
        if not quiet:
            self._told = self._times[-1]
            left = _duration(seconds * (self._total - step))
            line = "%s step %d/%d  %s  (%.2g s a step, %s left)"
            values = (self._name, step, self._total, text, seconds, left)
            _LOG.info(line, *values, extra={"bar": True})


class _Above:
    """A stream that writes above a progress bar."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar

    def write(self, text: str) -> None:
        if not self._bar.disable:
            self._bar.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
        else:
            sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


class NoSignal:
    """Says at once when nothing can be learnt, and again at the 2nd, 4th, 8th, ... such step."""

    def __init__(self) -> None:
        self._num_steps = 0

    def tell(self, metrics: Mapping[str, float]) -> None:
        """Look at one step.

        Args:
            metrics: of the step.
        """
        if metrics["groups/without_signal_fraction"] < 1:
            return
        self._num_steps += 1
        if self._num_steps & (self._num_steps - 1):  # not a power of two
            return
        if metrics.get("reward/unscorable_fraction") == 1:
            reasons = [
                f"{name.removeprefix('stop/')} {value:.0%}"
                for name, value in metrics.items()
                if name.startswith("stop/")
            ]
            _LOG.warning(
                "No signal in %d step(s): no rollout could be scored, so no update was made. They "
                "ended by %s; rollouts/ has the stop_reason and reward_errors of each.",
                self._num_steps,
                ", ".join(reasons),
            )
            return
        if metrics.get("groups/solve_all_fraction") == 1:
            _LOG.info(
                "Nothing left to learn in %d step(s): every rollout was right, so no update was "
                "made. train.stop_at=0.99 with evaluate.every=5 ends a run that is done.",
                self._num_steps,
            )
            return
        _LOG.warning(
            "No signal in %d step(s): in each group all rollouts have the same reward "
            "(mean %.3g), so no update was made. The task may be too hard or too easy for this "
            "model: warm it up, take easier settings of the task, larger groups or a higher "
            "temperature, or give partial rewards.",
            self._num_steps,
            metrics["reward"],
        )
