"""Looks for garbage less often, in the interpreters that tests start.

What is imported stays, and looking through it again and again, and once more at the end, is a third
of the time in which an interpreter imports this library. What a program leaves is still found.
What Transformers scans when it is imported is kept: ``known_scans``.
"""

import atexit
import gc

from known_scans import keep

gc.set_threshold(20_000, 20, 50)  # 700, 10, 10
atexit.register(gc.freeze)  # after all others, since it is the first
keep()
