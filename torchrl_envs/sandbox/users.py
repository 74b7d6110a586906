"""Who runs inside: never the kernel's root, whose processes the kernel does not limit."""

import functools
import os
from typing import Final

UNPRIVILEGED_USER: Final = 65534
"""``nobody``, the id that Linux itself uses for users without one."""


@functools.cache
def changes_user() -> bool:
    """Whether this process is root and can become another user inside the sandbox."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= UNPRIVILEGED_USER < first + size for first, _, size in ranges)
