"""The command line of a recipe: read, completed, and refused in words."""

import gc
import os
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Final, cast

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import AnyNode, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrl_data.output_file import output_folder
from torchrl_envs.tasks import TASKS

from . import SUBMITS, escape_what_the_output_lacks
from .arguments import FOLDERS, setting_names
from .errors import SettingsError
from .field_rules import FieldRule, rule_of
from .recipe import FILES, Recipe
from .recipe_help import recipe_help
from .recorded_arguments import with_recorded
from .rules import check_rules
from .schema import RecipeConfig
from .setting_files import with_files
from .task_settings import store_task, task_settings
from .text_arguments import with_texts

_ELSEWHERE: Final = Path(__file__).with_name("elsewhere.yaml")
"""What other libraries call settings."""
_OF_OWN_PARTS: Final = ("task.factory", "task.tools", "task.rewards")
"""Settings that are parts of the user's own, for which the task is ``environment``."""

# ``${of_embedded:VALUE}`` in a file of settings: none where a model is given.
OmegaConf.register_new_resolver(
    "of_embedded",
    lambda value, *, _root_: value if _root_.policy.model is None else None,
    replace=True,
)


def read_command_line(recipe: Recipe) -> None:
    """Refuse what is wrong with the command line of this process, or show the help it asks for.

    A recipe calls it first, before it imports torch, which takes seconds. From here on the user's
    modules are found, in workers too, and Hydra knows the settings of the task.

    Args:
        recipe: whose command line it is.

    Raises:
        SystemExit: says what is wrong; or the help was shown.
    """
    escape_what_the_output_lacks()
    here = str(Path.cwd())
    sys.path.append(here)  # after all installed ones
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), here]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    from_files: dict[str, str] = {}
    kept: dict[tuple[str | None, ...], DictConfig] = {}

    def chosen(choices: Sequence[Override]) -> DictConfig:
        lines = tuple(each.input_line for each in choices)
        if lines not in kept:
            kept[lines] = _chosen(recipe, choices)
        return kept[lines]

    try:
        _refuse_options(recipe, sys.argv[1:])
        arguments, from_files = with_files(recipe, sys.argv[1:])
        arguments = with_recorded(arguments)
        names = {argument.partition("=")[0].lstrip("+") for argument in arguments}
        if names & {*_OF_OWN_PARTS} and "task" not in names:
            arguments = ["task=environment", *arguments]
        if "--shell-completion" not in arguments:  # argparse reads overrides in one place
            arguments.sort(key=lambda each: "=" in each and not each.startswith("-"))
            arguments = with_texts(recipe, arguments, chosen)
        sys.argv[1:] = arguments
        text = prepare(recipe, arguments, chosen)
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
        if name in ("-cn", "-cp", "-cd") or name.startswith("--config"):
            file = given or value
            file = file if file.endswith((".yaml", ".yml")) else "run.yaml"
            raise SettingsError(
                f"{name} is not for settings of your own: give their file as it is, "
                f"{recipe.program} {file} setting=value."
            )


def _refuse_without_effect(told: Mapping[str, object]) -> None:
    """Refuse options of Hydra that would do nothing here."""
    for option in ("package", "resolve"):
        if told[option] and not told["cfg"]:
            raise SettingsError(f"--{option} is for what --cfg job prints: give both, or neither.")


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
        _refuse_to_take_out(override)
        _check_choice(recipe, known, override)
    one = [each for each in choices if not each.is_sweep_override()]
    return compose_config(recipe, [each.input_line or "" for each in one])


