"""Result of a run in the sandbox."""

from dataclasses import dataclass
from typing import Literal

Isolation = Literal["bubblewrap", "landlock", "none"]


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """Output and end of one run.

    Attributes:
        stdout: standard output, decoded as UTF-8 with replacement characters.
        stderr: standard error, likewise.
        exit_status: exit code; the negative number of the signal that killed it; ``None`` where
            the run was stopped at a limit.
        timed_out: the run was stopped at its deadline.
        out_of_memory: the run was stopped because its processes together used too much memory.
        out_of_disk: the run was stopped because it wrote too much or too many files; under
            Landlock, where no file system of its own refuses them.
        truncated: output was longer than the cap and has a mark where it was cut.
        state_lost: the variables of a session are gone; the next run starts afresh.
        wall_s: duration, start of the sandbox included.
        isolation: how the run was isolated; ``"none"`` records that somebody opted out.
    """

    stdout: str
    stderr: str
    exit_status: int | None
    timed_out: bool = False
    out_of_memory: bool = False
    out_of_disk: bool = False
    truncated: bool = False
    state_lost: bool = False
    wall_s: float = 0.0
    isolation: Isolation = "none"

    @property
    def succeeded(self) -> bool:
        """The program ended by itself with exit code 0."""
        return self.exit_status == 0
