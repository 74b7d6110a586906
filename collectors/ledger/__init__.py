"""Where each prompt group is, from its draw to its training, and that none is lost."""

from .accounts import Balance
from .groups import Eviction, GroupState, Refill, Ticket
from .ledger import GroupLedger
from .policies import Drop, OnPolicy, StalenessPolicy, Wait
from .reasons import IllegalTransition, LedgerError

__all__ = [
    "Balance",
    "Drop",
    "Eviction",
    "GroupLedger",
    "GroupState",
    "IllegalTransition",
    "LedgerError",
    "OnPolicy",
    "Refill",
    "StalenessPolicy",
    "Ticket",
    "Wait",
]
