"""Supervised training on demonstrations: the format, before the skill."""

import logging
import math
import random
from collections.abc import Callable
from typing import Any, cast

import torch
from tensordict import TensorDict, lazy_stack

from objectives import SFTLoss
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import RolloutsConfig
from torchrl_data.conversation import Conversations
from torchrl_data.conversation_io import row_tensordicts
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_envs.tasks.task import TaskEnv
from torchrl_modules import TransformersWrapper

_LOG = logging.getLogger("torchrl_agents")


def drawn_demonstrations(
    cfg: RolloutsConfig, env: TaskEnv, encoder: ConversationEncoder
) -> Conversations:
    """Encode the demonstrations that a warm start learns from: not more than its steps draw.

    Args:
        cfg: the settings, with those of the warm start.
        env: has the task with the demonstrations.
        encoder: of the policy.

    Raises:
        ValueError: as ``TaskEnv.encode_demonstrations``.
    """
    count = len(env.task.demonstrations)
    drawn = cast("int", cfg.warm_start.num_steps) * cfg.warm_start.batch_size
    only = sorted(random.Random(cfg.seed).sample(range(count), drawn)) if drawn < count else None
    return env.encode_demonstrations(encoder, only=only)


def short_enough(demonstrations: Conversations, most: int | None) -> list[TensorDict]:
    """The demonstrations that a model takes; how many are left out is said.

    Args:
        demonstrations: as ``TaskEnv.encode_demonstrations`` gives them.
        most: tokens that the model takes; ``None``: any number.

    Raises:
        SettingsError: all demonstrations are longer.
    """
    rows = row_tensordicts(demonstrations)
    short = [row for row in rows if most is None or row["tokens", "full"].shape[-1] <= most]
    if len(short) < len(rows):
        told = (
            f"{len(rows) - len(short)} of {len(rows)} demonstrations are longer than the {most} "
            "tokens that the model takes (policy.max_model_len=)"
        )
        if not short:
            raise SettingsError(f"warm_start: {told}. Set warm_start.num_steps=0.")
        _LOG.warning("warm start: %s. They are left out.", told)
    return short


def warm_start(
    policy: TransformersWrapper,
    demonstrations: Conversations,
    *,
    num_steps: int,
    batch_size: int,
    learning_rate: float,
    micro_batch_tokens: int,
    on_step: Callable[[int, float], None],
) -> None:
    """Train on what the assistant says in the demonstrations.

    Args:
        policy: its model is trained.
        demonstrations: as ``TaskEnv.encode_demonstrations`` gives them.
        num_steps: optimizer steps.
        batch_size: conversations of a step.
        learning_rate: of AdamW, falling to 0 along a cosine.
        micro_batch_tokens: most tokens of one forward and backward pass; a conversation that is
            longer has one by itself.
        on_step: told the step and its loss, in nats per token.

    Raises:
        SettingsError: all demonstrations are longer than the model's inputs.
    """
    rows = short_enough(demonstrations, getattr(policy.engine, "max_model_len", None))
    loss_module = SFTLoss(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / num_steps))
    )
    for step in range(num_steps):
        chosen = torch.randint(len(rows), (batch_size,)).tolist()
        batch: Any = lazy_stack([rows[i] for i in chosen])
        packed = loss_module.pack(batch)
        window, loss = loss_module.measure_window(packed), 0.0
        for part in packed.micro_batches(max_tokens=micro_batch_tokens):
            share = loss_module(part, window=window).total()
            share.backward()
            loss += share.item()
        optimizer.step()
        optimizer.zero_grad()  # or the last gradient would be a part of what is trained next
        schedule.step()
        on_step(step + 1, loss)
