"""Start of a recipe: its settings are checked, its folder is its own, it is told how it ended."""

import errno
import gc
import json
import linecache
import logging
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from collectors.checkpoint.retention import stored
from collectors.record.files import finite
from objectives import Ranks
from torchrl_agents.models.policy_arguments import sampling_of
from torchrl_agents.settings.arguments import settings_text
from torchrl_agents.settings.errors import SettingsError, refusing
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.rules import check_rules
from torchrl_agents.settings.schema import RecipeConfig, RolloutsConfig, TrainingConfig
from torchrl_agents.settings.task_settings import task_settings
from torchrl_data.templates.registry import template_names
from torchrl_data.templates.rendering import render_template
from torchrl_modules.vllm.runtime import import_vllm

from .collection import staleness_of
from .dry_run import check_run, summary_of
from .found_run import CHECKPOINTS, plain_settings
from .loggers import open_loggers
from .model_card import reach_hub
from .multirun import MultirunSummary
from .parallel import follow, loading_device
from .run import LastTestError, Run, claim_folder, claim_sweep_folder, remove
from .run_log import RunLog
from .setup import build_task, tell_left_out
from .stop_signals import StopSignals
from .training import learn


class NoActor:
    """Stands for the model while the settings of a loss are tried."""

    temperature = 1.0

    def score_packed(self, *args: Any, **options: Any) -> Any:
        """Is never called."""
        raise NotImplementedError

    reward_packed = score_packed


def check_config(recipe: Recipe, cfg: RecipeConfig) -> None:
    """Refuse settings that can't work, alone or together.

    Raises:
        SettingsError: names the setting, what it must be, and what it is.
    """
    check_rules(recipe, cfg)
    device = cfg.policy.device or "cpu"
    with refusing(f"policy.device={device!r} is no device of torch"):
        kind = torch.device(device).type
    if kind == "cuda" and not torch.cuda.is_available():
        raise SettingsError(f"policy.device={device!r}, but torch finds no GPU here.")
    if isinstance(cfg, TrainingConfig) and cfg.train.cpu_offload and not torch.cuda.is_available():
        raise SettingsError("train.cpu_offload=true: torch finds no GPU here. Leave it out.")
    runs_here = not (cfg.engine.url or cfg.engine.urls)
    if cfg.engine.colocate and runs_here and cfg.engine.name == "sglang":
        if not torch.cuda.is_available():
            raise SettingsError("engine.colocate needs a GPU: SGLang lends no memory of a CPU.")
    elif cfg.engine.colocate and runs_here:
        with refusing("engine.colocate"):
            platform = import_vllm().current_platform
        if not platform.is_sleep_mode_available():
            raise SettingsError("engine.colocate needs a GPU: vLLM lends no memory of a CPU.")
    cfg.policy.chat_template = _read_template(cfg.policy.chat_template)
    own: dict[str, Callable[[], Any]] = {"policy": lambda: sampling_of(cfg.policy)}
    if isinstance(cfg, RolloutsConfig):
        own["collector"] = lambda: staleness_of(cfg.collector)
    if (loss := recipe.loss) is not None:
        own["loss"] = lambda: loss(cfg, NoActor())
    for group, build in {**own, **recipe.parts(cfg)}.items():
        with refusing(group):
            build()


def _read_template(file: str | None) -> str | None:
    """The text of ``policy.chat_template``; in the settings of a run it stands in its place."""
    if file is None or "{" in file:
        return file
    where = f"policy.chat_template={file}"
    if file in template_names() and not Path(file).exists():
        raise SettingsError(
            f"{where} is to be a file. The built-in template is policy.chat_template_name={file}."
        )
    with refusing(where):
        text = Path(file).read_text(encoding="utf-8")
        special = {f"{name}_token": "" for name in ("bos", "eos", "pad", "unk")}
        render_template(text, [{"role": "user", "content": "?"}], variables=special)
    if "{" not in text:
        raise SettingsError(f"{where} is no Jinja template: it shows no message.")
    return text


_LOG = logging.getLogger("torchrl_agents")
_PACKAGES: Final = (
    *("torchrl_agents", "torchrl_data", "torchrl_envs", "torchrl_modules", "objectives"),
    "collectors",
)
_DELIBERATE: Final = (ValueError, TypeError, RuntimeError, OSError, ImportError)
"""What our code raises with words for whoever reads them; other kinds are faults of the code."""
_OF_THE_DISK: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
Build = Callable[[Recipe, Any, dict[str, Any]], Any]
"""Gives the task and its environments, a tuple."""
Train = Callable[[Any, Any, Run], dict[str, Any]]
"""Trains as the settings say; gives the result."""


def run_recipe(recipe: Recipe, train: Train, build: Build = build_task) -> None:
    """Do what the command line says: a check or a run, with short errors for settings.

    Args:
        recipe: its settings.
        train: its loop.
        build: makes the task and its environments.
    """
    gc.enable()  # after the imports, see read_command_line
    gc.freeze()
    summary = MultirunSummary()

    def with_settings(typed: DictConfig) -> None:
        try:
            _run(recipe, train, build, typed, summary)
        except SettingsError as error:
            raise SystemExit(f"{recipe.program}: {error}") from error
        except Exception as error:
            words = _words_of(error, recipe.config_dir.parent)
            if words is None or "HYDRA_FULL_ERROR" in os.environ:
                raise
            log = Path(HydraConfig.get().runtime.output_dir) / f"{recipe.name}.log"
            # Words of several lines have a traceback in them, or say all.
            is_short = "\n" not in words and log.is_file()
            where = f" The traceback is in {log}." if is_short else ""
            where += "" if isinstance(error, LastTestError) else _how_to_go_on()
            raise SystemExit(f"{recipe.program}: {words}{where}") from error

    for claim in (claim_folder, claim_sweep_folder):  # an earlier run in this process has its own
        claim.cache_clear()
    decorate = hydra.main(
        version_base="1.3", config_path=str(recipe.config_dir), config_name=recipe.name
    )
    try:
        decorate(with_settings)()
    finally:
        summary.show()


