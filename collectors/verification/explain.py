"""Explanation of gaps: each cause is a way to compute a row again, and the one that closes the gap.

A row is first computed as it is recorded. Where that gives its log-probs, it is verified. Else each
cause says how the row would have been drawn if it were at work; the cause under which the recorded
log-probs come out is named, for the tokens for which they do, and what is left is unexplained.

Shape legend: T tokens of a row, K of them sampled.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_modules import SamplingParameters
from torchrl_modules.scoring.expert_routes import ExpertRoutes

from .cause import UNEXPLAINED, Cause
from .certificate import Bits, ByEngine, Certificate, Replayed
from .conditions import Conditions, Numbers
from .engine_check import EngineCheck
from .recomputation import Recomputation
from .row_verdict import RowVerdict
from .sampled_row import SampledRow
from .sampling_fit import fitted_temperature, fitted_truncations, truncation_words
from .template_check import TemplateCheck, check_template

TOLERANCE: Final = 1e-4
"""Of a log-prob that was computed in float32 and recorded with five digits, in nats."""
_PROBED: Final = 8
"""Rows that are computed in several ways, to see how far these differ."""
_LEAST_SHARE: Final = 0.5
"""A cause is named if it closes at least this share of the gaps that are left of a row."""
_FITTED: Final = 3
"""A number is fitted to at least so many tokens."""
_MOST_PADDINGS: Final = 12
_MOST_SPLITS: Final = 4
_MOST_FLIPS: Final = 4
"""Choices of experts in a row that may have fallen the other way."""
_MOST_TIES: Final = 16
"""Choices that are tried, the closest ones."""
_TIE: Final = 0.1
"""A choice is one of these if the next expert's score is within this share of the last one's."""
_CACHE_BLOCK: Final = 16
"""Tokens of a block of vLLM's cache."""


class Rounding(NamedTuple):
    """How far ways to compute the same tokens in the same numbers are from each other, in nats."""

    rms: float
    """Root of the mean square."""
    largest: float

    @classmethod
    def of(cls, differences: Tensor, tolerance: float | None = None) -> "Rounding":
        """Of what was measured, and at least of what a record rounds.

        Args:
            differences: in nats, of any number of tokens.
            tolerance: taken in place of what was measured.
        """
        size = differences.abs()
        if tolerance is not None:
            return cls(tolerance / 4, tolerance / 2)
        rms = float(size.square().mean().sqrt()) if len(size) else 0.0
        largest = float(size.max()) if len(size) else 0.0
        return cls(max(rms, TOLERANCE / 4), max(largest, TOLERANCE / 2))

    @property
    def limit(self) -> float:
        """What no token may exceed."""
        return 2 * self.largest

    def fits(self, gaps: Tensor, which: Tensor) -> Tensor:
        """The gaps of a row that are no more than rounding, bool ``[K]``.

        None is larger than twice the largest that was measured. And rounding has a mean of zero and
        a spread that was measured: a row that has not is judged more strictly, as each of its gaps
        may be small, and all of them lean to one side.

        Args:
            gaps: of the tokens of a row, ``[K]``.
            which: those that are judged, bool ``[K]``.
        """
        within = gaps.abs() <= self.limit  # of NaN: not
        own = gaps[which & within]
        if len(own):
            mean, rms = float(own.mean()), float(own.square().mean().sqrt())
            if rms > 1.5 * self.rms or abs(mean) > 4 * self.rms / math.sqrt(len(own)):
                within = gaps.abs() <= 2 * self.rms
        return within & which


