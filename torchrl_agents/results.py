"""Results of a run: numbers, curves, tables of several runs, and experiment trackers."""

import json
import logging
import math
import os
import shlex
import shutil
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from tensordict import TensorDictBase
from torchrl.record.loggers import Logger

import collectors
from collectors import Estimate
from collectors.record import RolloutRecorder
from collectors.record.files import finite
from collectors.record.terminal import axis_bounds
from torchrl_data import read_conversations
from torchrl_data.batched_object import read_objects
from torchrl_data.display.terminal import show_conversation
from torchrl_data.display.text import message_text, message_title
from torchrl_data.keys import ADVANTAGE, FULL, REWARD, STOP_REASON
from torchrl_envs.graders.answers import final_text
from torchrl_envs.tasks.task import Task

from .run import Failures, Run
from .settings.schema import (
    RolloutsConfig,
    SamplesConfig,
    SettingsError,
    TrainingConfig,
    refusing,
)

# What a run leaves: metrics, rollouts, the result.

_LOG: Final = logging.getLogger("torchrl_agents")
METRICS: Final = "metrics.jsonl"
EVALUATIONS: Final = "evaluations.jsonl"


class Recorder:
    """Writes ``metrics.jsonl`` and rollouts, and tells the loggers.

    Args:
        cfg: how tests are made, and how many of their rollouts trackers show as a table.
        run: has its folder, and the loggers.
        task: may have answers.
        collector: of the rollouts, which are recorded where the recipe learns from them.
        loss: its scores are recorded, too.
        after: the last step of an earlier run, which goes on: what was written of later ones, that
            were not saved, is dropped.
    """

    def __init__(
        self, cfg: TrainingConfig, run: Run, task: Task, collector: Any, loss: Any, *, after: int
    ) -> None:
        self.score = partial(scores_of, test=cfg.evaluate, answer=task.final_answer)
        """What a test says."""
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
        kept = {x["step"]: x["estimates"]["reward"] for x in told if x.get("reward") is not None}
        self.held_out = {step: Estimate(**reward) for step, reward in kept.items()}
        """The mean reward on held-out prompts, by the step after which it was measured."""
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

    def reached(self, reward: float | None) -> bool:
        """Return whether the last test had that held-out reward; never where it is ``None``."""
        last = self.held_out[max(self.held_out)].value if self.held_out else -math.inf
        if reward is None or last < reward:
            return False
        _LOG.info("done: train.stop_at=%g, held-out reward %.3f", reward, last)
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
            if trained is not None and trained[0].get(ADVANTAGE, None) is None:
                trained = None  # the record shows advantages, where there are some
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
                scores, estimates = self.score(point.trajectories)
                told = {name: each._asdict() for name, each in estimates.items()}
                line |= finite({**scores, "estimates": told}, str)
                reward = estimates["reward"]
                if reward.num_prompts:
                    self.held_out[step] = reward
                _LOG.info("held-out reward after step %d: %.3f (%.3f to %.3f)", step, *reward[:3])
                names = {k: k.replace("@", "_at_").replace("^", "_hat_") for k in scores}
                shown = {f"held_out/{names[k]}": scores[k] for k in scores}  # some take no other
                self._to_each(lambda logger, m=shown, s=step: logger.log_metrics(m, s))
                if self._loggers and self._num_shown:
                    samples, rows = partial(log_samples, step=step), point.trajectories
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


# The learning curve of a run, as a picture; matplotlib is imported when it is drawn.

_ROOM: Final = 0.08
"""Above and below what is drawn."""
REWARD_CURVES = {
    "entropy": "entropy, nats per token",
    "groups/without_signal_fraction": "groups without a signal",
    "sampled_tokens": "sampled tokens of a rollout",
}


