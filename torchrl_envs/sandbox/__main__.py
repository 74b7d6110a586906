"""Prints how untrusted code would be isolated on this machine, by trying it."""

import os
import platform
import sys

from rich.console import Console
from rich.table import Table

from .limits import SandboxLimits
from .sandbox import Sandbox
from .self_check import CHECKS
from .users import UNPRIVILEGED_USER, changes_user, starts_as


def main() -> int:
    """Print the report."""
    console = Console()
    reasons = Sandbox.reasons_against()
    chosen = next((name for name, reason in reasons.items() if reason is None), None)
    user = f"user {os.geteuid()}" if os.geteuid() else "root"
    if user == "root" and (changes_user() or starts_as() is not None):
        user = f"root; code runs as user {UNPRIVILEGED_USER}"
    console.print(f"Linux {platform.release()}, {user}")
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
    limits, mib = SandboxLimits(), 1024 * 1024
    memory = f"{limits.memory_bytes // mib} MiB"
    watched = "the supervisor inside, 100 times a second, sockets included"
    shown = Table("limit of a run, by default", "", "enforced by")
    for row in (
        ("wall-clock time", f"{limits.timeout_s:g} s", "the supervisor inside, then its parent"),
        ("CPU time of a process", f"{limits.timeout_s + 1:g} s", "RLIMIT_CPU"),
        ("memory of a process", memory, "RLIMIT_AS"),
        ("memory of all processes", memory, watched),
        ("disk, in memory", f"{limits.disk_bytes // mib} MiB", "size of the private /tmp"),
        ("files", str(limits.num_files), "inodes of the private /tmp"),
        ("processes and threads", str(limits.num_processes), "RLIMIT_NPROC in a user namespace"),
        ("open files of a process", str(limits.num_open_files), "RLIMIT_NOFILE"),
        ("each of stdout and stderr", f"{limits.max_output_bytes // 1024} KiB", "a capped reader"),
    ):
        shown.add_row(*row)
    console.print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
