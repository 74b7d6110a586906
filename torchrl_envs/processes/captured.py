"""A command that is run to its end, or to its deadline, with as much of its output as is wanted."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from .capped_output import CappedOutput

_READ_BYTES: Final = 1 << 16
_GRACE_S: Final = 0.2
"""Seconds in which output may still arrive after the mark of the end."""
_TAIL_BYTES: Final = 256
_END_S: Final = 5.0


class Captured(NamedTuple):
    """The output of a command, and how it ended."""

    stdout: CappedOutput
    stderr: CappedOutput
    status: int | None
    """Its exit status, negative for a signal; ``None`` where it was stopped: as late, or after its
    mark."""
    mark: str | None
    """The rest of the mark's line; ``None`` where the mark did not come."""


def captured(
    command: Sequence[str],
    data: bytes = b"",
    *,
    timeout_s: float,
    max_bytes: int,
    mark: bytes | None = None,
    variables: Mapping[str, str] | None = None,
) -> Captured:
    """Run a command, in bounded memory; it is asked to end where it is late.

    Args:
        command: the program and its arguments.
        data: its standard input.
        timeout_s: it is stopped after so many seconds.
        max_bytes: of each stream, this many bytes are kept, of its start and its end.
        mark: a line of standard error that begins with it says that the command is over, although
            something that it has started may hold its streams; it is no part of the output.
        variables: its environment; this process's own when not given.

    Raises:
        OSError: there is no such program.
    """
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=variables,
        start_new_session=True,
    )
    assert process.stdin is not None
    reading = _Reading(process, max_bytes, mark, time.monotonic() + timeout_s)
    try:
        reading.go_on(data)
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(timeout=max(0.0, reading.deadline - time.monotonic()))
    finally:
        _stop(process)
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()  # type: ignore[union-attr]
    return Captured(reading.out, reading.err, status, reading.found)


class _Reading:
    """The streams of a process, until they end, the mark has come or it is late."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        max_bytes: int,
        mark: bytes | None,
        deadline: float,
    ) -> None:
        self._process, self._mark, self.deadline = process, mark, deadline
        self.out, self.err = CappedOutput(max_bytes), CappedOutput(max_bytes)
        self.found: str | None = None
        self._tail = b""

    def go_on(self, data: bytes) -> None:
        """Write the input and read both outputs."""
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        view = memoryview(data)
        os.set_blocking(stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(stdin, selectors.EVENT_WRITE)
            selector.register(stdout, selectors.EVENT_READ, self.out.add)
            selector.register(stderr, selectors.EVENT_READ, self._take_error)
            while selector.get_map() and (left := self.deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.data is None:
                        view = _written(key.fd, view)
                        is_over = not view
                    else:
                        part = os.read(key.fd, _READ_BYTES)
                        key.data(part)
                        is_over = not part
                    if is_over:
                        selector.unregister(key.fileobj)
                    if is_over and key.data is None:
                        stdin.close()
        self.err.add(self._tail)

    def _take_error(self, part: bytes) -> None:
        if self._mark is not None and self.found is None:
            self._tail, part, self.found = _parted(self._tail + part, self._mark)
            if self.found is not None:
                self.deadline = min(self.deadline, time.monotonic() + _GRACE_S)
        self.err.add(part)


def _parted(data: bytes, mark: bytes) -> tuple[bytes, bytes, str | None]:
    """Return what may begin the mark, the output before it, and what the mark says."""
    where = data.find(mark)
    if where >= 0:
        line, end, rest = data[where + len(mark) :].partition(b"\n")
        if end:
            return b"", data[:where] + rest, line.decode(errors="replace").strip()
        return data[where:], data[:where], None
    cut = max(0, len(data) - _TAIL_BYTES)
    return data[cut:], data[:cut], None


def _written(descriptor: int, view: memoryview) -> memoryview:
    """Return what is left to be written; nothing where nobody reads it."""
    try:
        return view[os.write(descriptor, view[:_READ_BYTES]) :] if view else view
    except BlockingIOError:
        return view
    except BrokenPipeError:
        return view[:0]


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