def plot_learning_curve(
    path: Path,
    history: Sequence[Mapping[str, float]],
    *,
    held_out: Mapping[int, Estimate],
    title: str,
    further: Mapping[str, str],
    beside: Mapping[str, str] = REWARD_CURVES,
) -> None:
    """Draw the reward of each step, of the tests before, after and between, and what explains them.

    Args:
        path: of the PNG.
        history: the metrics of each step.
        held_out: mean reward on the held-out prompts, by the step after which it was measured; its
            interval is drawn, too.
        title: above the plot.
        further: more curves beside the reward: the metric of each, by what to call it.
        beside: metrics with small plots of their own, and what to call them.
    """
    import matplotlib as mpl
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    mpl.use("Agg")
    mosaic: Any = [["reward", name] for name in beside]
    figure, axes = plt.subplot_mosaic(
        mosaic, figsize=(9.5, 4.8), width_ratios=(2.1, 1), layout="constrained"
    )
    figure.suptitle(title, fontsize=11)
    _draw_reward(axes["reward"], history, held_out, further)
    axes["reward"].xaxis.set_major_locator(MaxNLocator(integer=True))
    for name, label in beside.items():
        values = {i: metrics[name] for i, metrics in enumerate(history, 1) if name in metrics}
        small = axes[name]
        small.plot([*values], [*values.values()], color="tab:gray", lw=1.2)
        small.set_title(label, fontsize=9, loc="left")
        small.tick_params(labelsize=8)
        small.update_datalim([(1, 0.0)])  # which is always in the picture
        small.margins(y=_ROOM)
        small.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        small.grid(alpha=0.3)
    for name in list(beside)[:-1]:
        axes[name].tick_params(labelbottom=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_reward(
    axes: Any,
    history: Sequence[Mapping[str, float]],
    held_out: Mapping[int, Estimate],
    further: Mapping[str, str],
) -> None:
    from pandas import Series

    colors = ["tab:blue", "tab:orange", "tab:purple", "tab:brown", "tab:pink"]
    curves = {"training rollouts": "reward", **further}
    for (label, name), color in zip(curves.items(), colors, strict=False):
        told = [metrics.get(name, math.nan) for metrics in history if "reward" in metrics]
        values = Series(told, index=range(1, len(told) + 1), dtype=float)
        if name == "reward":
            axes.plot(values, color=color, lw=1, alpha=0.35)
        if values.notna().any():
            style = {"lw": 2} if name == "reward" else {"lw": 1.5, "ls": "--"}
            # An average without a bias at its start; NaN leaves it as it is.
            smooth = values.ewm(alpha=0.2, ignore_na=True).mean()
            axes.plot(smooth, color=color, label=label, **style)
    points = sorted((step, each.value) for step, each in held_out.items()) or [(0, math.nan)]
    style = "o-" if len(points) > 2 else "o"
    axes.plot(*zip(*points, strict=True), style, color="tab:green", ms=7, label="held-out prompts")
    for step, each in held_out.items():
        axes.vlines(step, each.low, each.high, color="tab:green", lw=1, alpha=0.6)
    axes.margins(y=_ROOM)
    low, high = axis_bounds(axes.get_ylim())
    axes.set_ylim(low, high)
    for x, y in {points[0], points[-1]}:
        # Beside the first, where a line rises from it; above the last, or below at the top.
        at_end = (0, 9 if y < low + 0.85 * (high - low) else -16)
        axes.annotate(
            f"{y:.2f}",
            (x, y),
            xytext=(9, -4) if x == 0 else at_end,
            textcoords="offset points",
            ha="left" if x == 0 else "right",
        )
    axes.set(xlabel="step", ylabel="mean reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=9)


# The card of a trained model, and the hub where it goes.


def leave_card(
    cfg: TrainingConfig, run: Run, steps: int, tests: Mapping[str, Mapping[str, Estimate]]
) -> None:
    """Write the card of the trained model, and the curve that it shows, into ``model/``.

    Args:
        cfg: the settings.
        run: has left its model and its learning curve.
        steps: that were made.
        tests: what the tests ``before`` and ``after`` training said, where they were made.
    """
    base, last = cfg.policy.model, [*tests.values()][-1]
    on_hub = base is not None and not Path(base).exists()
    results = ("text-generation", cfg.task.id, f"held-out prompts of {cfg.task.id}")
    scores = {name: each.value for name, each in last.items() if each.num_prompts}
    metadata = ModelCardData(
        base_model=base if on_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["torchrl-agents", "reinforcement-learning", run.recipe.name],
        model_name=run.label,
        eval_results=[EvalResult(*results, *score) for score in scores.items()],
    )
    *_, newest = [run.record, *run.record.get("resumed", [])]  # whose command has all that is given
    given = [x for x in newest["command"][1:] if not x.startswith(("resume=", "push_to_hub="))]
    card = ModelCard.from_template(
        metadata,
        template_path=str(Path(__file__).with_name("card.md")),
        **{"cfg": cfg, "run": run, "steps": steps, "tests": tests, "last": last},
        base=base if on_hub or base is None else Path(base).name,
        dataset=run.record["settings"].get("task.dataset"),
        settings=(run.folder / "config.yaml").read_text(encoding="utf-8"),
        command=shlex.join(["torchrl-agents", run.recipe.name.replace("_", "-"), *given]),
    )
    card.save(run.folder / "model/README.md")
    shutil.copy(run.folder / "learning_curve.png", run.folder / "model")


def reach_hub(repository: str, *, create: bool) -> None:
    """Refuse a repository that could not be written; nothing is uploaded.

    Args:
        repository: of the Hugging Face Hub.
        create: whether to make it, where it is not there.

    Raises:
        SettingsError: no token, no right to write there, or no hub.
    """
    with refusing(f"push_to_hub={repository}", foreign=True):
        HfApi().whoami()
        if create:
            HfApi().create_repo(repository, exist_ok=True)


def push_to_hub(repository: str, folder: Path) -> str | None:
    """Upload the model of a run, with its card; gives the address, or says what to type later."""
    try:
        return str(HfApi().upload_folder(repo_id=repository, folder_path=folder))
    except Exception as error:
        again = shlex.join(["hf", "upload", repository, str(folder)])
        _LOG.error("the model could not be uploaded (%s). Again: %s", error, again)
        return None


# What came of the runs of ``--multirun``: a table at the end, and the same in a file.

SUMMARY: Final = "multirun.json"


@dataclass
class MultirunSummary:
    """The results of the runs of one command, written after each of them."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    """Of each its overrides and its result."""
    path: Path | None = None
    """Of the file, in Hydra's folder of the sweep."""

    def add(self, result: Mapping[str, Any]) -> None:
        """Take in the result of a run that Hydra runs now; nothing is kept of a single one.

        Args:
            result: as the run printed it.
        """
        hydra = HydraConfig.get()
        if hydra.mode != RunMode.MULTIRUN:
            return
        self.runs.append({"overrides": list(hydra.overrides.task), **finite(result, str)})
        self.path = Path(hydra.runtime.output_dir).parent / SUMMARY
        self.path.write_text(json.dumps(self.runs, indent=1) + "\n", encoding="utf-8")

    def show(self) -> None:
        """Print the table to standard error: the last line of the output is the last result."""
        if self.path is None:
            return
        table = Table(title=str(self.path), title_justify="left")
        told = [
            {name: each["value"] for name, each in run["estimates"].items() if "^" not in name}
            if "estimates" in run
            else {"held-out before": run.get("held_out_before"), "after": run.get("held_out_after")}
            for run in self.runs
        ]
        names = [*dict.fromkeys(name for scores in told for name in scores)]
        table.add_column("run", justify="right")
        table.add_column("overrides", overflow="fold")
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        for number, (run, scores) in enumerate(zip(self.runs, told, strict=True)):
            values = map(scores.get, names)
            shown = ["" if value is None else f"{value:.3f}" for value in values]
            table.add_row(str(number), escape(" ".join(run["overrides"])), *shown)
        Console(stderr=True).print(table)


# Where metrics go: TorchRL's loggers, by name.

_RUN_TAG: Final = "torchrl_agents.run"


@contextmanager
def open_loggers(cfg: TrainingConfig, run: Run, recipe: str) -> Iterator[list[Logger]]:
    """TorchRL's loggers of a run, which get its settings and are closed with it.

    A run that goes on goes on in its trackers, too.

    Args:
        cfg: the settings.
        run: has an id of its own.
        recipe: the project of its runs, unless the settings say another one.

    Raises:
        SettingsError: a tracker can't be opened.
    """
    project = cfg.logger.project or recipe
    settings: Any = asdict(cfg)
    with ExitStack() as stack:
        loggers = []
        for name in cfg.logger.backends:
            with refusing(f"logger.backends: {name} can't be opened", foreign=True):
                logger, end = LOGGERS[name][0](run, project, settings)
            stack.push(partial(_end, name, end))
            loggers.append(logger)
        yield loggers


def _end(name: str, end: Callable[[bool], None], kind: type[BaseException] | None, *_: Any) -> None:
    """End a tracker's run; what fails there does not hide why the run itself failed."""
    try:
        with refusing(f"logger.backends: {name} can't be ended", foreign=True):
            end(kind is not None and not issubclass(kind, SystemExit))
    except SettingsError as error:
        if kind is None:
            raise
        _LOG.warning("%s", error)


def check_loggers(cfg: TrainingConfig, recipe: str) -> None:
    """Refuse trackers that could not be opened; no run begins in any.

    Args:
        cfg: the settings.
        recipe: the project of its runs, unless the settings say another one.

    Raises:
        SettingsError: a tracker can't be opened.
    """
    for name in cfg.logger.backends:
        with refusing(f"logger.backends: {name} can't be opened", foreign=True):
            LOGGERS[name][1](cfg.logger.project or recipe)


_Opened = tuple[Logger, Callable[[bool], None]]
"""And what ends it; it is told whether the run failed."""


def _files(kind: str, run: Run, *_: Any) -> _Opened:
    """TorchRL's logger of that name, which writes into a folder of the run."""
    name = kind.removesuffix("Logger").lower()
    logger = getattr(import_module(f"torchrl.record.loggers.{name}"), kind)(name, str(run.folder))
    if name == "csv":  # which writes each value at once, and would keep all of them as well
        logger.experiment.scalars = defaultdict(partial(deque, maxlen=1))
    return logger, lambda _: logger.close()


def _wandb(run: Run, project: str, settings: Mapping[str, Any]) -> _Opened:
    from torchrl.record.loggers.wandb import WandbLogger

    folder = str(run.folder)
    logger = WandbLogger(
        run.label, id=run.record["id"], project=project, save_dir=folder, config=settings
    )
    return logger, lambda failed: logger.experiment.finish(exit_code=int(failed))


def _trackio(run: Run, project: str, settings: Mapping[str, Any]) -> _Opened:
    from torchrl.record.loggers.trackio import TrackioLogger

    trackio: Any = import_module("trackio")

    def end(_: bool) -> None:
        with redirect_stdout(sys.stderr):
            logger.flush()
            trackio.finish()  # the logger's own would leave it to be ended again at exit

    with redirect_stdout(sys.stderr):  # what it prints: the last line of the output is the result
        # It knows a run by its name alone.
        logger = TrackioLogger(f"{run.label}-{run.record['id']}", project=project, config=settings)
    return logger, end


def _mlflow(run: Run, project: str, *_: Any) -> _Opened:
    import mlflow
    from torchrl.record.loggers.mlflow import MLFlowLogger

    uri = mlflow.get_tracking_uri()  # MLFLOW_TRACKING_URI, or MLflow's default
    found = mlflow.search_runs(
        experiment_names=[project],
        filter_string=f"tags.`{_RUN_TAG}` = '{run.record['id']}'",
        output_format="list",
    )
    if found:
        os.environ["MLFLOW_RUN_ID"] = found[0].info.run_id  # which the logger starts again
    logger = MLFlowLogger(project, uri)
    if not found:
        mlflow.set_tags({_RUN_TAG: run.record["id"], "mlflow.runName": run.label})
    mlflow.log_params(run.record["settings"])
    return logger, lambda failed: mlflow.end_run("FAILED" if failed else "FINISHED")


def _check_wandb(_: str) -> None:
    import wandb

    if wandb.setup().settings.mode in ("online", "shared"):
        wandb.login()  # asks the server whether it takes the key


def _check_mlflow(project: str) -> None:
    import mlflow

    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # or it tries for minutes
    mlflow.MlflowClient().get_experiment_by_name(project)


LOGGERS: Final[dict[str, tuple[Callable[[Run, str, Mapping[str, Any]], _Opened], Callable]]] = {
    "csv": (partial(_files, "CSVLogger"), lambda _: import_module("torchrl.record.loggers.csv")),
    "tensorboard": (
        partial(_files, "TensorboardLogger"),
        lambda _: import_module("torch.utils.tensorboard"),
    ),
    "wandb": (_wandb, _check_wandb),
    "trackio": (_trackio, lambda _: import_module("trackio")),
    "mlflow": (_mlflow, _check_mlflow),
}
"""By name: what opens each, from the run, the project and the settings; and what fails, told the
project, where a run could not begin."""
