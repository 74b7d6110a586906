"""Recipes that are experiments of others: their names run, and take arguments."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from torchrl_agents import command
from torchrl_agents.found_run import plain_settings
from torchrl_agents.settings import TYPED_AS
from torchrl_agents.settings.command_line import compose_config, prepare

SCRIPTS = Path(__file__).parents[3] / "sota-implementations"


@pytest.fixture
def main(monkeypatch):
    """The command, which tells what it would become."""

    def become(_, program, environment):
        assert environment[TYPED_AS].startswith("torchrl-agents ")
        raise Become(program[1:])

    def main(arguments):
        try:
            return command.main(arguments)
        except Become as told:
            return told.args[0]

    monkeypatch.setattr(command.os, "execve", become)
    return main


class Become(Exception):
    """Another program takes the place of this one."""


def test_each_page_of_a_recipe_is_a_command():
    pages = {path.parent.name for path in SCRIPTS.glob("*/README.md")}
    assert pages == {*command.recipes(), *command.ALIASES}


@pytest.mark.parametrize(
    ("name", "script", "experiment"),
    [
        ("lora", "expert-iteration/expert_iteration.py", "lora"),
        ("multi-environment", "grpo/grpo.py", "multi_environment"),
        ("search-agent", "grpo/grpo.py", "search_agent"),
    ],
)
def test_a_name_is_a_recipe_with_an_experiment(main, name, script, experiment):
    wanted = [str(SCRIPTS / script), f"experiment={experiment}", "seed=3", "--help"]
    assert main([name, "seed=3", "--help"]) == wanted


def test_an_experiment_beside_it_is_refused(main, capsys):
    assert main(["search-agent", "seed=1", "experiment=control"]) == 2
    told = capsys.readouterr().err
    assert "search-agent is grpo experiment=search_agent, so experiment=control has no" in told


def test_the_help_has_them_and_guesses_them(main, capsys):
    assert main(["--help"]) == 0
    assert "  lora               expert-iteration experiment=lora: " in capsys.readouterr().out
    assert main(["search_agnt"]) == 2
    assert "Did you mean search-agent?" in capsys.readouterr().err


def test_their_settings_are_the_experiments(script):
    def composed(recipe, *overrides):
        module = script(recipe)
        prepare(module.RECIPE, overrides)
        return compose_config(module.RECIPE, overrides)

    def settings(*choices):
        return OmegaConf.to_object(composed(*choices))

    lora = settings("expert-iteration", "experiment=lora")
    assert (lora.name, lora.policy.lora_rank, lora.optim.learning_rate) == ("lora", 8, 5e-3)
    given = settings("expert-iteration", "experiment=lora", "policy.model=x", "policy.lora_rank=16")
    assert (given.policy.lora_rank, given.optim.learning_rate) == (16, None)
    recorded = plain_settings(composed("expert-iteration", "experiment=lora"))
    assert recorded["optim.learning_rate"] == 5e-3
    for name in ("multi-environment", "search-agent"):
        recipe, experiment, _ = command.ALIASES[name]
        assert settings(recipe, f"experiment={experiment}").name == experiment
