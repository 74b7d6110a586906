"""Expert iteration: sample, keep the best of each group, fine-tune on them, and again.

torchrl-agents expert-iteration                       # the embedded model learns to calculate
torchrl-agents expert-iteration task=gsm8k task.dataset=rows.jsonl policy.model=Qwen/Qwen3-0.6B
torchrl-agents expert-iteration experiment=control    # a control: shuffled rewards
"""

from config import SETTINGS, ExpertConfig

from torchrl_agents.settings.command_line import read_command_line

if __name__ == "__main__":
    read_command_line(SETTINGS)  # what is wrong is said before torch is imported

from dataclasses import replace

from objectives import SFTLoss, TopKRewardSelector
from torchrl_agents.parallel import share_model
from torchrl_agents.run import Run
from torchrl_agents.start import run_recipe
from torchrl_agents.tasks import Setup, before_buffer, build_collector, load_models, warm_up
from torchrl_agents.training import Rollouts, Step, Trainer, learn
from torchrl_modules import TransformersWrapper


def loss_of(cfg: ExpertConfig, actor: TransformersWrapper) -> SFTLoss:
    """The loss, on every rank."""
    # L = - (sum over kept rollouts and their sampled tokens of log p(token)) / number of tokens
    return SFTLoss(actor, temperature=cfg.policy.temperature)


RECIPE = replace(SETTINGS, loss=loss_of, parts=lambda cfg: {"train": lambda: build_selector(cfg)})


def build_selector(cfg: ExpertConfig) -> TopKRewardSelector:
    """Keeps the best of each group.

    Raises:
        ValueError: an option is unknown, or more are kept than there are in a group.
    """
    return TopKRewardSelector(
        group_size=cfg.collector.group_size, topk_size=cfg.train.top_k, above=cfg.train.keep_above
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

    def kept(step: Step) -> dict[str, float]:
        num_kept = 0 if step.trained is None else len(step.trained)
        return {"kept_fraction": num_kept / setup.env.batch_size.numel()}

    trainer = Trainer(
        *(cfg, run, setup, actor, policy, Rollouts(collector)),
        num_epochs=cfg.train.num_epochs,
        measure=kept,
        parts={"best": best},
    )
    return learn(trainer)


if __name__ == "__main__":
    run_recipe(RECIPE, main)
