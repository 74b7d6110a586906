"""Log of the episodes that an error in a part of the environment ends."""

import logging
import traceback
from collections import Counter
from typing import Final

_log = logging.getLogger(__name__)
_num_lost: Final[Counter[tuple[str, type, str]]] = Counter()
"""Episodes of this process by what failed, the type of the error, and where it was raised."""


def tell_lost(episode: str, what: str, error: BaseException) -> None:
    """Log that an episode ends.

    A server that is down ends all episodes of a batch, whose tracebacks say the same: of the errors
    that are raised at one place the 1st, 2nd, 4th, 8th, ... is logged with its traceback.

    Args:
        episode: names it.
        what: what failed.
        error: the error.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    kind = (what, type(error), place)
    _num_lost[kind] += 1
    if frames and not _num_lost[kind] & (_num_lost[kind] - 1):  # a power of two
        _log.warning("%s ends: %s", episode, what, exc_info=error)
        return
    said = "".join(traceback.format_exception_only(error)).strip()
    _log.warning("%s ends: %s: %s", episode, what, said)
