"""What a run leaves: metrics, rollouts, the result."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.rule import Rule
from tensordict import TensorDictBase

from collectors import LLMCollector, StreamingCollector, rollout_metrics
from collectors.record import RolloutRecorder
from objectives.losses.base import TokenLoss
from torchrl_agents.settings.schema import RecipeConfig, RecordConfig
from torchrl_data import read_conversations
from torchrl_data.display.terminal import show_conversation
from torchrl_data.keys import FULL, REWARD
from torchrl_envs.graders.answers import final_text


class StepRecord(NamedTuple):
    """One step of a recipe."""

    step: int
    metrics: dict[str, float]
    trajectories: TensorDictBase
    """As collected."""
    trained: TensorDictBase | None
    """Those with an advantage, as they were trained on."""


class Recorder:
    """Writes ``metrics.jsonl`` and rollouts, and tells the loggers.

    Args:
        folder: of the run.
        loggers: TorchRL's.
        rollouts: writes each step's, where there are any.
    """

    def __init__(
        self, folder: Path, loggers: Sequence[Any], rollouts: RolloutRecorder | None = None
    ) -> None:
        self._loggers = loggers
        self._rollouts = rollouts
        self._metrics = (folder / "metrics.jsonl").open("w", encoding="utf-8")

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()

    def write(self, record: StepRecord) -> None:
        """Write a step; what was written is there if the run dies after it."""
        if self._rollouts is not None:
            self._rollouts.write(
                record.step, record.trajectories, trained=record.trained, metrics=record.metrics
            )
        self._metrics.write(json.dumps({"step": record.step, **finite(record.metrics)}) + "\n")
        self._metrics.flush()
        for logger in self._loggers:
            logger.log_metrics(record.metrics, record.step)


def record_rollouts(
    cfg: RecordConfig,
    folder: Path,
    tokenizer: Any,
    loss: TokenLoss,
    collector: LLMCollector | StreamingCollector,
) -> RolloutRecorder:
    """The record of the run's rollouts, which ``view`` shows."""
    recorder = RolloutRecorder(
        folder, tokenizer, every=cfg.every, max_groups_per_step=cfg.max_groups_per_step
    )
    recorder.watch(loss)
    if isinstance(collector, StreamingCollector):
        recorder.follow(collector.ledger)
    return recorder


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with ``None`` for what JSON can't write: NaN and infinity."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def last_text(row: TensorDictBase) -> str:
    """What the policy said last in a trajectory."""
    return final_text(_conversation(row).messages(0))


def show_rollouts(tests: Mapping[str, TensorDictBase | None], count: int) -> None:
    """Print the first conversations of each test in colour, with their rewards."""
    console = Console()
    for title, trajectories in tests.items():
        if trajectories is None:
            continue
        console.print(Rule(title))
        for row in trajectories.unbind(0)[:count]:
            reward = float(row.get(REWARD))
            show_conversation(_conversation(row), 0, reward=reward, console=console)


def _conversation(row: TensorDictBase) -> Any:
    return read_conversations(row, FULL, who="The recipe")


def result_of(
    cfg: RecipeConfig,
    history: Sequence[Mapping[str, float]],
    before: TensorDictBase,
    after: TensorDictBase | None,
) -> dict[str, Any]:
    """The numbers at the end of a run.

    Args:
        cfg: its settings.
        history: the metrics of each step.
        before: the test before training.
        after: the test after it, if there was one.
    """
    tests = {"before": rollout_metrics(before)}
    if after is not None:
        tests["after"] = rollout_metrics(after)
    sources = {
        f"{when}/{name.removesuffix('/mean')}": value
        for when, test in tests.items()
        for name, value in test.items()
        if name.startswith("rewards/") and name.endswith("/mean")
    }
    return {
        "task": cfg.task.id,
        "seed": cfg.seed,
        "held_out_before": tests["before"]["reward"],
        "held_out_after": tests["after"]["reward"] if after is not None else None,
        "steps": len(history),
        "optimizer_steps": int(sum(metrics["optimizer_steps"] for metrics in history)),
        **sources,
    }
