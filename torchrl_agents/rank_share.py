"""The share of a rank in the rows of a step."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from objectives import PackedBatch, Ranks


@dataclass
class RankShare:
    """The share of a rank in the rows of a step: its micro-batches.

    Args:
        parts: as many on every rank.
        window: counts of the tokens and rows of all of them, by which a loss is divided.
        model: adds the gradients of all ranks up.
        reduces_once: it does so after the last micro-batch alone, or else after each.
        ranks: of the run.
        agents: of agents with weights of their own, whose rows each part has. Each rank has the
            models of all whole, and gradients are added up after the last part.
    """

    parts: Sequence[PackedBatch]
    window: Any
    model: nn.Module
    reduces_once: bool
    ranks: Ranks
    agents: Sequence[str] = ()

    def micro_batches(self) -> Iterable[PackedBatch]:
        """Each of them, one after the other; forward and backward come before the next one."""
        if self.agents:
            return self._of_agents()
        return self.ranks.reduced_once(self.model, self.parts) if self.reduces_once else self.parts

    def _of_agents(self) -> Iterator[PackedBatch]:
        """A rank may have no row of an agent, whose model makes no pass there."""
        yield from self.parts
        trained = (each for each in self.model.parameters() if each.requires_grad)
        self.ranks.average_gradients(trained)
