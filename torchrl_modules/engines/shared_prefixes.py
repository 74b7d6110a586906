"""Prefixes that rows share, kept once in a cache of keys and values and read once for all.

The rows of a group have one prompt, and its later turns begin with it. Each of them keeps only
what is its own; attention over the common part reads it once for all (Juravsky et al., 2024,
Hydragen, arXiv:2402.05099), and joins it to each row's own by their log-sum-exps.

Shape legend: A rows, P prefixes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from torchrl_data.devices import on_device
from torchrl_modules.scoring.slot_attention import PrefixPlan

from .kept_caches import num_shared, tokens_as_bytes

SHORTEST: Final = 64
"""Tokens of a prefix at least: a shorter one is read for each row, which needs no second piece."""
FIRST: Final = 3
"""Rows that share anything pay so many prices of a prefix more."""
_FEWEST: Final = 8
"""A plan has places for so many prefixes, or twice as many, and so on."""


@dataclass(eq=False)
class Prefix:
    """Tokens that rows begin with."""

    ids: tuple[int, ...]
    offset: int
    """Its first column, among those that are kept for prefixes."""
    is_read: bool = False
    """Its keys and values are there."""

    @property
    def end(self) -> int:
        """Behind its last column."""
        return self.offset + len(self.ids)


class SharedPrefixes:
    """The prefixes of rows, and their places.

    Args:
        device: of the cache.
        num_rows: that are there, and share nothing yet.
        price: tokens of a row that are read in the time that a prefix takes for itself. Prefixes
            have to save more than that.
    """

    def __init__(self, device: torch.device, num_rows: int = 0, price: int = 0) -> None:
        self._device, self._price = device, price
        self.of_rows: list[Prefix | None] = [None] * num_rows
        """The one of each row, if it has one."""
        self.starts = torch.zeros(0, dtype=torch.int64, device=device)
        """Tokens that each row has elsewhere than in its slot, int64 ``[A]``."""
        self.num_columns = 0
        """Columns that they need."""
        self.num_places = 0
        """How many prefixes a plan has places for; 0 where there are none."""
        self._plans: dict[tuple[int, int], PrefixPlan] = {}

    def _all(self) -> list[Prefix]:
        """Those that some row has, in the order of their columns."""
        found = {id(one): one for one in self.of_rows if one is not None}
        return sorted(found.values(), key=lambda one: one.offset)

    def length(self, row: int) -> int:
        """Tokens that a row has elsewhere than in its slot."""
        prefix = self.of_rows[row]
        return 0 if prefix is None else len(prefix.ids)

    def place(self, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Let rows share what they begin with alike, with each other or with others before them.

        Args:
            prompts: of these rows.
            rows: their numbers; what they had is forgotten.
        """
        for row in rows:
            self.of_rows[row] = None
        earlier = {one.ids: one for one in self._all()}
        known = dict(earlier)
        cuts = shared_lengths(prompts, self._price)
        if not earlier and num_saved(prompts, cuts, self._price) < FIRST * self._price:
            cuts = [0] * len(prompts)
        for prompt, row, cut in zip(prompts, rows, cuts, strict=True):
            ids = tuple(prompt)
            whole = [one for one in earlier if len(one) >= cut and one == ids[: len(one)]]
            best = max(whole, key=len, default=ids[:cut])
            if best and best not in known:
                known[best] = Prefix(best, self._room(len(best)))
            self.of_rows[row] = known.get(best)
        self._settle()

    def keep(self, rows: Sequence[int | None]) -> None:
        """Go on with some of the rows, in this order.

        Args:
            rows: their numbers; ``None`` for one that is new.
        """
        self.of_rows = [None if row is None else self.of_rows[row] for row in rows]
        self._settle()

    def _settle(self) -> None:
        found = self._all()
        self._plans.clear()
        self.num_columns = found[-1].end if found else 0
        self.num_places = max(_FEWEST, 1 << (len(found) - 1).bit_length()) if found else 0
        lengths = [self.length(row) for row in range(len(self.of_rows))]
        self.starts = on_device(lengths, self._device, torch.int64)

    def _room(self, num_tokens: int) -> int:
        """The first place with so many free columns."""
        offset = 0
        for one in self._all():
            if one.offset - offset >= num_tokens:
                break
            offset = one.end
        return offset

    def plan(self, num_rows: int, first_column: int) -> PrefixPlan | None:
        """The plan of attention over them; ``None`` where there are none.

        Args:
            num_rows: of the step, those at the end without a row included.
            first_column: where their columns begin among all of the cache.
        """
        if not self.num_places:
            return None
        if (num_rows, first_column) not in self._plans:
            self._plans[num_rows, first_column] = self._plan(num_rows, first_column)
        return self._plans[num_rows, first_column]

    def _plan(self, num_rows: int, first_column: int) -> PrefixPlan:
        found = self._all()
        numbers = {id(one): number for number, one in enumerate(found)}
        # Of each row, those that share nothing in the last place.
        whose = [self.num_places if one is None else numbers[id(one)] for one in self.of_rows]
        whose += [self.num_places] * (num_rows - len(whose))
        order = sorted(range(num_rows), key=whose.__getitem__)
        inverse = sorted(range(num_rows), key=order.__getitem__)
        counts = Counter(whose)
        ends = [0, *accumulate(counts[number] for number in range(self.num_places + 1))]
        unused = self.num_places - len(found)
        starts = [first_column + one.offset for one in found] + [first_column] * (unused + 2)
        lengths = [len(one.ids) for one in found] + [0] * (unused + 1)
        has_any = [number < self.num_places for number in whose]

        def put(values: Sequence[int], dtype: torch.dtype) -> Tensor:
            return on_device(values, self._device, dtype)

        return PrefixPlan(
            order=put(order, torch.int64),
            inverse=put(inverse, torch.int64),
            has_any=put(has_any, torch.bool),
            queries=put(ends, torch.int32),
            starts=put(starts, torch.int32),
            lengths=put(lengths, torch.int32),
        )


