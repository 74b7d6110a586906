"""What a run leaves: metrics, rollouts, the result."""

import json
import math
import os
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import torch
from rich.console import Console
from rich.rule import Rule
from tensordict import TensorDictBase

from collectors import rollout_metrics
from torchrl_agents.settings.schema import RecipeConfig
from torchrl_data import read_conversations
from torchrl_data.conversation.object_entries import read_objects
from torchrl_data.display.terminal import show_conversation
from torchrl_data.keys import (
    ADVANTAGE,
    ASSISTANT_MASK,
    FULL,
    GROUP_ID,
    REWARD,
    REWARDS,
    ROW,
)
from torchrl_envs.datasets.primer import IDS_PER_EPOCH
from torchrl_envs.graders.answers import final_text
from torchrl_envs.rewards.reward_log import LOGGED_EXTRA, LOGGED_METRICS

METRICS: Final = "metrics.jsonl"
ROLLOUTS: Final = "rollouts.jsonl"
EVALUATIONS: Final = "evaluations.jsonl"


class StepRecord(NamedTuple):
    """One step of a recipe."""

    step: int
    metrics: dict[str, float]
    trajectories: TensorDictBase
    """As collected."""
    trained: TensorDictBase | None
    """Those with an advantage, as they were trained on."""


class Recorder:
    """Writes ``rollouts.jsonl`` and ``metrics.jsonl``, and tells the loggers.

    Args:
        folder: of the run.
        loggers: TorchRL's.
        after: the last step of an earlier run, which goes on: what was written of later ones, that
            were not saved, is dropped.
    """

    def __init__(self, folder: Path, loggers: Sequence[Any], *, after: int = 0) -> None:
        self._loggers = loggers
        self.history = [
            {name: math.nan if value is None else value for name, value in line.items()}
            for line in lines_until(folder / METRICS, after)
        ]
        """The metrics of the steps before."""
        lines_until(folder / ROLLOUTS, after)
        lines_until(folder / EVALUATIONS, after)
        for path in folder.glob("csv/scalars/**/*.csv"):
            _csv_until(path, after)
        self._rollouts = (folder / ROLLOUTS).open("a", encoding="utf-8")
        self._metrics = (folder / METRICS).open("a", encoding="utf-8")

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self._rollouts.close()
        self._metrics.close()

    def write(self, record: StepRecord) -> None:
        """Write a step; what was written is there if the run dies after it."""
        write_rollouts(self._rollouts, record)
        self._metrics.write(json.dumps({"step": record.step, **finite(record.metrics)}) + "\n")
        for file in (self._rollouts, self._metrics):
            file.flush()
        for logger in self._loggers:
            logger.log_metrics(record.metrics, record.step)


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


def write_rollouts(file: IO[str], step: StepRecord) -> None:
    """Append the trajectories of a step to a JSONL file, one a line."""
    advantages: dict[int, deque[float | None]] = defaultdict(deque)
    for row in () if step.trained is None else step.trained.unbind(0):  # a group keeps its order
        advantages[int(row[GROUP_ID])].append(_number(row[ADVANTAGE]))
    for row in step.trajectories.unbind(0):
        group = int(row[GROUP_ID])
        mask = row[ASSISTANT_MASK]
        first = int(mask.int().argmax()) if bool(mask.any()) else len(mask)
        record: dict[str, Any] = {
            "step": step.step,
            "group_id": f"{group // IDS_PER_EPOCH}/{group % IDS_PER_EPOCH}",
            "policy_version": row["policy_version"].item(),
            "reward": _number(row["reward"]) if bool(row["scorable"].all()) else None,
            "rewards": {str(k): _number(v) for k, v in row[REWARDS].items()},
            "advantage": advantages[group].popleft() if advantages[group] else None,
            "stop_reason": row["stop_reason"],
            "num_turns": int(row["num_turns"]),
            "prompt_tokens": first,
            "sampled_tokens": int(mask.sum()),
            "total_tokens": len(mask),
            "messages": _conversation(row).messages(0),
            "row": read_objects(row, ROW)[0],
        }
        for key in (LOGGED_METRICS, LOGGED_EXTRA):
            if row.get(key, None) is not None:
                record[key] = read_objects(row, key)[0]
        if row["reward_errors"]:
            record["reward_errors"] = row["reward_errors"]
        file.write(json.dumps(finite(record), ensure_ascii=False, default=str) + "\n")


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with ``None`` for what JSON can't write: NaN and infinity."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _number(value: torch.Tensor) -> float | None:
    number = float(value.sum())
    return number if math.isfinite(number) else None


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
