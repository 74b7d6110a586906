"""The books: what was offered is trained, dropped, returned or in flight, by group and by token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchrl_data.stop_reasons import kind_of

from .reasons import LedgerError


class Amount(NamedTuple):
    """Groups, and the tokens that their episodes were told to have."""

    groups: int = 0
    tokens: int = 0

    def plus(self, groups: int, tokens: int) -> "Amount":
        """With so many more."""
        return Amount(self.groups + groups, self.tokens + tokens)


@dataclass(frozen=True)
class Balance:
    """What became of all groups, each an :class:`Amount` of groups and of tokens.

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
        for name, amount in rows:
            lines.append(f"{name:<16}{amount.groups:>12,}{amount.tokens:>16,}")
        return "\n".join(lines)


class Accounts:
    """Keeps the books."""

    def __init__(self) -> None:
        self.offered = self.trained = self.returned = self.in_flight = Amount()
        self.dropped: dict[str, Amount] = {}
        self._all_dropped = Amount()

    def offer(self) -> None:
        """A group came in."""
        self.offered = self.offered.plus(1, 0)
        self.in_flight = self.in_flight.plus(1, 0)

    def sample(self, tokens: int) -> None:
        """An episode of a group in flight is over."""
        self.offered = self.offered.plus(0, tokens)
        self.in_flight = self.in_flight.plus(0, tokens)

    def train(self, tokens: int) -> None:
        """A group was trained."""
        self._leave(1, tokens)
        self.trained = self.trained.plus(1, tokens)

    def drop(self, reason: str, tokens: int) -> None:
        """A group was dropped."""
        self._leave(1, tokens)
        kind = kind_of(reason)
        self._all_dropped = self._all_dropped.plus(1, tokens)
        self.dropped[kind] = self.dropped.get(kind, Amount()).plus(1, tokens)

    def give_back(self, tokens: int) -> None:
        """A group was returned."""
        self._leave(1, tokens)
        self.returned = self.returned.plus(1, tokens)

    def _leave(self, groups: int, tokens: int) -> None:
        self.in_flight = self.in_flight.plus(-groups, -tokens)

    def check(self, groups_in_flight: int) -> None:
        """Check that everything is somewhere.

        Args:
            groups_in_flight: those that there really are.

        Raises:
            LedgerError: something is not, or is twice.
        """
        dropped = self._all_dropped
        ends = (self.trained, dropped, self.returned, self.in_flight)
        groups, tokens = (sum(amounts) for amounts in zip(*ends, strict=True))
        if (groups, tokens) != self.offered or self.in_flight.groups != groups_in_flight:
            raise LedgerError(
                f"GroupLedger: not balanced: {self.offered.groups} groups and "
                f"{self.offered.tokens} tokens were offered, {groups} and {tokens} are accounted "
                f"for, {groups_in_flight} groups are in flight: {self.balance!r}."
            )

    @property
    def balance(self) -> Balance:
        """A snapshot."""
        return Balance(
            self.offered, self.trained, dict(self.dropped), self.returned, self.in_flight
        )

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "offered": list(self.offered),
            "trained": list(self.trained),
            "returned": list(self.returned),
            "in_flight": list(self.in_flight),
            "dropped": {reason: list(amount) for reason, amount in self.dropped.items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        for name in ("offered", "trained", "returned", "in_flight"):
            setattr(self, name, Amount(*state[name]))
        self.dropped = {reason: Amount(*amount) for reason, amount in state["dropped"].items()}
        self._all_dropped = self.balance.num_dropped
