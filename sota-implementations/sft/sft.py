"""Supervised fine-tuning: a model learns what the assistant says in conversations.

torchrl-agents sft task=gcd task.right_fraction=1.0         # the task's own demonstrations
torchrl-agents sft data.dataset=chats.jsonl policy.model=Qwen/Qwen3-0.6B task=gsm8k profile=gpu
torchrl-agents sft experiment=control                       # the answers of other questions
"""

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

# Before torch is imported: its threads spin for a moment, then leave the cores to the tools.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from config import GROUPS, SFTConfig
from tensordict import lazy_stack

from collectors import LLMCollector, PhaseTimer, StepMetrics
from objectives import NonFiniteGate, SFTLoss, SFTLossOutput
from torchrl_agents.recipe.loop import Learner, learn
from torchrl_agents.recipe.optim import build_optimizer, set_learning_rate
from torchrl_agents.recipe.policies import build_policies
from torchrl_agents.recipe.preparation import Test, build_test, set_token_budget
from torchrl_agents.recipe.report import RunLog
from torchrl_agents.recipe.results import StepRecord
from torchrl_agents.recipe.run_folder import Run
from torchrl_agents.recipe.start import run_recipe
from torchrl_agents.recipe.stop import StopSignals
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.recipe import Recipe
from torchrl_data import encode_demonstrations, row_tensordicts
from torchrl_envs import load_rows

RECIPE = Recipe(
    name="sft",
    summary="Supervised fine-tuning: a model learns what the assistant says in conversations.",
    example="data.dataset=chats.jsonl task=gsm8k policy.model=Qwen/Qwen3-0.6B profile=gpu",
    script=Path(__file__),
    config=SFTConfig,
    groups=GROUPS,
    engines=("transformers",),
    needs_groups=False,
    embedded={"optim.learning_rate": 1e-2, "optim.max_grad_norm": 1.0},
    pretrained={"optim.learning_rate": 1e-5},
)


def build(recipe: Recipe, cfg: SFTConfig, settings: dict[str, Any]) -> Test:
    """The task, whose demonstrations are learnt, and the environment that tests."""
    limits, num_prompts = cfg.episodes, cfg.evaluate.num_prompts
    test = build_test(recipe, cfg, settings, limits=limits, num_prompts=num_prompts)
    chats = list(test.task.demonstrations)
    if cfg.data.dataset is not None:
        try:
            loaded = load_rows(cfg.data.dataset, split=cfg.data.split)
            chats = [list(row[cfg.data.column]) for row in loaded]
        except (KeyError, ValueError, OSError) as error:
            raise SettingsError(f"data.dataset={cfg.data.dataset!r}: {error!r}") from error
    if len(chats) <= cfg.data.num_held_out:
        raise SettingsError(
            f"There are {len(chats)} conversations, of which data.num_held_out="
            f"{cfg.data.num_held_out} are held out: set data.dataset, or another task."
        )
    if cfg.data.shuffle_answers:
        order = random.Random(cfg.seed).sample(range(len(chats)), len(chats))
        chats = [[*a[:-1], chats[i][-1]] for a, i in zip(chats, order, strict=True)]
    return Test(replace(test.task, demonstrations=chats), test.held_out_env)


def main(cfg: SFTConfig, test: Test, run: Run, log: RunLog, stop: StopSignals) -> dict:
    """Train as the settings say; gives the result."""
    with log.phase("loading the model"):
        actor, policy = build_policies(cfg, test.task)
        set_token_budget(test.held_out_env, cfg.episodes, policy)
    torch.manual_seed(cfg.seed)
    with log.phase("encoding the conversations"):
        rows = row_tensordicts(encode_demonstrations(actor.encoder, test.task.demonstrations))

    # L = - (sum over the tokens that the assistant says of log p(token)) / number of these tokens
    loss = SFTLoss(actor)
    held_out = loss.pack(lazy_stack(rows[: cfg.data.num_held_out]))
    rows = rows[cfg.data.num_held_out :]
    optimizer = build_optimizer(cfg.optim, actor.parameters())
    gate = NonFiniteGate(
        optimizer, max_grad_norm=cfg.optim.max_grad_norm, dump_dir=run.folder / "not_finite"
    )
    timer = PhaseTimer()
    order: list[int] = []

    @torch.no_grad()
    def held_out_nll() -> float:
        window = loss.measure_window(held_out)
        parts = held_out.micro_batches(max_tokens=cfg.train.micro_batch_tokens)
        return float(SFTLossOutput.combine([loss(part, window=window) for part in parts]).nll)

    def step_of(step: int) -> StepRecord:
        metrics = StepMetrics(timer)
        rate = set_learning_rate(cfg.optim, optimizer, step, cfg.train.num_steps)
        while len(order) < cfg.train.batch_size:  # each conversation once in each epoch
            order.extend(torch.randperm(len(rows)).tolist())
        chosen = [rows[order.pop(0)] for _ in range(cfg.train.batch_size)]
        with timer("train"):
            batch = loss.pack(lazy_stack(chosen))
            window = loss.measure_window(batch)
            outputs = []
            for part in batch.micro_batches(max_tokens=cfg.train.micro_batch_tokens):
                outputs.append(loss(part, window=window))
                gate.backward(outputs[-1], part)
            metrics.add_update(SFTLossOutput.combine(outputs), gate.step())
        more = {"learning_rate": rate}
        if step % max(1, cfg.train.num_steps // 20) == 0:
            more["held_out_nll"] = held_out_nll()
        return StepRecord(step, metrics.reduce(**more), None, None)

    collector = LLMCollector(test.held_out_env, policy)
    learner = Learner(test.task, test.held_out_env, actor, policy, collector, loss)
    curves = {"loss": "loss, nats per token", "held_out_nll": "the same, held out"}
    result = learn(RECIPE, cfg, learner, step_of, run, log, stop, curves=curves)
    return result | {"held_out_nll": held_out_nll()}


if __name__ == "__main__":
    run_recipe(RECIPE, main, build)
