"""The optimizer and its schedule, from the settings."""

import math
from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import Tensor

from torchrl_agents.settings.schema import OptimConfig

OPTIMIZERS: Final = ("adamw", "sgd")
SCHEDULES: Final[dict[str, Callable[[float], float]]] = {
    "trapezoid": lambda done: min(1.0, 2 * (1 - done)),
    "constant": lambda _: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}
"""What the learning rate is multiplied by, from the fraction of the run that is done."""


def build_optimizer(cfg: OptimConfig, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer, as its settings say."""
    rate = cfg.learning_rate
    assert rate is not None
    if cfg.name == "sgd":
        return torch.optim.SGD(
            parameters, lr=rate, momentum=cfg.beta1, weight_decay=cfg.weight_decay
        )
    return torch.optim.AdamW(
        parameters,
        lr=rate,
        betas=(cfg.beta1, cfg.beta2),
        eps=cfg.eps,
        weight_decay=cfg.weight_decay,
    )


def set_learning_rate(
    cfg: OptimConfig, optimizer: torch.optim.Optimizer, step: int, num_steps: int
) -> float:
    """Set the learning rate of a step: a linear warm-up, then the schedule.

    Args:
        cfg: the settings.
        optimizer: of which it is set.
        step: from 1.
        num_steps: of the whole run.

    Returns:
        The learning rate.
    """
    shape = SCHEDULES[cfg.schedule]((step - 1) / num_steps)
    rate = (cfg.learning_rate or 0.0) * min(step / max(1, cfg.num_warmup_steps), shape)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate
