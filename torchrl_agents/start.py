"""How a recipe runs: its settings are checked, its folder is its own, it is told how it ended."""

import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from transformers.utils.logging import disable_progress_bar

from objectives import RankFailedError, Ranks
from torchrl_agents.dry_run.rehearsal import check_run
from torchrl_agents.recipe.checks import check_config
from torchrl_agents.recipe.multirun import MultirunSummary
from torchrl_agents.recipe.preparation import build_task
from torchrl_agents.recipe.report import RunLog
from torchrl_agents.recipe.results import finite
from torchrl_agents.recipe.run_folder import Run
from torchrl_agents.recipe.stop import StopSignals
from torchrl_agents.recipe.trackers import open_loggers
from torchrl_agents.resume.earlier_run import plain_settings, with_recorded
from torchrl_agents.settings.command_line import prepare, task_settings
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.schema import RecipeConfig, TrainingConfig
from torchrl_agents.training.parallel import follow, loading_device

_LOG = logging.getLogger("torchrl_agents")
Build = Callable[[Recipe, Any, dict[str, Any]], Any]
"""Gives the task and its environments, a tuple."""
Train = Callable[[Any, Any, Run, RunLog, StopSignals], dict[str, Any]]
"""Trains as the settings say; gives the result."""


def run_recipe(recipe: Recipe, train: Train, build: Build = build_task) -> None:
    """Do what the command line says: help, a check, or a run, with short errors for settings.

    Args:
        recipe: its settings.
        train: its loop.
        build: makes the task and its environments.
    """
    summary = MultirunSummary()

    def with_settings(typed: DictConfig) -> None:
        try:
            _run(recipe, train, build, typed, summary)
        except SettingsError as error:
            raise SystemExit(f"{recipe.name}.py: {error}") from error
        except RankFailedError as error:
            raise SystemExit(str(error)) from error

    try:
        sys.argv[1:] = with_recorded(sys.argv[1:])
        text = prepare(recipe, sys.argv[1:])
    except SettingsError as error:
        raise SystemExit(f"{recipe.name}.py: {error}") from error
    if text is not None:
        print(text)
        return
    decorate = hydra.main(
        version_base="1.3", config_path=str(recipe.config_dir), config_name=recipe.name
    )
    try:
        decorate(with_settings)()
    finally:
        summary.show()


def _run(
    recipe: Recipe, train: Train, build: Build, typed: DictConfig, summary: MultirunSummary
) -> None:
    """Check, train, tell."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    with ExitStack() as stack:
        stack.callback(_remove_if_empty, folder)
        settings = task_settings(typed)
        cfg = OmegaConf.to_object(typed)
        assert isinstance(cfg, RecipeConfig)
        check_config(recipe, cfg)
        disable_progress_bar()  # loading a model has bars of its own
        follows = os.environ.get("RANK", "0") != "0"
        if cfg.dry_run and follows:
            return
        ranks = stack.enter_context(_ranks(cfg))
        if follows:
            follow(ranks, recipe)
            return
        run = stack.enter_context(open_run(folder, cfg, plain_settings(typed), ranks))
        log = stack.enter_context(RunLog(folder / f"{recipe.name}.log"))
        stop = stack.enter_context(StopSignals())
        _LOG.info("%s on %s, seed %d; results in %s", recipe.name, cfg.task.id, cfg.seed, folder)
        with log.phase("loading the data"):
            setup = build(recipe, cfg, settings)
        for env in setup[1:]:
            stack.callback(env.close, raise_if_closed=False)
        config = OmegaConf.to_yaml(OmegaConf.structured(cfg))
        (folder / "config.yaml").write_text(config, encoding="utf-8")
        if cfg.dry_run:
            with log.phase("checking the model and the trackers"):
                check_run(recipe, cfg, setup)
            run.set_status("checked")
            print(config)
            return
        if isinstance(cfg, TrainingConfig):
            run.loggers = stack.enter_context(open_loggers(cfg, run, recipe.name))
        result = train(cfg, setup, run, log, stop)
        run.set_status("interrupted" if stop.received else "finished")
        sys.stdout.flush()
        print(json.dumps(finite(result)), flush=True)
        summary.add(result)
        if stop.received:
            raise SystemExit(stop.status)


def _ranks(cfg: RecipeConfig) -> Ranks:
    """The ranks that torchrun started; this process, where it trains alone."""
    if not isinstance(cfg, TrainingConfig) or cfg.dry_run:
        return Ranks.alone()
    ranks = Ranks.join(
        device=cfg.policy.device, timeout_s=cfg.train.timeout_s, wait_s=cfg.train.wait_s
    )
    cfg.policy.device = loading_device(cfg, ranks)
    return ranks


def open_run(folder: Path, cfg: RecipeConfig, settings: dict[str, Any], ranks: Ranks) -> Run:
    """The folder of a run that begins or goes on."""
    resume = getattr(cfg, "resume", None) is not None
    return Run(folder, settings=settings, overwrite=cfg.overwrite, resume=resume, ranks=ranks)


def _remove_if_empty(folder: Path) -> None:
    if not any(folder.iterdir()):
        folder.rmdir()
