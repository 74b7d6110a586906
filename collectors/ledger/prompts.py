"""Which prompts are done: the frontier of the data, and what lies above it."""

from typing import Any

from torchrl_data.validation import check_counts

from .groups import Owed, Refill, hashed_seed


class PromptBook:
    """Ordinals that are done, owed, or not drawn yet; those in flight are the ledger's."""

    def __init__(self) -> None:
        self.frontier = 0
        """Every ordinal below it is done, it is not."""
        self.next_ordinal = 0
        """Above every one that was drawn."""
        self.done_above: set[int] = set()
        """Those above the frontier that are done."""
        self.owed: dict[int, Owed] = {}
        """Those that were drawn and are to be offered again."""

    def is_done(self, ordinal: int) -> bool:
        """Whether it was trained, or dropped for good."""
        return ordinal < self.frontier or ordinal in self.done_above

    def draw(self, ordinal: int, group_id: int | str, base_seed: int | None, run_seed: int) -> Owed:
        """It is in flight now, with what is given back; what it was owed with holds."""
        check_counts("GroupLedger.offer", 0, ordinal=ordinal, seed=base_seed)
        if not isinstance(group_id, int | str):
            raise TypeError(f"GroupLedger.offer: group_id takes int or str, got {group_id!r}.")
        owed = self.owed.get(ordinal)
        if owed is None:
            owed = Owed(
                group_id, 0, hashed_seed(run_seed, ordinal) if base_seed is None else base_seed, 0
            )
        elif owed.group_id != group_id:
            raise ValueError(
                f"GroupLedger.offer: ordinal {ordinal} is owed as group {owed.group_id!r}, got "
                f"{group_id!r}. The data are drawn in another order than before."
            )
        self.owed.pop(ordinal, None)
        self.next_ordinal = max(self.next_ordinal, ordinal + 1)
        return owed

    def close(self, ordinal: int) -> None:
        """It is done."""
        self.done_above.add(ordinal)
        while self.frontier in self.done_above:
            self.done_above.remove(self.frontier)
            self.frontier += 1

    def refills(self) -> tuple[Refill, ...]:
        """What is owed, lowest ordinal first."""
        return tuple(
            Refill(ordinal, owed.group_id, owed.attempt)
            for ordinal, owed in sorted(self.owed.items())
        )

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "frontier": self.frontier,
            "next_ordinal": self.next_ordinal,
            "done_above": sorted(self.done_above),
            "owed": [[ordinal, *owed] for ordinal, owed in sorted(self.owed.items())],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.frontier = state["frontier"]
        self.next_ordinal = state["next_ordinal"]
        self.done_above = set(state["done_above"])
        self.owed = {ordinal: Owed(*owed) for ordinal, *owed in state["owed"]}
