"""Ledger of prompt groups, from their draw to their training, in which none is lost."""

from .balance import Balance as Balance
from .groups import Eviction as Eviction
from .groups import GroupEvent as GroupEvent
from .groups import GroupState as GroupState
from .groups import Refill as Refill
from .groups import Ticket as Ticket
from .ledger import GroupLedger as GroupLedger
from .reasons import IllegalTransition as IllegalTransition
from .reasons import LedgerError as LedgerError
from .replay import Replay as Replay
from .staleness_policies import Drop as Drop
from .staleness_policies import OnPolicy as OnPolicy
from .staleness_policies import StalenessPolicy as StalenessPolicy
from .staleness_policies import Wait as Wait
