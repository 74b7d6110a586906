"""TorchRL's loggers by name, where metrics go."""

import logging
import os
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import Any, Final

from torchrl.record.loggers import Logger

from torchrl_agents.settings.errors import SettingsError, refusing
from torchrl_agents.settings.schema import TrainingConfig

from .run import Run

_LOG: Final = logging.getLogger("torchrl_agents")
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
