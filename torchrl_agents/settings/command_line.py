"""The command line of a recipe: its help, its task's settings, and errors in words."""

import ast
import gc
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, field, is_dataclass, make_dataclass
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final, cast

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf

from torchrl_envs.datasets import DATA_FILES, MODEL_FILES, check_source
from torchrl_envs.tasks import TASKS, find_task, generator_settings, settings_of_task

from .arguments import escaped, name_of, setting_names, with_files, with_texts
from .schema import (
    BACKENDS,
    EMBEDDED,
    FILES,
    PRETRAINED,
    CollectorConfig,
    OptimConfig,
    Recipe,
    RecipeConfig,
    RolloutsConfig,
    SettingsError,
    TrainConfig,
    TrainingConfig,
    check_path_parts,
    collects_on_ray,
    compares_groups,
    refusing,
)

# The help of a recipe: every choice and every setting, with its value and what it means.


def help_text(recipe: Recipe, cfg: DictConfig, groups: Mapping[str, Sequence[str]]) -> str:
    """All that a recipe can be told.

    Args:
        recipe: whose settings they are.
        cfg: the settings as chosen so far.
        groups: the choices of each group.
    """
    lines = [
        recipe.summary,
        "",
        f"  {recipe.program} {recipe.example}",
        "",
        "Choices (group=choice); --multirun takes several, with commas:",
    ]
    for group, choices in groups.items():
        more = ", textarena/<game>, any generator of reasoning-gym" if group == "task" else ""
        lines.append(f"  {group:<12}{', '.join(choices)}{more}")
    lines += ["", f"Settings (setting=value), with the values of task={cfg.task.id}:", ""]
    root = _described(recipe.config)
    for name in (n for n in cfg if not isinstance(cfg._get_node(n), DictConfig)):
        lines.append(_setting(recipe, cfg, str(name), root.get(str(name), "")))
    for name in (n for n in cfg if isinstance(cfg._get_node(n), DictConfig) and n != "task"):
        of_group = _described(OmegaConf.get_type(cfg, str(name)))
        lines += ["", f"{name}: {of_group['']}"]
        lines += [
            _setting(recipe, cfg, f"{name}.{key}", of_group.get(str(key), "")) for key in cfg[name]
        ]
    lines += ["", f"task: {cfg.task.id}"]
    said = settings_of_task(cfg.task.id)
    for key in (k for k in setting_names(cfg.task) if k not in ("id", "config")):
        lines.append(_setting(recipe, cfg, f"task.{key}", said[key][2] if key in said else ""))
    return "\n".join(lines)


def _setting(recipe: Recipe, cfg: DictConfig, key: str, text: str) -> str:
    value = "???" if OmegaConf.is_missing(cfg, key) else OmegaConf.select(cfg, key)
    embedded, pretrained = {**EMBEDDED, **recipe.embedded}, {**PRETRAINED, **recipe.pretrained}
    if value is None and key in {**embedded, **pretrained}:
        own = [d.get(key, "the task's") for d in (embedded, pretrained)]
        text = f"{text} [embedded model: {own[0]}; given model: {own[1]}]".strip()
    plain = value is None or isinstance(value, bool)
    shown = {None: "null", True: "true", False: "false"}[value] if plain else str(value)
    shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
    return f"  {f'{key}={shown}':<44} {text}".rstrip()


def _described(kind: type | None) -> dict[str, str]:
    """Return what the docstrings of a data class's fields say, and under ``""`` its own."""
    assert kind is not None
    found = {"": inspect.getdoc(kind) or ""}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        (node,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(node, ast.ClassDef)
        for pair in pairwise(node.body):
            match pair:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(text)):
                    found[name] = " ".join(str(text).split())
    return found


# The command line: settings of the chosen task, and what was misspelt.

GIVEN_BY_THE_SCRIPT: Final = {"seed": "seed", "num_held_out": "evaluate.num_prompts"}
"""Settings of tasks that the script's own settings stand for."""
_TYPES: Final[dict[str, Any]] = {
    **{each.__name__: each for each in (int, float, bool, str)},
    **{f"{each.__name__} | None": each | None for each in (int, float, bool, str)},
}
"""By their annotations; any value is taken for others."""
_ELSEWHERE: Final = Path(__file__).with_name("elsewhere.yaml")
"""What other libraries call settings."""


# ``${of_embedded:VALUE}`` in a file of settings: none where a model is given.
OmegaConf.register_new_resolver(
    "of_embedded",
    lambda value, *, _root_: value if _root_.policy.model is None else None,
    replace=True,
)


