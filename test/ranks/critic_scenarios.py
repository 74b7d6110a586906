"""What test_critic_over_ranks.py looks at: a run of grpo with a critic, on ranks."""

import json
import os
import tempfile
from pathlib import Path

from recipe_runs import left_in, run_on_ranks, save_base
from safetensors.torch import load_file

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
    return left_in(f"outputs/grpo/environment/{name}-001", "critic", "model")


def run(size, *arguments):
    run_on_ranks(size, "grpo", *ARGUMENTS, *arguments)


def with_critic():
    """Of four steps: one process; copies; shards, of which one process makes the last step."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("mine.py").write_text(MINE)
        rows = [{"prompt": f"What is {i}?"} for i in range(64)]
        Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        save_base()
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
