"""The command ``torchrl-agents``: recipes by name, and what is done with what they leave.

    torchrl-agents grpo task=gsm8k policy.model=Qwen/Qwen3-0.6B
    torchrl-agents --help

It imports nothing heavy: a recipe is a script, which runs in place of this one.
"""

import ast
import json
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, Final

from torchrl_data import import_package, page
from torchrl_data.releases import TESTED, installed_release, untested

from .settings import TYPED_AS, escape_what_the_output_lacks

RECIPES: Final = (
    Path(__file__).parent / "recipes",  # in a wheel
    Path(__file__).parents[1] / "sota-implementations",  # in a checkout
)
"""Where the scripts are, the first that there is: each in a folder of its name."""


ALIASES: Final = {
    "lora": ("expert-iteration", "lora", "low-rank adapters are trained, and nothing else."),
    "multi-environment": ("grpo", "multi_environment", "several tasks in one run, by shares."),
    "search-agent": ("grpo", "search_agent", "multi-hop questions and a search tool."),
}
"""Recipes without a script of their own, by name: the recipe of which each is an experiment, the
file in its ``config/experiment/``, and one line for the help."""


COMMANDS: Final = {
    "audit": (
        "torchrl_agents.model_audit:main",
        "let agents that deserve nothing do a task, and say what is wrong with it",
    ),
    "completion": (
        f"{__name__}:completion",
        'print what completes command lines: eval "$(torchrl-agents completion bash)", or zsh',
    ),
    "convert": (
        "collectors.record.convert:main",
        "write rollouts as ATIF, preference pairs or labels, or trajectories of others as rows",
    ),
    "doctor": (f"{__name__}:doctor", "tell what is installed and what is missing"),
    "explain": (
        "torchrl_agents.explain.command:main",
        "say in words what holds a run back, and which setting to change",
    ),
    "serve-training": (
        "torchrl_agents.training_service.command:main",
        "train and sample adapters for clients of Tinker, over HTTP",
    ),
    "slurm": (
        "torchrl_agents.slurm:main",
        "run a recipe as a job of SLURM, which saves and is queued again before its time is over",
    ),
    "verify": (
        "torchrl_agents.verify:main",
        "compute each recorded token of a run again, and say why those that differ do",
    ),
    "view": ("collectors.record.view:main", "show the rollouts of a run"),
}
"""What can be done beside recipes, by its name: ``module:function``, which is imported when it is
called, gets the arguments and gives the status; and one line for the help."""


_USAGES: Final = {
    "completion": (
        "usage: torchrl-agents completion bash|zsh\n\n"
        "Prints what completes the names of commands, settings and their values. It goes into the\n"
        'file that the shell reads first, as: eval "$(torchrl-agents completion bash)"'
    ),
    "doctor": (
        "usage: torchrl-agents doctor [--import]\n\n"
        "Tells what is installed, and what is missing for which feature. With --import each\n"
        "package is imported, which takes a minute, and what it lacks itself is told."
    ),
}
"""The help of the commands whose functions are here."""


FEATURES: Final = tomllib.loads(Path(__file__).with_name("features.toml").read_text("utf-8"))
"""What ``doctor`` looks for, by what one does with it; the first is needed whatever one does."""


def doctor(arguments: Sequence[str]) -> int:
    """Print what is installed, and what is missing for which feature.

    Args:
        arguments: none, and nothing is imported; or ``--import``: each package is, which takes a
            minute, and what it lacks itself is told.

    Returns:
        0, or 1 if the library itself can't run, or 2 for other arguments.
    """
    if [*arguments] not in ([], ["--import"]):
        told = f"takes --import or nothing, got {[*arguments]}"
        print(f"torchrl-agents doctor {told}.", file=sys.stderr)
        return 2
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = "with a driver of NVIDIA's" if which("nvidia-smi") else "no NVIDIA GPU"
    print(f"torchrl-agents {_version()}, Python {sys.version.split()[0]}")
    print(f"this machine: {os.cpu_count()} cores, {memory:.0f} GiB of memory, {gpu}")
    width = 2 + max(map(len, [*TESTED, *FEATURES]))
    print("releases:")
    for package, (oldest, newest) in TESTED.items():
        release = installed_release(package) or "not installed"
        word = "  NOT TESTED" if untested(package) else ""
        print(f"  {package:<{width}}{release} (tested: {oldest} to {newest}){word}")
    print("features:")
    able = True
    for feature, its in FEATURES.items():
        missing = [name for name in its["needs"] if not _is_there(name)]
        names = ", ".join(name.rpartition(":")[2] for name in missing).replace("|", " or ")
        told = f"missing {names}: {its['remedy']} ({page(its['page'])})" if missing else "ready"
        if not missing and any(name.startswith("isolation:") for name in its["needs"]):
            told = "ready (code: {}; agents' programs: {})".format(*_isolations())
        if arguments and not missing:
            told = "; ".join(_faults(feature, its)) or told
        able = able and (told == "ready" or feature != "the library")
        print(f"  {feature:<{width}}{told}")
    return 0 if able else 1


def _faults(feature: str, its: Mapping[str, Any]) -> list[str]:
    """Errors of importing the packages of a feature, and what the packages can't do."""
    faults = []
    for name in (name for name in its["needs"] if ":" not in name):
        try:
            import_package(name, who=feature, install=its["remedy"])
        except Exception as error:  # whatever a package does as it is imported
            faults.append(str(error) or type(error).__name__)
    if feature == "vLLM" and not faults:
        from torchrl_modules.vllm.releases import lacking

        faults = [f"ready, but it lacks: {words}" for words in lacking()]
    return faults


