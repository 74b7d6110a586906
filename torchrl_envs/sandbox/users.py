"""User of the programs inside: never root, whose processes the kernel does not limit."""

import functools
import os
from typing import Final

UNPRIVILEGED_USER: Final = 65534
"""``nobody``, the id that Linux itself uses for users without one."""


_CAP_CHOWN, _CAP_DAC_OVERRIDE, _CAP_FOWNER, _CAP_KILL = 0, 1, 3, 5
_CAP_SETGID: Final = 6
_CAP_SETUID: Final = 7
_CAP_SYS_ADMIN: Final = 21


def changes_user() -> bool:
    """Return whether this process is root and becomes another user inside the sandbox."""
    return _can_be_other_user() and _has(_CAP_SYS_ADMIN)


def starts_as() -> int | None:
    """Whom a root that may not make namespaces, as in most containers, has to start it as."""
    return UNPRIVILEGED_USER if _can_be_other_user() and not _has(_CAP_SYS_ADMIN) else None


def can_care_for_other_user() -> bool:
    """Return whether this process is root, can start another user's, end it and tidy up."""
    rights = (_CAP_CHOWN, _CAP_DAC_OVERRIDE, _CAP_FOWNER, _CAP_KILL)
    return _can_be_other_user() and all(map(_has, rights))


@functools.cache
def _can_be_other_user() -> bool:
    if os.geteuid() != 0 or not (_has(_CAP_SETUID) and _has(_CAP_SETGID)):
        return False
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= UNPRIVILEGED_USER < first + size for first, _, size in ranges)


@functools.cache
def _has(capability: int) -> bool:
    with open("/proc/self/status") as file:
        capabilities = next(line.split()[1] for line in file if line.startswith("CapEff:"))
    return bool(int(capabilities, 16) >> capability & 1)