def prepare(
    recipe: Recipe,
    arguments: Sequence[str],
    chosen: Callable[[Sequence[Override]], DictConfig] | None = None,
) -> str | None:
    """Make the command line's task known, and check what is on it without importing torch.

    Args:
        recipe: whose settings they are.
        arguments: without the program's name.
        chosen: gives the settings for choices of groups, where some are composed already.

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
    _refuse_without_effect(told)
    choices = [o for o in overrides if o.key_or_group in known_groups]
    composed = chosen(choices) if chosen else _chosen(recipe, choices)
    one = [o for o in overrides if not o.is_sweep_override()]
    if told["multirun"] and any(o.key_or_group == "resume" for o in overrides):
        raise SettingsError("resume= goes on with one run: without --multirun, the folder of each.")
    known = sorted(setting_names(composed))
    if completes:
        return "\n".join(sorted(_continuations(recipe, word, composed)))
    own_parts = () if any(each.key_or_group == "task" for each in choices) else _OF_OWN_PARTS
    # A typing error in what the task would follow from comes before what is unknown without it.
    for override in sorted(overrides, key=lambda o: not _similar(o.key_or_group, own_parts)):
        if override not in choices:
            _check_setting(override, known, composed, known_groups, own_parts)
    # Values of a wrong type show here, in one line, and not when Hydra has begun a run.
    typed = _typed(recipe, composed, one, choices)
    for override in (o for o in overrides if o.is_sweep_override() and o not in choices):
        _check_sweep(recipe, typed, override)
    if shows_help:
        return recipe_help(recipe, composed, known_groups)
    if one == overrides and (SUBMITS in os.environ or not any(told.values())):
        task_settings(typed)
        check_rules(recipe, cast("RecipeConfig", OmegaConf.to_object(typed)))
    return None


def _typed(
    recipe: Recipe, composed: DictConfig, given: Sequence[Override], choices: Sequence[Override]
) -> DictConfig:
    """The settings with all values, from those of the choices where Hydra itself is given none.

    Raises:
        SettingsError: they do not go together.
    """
    if any(each.is_hydra_override() for each in given):
        return compose_config(recipe, [each.input_line or "" for each in given])
    typed = composed.copy()
    with _in_words():
        ConfigLoaderImpl._apply_overrides_to_config(
            [each for each in given if each not in choices], typed
        )
    return typed


def _continuations(recipe: Recipe, word: str, composed: DictConfig) -> set[str]:
    """Continuations of a word: up to the next ``.`` or ``=``, or to its end and a space."""
    name, given, _ = word.partition("=")
    known_groups = groups(recipe)
    if given:
        rule = _rule_of(recipe, composed, name)
        is_flag = isinstance(OmegaConf.select(composed, name), bool)
        usual = (rule.values if rule else ()) or ("true", "false") * is_flag
        values = known_groups.get(name, usual)
        return {f"{name}={value} " for value in values if f"{name}={value}".startswith(word)}
    leaves = (
        n for n in setting_names(composed) if not OmegaConf.is_dict(OmegaConf.select(composed, n))
    )
    used = (each for each in (*known_groups, *leaves) if recipe.why_unused(each) is None)
    names = [f"{each}=" for each in used if each.startswith(word)]
    return {each[: each.find(".", len(word)) + 1] or each for each in names}


def compose_config(recipe: Recipe, overrides: Sequence[str]) -> DictConfig:
    """The settings that a command line gives.

    Raises:
        SettingsError: they do not go together.
    """
    with (
        _in_words(),
        initialize_config_dir(version_base="1.3", config_dir=str(recipe.config_dir)),
    ):
        return compose(config_name=recipe.name, overrides=list(overrides))


@contextmanager
def _in_words() -> Iterator[None]:
    """Raise what Hydra says of settings as a :class:`SettingsError`."""
    try:
        yield
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
            settings = {*setting_names(compose_config(recipe, [])), *known}
            guess = _guess(f"{group}={choice}", (), settings) or _guess(str(choice), known[group])
            raise SettingsError(
                f"{group} has no choice {choice!r}.{guess} There are {', '.join(known[group])}."
                f"{own if group in FILES else ''}"
            )


def _check_setting(
    override: Override,
    known: Sequence[str],
    composed: DictConfig,
    known_groups: Collection[str],
    own_parts: Sequence[str] = (),
) -> None:
    key = override.key_or_group
    if key in FOLDERS and isinstance(folder := override.value(), str) and "$" not in folder:
        try:
            output_folder(folder)
        except ArgumentTypeError as error:
            raise SettingsError(f"{key}: {error}") from error
    _refuse_to_take_out(override)
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside and "." in key and isinstance(override.value(), str | int | float):
        raise SettingsError(f"{key} is a group: {', '.join(inside)}.")
    if key in known or key.startswith(("hydra.", "hydra/")):
        return
    if (override.is_add() or override.is_force_add()) and _is_in_dictionary(composed, key):
        return
    parent, _, last = key.rpartition(".")
    node = OmegaConf.select(composed, parent)
    if isinstance(node, DictConfig) and OmegaConf.get_type(node) is dict:
        raise SettingsError(
            f"{parent} is a dictionary: write '{parent}={{{last}: ...}}' or +{override.input_line}."
        )
    of = f" of task={composed.task.id}" if parent == "task" else ""
    same = [name for name in known if name.rpartition(".")[2] == last]
    beside = [name for name in known if name.rpartition(".")[0] == parent != ""]
    own_parts = _similar(key, own_parts)
    guess = _guess(key, own_parts or same or beside or known, {*known, *known_groups})
    if same and not own_parts and "Here" not in guess:
        guess = f" Did you mean {' or '.join(same)}?"
    if beside and not guess:
        guess = f" There are {', '.join(beside)}."
    raise SettingsError(f"There is no setting {key!r}{of}.{guess} --help shows all.")


def _refuse_to_take_out(override: Override) -> None:
    """Refuse ``~name``: what is not given has its default."""
    if override.is_delete():
        name = override.key_or_group
        raise SettingsError(f"{name} can't be taken out: give it a value, null for none.")


def _is_in_dictionary(composed: DictConfig, key: str) -> bool:
    """Tell whether a name that no setting has is inside one that takes names of the user's own."""
    node: object = composed
    for part in key.split(".")[:-1]:
        inside = isinstance(node, DictConfig) and not node._is_none() and part in node
        if not inside:
            break
        node = cast("DictConfig", node)._get_node(part)
    if not isinstance(node, DictConfig):
        return isinstance(node, AnyNode) and not is_dataclass(node._metadata.ref_type)
    return not is_dataclass(OmegaConf.get_type(node)) and not is_dataclass(node._metadata.ref_type)


