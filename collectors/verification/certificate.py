"""The verdict on sampled tokens: how far each is from what was computed again, and why.

Nothing here needs torch.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .row_verdict import RowVerdict


class Replayed(NamedTuple):
    """Share of what agrees does so by what was recorded beside it."""

    cause: str
    """``truncation``: by the set that each token was drawn from; ``routing``: by its experts."""
    num_tokens: int
    """That agree, and have it recorded."""
    num_others: int
    """Of these the ones that would not agree with what the settings leave, or the routers choose.
    """
    largest: float
    """The largest gap that these would have, in nats; 0 where there are none."""

    def line(self) -> str:
        """For people."""
        kept, other = {
            "truncation": ("in the recorded sets", "what the settings leave"),
            "routing": ("by the recorded experts", "the routers' own choice"),
        }[self.cause]
        told = f"{self.cause}: {self.num_tokens} tokens were computed {kept}; "
        if not self.num_others:
            return told + f"{other} gives the same"
        return told + (
            f"{self.num_others} of them have another log-prob by {other}, with gaps of up to "
            f"{self.largest:.4f} nats"
        )


class ByEngine(NamedTuple):
    """Log-probs of an inference engine, computed beside Transformers."""

    name: str
    num_tokens: int
    median: float
    """Of the distances of its log-probs from the recorded ones, in nats."""
    largest: float
    apart: float
    """The largest distance of its log-probs from those of Transformers, in nats."""
    num_only: int
    """Tokens that agree with it and not with Transformers; they have no gap."""

    def line(self) -> str:
        """For people."""
        return (
            f"by {self.name}: {self.num_tokens} tokens, gap median {self.median:.1e}, largest "
            f"{self.largest:.1e} nats; up to {self.apart:.1e} from Transformers; "
            f"{self.num_only} tokens agree with it alone"
        )


class Bits(NamedTuple):
    """Number of log-probs that were computed again to the bit, in float32."""

    num_tokens: int
    num_differing: int
    most_steps: int
    """By so many of the numbers that float32 has a log-prob is off at most."""

    def line(self) -> str:
        """For people."""
        if not self.num_differing:
            return f"bits: all {self.num_tokens} log-probs are the recorded ones to the bit"
        return (
            f"bits: {self.num_differing} of {self.num_tokens} log-probs are not the recorded ones, "
            f"by up to {self.most_steps} steps of float32"
        )


@dataclass(kw_only=True)
class Certificate:
    """The findings of all rows."""

    rows: list[RowVerdict]
    tolerance: float
    """Up to which a gap is the rounding of the numbers that the settings name, in nats."""
    rounding: float
    """The largest difference between ways to compute the same token here, in nats."""
    conditions: str = ""
    """How tokens were computed again, in words."""
    replayed: list[Replayed] = field(default_factory=list)
    """What the recorded sets and experts are to the tokens that agree, where there are any."""
    by_engine: ByEngine | None = None
    """Where an engine computed the tokens, too."""
    bits: Bits | None = None
    """Of a policy whose log-probs do not depend on the batch; ``None`` of others."""

    @property
    def checked(self) -> list[RowVerdict]:
        """The rows that could be computed."""
        return [row for row in self.rows if not row.not_checked]

    @property
    def num_tokens(self) -> int:
        """Tokens that were computed again."""
        return sum(len(row.places) for row in self.checked)

    @property
    def counts(self) -> Counter[str]:
        """Tokens by their cause, those without a gap left out."""
        found = Counter(cause for row in self.checked for cause in row.causes if cause)
        for row in self.checked:
            found.update(row.beside)
        return found

    @property
    def is_clean(self) -> bool:
        """Whether something was computed, and no token has a gap beyond the tolerance."""
        return self.num_tokens > 0 and not self.counts

    @property
    def verdict(self) -> str:
        """In a sentence."""
        counts, total = self.counts, self.num_tokens
        if not total:
            return "nothing could be checked"
        if not counts:
            return f"all {total} tokens explained: each was drawn as it is recorded"
        named = [f"{cause} ({number})" for cause, number in counts.most_common()]
        right = sum(cause is None for row in self.checked for cause in row.causes)
        return f"{right} of {total} tokens agree; the others do not: {', '.join(named)}"

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON has values."""
        return {
            "verdict": self.verdict,
            "is_clean": self.is_clean,
            "conditions": self.conditions,
            "tolerance": self.tolerance,
            "rounding": self.rounding,
            "num_rows": len(self.rows),
            "num_checked": len(self.checked),
            "num_tokens": self.num_tokens,
            "causes": dict(self.counts),
            "replayed": [each._asdict() for each in self.replayed],
            "by_engine": None if self.by_engine is None else self.by_engine._asdict(),
            "bits": None if self.bits is None else self.bits._asdict(),
            "rows": [
                {
                    **vars(row),
                    "gaps": [round(gap, 7) if math.isfinite(gap) else None for gap in row.gaps],
                }
                for row in self.rows
            ],
        }

    def lines(self, most: int = 20) -> list[str]:
        """As text, for people.

        Args:
            most: findings that are listed.
        """
        text = [self.verdict + "."]
        if self.conditions:
            text.append(f"computed again: {self.conditions}")
        quiet = sorted(abs(g) for row in self.checked for g in _agreeing(row))
        if quiet:
            text.append(
                f"gap of the tokens that agree: median {_at(quiet, 0.5):.1e}, 99 % below "
                f"{_at(quiet, 0.99):.1e}, largest {quiet[-1]:.1e} nats (tolerance "
                f"{self.tolerance:.1e}; ways to compute the same differ by {self.rounding:.1e})"
            )
        if self.by_engine is not None:
            text.append(self.by_engine.line())
        if self.bits is not None and self.bits.num_tokens:
            text.append(self.bits.line())
        text += [each.line() for each in self.replayed]
        left_out = Counter(row.not_checked for row in self.rows if row.not_checked)
        for why, number in left_out.items():
            text.append(f"not checked, {number} rows: {why}")
        text += self._table(most)
        return text

    def _table(self, most: int) -> list[str]:
        """Rows with a finding, those with the same one together."""
        found: dict[tuple[str, str], list[RowVerdict]] = defaultdict(list)
        for row in self.checked:
            for cause in dict.fromkeys([*filter(None, row.causes), *row.beside]):
                found[cause, row.words.get(cause, "")].append(row)
        text = ["", f"{'rows':>6} {'tokens':>7} {'largest gap':>11}  cause"] if found else []
        for (cause, words), rows in list(found.items())[:most]:
            pairs = [pair for row in rows for pair in zip(row.gaps, row.causes, strict=True)]
            known = [abs(gap) for gap, its in pairs if its == cause and math.isfinite(gap)]
            number = sum(its == cause for _, its in pairs)
            number += sum(row.beside.get(cause, 0) for row in rows)
            size = f"{max(known):.4f}" if known else "-"
            text.append(f"{len(rows):6} {number:7} {size:>11}  {cause}: {words}")
            more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
            text.append(f"{'':26}  in {rows[0].name}{more}")
        if len(found) > most:
            text.append(f"... and {len(found) - most} more findings, all of them in the JSON")
        return text


def _agreeing(row: RowVerdict) -> list[float]:
    return [gap for gap, cause in zip(row.gaps, row.causes, strict=True) if cause is None]


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
