"""Settings of GRPO alone, typed, with what they mean; ``grpo.py --help`` shows all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from objectives.losses.grpo_options import GRPOOptions
from torchrl_agents.settings.field_rules import NOT_NEGATIVE, among, setting
from torchrl_agents.settings.option_settings import option_settings
from torchrl_agents.settings.schema import (
    AgentsConfig,
    CriticConfig,
    EpochsTrainConfig,
    RolloutsConfig,
)

ALGORITHMS: Final = (
    *("bnpo", "cispo", "dapo", "dppo", "gmpo", "grpo", "gspo", "ipo", "kpop", "luspo", "sapo"),
    "vespo",
)
PRESETS: Final = {n: n.upper() for n in ALGORITHMS} | {"dr_grpo": "DrGRPO", "kpop": "KPop"}
"""Losses of the library by ``loss.name``."""
_OptionSettings = option_settings(
    "LossOptions",
    GRPOOptions,
    leave_out=("temperature", "kl_mask_threshold", "teacher_coeff", "advantage_coeff"),
)
"""The options of the loss, but for policy.temperature, the second name of filters.trust_region, and
those of a teacher, which another recipe has."""


@dataclass
class LossConfig(_OptionSettings):
    """The loss and its advantages; see docs/losses.md. None takes the algorithm's own."""

    name: str = setting("dapo", among(*PRESETS))
    """The algorithm: a preset of objectives/losses/grpo_presets.py in lower case."""
    surrogate: str | None = None
    """clipped, cispo, sapo, vespo, gmpo or divergence; or mine:f, a function of yours."""
    surrogate_settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the surrogate by name: +loss.surrogate_settings.max_ratio=3."""
    max_tokens: int | None = None
    """What fixed_length divides by; none: max_new_tokens times the most turns."""
    old_policy: str | None = None
    """The denominator of the ratio: sampler, the log-probs stored when the tokens were sampled; or
    current, this very pass's, with num_epochs=1; none: sampler, and current with a correction."""
    advantage: str = setting(
        "group", among("group", "rloo", "gdpo", "maxrl", "batch_mean", "running_mean", "gae")
    )
    """group (mean and deviation), rloo (leave one out), gdpo (each reward by itself) or maxrl; of
    one rollout a prompt, collector.group_size=1: batch_mean, running_mean (by task), or gae (by
    token, from the values of a critic, see critic)."""
    advantage_scale: str | None = setting(None, among("group", "batch", "none"))
    """What the group's advantage is divided by: group, batch or none; of batch_mean: batch or
    none."""
    credit: str = "episode"
    """What is paid for a reward in an episode of several rows: episode (all of it), agent (each
    agent of a program is compared with itself), branch or turn (from rewards by turn); or mine:f, a
    function of the tree of rows and the episode's advantage; or tree, of rollouts that branch: each
    token is paid by all rollouts that come after it (collector.num_roots)."""
    length_penalty: float = setting(0.0, NOT_NEGATIVE)
    """What the longest output of a group costs; the others pay by their share of its length."""
    observation_coeff: float = setting(0.0, NOT_NEGATIVE)
    """Weight of the cross-entropy on what tools and users answer, by the number of those tokens."""


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
    critic: CriticConfig = field(default_factory=CriticConfig)
    agents: AgentsConfig = field(default_factory=AgentsConfig)
    train: GRPOTrainConfig = field(default_factory=GRPOTrainConfig)
