"""What test_reference_over_ranks.py looks at: adapters with a KL to the model they are over."""

import os
import tempfile
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM
from recipe_runs import left_in, run_on_ranks, save_base
from transformers import AutoModelForCausalLM

ARGUMENTS = (
    *("logger=none", "evaluate.num_shown=0", "evaluate.num_prompts=2", "policy.max_new_tokens=4"),
    *("policy.model=base", "policy.show_tool_schemas=false", "policy.lora_rank=2"),
    *("collector.num_prompts=4", "collector.group_size=2", "task.factory=mine:letters"),
    *("loss.kl_to_ref_coeff=0.5", "checkpoint.every=1", "optim.num_warmup_steps=0"),
    # Adam divides gradients by their size, so it blows rounding up.
    *("optim=sgd", "optim.learning_rate=0.5", "optim.schedule=constant"),
)
WARM = ("warm_start.num_steps=3", "warm_start.learning_rate=1e-2", "warm_start.batch_size=4")
MINE = """
from torchrl_envs import RewardFunctions
from torchrl_envs.tasks.task import Task


def vowels(completions, **_):
    return [sum(x in "aeiou " for x in str(c)) / max(len(str(c)), 1) for c in completions]


def letters():
    rows = [{"prompt": f"What is {i}?"} for i in range(64)]
    asked = [{"role": "user", "content": row["prompt"]} for row in rows]
    return Task(
        name="letters",
        train_rows=rows[8:],
        held_out_rows=rows[:8],
        rewards=lambda: [RewardFunctions([vowels])],
        demonstrations=[[each, {"role": "assistant", "content": "12"}] for each in asked[8:24]],
    )
"""
FOLDER = Path("outputs/grpo/environment")


@torch.no_grad()
def left_by(name):
    """What a run left, and what its adapters over their model compute, and its merged model."""
    folder, ids = FOLDER / f"{name}-001", torch.arange(40)[None]
    adapted = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(folder / "model")(ids).logits
    own = {"adapted": adapted, "merged": merged, "has_base": (folder / "base").exists()}
    return left_in(folder, "model") | own


def run(size, *arguments):
    run_on_ranks(size, "grpo", *ARGUMENTS, *arguments)


def with_reference():
    """Of four steps: one process; shards, of which one process makes the third; and both warm.

    A warm start changes the model that adapters are put on, and that is the reference.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("mine.py").write_text(MINE)
        save_base()
        found, steps = {}, "train.num_steps=4"
        for kind, more in {"given": (), "warm": WARM}.items():
            run(1, *more, f"name={kind}-one", steps)
            resume, shards = f"resume={FOLDER}/{kind}-shards-001", "train.parallel=fsdp2"
            run(2, *more, f"name={kind}-shards", "train.num_steps=2", shards)
            run(1, resume, "train.num_steps=3")
            run(2, resume, steps, shards)
            found[kind] = {name: left_by(f"{kind}-{name}") for name in ("one", "shards")}
        os.chdir("/")
    return found


def scenarios():
    yield "recipe with a reference", with_reference