def completion(arguments: Sequence[str]) -> int:
    """Print the script for a shell, or what it asks for: how a command line may go on.

    Args:
        arguments: ``bash`` or ``zsh``; or ``words`` and what is typed, up to the cursor.

    Returns:
        0, or 1 where the line can't go on, or 2 for other arguments.
    """
    match [*arguments]:
        case ["bash" | "zsh"]:
            print(Path(__file__).with_name("completion.sh").read_text(encoding="utf-8"), end="")
        case ["words", typed]:
            before, _, last = typed.rpartition(" ")
            scripts = recipes()
            try:
                _, *words = shlex.split(before)
            except ValueError:  # a quotation is not closed: nothing of ours goes on there
                return 1
            if words and words[0] in {**scripts, **ALIASES} and not last.startswith("-"):
                return _run_recipe(
                    words[0], scripts, [*words[1:], last, "--shell-completion"], typed=words[0]
                )
            known = ["--help", "--multirun"] if words else [*scripts, *ALIASES, *COMMANDS, "--help"]
            print("\n".join(f"{name} " for name in known if name.startswith(last)))
        case _:
            told = f"takes bash or zsh, got {[*arguments]}"
            print(f"torchrl-agents completion {told}.", file=sys.stderr)
            return 2
    return 0


def _is_there(name: str) -> bool:
    kind, _, names = name.rpartition(":")
    if not kind:
        return find_spec(name) is not None
    return any(_isolations()) if kind == "isolation" else any(map(which, names.split("|")))


_ISOLATIONS: Final = """
import json
from torchrl_envs.sandbox.program_check import working_ways
print(json.dumps(working_ways()))
"""


@cache
def _isolations() -> tuple[str | None, str | None]:
    """How code is isolated here, and how agents' programs are confined; both are tried."""
    # In a process of its own, because the sandbox imports what this one does without.
    done = subprocess.run(
        [sys.executable, "-c", _ISOLATIONS], capture_output=True, text=True, check=False
    )
    ways = json.loads(done.stdout) if done.returncode == 0 else (None, None)
    return ways[0], ways[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says.

    Args:
        arguments: without the program's name; those of this process when not given.

    Returns:
        The exit status.
    """
    escape_what_the_output_lacks()
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    scripts = recipes()
    if name in ("--help", "-h") or (name == "help" and not rest):
        print(help_text(scripts))
        return 0
    if name == "--version":
        print(_version())
        return 0
    if name == "help":  # help NAME
        name, rest = rest[0], ["--help"]
    if name in _USAGES and rest in (["--help"], ["-h"]):
        print(_USAGES[name])
        return 0
    if name in COMMANDS:
        module, _, function = COMMANDS[name][0].partition(":")
        run: Callable[[Sequence[str]], int] = getattr(import_module(module), function)
        try:
            status = run(rest)
            sys.stdout.flush()
        except BrokenPipeError:  # who read what is printed has seen enough, such as head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        except OSError as error:
            if error.filename is None:  # of no file: a fault of ours
                raise
            print(f"torchrl-agents {name}: {error}", file=sys.stderr)
            return 1
        return status
    if name in {**scripts, **ALIASES}:
        return _run_recipe(name, scripts, rest, typed=name)
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


def _run_recipe(
    name: str, scripts: Mapping[str, Path], arguments: Sequence[str], *, typed: str
) -> int:
    """Become its script, signals and exit status included."""
    if name in scripts:
        sys.stdout.flush()
        program = [sys.executable, str(scripts[name]), *arguments]
        os.execve(sys.executable, program, {**os.environ, TYPED_AS: f"torchrl-agents {typed}"})
    recipe, experiment, _ = ALIASES[name]
    given = next((each for each in arguments if each.startswith("experiment=")), None)
    if given is not None:
        print(
            f"torchrl-agents {name} is {recipe} experiment={experiment}, so {given} has no place: "
            f"set what it sets, or say torchrl-agents {recipe} {given}.",
            file=sys.stderr,
        )
        return 2
    return _run_recipe(recipe, scripts, [f"experiment={experiment}", *arguments], typed=typed)


def help_text(scripts: dict[str, Path]) -> str:
    """Every command in a line.

    Args:
        scripts: of the recipes, by name.
    """
    width = 2 + max(map(len, [*scripts, *ALIASES, *COMMANDS]))
    lines = ["usage: torchrl-agents COMMAND [ARGUMENTS]", "", "Recipes (setting=value):"]
    for name, path in scripts.items():
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines.append(f"  {name:<{width}}{text.partition(chr(10))[0]}")
    lines += ["", "Experiments of these, by names of their own:"]
    for name, (recipe, experiment, summary) in ALIASES.items():
        lines.append(f"  {name:<{width}}{recipe} experiment={experiment}: {summary}")
    lines += ["", "And:", *(f"  {name:<{width}}{told}" for name, (_, told) in COMMANDS.items())]
    lines += [
        "",
        "torchrl-agents COMMAND --help shows what it takes, with task=NAME that of a task too.",
        "Results are in outputs/, below the folder where it is called.",
    ]
    return "\n".join(lines)


def _version() -> str:
    return installed_release("torchrl-agents") or "unknown: not installed"
