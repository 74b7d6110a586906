"""Recorder of a run: metrics, rollouts, the result."""

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from rich.console import Console
from rich.rule import Rule
from tensordict import TensorDictBase
from torchrl.record.loggers import Logger

import collectors
from collectors import Estimate
from collectors.record import RolloutRecorder
from collectors.record.files import finite
from torchrl_agents.settings.schema import RolloutsConfig, SamplesConfig, TrainingConfig
from torchrl_data import read_conversations
from torchrl_data.batched_object import read_objects
from torchrl_data.display.terminal import show_conversation
from torchrl_data.display.text import message_text, message_title
from torchrl_data.keys import FULL, REWARD, STOP_REASON
from torchrl_envs.entries.rewards import REWARD_ERRORS, kinds_of
from torchrl_envs.entries.whole_episodes import rows_by_episode, whole_episode
from torchrl_envs.graders.answers import final_text

from .held_out import HeldOut
from .run import Failures, Run

_LOG: Final = logging.getLogger("torchrl_agents")
METRICS: Final = "metrics.jsonl"
EVALUATIONS: Final = "evaluations.jsonl"


class Recorder:
    """Writes ``metrics.jsonl`` and rollouts, and tells the loggers.

    Args:
        cfg: how many rollouts of a test trackers show as a table.
        run: has its folder, and the loggers.
        held_out: says what came of tests.
        collector: of the rollouts, which are recorded where the recipe learns from them.
        loss: its scores are recorded, too.
        after: the last step of an earlier run, which goes on: what was written of later ones, that
            were not saved, is dropped.
    """

    def __init__(
        self,
        cfg: TrainingConfig,
        run: Run,
        held_out: HeldOut,
        collector: Any,
        loss: Any,
        *,
        after: int,
    ) -> None:
        self._tests = held_out
        self._loggers, folder = run.loggers, run.folder
        self.failures = {name: Failures(f"logger.backends: {name}") for name in cfg.logger.backends}
        """What trackers did not take, by their names."""
        self._num_shown = cfg.evaluate.num_shown
        self._rollouts: RolloutRecorder | None = None
        if isinstance(cfg, RolloutsConfig):
            self._rollouts = RolloutRecorder(
                folder,
                collector.policy.tokenizer,
                every=cfg.record.every,
                max_groups_per_step=cfg.record.max_groups_per_step,
                replay=cfg.record.replay,
                exact=cfg.engine.batch_invariant,
                after=max(after, 0),
            )
            self._rollouts.watch(loss)
            if isinstance(collector, collectors.StreamingCollector):
                self._rollouts.follow(collector.ledger)
        lines_until(folder / METRICS, after)
        told = lines_until(folder / EVALUATIONS, after)
        name = held_out.score_name
        kept = {x["step"]: x["estimates"][name] for x in told if x.get(name) is not None}
        self.held_out = {step: Estimate(**score) for step, score in kept.items()}
        """The mean score of what is held out, by the step after which it was measured."""
        for path in folder.glob("csv/scalars/**/*.csv"):  # TorchRL's: a step and a value a line
            lines = path.read_text(encoding="utf-8").splitlines()
            steps = ((line, line.partition(",")[0]) for line in lines)
            _replace(path, [x for x, step in steps if step.isdecimal() and int(step) <= after])
        for writer in (logger.experiment for logger in self._loggers if after >= 0):
            if hasattr(writer, "purge_step"):  # TensorBoard's: it shows nothing older from there on
                writer.close()
                writer.purge_step = after + 1
        self._metrics = (folder / METRICS).open("a", encoding="utf-8")
        self._evaluations = folder / EVALUATIONS
        system_metrics()  # from here on the time of the first step's counts

    @property
    def history(self) -> list[dict[str, float]]:
        """The metrics of each step so far, from the disk: in memory a run would grow by them."""
        lines = lines_until(Path(self._metrics.name), sys.maxsize)
        return [{k: math.nan if x is None else x for k, x in line.items()} for line in lines]

    def close(self) -> None:
        """Nothing more is written."""
        self._metrics.close()
        if self._rollouts is not None:
            self._rollouts.close()

    def reached(self, score: float | None) -> bool:
        """Return whether the last test had that held-out score; never where it is ``None``."""
        last = self.held_out[max(self.held_out)].value if self.held_out else -math.inf
        if score is None or last < score:
            return False
        name = self._tests.score_name
        _LOG.info("done: train.stop_at=%g, held-out %s %.3f", score, name, last)
        return True

    def write(
        self,
        step: int,
        metrics: dict[str, float],
        trajectories: TensorDictBase | None,
        trained: Any,
    ) -> None:
        """Write a step, and how the machine is used; it is there if the run dies after it.

        Args:
            step: its number.
            metrics: of it, to which those of the machine are added.
            trajectories: as collected; ``None`` where nothing was.
            trained: the rows that were trained of them, if any were.
        """
        metrics |= system_metrics()
        if self._rollouts is not None and trajectories is not None:
            self._rollouts.write(step, trajectories, trained=trained, metrics=metrics)
        self._metrics.write(json.dumps({"step": step, **finite(metrics, str)}) + "\n")
        self._metrics.flush()
        self._to_each(lambda logger: logger.log_metrics(metrics, step))

    def _to_each(self, send: Callable[[Logger], Any]) -> None:
        """Hand something to each tracker; one that fails stops no run, whose own files have all."""
        for failures, logger in zip(self.failures.values(), self._loggers, strict=False):
            try:
                send(logger)
            except Exception as error:
                failures.note(error)

    def write_tests(self, points: Sequence[collectors.EvaluationPoint], *, now: int) -> None:
        """Write what came of tests.

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
                scores, estimates = self._tests.score(point.trajectories)
                told = {name: each._asdict() for name, each in estimates.items()}
                line |= finite({**scores, "estimates": told}, str)
                main = estimates[name := self._tests.score_name]
                if main.num_prompts:
                    self.held_out[step] = main
                words = "held-out %s after step %d: %.3f (%.3f to %.3f)"
                _LOG.info(words, name, step, *main[:3])
                tell_unscored(point.trajectories)
                names = {k: k.replace("@", "_at_").replace("^", "_hat_") for k in scores}
                shown = {f"held_out/{names[k]}": scores[k] for k in scores}  # some take no other
                self._to_each(lambda logger, m=shown, s=step: logger.log_metrics(m, s))
                rows = self._tests.sampled(point.trajectories)
                if self._loggers and self._num_shown and rows is not None:
                    samples = partial(log_samples, step=step)
                    self._to_each(lambda x, f=samples, r=rows: f([x], r[: self._num_shown]))
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


def _replace(path: Path, lines: Sequence[str]) -> None:
    new, text = path.with_name(f"{path.name}.partial"), "".join(f"{line}\n" for line in lines)
    if text != path.read_text(encoding="utf-8"):  # else whoever writes there may go on
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)


def system_metrics() -> dict[str, float]:
    """Return how the machine that this process runs on is used.

    Returns:
        ``system/cpu_percent``, of all cores since the last call; ``system/memory_percent``, of all
        programs; ``system/process_memory_gib``, resident, of this process alone. Where there is
        CUDA, of this process's device: ``system/gpu_memory_percent``, of all programs, and
        ``system/gpu_peak_gib``, the most that tensors of this process took since the last call.
    """
    metrics = {
        "system/cpu_percent": psutil.cpu_percent(),
        "system/memory_percent": psutil.virtual_memory().percent,
        "system/process_memory_gib": psutil.Process().memory_info().rss / 2**30,
    }
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        metrics["system/gpu_memory_percent"] = 100 * (1 - free / total)
        metrics["system/gpu_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    return metrics


def log_samples(loggers: Sequence[Logger], rows: TensorDictBase, step: int) -> None:
    """Show rollouts in trackers, as the table ``held_out/samples``: conversations and rewards.

    Args:
        loggers: TorchRL's; its logger for CSV has no tables.
        rows: ``[B]``, of a test.
        step: after which it was made.
    """
    from pandas import DataFrame, option_context

    name, samples = "held_out/samples", []
    for row in rows.unbind(0):
        messages = read_conversations(row, FULL, who="The recipe").messages(0)
        text = "\n\n".join(f"{message_title(x)}: {message_text(x)}" for x in messages)
        told = float(row.get(REWARD).sum()), read_objects(row, STOP_REASON, "")[0]
        samples.append((step, text, *told))
    table = DataFrame(samples, columns=["step", "conversation", "reward", "stop_reason"])
    for logger in loggers:
        kind = type(logger).__name__.removesuffix("Logger").lower()
        if kind in ("wandb", "trackio"):
            logger.log_metrics({name: import_module(kind).Table(dataframe=table)}, step)
        elif kind == "mlflow":  # adds to the table of the tests before
            import_module(kind).log_table(table, f"{name}.json")
        elif kind == "tensorboard":
            with option_context("display.max_colwidth", None):  # all of a text
                logger.experiment.add_text(name, table.to_html(index=False), step)


def show_rollouts(tests: Mapping[str, TensorDictBase | None], count: int) -> None:
    """Print the first conversations of each test in colour, with their rewards."""
    console = Console()
    for title, trajectories in tests.items():
        if trajectories is None:
            continue
        console.print(Rule(title))
        for row in trajectories.unbind(0)[:count]:
            conversation = read_conversations(row, FULL, who="The recipe")
            show_conversation(conversation, 0, reward=row.get(REWARD).sum(), console=console)


def tell_unscored(trajectories: TensorDictBase) -> None:
    """Warn of rollouts of a test that failed, which its means leave out.

    Args:
        trajectories: of all prompts.
    """
    rows = [whole_episode(own) for own in rows_by_episode(trajectories.unbind(0))]
    told = [str(read_objects(row, REWARD_ERRORS, "")[0]) for row in rows]
    if errors := [error for error in told if error]:
        words = "%d of the %d rollouts of this test failed, and no mean has them: %s"
        _LOG.warning(words, len(errors), len(rows), "; ".join(kinds_of(errors)))


def scores_of(
    trajectories: TensorDictBase, test: SamplesConfig, answer: Callable[[str], str | None] | None
) -> tuple[dict[str, float], dict[str, Estimate]]:
    """Scores of a test, and those of them that have an interval over the prompts.

    Args:
        trajectories: of all prompts.
        test: how it was made.
        answer: what an episode's last text answers, where the task has answers.

    Returns:
        The mean ``reward``, that of each source and of each task of several, and the estimates;
        and the estimates, see :func:`~collectors.evaluation_estimates`.
    """

    def answer_of(row: TensorDictBase) -> str | None:
        assert answer is not None
        return answer(final_text(read_conversations(row, FULL, who="The test").messages(0)))

    estimates = collectors.evaluation_estimates(
        trajectories,
        ks=test.ks or (),
        solved_at=test.solved_at,
        solved_by=test.solved_by,
        answer_of=None if answer is None else answer_of,
        level=test.level,
    )
    means = {
        name.removesuffix("/mean"): value
        for name, value in collectors.rollout_metrics(trajectories).items()
        if (name.startswith("rewards/") and name.endswith("/mean"))
        or name.rpartition("/")[2] == "reward"
    }
    return means | {name: each.value for name, each in estimates.items()}, estimates
