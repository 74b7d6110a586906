"""Timeline of episodes and of the trainer: spans, as a Chrome trace."""

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Something that took time."""

    name: str
    track: str
    """What it is a part of: the trainer, or a group of episodes."""
    line: int
    """Of the track: the number of the episode in its group."""
    start_s: float
    end_s: float


class Timeline:
    """Notes spans, sums them up by name, and writes them for a trace viewer.

    Args:
        max_spans: so many of the latest are kept.
    """

    def __init__(self, *, max_spans: int = 20_000) -> None:
        self._spans: deque[Span] = deque(maxlen=max_spans)
        self._lock = threading.Lock()
        self._totals: dict[str, float] = defaultdict(float)
        self._begin = time.monotonic()

    @contextmanager
    def span(self, name: str, track: str, line: int = 0) -> Iterator[None]:
        """Note what is inside, be it awaited.

        Args:
            name: of what is done: ``"generate"``, ``"environment"``, ``"score"``, ...
            track: what it is a part of.
            line: of the track.
        """
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, track, line, start, time.monotonic())

    def add(self, name: str, track: str, line: int, start_s: float, end_s: float) -> None:
        """Note a span whose beginning and end are known; see :meth:`span`."""
        with self._lock:
            self._spans.append(Span(name, track, line, start_s, end_s))
        self.count(name, end_s - start_s)

    def count(self, name: str, seconds: float) -> None:
        """Add to the seconds of a name, without a span."""
        with self._lock:
            self._totals[name] += seconds

    def take_totals(self) -> dict[str, float]:
        """Seconds by name since they were last taken, added up over all tracks."""
        with self._lock:
            totals, self._totals = self._totals, defaultdict(float)
            return totals

    def write(self, path: str | Path) -> None:
        """Write what is kept; chrome://tracing and ui.perfetto.dev show it.

        Args:
            path: of the JSON file.
        """
        with self._lock:
            spans = list(self._spans)
        tracks = {track: i for i, track in enumerate(dict.fromkeys(s.track for s in spans), 1)}
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": track}}
            for track, pid in tracks.items()
        ]
        events += [
            {
                "name": span.name,
                "ph": "X",
                "pid": tracks[span.track],
                "tid": span.line,
                "ts": 1e6 * (span.start_s - self._begin),
                "dur": 1e6 * (span.end_s - span.start_s),
            }
            for span in spans
        ]
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
