"""Units of rows that are learnt from together, in the steps of a run: the rows of a pair, say."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase, lazy_stack

from collectors import LLMCollector

from .given_conversations import GivenRows

Unit = Sequence[TensorDictBase]
"""Rows that are in one step: the two of a pair, or an answer and its prompt with another one."""


class GivenUnits(GivenRows):
    """Units of a step, in an order that follows from the seed.

    So it is known before training which rows it will need.

    Args:
        collector: of the policy that is tested; ``None`` where none samples.
        units: to train on.
        batch_size: so many in each step.
        seed: of the order.
    """

    def __init__(
        self, collector: LLMCollector | None, units: Sequence[Unit], batch_size: int, seed: int
    ) -> None:
        super().__init__(collector, units, batch_size)
        self._seed, self._num_epochs = seed, 0

    def first_units(self, num_steps: int) -> list[Unit]:
        """Give the units that the first steps draw, each once, in their order."""
        num_drawn = min(num_steps * self._batch_size, len(self._units))
        return [self._units[place] for place in self._order_of(0)[:num_drawn]]

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch is."""
        return super().state_dict() | {"num_epochs": self._num_epochs}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on in the middle of an epoch.

        Raises:
            ValueError: there are other rows.
        """
        super().load_state_dict(state_dict)
        self._num_epochs = state_dict["num_epochs"]

    def _next_epoch(self) -> list[int]:
        self._num_epochs += 1
        return self._order_of(self._num_epochs - 1)

    def _order_of(self, epoch: int) -> list[int]:
        order = [*range(len(self._units))]
        random.Random(f"{self._seed} {epoch}").shuffle(order)
        return order


def stacked(units: Sequence[Unit]) -> TensorDictBase:
    """The rows of some units, one after the other."""
    return lazy_stack([row for unit in units for row in unit])
