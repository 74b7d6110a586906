"""What test_critic_over_ranks.py looks at: a run of grpo with a critic, on ranks."""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from forked_ranks import run_ranks
from safetensors.torch import load_file

from torchrl_agents.settings.command_line import read_command_line
from torchrl_agents.start import run_recipe
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

GRPO = Path(__file__).parents[2] / "sota-implementations/grpo"
ARGUMENTS = (
    *("task.dataset=rows.jsonl", "logger=none"),
    *("evaluate.num_shown=0", "evaluate.num_prompts=2", "policy.max_new_tokens=4"),
    *("policy.model=base", "policy.show_tool_schemas=false", "task.rewards=mine:letters"),
    *("collector.num_prompts=4", "collector.group_size=2", "train.num_epochs=2"),
    *("loss.advantage=gae", "critic.lmbda=0.9", "critic.num_warmup_steps=1"),
    "critic.learning_rate=0.05",
    # Adam divides gradients by their size, so it blows rounding up.
    *("optim=sgd", "optim.learning_rate=0.05", "optim.schedule=constant", "checkpoint.every=1"),
    "optim.num_warmup_steps=0",
)
MINE = """
def letters(completions, **_):
    return [sum(x in "aeiou " for x in str(c)) / max(len(str(c)), 1) for c in completions]
"""


def left_by(name):
    folder = Path("outputs/grpo/environment") / f"{name}-001"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {
        "metrics": [json.loads(line) for line in lines],
        "critic": load_file(folder / "critic/model.safetensors"),
        "model": load_file(folder / "model/model.safetensors"),
    }


def run(size, *arguments):
    def program(rank):
        del rank
        sys.path[:0] = [os.getcwd(), str(GRPO)]
        import grpo  # a process can make the runs of one recipe, and this one has another

        sys.argv = ["grpo.py", *ARGUMENTS, *arguments]
        read_command_line(grpo.RECIPE)
        run_recipe(grpo.RECIPE, grpo.main)

    run_ranks(size, program, joins=False)


def with_critic():
    """Of four steps: one process; copies; shards, of which one process makes the last step."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("mine.py").write_text(MINE)
        rows = [{"prompt": f"What is {i}?"} for i in range(64)]
        Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        torch.manual_seed(0)
        tokenizer = train_tokenizer(["What is the greatest common divisor of 12 and 18?"])
        tokenizer.save_pretrained("base")
        tiny_qwen3(len(tokenizer)).save_pretrained("base")
        steps = "train.num_steps=4"
        run(1, "name=one", steps)
        run(2, "name=copies", steps, "train.parallel=ddp", "train.micro_batch_tokens=80")
        run(2, "name=shards", "train.num_steps=3", "train.parallel=fsdp2")
        run(1, "resume=outputs/grpo/environment/shards-001", steps)
        found = {name: left_by(name) for name in ("one", "copies", "shards")}
        base = load_file("base/model.safetensors")
        os.chdir("/")
    return found | {"base": base}


def scenarios():
    yield "recipe with a critic", with_critic
