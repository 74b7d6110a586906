"""Log-probs of sampled tokens, computed again under conditions that are chosen.

Shape legend: T tokens of a row, K of them sampled, V vocabulary.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor, nn

from torchrl_data import SamplingMasks
from torchrl_data.routed_experts import unknown_expert
from torchrl_modules import TransformersWrapper
from torchrl_modules.batch_invariance import BatchInvariance
from torchrl_modules.sampling.distribution import warped_log_prob
from torchrl_modules.sampling.token_history import TargetHistory, changed_logits, too_early
from torchrl_modules.scoring.expert_routes import ExpertRoutes, expert_counts, replayed_layers
from torchrl_modules.scoring.scorer import PackedScorer
from torchrl_modules.scoring.wrapped_models import evaluation_mode, precision, unwrapped
from torchrl_modules.transformers_releases import cache_name, with_cache

from .conditions import Conditions, Numbers
from .sampled_row import SampledRow

_MICRO_BATCH_TOKENS: Final = 8192
"""Most tokens of a pass, unless the policy has a number of its own."""


class Recomputation:
    """Computes rows again with one model and the weights of several versions.

    Args:
        policy: its model is computed with. Its own weights are replaced.
        load_weights: puts the weights of a version into the model, for each version that there is.
            None at all: every row is computed with the weights that the model has.
        numbers: what the settings say that the model computes in.
        keeps_cache: whether the settings let a row go on after an update with what the weights
            before it have read.

    Raises:
        TypeError: the policy is none over Transformers.
    """

    def __init__(
        self,
        policy: TransformersWrapper,
        load_weights: Mapping[int, Callable[[nn.Module], None]] | None = None,
        *,
        numbers: Numbers | None = None,
        keeps_cache: bool = False,
    ) -> None:
        if not isinstance(policy, TransformersWrapper):
            raise TypeError(
                f"Recomputation takes a TransformersWrapper, got {type(policy).__name__}."
            )
        self.policy = policy
        own = unwrapped(policy.model, who="Recomputation").dtype
        self.numbers = numbers or Numbers(own)
        """What the settings say that the model computes in."""
        self.keeps_cache = keeps_cache
        """Whether the settings let a row go on with what older weights have read."""
        self._load = dict(load_weights or {})
        self._own = own
        self._loaded: int | None = None
        self._models: dict[torch.dtype, nn.Module] = {own: policy.model}
        self._holds: dict[torch.dtype, int | None] = {own: None}
        self._scorers: dict[Numbers, PackedScorer] = {}

    @property
    def versions(self) -> list[int]:
        """Those that there are weights of, in order; none where the model's own weights serve."""
        return sorted(self._load)

    @property
    def has_adapters(self) -> bool:
        """Whether the model has adapters."""
        return hasattr(self.policy.model, "disable_adapter")

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return expert_counts(self.policy.scorer.model) is not None

    @property
    def is_batch_invariant(self) -> bool:
        """Return whether rows are computed as they were drawn, to the bit, in any batch."""
        return self.policy.scorer.batch_invariant and self.numbers == Numbers(torch.float32)

    @property
    def recorded(self) -> Conditions:
        """As the rows are recorded and the settings say."""
        sampling = self.policy.sampling
        sampling = replace(sampling, temperature=sampling.temperature or 1.0)
        return Conditions(sampling=sampling, numbers=self.numbers, keeps_cache=self.keeps_cache)

    def versions_of(self, row: SampledRow) -> list[int | None]:
        """Versions that drew each sampled token as it is recorded; ``None``: the model's own."""
        return self._versions_of(row, self.recorded)

    def missing(self, row: SampledRow) -> list[int]:
        """The versions of a row that there are no weights of."""
        if not self._load:
            return []
        own = {row.versions[t] for t in row.targets}
        return sorted(v for v in own if v is not None and v not in self._load)

    @torch.no_grad()
    def log_probs(
        self, rows: Sequence[SampledRow], conditions: Conditions, *, alone: bool = False
    ) -> list[Tensor]:
        """Log-probs of the sampled tokens of each row.

        Args:
            rows: which; those of :meth:`missing` versions can only be computed with a version of
                the conditions.
            conditions: how.
            alone: each row in a pass of its own, instead of as many as fit beside each other.

        Returns:
            Of each row float64 ``[K]`` in nats, on the host, in the order of its targets.
        """
        found = [torch.full((len(row.targets),), torch.nan, dtype=torch.float64) for row in rows]
        own = [self._versions_of(row, conditions) for row in rows]
        kept = [i for i, each in enumerate(own) if _goes_on(conditions, each)]
        for i in kept:
            found[i] = self._with_cache(rows[i], conditions, own[i])
        if conditions.kept:
            return [self._of_kept(row, conditions) for row in rows]
        for version in sorted({v for each in own for v in each}, key=lambda v: (v is None, v or 0)):
            here = [i for i, each in enumerate(own) if version in each and i not in kept]
            groups = [[i] for i in here] if alone else [here]
            for group in groups:
                scores = self._scores([rows[i] for i in group], conditions, version)
                for i, values in zip(group, scores, strict=True):
                    mine = torch.tensor([v == version for v in own[i]], dtype=torch.bool)
                    found[i] = torch.where(mine, values, found[i])
        return found

    @torch.no_grad()
    def logits(self, row: SampledRow, conditions: Conditions) -> Tensor:
        """Logits for each sampled token of a row, float32 ``[K, V]``, on the host.

        Penalties, biases and tokens that may not come yet are in them; temperature and truncation
        are not.
        """
        own = self._versions_of(row, conditions)
        parts: dict[int | None, Tensor] = {}
        for version in set(own):
            with self._ready(conditions, version) as scorer:
                packed = _packed([row], conditions, 0)
                with _replayed(scorer, _experts([row], conditions)):
                    parts[version] = scorer.logits(*packed).cpu()
        logits = torch.stack([parts[version][k] for k, version in enumerate(own)])
        if not conditions.sampling.changes_logits:
            return logits
        history = TargetHistory.of(*_packed([row], conditions, 0))
        tokens = history.read(logits.shape[1], conditions.sampling, logits.device)
        logits = changed_logits(logits, conditions.sampling, tokens)
        banned = too_early(logits, conditions.sampling, tokens)
        return logits if banned is None else logits.masked_fill(banned, -torch.inf)

    @torch.no_grad()
    def routes(self, row: SampledRow, conditions: Conditions) -> ExpertRoutes:
        """The experts that the model sends the tokens of a row to, of which all have one version.

        Args:
            row: which.
            conditions: how.
        """
        [version] = set(self._versions_of(row, conditions))
        with self._ready(conditions, version) as scorer, ExpertRoutes(scorer.model) as routes:
            scorer.score_packed(*_packed([row], conditions, 0))
        return routes

    # How it is done -----------------------------------------------------------------------------

    def _versions_of(self, row: SampledRow, conditions: Conditions) -> list[int | None]:
        """Versions that compute each sampled token."""
        if not self._load:
            return [None] * len(row.targets)
        if conditions.version is not None:
            return [conditions.version] * len(row.targets)
        newest = self.versions[-1]
        return [newest if (v := row.versions[t]) is None else v for t in row.targets]

    def _scores(
        self, rows: Sequence[SampledRow], conditions: Conditions, version: int | None
    ) -> list[Tensor]:
        counts = [len(row.targets) for row in rows]
        if not sum(counts):
            return [torch.zeros(0, dtype=torch.float64) for _ in rows]
        pad: Any = self.policy.tokenizer.pad_token_id or 0
        with self._ready(conditions, version) as scorer:
            ids, lengths, mask = _packed(rows, conditions, pad)
            sampling = conditions.sampling
            scores = scorer.score_packed(
                ids,
                lengths,
                mask,
                temperature=sampling.temperature,
                truncation=sampling,
                sampling_masks=_sets(rows, conditions),
                routed_experts=_experts(rows, conditions),
            )
        return list(scores.log_prob.double().cpu().split(counts))

    def _of_kept(self, row: SampledRow, conditions: Conditions) -> Tensor:
        """Log-probs among as many of the most likely tokens as the sampler had left."""
        counts = torch.tensor(
            [(row.kept_counts[t] or 0) if row.kept_counts else 0 for t in row.targets]
        )
        targets = torch.tensor([row.ids[t] for t in row.targets])[:, None]
        logits = self.logits(row, conditions).double() / conditions.sampling.temperature
        ordered = logits.sort(-1, descending=True).values
        left_out = torch.arange(ordered.shape[1]) >= counts[:, None]
        mass = ordered.masked_fill(left_out, -torch.inf).logsumexp(-1)
        return (logits.gather(1, targets).squeeze(1) - mass).where(counts > 0, torch.nan)

    def _with_cache(
        self, row: SampledRow, conditions: Conditions, own: Sequence[int | None]
    ) -> Tensor:
        """As an engine computes that goes on with what other weights have read.

        A token is read for the sampled one that comes next, by the weights that draw that one.
        """
        cached, last = conditions.cached_tokens, row.targets[-1]
        readers: list[int | None] = [None] * last
        for version, before, place in zip(own, [0, *row.targets], row.targets, strict=False):
            readers[before:place] = [version] * (place - before)
        readers[:cached] = [conditions.cache_version] * min(cached, last)
        ids = torch.tensor([row.ids[:last]], device=self.policy.scorer.model.device)
        experts = _experts([row], conditions)
        parts, start, cache = [], 0, None
        for version, run in groupby(readers):
            end = start + sum(1 for _ in run)
            with (
                self._ready(conditions, version) as scorer,
                BatchInvariance()
                if scorer.batch_invariant
                else precision(scorer.model, conditions.numbers.autocast),
                _replayed(scorer, None if experts is None else experts[start:end]),
            ):
                model: Any = scorer.model
                goes_on = {"use_cache": True} if cache is None else with_cache(model, cache)
                outputs = model(input_ids=ids[:, start:end], **goes_on)
            cache = getattr(outputs, cache_name(model))
            parts.append(outputs.logits[0].float())
            start = end
        targets = torch.tensor([row.ids[t] for t in row.targets], device=ids.device)
        logits = torch.cat(parts)[[t - 1 for t in row.targets]]
        history = None
        if conditions.sampling.changes_logits:
            every = TargetHistory.of(*_packed([row], conditions, 0))
            history = every.read(logits.shape[1], conditions.sampling, logits.device)
        masks = _sets([row], conditions)
        scores, _ = warped_log_prob(logits, targets, conditions.sampling, history, masks)
        # What the kept tokens themselves were drawn from is no matter of a cache.
        reached = torch.tensor([t > cached for t in row.targets], dtype=torch.bool)
        return torch.where(reached, scores.double().cpu(), torch.nan)

    def _ready(self, conditions: Conditions, version: int | None) -> "_Ready":
        return _Ready(self, conditions, version)

    def prepare(self, numbers: Numbers, version: int | None) -> PackedScorer:
        """The scorer that computes in such numbers, its model with the weights of a version.

        Args:
            numbers: of the model.
            version: one of :attr:`versions`; ``None`` leaves the weights as they are.
        """
        master = self.policy.model
        if version is not None and version != self._loaded:
            self._load[version](master)
            self._loaded = self._holds[self._own] = version
        if numbers.weights not in self._models:
            self._models[numbers.weights] = copy.deepcopy(master).to(numbers.weights)
            self._holds[numbers.weights] = self._loaded
        model = self._models[numbers.weights]
        if self._holds[numbers.weights] != self._loaded:
            model.load_state_dict(master.state_dict())
            self._holds[numbers.weights] = self._loaded
        if numbers not in self._scorers:
            self._scorers[numbers] = PackedScorer(
                model,
                micro_batch_tokens=self.policy.scorer.micro_batch_tokens or _MICRO_BATCH_TOKENS,
                autocast_dtype=numbers.autocast,
                batch_invariant=self.is_batch_invariant and numbers == self.numbers,
            )
        return self._scorers[numbers]