def num_saved(rows: Sequence[Sequence[int]], cuts: Sequence[int], price: int = 0) -> int:
    """Tokens that need not be read where each beginning is read once, less the prices of those.

    Args:
        rows: token ids.
        cuts: tokens of each that it shares.
        price: of a beginning that is read by itself, in tokens.
    """
    shared = {tuple(row[:cut]) for row, cut in zip(rows, cuts, strict=True) if cut}
    return sum(cuts) - sum(len(one) + price for one in shared)


def shared_lengths(rows: Sequence[Sequence[int]], price: int = 0) -> list[int]:
    """Tokens of each row that are kept with others, so that as many as may be are saved in all.

    A row shares one beginning, and the others that it begins with stay with it.

    Args:
        rows: token ids.
        price: see :func:`num_saved`.
    """
    tokens = [*map(tokens_as_bytes, rows)]
    ordered = sorted(range(len(rows)), key=tokens.__getitem__)
    common = [num_shared(tokens[a], tokens[b]) for a, b in pairwise(ordered)]
    sizes = [len(rows[row]) for row in ordered]
    # Ranges of rows that agree, each before the parts that it is made of.
    ranges: list[_Range] = []
    waiting: list[tuple[int, int, _Range | None]] = [(0, len(ordered), None)] if ordered else []
    while waiting:
        low, high, above = waiting.pop()
        alike = min(common[low : high - 1], default=0)
        ranges.append(one := _Range(low, alike, sizes[low], above))
        if above is not None:
            above.parts.append(one)
        if high - low > 1:
            ends = [at + 1 for at in range(low, high - 1) if common[at] == alike]
            waiting += [(a, b, one) for a, b in pairwise([low, *ends, high])]
    for one in reversed(ranges):
        one.settle(price)
    cuts, open_ranges = [0] * len(rows), [(one, 0) for one in ranges[:1]]
    while open_ranges:
        one, cut = open_ranges.pop()
        cut = one.alike if cut in one.shares else cut
        open_ranges += [(part, cut) for part in one.parts]
        if not one.parts:
            cuts[ordered[one.low]] = cut
    return cuts


class _Range:
    """Sorted rows that begin alike, or a single one."""

    def __init__(self, low: int, alike: int, size: int, above: "_Range | None") -> None:
        self.low, self.alike, self._size = low, alike, size
        self.parts: list[_Range] = []
        self._above: list[int] = [0]
        """Tokens that ranges around it may share."""
        if above is not None:
            worth = [above.alike] if above.alike >= SHORTEST else []
            self._above = [*above._above, *worth]
        self.costs: dict[int, int] = {}
        """Tokens and prices that are left at best where so many are shared by a range around it."""
        self.shares: set[int] = set()
        """Those of them for which it is better to share here."""

    def settle(self, price: int) -> None:
        """Find the costs, once those of each part are found."""
        for cut in self._above:
            if not self.parts:
                self.costs[cut] = self._size - cut
                continue
            self.costs[cut] = sum(part.costs[cut] for part in self.parts)
            if self.alike >= SHORTEST:
                here = self.alike + price + sum(part.costs[self.alike] for part in self.parts)
                if here < self.costs[cut]:
                    self.costs[cut] = here
                    self.shares.add(cut)
