"""Passes over the rows of a step, each of which ends in an optimizer step."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from objectives import MixedLoss, NonFiniteGate, PackedBatch, StepOutcome
from objectives.losses.base import TokenLoss
from torchrl_agents.recipe.optim import build_optimizer, set_learning_rate
from torchrl_agents.settings.schema import TrainingConfig


def whole_output(outputs: Sequence[Any]) -> Any:
    """What the loss gives back of a whole window, from what it gave of its micro-batches."""
    return type(outputs[0]).combine(outputs)


class Updates:
    """A loss, the optimizer, and what guards its steps.

    Args:
        cfg: of the run.
        parameters: are trained.
        loss: of them.
        folder: of the run; gets what was not finite.
        combine: gives the output of a whole pass from those of its micro-batches.
    """

    def __init__(
        self,
        cfg: TrainingConfig,
        parameters: Iterable[Tensor],
        loss: TokenLoss | MixedLoss,
        folder: Path,
        combine: Callable[[Sequence[Any]], Any] = whole_output,
    ) -> None:
        self._cfg = cfg
        self._combine = combine
        self.loss = loss
        self.optimizer = build_optimizer(cfg.optim, parameters)
        self.gate = NonFiniteGate(
            self.optimizer, max_grad_norm=cfg.optim.max_grad_norm, dump_dir=folder / "not_finite"
        )
        self._parts: list[PackedBatch] = []
        self._window: Any = None

    def begin(self, step: int, rows: Any) -> float:
        """Take in what a step trains on, and set its learning rate.

        Args:
            step: its number, from 1.
            rows: what the loss can pack; ``None`` where there is nothing.

        Returns:
            The learning rate.
        """
        self._parts = []
        if rows is not None:
            batch = self.loss.pack(rows)
            self._window = self.loss.measure_window(batch)
            self._parts = list(batch.micro_batches(max_tokens=self._cfg.train.micro_batch_tokens))
        return set_learning_rate(self._cfg.optim, self.optimizer, step, self._cfg.train.num_steps)

    def make(self) -> tuple[Any, StepOutcome]:
        """One pass over the rows, and an optimizer step."""
        outputs = []
        for part in self._parts:
            outputs.append(self.loss(part, window=self._window))
            self.gate.backward(outputs[-1], part)
        return self._combine(outputs), self.gate.step()
