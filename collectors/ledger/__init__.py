"""Where each prompt group is, from its draw to its training, and that none is lost."""

from .groups import Balance as Balance
from .groups import Eviction as Eviction
from .groups import GroupEvent as GroupEvent
from .groups import GroupState as GroupState
from .groups import IllegalTransition as IllegalTransition
from .groups import LedgerError as LedgerError
from .groups import Refill as Refill
from .groups import Ticket as Ticket
from .ledger import GroupLedger as GroupLedger
from .policies import Drop as Drop
from .policies import OnPolicy as OnPolicy
from .policies import Replay as Replay
from .policies import StalenessPolicy as StalenessPolicy
from .policies import Wait as Wait