class _Ready:
    """A scorer with the weights, adapters and mode of some conditions, while it is entered."""

    def __init__(self, owner: Recomputation, conditions: Conditions, version: int | None) -> None:
        self._owner, self._conditions, self._version = owner, conditions, version
        self._opened = ExitStack()

    def __enter__(self) -> PackedScorer:
        scorer = self._owner.prepare(self._conditions.numbers, self._version)
        self._opened.enter_context(evaluation_mode(scorer.model))
        model: Any = self._owner._models[self._conditions.numbers.weights]
        if not self._conditions.adapter:
            self._opened.enter_context(model.disable_adapter())
        return scorer

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def _sets(rows: Sequence[SampledRow], conditions: Conditions) -> SamplingMasks | None:
    """The sets that the targets of rows were drawn from, where they count and there are any."""
    if not conditions.sets or not any(row.sampling_masks for row in rows):
        return None
    return SamplingMasks.of(
        row.sampling_masks[t] if row.sampling_masks else b"" for row in rows for t in row.targets
    )


def _experts(rows: Sequence[SampledRow], conditions: Conditions) -> Tensor | None:
    """The experts of all tokens of rows, int16 ``[N, L, S]``, where they count and there are any.

    Those of padding, and of rows without any, are left to the routers.
    """
    if not conditions.experts or not any(row.experts for row in rows):
        return None
    parts: list[Tensor | None] = [
        torch.stack(list(row.experts), 1).short() if row.experts else None for row in rows
    ]
    shape = next(part for part in parts if part is not None).shape[1:]
    unknown = unknown_expert(torch.int16)
    full = [
        torch.full((conditions.padding + len(row.ids), *shape), unknown, dtype=torch.int16)
        for row in rows
    ]
    for whole, part in zip(full, parts, strict=True):
        if part is not None:
            whole[conditions.padding :] = part
    return torch.cat(full)


def _replayed(scorer: PackedScorer, experts: Tensor | None) -> AbstractContextManager[Any]:
    """Context that sends the tokens of one sequence to experts ``[N, L, S]``."""
    if experts is None:
        return nullcontext()
    return ExpertRoutes(scorer.model, replayed_layers(experts), margins=False)


def _goes_on(conditions: Conditions, versions: Sequence[int | None]) -> bool:
    """Whether a row of such versions is computed with what other weights have read."""
    return conditions.cached_tokens > 0 or (conditions.keeps_cache and len(set(versions)) > 1)


def _packed(
    rows: Sequence[SampledRow], conditions: Conditions, pad: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, lengths and targets of rows one after the other, with their padding."""
    before = [pad] * conditions.padding
    ids = torch.tensor([i for row in rows for i in (*before, *row.ids)])
    lengths = torch.tensor([len(row.ids) + len(before) for row in rows])
    mask = torch.zeros(len(ids), dtype=torch.bool)
    start = 0
    for row, length in zip(rows, lengths.tolist(), strict=True):
        mask[[start + len(before) + t for t in row.targets]] = True
        start += length
    return ids, lengths, mask
