"""Explanation of gaps: each cause is a way to compute a row again, and the one that closes the gap.

A row is first computed as it is recorded. Where that gives its log-probs, it is verified. Else each
cause says how the row would have been drawn if it were at work; the cause under which the recorded
log-probs come out is named, for the tokens for which they do, and what is left is unexplained.

Shape legend: T tokens of a row, K of them sampled.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_modules import SamplingParameters

from .certificate import UNEXPLAINED, Cause, Certificate, RowVerdict
from .recomputation import Conditions, Numbers, Recomputation
from .rows import SampledRow
from .sampling_fit import fitted_temperature, fitted_truncations, truncation_words
from .template_check import TemplateCheck, check_template

TOLERANCE: Final = 1e-4
"""Of a log-prob that was computed in float32 and recorded with five digits, in nats."""
_ROUNDING_FACTOR: Final = 3.0
"""A gap may be so many times the largest difference between ways to compute the same tokens."""
_PROBED: Final = 8
"""Rows that are computed in several ways, to see how far these differ."""
_LEAST_SHARE: Final = 0.5
"""A cause is named if it closes at least this share of the gaps that are left of a row."""
_FITTED: Final = 3
"""A number is fitted to at least so many tokens."""
_MOST_PADDINGS: Final = 12
_MOST_SPLITS: Final = 4
_CACHE_BLOCK: Final = 16
"""Tokens of a block of vLLM's cache."""


class _Candidate(NamedTuple):
    """A way in which a row may have been drawn."""

    cause: Cause
    conditions: Conditions
    words: str
    row: SampledRow | None = None
    """In place of the row itself, with as many targets."""
    tolerance: float | None = None
    """Of this way of computing; that of all when not given."""


@dataclass(kw_only=True)
class _Row:
    """A row that is being explained; columns are on the host, ``[K]``."""

    row: SampledRow
    check: TemplateCheck
    recorded: Tensor
    computed: Tensor
    open: Tensor
    """Which tokens have a gap without a cause yet."""
    causes: list[str | None]
    words: dict[str, str] = field(default_factory=dict)
    beside: dict[str, int] = field(default_factory=dict)

    def give(self, cause: Cause, words: str, which: Tensor) -> None:
        """Name the cause of some tokens."""
        for k in which.nonzero().squeeze(1).tolist():
            self.causes[k] = cause
        self.words[cause] = words
        self.open &= ~which


def verify_rows(
    rows: Sequence[SampledRow],
    recomputation: Recomputation,
    *,
    tolerance: float | None = None,
    check_trained: bool = True,
    most_searched: int = 32,
) -> Certificate:
    """Compute every sampled token again, and say why those that differ do.

    Args:
        rows: of one policy.
        recomputation: has the model, the weights and the sampling parameters that should have drawn
            them.
        tolerance: of a log-prob, in nats; 1e-4, or three times the largest difference between ways
            to compute the same tokens here, when not given.
        check_trained: whether a token that the loss scored has to be a sampled one; not so where
            what an environment answers is trained, too.
        most_searched: of so many rows with a gap the causes are looked for; in the others the
            gaps stay unexplained, which their words say.

    Returns:
        What was found, row by row in the order of ``rows``.
    """
    encoder, conditions = recomputation.policy.encoder, recomputation.recorded
    skipped: dict[int, str] = {}
    for i, row in enumerate(rows):
        if missing := recomputation.missing(row):
            versions = ", ".join(map(str, missing))
            have = ", ".join(map(str, recomputation.versions))
            skipped[i] = f"there are no weights of version {versions} (there are {have})"
    here = [row for i, row in enumerate(rows) if i not in skipped]
    computed = recomputation.log_probs(here, conditions)
    rounding = _rounding(here, recomputation, conditions, computed)
    allowed = max(TOLERANCE, _ROUNDING_FACTOR * rounding) if tolerance is None else tolerance
    found = [
        _begin(row, values, encoder, allowed, check_trained)
        for row, values in zip(here, computed, strict=True)
    ]
    differing = [each for each in found if bool(each.open.any())]
    _Search(recomputation, allowed, here).explain(differing[:most_searched])
    for each in differing:
        if bool(each.open.any()):
            searched = any(each is one for one in differing[:most_searched])
            each.words[UNEXPLAINED] = (
                "no cause that was tried closes the gap"
                if searched
                else f"its causes were not looked for: {most_searched} rows were before it"
            )
        for k in each.open.nonzero().squeeze(1).tolist():
            each.causes[k] = UNEXPLAINED
    verdicts = iter(map(_verdict, found))
    return Certificate(
        rows=[
            _left_out(row, skipped[i]) if i in skipped else next(verdicts)
            for i, row in enumerate(rows)
        ],
        tolerance=allowed,
        rounding=rounding,
    )


