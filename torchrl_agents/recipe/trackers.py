"""Where metrics go: TorchRL's loggers, by name."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Final

from omegaconf import OmegaConf
from torchrl.record.loggers import Logger

from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import TrainingConfig

from .run_folder import Run

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
    settings: Any = OmegaConf.to_container(OmegaConf.structured(cfg))
    with ExitStack() as stack:
        loggers = []
        for name in cfg.logger.backends:
            with _told_of(name):
                logger, end = _OPEN[name](run, project, settings)
            stack.push(partial(_end, end))
            loggers.append(logger)
        yield loggers


def check_loggers(cfg: TrainingConfig, recipe: str) -> None:
    """Refuse trackers that could not be opened; no run begins in any.

    Args:
        cfg: the settings.
        recipe: the project of its runs, unless the settings say another one.

    Raises:
        SettingsError: a tracker can't be opened.
    """
    for name in cfg.logger.backends:
        with _told_of(name):
            _CHECK[name](cfg.logger.project or recipe)


@contextmanager
def _told_of(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the tracker's own: no key, no server
        raise SettingsError(
            f"logger.backends: {name} can't be opened: {type(error).__name__}: {error}"
        ) from error


def missing_package(logger: str) -> str | None:
    """The package that a logger needs and that is not installed."""
    package = LOGGERS[logger]
    return None if package is None or find_spec(package) else package


_Opened = tuple[Logger, Callable[[bool], None]]
"""And what ends it; it is told whether the run failed."""


def _end(
    end: Callable[[bool], None],
    kind: type[BaseException] | None,
    _error: BaseException | None,
    _traceback: TracebackType | None,
) -> None:
    end(kind is not None and not issubclass(kind, SystemExit))


def _csv(run: Run, *_: Any) -> _Opened:
    from torchrl.record.loggers.csv import CSVLogger

    logger = CSVLogger("csv", str(run.folder))
    return logger, lambda _: logger.close()


def _tensorboard(run: Run, *_: Any) -> _Opened:
    from torchrl.record.loggers.tensorboard import TensorboardLogger

    logger = TensorboardLogger("tensorboard", str(run.folder))
    return logger, lambda _: logger.close()


def _wandb(run: Run, project: str, settings: Mapping[str, Any]) -> _Opened:
    from torchrl.record.loggers.wandb import WandbLogger

    folder = str(run.folder)
    logger = WandbLogger(run.label, id=run.id, project=project, save_dir=folder, config=settings)
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
        logger = TrackioLogger(f"{run.label}-{run.id}", project=project, config=settings)
    return logger, end


def _mlflow(run: Run, project: str, *_: Any) -> _Opened:
    import mlflow
    from torchrl.record.loggers.mlflow import MLFlowLogger

    uri = mlflow.get_tracking_uri()  # MLFLOW_TRACKING_URI, or MLflow's default
    found = mlflow.search_runs(
        experiment_names=[project],
        filter_string=f"tags.`{_RUN_TAG}` = '{run.id}'",
        output_format="list",
    )
    if found:
        os.environ["MLFLOW_RUN_ID"] = found[0].info.run_id  # which the logger starts again
    logger = MLFlowLogger(project, uri)
    if not found:
        mlflow.set_tags({_RUN_TAG: run.id, "mlflow.runName": run.label})
    mlflow.log_params(run.settings)
    return logger, lambda failed: mlflow.end_run("FAILED" if failed else "FINISHED")


_OPEN: Final[Mapping[str, Callable[[Run, str, Mapping[str, Any]], _Opened]]] = {
    "csv": _csv,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
    "mlflow": _mlflow,
}


def _check_wandb(_: str) -> None:
    import wandb

    if wandb.setup().settings.mode in ("online", "shared"):
        wandb.login()  # asks the server whether it takes the key


def _check_mlflow(project: str) -> None:
    import mlflow

    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # or it tries for minutes
    mlflow.MlflowClient().get_experiment_by_name(project)


def _check_import(module: str) -> Callable[[str], Any]:
    return lambda _: import_module(module)


_CHECK: Final[Mapping[str, Callable[[str], Any]]] = {
    "csv": _check_import("torchrl.record.loggers.csv"),
    "tensorboard": _check_import("torch.utils.tensorboard"),
    "wandb": _check_wandb,
    "trackio": _check_import("trackio"),
    "mlflow": _check_mlflow,
}
LOGGERS: Final = {
    "csv": None,
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
}
"""The package that each needs."""
