"""Preference learning (DPO): the better one of two answers becomes likelier.

torchrl-agents dpo data.dataset=pairs.jsonl policy.model=Qwen/Qwen3-0.6B task=gsm8k profile=gpu
torchrl-agents convert outputs/grpo/gsm8k/seed0 pairs.jsonl      # pairs of rollouts that exist
torchrl-agents dpo experiment=control                            # better and worse at random
"""

from config import DPOConfig

from torchrl_agents.settings.command_line import read_command_line
from torchrl_agents.settings.option_settings import given_options
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.schema import EngineConfig

RECIPE = Recipe(
    name="dpo",
    summary="Preference learning (DPO): the better one of two answers becomes likelier.",
    example="data.dataset=pairs.jsonl task=gsm8k policy.model=Qwen/Qwen3-0.6B profile=gpu",
    config=DPOConfig,
    groups={"engine": {"transformers": EngineConfig()}},
    needs_groups=False,
    embedded={"optim.learning_rate": 1e-3, "optim.max_grad_norm": 1.0},
    pretrained={"optim.learning_rate": 1e-6},
    # L = - mean over pairs of log sigmoid(beta (log-ratio of the better - of the other answer))
    loss=lambda cfg, actor: DPOLoss(actor, **given_options(cfg.loss, DPOOptions)),
    rehearse=lambda cfg, test, policy: encode_pairs(cfg, test, policy),
)

if __name__ == "__main__":
    read_command_line(RECIPE)  # what is wrong is said before torch is imported

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from collectors import LLMCollector
from objectives import DPOLoss, DPOLossOutput, DPOOptions
from torchrl_agents.device_defaults import DEFAULT_TOKENS
from torchrl_agents.given_conversations import (
    GivenChats,
    check_enough,
    encode_given,
    load_given,
    tell_seen,
)
from torchrl_agents.models.adapters import add_adapters
from torchrl_agents.parallel import share_model
from torchrl_agents.referenced_rows import ReferencedRows, Unit, stacked, write_reference
from torchrl_agents.run import Run
from torchrl_agents.setup import Setup, build_task, load_models
from torchrl_agents.start import run_recipe
from torchrl_agents.training import Training, TrainingStep, learn
from torchrl_data import PreferencePair, mark_pairs, pair_of, read_pair
from torchrl_modules import LLMWrapperBase


def build(recipe: Recipe, cfg: DPOConfig, settings: dict[str, Any]) -> Setup:
    """The task, whose demonstrations are the answers of pairs, and the environment that tests."""
    test = build_task(recipe, cfg, settings)
    if cfg.data.dataset is None:
        pairs, tools = _pairs_of_demonstrations(cfg, test)
        numbers: Sequence[int] = range(len(pairs))
    else:
        rows = load_given(cfg.data, lambda row, number: read_pair(row, number=number))
        pairs, tools = [row.read for row in rows], [row.tools for row in rows]
        numbers = [row.number for row in rows]
    check_enough(cfg.data, len(pairs))
    if cfg.data.dataset is not None:
        tell_seen(cfg.data.num_held_out, [pair.chosen for pair in pairs], test.held_out_env)
    sides = [(pair.chosen, pair.rejected) for pair in pairs]
    if cfg.data.shuffle_preferences:
        swaps = random.Random(cfg.seed)
        sides = [two[::-1] if swaps.random() < 0.5 else two for two in sides]
    task = replace(
        test.task,
        demonstrations=GivenChats(
            [chat for two in sides for chat in two],
            [number for number in numbers for _ in range(2)],
            [pair.num_shared for pair in pairs for _ in range(2)],
        ),
        demonstration_tools=[schemas for schemas in tools for _ in range(2)],
    )
    test.held_out_env.task = task
    return test._replace(task=task)


def _pairs_of_demonstrations(
    cfg: DPOConfig, test: Setup
) -> tuple[list[PreferencePair], list[list[dict[str, Any]] | None]]:
    """Each of the task's demonstrations, and its conversation with the answer of another one."""
    chats: list[Any] = list(test.task.demonstrations)
    tools: list[Any] = list(test.task.demonstration_tools) or [None] * len(chats)
    order = random.Random(cfg.seed).sample(range(len(chats)), len(chats))
    pairs, kept = [], []
    for chat, other, schemas in zip(chats, order, tools, strict=True):
        worse = [*chat[:-1], chats[other][-1]]
        if worse != [*chat]:
            pairs.append(pair_of(chat, worse))
            kept.append(schemas)
    return pairs, kept


def encode_pairs(cfg: DPOConfig, test: Setup, policy: LLMWrapperBase) -> list[Unit]:
    """The pairs as rows of tokens, with the prompts that the task's episodes have."""
    found = encode_given(cfg, cfg.data, test, policy, rows_together=2)
    mark_pairs([row for rows in found.values() for row in rows])
    return list(found.values())


def main(cfg: DPOConfig, test: Setup, run: Run) -> dict:
    """Train as the settings say; gives the result."""
    actor, policy = add_adapters(cfg, *load_models(cfg, test, run))
    torch.manual_seed(cfg.seed)
    actor, policy = share_model(cfg, run, actor, policy)  # with the ranks of torchrun
    with run.log.phase("encoding the pairs"):
        pairs = encode_pairs(cfg, test, actor)
    held_out, trained = pairs[: cfg.data.num_held_out], pairs[cfg.data.num_held_out :]
    collector = LLMCollector(test.held_out_env, policy)
    sampler = ReferencedRows(collector, trained, cfg.train.batch_size, cfg.seed)
    test_loss = DPOLoss(policy, **given_options(cfg.loss, DPOOptions))
    if test_loss.options.has_reference:
        needed = [*held_out, *sampler.first_units(cfg.train.num_steps)]
        write_reference(cfg, run, actor, needed, cfg.data.what)

    @torch.no_grad()
    def held_out_scores() -> dict[str, float]:
        batch = test_loss.pack(stacked(held_out))
        window = test_loss.measure_window(batch)
        most = cfg.train.micro_batch_tokens or DEFAULT_TOKENS
        parts = [test_loss(part, window=window) for part in batch.micro_batches(max_tokens=most)]
        output = DPOLossOutput.combine(parts)
        return {
            "held_out_loss": float(output.total()),
            "held_out_accuracy": float(output.accuracy),
        }

    def measure(step: TrainingStep) -> dict[str, float]:
        is_time = step.number % max(1, cfg.train.num_steps // 20) == 0
        return held_out_scores() if is_time else {}

    training = Training(
        *(cfg, run, test, actor, policy, sampler),
        measure=measure,
        curves={
            "accuracy": "pairs in the right order",
            "held_out_accuracy": "the same, held out",
            "loss": "loss of a pair",
        },
    )
    return learn(training) | held_out_scores()


if __name__ == "__main__":
    run_recipe(RECIPE, main, build)