def _begin(
    row: SampledRow,
    computed: Tensor,
    encoder: ConversationEncoder,
    allowed: float,
    check_trained: bool,
) -> _Row:
    """A row with what can be said of it before any cause is tried: its gaps, and its mask."""
    check = check_template(row, encoder)
    recorded = torch.tensor([row.log_probs[t] for t in row.targets], dtype=torch.float64)
    is_open = ~((recorded - computed).abs() <= allowed)  # of NaN: open
    begun = _Row(
        row=row,
        check=check,
        recorded=recorded,
        computed=computed,
        open=is_open,
        causes=[None] * len(row.targets),
    )
    wrong = torch.tensor([t in check.not_sampled for t in row.targets], dtype=torch.bool)
    if bool(wrong.any()):
        words = f"{int(wrong.sum())} tokens count as sampled that the template says others wrote"
        begun.give(Cause.MASK, words, wrong)
    if check_trained and check.not_trained:
        words = f"the loss scored {len(check.not_trained)} tokens that the policy did not sample"
        begun.words[Cause.MASK] = words
        begun.beside[Cause.MASK] = len(check.not_trained)
    return begun


def _verdict(found: _Row) -> RowVerdict:
    return RowVerdict(
        name=found.row.name,
        places=found.row.targets,
        gaps=(found.recorded - found.computed).tolist(),
        causes=found.causes,
        words=dict(found.words),
        beside=dict(found.beside),
    )


def _left_out(row: SampledRow, why: str) -> RowVerdict:
    return RowVerdict(name=row.name, places=[], gaps=[], causes=[], not_checked=why)


