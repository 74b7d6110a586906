"""The loss of a reward model: of two answers to a prompt the better one has the larger reward.

Shape legend: B rows, two of each pair; P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorClass, TensorDictBase
from torch import Tensor

from objectives import functional as F
from objectives.batching.loss_keys import RewardModelLossKeys
from objectives.batching.packed_batch import Entries, PackedBatch
from torchrl_data.value_network import RewardNetwork, check_reward_network

from .loss_output import LossTerms, loss_output, make_output
from .pair_loss import PairLoss, pair_accuracy, pairs_of
from .reward_model_options import RewardModelOptions
from .token_loss import takes
from .window import Window


@loss_output
class RewardModelLossOutput(LossTerms, TensorClass["nocast"]):
    """Terms and metrics of :class:`~objectives.RewardModelLoss`.

    All are scalars, ``[]``. Metrics are detached, and means over the pairs.
    """

    _documentation = __doc__
    weighted_by = "num_pairs"

    loss_reward: Tensor
    num_active_tokens: Tensor
    """Tokens of the answers of this call."""
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
    loss_center: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class _Arguments(RewardModelOptions):
    reward_network: RewardNetwork = field(kw_only=False)
    options: RewardModelOptions | None = None
    read: RewardModelLossKeys | None = None
    allow_empty: bool = False


class RewardModelLoss(PairLoss[RewardModelLossKeys, RewardModelLossOutput]):
    r"""Train a reward model by pairs of answers, as the model of Bradley and Terry has it.

    It is the mean over pairs of :math:`-\log\sigma(r_c - r_r)`, where :math:`r_c` and :math:`r_r`
    are the rewards of the conversation with the better answer and of the one with the other. The
    reward of a conversation is the value after its last token, as Transformers' sequence
    classification gives it, and so :class:`~torchrl_envs.RewardModel`.

    The batch is ``[B]``, two rows for each pair, as for :class:`~objectives.DPOLoss`; what both
    begin with is read once, and micro-batches hold whole pairs. Rows may have a ``margin`` of their
    pair, by which the better answer has to lead in addition to the option ``margin``::

        model = TransformersCritic.of_policy(policy, random_head=True)
        rows = lazy_stack(preference_rows(policy.encoder, pairs))
        loss = RewardModelLoss(model, center_coeff=0.01)(rows).total()

    Args:
        reward_network: gives rewards (:class:`~torchrl_data.RewardNetwork`), such as
            ``TransformersCritic``; its parameters are the loss's when it is a module.
        options: all options as one record.
        read: names of the batch entries to read.
        allow_empty: a batch without a row has loss 0; otherwise it raises.
        **settings: single options by name, such as ``margin=1.0``: the fields of
            :class:`~objectives.RewardModelOptions`, where each is described.

    Raises:
        TypeError: the network gives no rewards.
        ValueError: an option is unknown or out of range.

    See Also:
        Ouyang et al., 2022, arXiv:2203.02155, equation 1; Touvron et al., 2023, arXiv:2307.09288,
        equation 2, for the margin; Eisenstein et al., 2023, arXiv:2312.09244, for rewards around 0.

    Example:
        >>> from tensordict import lazy_stack
        >>> from torchrl_data import ConversationEncoder, preference_rows
        >>> from torchrl_modules import TransformersCritic, value_model_of
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> critic = TransformersCritic(value_model_of(tiny_qwen3(len(tokenizer))))
        >>> pair = {"prompt": "2 + 2?", "chosen": "4", "rejected": "five"}
        >>> rows = lazy_stack(preference_rows(ConversationEncoder(tokenizer), [pair]))
        >>> output = RewardModelLoss(critic)(rows)  # rewards are 0: log 2
        >>> round(output.total().item(), 3), output.accuracy.item()
        (0.693, 0.5)
    """

    option_type = RewardModelOptions
    key_type = RewardModelLossKeys
    output_type = RewardModelLossOutput
    network_name = "reward_network"
    takes_own_temperature = True

    @takes(_Arguments)
    def __init__(
        self,
        reward_network: RewardNetwork,
        *,
        options: RewardModelOptions | None = None,
        read: RewardModelLossKeys | None = None,
        allow_empty: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(
            reward_network, settings, options=options, read=read, allow_empty=allow_empty
        )

    def _check_network(self, network: object) -> None:
        check_reward_network(self._get_name(), network)

    def _entries(self) -> Entries:
        return self._pair_entries()._replace(optional={"margin": self.read.margin})

    def forward(
        self, tensordict: TensorDictBase | PackedBatch, *, window: Window | None = None
    ) -> RewardModelLossOutput:
        """Compute the loss.

        Args:
            tensordict: ``[B]``, ragged or padded, with the entries of ``read``; or packed.
            window: counts of the whole accumulation window; None: this batch is all of it.

        Returns:
            Terms and metrics; ``.total()`` is what to call ``backward`` on.

        Raises:
            MissingEntryError: an entry is missing.
            ValueError: rows are no pairs, entries are not aligned with the tokens, or the batch is
                not ``[B]``.
        """
        batch, window = self._pack_window(tensordict, window)
        return self.of_rewards(batch, self._rewards(batch), window)

    def _rewards(self, batch: PackedBatch) -> Tensor:
        rows = self._rows_to_read(batch)  # all of them: none is without a trained token
        if rows is None:
            return self._no_tokens()
        return F.at_least_float32(self._network.reward_packed(rows.ids, rows.lengths))

    def of_rewards(
        self, batch: PackedBatch, rewards: Tensor, window: Window
    ) -> RewardModelLossOutput:
        """The loss of rewards that are there already.

        Args:
            batch: packed.
            rewards: of its rows, ``[B]``.
            window: counts of the whole accumulation window, none of them 0.
        """
        options, (chosen, rejected) = self.options, pairs_of(rewards)
        per_pair = F.preference_loss(
            chosen - margins_of(batch, chosen),
            rejected,
            beta=1.0,
            label_smoothing=options.label_smoothing,
            margin=options.margin,
        )
        num_pairs = max(len(chosen), 1)
        terms = {
            "loss_reward": 2 * per_pair.sum() / window.num_sequences,
            "accuracy": pair_accuracy(chosen, rejected),
            "chosen_reward": chosen.detach().sum() / num_pairs,
            "rejected_reward": rejected.detach().sum() / num_pairs,
            "num_active_tokens": rewards.new_full((), batch.num_targets).detach(),
            "num_sequences": rewards.new_full((), batch.num_rows).detach(),
            "num_pairs": rewards.new_full((), len(chosen)).detach(),
        }
        if options.center_coeff:
            square = (chosen + rejected).square().sum()
            terms["loss_center"] = options.center_coeff * 2 * square / window.num_sequences
        return make_output(RewardModelLossOutput, terms)


def margins_of(batch: PackedBatch, like: Tensor) -> Tensor:
    """By how much each pair of a batch says that the better answer has to lead, ``[P]``; or 0."""
    if "margin" not in batch.entries or not len(like):
        return torch.zeros_like(like)
    return pairs_of(batch.row_entry("margin"))[0].to(like)
