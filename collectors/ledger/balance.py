"""The books: what was offered is trained, dropped, returned or in flight, by group and by token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Amount(NamedTuple):
    """Groups, and the tokens that their episodes were told to have."""

    groups: int = 0
    tokens: int = 0

    def plus(self, groups: int, tokens: int) -> "Amount":
        """With so many more."""
        return Amount(self.groups + groups, self.tokens + tokens)


@dataclass(frozen=True)
class Balance:
    """The fates of all groups, each an :class:`Amount` of groups and of tokens.

    Always ``offered == trained + dropped + returned + in_flight``. A prompt that is offered again
    counts again; tokens count from when an episode is over.

    Args:
        offered: all that were admitted.
        trained: that a step of training used.
        dropped: by reason, without its detail.
        returned: that were given back unfinished: at the end, or cancelled, or lost in a restart.
        in_flight: the others.
    """

    offered: Amount
    trained: Amount
    dropped: Mapping[str, Amount]
    returned: Amount
    in_flight: Amount

    @property
    def num_dropped(self) -> Amount:
        """For whatever reason."""
        every = self.dropped.values()
        return Amount(sum(a.groups for a in every), sum(a.tokens for a in every))

    def __str__(self) -> str:
        rows = [("offered", self.offered), ("trained", self.trained), ("dropped", self.num_dropped)]
        rows += [(f"  {reason}", amount) for reason, amount in sorted(self.dropped.items())]
        rows += [("returned", self.returned), ("in flight", self.in_flight)]
        lines = [f"{'':<16}{'groups':>12}{'tokens':>16}"]
        lines += [f"{name:<16}{each.groups:>12,}{each.tokens:>16,}" for name, each in rows]
        return "\n".join(lines)
