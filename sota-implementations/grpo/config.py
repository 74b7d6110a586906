"""Every setting of the script, typed; a misspelt one fails on the command line."""

from dataclasses import dataclass, field
from enum import Enum

from hydra.core.config_store import ConfigStore


class Engine(Enum):
    """What draws the tokens."""

    transformers = "transformers"
    vllm = "vllm"


@dataclass
class PolicyConfig:
    """The model, and how it samples."""

    model: str | None = None
    """Hub id or local path; none builds the embedded model of 0.1 million parameters."""
    chat_template_name: str | None = None
    """A built-in chat template; none takes the tokenizer's own, or ChatML."""
    show_tool_schemas: bool | None = None
    """Show the tools in the prompt; none: to a given model, not to the embedded one."""
    max_new_tokens: int | None = None
    """Most tokens of a turn; none takes the task's."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass
class WarmStartConfig:
    """Supervised training on the task's demonstrations, before GRPO."""

    num_steps: int | None = None
    """None: 600 for the embedded model, 0 for a given one."""
    batch_size: int = 32
    learning_rate: float = 1e-2


@dataclass
class TrainConfig:
    """GRPO."""

    num_steps: int = 100
    num_prompts: int = 16
    """Prompts of a step."""
    group_size: int = 16
    """Rollouts of a prompt."""
    learning_rate: float = 1e-3
    """Rises for ``num_warmup_steps`` steps, and falls to 0 over the second half."""
    num_warmup_steps: int = 5
    clip_low: float = 0.2
    clip_high: float = 0.28
    num_epochs: int = 4
    """Passes over the rollouts of a step, an optimizer step each."""
    micro_batch_tokens: int = 32768
    """Most tokens of one forward and backward pass; the gradient does not depend on it."""
    max_grad_norm: float = 0.1
    shuffle_rewards: bool = False
    """A control: rewards are dealt out at random, so nothing can be learnt."""


@dataclass
class EvaluateConfig:
    """The test on prompts that are never trained on."""

    num_prompts: int = 256
    num_shown: int = 3
    """Conversations that are shown before and after."""


@dataclass
class GRPOConfig:
    """Settings of ``grpo.py``."""

    task: str = "calculator"
    """A name for ``torchrl_envs.tasks.registry.make_task``: ``calculator``, ``wordle``, ..."""
    seed: int = 0
    engine: Engine = Engine.transformers
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)


def check_config(cfg: GRPOConfig) -> None:
    """Refuse settings that can't work, by name, before anything is built.

    Raises:
        ValueError: a count is below 1, or a learning rate or a temperature is not positive.
    """
    counts = {
        "train.num_steps": cfg.train.num_steps,
        "train.num_prompts": cfg.train.num_prompts,
        "train.group_size": cfg.train.group_size,
        "train.num_epochs": cfg.train.num_epochs,
        "train.micro_batch_tokens": cfg.train.micro_batch_tokens,
        "evaluate.num_prompts": cfg.evaluate.num_prompts,
    }
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}.")
    rates = {
        "train.learning_rate": cfg.train.learning_rate,
        "warm_start.learning_rate": cfg.warm_start.learning_rate,
        "policy.temperature": cfg.policy.temperature,
        "train.max_grad_norm": cfg.train.max_grad_norm,
    }
    for name, rate in rates.items():
        if not rate > 0:
            raise ValueError(f"{name} must be positive, got {rate}.")


ConfigStore.instance().store(name="schema", node=GRPOConfig)
