"""Where each prompt group is, from its draw to its training, and that none is lost."""

from .accounts import Balance
from .events import GroupEvent
from .groups import Eviction, GroupState, Refill, Ticket
from .ledger import GroupLedger
from .policies import Drop, OnPolicy, StalenessPolicy, Wait
from .reasons import IllegalTransition, LedgerError
from .replay import Replay

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
