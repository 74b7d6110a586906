"""Where each prompt group is, from its draw to its training, and that none is lost."""

from .groups import (
    Balance,
    Eviction,
    GroupEvent,
    GroupState,
    IllegalTransition,
    LedgerError,
    Refill,
    Ticket,
)
from .ledger import GroupLedger
from .policies import Drop, OnPolicy, Replay, StalenessPolicy, Wait

__all__ = [
    "Balance",
    "Drop",
    "Eviction",
    "GroupEvent",
    "GroupLedger",
    "GroupState",
    "IllegalTransition",
    "LedgerError",
    "OnPolicy",
    "Refill",
    "Replay",
    "StalenessPolicy",
    "Ticket",
    "Wait",
]
