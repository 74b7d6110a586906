"""Expert iteration: sample, keep the best of each group, fine-tune on them, and again.

torchrl-agents expert-iteration                       # the embedded model learns to calculate
torchrl-agents expert-iteration task=gsm8k task.dataset=rows.jsonl policy.model=Qwen/Qwen3-0.6B
torchrl-agents expert-iteration experiment=control    # a control: shuffled rewards
"""

from dataclasses import dataclass, field
from math import isfinite
from typing import Final

from torchrl_agents.settings.command_line import read_command_line
from torchrl_agents.settings.field_rules import AT_LEAST_1, FieldRule, setting
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.schema import EpochsTrainConfig, RolloutsConfig

ABOVE: Final = FieldRule(
    "mean, median, any or a finite number",
    lambda value: value in ("mean", "median", "any") if isinstance(value, str) else isfinite(value),
)


@dataclass
class ExpertTrainConfig(EpochsTrainConfig):
    """Expert iteration: of each group of rollouts, the best are trained on."""

    num_steps: int = 40
    top_k: int = setting(4, AT_LEAST_1)
    """Rollouts kept of each group, at most."""
    keep_above: str | float = setting("mean", ABOVE)
    """What their reward is above: mean or median of the group, or a number. With the median, a
    group gives nothing that is more than half solved; with 0.5, all that is right is kept."""
    shuffle_rewards: bool = False
    """A control: rewards are dealt out at random, so nothing can be learnt."""


@dataclass
class ExpertConfig(RolloutsConfig):
    """Settings of ``expert_iteration.py``."""

    train: ExpertTrainConfig = field(default_factory=ExpertTrainConfig)


RECIPE = Recipe(
    name="expert_iteration",
    summary="Expert iteration: sample, keep the best of each group, fine-tune on them, and again.",
    example="task=gsm8k task.dataset=rows.jsonl policy.model=Qwen/Qwen3-0.6B profile=gpu",
    config=ExpertConfig,
    embedded={"optim.learning_rate": 2e-3},
    # L = - (sum over kept rollouts and their sampled tokens of log p(token)) / number of tokens
    loss=lambda cfg, actor: SFTLoss(actor, temperature=cfg.policy.temperature),
    parts=lambda cfg: {"train": lambda: build_selector(cfg)},
)

if __name__ == "__main__":
    read_command_line(RECIPE)  # what is wrong is said before torch is imported

from objectives import SFTLoss, TopKRewardSelector
from torchrl_agents.collection import before_buffer, build_collector, refill_of
from torchrl_agents.parallel import share_model
from torchrl_agents.run import Run
from torchrl_agents.setup import Setup, load_models, warm_up
from torchrl_agents.start import run_recipe
from torchrl_agents.training import Rollouts, Training, TrainingStep, learn


def build_selector(cfg: ExpertConfig) -> TopKRewardSelector:
    """Keeps the best of each group.

    Raises:
        ValueError: an option is unknown, or more are kept than there are in a group.
    """
    return TopKRewardSelector(
        group_size=cfg.collector.group_size,
        topk_size=cfg.train.top_k,
        above=cfg.train.keep_above,
        refill=refill_of(cfg.collector),
    )


def main(cfg: ExpertConfig, setup: Setup, run: Run) -> dict:
    """Train as the settings say; gives the result."""
    actor, policy = load_models(cfg, setup, run)
    actor, policy = warm_up(cfg, setup, run, actor, policy)
    actor, policy = share_model(cfg, run, actor, policy)  # with the ranks of torchrun

    # Of each group of G rollouts of one prompt the k with the highest reward are kept, if they are
    # above the group's mean: a group whose rewards are all equal has nothing to learn from.
    best = build_selector(cfg)
    postproc = before_buffer(cfg, None)
    collector = build_collector(cfg, setup.env, policy, transform=best, postproc=postproc)

    def kept(step: TrainingStep) -> dict[str, float]:
        num_kept = 0 if step.trained is None else len(step.trained)
        num_drawn = setup.env.batch_size.numel()
        if cfg.collector.refill and step.trajectories is not None:
            num_drawn = len(step.trajectories)
        return {"kept_fraction": num_kept / num_drawn}

    training = Training(
        *(cfg, run, setup, actor, policy, Rollouts(collector)),
        measure=kept,
        parts={"best": best},
    )
    return learn(training)


if __name__ == "__main__":
    run_recipe(RECIPE, main)
