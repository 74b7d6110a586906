"""Tests of what is held out: before training, after it, and every so many steps."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from tensordict import TensorDictBase

from collectors import Estimate, EvaluationPoint

from .settings.schema import TrainingConfig


class HeldOut(ABC):
    """Tests what is held out, and keeps the points until somebody takes them.

    Args:
        cfg: how often.
    """

    score_name: ClassVar[str]
    """The score by which a run is judged; :meth:`score` gives it."""
    labels: ClassVar[tuple[str, str]]
    """What the learning curve calls that score of a step, and of a test."""

    def __init__(self, cfg: TrainingConfig) -> None:
        self.cfg = cfg
        self.points: list[EvaluationPoint] = []
        """Those that are over, and were not given yet."""
        self.latest: EvaluationPoint | None = None

    def now(self, step: int) -> TensorDictBase:
        """Test, and wait for it; what was tested at this very step is given again."""
        if self.latest is not None and self.latest.step == step:
            assert self.latest.trajectories is not None
            return self.latest.trajectories
        version, rows = self._test(step)
        self.latest = EvaluationPoint(step, version, rows)
        self.points.append(self.latest)
        return rows

    @abstractmethod
    def _test(self, step: int) -> tuple[int, TensorDictBase]:
        """Return the version of the weights, and a row of each thing that is tested."""

    def after(self, step: int) -> None:
        """A step is over: begin a point if it is time."""
        every = self.cfg.evaluate.every
        if every is not None and step % every == 0 and step != self.cfg.train.num_steps:
            self._begin(step)

    def _begin(self, step: int) -> None:
        self.now(step)

    def take(self) -> list[EvaluationPoint]:
        """The points that are over, as they ended; given once."""
        points, self.points = self.points, []
        return points

    @abstractmethod
    def score(self, rows: TensorDictBase) -> tuple[dict[str, float], dict[str, Estimate]]:
        """Return what the rows of a test say, and those scores of it that have an interval."""

    @abstractmethod
    def caption(self, estimates: Mapping[str, Estimate]) -> str:
        """Return what stands below a table of such estimates: of how many there are what."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what a resumed run has to have in common with the run that was saved."""

    @abstractmethod
    def show(self, tests: Mapping[str, TensorDictBase | None]) -> None:
        """Show some of what was tested on the console.

        Args:
            tests: their rows, by title.
        """

    def sampled(self, rows: TensorDictBase) -> TensorDictBase | None:
        """Return the rollouts of a test, for the tables of trackers; ``None`` without any."""
        del rows
        return None
