"""Reading the reward of one row.

Shape legend: T tokens of a row.
"""

import math
from typing import Final, Literal

from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_data.errors import MissingEntryError

TrajectoryReturn = Literal["sum", "mean", "max"]
TRAJECTORY_RETURNS: Final[tuple[TrajectoryReturn, ...]] = ("sum", "mean", "max")


def read_entry(row: TensorDictBase, key: NestedKey, who: str) -> Tensor:
    """An entry that every row must have."""
    value = row.get(key, None)
    if value is None:
        found = sorted(map(str, row.keys(include_nested=True, leaves_only=True)))
        raise MissingEntryError(
            f"{who} reads {key!r}, which a row lacks. The row holds {found}. "
            "Run the step that writes the entry first, or rename it."
        )
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{who} reads {key!r} as a tensor, found {type(value).__name__}. (Groups go by an "
            "integer id, never by text: have the data loader write 'group_id'.)"
        )
    return value


def read_group(row: TensorDictBase, key: NestedKey, who: str) -> int:
    """The group's id of a row."""
    return int(read_entry(row, key, who))


def read_sources(row: TensorDictBase, key: NestedKey, who: str) -> dict[str, float]:
    """The rewards of a row by source."""
    group = row.get(key, None)
    if not isinstance(group, TensorDictBase) or group.is_empty():
        raise MissingEntryError(
            f"{who} reads the rewards by source at {key!r}, which a row lacks. "
            "Reward transforms write them; or rename the entry."
        )
    table = {str(name): value for name, value in group.items()}
    for name, value in table.items():
        if value.numel() != 1:
            raise ValueError(
                f"{who}: the reward source {name!r} has {value.numel()} values in a row; it needs "
                "one. (A dense reward has no advantage by source.)"
            )
    return {name: float(value) for name, value in table.items()}


def trajectory_return(reward: Tensor, scorable: Tensor | None, how: TrajectoryReturn) -> float:
    """One number for a row; NaN where it could not be scored, or is not finite."""
    if scorable is not None and not bool(scorable.all()):
        return math.nan
    if reward.numel() == 1:
        value = float(reward)
    else:
        value = float({"sum": Tensor.sum, "mean": Tensor.mean, "max": Tensor.amax}[how](reward))
    return value if math.isfinite(value) else math.nan
