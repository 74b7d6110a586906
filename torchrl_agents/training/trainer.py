"""What a recipe trains, and how one of its steps is made: in parts, so that it can be stopped."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer

from collectors import PhaseTimer, RunState, StepMetrics, identity_of
from collectors.base import BackgroundCollector
from collectors.resume.run_state import Stateful
from torchrl_agents.recipe.adapters import is_adapted
from torchrl_agents.recipe.collection import AnyCollector, collection_metrics
from torchrl_agents.recipe.results import StepRecord
from torchrl_agents.recipe.run_folder import Run
from torchrl_agents.recipe.stop import StopRequested, StopSignals
from torchrl_agents.resume.checkpoints import Checkpoints
from torchrl_agents.resume.earlier_run import CHECKPOINTS
from torchrl_agents.settings.schema import TrainingConfig
from torchrl_data.keys import ADVANTAGE
from torchrl_modules import LLMWrapperBase, TransformersWrapper
from torchrl_modules.engines.transformers_engine import TransformersEngine

from .crew import Crew
from .parallel import tell_of_weights, whole_actor, whole_weights
from .shared_store import SharedStore
from .updates import Updates


@dataclass
class Step:
    """A step that is under way."""

    number: int
    """From 1."""
    trajectories: TensorDictBase | None
    """As collected; ``None`` where nothing was."""
    trained: TensorDictBase | None
    """What is trained of it; ``None`` where that is nothing."""
    metrics: StepMetrics
    num_epochs: int = 0
    """Passes over what is trained that were made."""

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to go on inside of it."""
        return vars(self) | {"metrics": self.metrics.state_dict()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], timer: PhaseTimer) -> "Step":
        """The step of which :meth:`state` was kept."""
        metrics = StepMetrics(timer)
        metrics.load_state_dict(state["metrics"])
        return cls(**{**state, "metrics": metrics})


class Data(Protocol):
    """Where the rows of a step come from."""

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """What is saved of it."""
        ...

    def draw(self, metrics: StepMetrics) -> tuple[TensorDictBase | None, TensorDictBase | None]:
        """Rows of the next step: all of them, and those that are trained."""
        ...

    def push(self, model: Any) -> None:
        """The model has new weights."""
        ...

    def metrics(self) -> dict[str, float]:
        """What the drawing was like."""
        ...


class Rollouts:
    """Rows that the policy samples; a buffer's transform says which of them are trained.

    Args:
        collector: fills the buffer.
        buffer: of the rows that are trained; emptied in each step.
    """

    def __init__(self, collector: AnyCollector, buffer: ReplayBuffer) -> None:
        self._collector = collector
        self._buffer = buffer

    @property
    def parts(self) -> dict[str, Stateful]:
        """The collector, whose data and counters go on."""
        return {"collector": self._collector}  # type: ignore[dict-item]

    def draw(self, metrics: StepMetrics) -> tuple[TensorDictBase, TensorDictBase | None]:
        """Collect; nothing is trained where no group has a signal."""
        try:
            trajectories = metrics.add_rollouts(self._collector.collect())
            trained = self._buffer[:] if len(self._buffer) else None
            self._buffer.empty()
        except StopRequested:
            if isinstance(self._collector, BackgroundCollector):
                self._collector.give_up_batch()
            raise
        return trajectories, trained

    def push(self, model: Any) -> None:
        """Hand the weights to the policy."""
        self._collector.update_policy_weights_(model)

    def metrics(self) -> dict[str, float]:
        """Of a collection beside training."""
        return collection_metrics(self._collector)


@dataclass(kw_only=True)
class Trainer:
    """Makes the steps of a run, and saves it.

    A step is drawn, then trained in passes; between two of them a run can be stopped, and goes on
    there.
    """

    cfg: TrainingConfig
    run: Run
    actor: TransformersWrapper
    """Is trained."""
    policy: LLMWrapperBase
    """Samples with its weights."""
    updates: Updates
    """Make the passes."""
    data: Data
    """Gives the rows."""
    num_epochs: int = 1
    """Passes over the rows of a step."""
    measure: Callable[[Step], Mapping[str, float]] = lambda _: {}
    """Further metrics, of a step that is over."""
    parts: Mapping[str, Stateful] = field(default_factory=dict)
    """What else is saved, by name."""

    def __post_init__(self) -> None:
        self.timer = PhaseTimer()
        self.timer.watch(self.policy, "generate")
        inside = cast("TransformersEngine", self.actor.engine).inside
        state = RunState(
            identity=identity_of(self.policy, inside) | self.updates.identity,
            **self.updates.parts,
            **self.parts,
            **self.data.parts,
        )
        cfg = self.cfg.checkpoint
        store = SharedStore(self.run.folder / CHECKPOINTS, cfg, self.crew)
        self.checkpoints = Checkpoints(cfg, store, state)

    @property
    def crew(self) -> Crew:
        """The ranks that train."""
        return self.updates.crew

    def push(self) -> None:
        """Hand the weights to the policy."""
        tell_of_weights(self.crew)
        self.data.push(self.actor.model)

    def whole_actor(self) -> TransformersWrapper:
        """The actor over a model that can be saved, see :func:`.parallel.whole_actor`."""
        return whole_actor(self.crew, self.cfg, self.actor)

    def whole_weights(self) -> Mapping[str, Tensor] | None:
        """The weights of a model that is spread over ranks; ``None`` of one that is not."""
        if is_adapted(self.actor.model):
            return None  # `whole_actor` has them
        return whole_weights(self.crew, self.actor.model)

    def draw(self, number: int, stop: StopSignals) -> Step:
        """Draw the rows of a step; a signal gives them up, and the step begins anew later."""
        metrics = StepMetrics(self.timer)
        self.checkpoints.mark()
        drawn = None
        try:
            with stop.breaking(), self.timer("environment"):
                drawn = self.data.draw(metrics)
        except StopRequested:
            if drawn is None:
                raise
        self.checkpoints.unmark()
        return Step(number, *drawn, metrics)

    def train(self, step: Step, stop: StopSignals) -> StepRecord:
        """Train on a step's rows, and hand the new weights on."""
        with self.timer("train"):
            rate = self.updates.begin(step.number, step.trained)
            while step.trained is not None and step.num_epochs < self.num_epochs:
                step.metrics.add_update(*self.updates.make())
                step.num_epochs += 1
                if step.num_epochs < self.num_epochs:
                    stop.check()  # a run that is stopped here goes on with the next pass
        with self.timer("sync"):
            self.push()
        more = {"learning_rate": rate, **self.measure(step), **self.data.metrics()}
        return StepRecord(
            step.number, step.metrics.reduce(**more), step.trajectories, _with_advantages(step)
        )


def _with_advantages(step: Step) -> TensorDictBase | None:
    """What is trained, where that has advantages, which the record shows."""
    if step.trained is None or step.trained[0].get(ADVANTAGE, None) is None:
        return None
    return step.trained
