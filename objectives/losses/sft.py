"""Supervised fine-tuning on the trained tokens of conversations.

Shape legend: B rows, K trained tokens of all of them.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from objectives import functional as F
from objectives.batching.accumulation import Window
from objectives.batching.packed_batch import PackedBatch
from objectives.keys import SFTLossKeys
from objectives.validation import check_coefficients, check_positive, one_of
from torchrl_data.protocols import TokenScorer

from .base import TokenLoss
from .outputs import SFTLossOutput, make_output

SFTFunction = Literal["sft", "minor_sft"]
SFT_FUNCTIONS: Final[tuple[SFTFunction, ...]] = ("sft", "minor_sft")
_MINOR_AGGREGATIONS: Final[tuple[F.Aggregation, ...]] = ("sequence_mean", "sequence_sum")


class SFTLoss(TokenLoss[SFTLossKeys]):
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
        check_coefficients(kl_to_ref_coeff=kl_to_ref_coeff)
        function = one_of("loss_function", loss_function, SFT_FUNCTIONS, {})
        minor = function == "minor_sft"
        check_positive(beta=beta)
        if beta is not None and not minor:
            raise ValueError("beta goes with 'minor_sft': leave it out.")
        super().__init__(
            actor_network,
            aggregation=aggregation or ("sequence_mean" if minor else "token_mean"),
            aggregations=_MINOR_AGGREGATIONS if minor else F.AGGREGATIONS,
            max_tokens=max_tokens,
            masking_strategy=masking_strategy,
            temperature=temperature,
            read=read or SFTLossKeys(),
        )
        self.loss_function: SFTFunction = function
        self.kl_to_ref_coeff = kl_to_ref_coeff or None
        self.beta = 0.1 if beta is None else beta
        self._declare_keys(SFTLossOutput)

    def _entries(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        reference = self.kl_to_ref_coeff is not None or self.loss_function == "minor_sft"
        return (("ref_log_probs",) if reference else ()), ()

    def forward(
        self, tensordict: TensorDictBase | PackedBatch, *, window: Window | None = None
    ) -> SFTLossOutput:
        """Compute the terms of the loss.

        Args:
            tensordict: ``[B]``, ragged or padded, with the entries of ``read``; or packed.
            window: counts of the whole accumulation window; None: this batch is all of it.

        Returns:
            Terms and figures; ``.total()`` is what to call ``backward`` on.

        Raises:
            MissingEntryError: an entry is missing.
            ValueError: entries are not aligned with the tokens, or the batch is not ``[B]``.
        """
        batch, window = self._pack_window(tensordict, window)
        active = torch.ones_like(batch.sampled)
        log_prob = self._score(batch).log_prob
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
