"""Lines that a run prints while it goes on."""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
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

_LOG = logging.getLogger("torchrl_agents")
_TELL_EVERY_S: Final = 20.0
_WATCHED: Final = ("collectors.cluster", "collectors.streaming", "torchrl_modules.engines")
"""Packages whose warnings are shown as well as written: what has died, and what is waited for."""
_SHOWN: Final = {
    "reward": ".3f",
    "loss": ".4f",
    "accuracy": ".3f",
    "entropy": ".3f",
    "grad_norm": ".3f",
}


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
        self._of_root: Sequence[logging.Handler] = ()
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
        watched = logging.StreamHandler()
        watched.setLevel(logging.WARNING)
        watched.addFilter(lambda record: record.name.startswith(_WATCHED))
        self._of_root = (self._file, watched)
        for handler in self._of_root:
            self._root.addHandler(handler)
        logging.captureWarnings(True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *what: Any) -> None:
        self._bar.stop()
        if kind is not None and kind is not SystemExit:
            self._root.error("the run failed", exc_info=(kind, *what))  # type: ignore[arg-type]
        logging.captureWarnings(False)
        for handler in self._of_root:
            self._root.removeHandler(handler)
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
            if (failed := metrics.get("reward/error_fraction", 0)) > 0:
                text += f"  failed {failed:.2g}"  # of the rollouts; the log has the reason of each
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
    gave_nothing = 0 in (metrics.get("kept_fraction"), metrics.get("pair_fraction"))
    return not is_flat and not gave_nothing


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
            "a filter left nothing to train (kept_fraction is 0): look at loss.filters and "
            f"truncated_fraction ({metrics.get('truncated_fraction', 0):.0%} of the rollouts), and "
            "at the other filters of the loss."
        )
    elif metrics.get("pair_fraction") == 0 and metrics["groups/without_signal_fraction"] < 1:
        why = (
            "no group has a pair, though rewards differ: by less than train.min_difference, or the "
            "rollouts that differ have several rows (rows_per_episode is "
            f"{metrics['rows_per_episode']:.3g}), and a pair is of two whole rollouts of one row."
        )
    elif (failed := metrics.get("reward/error_fraction", 0)) > 0:
        why = (
            f"{failed:.0%} of the rollouts failed and have no reward, and those of a group that "
            f"have one have the same (mean {metrics['reward']:.3g}), so no update was made. Mend "
            "what failed first; rollouts/ has the stop_reason and reward_errors of each."
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
