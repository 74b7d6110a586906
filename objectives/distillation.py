"""Distillation of a teacher from the log-probs of single tokens.

Shape legend: B rows, K trained tokens of all of them.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_data.protocols import TokenScorer

from . import functional as F
from .keys import DistillationLossKeys
from .outputs import DistillationLossOutput, make_output
from .packed_batch import MaskingStrategy, pack_batch, resolve_masking_strategy
from .settings import check_scorer, one_of, scorer_device
from .window import Window


class DistillationLoss(TensorDictModuleBase):
    """KL to a teacher, estimated (k3) on tokens that the student or the teacher sampled.

    For a divergence over the whole vocabulary see
    :func:`~objectives.functional.generalized_jsd`.

    Args:
        actor_network: the student; scores packed tokens.
        kl_direction: ``"reverse"``: KL(student || teacher), for tokens that the student sampled;
            ``"forward"``: KL(teacher || student), for tokens that the teacher sampled.
        aggregation: ``"token_mean"``, ``"sequence_mean"`` or ``"sequence_sum"``.
        masking_strategy: ``"assistant"``, ``"response"`` or ``"all"``, as for ``GRPOLoss``.
        temperature: the student's logits are divided by it, as the teacher's were.
        read: entry names.

    Raises:
        TypeError: the actor cannot score.
        ValueError: an option is unknown or out of range.

    See Also:
        Agarwal et al., 2024, arXiv:2306.13649.
    """

    def __init__(
        self,
        actor_network: TokenScorer,
        *,
        kl_direction: F.KLDirection | str = "reverse",
        aggregation: str = "token_mean",
        masking_strategy: str = "assistant",
        temperature: float = 1.0,
        read: DistillationLossKeys | None = None,
    ) -> None:
        super().__init__()
        check_scorer(actor_network, self._get_name())
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}.")
        self.actor_network = actor_network
        self.kl_direction: F.KLDirection = one_of("kl_direction", kl_direction, F.KL_DIRECTIONS, {})
        choices: tuple[F.Aggregation, ...] = ("token_mean", "sequence_mean", "sequence_sum")
        self.aggregation: F.Aggregation = one_of("aggregation", aggregation, choices, {})
        self.masking_strategy: MaskingStrategy = resolve_masking_strategy(masking_strategy)
        self.temperature = temperature
        self.read = read or DistillationLossKeys()

    def forward(
        self, tensordict: TensorDictBase, *, window: Window | None = None
    ) -> DistillationLossOutput:
        """Compute the loss.

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
            token_entries=("teacher_log_probs",),
            who=self._get_name(),
            device=scorer_device(self.actor_network),
        )
        if window is None:
            window = Window(max(batch.num_targets, 1), max(batch.num_rows, 1))
        log_prob = torch.zeros(0, device=batch.ids.device, requires_grad=True)
        if batch.num_targets:
            log_prob = self.actor_network.score_packed(
                batch.ids, batch.lengths, batch.target_mask, temperature=self.temperature
            ).log_prob
        log_prob = log_prob if log_prob.dtype == torch.float64 else log_prob.float()
        active = torch.ones_like(batch.sampled)
        teacher = batch.entries["teacher_log_probs"].to(log_prob.dtype)
        kl = F.sampled_distillation(log_prob, teacher, active, direction=self.kl_direction)
        loss = F.aggregate(
            kl,
            active,
            batch.target_lengths,
            aggregation=self.aggregation,
            num_active_tokens=window.num_active_tokens,
            num_sequences=window.num_sequences,
        )
        terms = {
            "loss_distill": loss,
            "kl_to_teacher": kl.detach().sum() / window.num_active_tokens,
            "num_active_tokens": kl.detach().new_tensor(batch.num_targets),
            "num_sequences": kl.detach().new_tensor(batch.num_rows),
        }
        return make_output(DistillationLossOutput, terms)