class _Candidate(NamedTuple):
    """A way in which a row may have been drawn."""

    cause: Cause
    conditions: Conditions
    words: str
    row: SampledRow | None = None
    """In place of the row itself, with as many targets."""
    rounding: Rounding | None = None
    """Of this way of computing; that of all when not given."""
    is_of_all: bool = False
    """Whether it may be at work in any row as it is in this one."""


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
    engine: EngineCheck | None = None,
) -> Certificate:
    """Compute every sampled token again, and say why those that differ do.

    Args:
        rows: of one policy.
        recomputation: has the model, the weights and the sampling parameters that should have drawn
            them.
        tolerance: of a log-prob, in nats; 1e-4, or twice the largest difference between ways to
            compute the same tokens here, when not given.
        check_trained: whether a token that the loss scored has to be a sampled one; not so where
            what an environment answers is trained, too.
        most_searched: of so many rows all causes are looked for; of further ones with a gap those
            alone that were found before, and what these leave stays unexplained, which the words
            of the row say.
        engine: computes the rows, too; a token that agrees with either has no gap.

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
    measured = _differences(here, recomputation, conditions, computed)
    rounding = Rounding.of(measured, tolerance)
    found = [
        _begin(row, values, encoder, rounding, check_trained)
        for row, values in zip(here, computed, strict=True)
    ]
    by_engine = None if engine is None else _by_engine(found, engine, rounding)
    differing = [each for each in found if bool(each.open.any())]
    _Search(recomputation, rounding, here, most_searched).explain(differing)
    for each in differing:
        for k in each.open.nonzero().squeeze(1).tolist():
            each.causes[k] = UNEXPLAINED
    verdicts = iter(map(_verdict, found))
    return Certificate(
        replayed=_replayed(found, recomputation, rounding),
        by_engine=by_engine,
        bits=_bits(found) if recomputation.is_batch_invariant else None,
        rows=[
            _left_out(row, skipped[i]) if i in skipped else next(verdicts)
            for i, row in enumerate(rows)
        ],
        tolerance=rounding.limit,
        rounding=float(measured.max()) if len(measured) else 0.0,
    )


def _begin(
    row: SampledRow,
    computed: Tensor,
    encoder: ConversationEncoder,
    rounding: Rounding,
    check_trained: bool,
) -> _Row:
    """A row with what can be said of it before any cause is tried: its gaps, and its mask."""
    check = check_template(row, encoder)
    recorded = torch.tensor([row.log_probs[t] for t in row.targets], dtype=torch.float64)
    wrong = torch.tensor([t in check.not_sampled for t in row.targets], dtype=torch.bool)
    is_open = ~rounding.fits(recorded - computed, ~wrong)
    # The token that ends a turn is the template's where what follows it is no sampled token either.
    ends = set(encoder.stop_token_ids)
    after = [t + 1 in check.not_sampled and row.ids[t] in ends for t in row.targets]
    wrong |= torch.tensor(after, dtype=torch.bool) & is_open
    begun = _Row(
        row=row,
        check=check,
        recorded=recorded,
        computed=computed,
        open=is_open,
        causes=[None] * len(row.targets),
    )
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


def _differences(
    rows: Sequence[SampledRow],
    recomputation: Recomputation,
    conditions: Conditions,
    computed: Sequence[Tensor],
) -> Tensor:
    """What ways to compute the same tokens in the same numbers differ by, in nats.

    In other numbers than float32, what they differ from float32 by counts, too: an engine and this
    library round in other places.
    """
    some = list(zip(rows, computed, strict=True))[:: max(1, len(rows) // _PROBED)][:_PROBED]
    ways = [(conditions, True)]
    if conditions.numbers != Numbers(torch.float32):
        ways.append((replace(conditions, numbers=Numbers(torch.float32)), False))
    parts = [torch.zeros(0, dtype=torch.float64)]
    for way, alone in ways:
        again = recomputation.log_probs([row for row, _ in some], way, alone=alone)
        parts += [(own - other).abs() for (_, own), other in zip(some, again, strict=True)]
    return torch.cat(parts)


def _by_engine(found: Sequence[_Row], engine: EngineCheck, rounding: Rounding) -> ByEngine:
    """Compare rows with an engine; gaps that it has not are none."""
    gaps, apart = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.float64)]
    num_only = 0
    for one, values in zip(found, engine.log_probs([one.row for one in found]), strict=True):
        closed = one.open & rounding.fits(one.recorded - values, one.open)
        num_only += int(closed.sum())
        one.open &= ~closed
        gaps.append((one.recorded - values).abs())
        apart.append((values - one.computed).abs())
    every, others = torch.cat(gaps), torch.cat(apart)
    every = every[every.isfinite()]
    return ByEngine(
        engine.name,
        len(every),
        float(every.median()) if len(every) else 0.0,
        float(every.max()) if len(every) else 0.0,
        float(others.max()) if len(others) else 0.0,
        num_only,
    )


def _bits(found: Sequence[_Row]) -> Bits:
    """Count the log-probs that are the recorded ones in float32, to the bit."""
    nothing = [torch.zeros(0, dtype=torch.float64)]
    recorded = torch.cat([one.recorded for one in found] or nothing).float()
    computed = torch.cat([one.computed for one in found] or nothing).float()
    # As whole numbers that grow with them, so that neighbours differ by 1.
    whole = [x.view(torch.int32).long() for x in (recorded, computed)]
    ordered = [torch.where(x < 0, -(x & 0x7FFFFFFF), x) for x in whole]
    steps = (ordered[0] - ordered[1]).abs()
    return Bits(len(steps), int((steps > 0).sum()), int(steps.max()) if len(steps) else 0)


def _replayed(
    found: Sequence[_Row], recomputation: Recomputation, rounding: Rounding
) -> list[Replayed]:
    """Compute rows without their recorded sets and experts: the tokens that agree by them alone."""
    without = {
        Cause.TRUNCATION: (replace(recomputation.recorded, sets=False), "sampling_masks"),
        Cause.ROUTING: (replace(recomputation.recorded, experts=False), "experts"),
    }
    told = []
    for cause, (conditions, column) in without.items():
        have = [one for one in found if getattr(one.row, column)]
        again = recomputation.log_probs([one.row for one in have], conditions)
        gaps = [torch.zeros(0, dtype=torch.float64)]
        for one, values in zip(have, again, strict=True):
            agrees = torch.tensor([each is None for each in one.causes], dtype=torch.bool)
            gaps.append((one.recorded - values).abs()[agrees])
        beyond = torch.cat(gaps)
        beyond = beyond[beyond > rounding.limit]
        if have:
            largest = float(beyond.max()) if len(beyond) else 0.0
            total = sum(len(each) for each in gaps)
            told.append(Replayed(cause, total, len(beyond), largest))
    return told


class _Search:
    """Tries the causes on rows that have gaps.

    Args:
        recomputation: computes.
        rounding: up to which a gap is none.
        rows: all rows, those without gaps, too.
        most_searched: rows of which all causes are looked for.
    """

    def __init__(
        self,
        recomputation: Recomputation,
        rounding: Rounding,
        rows: Sequence[SampledRow],
        most_searched: int,
    ) -> None:
        self._computes = recomputation
        self._rounding = rounding
        self._rows = rows
        self._most_searched = most_searched
        # What explained rows before: it comes first, as it may explain others, too.
        self._known: list[_Candidate] = []

    def explain(self, rows: Sequence[_Row]) -> None:
        """Name the causes of what can be explained, row by row."""
        num_searched = 0
        for one in rows:
            if self._is_known(one):
                continue
            if num_searched == self._most_searched:
                one.words[UNEXPLAINED] = f"looked for in {num_searched} rows before it, not in it"
                continue
            num_searched += 1
            self._search(one, self._computes.recorded)
        # Two causes at once: one that is at work in other rows, and one more.
        for one in rows:
            if bool(one.open.any()) and UNEXPLAINED not in one.words:
                for known in list(self._known):
                    self._search(one, known.conditions, after=known)
            if bool(one.open.any()):
                one.words.setdefault(UNEXPLAINED, _why_unexplained(one))

    def _is_known(self, one: _Row) -> bool:
        """Whether what explained other rows explains all of this one, too."""
        for place, candidate in enumerate(self._known):
            closed = self._closed(one, candidate)
            if bool(closed[one.open].all()):
                one.give(candidate.cause, candidate.words, closed)
                self._known.insert(0, self._known.pop(place))
                return True
        return not bool(one.open.any())

    def _search(self, one: _Row, base: Conditions, *, after: _Candidate | None = None) -> None:
        """Try each cause on a row that is otherwise computed under some conditions.

        Args:
            one: the row.
            base: the conditions.
            after: the cause that these come from. With it all gaps have to be closed.
        """
        least = _LEAST_SHARE if after is None else 1.0
        for way in (
            *(self._tokens, self._adapter, self._version, self._temperature, self._truncation),
            *(self._cache, self._batch, self._routing, self._numbers),
        ):
            best: tuple[int, _Candidate, Tensor] | None = None
            for candidate in way(one, base) if bool(one.open.any()) else ():
                closed = self._closed(one, candidate)
                count = int(closed.sum())
                if best is None or count > best[0]:
                    best = count, candidate, closed
                if bool(closed[one.open].all()):
                    break
            if best is None or best[0] < max(1, least * int(one.open.sum())):
                continue
            _, candidate, closed = best
            is_whole = bool(closed[one.open].all())
            words = candidate.words if after is None else f"{after.words}; and {candidate.words}"
            one.give(candidate.cause, words, closed)
            if is_whole and candidate.is_of_all and after is None:
                self._known.insert(0, candidate)

    def _closed(self, one: _Row, candidate: _Candidate) -> Tensor:
        """The open gaps that a cause closes, bool ``[K]``."""
        [values] = self._computes.log_probs([candidate.row or one.row], candidate.conditions)
        # What a cause does not reach is as it is recorded.
        gaps = one.recorded - torch.where(values.isnan(), one.computed, values)
        which = one.open | torch.tensor([cause is None for cause in one.causes], dtype=torch.bool)
        return one.open & (candidate.rounding or self._rounding).fits(gaps, which)

    # The causes, and how a row is drawn where they are at work ----------------------------------

    def _tokens(self, one: _Row, base: Conditions) -> Iterator[_Candidate]:
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
            yield _Candidate(Cause.TOKENS, base, words, check.rendered)

    def _adapter(self, one: _Row, base: Conditions) -> Iterator[_Candidate]:
        del one
        if self._computes.has_adapters:
            without = replace(base, adapter=False)
            yield _Candidate(
                Cause.ADAPTER, without, "drawn by the model without its adapters", is_of_all=True
            )

    def _version(self, one: _Row, base: Conditions) -> Iterator[_Candidate]:
        own = {one.row.versions[t] for t in one.row.targets}
        said = ", ".join(sorted(str(v) for v in own))
        # The nearest first.
        middle = max((v for v in own if v is not None), default=0)
        for version in sorted(self._computes.versions, key=lambda v: abs(v - middle)):
            if own != {version}:
                words = f"drawn by version {version}; the row says {said}"
                of_it = replace(base, version=version)
                yield _Candidate(Cause.VERSION, of_it, words)

    def _temperature(self, one: _Row, base: Conditions) -> Iterator[_Candidate]:
        some = one.open & one.recorded.isfinite()
        if int(some.sum()) < _FITTED:
            return
        targets = self._targets(one)
        logits = self._computes.logits(one.row, base)[some]
        found = fitted_temperature(logits, targets[some], one.recorded[some])
        if math.isclose(found, base.sampling.temperature, rel_tol=1e-3):
            return
        for temperature in dict.fromkeys([round(found, 2), round(found, 3), found]):
            if temperature <= 0:
                continue
            said = f"{base.sampling.temperature:g}"
            words = (
                f"the log-probs are those of temperature {temperature:.4g}; the settings say {said}"
            )
            for truncated in (base.sampling, _untruncated(base)):
                sampling = replace(truncated, temperature=temperature)
                way = replace(base, sampling=sampling)
                yield _Candidate(Cause.TEMPERATURE, way, words, is_of_all=True)

    def _truncation(self, one: _Row, base: Conditions) -> Iterator[_Candidate]:
        targets = self._targets(one)
        said = truncation_words(base.sampling)
        is_recorded = base.sets and bool(one.row.sampling_masks)
        base = replace(base, sets=False)  # what was recorded does not give the log-probs
        if is_recorded:
            left = truncation_words(base.sampling)
            words = f"drawn from what the settings leave ({left}), not from the recorded sets"
            yield _Candidate(Cause.TRUNCATION, base, words, is_of_all=True)
        if base.sampling.truncates:
            whole = replace(base, sampling=_untruncated(base))
            words = f"the log-probs are those without truncation; the settings say {said}"
            yield _Candidate(Cause.TRUNCATION, whole, words, is_of_all=True)
        # Every token tells where its distribution was cut, also one whose gap is small.
        some, found = one.recorded.isfinite(), list[SamplingParameters]()
        if int(some.sum()) >= _FITTED:
            logits, told = self._computes.logits(one.row, base)[some], one.recorded[some]
            limit = self._rounding.limit
            found = fitted_truncations(logits, targets[some], told, base.sampling, limit)
        for sampling in found:
            words = f"drawn with {truncation_words(sampling)}; the settings say {said}"
            way = replace(base, sampling=sampling)
            yield _Candidate(Cause.TRUNCATION, way, words, is_of_all=True)
        # Several truncations at once have no one number.
        if one.row.kept_counts is not None:
            counts = [one.row.kept_counts[t] or 0 for t in one.row.targets]
            words = (
                f"each was drawn of as many tokens as are recorded, {min(counts)} to "
                f"{max(counts)}; the settings say {said}"
            )
            yield _Candidate(Cause.TRUNCATION, replace(base, kept=True), words)

    def _cache(self, one: _Row, base: Conditions) -> Iterator[_Candidate]:
        turns, versions = one.row.turns, one.row.versions
        if len({versions[t] for t in one.row.targets}) > 1:
            kept = replace(base, keeps_cache=not base.keeps_cache)
            did = "read again what was in flight" if base.keeps_cache else "went on with what"
            did += "" if base.keeps_cache else " the weights before it had read"
            yield _Candidate(Cause.CACHE, kept, f"after an update the engine {did}", is_of_all=True)
        starts = {turn.start for turn in turns}
        starts |= {t for turn in turns for t in turn[1:] if versions[t] != versions[t - 1]}
        ends = [turn.stop for turn in turns]
        for start in sorted(starts)[:_MOST_SPLITS]:
            # The last token before it is read to draw it. An engine keeps all others, or blocks of
            # them, or what it had read when the turn before was over.
            kept = [start - 1, (start - 1) // _CACHE_BLOCK * _CACHE_BLOCK]
            kept += [end - behind for end in ends if end < start for behind in (1, 0)]
            for tokens in dict.fromkeys(each for each in kept if each > 0):
                for version in reversed(self._computes.versions):
                    if version != versions[start]:
                        words = (
                            f"the keys and values of the first {tokens} tokens were those of "
                            f"version {version}"
                        )
                        way = replace(base, cached_tokens=tokens, cache_version=version)
                        yield _Candidate(Cause.CACHE, way, words)

    def _batch(self, one: _Row, base: Conditions) -> Iterator[_Candidate]:
        own, prompt = len(one.row.ids), one.row.num_prompt_tokens
        beside = [row for row in self._rows if row.batch == one.row.batch]
        longer = {row.num_prompt_tokens - prompt for row in beside}
        longer |= {len(row.ids) - own for row in beside}
        for padding in sorted(each for each in longer if each > 0)[:_MOST_PADDINGS]:
            words = f"{padding} tokens of padding before the row were read as if they were its own"
            way = replace(base, padding=padding)
            yield _Candidate(Cause.BATCH, way, words)

    def _routing(self, one: _Row, base: Conditions) -> Iterator[_Candidate]:
        if not self._computes.has_experts:
            return
        way = replace(base, experts=True)
        if one.row.experts is not None:
            words = "the tokens went to the experts of the routers, not to those that were recorded"
            of_routers = replace(base, experts=False)
            yield _Candidate(Cause.ROUTING, of_routers, words, is_of_all=True)
            return
        if len({one.row.versions[t] for t in one.row.targets}) > 1:
            return
        # Without a record: choices that were almost ties, each with the next expert in its place.
        routes = self._computes.routes(one.row, base)
        experts = [torch.full_like(layer, -1) for layer in routes.layers]
        experts = [F.pad(x, (0, 0, 0, len(one.row.ids) - len(x)), value=-1) for x in experts]
        which = one.open | torch.tensor([cause is None for cause in one.causes], dtype=torch.bool)
        left, margin = one.open.clone(), 0.0
        for number in range(1, _MOST_FLIPS + 1):
            place = one.row.targets[int(left.nonzero()[0])]
            best: tuple[int, list[Tensor], float, Tensor] | None = None
            for layer, token in _near_ties(routes, place):
                flipped = [x.clone() for x in experts]
                flipped[layer][token] = routes.layers[layer][token]
                flipped[layer][token, -1] = routes.runners_up[layer][token]
                changed = replace(one.row, experts=flipped)
                [values] = self._computes.log_probs([changed], way)
                rest = left & ~self._rounding.fits(one.recorded - values, which)
                reached = int(rest.nonzero()[0]) if bool(rest.any()) else len(rest)
                if one.row.targets.index(place) < reached and (best is None or reached > best[0]):
                    best = reached, flipped, float(routes.margins[layer][token]), rest
            if best is None:
                return
            _, experts, last, left = best
            margin = max(margin, last)
            words = (
                f"{number} choices of experts fell the other way, in which the router's scores "
                f"differ by at most {margin:.1%}"
            )
            yield _Candidate(Cause.ROUTING, way, words, replace(one.row, experts=experts))
            if not bool(left.any()):
                return

    def _numbers(self, one: _Row, base: Conditions) -> Iterator[_Candidate]:
        float32, own = Numbers(torch.float32), base.numbers
        others = [Numbers(t) for t in (torch.float32, torch.bfloat16, torch.float16)]
        others.append(Numbers(torch.float32, torch.bfloat16))
        [exact] = self._computes.log_probs([one.row], replace(base, numbers=float32))
        finite = one.recorded.isfinite()
        found: list[tuple[float, _Candidate]] = []
        for numbers in others:
            way = replace(base, numbers=numbers)
            [rounded] = self._computes.log_probs([one.row], way)
            gap, rest = (one.recorded - exact)[finite], (one.recorded - rounded)[finite]
            size, far = (rounded - exact).abs(), float(rest.square().mean())
            # Two computations in such numbers differ by about what each differs from float32.
            alike = float(gap.square().mean()) <= 4 * float(size.square().mean())
            nearer = far < float(gap.square().mean())
            if numbers != own and (numbers == float32 or (alike and nearer)):
                measured = Rounding.of(size)
                words = f"drawn in {numbers}; the settings say {own}"
                candidate = _Candidate(
                    Cause.NUMBERS, way, words, rounding=measured, is_of_all=numbers != float32
                )
                found.append((far, candidate))
        yield from (candidate for _, candidate in sorted(found, key=lambda pair: pair[0]))

    @staticmethod
    def _targets(one: _Row) -> Tensor:
        return torch.tensor([one.row.ids[t] for t in one.row.targets])


def _near_ties(routes: ExpertRoutes, place: int) -> list[tuple[int, int]]:
    """Layers and tokens before a place with the closest choices of experts, the closest first."""
    found = [
        (float(margin), layer, token)
        for layer, margins in enumerate(routes.margins)
        for token, margin in enumerate(margins[:place].tolist())
        if margin <= _TIE
    ]
    return [(layer, token) for _, layer, token in sorted(found)[:_MOST_TIES]]


def _why_unexplained(one: _Row) -> str:
    lost = int((one.open & ~one.recorded.isfinite()).sum())
    if lost == int(one.open.sum()):
        return f"{lost} tokens have no log-prob on record"
    return "no cause that was tried closes the gap"


def _untruncated(conditions: Conditions) -> SamplingParameters:
    return replace(conditions.sampling, top_k=0, top_p=1.0, min_p=0.0)
