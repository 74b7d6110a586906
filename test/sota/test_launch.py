"""The examples of a launch: their settings are accepted."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from torchrl_agents import start
from torchrl_agents.settings.command_line import compose_config
from torchrl_agents.settings.task_settings import store_task

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "sota-implementations/grpo/launch"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Programs of these names that do what is said."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def make(name, text):
        (tmp_path / name).write_text(f"#!{sys.executable}\n{text}")
        (tmp_path / name).chmod(0o755)

    return make


@pytest.mark.parametrize("example", sorted(path.name for path in LAUNCH.glob("*.sh")))
def test_settings_are_accepted(example, programs, script, monkeypatch):
    for name in ("python", "torchrun"):
        programs(name, "import shlex, sys; print(shlex.join(sys.argv))")
    done = subprocess.run(
        ["bash", LAUNCH / example, "seed=3"], capture_output=True, text=True, check=True
    )
    program, *arguments = shlex.split(done.stdout)
    assert_accepted(program, arguments, script, monkeypatch)


def assert_accepted(program, arguments, script, monkeypatch):
    """The settings behind the recipe are accepted by as many ranks as are started."""
    at = arguments.index("sota-implementations/grpo/grpo.py")
    options = dict(option.partition("=")[::2] for option in arguments[:at])
    size = options.get("--nproc-per-node", "1")
    assert (Path(program).name == "torchrun") == (size != "1")
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setattr(start.torch.cuda, "is_available", lambda: True)
    recipe = script("grpo").RECIPE
    store_task("gsm8k")
    cfg = OmegaConf.to_object(compose_config(recipe, arguments[at + 1 :]))
    start.check_config(recipe, cfg)
    assert cfg.seed == 3
    own = list(range(int(size)))
    assert not set(own) & set(cfg.engine.devices)
