"""Limits of sandboxed code and programs: memory, processor time, files, processes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_MIB: Final = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """The limits of one sandbox, for all of its processes together unless said otherwise.

    Attributes:
        timeout_s: wall-clock time of one run; no process uses more CPU time than that either.
        memory_bytes: memory of all processes in sum; one process alone gets a ``MemoryError``.
        disk_bytes: size of the private folder, ``TMPDIR``; bubblewrap has it in memory.
        num_files: files and directories in it.
        num_processes: processes and threads at once; under Landlock threads of the one process.
        num_open_files: open files of one process.
        max_output_bytes: how much of standard output, and of standard error, is kept: the start
            and the end of what is longer.
        max_code_bytes: longer programs are refused.

    Raises:
        ValueError: a limit is too small to start an interpreter, or not a finite number.
    """

    timeout_s: float = 10.0
    memory_bytes: int = 512 * _MIB
    disk_bytes: int = 64 * _MIB
    num_files: int = 4096
    num_processes: int = 32
    num_open_files: int = 128
    max_output_bytes: int = 64 * 1024
    max_code_bytes: int = _MIB

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            wrong = f"must be positive and finite, got {self.timeout_s!r}"
            raise ValueError(f"SandboxLimits.timeout_s {wrong}.")
        smallest = {"memory_bytes": 64 * _MIB, "disk_bytes": 4096, "max_output_bytes": 256}
        smallest |= {"num_files": 16, "num_open_files": 16, "num_processes": 1, "max_code_bytes": 1}
        _check_at_least(self, smallest)


@dataclass(frozen=True, kw_only=True)
class ProgramLimits:
    """The limits of an agent's program in a sandbox, for all of its processes together.

    Attributes:
        memory_bytes: memory of all processes in sum.
        disk_bytes: size of the one folder in which it writes.
        num_files: files and directories in it, under Landlock.
        num_processes: processes and threads at once.

    Raises:
        ValueError: a limit is too small to start a program, or no whole number.
    """

    memory_bytes: int = 4096 * _MIB
    disk_bytes: int = 1024 * _MIB
    num_files: int = 100_000
    num_processes: int = 512

    def __post_init__(self) -> None:
        smallest = {"memory_bytes": 64 * _MIB, "disk_bytes": 4096, "num_files": 16}
        _check_at_least(self, smallest | {"num_processes": 1})


def _check_at_least(limits: object, smallest: Mapping[str, int]) -> None:
    for name, least in smallest.items():
        value = getattr(limits, name)
        if not isinstance(value, int) or value < least:
            wrong = f"must be an integer of at least {least}, got {value!r}"
            raise ValueError(f"{type(limits).__name__}.{name} {wrong}.")
