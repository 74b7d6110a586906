"""Learning from answers that are labelled one by one: desirable ones become likelier.

Shape legend: B rows, A answers among them, K trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from tensordict import TensorClass, TensorDictBase
from torch import Tensor

from objectives import functional as F
from objectives.batching.loss_keys import KTOLossKeys
from objectives.batching.packed_batch import Entries, PackedBatch, rows_with
from objectives.batching.ranks import Ranks
from torchrl_data.token_scorer import TokenScorer, TokenScores

from .kto_options import KTOOptions
from .loss_output import LossTerms, loss_output, make_output
from .pair_loss import share_ahead
from .token_loss import TokenLoss, takes
from .window import Window


@loss_output
class KTOLossOutput(LossTerms, TensorClass["nocast"]):
    """Terms and metrics of :class:`~objectives.KTOLoss`.

    All are scalars, ``[]``. Metrics are detached. The reward of an answer is ``beta`` times its
    score, the log-prob less that of the reference.
    """

    _documentation = __doc__
    weighted_by = "num_sequences"
    weighted_apart: ClassVar = {
        "chosen_reward": "num_desirable",
        "chosen_log_prob": "num_desirable",
        "rejected_reward": "num_undesirable",
        "rejected_log_prob": "num_undesirable",
    }

    loss_kto: Tensor
    num_active_tokens: Tensor
    """Trained tokens of this call."""
    num_sequences: Tensor
    """Answers of this call, without the mismatched ones."""
    num_desirable: Tensor
    """Those that are desirable."""
    num_undesirable: Tensor
    """The others."""
    accuracy: Tensor
    """The share of answers whose score is on the right side of what it is compared with: above it
    where they are desirable; of equal values one half."""
    reference_kl: Tensor
    """What scores are compared with, in nats; of the whole window."""
    chosen_reward: Tensor | None = None
    """Of the desirable answers; None where there are none."""
    rejected_reward: Tensor | None = None
    """Of the others; None where there are none."""
    chosen_log_prob: Tensor | None = None
    """Of the desirable answers, sum over their tokens, in nats."""
    rejected_log_prob: Tensor | None = None
    """Of the others."""


@dataclass(frozen=True, kw_only=True)
class _Arguments(KTOOptions):
    actor_network: TokenScorer = field(kw_only=False)
    options: KTOOptions | None = None
    read: KTOLossKeys | None = None
    allow_empty: bool = False


class KTOLoss(TokenLoss[KTOLossKeys, KTOLossOutput]):
    """Kahneman-Tversky optimisation: learning from single answers, desirable or not.

    The batch is ``[B]``, ragged rows or padded ones, as for :class:`~objectives.GRPOLoss`, one row
    for each answer, and others with answers to prompts that they were not given to. These are not
    trained: their mean log-ratio estimates the KL divergence of the policy from the reference, with
    which the log-ratio of each answer is compared. ``kto_rows`` of ``torchrl_data`` makes both
    kinds, and ``RetrieveLogProb`` of ``torchrl_envs`` writes the log-probs of a reference::

        rows = lazy_stack(kto_rows(policy.encoder, data))
        rows = RetrieveLogProb(reference)(rows)
        loss = KTOLoss(policy, beta=0.1)(rows).total()

    The estimate is of the whole window: :meth:`measure_window` scores the mismatched rows of all
    micro-batches and ranks, without a gradient, before any of them is trained. Rows may be split
    in any way. ``loss_function="apo_zero_unpaired"`` needs no such rows, and leaves out those that
    there are.

    Args:
        actor_network: scores packed tokens (:class:`~torchrl_data.TokenScorer`).
        options: all options as one record.
        read: names of the batch entries to read.
        allow_empty: a batch without an answer has loss 0; otherwise it raises.
        **settings: single options by name, such as ``beta=0.1``: the fields of
            :class:`~objectives.KTOOptions`, where each is described.

    Raises:
        TypeError: the actor cannot score.
        ValueError: an option is unknown or out of range.

    See Also:
        Ethayarajh et al., 2024, arXiv:2402.01306, equations 7 and 8; D'Oosterlinck et al., 2024
        (APO), arXiv:2408.06266.

    Example:
        >>> from tensordict import lazy_stack
        >>> from torchrl_data import kto_rows
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> policy = TransformersWrapper(tiny_qwen3(len(tokenizer)), tokenizer=tokenizer)
        >>> given = [("2 + 2?", "4", True), ("1 + 1?", "five", False)]
        >>> data = [{"prompt": p, "completion": c, "label": label} for p, c, label in given]
        >>> rows = kto_rows(policy.encoder, data)
        >>> for row in rows:  # a reference for which every token is as likely as any other
        ...     ids = row["tokens", "full"]
        ...     row["next", "ref_log_probs", "full"] = torch.full(ids.shape, -6.0)
        >>> output = KTOLoss(policy)(lazy_stack(rows))
        >>> output.total().shape, output.num_desirable.item(), output.num_undesirable.item()
        (torch.Size([]), 1.0, 1.0)
    """

    option_type = KTOOptions
    key_type = KTOLossKeys
    output_type = KTOLossOutput

    @takes(_Arguments)
    def __init__(
        self,
        actor_network: TokenScorer,
        *,
        options: KTOOptions | None = None,
        read: KTOLossKeys | None = None,
        allow_empty: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(
            actor_network, settings, options=options, read=read, allow_empty=allow_empty
        )

    def _entries(self) -> Entries:
        read = self.read
        flags = {"label": read.label, "mismatched": read.mismatched}
        return Entries({"ref_log_probs": read.ref_log_probs}, {}, flags=flags)

    def pack(
        self,
        batch: TensorDictBase | PackedBatch,
        *,
        also: Sequence[TokenLoss[Any, Any]] = (),
    ) -> PackedBatch:
        """See the base class.

        Raises:
            ValueError: a row has no trained token.
        """
        packed = super().pack(batch, also=also)
        empty = (packed.target_lengths == 0).nonzero()
        if len(empty):
            raise ValueError(
                f"{self._get_name()}: row {int(empty[0])} has no trained token, so that its answer "
                "has no score. The assistant mask says which tokens are the answer; leave the row "
                "out."
            )
        return packed

    def _counts(self, packed: PackedBatch) -> Window:
        is_trained = ~packed.entries["mismatched"]
        return Window(int(is_trained.sum()), int(rows_with(is_trained, packed).sum()))

    def _pack_window(
        self, batch: TensorDictBase | PackedBatch, window: Window | None
    ) -> tuple[PackedBatch, Window]:
        packed, found = super()._pack_window(batch, window)
        if window is None:
            return packed, found._replace(**self._statistics([packed], None))
        if self.options.compares_with_kl and window.reference_kl is None:
            raise ValueError(
                "KTOLoss: the window needs a reference_kl, or each part would be compared with its "
                "own. loss.measure_window(...) gives it; for windows that were added up: "
                "window._replace(reference_kl=x)."
            )
        return packed, found

    @torch.no_grad()
    def _statistics(self, batches: Sequence[PackedBatch], ranks: Ranks | None) -> dict[str, float]:
        """See the base class; scores the mismatched rows of the batches one by one."""
        if not self.options.compares_with_kl:
            return {}
        scores = [torch.zeros(0, dtype=torch.float64)]
        for batch in batches:
            rows = batch.take_rows(rows_with(batch.entries["mismatched"], batch))
            scores.append(self._log_ratios(rows, self._score(rows))[1].double().cpu())
        found = torch.cat(scores)
        total, count = float(found.sum()), float(len(found))
        rows = float(sum(self._counts(batch).num_sequences for batch in batches))
        if ranks is not None:
            total, count, rows = ranks.data.sum([total, count, rows])
        if not count and rows:
            raise ValueError(
                f"{self._get_name()}: none of the rows of the window is mismatched, an answer to "
                "another prompt, with which loss_function='kto' estimates how far policy and "
                "reference are apart. kto_rows(policy.encoder, data) of torchrl_data makes such "
                "rows, with_mismatched(rows) adds them; 'apo_zero_unpaired' needs none."
            )
        mean = total / count if count else 0.0
        return {"reference_kl": 0.0 if mean < 0 else mean}  # what is not finite stays so

    def _log_ratios(self, batch: PackedBatch, scores: TokenScores) -> tuple[Tensor, Tensor]:
        """The log-prob of each row, and that less the reference's."""
        batch = batch.targets_on(scores.log_prob.device)
        lengths = batch.target_lengths
        said = F.sequence_sum(scores.log_prob, lengths=lengths)
        reference = batch.entries["ref_log_probs"].to(scores.log_prob.dtype)
        return said, said - F.sequence_sum(reference, lengths=lengths)

    def forward(
        self, tensordict: TensorDictBase | PackedBatch, *, window: Window | None = None
    ) -> KTOLossOutput:
        """Compute the terms of the loss.

        Args:
            tensordict: ``[B]``, ragged or padded, with the entries of ``read``; or packed.
            window: counts and divergence of the whole accumulation window; None: this batch is all
                of it.

        Returns:
            Terms and metrics; ``.total()`` is what to call ``backward`` on.

        Raises:
            MissingEntryError: an entry is missing.
            ValueError: entries are not aligned with the tokens, the batch is not ``[B]``, the
                window has no divergence, or no row is mismatched where there is none.
        """
        batch, window = self._pack_window(tensordict, window)
        batch = batch.take_rows(rows_with(~batch.entries["mismatched"], batch))
        return self.of_scores(batch, self._score(batch), window)

    def of_scores(self, batch: PackedBatch, scores: TokenScores, window: Window) -> KTOLossOutput:
        """See the base class; none of the rows is mismatched."""
        options, point = self.options, window.reference_kl or 0.0
        label = batch.row_entry("label")
        said, score = self._log_ratios(batch, scores)
        num_desirable = int(label.sum())
        nums = {"chosen": num_desirable, "rejected": len(label) - num_desirable}
        label = label.to(score.device)
        per_answer = F.kto_loss(
            score,
            label,
            reference_kl=point,
            beta=options.beta,
            desirable_weight=options.desirable_weight,
            undesirable_weight=options.undesirable_weight,
        )
        lead = torch.where(label, score - point, point - score).detach()
        counts = {
            "num_active_tokens": batch.num_targets,
            "num_sequences": batch.num_rows,
            "num_desirable": nums["chosen"],
            "num_undesirable": nums["rejected"],
            "reference_kl": point,
        }
        terms = {name: score.new_full((), value).detach() for name, value in counts.items()}
        terms["loss_kto"] = per_answer.sum() / window.num_sequences
        terms["accuracy"] = share_ahead(lead)
        for name, rows in (("chosen", label), ("rejected", ~label)):
            if nums[name]:
                of_rows = rows.to(score.dtype) / nums[name]
                terms[f"{name}_reward"] = options.beta * (score.detach() * of_rows).sum()
                terms[f"{name}_log_prob"] = (said.detach() * of_rows).sum()
        return make_output(KTOLossOutput, terms)