# Tasks --------------------------------------------------------------------------------------------


def store_task(name: str) -> None:
    """Tell Hydra the settings of a task: the keyword arguments of the function that makes it.

    Raises:
        SettingsError: there is no such task.
    """
    try:
        settings = settings_of_task(name)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    except ImportError as error:
        raise SettingsError(f"task={name}: {error}") from error
    columns: list[Any] = [("id", str, field(default=name))]
    for key, (kind, default, _) in settings.items():
        if key in GIVEN_BY_THE_SCRIPT:
            continue
        if key == "config":
            default = generator_settings(*find_task(name)[2])
        default = MISSING if default is inspect.Parameter.empty else default
        default = list(default) if isinstance(default, tuple) else default
        can_change = isinstance(default, list | dict)
        default = field(default_factory=default.copy) if can_change else field(default=default)
        columns.append((key, _TYPES.get(kind, Any), default))
    node = make_dataclass("TaskConfig", columns)
    folder, _, tail = f"task/{name}".rpartition("/")
    ConfigStore.instance().store(group=folder, name=tail, node=node, package="task")


def task_settings(cfg: DictConfig) -> dict[str, Any]:
    """Keyword arguments for the function that makes the chosen task.

    Raises:
        SettingsError: a setting that has no default is missing.
    """
    if missing := sorted(OmegaConf.missing_keys(cfg.task)):
        raise SettingsError(f"The task {cfg.task.id} needs {missing[0]}=...")
    settings = OmegaConf.to_container(cfg.task, resolve=True)
    assert isinstance(settings, dict)
    name = settings.pop("id")
    if "config" in settings:  # only what was changed: a generator has more than can be written
        defaults = generator_settings(*find_task(name)[2])
        changed = {k: v for k, v in settings["config"].items() if v != defaults[k]}
        settings["config"] = changed
    usual = settings_of_task(name)
    return {
        str(key): tuple(value)
        if isinstance(value, list) and isinstance(usual[str(key)][1], tuple)
        else value
        for key, value in settings.items()
    }


# What was written ---------------------------------------------------------------------------------


def read_command_line(recipe: Recipe) -> None:
    """Refuse what is wrong with the command line of this process, or show the help it asks for.

    A recipe calls it first, before it imports torch, which takes seconds. From here on the user's
    modules are found, in workers too, and Hydra knows the settings of the task.

    Args:
        recipe: whose command line it is.

    Raises:
        SystemExit: says what is wrong; or the help was shown.
    """
    here = str(Path.cwd())
    sys.path.append(here)  # after all installed ones
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), here]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    from_files: dict[str, str] = {}
    try:
        _refuse_options(recipe, sys.argv[1:])
        arguments, from_files = with_files(recipe, sys.argv[1:])
        arguments = with_recorded(arguments)
        names = {argument.partition("=")[0].lstrip("+") for argument in arguments}
        if names & {"task.factory", "task.tools", "task.rewards"} and "task" not in names:
            arguments = ["task=environment", *arguments]
        if "--shell-completion" not in arguments:  # argparse reads overrides in one place
            arguments.sort(key=lambda each: "=" in each and not each.startswith("-"))
            arguments = with_texts(recipe, arguments, partial(_chosen, recipe))
        sys.argv[1:] = arguments
        text = prepare(recipe, arguments)
    except SettingsError as error:
        file = _file_of(recipe, str(error), from_files)
        raise SystemExit(f"{recipe.program}: {file}{error}") from error
    if text is not None:
        print(text)
        raise SystemExit(0)
    gc.disable()  # what is imported next stays: looking for garbage in it is a fifth of its time


def _refuse_options(recipe: Recipe, arguments: Sequence[str]) -> None:
    """Name the right way to a file of settings, where Hydra's options for it are typed."""
    for option, value in pairwise([*arguments, ""]):
        name, _, given = option.partition("=")
        if name in ("-cn", "-cp") or (name.startswith("--config") and name != "--config-dir"):
            file = given or value
            file = file if file.endswith((".yaml", ".yml")) else "run.yaml"
            raise SettingsError(
                f"{name} is not for settings of your own: give their file as it is, "
                f"{recipe.program} {file} setting=value."
            )


def _file_of(recipe: Recipe, told: str, from_files: Mapping[str, str]) -> str:
    """Name the file that is refused in these words when it is read by itself."""
    for file in dict.fromkeys(from_files.values()):
        try:
            prepare(recipe, [text for text, its in from_files.items() if its == file])
        except SettingsError as error:
            if str(error) == told:
                return f"{file}: "
    return ""


