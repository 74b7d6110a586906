"""Settings of distillation, typed, with what they mean; ``distillation.py --help`` shows all."""

from dataclasses import dataclass, field
from typing import Any

from torchrl_agents.settings.field_rules import POSITIVE, interval, setting
from torchrl_agents.settings.schema import CollectorConfig, EpochsTrainConfig, RolloutsConfig


@dataclass
class TeacherConfig:
    """The teacher, which scores what the student sampled."""

    model: str | None = None
    """Hub id, local path or folder of a run; with url, its name at the server; self: the student
    itself, which sees another prompt (teacher.prompt)."""
    prompt: str | None = None
    """Of self: demonstration (SDFT), feedback (SDPO), or mine:f, a function of yours from the
    rollouts of a step to the prompt of each (docs/recipes/distillation.md)."""
    demonstration_column: str = "answer"
    """Of prompt=demonstration: the column of the data with a good answer."""
    ema_decay: float | None = setting(None, interval("(0, 1]"))
    """Of self: the teacher's weights are a moving average of the student's, of which each step
    keeps this share; 1: those from before the training; none: the student's own."""
    url: str | None = None
    """Of a vLLM server, http://host:port/v1 or unix:///path/of/the/socket; none loads the model in
    this process. TORCHRL_VLLM_TOKEN or OPENAI_API_KEY is sent where it is set."""
    tokenizer: str | None = None
    """Of a teacher with another tokenizer than the student: own (that of model), or a hub id or
    path; it then judges spans of text. None: it has the student's, which is checked."""
    chat_template_name: str | None = None
    """Of tokenizer: a built-in chat template; none takes the tokenizer's own, or ChatML."""
    timeout_s: float = setting(600.0, POSITIVE)
    """Deadline of the server's answer for one sequence."""


@dataclass
class DistillationTrainConfig(EpochsTrainConfig):
    """On-policy distillation: the teacher judges each token that the student sampled."""

    num_steps: int = 60
    clip_epsilon: float = setting(0.2, interval("[0, 1]"))
    """The ratio of a token's probability to that at its sampling is kept within 1 -+ this."""
    shuffle_verdicts: bool = False
    """A control: the teacher's verdicts are dealt out at random, so nothing can be learnt."""


@dataclass
class DistillationConfig(RolloutsConfig):
    """Settings of ``distillation.py``."""

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    teachers: Any = None
    """Several instead, by name: {a: {model: A, weight: 2}, b: {model: B, url: http://...}}. They
    teach as a mixture of their distributions; weight is 1 where it is not given."""
    teacher_column: str | None = None
    """A column of the data that names each row's teacher, in place of a mixture; environment, for
    task=multi_env."""
    collector: CollectorConfig = field(default_factory=lambda: CollectorConfig(group_size=4))
    train: DistillationTrainConfig = field(default_factory=DistillationTrainConfig)
