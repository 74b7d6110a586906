"""Advantages of every token, from the values of a critic.

Shape legend: B rows, T tokens of a row (ragged), N tokens of all of them.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from objectives import functional as F
from torchrl_data import keys
from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import check_numbers
from torchrl_data.missing_entry import missing_entry
from torchrl_data.ragged.packed import Rows, read_rows, set_rows

_SMALLEST_STD: Final = 1e-4
"""What advantages are divided by at least."""


class GAE(ChecksAttributes, TensorDictModuleBase):
    r"""Generalised advantage estimation: an advantage for each sampled token, by a critic's values.

    With :math:`t'` for the token that is sampled after :math:`t`,
    :math:`A_t = \delta_t + \gamma \lambda A_{t'}` and
    :math:`\delta_t = r_t + \gamma V_{t'} - V_t`. The reward of a row counts at its last sampled
    token; of dense rewards each at its own, or at the sampled token before it. What tools and users
    say is no step, and an episode that a limit cut ends there: its reward says what that is worth.

    A row without a finite reward has advantage 0, and no target for the critic (NaN).

    Args:
        gamma: discount of a sampled token.
        lmbda: of the advantages: 1 for the whole return less the value, 0 for one step.
        value_network: called first, without gradient, to write ``value_key``; not needed where the
            rows have it.
        value_lmbda: of the critic's targets, where it is another one; 1 for the whole returns,
            which do not depend on a critic that knows little yet.
        average_gae: bring the advantages of a batch to mean 0 and standard deviation 1.
        reward_key: ``[1, 1]``, or dense ``[T, 1]``.
        scorable_key: bool; False where no reward could be given. Optional in the rows.
        assistant_mask_key: bool ``[T]``: the sampled tokens.
        value_key: ``[T, 1]``, what the critic says.
        advantage_key: what is written, ``[T, 1]``.
        value_target_key: what is written, ``[T, 1]``, for :class:`~objectives.CriticLoss`.

    Raises:
        ValueError: a number lies outside [0, 1].

    See Also:
        Schulman et al., 2015, arXiv:1506.02438, equation 16; Yuan et al., 2025 (VC-PPO),
        arXiv:2503.01491, section 3.2, for two values of lambda.

    Example:
        >>> from tensordict import lazy_stack
        >>> row = TensorDict({"reward": torch.tensor([[1.0]])})
        >>> row["masks", "all_assistant_mask"] = torch.tensor([False, True, True])
        >>> row["state_value"] = torch.tensor([0.0, 0.5, 0.75])[:, None]
        >>> rows = GAE(gamma=1.0, lmbda=1.0)(lazy_stack([row]))
        >>> rows["advantage"].flatten(), rows["value_target"].flatten()
        (tensor([0.0000, 0.5000, 0.2500]), tensor([0., 1., 1.]))
    """

    def __init__(
        self,
        *,
        gamma: float = 1.0,
        lmbda: float = 0.95,
        value_network: nn.Module | None = None,
        value_lmbda: float | None = None,
        average_gae: bool = False,
        reward_key: NestedKey = keys.REWARD,
        scorable_key: NestedKey = keys.SCORABLE,
        assistant_mask_key: NestedKey = keys.ASSISTANT_MASK,
        value_key: NestedKey = keys.STATE_VALUE,
        advantage_key: NestedKey = keys.ADVANTAGE,
        value_target_key: NestedKey = keys.VALUE_TARGET,
    ) -> None:
        super().__init__()
        self.gamma: float = self._checked_change("gamma", gamma)
        self.lmbda: float = self._checked_change("lmbda", lmbda)
        self.value_lmbda: float | None = self._checked_change("value_lmbda", value_lmbda)
        self.average_gae: bool = average_gae
        self.value_network = value_network
        self.reward_key = reward_key
        self.scorable_key = scorable_key
        self.assistant_mask_key = assistant_mask_key
        self.value_key = value_key
        self.advantage_key = advantage_key
        self.value_target_key = value_target_key
        values = [value_key] if value_network is None else getattr(value_network, "in_keys", [])
        read = [reward_key, assistant_mask_key, *values]
        self.in_keys: list[NestedKey] = list(dict.fromkeys(read))  # pyright: ignore[reportIncompatibleVariableOverride]
        self.out_keys: list[NestedKey] = [advantage_key, value_target_key]  # pyright: ignore[reportIncompatibleVariableOverride]

    changeable = frozenset({"gamma", "lmbda", "value_lmbda", "average_gae"})

    def _checked_change(self, name: str, value: Any) -> Any:
        if name != "average_gae":
            check_numbers("GAE", "[0, 1]", **{name: value})
        return value

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write advantages and targets.

        Args:
            tensordict: ``[B]`` rows, ragged or padded, with a reward, the assistant mask and the
                values, or what ``value_network`` reads.

        Returns:
            The same TensorDict.

        Raises:
            MissingEntryError: an entry is missing.
            ValueError: it is not ``[B]``; entries are not aligned; or rewards are dense in an
                episode of several rows.
        """
        if tensordict.ndim != 1:
            raise ValueError(
                f"GAE takes a batch [B] of one row per trajectory, found batch size "
                f"{tuple(tensordict.batch_size)}. Flatten it, or add a dimension to a single row."
            )
        if self.value_network is not None:
            self.value_network(tensordict)
        masks = self._read(tensordict, self.assistant_mask_key)
        mask, lengths = masks.values.bool(), masks.lengths
        values = self._read(tensordict, self.value_key)
        self._check_aligned(values, lengths, self.value_key)
        value = F.at_least_float32(values.values.to(mask.device))
        reward, valid = self._rewards(tensordict, mask, lengths)
        valid &= _all_of(value.isfinite() | ~mask, lengths)
        fits = valid.repeat_interleave(lengths.to(mask.device))
        trained = mask & fits
        value, reward = value.masked_fill(~trained, 0.0), reward.masked_fill(~fits, 0.0)
        common: dict[str, Any] = {"lengths": lengths.to(mask.device), "gamma": self.gamma}
        advantage = F.generalized_advantage(reward, value, trained, lmbda=self.lmbda, **common)
        if self.value_lmbda in (None, self.lmbda):
            target = advantage + value
        else:
            lmbda = self.value_lmbda
            target = F.generalized_advantage(reward, value, trained, lmbda=lmbda, **common) + value
        if self.average_gae and bool(trained.any()):
            own = advantage[trained]
            spread = own.std() if len(own) > 1 else own.new_ones(())
            advantage = (advantage - own.mean()) / spread.clamp(min=_SMALLEST_STD)
            advantage = advantage.masked_fill(~trained, 0.0)
        target = target.masked_fill(mask & ~trained, torch.nan)
        sizes = lengths.tolist()
        for key, found in ((self.advantage_key, advantage), (self.value_target_key, target)):
            set_rows(tensordict, key, found.float().unsqueeze(-1).split(sizes))
        return tensordict

    def _read(self, batch: TensorDictBase, key: NestedKey) -> Rows:
        rows = read_rows(batch, key)
        if rows is None:
            remedy = ""
            if key == self.value_key:
                remedy = "Give GAE the critic, value_network=, or call the critic on the rows."
            raise missing_entry(batch, key, "GAE", remedy=remedy)
        return rows

    def _check_aligned(self, rows: Rows, lengths: Tensor, key: NestedKey) -> None:
        wrong = (rows.lengths != lengths).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(
                f"GAE: {key!r} has {int(rows.lengths[row])} values in row {row}, whose "
                f"{self.assistant_mask_key!r} has {int(lengths[row])}. They must be aligned."
            )

    def _rewards(
        self, batch: TensorDictBase, mask: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The reward given at each token, ``[N]``; and which rows have a finite one, ``[B]``."""
        given = self._read(batch, self.reward_key)
        single = given.lengths == 1
        dense = Rows(given.values, torch.where(single, lengths, given.lengths))
        self._check_aligned(dense, lengths, self.reward_key)
        rows = batch.unbind(0)
        several = torch.tensor([int(row.get(keys.NUM_SEGMENTS, 1)) > 1 for row in rows])
        if bool((several & ~single).any()):
            raise ValueError(
                f"GAE: {self.reward_key!r} is dense in an episode of several rows, of which each "
                "has the rewards of its own tokens and not of what came of them. Give one reward "
                "for the episode, or take MCAdvantage(credit='turn')."
            )
        # A single one stands at the end of its row, and so belongs to the last sampled token.
        rewards = given.values.to(mask.device, torch.float32)
        found, is_single = torch.zeros(len(mask), device=mask.device), single.to(mask.device)
        own, due = (n.to(mask.device) for n in (given.lengths, lengths))
        found[~is_single.repeat_interleave(due)] = rewards[~is_single.repeat_interleave(own)]
        ends = is_single & (due > 0)
        found[due.cumsum(0)[ends] - 1] = rewards[own.cumsum(0)[ends] - 1]
        finite = _all_of(rewards.isfinite(), given.lengths)
        scorable = [row.get(self.scorable_key, None) for row in rows]
        told = [flag is None or bool(flag.all()) for flag in scorable]
        return found, finite & torch.tensor(told, device=mask.device)


def _all_of(flag: Tensor, lengths: Tensor) -> Tensor:
    """Rows whose values are all True, bool ``[B]``."""
    return torch.stack([part.all() for part in flag.split(lengths.tolist())])
