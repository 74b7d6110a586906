"""Online preference learning (online DPO): pairs are made of what the policy samples, step by step.

torchrl-agents online-dpo task=spell_backward         # the embedded model
torchrl-agents online-dpo task=gsm8k task.dataset=rows.jsonl policy.model=Qwen/Qwen3-0.6B
torchrl-agents online-dpo task=environment task.dataset=prompts.jsonl \
    task.rewards=outputs/reward/gsm8k/seed0           # a reward model orders the answers
torchrl-agents online-dpo experiment=control          # a control: shuffled rewards
"""

from config import OnlineDPOConfig

from torchrl_agents.settings.command_line import read_command_line
from torchrl_agents.settings.field_rules import values_of
from torchrl_agents.settings.option_settings import given_options
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.schema import CollectorConfig

RECIPE = Recipe(
    name="online_dpo",
    summary="Online preference learning (online DPO): of rollouts of a prompt the best and the "
    "worst are a pair, step by step.",
    example="task=gsm8k task.dataset=rows.jsonl policy.model=Qwen/Qwen3-0.6B profile=gpu",
    config=OnlineDPOConfig,
    # Many prompts with few rollouts each: a group gives one pair.
    groups={
        "collector": {
            mode: CollectorConfig(mode=mode, num_prompts=64, group_size=8)
            for mode in values_of(CollectorConfig, "mode")
        }
    },
    embedded={
        "optim.learning_rate": 1e-3,
        "optim.max_grad_norm": 1.0,
        "train.num_epochs": 2,
        "loss.sft_coeff": 0.2,
    },
    parts=lambda cfg: {"train": lambda: build_pair_selector(cfg)},
    # L = - mean over pairs of log sigmoid(beta (log-ratio of the best - of the worst rollout)),
    # with the log-ratio of all sampled tokens to the model as it is before the first step.
    loss=lambda cfg, actor: DPOLoss(
        actor, temperature=cfg.policy.temperature, **given_options(cfg.loss, DPOOptions)
    ),
)

if __name__ == "__main__":
    read_command_line(RECIPE)  # what is wrong is said before torch is imported

from objectives import DPOLoss, DPOOptions, PairSelector
from torchrl_agents.collection import before_buffer, build_collector, refill_of
from torchrl_agents.learning_curve import REWARD_CURVES
from torchrl_agents.parallel import freeze_reference, share_model
from torchrl_agents.run import Run
from torchrl_agents.setup import Setup, load_models, warm_up
from torchrl_agents.start import run_recipe
from torchrl_agents.training import Rollouts, Training, TrainingStep, learn
from torchrl_agents.whole_rollouts import build_whole_rollouts as build
from torchrl_data.keys import GROUP_ID
from torchrl_envs import RetrieveLogProb


def build_pair_selector(cfg: OnlineDPOConfig) -> PairSelector:
    """Keeps the best and the worst of each group.

    Raises:
        ValueError: an option is out of range.
    """
    return PairSelector(
        cfg.collector.group_size,
        min_difference=cfg.train.min_difference,
        refill=refill_of(cfg.collector),
    )


def share_of_pairs(step: TrainingStep) -> dict[str, float]:
    """The share of the groups of a step of which a pair is trained."""
    if step.trajectories is None:
        return {}
    num_groups = len({int(row[GROUP_ID]) for row in step.trajectories.unbind(0)})
    num_pairs = 0 if step.trained is None else len(step.trained) // 2
    return {"pair_fraction": num_pairs / num_groups}


def main(cfg: OnlineDPOConfig, setup: Setup, run: Run) -> dict:
    """Train as the settings say; gives the result."""
    actor, policy = load_models(cfg, setup, run)
    actor, policy = warm_up(cfg, setup, run, actor, policy)
    compares = DPOOptions(**given_options(cfg.loss, DPOOptions)).has_reference
    reference, frozen = freeze_reference(cfg, run, actor, weight=float(compares))
    actor, policy = share_model(cfg, run, actor, policy)  # with the ranks of torchrun

    # Of each group of G rollouts of one prompt the best and the worst go into the buffer, as a
    # pair; a group whose rewards are all equal gives none. The reference reads the pairs alone.
    pairs = build_pair_selector(cfg)
    postproc = before_buffer(cfg, None)
    collector = build_collector(cfg, setup.env, policy, transform=pairs, postproc=postproc)
    scorer = None
    if reference is not None:
        scorer = RetrieveLogProb(reference, temperature=cfg.policy.temperature)

    training = Training(
        *(cfg, run, setup, actor, policy, Rollouts(collector, before_training=scorer)),
        measure=share_of_pairs,
        parts={"pairs": pairs, **frozen},
        curves={
            "accuracy": "pairs in the right order",
            "pair_fraction": "groups with a pair",
            "sampled_tokens": REWARD_CURVES["sampled_tokens"],
        },
    )
    return learn(training)


if __name__ == "__main__":
    run_recipe(RECIPE, main, build)