def _check_sweep(recipe: Recipe, cfg: DictConfig, override: Override) -> None:
    """Refuse a value of a wrong type, or that breaks its setting's rule, before a run begins."""
    rule = _rule_of(recipe, cfg, override.key_or_group)
    is_hydras = override.key_or_group.startswith(("hydra.", "hydra/"))
    if override.is_add() or is_hydras or not override.is_discrete_sweep():
        return
    for given in override.sweep_iterator():
        changed = cfg.copy()
        OmegaConf.set_struct(changed, False)  # a dictionary may get names of its own
        try:
            text = given.text if isinstance(given, QuotedString) else given
            OmegaConf.update(changed, override.key_or_group, text)
        except OmegaConfBaseException as error:
            raise SettingsError(f"{override.key_or_group}: {str(error).splitlines()[0]}") from error
        value = OmegaConf.select(changed, override.key_or_group)
        for fault in rule.breaches(override.key_or_group, value) if rule else ():
            raise SettingsError(fault)


def _rule_of(recipe: Recipe, cfg: DictConfig, path: str) -> FieldRule | None:
    """Return the rule of a setting: of the recipe where it depends on its groups, or its field's.

    Args:
        recipe: whose setting it is.
        cfg: the settings as they are known so far.
        path: of the setting.
    """
    group, _, name = path.rpartition(".")
    kind = OmegaConf.get_type(OmegaConf.select(cfg, group) if group else cfg)
    return recipe.rules.get(path) or rule_of(kind or object, name)


def _guess(name: str, known: Collection[str], settings: Collection[str] = ()) -> str:
    """Guess the setting that is meant: other libraries call it so, or its name is similar."""
    for theirs, ours in OmegaConf.load(_ELSEWHERE).items() if settings else ():
        if f".{name}".endswith(f".{theirs}"):
            for text in ours:
                if text.split()[0].partition("=")[0] in settings or text.startswith(
                    ("task.", "hydra.")
                ):
                    return f" Here it is {text}."
    close = _similar(name, known)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _similar(name: str, known: Collection[str]) -> list[str]:
    """Names that may be meant by one that is typed, the most similar first."""
    return get_close_matches(name, known, n=2, cutoff=0.75)
