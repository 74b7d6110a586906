"""Direct preference optimisation: of two answers to a prompt the better one becomes likelier.

Shape legend: B rows, two of each pair; K trained tokens of all of them, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tensordict import TensorClass
from torch import Tensor

from objectives import functional as F
from objectives.batching.loss_keys import DPOLossKeys
from objectives.batching.packed_batch import Entries, PackedBatch
from torchrl_data.token_scorer import TokenScorer, TokenScores

from .dpo_options import DPOOptions
from .loss_output import LossTerms, loss_output, make_output
from .pair_loss import PairLoss, pair_accuracy, pairs_of
from .token_loss import takes
from .window import Window


@loss_output
class DPOLossOutput(LossTerms, TensorClass["nocast"]):
    """Terms and metrics of :class:`~objectives.DPOLoss`.

    All are scalars, ``[]``. Metrics are detached, and means over the pairs. The reward of an answer
    is ``beta`` times its score, the log-prob less that of the reference.
    """

    _documentation = __doc__
    weighted_by = "num_pairs"

    loss_dpo: Tensor
    num_active_tokens: Tensor
    """Trained tokens of this call."""
    num_sequences: Tensor
    """Rows of this call."""
    num_pairs: Tensor
    """Pairs of this call."""
    accuracy: Tensor
    """The share of pairs whose better answer has the larger reward; of equal rewards one half."""
    chosen_reward: Tensor
    """Of the better answers."""
    rejected_reward: Tensor
    """Of the others."""
    chosen_log_prob: Tensor
    """Of the better answers, sum or mean over their tokens, as ``aggregation`` says; in nats."""
    rejected_log_prob: Tensor
    """Of the others."""
    loss_nll: Tensor | None = None
    nll: Tensor | None = None
    """Of the better answers, the mean over their tokens, in nats."""


@dataclass(frozen=True, kw_only=True)
class _Arguments(DPOOptions):
    actor_network: TokenScorer = field(kw_only=False)
    options: DPOOptions | None = None
    read: DPOLossKeys | None = None
    allow_empty: bool = False


class DPOLoss(PairLoss[DPOLossKeys, DPOLossOutput]):
    """Direct preference optimisation over pairs of answers.

    The batch is ``[B]``, ragged rows or padded ones, as for :class:`~objectives.GRPOLoss`, two rows
    for each pair: the better answer, then the other one. Both begin with the same prompt, which a
    policy reads once. ``preference_rows`` of ``torchrl_data`` makes such rows of conversations, and
    ``RetrieveLogProb`` of ``torchrl_envs`` writes the log-probs of a reference into them::

        rows = lazy_stack(preference_rows(policy.encoder, pairs))
        rows = RetrieveLogProb(reference)(rows)
        loss = DPOLoss(policy, beta=0.1)(rows).total()

    Micro-batches hold whole pairs. SimPO is ``DPOLoss(actor, reference_free=True, beta=2.0,
    margin=1.0)``; RPO has ``sft_coeff=1.0``; ORPO is ``DPOLoss(actor, loss_function="orpo")``.

    Args:
        actor_network: scores packed tokens (:class:`~torchrl_data.TokenScorer`).
        options: all options as one record.
        read: names of the batch entries to read.
        allow_empty: a batch without a trained token has loss 0; otherwise it raises.
        **settings: single options by name, such as ``beta=0.1``: the fields of
            :class:`~objectives.DPOOptions`, where each is described.

    Raises:
        TypeError: the actor cannot score.
        ValueError: an option is unknown, out of range, or cannot take effect with the others.

    See Also:
        Rafailov et al., 2023, arXiv:2305.18290, equation 7; Meng et al., 2024 (SimPO),
        arXiv:2405.14734; Pang et al., 2024 (RPO), arXiv:2404.19733; Hong et al., 2024 (ORPO),
        arXiv:2403.07691, equation 6.

    Example:
        >>> from tensordict import lazy_stack
        >>> from torchrl_data import preference_rows
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> policy = TransformersWrapper(tiny_qwen3(len(tokenizer)), tokenizer=tokenizer)
        >>> pair = {"prompt": "2 + 2?", "chosen": "4", "rejected": "five"}
        >>> rows = lazy_stack(preference_rows(policy.encoder, [pair]))
        >>> for row in rows.unbind(0):  # the reference says of every token what the policy says
        ...     with torch.no_grad():
        ...         own = policy.score_packed(
        ...             row["tokens", "full"],
        ...             torch.tensor([len(row["tokens", "full"])]),
        ...             row["masks", "all_assistant_mask"],
        ...         ).log_prob
        ...     spread = torch.zeros(len(row["tokens", "full"]))
        ...     mask = row["masks", "all_assistant_mask"]
        ...     row["next", "ref_log_probs", "full"] = spread.masked_scatter(mask, own)
        >>> output = DPOLoss(policy)(rows)
        >>> output.total().shape, round(output.total().item(), 3), output.num_pairs.item()
        (torch.Size([]), 0.693, 1.0)
    """

    option_type = DPOOptions
    key_type = DPOLossKeys
    output_type = DPOLossOutput

    @takes(_Arguments)
    def __init__(
        self,
        actor_network: TokenScorer,
        *,
        options: DPOOptions | None = None,
        read: DPOLossKeys | None = None,
        allow_empty: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(
            actor_network, settings, options=options, read=read, allow_empty=allow_empty
        )

    def _entries(self) -> Entries:
        tokens = {"ref_log_probs": self.read.ref_log_probs} if self.options.has_reference else {}
        return self._pair_entries()._replace(tokens=tokens)

    def of_scores(self, batch: PackedBatch, scores: TokenScores, window: Window) -> DPOLossOutput:
        """See the base class."""
        options, log_prob = self.options, scores.log_prob
        batch = batch.targets_on(log_prob.device)
        lengths = batch.target_lengths
        answer = F.sequence_mean if self.aggregation == "sequence_mean" else F.sequence_sum
        own = said = answer(log_prob, lengths=lengths)
        if options.has_reference:
            reference = batch.entries["ref_log_probs"].to(log_prob.dtype)
            own = said - answer(reference, lengths=lengths)
        chosen, rejected = pairs_of(own)
        per_pair = F.preference_loss(
            chosen,
            rejected,
            beta=options.beta,
            loss_function=options.loss_function,
            label_smoothing=options.label_smoothing,
            margin=options.margin,
        )
        num_pairs = max(len(chosen), 1)
        log_probs = [each.detach().sum() / num_pairs for each in pairs_of(said)]
        rewards = [options.beta * each.detach().sum() / num_pairs for each in (chosen, rejected)]
        terms = {
            "loss_dpo": 2 * per_pair.sum() / window.num_sequences,
            "accuracy": pair_accuracy(chosen, rejected),
            "chosen_reward": rewards[0],
            "rejected_reward": rewards[1],
            "chosen_log_prob": log_probs[0],
            "rejected_log_prob": log_probs[1],
            "num_active_tokens": log_prob.new_full((), batch.num_targets).detach(),
            "num_sequences": log_prob.new_full((), batch.num_rows).detach(),
            "num_pairs": log_prob.new_full((), len(chosen)).detach(),
        }
        if options.nll_coeff:
            nll = -F.sequence_mean(log_prob, lengths=lengths)[::2].sum()
            terms["nll"] = nll.detach() / num_pairs
            terms["loss_nll"] = options.nll_coeff * 2 * nll / window.num_sequences
        return make_output(DPOLossOutput, terms)
