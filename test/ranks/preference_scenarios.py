"""What test_preferences_over_ranks.py looks at: a run of dpo, on ranks."""

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

DPO = Path(__file__).parents[2] / "sota-implementations/dpo"
ARGUMENTS = (
    *("task=gcd", "task.num_rows=16", "task.num_demonstrations=4", "logger=none"),
    *("evaluate.num_shown=0", "evaluate.num_prompts=2", "policy.max_new_tokens=2"),
    *("policy.model=base", "policy.show_tool_schemas=false", "data.dataset=pairs.jsonl"),
    *("data.num_held_out=4", "train.batch_size=5", "loss.beta=0.5", "loss.sft_coeff=0.1"),
    # Adam divides gradients by their size, so it blows rounding up.
    *("optim=sgd", "optim.learning_rate=0.05", "optim.schedule=constant", "checkpoint.every=1"),
    "optim.num_warmup_steps=0",
)


def left_by(name):
    folder = Path("outputs/dpo/gcd") / f"{name}-001"
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {
        "metrics": [json.loads(line) for line in lines],
        "model": load_file(folder / "model/model.safetensors"),
    }


def run(size, *arguments):
    def program(rank):
        del rank
        sys.path[:0] = [os.getcwd(), str(DPO)]
        import dpo  # a process can make the runs of one recipe, and this one has another

        sys.argv = ["dpo.py", *ARGUMENTS, *arguments]
        read_command_line(dpo.RECIPE)
        run_recipe(dpo.RECIPE, dpo.main, dpo.build)

    run_ranks(size, program, joins=False)


def with_preferences():
    """Of four steps: one process; copies; shards, of which one process makes the last step."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        pairs = [
            {"prompt": f"What is {i}?", "chosen": "a" * (1 + i % 3), "rejected": f"It is {i}."}
            for i in range(16)
        ]
        Path("pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
        torch.manual_seed(0)
        tokenizer = train_tokenizer(["What is the greatest common divisor of 12 and 18?"])
        tokenizer.save_pretrained("base")
        tiny_qwen3(len(tokenizer)).save_pretrained("base")
        steps = "train.num_steps=4"
        run(1, "name=one", steps)
        run(2, "name=copies", steps, "train.parallel=ddp", "train.micro_batch_tokens=60")
        run(2, "name=shards", "train.num_steps=3", "train.parallel=fsdp2")
        run(1, "resume=outputs/dpo/gcd/shards-001", steps)
        found = {name: left_by(name) for name in ("one", "copies", "shards")}
        base = load_file("base/model.safetensors")
        os.chdir("/")
    return found | {"base": base}


def scenarios():
    yield "recipe with preferences", with_preferences