def _rounding(
    rows: Sequence[SampledRow],
    recomputation: Recomputation,
    conditions: Conditions,
    computed: Sequence[Tensor],
) -> float:
    """How far ways to compute the same tokens in the same numbers are from each other, in nats.

    In other numbers than float32, how far they are from float32 counts, too: an engine and this
    library round in other places.
    """
    some = list(zip(rows, computed, strict=True))[:: max(1, len(rows) // _PROBED)][:_PROBED]
    probed = [row for row, _ in some]
    ways = [(conditions, True)]
    if conditions.numbers != Numbers(torch.float32):
        ways.append((replace(conditions, numbers=Numbers(torch.float32)), False))
    largest = 0.0
    for way, alone in ways:
        again = recomputation.log_probs(probed, way, alone=alone)
        pairs = [(own - other).abs() for (_, own), other in zip(some, again, strict=True)]
        largest = max([largest, *(float(each.max()) for each in pairs if len(each))])
    return largest


class _Search:
    """Tries the causes on rows that have gaps.

    Args:
        recomputation: computes.
        allowed: the tolerance, in nats.
        rows: all rows, those without gaps, too.
    """

    def __init__(
        self, recomputation: Recomputation, allowed: float, rows: Sequence[SampledRow]
    ) -> None:
        self._computes = recomputation
        self._allowed = allowed
        self._rows = rows

    def explain(self, rows: Sequence[_Row]) -> None:
        """Name the causes of what can be explained, row by row."""
        ways: list[Callable[[_Row], Iterator[_Candidate]]] = [
            *(self._tokens, self._adapter, self._version, self._temperature, self._truncation),
            *(self._cache, self._batch, self._numbers),
        ]
        for one in rows:
            for way in ways:
                best: tuple[int, _Candidate, Tensor] | None = None
                for candidate in way(one) if bool(one.open.any()) else ():
                    closed = self._closed(one, candidate)
                    count = int(closed.sum())
                    if best is None or count > best[0]:
                        best = count, candidate, closed
                    if bool(closed[one.open].all()):
                        break
                if best is not None and best[0] >= max(1, _LEAST_SHARE * int(one.open.sum())):
                    one.give(best[1].cause, best[1].words, best[2])

    def _closed(self, one: _Row, candidate: _Candidate) -> Tensor:
        """Which open gaps a cause closes, bool ``[K]``."""
        [values] = self._computes.log_probs([candidate.row or one.row], candidate.conditions)
        allowed = self._allowed if candidate.tolerance is None else candidate.tolerance
        return one.open & ((one.recorded - values).abs() <= allowed)

    # The causes, and how a row is drawn where they are at work ----------------------------------

    def _tokens(self, one: _Row) -> Iterator[_Candidate]:
        check = one.check
        if check.rendered is not None and check.differs:
            if len(check.rendered.targets) != len(one.row.targets):
                return
            given, own = list(one.row.ids), list(check.rendered.ids)
            pairs = enumerate(zip(given, own, strict=False))
            place = next((t for t, (a, b) in pairs if a != b), min(len(given), len(own)))
            words = (
                f"the policy read the messages as the template writes them; from token {place} on "
                "the row has others"
            )
            yield _Candidate(Cause.TOKENS, self._computes.recorded, words, check.rendered)

    def _adapter(self, one: _Row) -> Iterator[_Candidate]:
        del one
        if self._computes.has_adapters:
            without = replace(self._computes.recorded, adapter=False)
            yield _Candidate(Cause.ADAPTER, without, "drawn by the model without its adapters")

    def _version(self, one: _Row) -> Iterator[_Candidate]:
        own = {one.row.versions[t] for t in one.row.targets}
        said = ", ".join(sorted(str(v) for v in own))
        # The nearest first.
        middle = max((v for v in own if v is not None), default=0)
        for version in sorted(self._computes.versions, key=lambda v: abs(v - middle)):
            if own != {version}:
                words = f"drawn by version {version}; the row says {said}"
                of_it = replace(self._computes.recorded, version=version)
                yield _Candidate(Cause.VERSION, of_it, words)

    def _temperature(self, one: _Row) -> Iterator[_Candidate]:
        some = one.open & one.recorded.isfinite()
        if int(some.sum()) < _FITTED:
            return
        conditions, targets = self._computes.recorded, self._targets(one)
        logits = self._computes.logits(one.row, conditions)[some]
        found = fitted_temperature(logits, targets[some], one.recorded[some])
        for temperature in dict.fromkeys([round(found, 2), round(found, 3), found]):
            if temperature <= 0 or math.isclose(temperature, conditions.sampling.temperature):
                continue
            said = f"{conditions.sampling.temperature:g}"
            words = f"drawn at the temperature {temperature:.4g}; the settings say {said}"
            for truncated in (conditions.sampling, _untruncated(conditions)):
                sampling = replace(truncated, temperature=temperature)
                way = replace(conditions, sampling=sampling)
                yield _Candidate(Cause.TEMPERATURE, way, words)

    def _truncation(self, one: _Row) -> Iterator[_Candidate]:
        conditions, targets = self._computes.recorded, self._targets(one)
        said = truncation_words(conditions.sampling)
        if conditions.sampling.truncates:
            whole = replace(conditions, sampling=_untruncated(conditions))
            words = f"the log-probs are those without truncation; the settings say {said}"
            yield _Candidate(Cause.TRUNCATION, whole, words)
        # Every token tells where its distribution was cut, also one whose gap is small.
        some = one.recorded.isfinite()
        if conditions.sampling.changes_logits or int(some.sum()) < _FITTED:
            return
        logits = self._computes.logits(one.row, conditions)[some]
        for sampling in fitted_truncations(
            logits, targets[some], one.recorded[some], conditions.sampling, self._allowed
        ):
            words = f"drawn with {truncation_words(sampling)}; the settings say {said}"
            way = replace(conditions, sampling=sampling)
            yield _Candidate(Cause.TRUNCATION, way, words)

    def _cache(self, one: _Row) -> Iterator[_Candidate]:
        starts = [turn.start for turn in one.row.turns]
        versions = one.row.versions
        starts += [
            t for t in one.row.targets if versions[t] != versions[t - 1] and one.row.sampled[t - 1]
        ]
        for start in sorted(set(starts))[:_MOST_SPLITS]:
            # The last token before it is read to draw it; an engine keeps all others, or blocks.
            kept = [start - 1, (start - 1) // _CACHE_BLOCK * _CACHE_BLOCK]
            for tokens in dict.fromkeys(each for each in kept if each > 0):
                for version in reversed(self._computes.versions):
                    if version != versions[start]:
                        words = (
                            f"the keys and values of the first {tokens} tokens were those of "
                            f"version {version}"
                        )
                        way = replace(
                            self._computes.recorded, cached_tokens=tokens, cache_version=version
                        )
                        yield _Candidate(Cause.CACHE, way, words)

    def _batch(self, one: _Row) -> Iterator[_Candidate]:
        own, prompt = len(one.row.ids), one.row.num_prompt_tokens
        beside = [row for row in self._rows if row.batch == one.row.batch]
        longer = {row.num_prompt_tokens - prompt for row in beside}
        longer |= {len(row.ids) - own for row in beside}
        for padding in sorted(each for each in longer if each > 0)[:_MOST_PADDINGS]:
            words = f"{padding} tokens of padding before the row were read as if they were its own"
            way = replace(self._computes.recorded, padding=padding)
            yield _Candidate(Cause.BATCH, way, words)

    def _numbers(self, one: _Row) -> Iterator[_Candidate]:
        conditions = self._computes.recorded
        float32, own = Numbers(torch.float32), conditions.numbers
        others = [Numbers(t) for t in (torch.float32, torch.bfloat16, torch.float16)]
        others.append(Numbers(torch.float32, torch.bfloat16))
        [exact] = self._computes.log_probs([one.row], replace(conditions, numbers=float32))
        finite = one.recorded.isfinite()
        for numbers in others:
            way = replace(conditions, numbers=numbers)
            words = f"drawn in {numbers}; the settings say {own}"
            if numbers == own:
                continue
            if numbers == float32:
                yield _Candidate(Cause.NUMBERS, way, words)
                continue
            # Two computations in such numbers differ by about what each differs from float32.
            [rounded] = self._computes.log_probs([one.row], way)
            size = (rounded - exact).abs()
            gap, rest = (one.recorded - exact)[finite], (one.recorded - rounded)[finite]
            alike = float(gap.square().mean()) <= 4 * float(size.square().mean())
            nearer = float(rest.square().mean()) < float(gap.square().mean())
            if alike and nearer:
                most = _ROUNDING_FACTOR * float(size.max())
                yield _Candidate(Cause.NUMBERS, way, words, tolerance=most)

    @staticmethod
    def _targets(one: _Row) -> Tensor:
        return torch.tensor([one.row.ids[t] for t in one.row.targets])


def _untruncated(conditions: Conditions) -> SamplingParameters:
    return replace(conditions.sampling, top_k=0, top_p=1.0, min_p=0.0)
