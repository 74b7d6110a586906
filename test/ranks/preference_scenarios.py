"""What test_preferences_over_ranks.py looks at: runs of dpo and reward, and steps of a loss."""

import json
import os
import tempfile
from pathlib import Path

import torch
from forked_ranks import run_ranks
from recipe_runs import left_in, run_on_ranks, save_base
from safetensors.torch import load_file
from tensordict import TensorDict, lazy_stack
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from objectives import NonFiniteGate, Ranks, RewardModelLoss, RewardModelLossOutput
from torchrl_modules import TransformersCritic, value_model_of
from torchrl_modules.tiny_model import tiny_qwen3

ARGUMENTS = (
    *("task=gcd", "task.num_rows=16", "task.num_demonstrations=4", "logger=none"),
    *("evaluate.num_shown=0", "policy.model=base", "data.dataset=pairs.jsonl"),
    *("data.num_held_out=4", "train.batch_size=5"),
    # Adam divides gradients by their size, so it blows rounding up.
    *("optim=sgd", "optim.learning_rate=0.05", "optim.schedule=constant", "checkpoint.every=1"),
    "optim.num_warmup_steps=0",
)
OF_DPO = (
    *("evaluate.num_prompts=2", "policy.max_new_tokens=2", "policy.show_tool_schemas=false"),
    *("loss.beta=0.5", "loss.sft_coeff=0.1"),
)
OF_REWARD = ("evaluate.every=1", "loss.center_coeff=0.01", "policy.lora_rank=2")


def left_by(name):
    return left_in(f"outputs/dpo/gcd/{name}-001", "model")


def run(size, *arguments):
    run_on_ranks(size, "dpo", *ARGUMENTS, *OF_DPO, *arguments)


def save_pairs(**further):
    pairs = [
        {"prompt": f"What is {i}?", "chosen": "a" * (1 + i % 3), "rejected": f"It is {i}.", **each}
        for i in range(16)
        for each in [{name: i % count for name, count in further.items()}]
    ]
    Path("pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))


def with_reward_model():
    """Three steps of adapters: one process; shards, of which one process makes the last step."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        save_pairs(margin=3)
        save_base()
        own, parent = (*ARGUMENTS, *OF_REWARD), Path("outputs/reward/gcd")
        run_on_ranks(1, "reward", *own, "name=one", "train.num_steps=3")
        run_on_ranks(2, "reward", *own, "name=shards", "train.num_steps=2", "train.parallel=fsdp2")
        shards = parent / "shards-001"
        halfway = left_in(shards, "model")["model"]
        run_on_ranks(1, "reward", *own, f"resume={shards}", "train.num_steps=3", "name=shards")
        found = {}
        for name in ("one", "shards"):
            path = parent / f"{name}-001"
            tests = [json.loads(x) for x in (path / "evaluations.jsonl").read_text().splitlines()]
            found[name] = left_in(path, "model") | {"tests": tests}
        os.chdir("/")
    return found | {"halfway": halfway}


def with_preferences():
    """Of four steps: one process; copies; shards, of which one process makes the last step."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        save_pairs()
        save_base()
        steps = "train.num_steps=4"
        run(1, "name=one", steps)
        run(2, "name=copies", steps, "train.parallel=ddp", "train.micro_batch_tokens=60")
        run(2, "name=shards", "train.num_steps=3", "train.parallel=fsdp2")
        run(1, "resume=outputs/dpo/gcd/shards-001", steps)
        found = {name: left_by(name) for name in ("one", "copies", "shards")}
        base = load_file("base/model.safetensors")
        os.chdir("/")
    return found | {"base": base}


def with_adapted_preferences():
    """Adapters over a given model: one process; shards, of which one makes the last step."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        save_pairs()
        save_base()
        adapters, steps = ("policy.lora_rank=2", "seed=1"), "train.num_steps=4"
        run(1, *adapters, "name=one", steps)
        run(2, *adapters, "name=shards", "train.num_steps=3", "train.parallel=fsdp2")
        run(1, "resume=outputs/dpo/gcd/shards-001", steps)
        run(1, "policy.lora_rank=2", "name=other", "train.num_steps=1")
        adapter = "adapter/adapter_model.safetensors"
        found = {name: left_by(name) for name in ("one", "shards")}
        for name in ("one", "other"):
            found[f"{name} adapter"] = load_file(f"outputs/dpo/gcd/{name}-001/{adapter}")
        os.chdir("/")
    return found


def pairs_of_a_step(step, count):
    generator, rows = torch.Generator().manual_seed(step), []
    for number in range(2 * count):
        ids = torch.randint(5, 64, (3 + number,), generator=generator)
        row = TensorDict({"tokens": {"full": ids}})
        row["masks", "all_assistant_mask"] = torch.arange(len(ids)) > 1
        row["pair_id"] = torch.tensor([number // 2])
        row["chosen"] = torch.tensor([number % 2 == 0])
        rows.append(row)
    return lazy_stack(rows)


def train_rewards(ranks, how):
    """Steps of three pairs, and of one, of which one of two ranks has none."""
    torch.manual_seed(0)
    causal = tiny_qwen3(64, hidden_size=32, head_dim=16, initializer_range=0.2)
    model = value_model_of(causal.double(), random_head=True)
    wrapped = model
    if how == "copies":
        wrapped = DistributedDataParallel(model)
    if how == "shards":
        for part in (*model.model.layers, model):
            fully_shard(part)
    critic = TransformersCritic(wrapped)
    loss = RewardModelLoss(critic, center_coeff=0.1)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    gate, told = NonFiniteGate(optimizer, max_grad_norm=1.0, ranks=ranks), []
    for step, count in enumerate((3, 1, 3)):
        batch = loss.pack(pairs_of_a_step(step, count)) if ranks.rank == 0 else None
        parts, outputs = ranks.scatter(batch, max_tokens=24), []
        window = loss.measure_window(parts, ranks=ranks)
        for part in parts:
            outputs.append(loss(part, window=window))
            gate.backward(outputs[-1], part)
        outcome = gate.step()
        output = RewardModelLossOutput.combine(outputs, ranks=ranks)
        names = ("loss_reward", "loss_center", "accuracy", "chosen_reward", "num_pairs")
        told.append({name: float(output.get(name)) for name in names})
        told[-1]["grad_norm"] = outcome.grad_norm
    state = get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True))
    return {"told": told, "model": state}


def of_rewards():
    found = {"one": train_rewards(Ranks.alone(), "one")}
    for how in ("copies", "shards"):
        found[how] = run_ranks(2, lambda ranks, how=how: train_rewards(ranks, how))[0]
    return found


def scenarios():
    yield "recipe with preferences", with_preferences
    yield "recipe with preferences and adapters", with_adapted_preferences
    yield "recipe of a reward model", with_reward_model
    yield "reward model", of_rewards