def _chosen(recipe: Recipe, choices: Sequence[Override]) -> DictConfig:
    """Give the settings for choices of groups; from here on Hydra knows the tasks."""
    known = groups(recipe)
    for name in TASKS:
        store_task(name)
    for override in choices:
        _check_choice(recipe, known, override)
    one = [each for each in choices if not each.is_sweep_override()]
    return compose_config(recipe, [each.input_line or "" for each in one])


def prepare(recipe: Recipe, arguments: Sequence[str]) -> str | None:
    """Make the command line's task known, and check what is on it without importing torch.

    Args:
        recipe: whose settings they are.
        arguments: without the program's name.

    Returns:
        The help text, or how the last word may go on, if that was asked for.

    Raises:
        SettingsError: a task, a choice or a setting is unknown, and the message has what is like
            it; a value is of a wrong type, or can't work.
    """
    read, unknown = get_args_parser().parse_known_args(arguments)  # as Hydra reads them
    told, known_groups = vars(read), groups(recipe)
    written, shows_help, completes = map(told.pop, ("overrides", "help", "shell_completion"))
    word = written.pop() if completes and written else ""
    try:
        overrides = OverridesParser.create().parse_overrides([*unknown, *written])
    except HydraException as error:
        settings = {*setting_names(_chosen(recipe, [])), *known_groups}
        guess = _guess(" ".join(unknown[:1]).strip("-").partition("=")[0], (), settings)
        what = f"unrecognized arguments: {' '.join(unknown)}" if unknown else str(error)
        raise SettingsError(
            f"{what.splitlines()[0]}.{guess} Settings are name=value, without dashes, and without "
            "spaces around the =; what has brackets, commas or spaces in it is quoted for the "
            "shell, and the brackets are closed: 'a.b=[x,y]'."
        ) from error
    choices = [o for o in overrides if o.key_or_group in known_groups]
    composed = _chosen(recipe, choices)
    one = [o for o in overrides if not o.is_sweep_override()]
    if told["multirun"] and any(o.key_or_group == "resume" for o in overrides):
        raise SettingsError("resume= goes on with one run: without --multirun, the folder of each.")
    known = sorted(setting_names(composed))
    if completes:
        return "\n".join(sorted(_continuations(recipe, word, composed)))
    for override in overrides:
        if override not in choices:
            _check_setting(override, known, composed, known_groups)
    # Values of a wrong type show here, in one line, and not when Hydra has begun a run.
    typed = compose_config(recipe, [o.input_line or "" for o in one])
    if shows_help:
        return help_text(recipe, composed, known_groups)
    if one == overrides and not any(told.values()):
        task_settings(typed)
        check_rules(recipe, cast("RecipeConfig", OmegaConf.to_object(typed)))
    return None


def _continuations(recipe: Recipe, word: str, composed: DictConfig) -> set[str]:
    """Continuations of a word: up to the next ``.`` or ``=``, or to its end and a space."""
    name, given, _ = word.partition("=")
    known_groups = groups(recipe)
    if given:
        is_flag = isinstance(OmegaConf.select(composed, name), bool)
        values = {**recipe.choices, **known_groups}.get(name, ["true", "false"] * is_flag)
        return {f"{name}={value} " for value in values if f"{name}={value}".startswith(word)}
    leaves = (
        n for n in setting_names(composed) if not OmegaConf.is_dict(OmegaConf.select(composed, n))
    )
    names = [f"{each}=" for each in (*known_groups, *leaves) if each.startswith(word)]
    return {each[: each.find(".", len(word)) + 1] or each for each in names}


def compose_config(recipe: Recipe, overrides: Sequence[str]) -> DictConfig:
    """The settings that a command line gives.

    Raises:
        SettingsError: they do not go together.
    """
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(recipe.config_dir)):
            return compose(config_name=recipe.name, overrides=list(overrides))
    except HydraException as error:
        told = str(error.__cause__ or error)
        key = re.search(r"full_key: (\S+)", told)
        told = re.split(r"\n(?:\s+full_key|Config search path)", told)[0]
        words = " ".join(told.split())
        raise SettingsError(f"{key[1]}: {words}" if key else words) from error


def groups(recipe: Recipe) -> dict[str, list[str]]:
    """The choices of each group."""
    found = {"task": list(TASKS)} | {name: list(each) for name, each in recipe.all_groups.items()}
    for name in FILES:
        paths = [path for each in recipe.folders for path in (each / name).glob("*.yaml")]
        found[name] = sorted(path.stem for path in paths)
    return found


