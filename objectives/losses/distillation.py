"""Distillation of a teacher from the log-probs of single tokens.

Shape legend: B rows, K trained tokens of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tensordict import TensorClass
from torch import Tensor

from objectives import functional as F
from objectives.batching.loss_keys import DistillationLossKeys
from objectives.batching.packed_batch import Entries, PackedBatch
from torchrl_data.checks import one_of
from torchrl_data.token_scorer import TokenScorer, TokenScores

from .loss_output import LossTerms, loss_output, make_output
from .token_loss import TokenLoss, takes
from .token_options import TokenOptions
from .window import Window


@dataclass(frozen=True, kw_only=True)
class DistillationOptions(TokenOptions):
    """Options of :class:`~objectives.DistillationLoss`, checked when they are made.

    Raises:
        ValueError: an option is unknown or out of range.

    Example:
        >>> DistillationOptions(kl_direction="forward").temperature
        1.0
    """

    temperature: float | None = 1.0
    """The student's logits are divided by it, as the teacher's were."""
    kl_direction: F.KLDirection | str = "reverse"
    """``"reverse"``: KL(student || teacher), for tokens that the student sampled; ``"forward"``:
    KL(teacher || student), for tokens that the teacher sampled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("kl_direction", self.kl_direction, F.KL_DIRECTIONS)


@loss_output
class DistillationLossOutput(LossTerms, TensorClass["nocast"]):
    """Terms and metrics of :class:`~objectives.DistillationLoss`.

    All are scalars, ``[]``; with ``aggregation="none"`` the term is ``[K]``, one value per
    trained token.
    """

    _documentation = __doc__

    loss_distill: Tensor
    kl_to_teacher: Tensor
    """Mean KL estimate, in nats per token; detached."""
    num_active_tokens: Tensor
    """Trained tokens of this call."""
    num_sequences: Tensor
    """Rows of this call."""


@dataclass(frozen=True, kw_only=True)
class _Arguments(DistillationOptions):
    actor_network: TokenScorer = field(kw_only=False)
    options: DistillationOptions | None = None
    read: DistillationLossKeys | None = None
    allow_empty: bool = False


class DistillationLoss(TokenLoss[DistillationLossKeys, DistillationLossOutput]):
    """KL to a teacher, estimated (k3) on tokens that the student or the teacher sampled.

    For a divergence over the whole vocabulary see
    :func:`~objectives.functional.generalized_jsd`.

    Args:
        actor_network: the student; scores packed tokens.
        options: all options as one record.
        read: names of the batch entries to read.
        allow_empty: a batch without a trained token has loss 0; otherwise it raises.
        **settings: single options by name, such as ``kl_direction=``, ``temperature=``: the fields
            of :class:`~objectives.DistillationOptions`, where each is described.

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

    @takes(_Arguments)
    def __init__(
        self,
        actor_network: TokenScorer,
        *,
        options: DistillationOptions | None = None,
        read: DistillationLossKeys | None = None,
        allow_empty: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(
            actor_network, settings, options=options, read=read, allow_empty=allow_empty
        )

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
