"""Losses with a target for each token: fine-tuning and distillation."""

from __future__ import annotations

from objectives import functional as F
from objectives.batching.loss_keys import DistillationLossKeys, SFTLossKeys
from objectives.batching.packed_batch import Entries, PackedBatch
from torchrl_data.token_scorer import TokenScorer, TokenScores

from .base import DistillationLossOutput, SFTLossOutput, TokenLoss, Window, make_output
from .options import DistillationOptions, SFTFunction, SFTOptions

# Supervised fine-tuning on the trained tokens of conversations.
#
# Shape legend: B rows, K trained tokens of all of them.


class SFTLoss(TokenLoss[SFTLossKeys, SFTLossOutput]):
    """Negative log-likelihood of the trained tokens, or minor SFT, with a KL to a reference.

    The batch is ``[B]``, ragged rows or padded ones, as for :class:`~objectives.GRPOLoss`.
    Demonstrations become rows in which what the assistant says is trained::

        conversations = encode_demonstrations(policy.encoder, chats)  # of torchrl_data
        batch = lazy_stack(row_tensordicts(conversations))

    Args:
        actor_network: scores packed tokens (:class:`~torchrl_data.TokenScorer`).
        loss_function: ``"sft"``, or ``"minor_sft"``:
            ``-log sigmoid(beta (log pi - log ref))`` of each row's answer.
        aggregation: ``"token_mean"``, ``"sequence_mean"``, ``"sequence_sum"``,
            ``"fixed_length"``, or ``"none"``, which gives ``[K]`` values; for minor SFT it says
            what an answer's log-prob is (its sum for ``"sequence_sum"``, its mean for
            ``"sequence_mean"``), and only these two apply.
        max_tokens: what ``"fixed_length"`` divides by.
        masking_strategy: ``"assistant"``, ``"response"`` or ``"all"``, as for ``GRPOLoss``.
        kl_to_ref_coeff: weight of the KL (k3) to the reference; None or 0 for none.
        beta: of minor SFT.
        temperature: the logits are divided by it.
        read: entry names.
        allow_empty: a batch without a trained token has loss 0; otherwise it raises.

    Raises:
        TypeError: the actor cannot score.
        ValueError: an option is unknown, out of range, or cannot take effect with the others.

    See Also:
        Xie et al., 2024 (minor SFT), arXiv:2408.10642.

    Example:
        >>> import math
        >>> from tensordict import lazy_stack
        >>> from torchrl_data import encode_demonstrations, row_tensordicts
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> model = tiny_qwen3(len(tokenizer))
        >>> _ = torch.nn.init.zeros_(model.lm_head.weight)  # all tokens are equally likely
        >>> policy = TransformersWrapper(model, tokenizer=tokenizer)
        >>> chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
        >>> rows = row_tensordicts(encode_demonstrations(policy.encoder, [chat]))
        >>> loss = SFTLoss(policy)(lazy_stack(rows)).total()
        >>> loss.shape, round(loss.item(), 4), round(math.log(len(tokenizer)), 4)
        (torch.Size([]), 5.8201, 5.8201)
    """

    option_type = SFTOptions
    key_type = SFTLossKeys
    output_type = SFTLossOutput

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
        allow_empty: bool = False,
    ) -> None:
        settings = {
            "loss_function": loss_function,
            "aggregation": aggregation,
            "max_tokens": max_tokens,
            "masking_strategy": masking_strategy,
            "kl_to_ref_coeff": kl_to_ref_coeff,
            "beta": beta,
            "temperature": temperature,
        }
        read = read or SFTLossKeys()
        super().__init__(actor_network, settings, read=read, allow_empty=allow_empty)

    def _entries(self) -> Entries:
        reference = bool(self.options.kl_to_ref_coeff) or self.options.is_minor
        return Entries({"ref_log_probs": self.read.ref_log_probs} if reference else {}, {})

    def of_scores(self, batch: PackedBatch, scores: TokenScores, window: Window) -> SFTLossOutput:
        """See the base class."""
        log_prob, options = scores.log_prob, self.options
        batch = batch.targets_on(log_prob.device)
        lengths = batch.target_lengths
        if not options.is_minor:
            objective = self._reduce(F.negative_log_likelihood(log_prob), batch, window)
        else:
            answer = F.sequence_mean if self.aggregation == "sequence_mean" else F.sequence_sum
            reference = batch.entries["ref_log_probs"].to(log_prob.dtype)
            answers = (answer(each, lengths=lengths) for each in (log_prob, reference))
            beta = 0.1 if options.beta is None else options.beta
            per_row = F.minor_sft(*answers, beta=beta)
            objective = per_row.masked_fill(lengths == 0, 0.0).sum() / window.num_sequences
        terms = {
            "loss_sft": objective,
            "nll": F.token_mean(-log_prob.detach()),
            "num_active_tokens": log_prob.new_full((), batch.num_targets).detach(),
            "num_sequences": log_prob.new_full((), batch.num_rows).detach(),
        }
        if options.kl_to_ref_coeff:
            reference = batch.entries["ref_log_probs"].to(log_prob.dtype)
            kl = F.kl_estimate(log_prob, reference)
            terms["kl_to_ref"] = F.token_mean(kl.detach())
            terms["loss_kl_to_ref"] = options.kl_to_ref_coeff * self._reduce(kl, batch, window)
        return make_output(SFTLossOutput, terms)


