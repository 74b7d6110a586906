"""The loss of a critic: its values come close to the returns that followed.

Shape legend: B rows, K trained tokens of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorClass, TensorDictBase
from torch import Tensor

from objectives import functional as F
from objectives.batching.loss_keys import CriticLossKeys
from objectives.batching.packed_batch import Entries, PackedBatch
from torchrl_data.checks import POSITIVE, check_numbers, one_of
from torchrl_data.value_network import ValueNetwork, check_value_network

from .loss_output import LossTerms, loss_output, make_output
from .token_loss import TokenLoss, takes
from .token_options import TokenOptions
from .window import Window


@dataclass(frozen=True, kw_only=True)
class CriticOptions(TokenOptions):
    """Options of :class:`~objectives.CriticLoss`, checked when they are made.

    Raises:
        ValueError: an option is unknown, out of range, or has no meaning for a critic.

    Example:
        >>> CriticOptions(clip_value=0.2).loss_critic_type
        'smooth_l1'
    """

    loss_critic_type: F.CriticLossType | str = "smooth_l1"
    """``"smooth_l1"``, half the square of an error of at most 1 and linear beyond; ``"l2"``, half
    the square; ``"l1"``."""
    clip_value: float | None = None
    """How far from the old value a step moves a value; see
    :func:`~objectives.functional.value_loss`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("loss_critic_type", self.loss_critic_type, F.CRITIC_LOSS_TYPES)
        check_numbers("", POSITIVE, clip_value=self.clip_value)
        if self.temperature is not None:
            raise ValueError(
                f"temperature={self.temperature} divides logits, and a critic has none."
            )


@loss_output
class CriticLossOutput(LossTerms, TensorClass["nocast"]):
    """The term and metrics of :class:`~objectives.CriticLoss`.

    All are scalars, ``[]``; with ``aggregation="none"`` the term is ``[K]``, one value per trained
    token. Metrics are detached, and means over the trained tokens.
    """

    _documentation = __doc__

    loss_critic: Tensor
    num_active_tokens: Tensor
    """Trained tokens of this call."""
    num_sequences: Tensor
    """Rows of this call."""
    value: Tensor
    """What the critic says."""
    value_target: Tensor
    """What it should have said."""
    squared_error: Tensor
    """Of the one from the other."""
    squared_target: Tensor

    @property
    def explained_variance(self) -> Tensor:
        """The share of the targets' variance that the values explain, ``[]``.

        1 less the mean squared error over the variance: 0 is as good as one number for all tokens,
        1 is perfect; NaN where all targets are the same.
        """
        variance = self.squared_target - self.value_target.square()
        share = 1 - self.squared_error / variance
        return torch.where(variance > 1e-12, share, torch.nan)


@dataclass(frozen=True, kw_only=True)
class _Arguments(CriticOptions):
    critic_network: ValueNetwork = field(kw_only=False)
    options: CriticOptions | None = None
    read: CriticLossKeys | None = None


