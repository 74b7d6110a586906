"""What a run leaves: metrics, rollouts, the result."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.rule import Rule
from tensordict import TensorDictBase

from collectors import EvaluationPoint, StreamingCollector, rollout_metrics
from collectors.record import RolloutRecorder
from objectives import MixedLoss
from objectives.losses.base import TokenLoss
from torchrl_agents.settings.schema import RecipeConfig, RecordConfig
from torchrl_data import read_conversations
from torchrl_data.display.terminal import show_conversation
from torchrl_data.keys import FULL, REWARD
from torchrl_envs.graders.answers import final_text

_LOG: Final = logging.getLogger("torchrl_agents")
METRICS: Final = "metrics.jsonl"
EVALUATIONS: Final = "evaluations.jsonl"


class StepRecord(NamedTuple):
    """One step of a recipe."""

    step: int
    metrics: dict[str, float]
    trajectories: TensorDictBase | None
    """As collected; none where nothing was."""
    trained: TensorDictBase | None
    """Those with an advantage, as they were trained on."""


class Recorder:
    """Writes ``metrics.jsonl`` and rollouts, and tells the loggers.

    Args:
        folder: of the run.
        loggers: TorchRL's.
        rollouts: writes each step's, where there are any.
        after: the last step of an earlier run, which goes on: what was written of later ones, that
            were not saved, is dropped.
    """

    def __init__(
        self,
        folder: Path,
        loggers: Sequence[Any],
        rollouts: RolloutRecorder | None = None,
        *,
        after: int = 0,
    ) -> None:
        self._loggers = loggers
        self._rollouts = rollouts
        self.history = [
            {name: math.nan if value is None else value for name, value in line.items()}
            for line in lines_until(folder / METRICS, after)
        ]
        """The metrics of the steps before."""
        told = lines_until(folder / EVALUATIONS, after)
        self.held_out = {x["step"]: x["reward"] for x in told if x.get("reward") is not None}
        """The mean reward on held-out prompts, by the step after which it was measured."""
        for path in folder.glob("csv/scalars/**/*.csv"):
            _csv_until(path, after)
        self._metrics = (folder / METRICS).open("a", encoding="utf-8")
        self._evaluations = folder / EVALUATIONS

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()

    def reached(self, reward: float | None) -> bool:
        """Whether the last test had that held-out reward; never where it is ``None``."""
        if reward is None or not self.held_out:
            return False
        last = max(self.held_out)
        if self.held_out[last] < reward:
            return False
        _LOG.info("done: train.stop_at=%g, held-out reward %.3f", reward, self.held_out[last])
        return True

    def write(self, record: StepRecord) -> None:
        """Write a step; what was written is there if the run dies after it."""
        if self._rollouts is not None and record.trajectories is not None:
            self._rollouts.write(
                record.step, record.trajectories, trained=record.trained, metrics=record.metrics
            )
        self._metrics.write(json.dumps({"step": record.step, **finite(record.metrics)}) + "\n")
        self._metrics.flush()
        for logger in self._loggers:
            logger.log_metrics(record.metrics, record.step)

    def write_tests(self, points: Sequence[EvaluationPoint], *, now: int) -> None:
        """Write what came of tests on held-out prompts.

        Args:
            points: the tests.
            now: the step after which they are told.
        """
        for point in points:
            step = point.step
            line: dict[str, Any] = {"step": step, "version": point.version, "lag_steps": now - step}
            if point.trajectories is None:
                line["skipped"] = point.skipped
            else:
                scores = scores_of(point.trajectories)
                line |= finite(scores)
                if not math.isnan(scores["reward"]):  # nothing could be scored
                    self.held_out[step] = scores["reward"]
                _LOG.info("held-out reward after step %d: %.3f", step, scores["reward"])
                for logger in self._loggers:
                    logger.log_metrics({f"held_out/{k}": v for k, v in scores.items()}, step)
            with self._evaluations.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def lines_until(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines of a JSONL file up to a step; the others, and one that was torn, are deleted.

    Args:
        path: of the file; it need not be there.
        step: the last that counts.
    """
    if not path.exists():
        return []
    kept = []
    for text in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # torn, so later than all that was saved
            line = json.loads(text)
            if line["step"] <= step:
                kept.append((text, line))
    _replace(path, [text for text, _ in kept])
    return [line for _, line in kept]


def _csv_until(path: Path, step: int) -> None:
    """The same of TorchRL's CSV logger: a step and a value a line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    numbers = [line.partition(",")[0] for line in lines]
    kept = [x for x, n in zip(lines, numbers, strict=True) if n.isdecimal() and int(n) <= step]
    _replace(path, kept)


def _replace(path: Path, lines: Sequence[str]) -> None:
    new = path.with_name(f"{path.name}.partial")
    new.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    os.replace(new, path)


def record_rollouts(
    cfg: RecordConfig,
    folder: Path,
    tokenizer: Any,
    loss: TokenLoss | MixedLoss,
    collector: Any,
    *,
    after: int = 0,
) -> RolloutRecorder:
    """The record of the run's rollouts, which ``view`` shows."""
    recorder = RolloutRecorder(
        folder,
        tokenizer,
        every=cfg.every,
        max_groups_per_step=cfg.max_groups_per_step,
        after=after,
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


def scores_of(trajectories: TensorDictBase) -> dict[str, float]:
    """Of a test: its mean ``reward``, and that of each source and of each task of several."""
    return {
        name.removesuffix("/mean"): value
        for name, value in rollout_metrics(trajectories).items()
        if (name.startswith("rewards/") and name.endswith("/mean"))
        or name.rpartition("/")[2] == "reward"
    }


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
    tests = {"before": scores_of(before)}
    if after is not None:
        tests["after"] = scores_of(after)
    sources = {
        f"{when}/{name}": value
        for when, test in tests.items()
        for name, value in test.items()
        if name != "reward"
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
