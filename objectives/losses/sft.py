"""Supervised fine-tuning on the trained tokens of conversations.

Shape legend: B rows, K trained tokens of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tensordict import TensorClass
from torch import Tensor

from objectives import functional as F
from objectives.batching.loss_keys import SFTLossKeys
from objectives.batching.packed_batch import Entries, PackedBatch
from torchrl_data.checks import NOT_NEGATIVE, POSITIVE, check_numbers, one_of
from torchrl_data.token_scorer import TokenScorer, TokenScores

from .loss_output import LossTerms, loss_output, make_output
from .token_loss import TokenLoss, takes
from .token_options import TokenOptions, aggregation_name
from .window import Window

SFTFunction = Literal["sft", "minor_sft"]
SFT_FUNCTIONS: Final[tuple[SFTFunction, ...]] = ("sft", "minor_sft")
_MINOR_AGGREGATIONS: Final[tuple[F.Aggregation, ...]] = ("sequence_mean", "sequence_sum")


@dataclass(frozen=True, kw_only=True)
class SFTOptions(TokenOptions):
    """Options of :class:`~objectives.SFTLoss`, checked when they are made.

    Raises:
        ValueError: an option is unknown, out of range, or cannot take effect with the others.

    Example:
        >>> SFTOptions(loss_function="minor_sft").named_aggregation
        'sequence_mean'
    """

    aggregation: str | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """``"token_mean"``, ``"sequence_mean"``, ``"sequence_sum"``, ``"fixed_length"``, or ``"none"``,
    which gives ``[K]`` values; None is ``"token_mean"``, and ``"sequence_mean"`` for minor SFT. Of
    minor SFT it says what an answer's log-prob is (its sum for ``"sequence_sum"``, its mean for
    ``"sequence_mean"``), and only these two apply."""
    temperature: float | None = 1.0
    """The logits are divided by it."""
    loss_function: SFTFunction | str = "sft"
    """``"sft"``, or ``"minor_sft"``: ``-log sigmoid(beta (log pi - log ref))`` of each row's
    answer."""
    kl_to_ref_coeff: float | None = None
    """Weight of the KL (k3) to the reference; None or 0 for none."""
    beta: float | None = None
    """Of minor SFT; None is 0.1."""

    def __post_init__(self) -> None:
        one_of("loss_function", self.loss_function, SFT_FUNCTIONS)
        super().__post_init__()
        check_numbers("", NOT_NEGATIVE, kl_to_ref_coeff=self.kl_to_ref_coeff)
        check_numbers("", POSITIVE, beta=self.beta)
        if self.is_minor:
            one_of("aggregation", self.named_aggregation, _MINOR_AGGREGATIONS)
        elif self.beta is not None:
            raise ValueError(f"beta={self.beta} goes with loss_function 'minor_sft': leave it out.")

    @property
    def is_minor(self) -> bool:
        """Whether the loss goes by whole answers."""
        return self.loss_function == "minor_sft"

    @property
    def named_aggregation(self) -> F.Aggregation:
        """See the base class."""
        return aggregation_name(
            self.aggregation or ("sequence_mean" if self.is_minor else "token_mean")
        )


@loss_output
class SFTLossOutput(LossTerms, TensorClass["nocast"]):
    """Terms and metrics of :class:`~objectives.SFTLoss`.

    All are scalars, ``[]``; with ``aggregation="none"`` the terms are ``[K]``, one value per
    trained token.
    """

    _documentation = __doc__

    loss_sft: Tensor
    num_active_tokens: Tensor
    """Trained tokens of this call."""
    num_sequences: Tensor
    """Rows of this call."""
    nll: Tensor
    """Mean negative log-likelihood, in nats per token; detached."""
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None
    """Mean KL estimate to the reference, in nats per token; detached."""


@dataclass(frozen=True, kw_only=True)
class _Arguments(SFTOptions):
    actor_network: TokenScorer = field(kw_only=False)
    options: SFTOptions | None = None
    read: SFTLossKeys | None = None
    allow_empty: bool = False


class SFTLoss(TokenLoss[SFTLossKeys, SFTLossOutput]):
    """Negative log-likelihood of the trained tokens, or minor SFT, with a KL to a reference.

    The batch is ``[B]``, ragged rows or padded ones, as for :class:`~objectives.GRPOLoss`.
    Demonstrations become rows in which what the assistant says is trained::

        conversations = encode_demonstrations(policy.encoder, chats)  # of torchrl_data
        batch = lazy_stack(row_tensordicts(conversations))

    Args:
        actor_network: scores packed tokens (:class:`~torchrl_data.TokenScorer`).
        options: all options as one record.
        read: names of the batch entries to read.
        allow_empty: a batch without a trained token has loss 0; otherwise it raises.
        **settings: single options by name, such as ``loss_function=``, ``aggregation=``: the fields
            of :class:`~objectives.SFTOptions`, where each is described.

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

    @takes(_Arguments)
    def __init__(
        self,
        actor_network: TokenScorer,
        *,
        options: SFTOptions | None = None,
        read: SFTLossKeys | None = None,
        allow_empty: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(
            actor_network, settings, options=options, read=read, allow_empty=allow_empty
        )

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
