"""The GRPO loss: reads a batch, scores its tokens, and calls :mod:`objectives.functional`.

Shape legend: B rows (one per trajectory), T tokens of one, N tokens of all, K trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from tensordict import TensorDictBase
from torch import Tensor

from objectives import functional as F
from objectives.batching.accumulation import Window
from objectives.batching.packed_batch import PackedBatch
from objectives.keys import GRPOLossKeys
from objectives.validation import one_of
from torchrl_data.protocols import TokenScorer

from .base import TokenLoss
from .grpo_options import (
    ClipEpsilon,
    build_surrogate,
    check_together,
    entropy_coefficient,
    kl_estimator_name,
    merge_filters,
    sampling_temperature,
)
from .grpo_terms import (
    OldPolicy,
    PolicyScores,
    filter_tokens,
    policy_scores,
    resting_terms,
    separating_threshold,
    token_figure,
    token_figures,
    with_signal,
)
from .outputs import GRPOLossOutput, make_output
from .surrogate_options import PolicyTokens, SamplerCorrection, SurrogateSettings, TokenFilters

OLD_POLICIES: Final[tuple[OldPolicy, ...]] = ("sampler", "recomputed", "current")


class GRPOLoss(TokenLoss[GRPOLossKeys]):
    """Group-relative policy optimisation, and its family by the choice of parts.

    The batch is read once, packed, and only its trained tokens are scored; nothing depends on
    padding, on the length of the prompts or on the order of the rows. The input is not written to.

    Every term is divided by counts of the whole accumulation window when these are given, so that
    the gradients of micro-batches add up to that of the whole (:meth:`measure_window`)::

        packed = loss.pack(batch)
        window = loss.measure_window(packed)
        for part in packed.micro_batches(max_tokens=8192):
            loss(part, window=window).total().backward()

    Args:
        actor_network: scores packed tokens (:class:`~torchrl_data.protocols.TokenScorer`), such
            as ``TransformersWrapper``; its parameters are the loss's when it is a module.
        clip_epsilon: the ratio is clipped to ``[1 - low, 1 + high]``; one number for both, or the
            pair. None is the surrogate's default: 0.2 for ``"clipped"``.
        surrogate: ``"clipped"``, ``"cispo"``, ``"sapo"``, ``"vespo"``, ``"gmpo"``, or settings
            such as ``CispoSurrogate(max_ratio=5.0)``.
        ratio_level: ``"token"``, ``"sequence"`` (GSPO) or ``"sequence_token"``.
        aggregation: ``"token_mean"``, ``"sequence_mean"`` (TorchRL's ``"prompt_mean"``),
            ``"fixed_length"``, ``"sequence_sum"``; ``"none"`` gives ``[K]`` values.
        max_tokens: what ``"fixed_length"`` divides by.
        masking_strategy: ``"assistant"``: what the policy sampled; ``"response"``: everything
            from the first sampled token on; ``"all"``. (TorchRL: ``"rlhf"``, ``"sft"``,
            ``"generic"``.) A token that was not sampled has no behaviour log-prob and counts as
            on policy.
        kl_to_ref_coeff: weight of the KL to the reference; None or 0 for none.
        kl_to_inference_coeff: weight of the KL to the policy that sampled; None or 0 for none.
        kl_estimator: ``"k1"``, ``"k2"`` or ``"k3"``; None is ``"k3"``.
        kl_bias_correction: multiply the KL to the reference by the importance ratio.
        entropy_bonus: reward entropy, and report it.
        entropy_coeff: weight of the entropy bonus; None is 0.01.
        filters: which tokens the policy term leaves out.
        kl_mask_threshold: short for ``TokenFilters(trust_region=...)``, in nats.
        temperature: that of the sampling, so that the ratio compares like with like; None takes
            the actor's own (``actor_network.temperature``), or 1 where it has none.
        old_policy: what the ratio's denominator is: ``"sampler"``, the log-probs stored when the
            tokens were sampled; ``"recomputed"``, the trainer's own from before the update;
            ``"current"``, this very call's (one update per batch).
        sampler_correction: settings; weighs tokens by ``pi_old / pi_sampler``, for
            ``old_policy`` other than ``"sampler"``.
        skip_rows_without_signal: do not score rows whose advantage is 0; figures then leave them
            out, the loss is the same.
        read: entry names.

    Raises:
        TypeError: the actor cannot score, or settings are of another class.
        ValueError: an option is unknown, out of range, or cannot take effect with the others.

    See Also:
        Shao et al., 2024, arXiv:2402.03300. ``docs/losses.md`` lists the family.
    """

    def __init__(
        self,
        actor_network: TokenScorer,
        *,
        clip_epsilon: ClipEpsilon | None = None,
        surrogate: str | SurrogateSettings = "clipped",
        ratio_level: F.RatioLevel | str = "token",
        aggregation: str = "token_mean",
        max_tokens: int | None = None,
        masking_strategy: str = "assistant",
        kl_to_ref_coeff: float | None = None,
        kl_to_inference_coeff: float | None = None,
        kl_estimator: F.KLEstimator | str | None = None,
        kl_bias_correction: bool = False,
        entropy_bonus: bool = False,
        entropy_coeff: float | None = None,
        filters: TokenFilters | None = None,
        kl_mask_threshold: float | None = None,
        temperature: float | None = None,
        old_policy: OldPolicy | str = "sampler",
        sampler_correction: SamplerCorrection | None = None,
        skip_rows_without_signal: bool = False,
        read: GRPOLossKeys | None = None,
    ) -> None:
        super().__init__(
            actor_network,
            aggregation=aggregation,
            max_tokens=max_tokens,
            masking_strategy=masking_strategy,
            temperature=sampling_temperature(actor_network) if temperature is None else temperature,
            read=read or GRPOLossKeys(),
        )
        self.surrogate = build_surrogate(surrogate, clip_epsilon)
        self.ratio_level: F.RatioLevel = one_of("ratio_level", ratio_level, F.RATIO_LEVELS, {})
        self.kl_to_ref_coeff = kl_to_ref_coeff or None
        self.kl_to_inference_coeff = kl_to_inference_coeff or None
        self.kl_estimator = kl_estimator_name(kl_estimator, kl_to_ref_coeff, kl_to_inference_coeff)
        self.kl_bias_correction = kl_bias_correction
        self.entropy_bonus = entropy_bonus
        self.entropy_coeff = entropy_coefficient(entropy_coeff, entropy_bonus=entropy_bonus)
        self.filters = merge_filters(filters, kl_mask_threshold)
        self.old_policy: OldPolicy = one_of("old_policy", old_policy, OLD_POLICIES, {})
        self.sampler_correction = sampler_correction
        self.skip_rows_without_signal = skip_rows_without_signal
        check_together(self)
        self._declare_keys(GRPOLossOutput)

    def measure_window(
        self, batches: TensorDictBase | PackedBatch | Iterable[TensorDictBase | PackedBatch]
    ) -> Window:
        """Count what an accumulation window will train, before any of it is trained.

        With ``TokenFilters(top_entropy_fraction=...)`` the window is also scored, without gradient,
        for the entropy that this fraction of its tokens reaches: a forward pass more. Then give it
        in parts that fit, ``loss.measure_window(packed.micro_batches(max_tokens=8192))``; the
        result does not depend on them.

        Args:
            batches: all rows of the window, as one batch or several.

        Returns:
            The counts, and the threshold, for ``window=``.

        Raises:
            MissingEntryError: an entry is missing.
        """
        return super().measure_window(batches)

    def forward(
        self, tensordict: TensorDictBase | PackedBatch, *, window: Window | None = None
    ) -> GRPOLossOutput:
        """Compute the terms of the loss.

        Args:
            tensordict: ``[B]``, ragged (a lazy stack of rows, what ``LazyStackStorage`` gives) or
                padded ``[B, T]`` with an attention mask, with the entries of ``read``; or what
                :meth:`pack` made of it.
            window: counts of the whole accumulation window; None: this batch is all of it.

        Returns:
            Terms and figures; ``.total()`` is what to call ``backward`` on. A batch without a
            trained token has loss 0.

        Raises:
            MissingEntryError: an entry is missing.
            ValueError: entries are not aligned with the tokens, the batch is not ``[B]``, or the
                window lacks what :meth:`measure_window` gives.
        """
        batch, window = self._pack_window(tensordict, window)
        num_rows = batch.num_rows
        if self.skip_rows_without_signal:
            batch = with_signal(batch)
        if batch.num_targets == 0:
            return self._at_rest(batch.ids.device, num_rows)
        wants_entropy = self.entropy_bonus or self.filters.top_entropy_fraction is not None
        token_scores = self._score(batch, entropy=wants_entropy)
        scores = policy_scores(batch, token_scores, self.old_policy)
        terms = self._policy_term(batch, scores, window)
        terms |= self._penalties(batch, scores, window)
        terms["num_active_tokens"] = scores.old.new_tensor(batch.num_targets)
        terms["num_sequences"] = scores.old.new_tensor(num_rows)
        return make_output(GRPOLossOutput, terms)

    def _entries(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Fields of ``read`` that are needed: one value per token, one per row or token."""
        tokens = ["log_probs"]
        if self.old_policy == "recomputed":
            tokens.append("old_log_probs")
        if self.kl_to_ref_coeff is not None:
            tokens.append("ref_log_probs")
        rows = ["advantage", "truncated"] if self.filters.drop_truncated else ["advantage"]
        return tuple(tokens), tuple(rows)

    def _pack_window(
        self, batch: TensorDictBase | PackedBatch, window: Window | None
    ) -> tuple[PackedBatch, Window]:
        filtered = self.filters.top_entropy_fraction is not None
        if filtered and window is not None and window.entropy_threshold is None:
            raise ValueError(
                "GRPOLoss: with TokenFilters(top_entropy_fraction=...) the window needs an "
                "entropy_threshold, or each part would take its own. loss.measure_window(...) "
                "gives it; for windows that were added up: window._replace(entropy_threshold=x)."
            )
        return super()._pack_window(batch, window)

    @torch.no_grad()
    def _entropy_threshold(self, batches: Sequence[PackedBatch]) -> float | None:
        """See the base class; scores the batches one by one."""
        fraction = self.filters.top_entropy_fraction
        if fraction is None:
            return None
        scores = [self._score(batch, entropy=True).entropy for batch in batches]
        entropy = torch.cat([torch.zeros(0)] + [part.cpu() for part in scores if part is not None])
        return separating_threshold(entropy, top_fraction=fraction)

    def _policy_term(
        self, batch: PackedBatch, scores: PolicyScores, window: Window
    ) -> dict[str, Tensor]:
        active = torch.ones_like(batch.sampled)
        token_log_ratio = F.log_ratio(scores.current, scores.old, active)
        log_ratio = F.leveled_log_ratio(
            token_log_ratio, active, batch.target_lengths, level=self.ratio_level
        )
        weights = self._sampler_weights(batch, scores)
        inside = weights is not None and self.surrogate.applies_correction
        surrogate = self.surrogate(
            PolicyTokens(
                log_ratio=log_ratio,
                log_prob=scores.current,
                advantage=batch.entries["advantage"].to(log_ratio.dtype),
                mask=active,
                lengths=batch.target_lengths,
                sampler_weight=weights.weight if weights is not None and inside else None,
            )
        )
        loss = surrogate.loss
        if weights is not None and not inside:
            loss = loss * weights.weight
        keep = filter_tokens(
            self.filters, scores, batch, entropy_threshold=window.entropy_threshold
        )
        terms = {
            "loss_objective": self._reduce(loss.masked_fill(~keep, 0.0), batch, window),
            "ESS": F.effective_sample_fraction(log_ratio, active),
        }
        figures = {
            "clip_fraction": surrogate.clipped_low | surrogate.clipped_high,
            "clip_fraction_low": surrogate.clipped_low,
            "clip_fraction_high": surrogate.clipped_high,
            "kl_approx": -token_log_ratio,
            "ratio_mean": log_ratio.exp(),
            "kept_fraction": keep,
        }
        if weights is not None:
            figures["correction_fraction"] = weights.changed
            figures["sampler_gap"] = (scores.old - scores.sampler).abs()
        return terms | token_figures(figures, window)

    def _sampler_weights(self, batch: PackedBatch, scores: PolicyScores) -> F.SamplerWeights | None:
        correction = self.sampler_correction
        if correction is None:
            return None
        return F.sampler_correction(
            scores.old,
            scores.sampler,
            batch.sampled,
            batch.target_lengths,
            level=correction.level,
            mode=correction.mode,
            upper=correction.upper,
            lower=correction.lower,
        )

    def _penalties(
        self, batch: PackedBatch, scores: PolicyScores, window: Window
    ) -> dict[str, Tensor]:
        terms: dict[str, Tensor] = {}
        active = torch.ones_like(batch.sampled)
        if self.kl_to_ref_coeff is not None:
            reference = batch.entries["ref_log_probs"].to(scores.old.dtype)
            log_ratio = None
            if self.kl_bias_correction:
                log_ratio = F.log_ratio(scores.current, scores.old, active)
            kl = F.kl_estimate(
                scores.current, reference, active, estimator=self.kl_estimator, log_ratio=log_ratio
            )
            terms["kl_to_ref"] = token_figure(kl, window)
            terms["loss_kl_to_ref"] = self.kl_to_ref_coeff * self._reduce(kl, batch, window)
        if self.kl_to_inference_coeff is not None:
            kl = F.kl_estimate(
                scores.current, scores.sampler, batch.sampled, estimator=self.kl_estimator
            )
            terms["kl_to_inference"] = token_figure(kl, window)
            terms["loss_kl_to_inference"] = self.kl_to_inference_coeff * self._reduce(
                kl, batch, window
            )
        if scores.entropy is not None:
            terms["entropy"] = token_figure(scores.entropy, window)
        if scores.entropy is not None and self.entropy_bonus:
            entropy = scores.entropy.sum() / window.num_active_tokens
            terms["loss_entropy"] = -self.entropy_coeff * entropy
        return terms

    def _at_rest(self, device: torch.device, num_rows: int) -> GRPOLossOutput:
        """The output of a batch in which nothing is trained: loss 0, figures at rest."""
        optional = {
            "kl_to_ref": self.kl_to_ref_coeff is not None,
            "kl_to_inference": self.kl_to_inference_coeff is not None,
            "entropy": self.entropy_bonus,
        }
        terms = resting_terms([name for name, on in optional.items() if on], device)
        shape = (0,) if self.aggregation == "none" else ()
        terms["loss_objective"] = torch.zeros(shape, device=device, requires_grad=True)
        terms["num_sequences"] = torch.tensor(float(num_rows), device=device)
        return make_output(GRPOLossOutput, terms)
