"""Distillation of a teacher from the log-probs of single tokens.

Shape legend: B rows, K trained tokens of all of them.
"""

from __future__ import annotations

from tensordict import TensorDictBase

from objectives import functional as F
from objectives.batching.packed_batch import PackedBatch
from objectives.keys import DistillationLossKeys
from objectives.losses.base import Window
from torchrl_data.protocols import TokenScorer, TokenScores
from torchrl_data.validation import one_of

from .base import TokenLoss
from .outputs import DistillationLossOutput, make_output
from .token_options import TokenOptions


class DistillationLoss(TokenLoss[DistillationLossKeys]):
    """KL to a teacher, estimated (k3) on tokens that the student or the teacher sampled.

    For a divergence over the whole vocabulary see
    :func:`~objectives.functional.generalized_jsd`.

    Args:
        actor_network: the student; scores packed tokens.
        kl_direction: ``"reverse"``: KL(student || teacher), for tokens that the student sampled;
            ``"forward"``: KL(teacher || student), for tokens that the teacher sampled.
        aggregation: ``"token_mean"``, ``"sequence_mean"``, ``"sequence_sum"`` or
            ``"fixed_length"``.
        max_tokens: what ``"fixed_length"`` divides by.
        masking_strategy: ``"assistant"``, ``"response"`` or ``"all"``, as for ``GRPOLoss``.
        temperature: the student's logits are divided by it, as the teacher's were.
        read: entry names.
        allow_empty: a batch without a trained token has loss 0; otherwise it raises.

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
        max_tokens: int | None = None,
        masking_strategy: str = "assistant",
        temperature: float = 1.0,
        read: DistillationLossKeys | None = None,
        allow_empty: bool = False,
    ) -> None:
        options = TokenOptions(
            aggregation=aggregation,
            max_tokens=max_tokens,
            masking_strategy=masking_strategy,
            temperature=temperature,
        )
        super().__init__(
            actor_network,
            options,
            temperature=temperature,
            read=read or DistillationLossKeys(),
            allow_empty=allow_empty,
        )
        self.kl_direction: F.KLDirection = one_of("kl_direction", kl_direction, F.KL_DIRECTIONS)
        self._declare_keys(DistillationLossOutput)

    def _entries(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("teacher_log_probs",), ()

    def forward(
        self, tensordict: TensorDictBase | PackedBatch, *, window: Window | None = None
    ) -> DistillationLossOutput:
        """Compute the loss.

        Args:
            tensordict: ``[B]``, ragged or padded, with the entries of ``read``; or packed.
            window: counts of the whole accumulation window; None: this batch is all of it.

        Returns:
            Terms and metrics; ``.total()`` is what to call ``backward`` on.

        Raises:
            MissingEntryError: an entry is missing.
            ValueError: entries are not aligned with the tokens, the batch is not ``[B]``, or it
                has no token to train.
        """
        batch, window = self._pack_window(tensordict, window)
        return self.of_scores(batch, self._score(batch), window)

    def of_scores(
        self, batch: PackedBatch, scores: TokenScores, window: Window
    ) -> DistillationLossOutput:
        """See the base class."""
        log_prob = scores.log_prob
        teacher = batch.entries["teacher_log_probs"].to(log_prob.dtype)
        kl = F.sampled_distillation(log_prob, teacher, direction=self.kl_direction)
        terms = {
            "loss_distill": self._reduce(kl, batch, window),
            "kl_to_teacher": F.token_mean(kl.detach()),
            "num_active_tokens": kl.detach().new_tensor(batch.num_targets),
            "num_sequences": kl.detach().new_tensor(batch.num_rows),
        }
        return make_output(DistillationLossOutput, terms)
