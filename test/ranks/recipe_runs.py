"""Runs of a recipe on ranks, of a tiny model that is left in the folder ``base``."""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

import torch
from forked_ranks import run_ranks
from safetensors.torch import load_file

from torchrl_agents.settings.command_line import read_command_line
from torchrl_agents.start import run_recipe
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

SCRIPTS = Path(__file__).parents[2] / "sota-implementations"


def save_base():
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["What is the greatest common divisor of 12 and 18?"])
    tokenizer.save_pretrained("base")
    tiny_qwen3(len(tokenizer)).save_pretrained("base")


def run_on_ranks(size, name, *arguments):
    def program(rank):
        del rank
        sys.path[:0] = [os.getcwd(), str(SCRIPTS / name)]
        script = import_module(name)  # a process can make the runs of one recipe alone
        sys.argv = [f"{name}.py", *arguments]
        read_command_line(script.RECIPE)
        build = {"build": script.build} if hasattr(script, "build") else {}
        run_recipe(script.RECIPE, script.main, **build)

    run_ranks(size, program, joins=False)


def left_in(folder, *models):
    """Metrics of each step of a run, and the weights that it left."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    weights = {name: load_file(Path(folder) / name / "model.safetensors") for name in models}
    return {"metrics": [json.loads(line) for line in lines], **weights}