# Distillation of a teacher from the log-probs of single tokens.
#
# Shape legend: B rows, K trained tokens of all of them.


class DistillationLoss(TokenLoss[DistillationLossKeys, DistillationLossOutput]):
    """KL to a teacher, estimated (k3) on tokens that the student or the teacher sampled.

    For a divergence over the whole vocabulary see
    :func:`~objectives.functional.generalized_jsd`.

    Args:
        actor_network: the student; scores packed tokens.
        kl_direction: ``"reverse"``: KL(student || teacher), for tokens that the student sampled;
            ``"forward"``: KL(teacher || student), for tokens that the teacher sampled.
        aggregation: ``"token_mean"``, ``"sequence_mean"``, ``"sequence_sum"``,
            ``"fixed_length"``, or ``"none"``, which gives ``[K]`` values.
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

    Example:
        >>> import math
        >>> from tensordict import lazy_stack
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> model = tiny_qwen3(len(tokenizer))
        >>> _ = torch.nn.init.zeros_(model.lm_head.weight)  # all tokens are equally likely
        >>> row = TensorDict({("tokens", "full"): torch.tensor([65, 66])})  # [T]
        >>> row["masks", "all_assistant_mask"] = torch.tensor([False, True])
        >>> teacher = torch.full((2,), math.log(2 / len(tokenizer)))
        >>> row["next", "teacher_log_probs", "full"] = teacher
        >>> loss = DistillationLoss(TransformersWrapper(model, tokenizer=tokenizer))
        >>> loss(lazy_stack([row])).total().detach()  # k3 of a ratio of 2: 2 - 1 - log 2
        tensor(0.3069)
    """

    option_type = DistillationOptions
    key_type = DistillationLossKeys
    output_type = DistillationLossOutput

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
        settings = {
            "kl_direction": kl_direction,
            "aggregation": aggregation,
            "max_tokens": max_tokens,
            "masking_strategy": masking_strategy,
            "temperature": temperature,
        }
        read = read or DistillationLossKeys()
        super().__init__(actor_network, settings, read=read, allow_empty=allow_empty)

    def _entries(self) -> Entries:
        teacher = self.read.teacher_log_probs
        return Entries({"teacher_log_probs": teacher}, {})

    def of_scores(
        self, batch: PackedBatch, scores: TokenScores, window: Window
    ) -> DistillationLossOutput:
        """See the base class."""
        log_prob = scores.log_prob
        batch = batch.targets_on(log_prob.device)
        teacher = batch.entries["teacher_log_probs"].to(log_prob.dtype)
        kl = F.sampled_distillation(log_prob, teacher, direction=self.options.kl_direction)
        terms = {
            "loss_distill": self._reduce(kl, batch, window),
            "kl_to_teacher": F.token_mean(kl.detach()),
            "num_active_tokens": kl.detach().new_full((), batch.num_targets),
            "num_sequences": kl.detach().new_full((), batch.num_rows),
        }
        return make_output(DistillationLossOutput, terms)