def _how_to_go_on() -> str:
    """Return how a run that failed goes on, where it has a checkpoint; a line of its own."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    is_there = folder.is_dir() and bool(stored(folder / CHECKPOINTS))
    return f"\nresume={folder} goes on from its last checkpoint." if is_there else ""


def _words_of(error: BaseException, recipe_folder: Path) -> str | None:
    """Words of an error that needs no traceback; ``None`` where they do not say all.

    Such is what our code raises in words: exceptions of its own, and those of Python where the
    ``raise`` is ours. A fault of our code, or of the user's, has its traceback on the console.

    Args:
        error: that ended the run.
        recipe_folder: the recipe's own modules are there.
    """
    if isinstance(error, SafetensorError) or (
        isinstance(error, OSError) and error.errno in _OF_THE_DISK
    ):
        folder = HydraConfig.get().runtime.output_dir
        return f"a file can't be written ({error}). What is whole so far is in {folder}."
    # Of a collector beside training the cause tells; on Ray it is where it was raised.
    cause = error.__cause__
    chain = [e for e in (error, cause, getattr(cause, "cause", None)) if e is not None]
    own = [e for e in chain if type(e).__module__.partition(".")[0] in _PACKAGES]
    told = [
        *own,
        *(e for e in [error] if isinstance(e, _DELIBERATE) and _is_raised_here(e, recipe_folder)),
    ]
    return str(told[0]) if told else None


def _is_raised_here(error: BaseException, recipe_folder: Path) -> bool:
    """Return whether the statement that raised it is a ``raise`` of this library or the recipe."""
    *_, (frame, line) = [(None, 0), *traceback.walk_tb(error.__traceback__)]
    if frame is None:
        return False
    is_library = frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES
    if not is_library and Path(frame.f_code.co_filename).parent != recipe_folder:
        return False
    return linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")


def _run(
    recipe: Recipe, train: Train, build: Build, typed: DictConfig, summary: MultirunSummary
) -> None:
    """Check, train, tell."""
    started = HydraConfig.get()
    folder = Path(started.runtime.output_dir)
    # One of several runs goes on by itself.
    own = started.overrides.task if started.mode == RunMode.MULTIRUN else sys.argv[1:]
    with ExitStack() as stack:
        stack.callback(lambda: any(folder.glob("*")) or remove(folder))  # one that is empty
        settings = task_settings(typed)
        cfg = OmegaConf.to_object(typed)
        assert isinstance(cfg, RecipeConfig)
        check_config(recipe, cfg)
        # The folder of a dry run is its own, and what is refused leaves nothing.
        stack.push(lambda refused, *_: remove(folder) if refused and cfg.dry_run else None)
        disable_progress_bar()  # loading a model has bars of its own
        follows = os.environ.get("RANK", "0") != "0"
        if cfg.dry_run and follows:
            return
        ranks = Ranks.alone()
        if isinstance(cfg, TrainingConfig) and not cfg.dry_run:
            ranks = Ranks.join(
                device=cfg.policy.device,
                timeout_s=cfg.train.timeout_s,
                wait_s=cfg.train.wait_s,
                tensor_parallel_size=cfg.train.tensor_parallel_size,
                context_parallel_size=cfg.train.context_parallel_size,
            )
            cfg.policy.device = loading_device(cfg, ranks)
        stack.enter_context(ranks)
        if follows:
            follow(ranks, recipe, recipe.train or learn)
            return
        stop = stack.enter_context(StopSignals())
        about = {"overwrite": cfg.overwrite, "resume": cfg.resume is not None, "ranks": ranks}
        run = Run(folder, settings=plain_settings(typed), command=[sys.argv[0], *own], **about)
        stack.enter_context(run)
        log = stack.enter_context(RunLog(folder / f"{recipe.name}.log"))
        run.recipe, run.stop, run.log = recipe, stop, log
        _LOG.info("%s on %s, seed %d; results in %s", recipe.name, cfg.task.id, cfg.seed, folder)
        with log.phase("loading the data"):
            setup = build(recipe, cfg, settings)
            tell_left_out(setup.envs)
        run.note_files()
        for env in setup.envs:
            stack.callback(env.close, raise_if_closed=False)
        (folder / "config.yaml").write_text(settings_text(cfg), encoding="utf-8")
        if cfg.dry_run:
            with log.phase("checking the model and the trackers"):
                rehearsed = check_run(recipe, cfg, setup)
            run.set_status("checked")
            print(summary_of(recipe, cfg, setup, folder, rehearsed=rehearsed))
            return
        if isinstance(cfg, TrainingConfig):
            if cfg.push_to_hub is not None:
                reach_hub(cfg.push_to_hub, create=True)
            run.loggers = stack.enter_context(open_loggers(cfg, run, recipe.name))
        result = train(cfg, setup, run)
        run.set_status("interrupted" if stop.received else "finished")
        sys.stdout.flush()
        print(json.dumps(finite(result, str)), flush=True)
        summary.add(result)
        if (failing := [each for each in run.failures.values() if each.last]) and not stop.received:
            told = "; ".join(f"{each.what}: {each.told}" for each in failing)
            where = f"the run came to its end, and what it made is in {folder}"
            raise SystemExit(
                f"{recipe.program}: {where}, but what was last to be saved is not: {told}"
            )
        if stop.received:
            raise SystemExit(stop.status)
