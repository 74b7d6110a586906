"""Every setting of the script, typed, with what it means; ``grpo.py --help`` shows them.

``None`` stands for a default that depends on the model: :data:`EMBEDDED` and :data:`PRETRAINED`.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class PolicyConfig:
    """The model, and how it samples."""

    model: str | None = None
    """Hub id or local path; none builds the embedded model of 0.1 million parameters."""
    device: str | None = None
    """Where it is trained: cpu, cuda, cuda:1, ...; none: a GPU where there is one."""
    dtype: str = "float32"
    """Of the weights that are trained. A small step is lost in the rounding of bfloat16."""
    attn_implementation: str | None = None
    """Of Transformers: sdpa, eager, flash_attention_2, ...; none takes the model's own."""
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of from_pretrained: 'policy.model_kwargs={revision: main}'."""
    gradient_checkpointing: bool | None = None
    """Compute activations twice instead of keeping them."""
    max_model_len: int | None = None
    """Most tokens of a conversation; none takes the model's own limit."""
    chat_template_name: str | None = None
    """A built-in chat template; none takes the tokenizer's own, or ChatML."""
    show_tool_schemas: bool | None = None
    """Show the tools in the prompt."""
    max_new_tokens: int | None = None
    """Most tokens of a turn."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass
class EngineConfig:
    """What draws the tokens."""

    name: str = "transformers"
    """transformers (the trained model itself) or vllm."""
    url: str | None = None
    """Of a vLLM server that runs already (docs/vllm.md); none builds an engine in this process."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings of vLLM: 'engine.engine_kwargs={gpu_memory_utilization: 0.4}'."""


@dataclass
class CollectorConfig:
    """The rollouts of a step."""

    mode: str = "sync"
    """sync: a batch before each step; streaming: beside training, episode by episode."""
    num_prompts: int = 16
    """Prompts of a step."""
    group_size: int = 16
    """Rollouts of a prompt."""
    max_turns: int | None = None
    """Most turns of an episode; none takes the task's."""
    max_episode_tokens: int | None = None
    """Most tokens of an episode after its prompt; none for no bound but the model's length."""
    min_turn_tokens: int = 16
    """No turn begins with fewer tokens left: the episode ends, truncated."""
    max_staleness: int = 4
    """Of streaming: the most steps by which any token may be older than the step that trains it; 0
    gives what sync gives."""
    staleness_policy: str = "wait"
    """Of streaming: wait (nothing is thrown away) or drop (what is too old is drawn again)."""
    pipeline_depth: int | None = None
    """Of streaming: how many steps generation runs ahead; none: as far as max_staleness lets it."""
    max_inflight_tasks: int = -1
    """Of streaming: most episodes that run at once; -1: all that are admitted."""


@dataclass
class LossConfig:
    """The loss and its advantages; see docs/losses.md. None takes the algorithm's own."""

    name: str = "dapo"
    """The algorithm: a preset of objectives/losses/presets.py in lower case."""
    clip_low: float | None = None
    """The ratio is kept above 1 - clip_low."""
    clip_high: float | None = None
    """The ratio is kept below 1 + clip_high."""
    surrogate: str | None = None
    """clipped, cispo, sapo, vespo or gmpo."""
    ratio_level: str | None = None
    """token, sequence or sequence_token."""
    aggregation: str | None = None
    """token_mean, sequence_mean, fixed_length or sequence_sum."""
    max_tokens: int | None = None
    """What fixed_length divides by; none: max_new_tokens times the most turns."""
    kl_to_ref_coeff: float = 0.0
    """Weight of the KL to the model from before GRPO, of which a copy is kept."""
    kl_to_inference_coeff: float = 0.0
    """Weight of the KL to the policy that sampled."""
    kl_estimator: str | None = None
    """k1, k2 or k3."""
    kl_bias_correction: bool = False
    """Multiply the KL to the reference by the importance ratio."""
    entropy_coeff: float = 0.0
    """Weight of an entropy bonus."""
    kl_mask_threshold: float | None = None
    """Leave tokens out that moved further than this, in nats."""
    drop_truncated: bool = False
    """Do not train rollouts that were cut."""
    advantage: str = "group"
    """group (mean and deviation), rloo (leave one out) or gdpo (each reward by itself)."""
    advantage_scale: str | None = None
    """What the group's advantage is divided by: group, batch or none."""


