"""Supervised fine-tuning: a model learns what the assistant says in conversations.

torchrl-agents sft task=spell_backward task.right_fraction=1.0   # the task's own demonstrations
torchrl-agents sft data.dataset=chats.jsonl policy.model=Qwen/Qwen3-0.6B task=gsm8k profile=gpu
torchrl-agents sft experiment=control                       # the answers of other questions
"""

from dataclasses import dataclass, field
from typing import Any

from torchrl_agents.settings.command_line import read_command_line
from torchrl_agents.settings.field_rules import AT_LEAST_1, setting
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.schema import (
    EngineConfig,
    EpisodeConfig,
    GivenDataConfig,
    TrainConfig,
    TrainingConfig,
)


@dataclass
class DemonstrationsConfig(GivenDataConfig):
    """Conversations to learn from: the assistant's turns in them count."""

    column: str = "messages"
    """Its column with the conversations, each a list of messages, of which all that the assistant
    says is learnt. Of rows with prompt and completion instead the completion is."""
    shuffle_answers: bool = False
    """A control: each question gets the answer of another one."""


@dataclass
class SFTTrainConfig(TrainConfig):
    """Fine-tuning."""

    num_steps: int = 400
    batch_size: int = setting(32, AT_LEAST_1)
    """Conversations of a step."""


@dataclass
class SFTConfig(TrainingConfig):
    """Settings of ``sft.py``."""

    data: DemonstrationsConfig = field(default_factory=DemonstrationsConfig)
    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)
    train: SFTTrainConfig = field(default_factory=SFTTrainConfig)


RECIPE = Recipe(
    name="sft",
    summary="Supervised fine-tuning: a model learns what the assistant says in conversations.",
    example="data.dataset=chats.jsonl task=gsm8k policy.model=Qwen/Qwen3-0.6B profile=gpu",
    config=SFTConfig,
    groups={"engine": {"transformers": EngineConfig()}},
    needs_groups=False,
    embedded={"optim.learning_rate": 1e-2, "optim.max_grad_norm": 1.0},
    pretrained={"optim.learning_rate": 1e-5},
    # L = - (sum over the tokens that the assistant says of log p(token)) / number of these tokens
    loss=lambda _, actor: SFTLoss(actor),
    rehearse=lambda cfg, test, policy: encode(cfg, test, policy),
)

if __name__ == "__main__":
    read_command_line(RECIPE)  # what is wrong is said before torch is imported

import random
from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDictBase, lazy_stack

from collectors import LLMCollector
from objectives import SFTLoss, SFTLossOutput
from torchrl_agents.device_defaults import DEFAULT_TOKENS
from torchrl_agents.given_conversations import (
    GivenChats,
    GivenRows,
    check_enough,
    encode_given,
    load_given,
    tell_seen,
    with_given,
)
from torchrl_agents.models.adapters import add_adapters
from torchrl_agents.parallel import share_model
from torchrl_agents.run import Run
from torchrl_agents.setup import Setup, build_task, load_models
from torchrl_agents.start import run_recipe
from torchrl_agents.training import Training, TrainingStep, learn
from torchrl_data import check_messages, read_completion
from torchrl_modules import LLMWrapperBase


def build(recipe: Recipe, cfg: SFTConfig, settings: dict[str, Any]) -> Setup:
    """The task, whose demonstrations are learnt, and the environment that tests."""
    test, column = build_task(recipe, cfg, settings), cfg.data.column
    chats: Any = list(test.task.demonstrations)
    tools, numbers = list(test.task.demonstration_tools), list(range(len(chats)))
    num_prompt = [0] * len(chats)
    if cfg.data.dataset is not None:
        rows = load_given(cfg.data, lambda row, number: conversation_of(row, column, number))
        numbers, tools = [row.number for row in rows], [row.tools for row in rows]
        chats, num_prompt = [row.read[0] for row in rows], [row.read[1] for row in rows]
    check_enough(cfg.data, len(chats))
    if cfg.data.shuffle_answers:
        order = random.Random(cfg.seed).sample(range(len(chats)), len(chats))
        chats = [[*a[:-1], chats[i][-1]] for a, i in zip(chats, order, strict=True)]
    if cfg.data.dataset is not None:
        tell_seen(cfg.data.num_held_out, chats, test.held_out_env)
    return with_given(test, GivenChats(chats, numbers, num_prompt), tools)


def conversation_of(
    row: Mapping[str, Any], column: str, number: int
) -> tuple[list[dict[str, Any]], int]:
    """Read the conversation of a row, and how many of its messages are a prompt.

    Args:
        row: of the data.
        column: with the messages, all of whose assistant's turns are learnt; a row without it may
            have a prompt and its completion.
        number: of the row.

    Raises:
        ValueError: there is none.
        TypeError: a message has the wrong form.
    """
    if row.get(column) is None and row.get("completion") is not None:
        return read_completion(row, number=number)
    value = row.get(column)
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"row {number} has no list of messages in the column {column!r}, which data.column= "
            f"names, and no 'prompt' and 'completion'; its columns are {sorted(row)}."
        )
    check_messages(value, row=number)
    return value, 0


def encode(cfg: SFTConfig, test: Setup, policy: LLMWrapperBase) -> Sequence[TensorDictBase]:
    """The conversations as tokens, with the prompts that the task's episodes have."""
    found = encode_given(cfg, cfg.data, test, policy)
    return [row for (row,) in found.values()]


def main(cfg: SFTConfig, test: Setup, run: Run) -> dict:
    """Train as the settings say; gives the result."""
    torch.manual_seed(cfg.seed)  # of the adapters' first weights, too
    actor, policy = add_adapters(cfg, *load_models(cfg, test, run))
    actor, policy = share_model(cfg, run, actor, policy)  # with the ranks of torchrun
    with run.log.phase("encoding the conversations"):
        rows = encode(cfg, test, actor)

    test_loss = SFTLoss(policy)
    held_out = test_loss.pack(lazy_stack(rows[: cfg.data.num_held_out]))
    rows = rows[cfg.data.num_held_out :]

    @torch.no_grad()
    def held_out_nll() -> float:
        window = test_loss.measure_window(held_out)
        parts = held_out.micro_batches(max_tokens=cfg.train.micro_batch_tokens or DEFAULT_TOKENS)
        return float(SFTLossOutput.combine([test_loss(part, window=window) for part in parts]).nll)

    def measure(step: TrainingStep) -> dict[str, float]:
        is_time = step.number % max(1, cfg.train.num_steps // 20) == 0
        return {"held_out_nll": held_out_nll()} if is_time else {}

    collector = LLMCollector(test.held_out_env, policy)
    training = Training(
        *(
            cfg,
            run,
            test,
            actor,
            policy,
            GivenRows(collector, [[row] for row in rows], cfg.train.batch_size),
        ),
        measure=measure,
        curves={"loss": "loss, nats per token", "held_out_nll": "the same, held out"},
    )
    return learn(training) | {"held_out_nll": held_out_nll()}


if __name__ == "__main__":
    run_recipe(RECIPE, main, build)
