"""A baseline of each role, for self-play: its own running mean of the returns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_data.checks import check_numbers
from torchrl_data.missing_entry import MissingEntryError

from .estimators import WHO, AdvantageEstimator, RewardedGroup

Role = tuple[int | str, ...]


class RoleBaseline(AdvantageEstimator):
    """RAE: ``R - b``, b the running mean of the returns of the role that the row was played in.

    The two sides of a game have different chances, so that a baseline for both would praise a
    role. b is what was known before the row: ``b <- decay b + (1 - decay) R`` comes after it.
    Groups play no part: ``MCAdvantage(1, estimator=RoleBaseline())`` trains each row as it comes.
    The baselines are part of ``MCAdvantage``'s ``state_dict``.

    Args:
        by: entries whose values tell the roles apart, an integer or a string each, such as
            ``("game", "player")``.
        decay: of the running mean.

    Raises:
        ValueError: there are no entries, or the decay is not in [0, 1).

    See Also:
        Liu et al., 2025 (SPIRAL), arXiv:2506.24119, section 3.3.
    """

    def __init__(self, *, by: Sequence[NestedKey] = ("agent",), decay: float = 0.95) -> None:
        if isinstance(by, str) or not by:
            raise ValueError(f"RoleBaseline: by takes a tuple of entries, got {by!r}.")
        self.by = tuple(by)
        self._by = [key if isinstance(key, str) else list(key) for key in by]
        self.decay: float = self._checked_change("decay", decay)
        self.baselines: dict[Role, float] = {}
        """Of each role that was met; 0 for one that was not."""

    changeable = frozenset({"decay"})

    def _checked_change(self, name: str, value: Any) -> Any:
        check_numbers("RoleBaseline", "[0, 1)", **{name: value})
        return value

    def advantages(self, groups: Sequence[RewardedGroup]) -> Sequence[Tensor]:
        """See the base class; ``[1, 1]`` each."""
        found = []
        for group in groups:
            for row, value in zip(group.rows, group.returns, strict=True):
                role, gain = tuple(self._value(row, key) for key in self.by), 0.0
                if not math.isnan(value):
                    baseline = self.baselines.get(role, 0.0)
                    self.baselines[role] = self.decay * baseline + (1 - self.decay) * value
                    gain = value - baseline
                found.append(torch.full((1, 1), gain))
        return found

    def _value(self, row: TensorDictBase, key: NestedKey) -> int | str:
        value = row.get(key, None)
        if value is None:
            found = sorted(map(str, row.keys()))
            raise MissingEntryError(
                f"{WHO}: RoleBaseline reads {key!r}, which a row lacks. The row holds {found}. "
                "Write who played it, or name the entries with by=."
            )
        value = getattr(value, "data", value) if not isinstance(value, Tensor) else value
        return value if isinstance(value, str) else int(value)

    def is_flat(self, group: RewardedGroup) -> bool:
        """See the base class; no row needs another one here."""
        return all(map(math.isnan, group.returns))

    def state_dict(self) -> dict[str, Any]:
        """See the base class."""
        baselines = [[list(role), value] for role, value in self.baselines.items()]
        return {"by": self._by, "baselines": baselines}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the base class."""
        if state.get("by") != self._by:
            raise ValueError(
                f"RoleBaseline: the saved baselines are by {state.get('by')}, these by {self._by}. "
                "Resume with the estimator of the saved run."
            )
        self.baselines = {tuple(role): value for role, value in state["baselines"]}
