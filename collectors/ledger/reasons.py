"""Reasons for which a group is dropped, and errors of using the ledger wrongly.

A reason may carry a detail after a colon (``"failed: no disk"``); it is counted without it.
"""

from typing import Final

NO_SIGNAL: Final = "no_signal"
"""All rewards of the group are equal, or fewer than two are valid."""
FAILED: Final = "failed"
"""``failed: ...``: its episodes could not be run."""
ENGINE_DIED: Final = "engine_died"
"""Its engine is gone, and what it had drawn of it."""
STALE: Final = "stale"
"""Its oldest token would be older than ``max_staleness`` when it is used."""
LOAD: Final = "load"
"""The engine had no room for it."""
SAYS_NOTHING: Final = frozenset({ENGINE_DIED, LOAD})
"""Reasons that say nothing of a prompt: it is offered again as it was, however often."""


class LedgerError(RuntimeError):
    """The ledger's promises do not hold: a fault of whoever drives it, or of the ledger."""


class IllegalTransition(LedgerError):
    """An event that does not fit the state that a group is in."""
