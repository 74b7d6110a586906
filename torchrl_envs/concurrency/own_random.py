"""Python's global random numbers, for code that draws from them and shares them with others."""

import contextlib
import random
import threading
from collections.abc import Iterator

_GLOBAL_RANDOM = threading.Lock()


class OwnRandom:
    """A state of Python's global random numbers that is in force inside a ``with`` block only."""

    # Blocks of all threads run one after the other; what is outside finds its state as it was.

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Put the state in force."""
        with _GLOBAL_RANDOM:
            outside = random.getstate()
            random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(outside)
