"""Supervised training on demonstrations: the format, before the skill."""

import math
from collections.abc import Callable, Sequence

import torch
from tensordict import lazy_stack

from objectives import SFTLoss
from torchrl_data import encode_demonstrations, row_tensordicts
from torchrl_data.conversation.record import Message
from torchrl_modules import TransformersWrapper


def warm_start(
    policy: TransformersWrapper,
    demonstrations: Sequence[Sequence[Message]],
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
        demonstrations: conversations.
        num_steps: optimizer steps.
        batch_size: conversations of a step.
        learning_rate: of AdamW, falling to 0 along a cosine.
        micro_batch_tokens: most tokens of one forward and backward pass; a conversation that is
            longer has one by itself.
        on_step: told the step and its loss, in nats per token.
    """
    rows = row_tensordicts(encode_demonstrations(policy.encoder, demonstrations))
    loss_module = SFTLoss(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / num_steps))
    )
    for step in range(num_steps):
        batch = lazy_stack([rows[i] for i in torch.randint(len(rows), (batch_size,)).tolist()])
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