def _check_choice(recipe: Recipe, known: Mapping[str, Sequence[str]], override: Override) -> None:
    group = override.key_or_group
    if override.is_sweep_override():
        chosen = list(override.sweep_string_iterator())
    else:
        chosen = [override.value()]
    for choice in chosen:
        if group == "task" and isinstance(choice, str):
            store_task(choice)
        elif choice not in (*known[group], None):
            own = f" A file of your own is given as it is: {recipe.program} {choice}.yaml"
            raise SettingsError(
                f"{group} has no choice {choice!r}.{_guess(str(choice), known[group])} There "
                f"are {', '.join(known[group])}.{own if group in FILES else ''}"
            )


def _check_setting(
    override: Override, known: Sequence[str], composed: DictConfig, known_groups: Collection[str]
) -> None:
    key = override.key_or_group
    if override.is_delete():
        raise SettingsError(f"{key} can't be taken out: give it a value, null for none.")
    if key in known or key.startswith(("hydra.", "hydra/")) or override.is_add():
        return
    parent, _, last = key.rpartition(".")
    if isinstance(OmegaConf.select(composed, parent), DictConfig) and parent.endswith("kwargs"):
        raise SettingsError(
            f"{parent} is a dictionary: write '{parent}={{{last}: ...}}' or +{override.input_line}."
        )
    of = f" of task={composed.task.id}" if parent == "task" else ""
    same = [name for name in known if name.rpartition(".")[2] == last]
    beside = [name for name in known if name.rpartition(".")[0] == parent != ""]
    guess = _guess(key, same or beside or known, {*known, *known_groups})
    if same and "Here" not in guess:
        guess = f" Did you mean {' or '.join(same)}?"
    if beside and not guess:
        guess = f" There are {', '.join(beside)}."
    raise SettingsError(f"There is no setting {key!r}{of}.{guess} --help shows all.")


def _guess(name: str, known: Collection[str], settings: Collection[str] = ()) -> str:
    """Guess the setting that is meant: other libraries call it so, or its name is similar."""
    for theirs, ours in OmegaConf.load(_ELSEWHERE).items() if settings else ():
        if f".{name}".endswith(f".{theirs}"):
            for text in ours:
                if text.split()[0] in settings or text.startswith(("task.", "hydra.")):
                    return f" Here it is {text}."
    close = get_close_matches(name, known, n=2, cutoff=0.75)
    return f" Did you mean {' or '.join(close)}?" if close else ""


# Settings that can't work are refused by name, before anything is loaded, torch included.

_RULES: Final[tuple[tuple[str, Callable[[Any], bool], str], ...]] = (
    (
        "at least 1",
        lambda x: x >= 1,
        "policy.max_model_len policy.max_new_tokens policy.lora_rank engine.num_engines "
        "collector.num_prompts collector.group_size collector.max_turns collector.num_collectors "
        "collector.max_episode_tokens collector.min_turn_tokens collector.verify_every "
        "warm_start.batch_size "
        "train.num_steps train.num_epochs train.micro_batch_tokens checkpoint.every "
        "evaluate.num_prompts evaluate.every evaluate.num_samples evaluate.max_rollouts",
    ),
    (
        "at least 0 and finite",
        lambda x: math.isfinite(x) and x >= 0,
        "collector.max_staleness collector.pipeline_depth optim.num_warmup_steps "
        "optim.weight_decay warm_start.num_steps checkpoint.keep_best evaluate.num_shown",
    ),
    (
        "positive and finite",
        lambda x: math.isfinite(x) and x > 0,
        "policy.lora_alpha optim.learning_rate optim.eps optim.max_grad_norm "
        "warm_start.learning_rate train.timeout_s train.wait_s",
    ),
    ("in [0, 1)", lambda x: 0 <= x < 1, "optim.beta1 optim.beta2 optim.momentum"),
    ("in [0, 1]", lambda x: 0 <= x <= 1, "collector.max_error_fraction"),
    ("from 0 to 2**63 - 1", lambda x: 0 <= x < 1 << 63, ".seed"),
    ("-1 or at least 1", lambda x: x == -1 or x >= 1, "collector.max_inflight_tasks"),
    ("at least 2: the newest may be damaged", lambda x: x >= 2, "checkpoint.keep_last"),
)
"""What a number must be, in words, and the settings of which that holds; ``None`` may always be."""


