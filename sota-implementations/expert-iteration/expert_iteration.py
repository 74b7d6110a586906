"""Expert iteration: sample, keep the best of each group, fine-tune on them, and again.

torchrl-agents expert-iteration                       # the embedded model learns to calculate
torchrl-agents expert-iteration task=gsm8k task.dataset=rows.jsonl policy.model=Qwen/Qwen3-0.6B
torchrl-agents expert-iteration experiment=control    # a control: shuffled rewards
"""

import torchrl_agents  # noqa: F401 (before torch)

# isort: split
from pathlib import Path

from config import ExpertConfig
from torchrl.data import LazyStackStorage, ReplayBuffer

from objectives import SFTLoss, TopKRewardSelector
from torchrl_agents.parallel import Crew, share_model
from torchrl_agents.run import Run, RunLog, StopSignals
from torchrl_agents.settings.schema import Recipe
from torchrl_agents.start import run_recipe
from torchrl_agents.tasks import Setup, build_collector, load_policies, shuffle_rewards
from torchrl_agents.training import Rollouts, Step, Tests, Trainer, Updates, learn
from torchrl_modules import TransformersWrapper


def build_updates(
    cfg: ExpertConfig, actor: TransformersWrapper, folder: Path, crew: Crew
) -> Updates:
    """The loss and its optimizer, on every rank."""
    # L = - (sum over kept rollouts and their sampled tokens of log p(token)) / number of tokens
    loss = SFTLoss(actor, temperature=cfg.policy.temperature)
    return Updates(cfg, actor, loss, folder, crew)


RECIPE = Recipe(
    name="expert_iteration",
    summary="Expert iteration: sample, keep the best of each group, fine-tune on them, and again.",
    example="task=gsm8k task.dataset=rows.jsonl policy.model=Qwen/Qwen3-0.6B profile=gpu",
    script=Path(__file__),
    config=ExpertConfig,
    updates=build_updates,
    embedded={"optim.learning_rate": 2e-3},
    parts=lambda cfg: {"train": lambda: build_selector(cfg)},
)


def build_selector(cfg: ExpertConfig) -> TopKRewardSelector:
    """Keeps the best of each group.

    Raises:
        ValueError: an option is unknown, or more are kept than there are in a group.
    """
    return TopKRewardSelector(
        group_size=cfg.collector.group_size,
        topk_size=cfg.train.top_k,
        above=cfg.train.keep_above,
    )


def main(cfg: ExpertConfig, setup: Setup, run: Run, log: RunLog, stop: StopSignals) -> dict:
    """Train as the settings say; gives the result."""
    actor, policy = load_policies(cfg, setup, log, warm=not run.goes_on)
    crew, actor, policy = share_model(cfg, run.ranks, actor, policy)  # with the ranks of torchrun

    # Of each group of G rollouts of one prompt the k with the highest reward are kept, if they are
    # above the group's mean: a group whose rewards are all equal has nothing to learn from.
    num_rollouts = setup.env.batch_size.numel()
    best = build_selector(cfg)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(num_rollouts), transform=best, batch_size=num_rollouts
    )
    collector = build_collector(
        cfg,
        setup.env,
        policy,
        replay_buffer=buffer,
        postproc=shuffle_rewards if cfg.train.shuffle_rewards else None,
    )

    def kept(step: Step) -> dict[str, float]:
        num_kept = 0 if step.trained is None else len(step.trained)
        return {"kept_fraction": num_kept / num_rollouts}

    trainer = Trainer(
        cfg=cfg,
        run=run,
        actor=actor,
        policy=policy,
        updates=build_updates(cfg, actor, run.folder, crew),
        data=Rollouts(collector, buffer),
        num_epochs=cfg.train.num_epochs or 1,
        measure=kept,
        parts={"best": best},
    )
    return learn(RECIPE, trainer, Tests(setup.task, setup.held_out_env, collector), log, stop)


if __name__ == "__main__":
    run_recipe(RECIPE, main)
