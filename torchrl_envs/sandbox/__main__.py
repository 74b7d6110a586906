"""Prints how untrusted code would be isolated on this machine, by trying it."""

import os
import platform
import sys

from rich.console import Console
from rich.table import Table

from .confinement import CHECKS, UNPRIVILEGED_USER, SandboxLimits, changes_user, starts_as
from .sandbox import Sandbox


def main() -> int:
    """Print the report."""
    console = Console()
    reasons = Sandbox.reasons_against()
    chosen = next((name for name, reason in reasons.items() if reason is None), None)
    console.print(f"Linux {platform.release()}, {_user()}")
    for name, reason in reasons.items():
        console.print(f"  {name}: {reason or 'works'}", highlight=False)
    if chosen is None:
        console.print("[bold red]Untrusted code is refused.[/]")
        return 1
    console.print(f"[bold green]Untrusted code runs under {chosen}.[/]\n")
    table = Table("holds, tried just now", "enforced by", title_justify="left")
    for check in CHECKS:
        table.add_row(check.name, check.enforced_by)
    console.print(table)
    limits = Table("limit of a run, by default", "", "enforced by")
    for row in _limit_rows(SandboxLimits()):
        limits.add_row(*row)
    console.print(limits)
    return 0


def _user() -> str:
    if os.geteuid() != 0:
        return f"user {os.geteuid()}"
    changes = changes_user() or starts_as() is not None
    return f"root; code runs as user {UNPRIVILEGED_USER}" if changes else "root"


def _limit_rows(limits: SandboxLimits) -> list[tuple[str, str, str]]:
    mib = 1024 * 1024
    return [
        ("wall-clock time", f"{limits.timeout_s:g} s", "the supervisor inside, then its parent"),
        ("CPU time of a process", f"{limits.timeout_s + 1:g} s", "RLIMIT_CPU"),
        ("memory of a process", f"{limits.memory_bytes // mib} MiB", "RLIMIT_AS"),
        (
            "memory of all processes",
            f"{limits.memory_bytes // mib} MiB",
            "the supervisor inside, 100 times a second, sockets included",
        ),
        ("disk, in memory", f"{limits.disk_bytes // mib} MiB", "size of the private /tmp"),
        ("files", str(limits.num_files), "inodes of the private /tmp"),
        ("processes and threads", str(limits.num_processes), "RLIMIT_NPROC in a user namespace"),
        ("open files of a process", str(limits.num_open_files), "RLIMIT_NOFILE"),
        ("each of stdout and stderr", f"{limits.max_output_bytes // 1024} KiB", "a capped reader"),
    ]


if __name__ == "__main__":
    sys.exit(main())
