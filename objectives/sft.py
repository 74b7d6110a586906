"""Supervised fine-tuning on the trained tokens of conversations.

Shape legend: B rows, K trained tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_data.protocols import TokenScorer

from . import functional as F
from .keys import SFTLossKeys
from .outputs import SFTLossOutput, make_output
from .packed_batch import MaskingStrategy, PackedBatch, pack_batch, resolve_masking_strategy
from .settings import check_coefficients, check_scorer, one_of, scorer_device
from .window import Window

SFTFunction = Literal["sft", "minor_sft"]
SFT_FUNCTIONS: Final[tuple[SFTFunction, ...]] = ("sft", "minor_sft")
_TORCHRL_AGGREGATIONS: Final[Mapping[str, F.Aggregation]] = {"prompt_mean": "sequence_mean"}


class SFTLoss(TensorDictModuleBase):
    """Negative log-likelihood of the trained tokens, or minor SFT, with a KL to a reference.

    Args:
        actor_network: scores packed tokens (:class:`~torchrl_data.protocols.TokenScorer`).
        loss_function: ``"sft"``, or ``"minor_sft"``:
            ``-log sigmoid(beta (log pi - log ref))`` of each row's answer.
        aggregation: ``"token_mean"``, ``"sequence_mean"``, ``"sequence_sum"`` or
            ``"fixed_length"``; for minor SFT it says what an answer's log-prob is (its sum for
            ``"sequence_sum"``, its mean for ``"sequence_mean"``), and only these two apply.
        max_tokens: what ``"fixed_length"`` divides by.
        masking_strategy: ``"assistant"``, ``"response"`` or ``"all"``, as for ``GRPOLoss``.
        kl_to_ref_coeff: weight of the KL (k3) to the reference; None or 0 for none.
        beta: of minor SFT.
        temperature: the logits are divided by it.
        read: entry names.

    Raises:
        TypeError: the actor cannot score.
        ValueError: an option is unknown, out of range, or cannot take effect with the others.

    See Also:
        Xie et al., 2024 (minor SFT), arXiv:2408.10642.
    """

    def __init__(
        self,
        actor_network: TokenScorer,
        *,
        loss_function: SFTFunction | str = "sft",
        aggregation: str | None = None,
        max_tokens: int | None = None,
        masking_strategy: str = "assistant",
        kl_to_ref_coeff: float | None = None,
        beta: float | None = None,
        temperature: float = 1.0,
        read: SFTLossKeys | None = None,
    ) -> None:
        super().__init__()
        check_scorer(actor_network, self._get_name())
        check_coefficients(kl_to_ref_coeff=kl_to_ref_coeff)
        self.actor_network = actor_network
        self.loss_function: SFTFunction = one_of("loss_function", loss_function, SFT_FUNCTIONS, {})
        minor = self.loss_function == "minor_sft"
        default = "sequence_mean" if minor else "token_mean"
        choices = ("sequence_mean", "sequence_sum") if minor else F.AGGREGATIONS
        self.aggregation: F.Aggregation = one_of(
            "aggregation", aggregation or default, choices, _TORCHRL_AGGREGATIONS
        )
        if (self.aggregation == "fixed_length") != (max_tokens is not None):
            raise ValueError("max_tokens goes with aggregation 'fixed_length': give both or none.")
        if beta is not None and (not minor or not beta > 0):
            raise ValueError(f"beta must be positive and goes with 'minor_sft', got {beta}.")
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}.")
        self.max_tokens = max_tokens
        self.masking_strategy: MaskingStrategy = resolve_masking_strategy(masking_strategy)
        self.kl_to_ref_coeff = kl_to_ref_coeff or None
        self.beta = 0.1 if beta is None else beta
        self.temperature = temperature
        self.read = read or SFTLossKeys()

    @property
    def _token_entries(self) -> tuple[str, ...]:
        reference = self.kl_to_ref_coeff is not None or self.loss_function == "minor_sft"
        return ("ref_log_probs",) if reference else ()

    def forward(self, tensordict: TensorDictBase, *, window: Window | None = None) -> SFTLossOutput:
        """Compute the terms of the loss.

        Args:
            tensordict: ``[B]``, ragged or padded, with the entries of ``read``.
            window: counts of the whole accumulation window; None: this batch is all of it.

        Returns:
            Terms and figures; ``.total()`` is what to call ``backward`` on.

        Raises:
            MissingEntryError: an entry is missing.
            ValueError: entries are not aligned with the tokens, or the batch is not ``[B]``.
        """
        batch = pack_batch(
            tensordict,
            self.read,
            self.masking_strategy,
            token_entries=self._token_entries,
            who=self._get_name(),
            device=scorer_device(self.actor_network),
        )
        if window is None:
            window = Window(max(batch.num_targets, 1), max(batch.num_rows, 1))
        active = torch.ones_like(batch.sampled)
        log_prob = self._log_prob(batch)
        terms = {
            "loss_sft": self._objective(log_prob, batch, window),
            "nll": -log_prob.detach().sum() / window.num_active_tokens,
            "num_active_tokens": log_prob.new_tensor(batch.num_targets).detach(),
            "num_sequences": log_prob.new_tensor(batch.num_rows).detach(),
        }
        if self.kl_to_ref_coeff is not None:
            reference = batch.entries["ref_log_probs"].to(log_prob.dtype)
            kl = F.kl_estimate(log_prob, reference, active)
            terms["kl_to_ref"] = kl.detach().sum() / window.num_active_tokens
            reduced = self._reduce(kl, batch, window)
            terms["loss_kl_to_ref"] = self.kl_to_ref_coeff * reduced
        return make_output(SFTLossOutput, terms)

    def measure_window(self, batch: TensorDictBase) -> Window:
        """Count what an accumulation window will train.

        Args:
            batch: all rows of the window.

        Returns:
            Its counts, for ``window=``.

        Raises:
            MissingEntryError: an entry is missing.
        """
        packed = pack_batch(batch, self.read, self.masking_strategy, who=self._get_name())
        return Window(packed.num_targets, packed.num_rows)

    def _log_prob(self, batch: PackedBatch) -> Tensor:
        if batch.num_targets == 0:
            return torch.zeros(0, device=batch.ids.device, requires_grad=True)
        scores = self.actor_network.score_packed(
            batch.ids, batch.lengths, batch.target_mask, temperature=self.temperature
        )
        log_prob = scores.log_prob
        return log_prob if log_prob.dtype == torch.float64 else log_prob.float()

    def _reduce(self, values: Tensor, batch: PackedBatch, window: Window) -> Tensor:
        return F.aggregate(
            values,
            torch.ones_like(batch.sampled),
            batch.target_lengths,
            aggregation=self.aggregation,
            max_tokens=self.max_tokens,
            num_active_tokens=window.num_active_tokens,
            num_sequences=window.num_sequences,
        )

    def _objective(self, log_prob: Tensor, batch: PackedBatch, window: Window) -> Tensor:
        active = torch.ones_like(batch.sampled)
        if self.loss_function == "sft":
            return self._reduce(F.negative_log_likelihood(log_prob, active), batch, window)
        answer = F.sequence_mean if self.aggregation == "sequence_mean" else F.sequence_sum
        reference = batch.entries["ref_log_probs"].to(log_prob.dtype)
        per_row = F.minor_sft(
            answer(log_prob, active, batch.target_lengths),
            answer(reference, active, batch.target_lengths),
            beta=self.beta,
        )
        trained = batch.target_lengths > 0
        return per_row.masked_fill(~trained, 0.0).sum() / window.num_sequences
