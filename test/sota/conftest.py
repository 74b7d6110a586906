"""Recipes in this process and in forks of one: their modules, and a run as on the command line."""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # what several files have in common
sys.path.append(str(Path(__file__).parents[1]))
from quick_runs import quicken_runs

quicken_runs()
SCRIPTS = Path(__file__).parents[2] / "sota-implementations"


def forget_scripts(*_):
    """Scripts import each other by short names, the same ones in several folders."""
    for name, module in list(sys.modules.items()):
        if str(SCRIPTS) in str(getattr(module, "__file__", None)):
            del sys.modules[name]


@pytest.fixture
def script(monkeypatch):
    """A script's module; its folder's modules can be imported, as they import each other."""

    def load(name):
        forget_scripts()
        monkeypatch.syspath_prepend(str(SCRIPTS / name))
        return import_module(name.replace("-", "_"))

    yield load
    forget_scripts()


@pytest.fixture
def run_recipe(script, monkeypatch, capsys):
    """Runs a recipe as its command line does; gives the result."""
    from torchrl_agents.settings.command_line import read_command_line
    from torchrl_agents.start import run_recipe

    def run(name, *arguments):
        module = script(name)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        build = {"build": module.build} if hasattr(module, "build") else {}
        read_command_line(module.RECIPE)
        run_recipe(module.RECIPE, getattr(module, "main", None) or module.evaluate, **build)
        return json.loads(capsys.readouterr().out.strip().splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def forks(start_forks):
    return start_forks(sys.executable, dict(os.environ))


@pytest.fixture
def run_script(forks):
    """Runs a recipe in a folder, in a process of its own; gives what came of it."""

    def run(*arguments, cwd, name="grpo", **environment):
        argv = [SCRIPTS / name / f"{name.replace('-', '_')}.py", *arguments]
        return forks(argv, cwd, os.environ | environment)

    return run
