"""Prints how untrusted code would be isolated on this machine, by trying it."""

import os
import platform
import sys

from rich.console import Console
from rich.table import Table

from .interpreter import Interpreter
from .landlock import user_under_landlock
from .limits import SandboxLimits
from .program_check import MEMORY, PROGRAM_CHECKS, working_ways
from .result import Isolation
from .sandbox import Sandbox
from .self_check import CHECKS, LOOKED_AT
from .users import UNPRIVILEGED_USER, changes_user, starts_as


def main() -> int:
    """Print the report."""
    console = Console()
    reasons = Sandbox.reasons_against()
    working: list[Isolation] = [name for name, reason in reasons.items() if reason is None]
    chosen = working[0] if working else None
    console.print(f"Linux {platform.release()}, {_user(chosen)}")
    for name, reason in reasons.items():
        console.print(f"  {name}: {reason or 'works'}", highlight=False)
    if chosen is None:
        console.print("[bold red]Untrusted code is refused.[/]")
        return 1
    console.print(f"[bold green]Untrusted code runs under {chosen}.[/]")
    confined_by = working_ways()[1]
    told = "are refused a sandbox" if confined_by is None else f"run under {confined_by}"
    console.print(f"[bold]Agents' programs {told}.[/]\n")
    table = Table("holds, tried just now", "enforced by", title_justify="left")
    for check in (*CHECKS[chosen], *([LOOKED_AT] if chosen == "landlock" else [])):
        table.add_row(check.name, check.enforced_by)
    console.print(table)
    if confined_by == "landlock":
        table = Table("holds for agents' programs", "enforced by", title_justify="left")
        for check in (*PROGRAM_CHECKS, MEMORY):
            table.add_row(check.name, check.enforced_by)
        console.print(table)
    shown = Table("limit of a run, by default", "", "enforced by")
    for row in _limits(chosen):
        shown.add_row(*row)
    console.print(shown)
    return 0


def _user(chosen: Isolation | None) -> str:
    if os.geteuid():
        return f"user {os.geteuid()}"
    if chosen == "landlock":
        becomes = user_under_landlock(Interpreter.current()) is not None
    else:
        becomes = changes_user() or starts_as() is not None
    return f"root; code runs as user {UNPRIVILEGED_USER}" if becomes else "root"


def _limits(chosen: Isolation) -> list[tuple[str, str, str]]:
    limits, mib = SandboxLimits(), 1024 * 1024
    memory = f"{limits.memory_bytes // mib} MiB"
    disk, files = f"{limits.disk_bytes // mib} MiB", str(limits.num_files)
    processes, looks = str(limits.num_processes), "the supervisor, 100 times a second"
    rows = [
        ("wall-clock time", f"{limits.timeout_s:g} s", "the supervisor, then its parent"),
        ("CPU time of a process", f"{limits.timeout_s + 1:g} s", "RLIMIT_CPU"),
        ("memory of a process", memory, "RLIMIT_AS"),
        ("open files of a process", str(limits.num_open_files), "RLIMIT_NOFILE"),
        ("each of stdout and stderr", f"{limits.max_output_bytes // 1024} KiB", "a capped reader"),
    ]
    if chosen == "landlock":
        return [
            *rows,
            ("its memory in the kernel", memory, f"{looks}; not of sockets and pipes"),
            ("disk", disk, f"RLIMIT_FSIZE for one file; {looks}, for all"),
            ("files", files, looks),
            ("threads of the one process", processes, "the supervisor, asked for each"),
        ]
    return [
        *rows,
        ("memory of all processes", memory, f"{looks}, sockets included"),
        ("disk, in memory", disk, "size of the private /tmp"),
        ("files", files, "inodes of the private /tmp"),
        ("processes and threads", processes, "RLIMIT_NPROC in a user namespace"),
    ]


if __name__ == "__main__":
    sys.exit(main())