def check_rules(recipe: Recipe, cfg: RecipeConfig) -> None:
    """Refuse settings that can't work, as far as that is known without torch.

    Raises:
        SettingsError: names the setting, what it must be, and what it is.
    """
    check_path_parts(cfg.name, cfg.task.id)
    for words, holds, names in _RULES:
        for key in names.split():
            group, name = key.split(".")
            value = getattr(getattr(cfg, group, None) if group else cfg, name, None)
            if value is not None and not holds(value):
                raise SettingsError(f"{key.lstrip('.')} must be {words}, got {value}.")
    settings = OmegaConf.create(escaped(asdict(cfg)))
    backends = OmegaConf.select(settings, "logger.backends") or []
    listed = {f"logger.backends[{i}]": BACKENDS for i in range(len(backends))}
    for key, known in {**recipe.choices, **listed}.items():
        if (value := OmegaConf.select(settings, key)) not in (None, *known):
            raise SettingsError(f"{key} must be one of {', '.join(known)}, got {value!r}.")
    faults = [_policy_faults(cfg), _engine_faults(cfg), _invariance_faults(cfg)]
    if isinstance(cfg, TrainingConfig):
        faults.append(_training_faults(recipe, cfg))
    if isinstance(cfg, RolloutsConfig):
        faults.append(_rollout_faults(recipe, cfg))
        faults.append(_record_faults(cfg))
    # One after the other: what is looked at later may need that the rest is right.
    if (words := next(chain.from_iterable(faults), None)) is not None:
        raise SettingsError(words)


def _policy_faults(cfg: RecipeConfig) -> Iterator[str]:
    policy = cfg.policy
    if cfg.dry_run and (cfg.overwrite or cfg.resume is not None):
        yield "dry_run=true changes no earlier run: leave overwrite= and resume= out."
    if policy.add_control_tokens and (policy.model is None or cfg.engine.name != "transformers"):
        yield "policy.add_control_tokens of a policy.model is for one with engine=transformers."
    if policy.chat_template is not None and (policy.model is None or policy.chat_template_name):
        yield "policy.chat_template is for a policy.model, in place of policy.chat_template_name."
    if policy.model is None and policy.model_kwargs:
        yield "policy.model_kwargs are for a policy.model that is loaded."
    yield from _quantization_faults(cfg)
    data = getattr(cfg, "data", None)
    for where, source, suffixes in (
        (f"task={cfg.task.id}", getattr(cfg.task, "dataset", None), DATA_FILES),
        ("data.dataset", getattr(data, "dataset", None), DATA_FILES),
        # With engine=chat a model has its name at the server.
        (f"policy.model={policy.model}", cfg.engine.name != "chat" and policy.model, MODEL_FILES),
    ):
        with refusing(where):
            check_source(source, suffixes)
    rank = policy.lora_rank
    given = [name for name in ("lora_alpha", "lora_target_modules") if getattr(policy, name)]
    if rank is None and given:
        yield f"policy.{given[0]} is for adapters: set policy.lora_rank, too."
    if rank is not None and not isinstance(cfg, TrainingConfig):
        yield f"policy.lora_rank={rank}: nothing is trained here. Leave it out."
    if rank is not None and find_spec("peft") is None:
        yield "policy.lora_rank needs the package peft: pip install 'torchrl-agents[lora]'."


def _quantization_faults(cfg: RecipeConfig) -> Iterator[str]:
    policy = cfg.policy
    ways = {
        "policy.load_in_4bit": policy.load_in_4bit,
        "policy.model_kwargs.quantization_config": "quantization_config" in policy.model_kwargs,
    }
    given = [name for name, is_given in ways.items() if is_given]
    if not given:
        return
    who = given[-1]
    if len(given) > 1:
        yield f"{' and '.join(given)} say the same: leave one of them out."
    if policy.model is None:
        yield f"{who} is for a policy.model that is loaded."
    if find_spec("bitsandbytes") is None:
        install = "pip install 'torchrl-agents[qlora]'"
        yield f"{who} needs the package bitsandbytes, which is not here: {install}."
    if collects_on_ray(cfg) and cfg.engine.name == "transformers":
        yield f"{who}: collectors on Ray have no policy of 4 bits. Take engine=vllm."
    if not isinstance(cfg, TrainingConfig):
        if cfg.engine.name != "transformers":
            how = "vLLM quantises by settings of its own: engine.engine_kwargs.quantization."
            yield f"{who} is for engine=transformers. {how}"
    elif policy.lora_rank is None:
        yield f"{who}: weights of 4 bits are not trained. Train adapters: policy.lora_rank."
    elif num_ranks() > 1:
        yield f"{who} is for one process: of several ranks none would have its weights."


