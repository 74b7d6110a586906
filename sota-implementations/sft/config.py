"""Settings of fine-tuning, typed, with what they mean; ``sft.py --help`` shows all."""

from dataclasses import dataclass, field
from typing import Final

from torchrl_agents.settings.schema import (
    EngineConfig,
    EpisodeConfig,
    Recipe,
    TrainConfig,
    TrainingConfig,
)


@dataclass
class DemonstrationsConfig:
    """What is learnt: conversations of which the assistant's turns count."""

    dataset: str | None = None
    """Hub id, file or folder with conversations; none takes the task's demonstrations."""
    column: str = "messages"
    """Its column with the conversations, each a list of messages."""
    split: str | None = None
    """Of it; the only one, or train, when not given."""
    num_held_out: int = 64
    """Conversations that are not trained on, whose loss is told."""
    shuffle_answers: bool = False
    """A control: each question gets the answer of another one."""


@dataclass
class SFTTrainConfig(TrainConfig):
    """Fine-tuning."""

    num_steps: int = 400
    batch_size: int = 32
    """Conversations of a step."""


@dataclass
class SFTConfig(TrainingConfig):
    """Settings of ``sft.py``."""

    data: DemonstrationsConfig = field(default_factory=DemonstrationsConfig)
    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)
    train: SFTTrainConfig = field(default_factory=SFTTrainConfig)


SETTINGS: Final = Recipe(
    name="sft",
    summary="Supervised fine-tuning: a model learns what the assistant says in conversations.",
    example="data.dataset=chats.jsonl task=gsm8k policy.model=Qwen/Qwen3-0.6B profile=gpu",
    config=SFTConfig,
    groups={"engine": {"transformers": EngineConfig()}},
    needs_groups=False,
    embedded={"optim.learning_rate": 1e-2, "optim.max_grad_norm": 1.0},
    pretrained={"optim.learning_rate": 1e-5},
)