class CriticLoss(TokenLoss[CriticLossKeys, CriticLossOutput]):
    """The loss of the values that a critic gives before each trained token.

    The batch is ``[B]``, ragged rows or padded ones, as for :class:`~objectives.GRPOLoss`, with the
    targets that :class:`~objectives.GAE` wrote. A token whose target is NaN is not trained. A
    policy and its critic train the same tokens, and may share a packed batch::

        rows = GAE(value_network=critic)(buffer[:])
        packed = loss.pack(rows, also=[critic_loss])
        window, critic_window = loss.measure_window(packed), critic_loss.measure_window(packed)
        for part in packed.micro_batches(max_tokens=8192):
            loss(part, window=window).total().backward()
            critic_loss(part, window=critic_window).total().backward()

    Args:
        critic_network: gives values (:class:`~torchrl_data.ValueNetwork`), such as
            ``TransformersCritic``; its parameters are the loss's when it is a module.
        options: all options as one record.
        read: names of the batch entries to read.
        **settings: single options by name, such as ``clip_value=0.2``: the fields of
            :class:`~objectives.CriticOptions`, where each is described.

    Raises:
        TypeError: the critic gives no values, or settings are of another class.
        ValueError: an option is unknown, out of range, or has no meaning for a critic.

    See Also:
        Schulman et al., 2017, arXiv:1707.06347, equation 9.

    Example:
        >>> from tensordict import lazy_stack
        >>> from torchrl_modules import TransformersCritic, value_model_of
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> critic = TransformersCritic(value_model_of(tiny_qwen3(len(tokenizer))))
        >>> row = TensorDict({("tokens", "full"): torch.tensor([65, 66, 67])})  # [T]
        >>> row["masks", "all_assistant_mask"] = torch.tensor([False, True, True])
        >>> row["value_target"] = torch.tensor([0.0, 1.0, 0.5])[:, None]
        >>> output = CriticLoss(critic)(lazy_stack([row]))  # values are 0: (1/2 + 1/8) / 2
        >>> output.total().shape, output.total().item()
        (torch.Size([]), 0.3125)
    """

    option_type = CriticOptions
    key_type = CriticLossKeys
    output_type = CriticLossOutput
    network_name = "critic_network"
    takes_own_temperature = True

    @takes(_Arguments)
    def __init__(
        self,
        critic_network: ValueNetwork,
        *,
        options: CriticOptions | None = None,
        read: CriticLossKeys | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(critic_network, settings, options=options, read=read, allow_empty=True)

    def _check_network(self, network: object) -> None:
        check_value_network(self._get_name(), network)

    def _entries(self) -> Entries:
        read = {"value_target": self.read.value_target}
        if self.options.clip_value is not None:
            read["state_value"] = self.read.state_value
        return Entries(read, {})

    def forward(
        self, tensordict: TensorDictBase | PackedBatch, *, window: Window | None = None
    ) -> CriticLossOutput:
        """Compute the loss.

        Args:
            tensordict: ``[B]``, ragged or padded, with the entries of ``read``; or packed.
            window: counts of the whole accumulation window; None: this batch is all of it.

        Returns:
            The term and metrics; ``.total()`` is what to call ``backward`` on.

        Raises:
            MissingEntryError: an entry is missing.
            ValueError: entries are not aligned with the tokens, or the batch is not ``[B]``.
        """
        batch, window = self._pack_window(tensordict, window)
        return self.of_values(batch, self._values(batch), window)

    def _values(self, batch: PackedBatch) -> Tensor:
        rows = self._rows_to_read(batch)
        if rows is None:
            return self._no_tokens()
        values = self._network.value_packed(rows.ids, rows.lengths, rows.target_mask)
        return F.at_least_float32(values)

    def of_values(self, batch: PackedBatch, value: Tensor, window: Window) -> CriticLossOutput:
        """The loss of values that are there already.

        Args:
            batch: packed.
            value: what the critic says before each of its trained tokens, ``[K]``.
            window: counts of the whole accumulation window, none of them 0.
        """
        options = self.options
        batch = batch.targets_on(value.device)
        target = batch.entries["value_target"].to(value.dtype)
        fits = target.isfinite()
        target = torch.where(fits, target, value.detach())
        old = None
        if options.clip_value is not None:
            old = batch.entries["state_value"].to(value.dtype)
            old = torch.where(old.isfinite(), old, value.detach())
        loss = F.value_loss(
            value,
            target,
            old,
            clip_value=options.clip_value,
            loss_type=options.loss_critic_type,
        )
        loss, now = loss.masked_fill(~fits, 0.0), value.detach()
        terms = {
            "loss_critic": self._reduce(loss, batch, window),
            "value": F.token_mean(now),
            "value_target": F.token_mean(target),
            "squared_error": F.token_mean((target - now).square()),
            "squared_target": F.token_mean(target.square()),
            "num_active_tokens": now.new_full((), batch.num_targets),
            "num_sequences": now.new_full((), batch.num_rows),
        }
        return make_output(CriticLossOutput, terms)