def num_ranks() -> int:
    """Return how many ranks torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _optimizer_faults(cfg: TrainingConfig) -> Iterator[str]:
    name = cfg.optim.name
    if name == "adamw8bit" and find_spec("bitsandbytes") is None:
        install = "pip install 'torchrl-agents[adamw8bit]'"
        yield f"optim.name=adamw8bit needs the package bitsandbytes, which is not here: {install}."
    if name in ("adamw8bit", "muon") and num_ranks() > 1 and cfg.train.parallel != "ddp":
        yield f"optim.name={name} needs whole parameters on each rank: train.parallel=ddp."
    if name != "muon" and cfg.optim.momentum != OptimConfig().momentum:
        yield f"optim.momentum is for optim.name=muon, not {name}."


def _training_faults(recipe: Recipe, cfg: TrainingConfig) -> Iterator[str]:
    yield from _optimizer_faults(cfg)
    if find_spec("matplotlib") is None:
        what = f"{recipe.name} draws its learning curve with matplotlib"
        yield f"{what}: pip install 'torchrl-agents[train]'."
    for backend in cfg.logger.backends:
        if backend != "csv" and find_spec(backend) is None:
            yield f"logger.backends: {backend} needs the package {backend}: pip install {backend}."
    if cfg.train.stop_at is not None and cfg.evaluate.every is None:
        yield f"train.stop_at={cfg.train.stop_at} needs tests between steps: set evaluate.every=."
    changed = [n for n in OF_RANKS if getattr(cfg.train, n) != getattr(TrainConfig(), n)]
    for name in changed:
        if num_ranks() == 1:
            yield f"train.{name} is for several ranks, which torchrun starts."
        elif name in ("num_replicas", "cpu_offload") and cfg.train.parallel != "fsdp2":
            yield f"train.{name} is for train.parallel=fsdp2, got {cfg.train.parallel}."
    yield from _split_faults(cfg)
    if cfg.train.num_replicas < 1 or num_ranks() % cfg.train.num_replicas:
        yield f"train.num_replicas={cfg.train.num_replicas} has to divide the {num_ranks()} ranks."
    if num_ranks() > 1 and cfg.engine.name == "vllm" and not _has_servers(cfg):
        yield "Several ranks need vLLM's servers: give engine.url=, urls= or devices=."


def _split_faults(cfg: TrainingConfig) -> Iterator[str]:
    """Faults of a model of which ranks compute parts of one layer."""
    train, ranks = cfg.train, num_ranks()
    matrices, experts = train.tensor_parallel_size, train.expert_parallel_size
    if min(matrices, experts) < 1:
        yield f"train.tensor_parallel_size={matrices}, expert_parallel_size={experts}: at least 1."
    elif ranks > 1 and train.splits_model:
        if ranks % matrices:
            yield f"train.tensor_parallel_size={matrices} has to divide the {ranks} ranks."
        if experts > 1 and (experts % matrices or ranks % experts):
            yield (
                f"train.expert_parallel_size={experts} has to be a multiple of "
                f"train.tensor_parallel_size={matrices}, and to divide the {ranks} ranks."
            )
        is_set = {
            "train.parallel=ddp": train.parallel == "ddp",
            "train.num_replicas": train.num_replicas > 1,
            "train.cpu_offload": train.cpu_offload,
            "train.compile_layers": bool(train.compile_layers),
            "policy.lora_rank": cfg.policy.lora_rank is not None,
            "policy.routed_experts": cfg.policy.routed_experts,
            "engine.batch_invariant": cfg.engine.batch_invariant,
        }
        for name in (name for name, value in is_set.items() if value):
            yield (
                f"{name} does not go with train.tensor_parallel_size and expert_parallel_size: "
                "leave one of them out."
            )


def _has_servers(cfg: RecipeConfig) -> bool:
    """Return whether vLLM runs in processes of its own, wherever they are started."""
    engine = cfg.engine
    return bool(engine.url or engine.urls or engine.starts_servers) or collects_on_ray(cfg)


def _invariance_faults(cfg: RecipeConfig) -> Iterator[str]:
    engine, policy = cfg.engine, cfg.policy
    if not engine.batch_invariant:
        return
    if engine.name == "chat":
        yield "engine.batch_invariant is for engine=transformers or vllm, not for a chat server."
    if engine.url or engine.urls:
        yield (
            "engine.batch_invariant can't reach a server that runs already: start it with "
            "VLLM_BATCH_INVARIANT=1 in its environment, and leave engine.batch_invariant out."
        )
    if engine.name != "transformers":
        return
    why = "engine.batch_invariant of engine=transformers is for float32 on a CPU, got"
    if policy.dtype != "float32":
        yield f"{why} policy.dtype={policy.dtype}."
    if policy.device is not None and policy.device != "cpu":
        yield f"{why} policy.device={policy.device}."
    if policy.gradient_checkpointing:
        yield (
            "engine.batch_invariant: layers that are computed again in the backward pass would "
            "take other kernels: set policy.gradient_checkpointing=false."
        )
    train = cfg.train if isinstance(cfg, TrainingConfig) else None
    if train is not None and train.autocast:
        yield f"{why} train.autocast=true."
    if train is not None and train.compile_layers:
        yield "engine.batch_invariant goes without train.compile_layers: leave one of them out."


def _engine_faults(cfg: RecipeConfig) -> Iterator[str]:
    engine, longest = cfg.engine, cfg.policy.max_model_len
    is_vllm = engine.name == "vllm"
    if not is_vllm and (engine.urls or engine.starts_servers):
        yield "engine.urls, num_engines and devices are for engine=vllm."
    if bool(engine.url) + bool(engine.urls) + engine.starts_servers > 1:
        yield "engine.url, engine.urls, and num_engines with devices: give one of them."
    if len(engine.devices) % engine.num_engines:
        yield (
            f"engine.devices={engine.devices} are shared out to engine.num_engines="
            f"{engine.num_engines}: take a multiple of them of devices."
        )
    if is_vllm and (engine.url or engine.urls) and longest:
        yield (
            f"policy.max_model_len={longest}: a server at engine.url has the length that it was "
            "started with (--max-model-len). Leave it out."
        )
    if (engine.name == "transformers" and engine.url) or (not is_vllm and engine.engine_kwargs):
        yield "engine.url and engine.engine_kwargs are for engine=vllm."
    in_steps = isinstance(cfg, RolloutsConfig) and cfg.collector.mode == "sync"
    if engine.colocate and not (is_vllm and in_steps):
        yield "engine.colocate lends the memory of engine=vllm to a step: it needs collector=sync."
    own_adapters = engine.engine_kwargs.get("enable_lora")
    if own_adapters and cfg.policy.lora_rank is None:
        yield "engine.engine_kwargs.enable_lora needs policy.lora_rank."
    if own_adapters and (engine.url or engine.urls):
        yield "engine.engine_kwargs.enable_lora: start the servers with --enable-lora instead."
    if engine.name == "chat" and not (engine.url and cfg.policy.model):
        yield "engine=chat needs engine.url=http://.../v1 and policy.model=, its name there."


def _rollout_faults(recipe: Recipe, cfg: RolloutsConfig) -> Iterator[str]:
    collector, default = cfg.collector, CollectorConfig()
    if compares_groups(recipe, cfg) and collector.group_size < 2:
        yield (
            "collector.group_size must be at least 2: a group of one never has a signal. One "
            "rollout a prompt goes with loss.advantage=batch_mean or running_mean of grpo."
        )
    yield from _refill_faults(recipe, cfg)
    for name in (
        *("max_staleness", "staleness_policy", "pipeline_depth", "recompute", "follow_load"),
        "max_inflight_tasks",
    ):
        if collector.mode == "sync" and getattr(collector, name) != getattr(default, name):
            yield f"collector.{name} is for collector=streaming."
    if collector.follow_load and cfg.engine.name != "vllm":
        yield "collector.follow_load needs engine=vllm: other engines don't tell how full they are."
    if collector.mode != "ray" and (collector.num_collectors > 1 or collector.remote_config):
        yield "collector.num_collectors and remote_config are for collector=ray."
    if collects_on_ray(cfg) and cfg.engine.name == "vllm":
        yield from _ray_faults(cfg)
    for key, bound in (
        ("policy.max_model_len", cfg.policy.max_model_len),
        ("collector.max_episode_tokens", collector.max_episode_tokens),
    ):
        least = collector.min_turn_tokens
        if bound is not None and bound < least:
            yield f"{key}={bound} leaves no room for a turn of collector.min_turn_tokens={least}."
    if cfg.policy.temperature <= 0:
        yield f"policy.temperature must be positive for a signal, got {cfg.policy.temperature}."


def _record_faults(cfg: RolloutsConfig) -> Iterator[str]:
    if cfg.collector.verify_every is not None and num_ranks() > 1:
        yield "collector.verify_every is for one rank: leave it out."
    if cfg.record.kept_counts and cfg.engine.name != "transformers":
        yield "record.kept_counts needs engine=transformers: other engines don't tell them."
    truncates = cfg.policy.top_k > 0 or cfg.policy.top_p < 1 or cfg.policy.min_p > 0
    if cfg.policy.routed_experts and (
        cfg.engine.name != "transformers" or cfg.collector.mode != "sync"
    ):
        yield (
            "policy.routed_experts is for engine=transformers and collector=sync, got "
            f"engine={cfg.engine.name} and collector={cfg.collector.mode}: others don't tell them."
        )
    if cfg.policy.routed_experts and cfg.policy.gradient_checkpointing:
        yield (
            "policy.routed_experts are not replayed where layers are computed again in the "
            "backward pass: set policy.gradient_checkpointing=false."
        )
    if cfg.policy.sampling_mask and not truncates:
        yield "policy.sampling_mask is for policy.top_k, top_p or min_p: nothing is left out."
    if cfg.policy.sampling_mask and cfg.engine.name == "chat":
        yield "policy.sampling_mask needs engine=transformers or vllm: a server does not tell it."
    urls = cfg.engine.url or cfg.engine.urls
    served = cfg.engine.starts_servers or urls or collects_on_ray(cfg)
    if cfg.policy.sampling_mask and cfg.engine.name == "vllm" and served:
        yield "policy.sampling_mask needs an engine of this process: leave servers of vLLM out."
    if not cfg.record.replay and not (cfg.policy.sampling_mask or cfg.policy.routed_experts):
        yield (
            "record.replay=false leaves out what policy.sampling_mask and policy.routed_experts "
            "record, and neither is on: leave it out."
        )
    if cfg.record.kept_counts and not truncates:
        yield "record.kept_counts is for policy.top_k, top_p or min_p: nothing is left out."


def _refill_faults(recipe: Recipe, cfg: RolloutsConfig) -> Iterator[str]:
    collector = cfg.collector
    if collector.refill and not compares_groups(recipe, cfg):
        what = "this loss.advantage" if recipe.needs_groups else recipe.name
        yield f"collector.refill: {what} has no groups without a signal. Leave it out."
    if collector.max_draws != CollectorConfig().max_draws and not collector.refill:
        yield "collector.max_draws is for collector.refill=true."
    if collector.refill and getattr(cfg.train, "shuffle_rewards", False):
        yield "collector.refill chooses groups before train.shuffle_rewards: take one of them."


def _ray_faults(cfg: RolloutsConfig) -> Iterator[str]:
    """Each collector has a copy of the model, or starts servers of its own."""
    engine, count = cfg.engine, cfg.collector.num_collectors
    for name in ("url", "urls", "devices"):
        if getattr(engine, name):
            yield (
                f"engine.{name}: on Ray each collector starts servers of its own, on the GPUs that "
                "+collector.remote_config.num_gpus= gives it. Leave it out."
            )
    if engine.num_engines % count:
        yield (
            f"engine.num_engines={engine.num_engines} are shared out to collector.num_collectors="
            f"{count}: take a multiple of them of engines."
        )
    if "max_model_len" in engine.engine_kwargs:
        yield "engine.engine_kwargs.max_model_len: Ray bounds episodes by policy.max_model_len."


# What a run wrote down of its command line.

OF_RANKS: Final = (
    *("parallel", "reduce", "num_replicas", "cpu_offload"),
    *("tensor_parallel_size", "expert_parallel_size"),
)
"""Settings of training that are of several ranks alone."""
AUTO: Final = "auto"
RECORD: Final = "run.json"


def with_recorded(arguments: Sequence[str]) -> list[str]:
    """Arguments of a command line, with those of the run that it resumes before them.

    Args:
        arguments: without the program's name; ``resume=<folder>`` stands for all that the run was
            started with.

    Raises:
        SettingsError: the folder holds no run.
    """
    given = _by_name(arguments)
    folder = given.get("resume", "").partition("=")[2]
    if folder in ("", AUTO, "null"):
        return list(arguments)
    recorded = _by_name(read_record(Path(folder))["command"][1:])
    new = {*given, "overwrite", "resume", "-m", "--multirun"}
    if num_ranks() == 1:  # it goes on with any number of ranks, one included
        new |= {f"train.{name}" for name in OF_RANKS}
    return [*(text for name, text in recorded.items() if name not in new), *arguments]


def _by_name(arguments: Sequence[str]) -> dict[str, str]:
    return {name_of(each): each for each in arguments}


def read_record(folder: Path) -> dict[str, Any]:
    """Return what a run wrote down of itself.

    Raises:
        SettingsError: there is none in the folder.
    """
    try:
        return json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"resume={folder}: it holds no run: {error}.") from error
