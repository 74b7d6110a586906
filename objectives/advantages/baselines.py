"""Baselines in the place of a group's mean, for one rollout a prompt.

Shape legend: B rows that are released at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

import torch
from torch import Tensor

from objectives import functional as F
from torchrl_data import keys
from torchrl_data.batched_object import read_objects
from torchrl_data.checks import check_numbers, one_of

from .estimators import AdvantageEstimator, RewardedGroup

_SCALES: Final = ("batch", "none")


@dataclass(frozen=True, kw_only=True)
class BatchMean(AdvantageEstimator):
    """``(R - mean of the batch) / (std of the batch + 1e-4)``: all prompts have one baseline.

    Groups play no part: ``MCAdvantage(1, estimator="batch_mean")`` takes one rollout a prompt. The
    batch is all rows that go into the buffer at once; one row alone has advantage 0.

    Args:
        scale: the (Bessel-corrected) standard deviation of the ``"batch"``, or ``"none"``.

    Raises:
        ValueError: the scale is unknown.

    See Also:
        Hu, 2025 (REINFORCE++), arXiv:2501.03262.
    """

    scale: str = "batch"

    def __post_init__(self) -> None:
        one_of("BatchMean: scale", self.scale, _SCALES)

    def _estimate(self, returns: Tensor, index: Tensor, groups: Sequence[RewardedGroup]) -> Tensor:
        del groups
        one_group = torch.zeros_like(index)
        scale = "group" if self.scale == "batch" else "none"
        return F.group_advantage(returns, one_group, scale=scale)

    def is_flat(self, group: RewardedGroup) -> bool:
        """See the base class; no row needs another one of its group here."""
        return all(map(math.isnan, group.returns))


class SourceMean(AdvantageEstimator):
    """``R - b``, b the running mean of the returns of the prompt's source.

    A source is what a column of the data says, the task of several, say; rows without the column
    share one baseline. b is what the batches before say: after each batch it becomes ``decay b +
    (1 - decay) m``, with m the mean of the batch's returns of that source, whatever their order. A
    source that is new has m as its first b. Groups play no part: ``MCAdvantage(1,
    estimator="running_mean")`` takes one rollout a prompt. The baselines are part of
    ``MCAdvantage``'s ``state_dict``.

    Args:
        column: of the rows of the data.
        decay: of the running mean.

    Raises:
        ValueError: the decay is not in [0, 1).
    """

    def __init__(self, *, column: str = "environment", decay: float = 0.9) -> None:
        self.column = column
        self.decay: float = self._checked_change("decay", decay)
        self.baselines: dict[str, float] = {}
        """Of each source that was met."""

    changeable = frozenset({"decay"})

    def _checked_change(self, name: str, value: Any) -> Any:
        check_numbers("SourceMean", "[0, 1)", **{name: value})
        return value

    def advantages(self, groups: Sequence[RewardedGroup]) -> Sequence[Tensor]:
        """See the base class; ``[1, 1]`` each."""
        rows = [row for group in groups for row in group.rows]
        returns = [value for group in groups for value in group.returns]
        sources = [str((read_objects(row, keys.ROW)[0] or {}).get(self.column, "")) for row in rows]
        by_source: dict[str, list[float]] = {}
        for source, value in zip(sources, returns, strict=True):
            if not math.isnan(value):
                by_source.setdefault(source, []).append(value)
        means = {source: fmean(values) for source, values in by_source.items()}
        before = means | self.baselines
        for source, mean in means.items():
            self.baselines[source] = self.decay * before[source] + (1 - self.decay) * mean
        gains = [
            0.0 if math.isnan(value) else value - before[source]
            for source, value in zip(sources, returns, strict=True)
        ]
        return [torch.full((1, 1), gain) for gain in gains]

    def is_flat(self, group: RewardedGroup) -> bool:
        """See the base class; no row needs another one of its group here."""
        return all(map(math.isnan, group.returns))

    def state_dict(self) -> dict[str, Any]:
        """See the base class."""
        return {"column": self.column, "baselines": dict(self.baselines)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the base class."""
        if state.get("column") != self.column:
            raise ValueError(
                f"SourceMean: the saved baselines are by {state.get('column')}, these by "
                f"{self.column}. Resume with the estimator of the saved run."
            )
        self.baselines = dict(state["baselines"])
