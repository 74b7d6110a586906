"""The GRPO loss: reads a batch, scores its tokens, and calls :mod:`objectives.functional`.

Shape legend: B rows (one per trajectory), T tokens of one, N tokens of all, K trained tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from tensordict import NestedKey, TensorClass, TensorDictBase
from torch import Tensor

from objectives import functional as F
from objectives.batching.loss_keys import GRPOLossKeys
from objectives.batching.packed_batch import Entries, PackedBatch, rows_with
from objectives.batching.ranks import Ranks, gathered_rows
from torchrl_data.token_scorer import TokenScorer, TokenScores

from .grpo_options import GRPOOptions
from .loss_output import LossTerms, loss_output, make_output
from .policy_scores import _MOST_LOG_PROB, PolicyScores, filter_tokens, policy_scores
from .surrogates import PolicyTokens, batch_entries, keeps_clip, surrogate_inputs
from .token_filters import TokenFilters
from .token_loss import TokenLoss, takes
from .window import Window

_LOG = logging.getLogger(__name__)
_OF_SURROGATE: Final = "surrogate."
"""Begins the names of entries that a surrogate reads itself."""


@loss_output
class GRPOLossOutput(LossTerms, TensorClass["nocast"]):
    """Terms and metrics of :class:`~objectives.GRPOLoss`.

    All are scalars, ``[]``; with ``aggregation="none"`` the policy term and the KL terms are
    ``[K]``, one value per trained token. Metrics are detached, and over the trained tokens of the
    call; :meth:`combine` gives those of a window.

    Example:
        >>> from tensordict import lazy_stack
        >>> from objectives import GRPOLoss
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> row = TensorDict({("tokens", "full"): torch.tensor([65, 66, 67])})  # [T]
        >>> row["masks", "all_assistant_mask"] = torch.tensor([False, True, True])
        >>> row["log_probs", "full"], row["advantage"] = torch.full((3,), -5.0), torch.ones(1, 1)
        >>> loss = GRPOLoss(TransformersWrapper(tiny_qwen3(len(tokenizer)), tokenizer=tokenizer))
        >>> outputs = [loss(lazy_stack([row])), loss(lazy_stack([row, row]))]
        >>> outputs[0].total().shape  # what to call backward on
        torch.Size([])
        >>> whole = GRPOLossOutput.combine(outputs)
        >>> whole.num_sequences, whole.num_active_tokens
        (tensor(3.), tensor(6.))
    """

    _documentation = __doc__

    loss_objective: Tensor
    """The policy term."""
    clip_fraction: Tensor
    """Tokens that the clip leaves without gradient."""
    clip_fraction_low: Tensor
    """Of them, bad tokens with too low a ratio."""
    clip_fraction_high: Tensor
    """Of them, good tokens with too high a ratio."""
    kl_approx: Tensor
    """Mean of ``log pi_old - log pi``, in nats per token."""
    ESS: Tensor
    """Effective sample size of the ratios as a fraction of the tokens, in (0, 1]."""
    ratio_mean: Tensor
    """Mean ratio; 1 on policy."""
    kept_fraction: Tensor
    """Tokens that no filter took out of the policy term."""
    signal_fraction: Tensor
    """Tokens whose advantage is not 0; where it is 0, only KL and entropy terms have a gradient."""
    num_active_tokens: Tensor
    """Trained tokens of this call."""
    num_sequences: Tensor
    """Rows of this call."""
    num_rows_left_out: Tensor
    """Of them, those that no policy can have sampled with the log-probs that they hold (NaN,
    infinite or positive), and those without a finite advantage; nothing of them is trained."""
    entropy: Tensor | None = None
    """Mean entropy in nats, where it was asked for."""
    loss_entropy: Tensor | None = None
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None
    """Mean KL estimate to the reference, in nats per token."""
    loss_kl_to_inference: Tensor | None = None
    kl_to_inference: Tensor | None = None
    """Mean KL estimate to the policy that sampled, in nats per token."""
    sampler_gap: Tensor | None = None
    """Mean absolute gap between the trainer's and the engine's log-probs, in nats per token."""
    correction_fraction: Tensor | None = None
    """Tokens whose sampler correction was truncated or masked."""


@dataclass(frozen=True, kw_only=True)
class _Arguments(GRPOOptions):
    actor_network: TokenScorer = field(kw_only=False)
    options: GRPOOptions | None = None
    read: GRPOLossKeys | None = None


class GRPOLoss(TokenLoss[GRPOLossKeys, GRPOLossOutput]):
    r"""GRPO and its variants (DAPO, Dr. GRPO, GSPO, ...), selected by options.

    With the defaults, over the :math:`K` trained tokens of a window,

    .. math::

        L = -\frac{1}{K} \sum_{t=1}^{K} \min\left(r_t A_t,
            \mathrm{clip}(r_t, 1 - \epsilon_l, 1 + \epsilon_h) A_t\right)
            + \beta\, \mathrm{KL}_t, \qquad
        r_t = \exp(\log \pi_\theta(t) - \log \mu(t))

    where :math:`\mu` sampled the tokens, :math:`A_t` is the advantage of the token's row,
    ``clip_epsilon`` is :math:`(\epsilon_l, \epsilon_h)`, and :math:`\beta` is ``kl_to_ref_coeff``.

    The batch, ``[B]`` rows, is read once, packed, and only its K trained tokens are scored; nothing
    depends on padding, on the length of prompts or the order of rows. It is not written to.

    Every term is divided by counts of the whole accumulation window when these are given, so that
    the gradients of micro-batches add up to that of the whole (:meth:`measure_window`)::

        packed = loss.pack(batch)
        window = loss.measure_window(packed)
        for part in packed.micro_batches(max_tokens=8192):
            loss(part, window=window).total().backward()

    With ``TokenFilters(top_entropy_fraction=...)`` ``measure_window`` also scores the window,
    without gradient, for the entropy that this fraction of its tokens reaches: a forward pass more.
    Then give it in parts that fit, ``loss.measure_window(packed.micro_batches(max_tokens=8192))``;
    the result does not depend on them, of which all ranks give equally many.

    A row whose log-probs no policy can have sampled (NaN, infinite, positive), or whose advantage
    is not finite, is left out, logged and counted in ``num_rows_left_out``. The log-probs with
    which tokens were sampled are read where a term goes by them, so that with
    ``old_policy="current"`` a batch need not have them.

    Args:
        actor_network: scores packed tokens (:class:`~torchrl_data.TokenScorer`), such
            as ``TransformersWrapper``; its parameters are the loss's when it is a module.
        options: all options as one record.
        read: names of the batch entries to read.
        **settings: single options by name, such as ``clip_epsilon=(0.2, 0.28)``, ``surrogate=``,
            ``aggregation=``, ``kl_to_ref_coeff=``, ``temperature=``: the fields of
            :class:`~objectives.GRPOOptions`, where each is described.

    Raises:
        TypeError: the actor cannot score, there is no option of that name, or settings are of
            another class.
        ValueError: an option is unknown, out of range, or cannot take effect with the others.

    See Also:
        Shao et al., 2024, arXiv:2402.03300. ``docs/losses.md`` lists the family.

    Example:
        >>> import math
        >>> from tensordict import lazy_stack
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> model = tiny_qwen3(len(tokenizer))
        >>> _ = torch.nn.init.zeros_(model.lm_head.weight)  # all tokens are equally likely
        >>> row = TensorDict({("tokens", "full"): torch.tensor([65, 66, 67])})  # ids of a row, [T]
        >>> row["masks", "all_assistant_mask"] = torch.tensor([False, True, True])
        >>> row["log_probs", "full"] = torch.full((3,), -math.log(len(tokenizer)))
        >>> rows = [row.clone().set("advantage", torch.tensor([[value]])) for value in (2.0, -1.0)]
        >>> loss = GRPOLoss(TransformersWrapper(model, tokenizer=tokenizer), clip_epsilon=0.2)
        >>> output = loss(lazy_stack(rows))  # ratios are 1: the mean of -2, -2, 1, 1
        >>> values = (output.total(), output.ratio_mean, output.num_active_tokens)
        >>> [round(value.item(), 4) for value in values]
        [-0.5, 1.0, 4.0]
    """

    option_type = GRPOOptions
    key_type = GRPOLossKeys
    output_type = GRPOLossOutput
    takes_own_temperature = True

    @takes(_Arguments)
    def __init__(
        self,
        actor_network: TokenScorer,
        *,
        options: GRPOOptions | None = None,
        read: GRPOLossKeys | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(actor_network, settings, options=options, read=read, allow_empty=True)

    def _preset_beside(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        if keeps_clip(settings.get("surrogate", "clipped")):
            return self.preset
        return {name: value for name, value in self.preset.items() if name != "clip_epsilon"}

    def _options_changed(self) -> None:
        self._filters = self.options.all_filters()
        self._has_entropy_bonus = self.options.has_entropy_bonus
        self._surrogate = self.options.surrogate_function()
        self._surrogate_inputs = surrogate_inputs(self._surrogate)
        self._surrogate_entries = batch_entries(self._surrogate)
        super()._options_changed()

    def pack(
        self,
        batch: TensorDictBase | PackedBatch,
        *,
        also: Sequence[TokenLoss[Any, Any]] = (),
    ) -> PackedBatch:
        """Read what the loss needs of a batch, without padding.

        Args:
            batch: see :meth:`TokenLoss.pack`.
            also: see :meth:`TokenLoss.pack`.

        Returns:
            The packed batch, on the host; one that is packed already as it is. Rows that no policy
            can have sampled are there, but nothing of them is trained.

        Raises:
            MissingEntryError: an entry is missing.
            TypeError: the batch is no TensorDict.
            ValueError: entries are not aligned with the tokens, or the batch is not ``[B]``.
        """
        packed = super().pack(batch, also=also)
        return packed if packed is batch else self.fit(packed)

    def fit(self, packed: PackedBatch) -> PackedBatch:
        """Leave out the rows that no policy can have sampled, and those without a finite advantage.

        Args:
            packed: a batch.

        Returns:
            The batch with all of its rows; how many were left out is logged.
        """
        unfit = torch.zeros_like(packed.left_out)
        if "log_probs" in packed.entries and self._reads_sampler:
            log_probs = packed.entries["log_probs"]
            possible = log_probs.isfinite() & (log_probs <= _MOST_LOG_PROB)
            why = "NaN, infinite or positive, which no policy can have sampled"
            unfit |= self._tell_unfit(packed, packed.sampled & ~possible, self.read.log_probs, why)
        if "advantage" in packed.entries:
            endless = ~packed.entries["advantage"].isfinite()
            unfit |= self._tell_unfit(packed, endless, self.read.advantage, "NaN or infinite")
        return packed.leave_out(unfit) if bool(unfit.any()) else packed

    def _tell_unfit(self, packed: PackedBatch, flag: Tensor, key: NestedKey, why: str) -> Tensor:
        """Rows of which a trained token carries a flag ``[K]``, bool ``[B]``, which is logged."""
        bad = rows_with(flag, packed)
        if bool(bad.any()):
            rows = bad.nonzero().squeeze(1).tolist()
            _LOG.warning(
                "%s: %d of %d rows hold %r of trained tokens that are %s; they are left out "
                "(rows %s).",
                *(self._get_name(), len(rows), packed.num_rows, key, why, rows[:16]),
            )
        return bad

    @property
    def _reads_sampler(self) -> bool:
        """Whether a term goes by the log-probs with which tokens were sampled."""
        options = self.options
        return (
            options.old_policy == "sampler"
            or options.sampler_correction is not None
            or bool(options.kl_to_inference_coeff)
            or self._filters.trust_region is not None
            or self._filters.off_policy_threshold is not None
        )

    def has_signal(self, packed: PackedBatch) -> bool:
        """Return whether an optimizer step on a batch can follow from it.

        Without a signal every gradient is 0, and a step is momentum and weight decay alone:
        leave it out (``NonFiniteGate`` does).

        Args:
            packed: what :meth:`pack` gave.

        Returns:
            True where a trained token has an advantage other than 0, or a KL or entropy term is on
            and a token is trained.
        """
        has_signal = self.options.has_penalty or bool((packed.entries["advantage"] != 0).any())
        return packed.num_targets > 0 and has_signal

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
            Terms and metrics; ``.total()`` is what to call ``backward`` on. A batch without a
            trained token has loss 0.

        Raises:
            MissingEntryError: an entry is missing.
            ValueError: entries are not aligned with the tokens, the batch is not ``[B]``, or the
                window lacks what :meth:`measure_window` gives.
        """
        is_whole = window is None
        batch, window = self._pack_window(tensordict, window)
        scored = batch
        if self.options.skip_rows_without_signal:  # advantage 0 on every trained token
            scored = batch.take_rows(rows_with(batch.entries["advantage"] != 0, batch))
        self._tell_of_dropout()
        scores = self._score(scored, entropy=self.wants_entropy)
        output = self.of_scores(scored, scores, window)
        if scored is not batch:
            output.update_(_row_counts(batch, scores.log_prob.device))
        filters = self._filters
        is_filtered = filters != TokenFilters() and scored.num_targets > 0
        if is_whole and is_filtered and float(output.kept_fraction) == 0:
            self._tell_of_nothing("filtered", f"{filters} leaves none of its tokens")
        return output

    def _tell_of_dropout(self) -> None:
        """Log once that ratios hold the noise of the model's dropout."""
        drops_out = self.options.old_policy != "current" and getattr(
            self.actor_network, "drops_out", False
        )
        if drops_out and not self._num_empty["dropout"]:
            self._num_empty["dropout"] = 1
            _LOG.warning(
                "%s: the model is in training mode and has dropout, so that ratios are not 1 on "
                "tokens that it has just sampled. Call eval() on it, which does not stop the "
                "training, or set its dropout to 0.",
                self._get_name(),
            )

    @property
    def wants_entropy(self) -> bool:
        """Whether a bonus or a filter goes by the entropy of the trained tokens."""
        return self._has_entropy_bonus or self._filters.top_entropy_fraction is not None

    def of_scores(self, batch: PackedBatch, scores: TokenScores, window: Window) -> GRPOLossOutput:
        """See the base class."""
        options, batch = self.options, batch.targets_on(scores.log_prob.device)
        policy = policy_scores(batch, scores, options)
        terms = self._policy_term(batch, policy, window)
        # KL and entropy: losses and metrics.
        estimator = options.kl_estimator or "k3"
        if options.kl_to_ref_coeff:
            reference = batch.entries["ref_log_probs"].to(policy.old.dtype)
            log_ratio = None
            if options.kl_bias_correction:
                log_ratio = F.log_ratio(policy.current, policy.old)
            kl = F.kl_estimate(policy.current, reference, estimator=estimator, log_ratio=log_ratio)
            terms["kl_to_ref"] = F.token_mean(kl.detach())
            terms["loss_kl_to_ref"] = options.kl_to_ref_coeff * self._reduce(kl, batch, window)
        if options.kl_to_inference_coeff:
            kl = F.kl_estimate(policy.current, policy.sampler, batch.sampled, estimator=estimator)
            terms["kl_to_inference"] = F.token_mean(kl.detach())
            penalty = options.kl_to_inference_coeff * self._reduce(kl, batch, window)
            terms["loss_kl_to_inference"] = penalty
        if policy.entropy is not None:
            terms["entropy"] = F.token_mean(policy.entropy.detach())
        if policy.entropy is not None and self._has_entropy_bonus:
            coefficient = 0.01 if options.entropy_coeff is None else options.entropy_coeff
            entropy = policy.entropy
            if batch.weights is not None:
                entropy = entropy * batch.weights.to(entropy.dtype)
            terms["loss_entropy"] = -coefficient * entropy.sum() / window.num_active_tokens
        terms["num_active_tokens"] = policy.old.new_full((), batch.num_targets)
        counts = _row_counts(batch, policy.old.device)
        return make_output(GRPOLossOutput, terms | counts)

    def _entries(self) -> Entries:
        tokens = {
            "log_probs": self._reads_sampler,
            "old_log_probs": self.options.old_policy == "recomputed",
            "ref_log_probs": self.options.kl_to_ref_coeff,
            "teacher_log_probs": self.options.teacher_coeff is not None,
        }
        rows = {"advantage": self.options.advantage_coeff}
        flags = {"truncated": self._filters.drop_truncated}
        by_token, by_row, flagged = (
            {n: getattr(self.read, n) for n, on in c.items() if on} for c in (tokens, rows, flags)
        )
        own = {f"{_OF_SURROGATE}{name}": key for name, key in self._surrogate_entries.items()}
        return Entries(by_token, by_row | own, flags=flagged)

    def _pack_window(
        self, batch: TensorDictBase | PackedBatch, window: Window | None
    ) -> tuple[PackedBatch, Window]:
        filtered = self._filters.top_entropy_fraction is not None
        if filtered and window is not None and window.entropy_threshold is None:
            raise ValueError(
                "GRPOLoss: with TokenFilters(top_entropy_fraction=...) the window needs an "
                "entropy_threshold, or each part would take its own. loss.measure_window(...) "
                "gives it; for windows that were added up: window._replace(entropy_threshold=x)."
            )
        correction = self.options.sampler_correction
        normal = correction is not None and correction.normalize
        if normal and window is not None and window.sampler_weight_mean is None:
            raise ValueError(
                "GRPOLoss: with SamplerCorrection(normalize=True) the window needs a "
                "sampler_weight_mean, or each part would take its own. loss.measure_window(...) "
                "gives it."
            )
        packed, found = super()._pack_window(batch, window)
        if normal and window is None and self.options.skip_rows_without_signal:
            # The mean is that of all rows, those too that are not scored.
            found = found._replace(**self._statistics([packed], None))
        return packed, found

    @torch.no_grad()
    def _statistics(self, batches: Sequence[PackedBatch], ranks: Ranks | None) -> dict[str, float]:
        """See the base class; scores the batches one by one where that is needed."""
        found: dict[str, float] = {}
        fraction = self._filters.top_entropy_fraction
        if fraction is not None:
            scores = [self._score(batch, entropy=True).entropy for batch in batches]
            entropy = torch.cat([torch.zeros(0)] + [p.cpu() for p in scores if p is not None])
            entropy = gathered_rows(ranks, entropy)
            keep = F.high_entropy_mask(entropy, top_fraction=fraction)
            found["entropy_threshold"] = -math.inf
            if len(dropped := entropy[~keep]):
                # Midway between the last token that is kept and the next one that is not, so that
                # the rounding of a differently split batch pushes none to the other side.
                bounds = entropy[keep].min().double() + dropped.max().double()
                found["entropy_threshold"] = float(bounds) / 2
        correction = self.options.sampler_correction
        if correction is not None and correction.normalize:
            weights = [torch.zeros(0)]
            for batch in batches:
                # The trainer's scores from before the update are there, or have to be made.
                known = batch.entries.get("old_log_probs")
                scored = self._score(batch) if known is None else TokenScores(known)
                beside = batch.targets_on(scored.log_prob.device)
                old, sampler = policy_scores(beside, scored, self.options)[1:3]
                own = correction.weights(old, sampler, beside.sampled, beside.target_lengths)
                weights.append(own.weight.cpu())
            each = gathered_rows(ranks, torch.cat(weights))
            found["sampler_weight_mean"] = float(each.double().mean()) if len(each) else 1.0
        return found

    def _policy_term(
        self, batch: PackedBatch, scores: PolicyScores, window: Window
    ) -> dict[str, Tensor]:
        token_log_ratio = F.log_ratio(scores.current, scores.old)
        log_ratio = F.leveled_log_ratio(
            token_log_ratio, lengths=batch.target_lengths, level=self.options.ratio_level
        )
        weights, correction = None, self.options.sampler_correction
        if correction is not None:
            weights = correction.weights(
                scores.old, scores.sampler, batch.sampled, batch.target_lengths
            )
        if weights is not None and correction is not None and correction.normalize:
            mean = window.sampler_weight_mean
            divisor = weights.weight.mean() if mean is None else weights.weight.new_tensor(mean)
            normal = weights.weight / divisor.masked_fill(divisor == 0, 1.0)
            weights = weights._replace(weight=normal)
        tokens = PolicyTokens(
            log_ratio=log_ratio,
            log_prob=scores.current,
            advantage=scores.advantage,
            lengths=batch.target_lengths,
            behavior_log_prob=scores.old,
            sampler_log_ratio=None if weights is None else weights.weight.log(),
        )
        own = {name: batch.entries[f"{_OF_SURROGATE}{name}"] for name in self._surrogate_entries}
        given = {**tokens._asdict(), **own}
        taken = {name: given[name] for name in self._surrogate_inputs}
        surrogate = self._surrogate(**taken)
        loss = surrogate.loss
        if weights is not None and "sampler_log_ratio" not in self._surrogate_inputs:
            loss = loss * weights.weight
        keep = filter_tokens(self._filters, scores, batch, window)
        metrics = {
            "clip_fraction": surrogate.clipped_low | surrogate.clipped_high,
            "clip_fraction_low": surrogate.clipped_low,
            "clip_fraction_high": surrogate.clipped_high,
            "kl_approx": -token_log_ratio,
            "ratio_mean": log_ratio.exp(),
            "kept_fraction": keep,
            "signal_fraction": scores.advantage != 0,
        }
        if weights is not None:
            metrics["correction_fraction"] = weights.changed
            metrics["sampler_gap"] = (scores.old - scores.sampler).abs()
        fixed = {name: value.detach().to(log_ratio.dtype) for name, value in metrics.items()}
        terms = {name: F.token_mean(values) for name, values in fixed.items()}
        terms["loss_objective"] = self._reduce(loss.masked_fill(~keep, 0.0), batch, window)
        terms["ESS"] = F.effective_sample_fraction(log_ratio)
        return terms


def _row_counts(batch: PackedBatch, device: torch.device) -> dict[str, Tensor]:
    counts = {"num_sequences": batch.num_rows, "num_rows_left_out": int(batch.left_out.sum())}
    return {name: torch.full((), float(n), device=device) for name, n in counts.items()}
