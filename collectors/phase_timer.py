"""Timer of phases that do not overlap."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class PhaseTimer:
    """Splits time into phases that do not overlap: an inner phase stops the outer one's clock.

    Args:
        clock: seconds, from any beginning.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._running: list[str] = []
        self._since = 0.0
        self.seconds: dict[str, float] = {}
        """Of each phase, in the order in which they first began."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count what is inside as a phase."""
        self._switch()
        self.seconds.setdefault(phase, 0.0)
        self._running.append(phase)
        try:
            yield
        finally:
            self._switch()
            self._running.pop()

    def _switch(self) -> None:
        now = self._clock()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def watch(self, module: nn.Module, phase: str) -> None:
        """Count the calls of a module as a phase, wherever they are made.

        Args:
            module: whose ``forward`` is timed.
            phase: its name.
        """
        inside: list[Any] = []

        def begin(*_: Any) -> None:
            inside.append(self(phase))
            inside[-1].__enter__()

        def end(*_: Any) -> None:
            inside.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)

    def reset(self) -> None:
        """Begin to count anew; no phase may be running.

        Raises:
            RuntimeError: one is.
        """
        if self._running:
            raise RuntimeError(f"PhaseTimer: {self._running[-1]!r} is still running.")
        self.seconds.clear()
