"""What test_recipes_over_ranks.py looks at: a recipe on ranks, each of which does the whole script.

Adapters are trained; ranks are killed at a pass, and the run goes on with other wrappers.
"""

import json
import os
import signal
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import torch
from forked_ranks import run_ranks
from safetensors.torch import load_file
from split_models import mixture

sys.path.insert(0, str(Path(__file__).parents[2] / "sota-implementations/sft"))
sys.path.append(str(Path(__file__).parents[1]))

import sft
from hydra.core.plugins import Plugins
from quick_runs import quicken_runs

from objectives import NonFiniteGate
from torchrl_agents.settings.command_line import read_command_line
from torchrl_agents.start import run_recipe
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

IMPORTED = ("matplotlib.pyplot", "matplotlib.backends.backend_agg", "pandas", "reasoning_gym")
"""Once, and not by each rank of each run."""
NUM_STEPS = 6
ARGUMENTS = (
    *("task=gcd", "task.num_rows=64", "task.num_demonstrations=64", "logger=none"),
    *("evaluate.num_shown=0", "evaluate.num_prompts=2", "data.num_held_out=2"),
    *("train.batch_size=8", "policy.max_new_tokens=2", f"train.num_steps={NUM_STEPS}"),
    *("policy.model=base", "policy.show_tool_schemas=false"),
    # Adam divides gradients by their size, so it blows rounding up.
    *("optim=sgd", "optim.learning_rate=0.5", "optim.schedule=constant", "checkpoint.every=1"),
)
ADAPTERS = "policy.lora_rank=4"


def program(*arguments, dies=None):
    """What a rank does; the one in ``dies`` is killed at that pass."""

    def run(rank):
        if dies is not None and rank == dies[0]:
            die_at(dies[1])
        sys.argv = ["sft.py", *ARGUMENTS, *arguments]
        read_command_line(sft.RECIPE)
        run_recipe(sft.RECIPE, sft.main, build=sft.build)

    return run


def die_at(number):
    step, passes = NonFiniteGate.step, iter(range(1, number + 1))

    def stepped(self):
        if next(passes) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self)

    NonFiniteGate.step = stepped


def run(size, *arguments, dies=None):
    """What was wrong, and how long it took."""
    begin_s = time.monotonic()
    program_ = program(*arguments, dies=dies)
    return error_of_ranks(size, program_), time.monotonic() - begin_s


def error_of_ranks(size, function):
    try:
        run_ranks(size, function, joins=False)
    except AssertionError as error:
        return str(error)
    return ""


def left_by(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    adapter = folder / "adapter/adapter_model.safetensors"
    return {
        "metrics": [json.loads(line) for line in lines],
        "adapter": load_file(adapter) if adapter.is_file() else {},
        "model": load_file(folder / "model/model.safetensors"),
        "resumed": len(json.loads((folder / "run.json").read_text()).get("resumed", [])),
    }


def adapters():
    """One process; and two ranks, of which each is killed, then one, that is, and one again."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        torch.manual_seed(0)
        tokenizer = train_tokenizer(["What is the greatest common divisor of 12 and 18?"])
        tokenizer.save_pretrained("base")
        tiny_qwen3(len(tokenizer)).save_pretrained("base")
        ends = [
            run(1, "name=one", ADAPTERS),
            run(2, "name=two", ADAPTERS, "train.parallel=fsdp2", dies=(1, 3)),
            run(2, "name=two", ADAPTERS, "resume=auto", "train.parallel=ddp", dies=(0, 2)),
            run(1, "resume=outputs/sft/gcd/two-001", dies=(0, 2)),  # was begun with fsdp2
            run(1, "resume=outputs/sft/gcd/two-001"),
        ]
        outputs = Path("outputs/sft/gcd")
        found = {name: left_by(outputs / f"{name}-001") for name in ("one", "two")}
        base = load_file("base/model.safetensors")
        os.chdir("/")
    return found | {"ends": ends, "base": base}


def split():
    """A mixture in one process; and over ranks that go on with its run, each time split anew."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        tokenizer = train_tokenizer(["What is the greatest common divisor of 12 and 18?"])
        tokenizer.save_pretrained("base")
        mixture(len(tokenizer)).save_pretrained("base")
        again = "resume=outputs/sft/gcd/two-001"
        ends = [
            run(1, "name=one"),
            run(2, "name=two", *split_into(2, 2), "train.num_steps=2"),
            run(4, again, *split_into(2, 4), "train.num_steps=4"),
            run(2, again, *split_into(1, 1), "train.context_parallel_size=2", "train.num_steps=5"),
            run(1, again, f"train.num_steps={NUM_STEPS}"),
        ]
        outputs = Path("outputs/sft/gcd")
        found = {name: left_by(outputs / f"{name}-001") for name in ("one", "two")}
        os.chdir("/")
    return found | {"ends": [wrong for wrong, _ in ends]}


def split_into(matrices, experts):
    return (
        f"train.tensor_parallel_size={matrices}",
        f"train.expert_parallel_size={experts}",
    )


def scenarios():
    for name in IMPORTED:
        import_module(name)
    Plugins.instance()  # which Hydra looks for once
    quicken_runs()
    yield "recipe with adapters", adapters
    yield "recipe over splits", split
