"""Settings of GRPO alone, typed, with what they mean; ``grpo.py --help`` shows all."""

from dataclasses import dataclass, field
from typing import Any, Final

from torchrl_agents.settings.schema import RolloutsConfig, TrainConfig


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
    """clipped, cispo, sapo, vespo, gmpo or divergence."""
    divergence: str | None = None
    """Of dppo, ipo and kpop: tv, kl or symmetric_kl."""
    divergence_threshold: float | None = None
    """Of dppo, ipo and kpop: how far a token may have moved from where it was sampled."""
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
    entropy_coeff: float | None = None
    """Weight of an entropy bonus; without one the embedded model settles on some of the tools."""
    kl_mask_threshold: float | None = None
    """Leave tokens out that moved further than this, in nats."""
    drop_truncated: bool = False
    """Do not train rollouts that were cut."""
    advantage: str = "group"
    """group (mean and deviation), rloo (leave one out), gdpo (each reward by itself) or maxrl."""
    advantage_scale: str | None = None
    """What the group's advantage is divided by: group, batch or none."""
    length_penalty: float = 0.0
    """What the longest output of a group costs; the others pay by their share of its length."""
    observation_coeff: float = 0.0
    """Weight of the cross-entropy on what tools and users answer, by the number of those tokens."""
    sampler_correction: str | None = None
    """Weights for the gap between engine and trainer: token, sequence or k3; with num_epochs=1."""
    max_k3: float | None = None
    """Of sampler_correction: sequences whose mean k3 exceeds it, in nats, are dropped."""
    normalize_correction: bool = False
    """Of sampler_correction: the weights have a mean of 1."""


@dataclass
class GRPOTrainConfig(TrainConfig):
    """GRPO."""

    num_epochs: int | None = None
    """Passes over the rollouts of a step, an optimizer step each."""
    shuffle_rewards: bool = False
    """A control: rewards are dealt out at random, so nothing can be learnt."""
    drop_solved_at: float | None = None
    """Prompts of which at least this share was solved are not drawn again; 0.9 is usual."""


@dataclass
class GRPOConfig(RolloutsConfig):
    """Settings of ``grpo.py``."""

    loss: LossConfig = field(default_factory=LossConfig)
    train: GRPOTrainConfig = field(default_factory=GRPOTrainConfig)


ALGORITHMS: Final = (
    *("bnpo", "cispo", "dapo", "dppo", "gmpo", "grpo", "gspo", "ipo", "kpop", "luspo", "sapo"),
    "vespo",
)
GROUPS: Final[dict[str, dict[str, Any]]] = {
    "loss": {
        "dr_grpo": LossConfig(name="dr_grpo", advantage_scale="none"),
        "dppo_kl": LossConfig(name="dppo", divergence="kl"),
        "echo": LossConfig(name="dapo", observation_coeff=0.05),
        "maxrl": LossConfig(name="grpo", advantage="maxrl"),
        **{name: LossConfig(name=name) for name in ALGORITHMS},
    },
}
"""The choices of each group of GRPO alone, by name."""
