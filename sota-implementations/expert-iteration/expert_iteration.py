"""Expert iteration: sample, keep the best of each group, fine-tune on them, and again.

torchrl-agents expert-iteration                       # the embedded model learns to calculate
torchrl-agents expert-iteration task=gsm8k task.dataset=rows.jsonl policy.model=Qwen/Qwen3-0.6B
torchrl-agents expert-iteration experiment=control    # a control: shuffled rewards
"""

import os
from pathlib import Path

# Before torch is imported: its threads spin for a moment, then leave the cores to the tools.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from config import ExpertConfig
from torchrl.data import LazyStackStorage, ReplayBuffer

from collectors import PhaseTimer, StepMetrics
from objectives import NonFiniteGate, SFTLoss, SFTLossOutput, TopKRewardSelector
from torchrl_agents.recipe.collection import build_collector, collection_metrics, shuffle_rewards
from torchrl_agents.recipe.loop import Learner, learn
from torchrl_agents.recipe.optim import build_optimizer, set_learning_rate
from torchrl_agents.recipe.preparation import Setup, load_policies
from torchrl_agents.recipe.report import RunLog
from torchrl_agents.recipe.results import StepRecord
from torchrl_agents.recipe.run_folder import Run
from torchrl_agents.recipe.start import run_recipe
from torchrl_agents.recipe.stop import StopSignals
from torchrl_agents.settings.recipe import Recipe

RECIPE = Recipe(
    name="expert_iteration",
    summary="Expert iteration: sample, keep the best of each group, fine-tune on them, and again.",
    example="task=gsm8k task.dataset=rows.jsonl policy.model=Qwen/Qwen3-0.6B profile=gpu",
    script=Path(__file__),
    config=ExpertConfig,
    parts=lambda cfg: {
        "train.top_k": lambda: TopKRewardSelector(
            group_size=cfg.collector.group_size, topk_size=cfg.train.top_k
        )
    },
)


def main(cfg: ExpertConfig, setup: Setup, run: Run, log: RunLog, stop: StopSignals) -> dict:
    """Train as the settings say; gives the result."""
    actor, policy = load_policies(cfg, setup, log)

    # Of each group of G rollouts of one prompt the k with the highest reward are kept, if they are
    # above the group's median: a group whose rewards are all equal has nothing to learn from.
    num_rollouts = setup.env.batch_size.numel()
    best = TopKRewardSelector(group_size=cfg.collector.group_size, topk_size=cfg.train.top_k)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(num_rollouts), transform=best, batch_size=num_rollouts
    )
    collector = build_collector(
        cfg.collector,
        setup.env,
        policy,
        replay_buffer=buffer,
        postproc=shuffle_rewards if cfg.train.shuffle_rewards else None,
    )
    collector.update_policy_weights_(actor.model)

    # L = - (sum over kept rollouts and their sampled tokens of log p(token)) / number of tokens
    loss = SFTLoss(actor, temperature=cfg.policy.temperature)
    optimizer = build_optimizer(cfg.optim, actor.parameters())
    gate = NonFiniteGate(
        optimizer, max_grad_norm=cfg.optim.max_grad_norm, dump_dir=run.folder / "not_finite"
    )
    timer = PhaseTimer()
    timer.watch(policy, "generate")

    def step_of(step: int) -> StepRecord:
        metrics = StepMetrics(timer)
        rate = set_learning_rate(cfg.optim, optimizer, step, cfg.train.num_steps)
        with timer("environment"):
            trajectories = metrics.add_rollouts(collector.collect())
        num_kept = len(buffer)
        if num_kept:
            with timer("train"):
                batch = loss.pack(buffer[:])
                window = loss.measure_window(batch)
                for _ in range(cfg.train.num_epochs or 1):
                    outputs = []
                    for part in batch.micro_batches(max_tokens=cfg.train.micro_batch_tokens):
                        outputs.append(loss(part, window=window))
                        gate.backward(outputs[-1], part)
                    metrics.add_update(SFTLossOutput.combine(outputs), gate.step())
        buffer.empty()
        with timer("sync"):
            collector.update_policy_weights_(actor.model)
        more = {"learning_rate": rate, "kept_fraction": num_kept / len(trajectories)}
        reduced = metrics.reduce(**more, **collection_metrics(collector))
        return StepRecord(step, reduced, trajectories, None)

    learner = Learner(setup.task, setup.held_out_env, actor, policy, collector, loss)
    return learn(RECIPE, cfg, learner, step_of, run, log, stop)


if __name__ == "__main__":
    run_recipe(RECIPE, main)
