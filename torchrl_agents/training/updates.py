"""Passes over the rows of a step, each of which ends in an optimizer step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from collectors import ShardedModel, ShardedOptimizer
from collectors.resume.run_state import Stateful
from collectors.resume.sharded_parts import Sharded
from objectives import MixedLoss, NonFiniteGate, PackedBatch, Ranks, StepOutcome
from objectives.losses.base import TokenLoss
from torchrl_agents.recipe.adapters import frozen_weights, is_adapted
from torchrl_agents.recipe.optim import build_optimizer, set_learning_rate
from torchrl_agents.settings.schema import TrainingConfig
from torchrl_modules import TransformersWrapper

from .crew import Crew


class Combine(Protocol):
    """Gives the output of a whole pass from those of its micro-batches."""

    def __call__(self, outputs: Sequence[Any], *, ranks: Ranks | None = None) -> Any:
        """See :meth:`GRPOLossOutput.combine`."""
        ...


def whole_output(outputs: Sequence[Any], *, ranks: Ranks | None = None) -> Any:
    """What the loss gives back of a whole window, from what it gave of its micro-batches."""
    return type(outputs[0]).combine(outputs, ranks=ranks)


class Updates:
    """A loss, the optimizer, and what guards its steps; every rank has one of its own.

    Args:
        cfg: of the run.
        actor: is trained, but for what is frozen of it.
        loss: of it.
        folder: of the run; gets what was not finite.
        crew: the ranks that train together.
        combine: gives the output of a whole pass from those of its micro-batches.
    """

    def __init__(
        self,
        cfg: TrainingConfig,
        actor: TransformersWrapper,
        loss: TokenLoss | MixedLoss,
        folder: Path,
        crew: Crew,
        combine: Combine = whole_output,
    ) -> None:
        self._cfg = cfg
        self.crew = crew
        """The ranks that train."""
        self._ranks = crew.ranks
        self._combine = combine
        self.loss = loss
        trained = [parameter for parameter in actor.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(cfg.optim, trained)
        self.gate = NonFiniteGate(
            self.optimizer,
            max_grad_norm=cfg.optim.max_grad_norm,
            dump_dir=folder / "not_finite",
            ranks=crew.ranks,
        )
        self._parts: list[PackedBatch] = []
        self._window: Any = None
        # Of adapters these alone are saved where the rest can be loaded again.
        is_given = is_adapted(actor.model) and cfg.policy.model is not None
        self.identity = {"weights of policy.model": frozen_weights(actor.model)} if is_given else {}
        """What a checkpoint has to have in common with this run."""
        self.parts: dict[str, Stateful | Sharded] = {
            "model": ShardedModel(actor.model, trained_only=is_given),
            "optimizer": ShardedOptimizer(actor.model, self.optimizer),
            "gate": self.gate,
        }
        """What is saved."""
        crew.learn_job("take in", self._take_in)
        crew.learn_job("make", self._make)

    @property
    def sharded(self) -> dict[str, Sharded]:
        """The parts of which each rank has a share."""
        return {name: part for name, part in self.parts.items() if isinstance(part, Sharded)}

    def begin(self, step: int, rows: Any) -> float:
        """Take in what a step trains on, and set its learning rate; rank 0 calls it.

        Args:
            step: its number, from 1.
            rows: what the loss can pack; ``None`` where there is nothing.

        Returns:
            The learning rate.
        """
        rate = self._set_rate(step)
        if rows is not None:
            batch = self.loss.pack(rows)
            self.crew.tell("take in", step)
            self._take_in(step, batch)
        return rate

    def make(self) -> tuple[Any, StepOutcome]:
        """One pass over the rows, and an optimizer step; rank 0 calls it."""
        return self.crew.do("make")

    def _set_rate(self, step: int) -> float:
        return set_learning_rate(self._cfg.optim, self.optimizer, step, self._cfg.train.num_steps)

    def _take_in(self, step: int, batch: PackedBatch | None = None) -> None:
        """Every rank gets its share of the rows, as many micro-batches as the others."""
        self._set_rate(step)
        self._parts = self._ranks.scatter(batch, max_tokens=self._cfg.train.micro_batch_tokens)
        self._window = self.loss.measure_window(self._parts, ranks=self._ranks)

    def _make(self) -> tuple[Any, StepOutcome]:
        outputs = []
        for part in self._parts:
            outputs.append(self.loss(part, window=self._window))
            self.gate.backward(outputs[-1], part)
        return self._combine(outputs, ranks=self._ranks), self.gate.step()