@dataclass
class OptimConfig:
    """The optimizer and its schedule."""

    name: str = "adamw"
    """adamw or sgd."""
    learning_rate: float | None = None
    schedule: str = "trapezoid"
    """After the warm-up: trapezoid (falls over the second half), constant, linear or cosine."""
    num_warmup_steps: int = 5
    """Steps over which the learning rate rises."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    """Of adamw; the momentum of sgd."""
    beta2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float | None = None
    """Larger gradients are scaled down to it."""


@dataclass
class LoggerConfig:
    """Where metrics go, beside metrics.jsonl."""

    backends: list[str] = field(default_factory=lambda: ["csv", "tensorboard"])
    """csv, tensorboard, wandb, trackio."""
    project: str = "grpo"
    """Of wandb and trackio."""


@dataclass
class WarmStartConfig:
    """Supervised training on the task's demonstrations, before GRPO."""

    num_steps: int | None = None
    batch_size: int = 32
    learning_rate: float = 1e-2


@dataclass
class TrainConfig:
    """GRPO."""

    num_steps: int = 100
    num_epochs: int | None = None
    """Passes over the rollouts of a step, an optimizer step each."""
    micro_batch_tokens: int = 32768
    """Most tokens of one forward and backward pass; the gradient does not depend on it."""
    autocast: bool = False
    """Compute activations in bfloat16."""
    shuffle_rewards: bool = False
    """A control: rewards are dealt out at random, so nothing can be learnt."""


@dataclass
class EvaluateConfig:
    """The test on prompts that are never trained on, before and after."""

    num_prompts: int = 256
    every: int | None = None
    """Also every so many steps, into evaluations.jsonl; beside training where collection is."""
    num_shown: int = 3
    """Conversations that are shown before and after."""


@dataclass
class GRPOConfig:
    """Settings of ``grpo.py``."""

    seed: int = 0
    name: str | None = None
    """Of the run; its folder is outputs/grpo/<task>/<name>-<number>. None: seed<seed>."""
    overwrite: bool = False
    """Replace the last run of that name instead of beginning a new folder."""
    dry_run: bool = False
    """Check settings, data and environment, and stop before a model is loaded."""
    task: Any = MISSING
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    collector: CollectorConfig = field(default_factory=CollectorConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)


EMBEDDED: Final[dict[str, Any]] = {
    "policy.show_tool_schemas": False,
    "policy.gradient_checkpointing": False,
    "warm_start.num_steps": 600,
    "optim.learning_rate": 1e-3,
    "optim.max_grad_norm": 0.1,
    "train.num_epochs": 4,
}
"""Defaults of the embedded model, which is made and warmed up here."""
PRETRAINED: Final[dict[str, Any]] = {
    "policy.show_tool_schemas": True,
    "policy.gradient_checkpointing": True,
    "policy.max_new_tokens": 512,
    "warm_start.num_steps": 0,
    "optim.learning_rate": 1e-6,
    "optim.max_grad_norm": 1.0,
    "train.num_epochs": 1,
}
"""Defaults of a model that was given."""
ALGORITHMS: Final = ("bnpo", "cispo", "dapo", "gmpo", "grpo", "gspo", "luspo", "sapo", "vespo")
GROUPS: Final[dict[str, dict[str, Any]]] = {
    "policy": {
        "embedded": PolicyConfig(),
        "qwen3_0.6b": PolicyConfig(model="Qwen/Qwen3-0.6B"),
    },
    "engine": {"transformers": EngineConfig(), "vllm": EngineConfig(name="vllm")},
    "collector": {"sync": CollectorConfig(), "streaming": CollectorConfig(mode="streaming")},
    "loss": {
        "dr_grpo": LossConfig(name="dr_grpo", advantage_scale="none"),
        **{name: LossConfig(name=name) for name in ALGORITHMS},
    },
    "optim": {"adamw": OptimConfig(), "sgd": OptimConfig(name="sgd")},
    "logger": {
        "files": LoggerConfig(),
        "none": LoggerConfig(backends=[]),
        **{name: LoggerConfig(backends=["csv", name]) for name in ("wandb", "trackio")},
    },
}
"""The choices of each group, by name."""


def fill_in(cfg: GRPOConfig, *, max_new_tokens: int, has_demonstrations: bool) -> None:
    """Replace each ``None`` that stands for a default of the model or the task, in place.

    Args:
        cfg: the settings.
        max_new_tokens: the task's, for the embedded model.
        has_demonstrations: whether the task has any.
    """
    defaults = dict(PRETRAINED)
    if cfg.policy.model is None:
        defaults = {**EMBEDDED, "policy.max_new_tokens": max_new_tokens}
        if not has_demonstrations:
            defaults["warm_start.num_steps"] = 0
    for key, value in defaults.items():
        group, name = key.split(".")
        if getattr(getattr(cfg, group), name) is None:
            setattr(getattr(cfg, group), name, value)


def store_groups() -> None:
    """Tell Hydra the schema and the choices of each group."""
    store = ConfigStore.instance()
    store.store(name="schema", node=GRPOConfig)
    for group, choices in GROUPS.items():
        for name, node in choices.items():
            store.store(group=group, name=name, node=node)


store_groups()
