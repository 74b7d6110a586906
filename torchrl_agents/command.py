"""The command ``torchrl-agents``: recipes by name, and what is done with what they leave.

    torchrl-agents grpo task=gsm8k policy.model=Qwen/Qwen3-0.6B
    torchrl-agents --help

It imports nothing heavy: a recipe is a script, which runs in place of this one.
"""

import ast
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

RECIPES: Final = (
    Path(__file__).parent / "recipes",  # in a wheel
    Path(__file__).parents[1] / "sota-implementations",  # in a checkout
)
"""Where the scripts are, the first that there is: each in a folder of its name."""


class Alias(NamedTuple):
    """A recipe that is an experiment of another one."""

    recipe: str
    """The other one."""
    experiment: str
    """Of its ``config/experiment/``."""
    summary: str
    """One line for the help."""


ALIASES: Final[dict[str, Alias]] = {
    "lora": Alias("expert-iteration", "lora", "low-rank adapters are trained, and nothing else."),
    "multi-environment": Alias("grpo", "multi_environment", "several tasks in one run, by shares."),
    "search-agent": Alias("grpo", "search_agent", "multi-hop questions and a search tool."),
}
"""Recipes without a script of their own, by name."""


class Command(NamedTuple):
    """Something to do that is no recipe."""

    summary: str
    """One line for the help."""
    function: str
    """``module:function``, imported when it is called: gets the arguments, gives the status."""


COMMANDS: Final[dict[str, Command]] = {
    "view": Command("show the rollouts of a run", "collectors.record.view:main"),
}
"""What can be done beside recipes, by its name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says.

    Args:
        arguments: without the program's name; those of this process when not given.

    Returns:
        The exit status.
    """
    name, *rest = sys.argv[1:] if arguments is None else arguments or ["--help"]
    scripts = recipes()
    if name in ("--help", "-h", "help"):
        print(help_text(scripts))
        return 0
    if name == "--version":
        print(_version())
        return 0
    if name in COMMANDS:
        module, _, function = COMMANDS[name].function.partition(":")
        run: Callable[[Sequence[str]], int] = getattr(import_module(module), function)
        return run(rest)
    if name in ALIASES:
        return _run_alias(name, scripts, rest)
    if name in scripts:
        return _become([sys.executable, str(scripts[name]), *rest])
    close = get_close_matches(name, [*scripts, *ALIASES, *COMMANDS], n=1, cutoff=0.5)
    guess = f" Did you mean {close[0]}?" if close else ""
    print(f"torchrl-agents: there is no command {name!r}.{guess} See --help.", file=sys.stderr)
    return 2


def recipes() -> dict[str, Path]:
    """The script of each recipe, by its name."""
    folder = next((path for path in RECIPES if path.is_dir()), None)
    if folder is None:
        return {}
    scripts = [each / f"{each.name.replace('-', '_')}.py" for each in sorted(folder.iterdir())]
    return {path.parent.name: path for path in scripts if path.is_file()}


def _run_alias(name: str, scripts: Mapping[str, Path], arguments: Sequence[str]) -> int:
    alias = ALIASES[name]
    given = next((each for each in arguments if each.startswith("experiment=")), None)
    if given is not None:
        print(
            f"torchrl-agents {name} is {alias.recipe} experiment={alias.experiment}, so {given} "
            f"has no place: set what it sets, or say torchrl-agents {alias.recipe} {given}.",
            file=sys.stderr,
        )
        return 2
    chosen = f"experiment={alias.experiment}"
    return _become([sys.executable, str(scripts[alias.recipe]), chosen, *arguments])


def _become(command: list[str]) -> NoReturn:
    """Run something in place of this process, signals and exit status included."""
    sys.stdout.flush()
    os.execv(command[0], command)


def help_text(scripts: dict[str, Path]) -> str:
    """Every command in a line.

    Args:
        scripts: of the recipes, by name.
    """
    width = 2 + max(map(len, [*scripts, *ALIASES, *COMMANDS]), default=0)
    lines = ["usage: torchrl-agents COMMAND [ARGUMENTS]", "", "Recipes (setting=value):"]
    for name, path in scripts.items():
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines.append(f"  {name:<{width}}{text.partition(chr(10))[0]}")
    lines += ["", "Experiments of these, by names of their own:"]
    for name, (recipe, experiment, summary) in ALIASES.items():
        lines.append(f"  {name:<{width}}{recipe} experiment={experiment}: {summary}")
    if COMMANDS:
        lines += ["", "And:"]
        lines += [f"  {name:<{width}}{each.summary}" for name, each in COMMANDS.items()]
    return "\n".join(
        [
            *lines,
            "",
            "torchrl-agents COMMAND --help shows what it takes, with task=NAME that of a task too.",
            "Results are in outputs/, below the folder where it is called.",
        ]
    )


def _version() -> str:
    try:
        return version("torchrl-agents")
    except PackageNotFoundError:
        return "unknown: not installed"
