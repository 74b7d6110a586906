"""Settings of GRPO alone, typed, with what they mean; ``grpo.py --help`` shows all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from torchrl_agents.settings.schema import EpochsTrainConfig, RolloutsConfig


@dataclass
class LossConfig:
    """The loss and its advantages; see docs/losses.md. None takes the algorithm's own."""

    name: str = "dapo"
    """The algorithm: a preset of objectives/losses/grpo_presets.py in lower case."""
    clip_low: float | None = None
    """The ratio is kept above 1 - clip_low."""
    clip_high: float | None = None
    """The ratio is kept below 1 + clip_high."""
    surrogate: str | None = None
    """clipped, cispo, sapo, vespo, gmpo or divergence; or mine:f, a function of yours."""
    surrogate_settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the surrogate by name: +loss.surrogate_settings.max_ratio=3."""
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
    """group (mean and deviation), rloo (leave one out), gdpo (each reward by itself) or maxrl; of
    one rollout a prompt, collector.group_size=1: batch_mean or running_mean (by task)."""
    advantage_scale: str | None = None
    """What the group's advantage is divided by: group, batch or none; of batch_mean: batch or
    none."""
    credit: str = "episode"
    """What is paid for a reward in an episode of several rows: episode (all of it), agent (each
    agent of a program is compared with itself), branch or turn (from rewards by turn); or mine:f, a
    function of the tree of rows and the episode's advantage."""
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
class GRPOTrainConfig(EpochsTrainConfig):
    """GRPO."""

    shuffle_rewards: bool = False
    """A control: rewards are dealt out at random, so nothing can be learnt."""
    drop_solved_at: float | None = None
    """Prompts of which at least this share was solved are not drawn again; 0.9 is usual."""
    pools: dict[str, float] = field(default_factory=dict)
    """Arguments of DifficultyPools: +train.pools.easy_at=0.8 +train.pools.admit_easy=0.1"""


@dataclass
class GRPOConfig(RolloutsConfig):
    """Settings of ``grpo.py``."""

    loss: LossConfig = field(default_factory=LossConfig)
    train: GRPOTrainConfig = field(default_factory=GRPOTrainConfig)


ALGORITHMS: Final = (
    *("bnpo", "cispo", "dapo", "dppo", "gmpo", "grpo", "gspo", "ipo", "kpop", "luspo", "sapo"),
    "vespo",
)
PRESETS: Final = {n: n.upper() for n in ALGORITHMS} | {"dr_grpo": "DrGRPO", "kpop": "KPop"}
"""Losses of the library by ``loss.name``."""
