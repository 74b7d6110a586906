"""A program that ends workers when the process that started them is gone, however that ended.

Nothing inside a worker can be relied on for this: a tool may hold the interpreter's lock for ever.
Run by its path, without the rest of the package.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Read ``+pid`` and ``-pid``, a line each, to the end; then kill the groups that are left."""
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
