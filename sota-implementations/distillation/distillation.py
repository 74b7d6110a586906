r"""On-policy distillation: a teacher judges each token that the student samples.

torchrl-agents distillation teacher.model=outputs/sft/gcd/seed0        # the embedded model
torchrl-agents distillation task=gsm8k task.dataset=rows.jsonl \
        policy.model=Qwen/Qwen3-0.6B teacher.model=Qwen/Qwen3-8B teacher.url=http://host:8000/v1
torchrl-agents distillation experiment=control teacher.model=...       # a control
"""

import os
from pathlib import Path

# Before torch is imported: its threads spin for a moment, then leave the cores to the tools.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch
from config import DistillationConfig
from teachers import build_teacher
from tensordict import TensorDictBase, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer

from collectors import PhaseTimer, StepMetrics
from objectives import GRPOLoss, GRPOLossOutput, NonFiniteGate
from torchrl_agents.recipe.collection import build_collector, collection_metrics
from torchrl_agents.recipe.loop import Learner, learn
from torchrl_agents.recipe.optim import build_optimizer, set_learning_rate
from torchrl_agents.recipe.preparation import Setup, load_policies
from torchrl_agents.recipe.report import RunLog
from torchrl_agents.recipe.results import StepRecord
from torchrl_agents.recipe.run_folder import Run
from torchrl_agents.recipe.start import run_recipe
from torchrl_agents.recipe.stop import StopSignals
from torchrl_agents.settings.recipe import Recipe
from torchrl_data.keys import ADVANTAGE, ASSISTANT_MASK, LOG_PROBS_FULL
from torchrl_envs.rewards.kl import RetrieveLogProb

RECIPE = Recipe(
    name="distillation",
    summary="On-policy distillation: a teacher judges each token that the student samples.",
    example="teacher.model=outputs/sft/gcd/seed0",
    script=Path(__file__),
    config=DistillationConfig,
    groups={},
    needs_groups=False,
    required=("teacher.model",),
)
TEACHER = ("next", "teacher_log_probs", "full")


def main(cfg: DistillationConfig, setup: Setup, run: Run, log: RunLog, stop: StopSignals) -> dict:
    """Train as the settings say; gives the result."""
    actor, policy = load_policies(cfg, setup, log)
    with log.phase("loading the teacher"):
        teacher = build_teacher(cfg.teacher, actor, cfg.policy)
    score = RetrieveLogProb(
        teacher, log_probs_full_key=TEACHER[1:], temperature=cfg.policy.temperature
    )

    def judge(trajectories: TensorDictBase) -> TensorDictBase:
        """Give each sampled token its advantage."""
        rows = score(trajectories).unbind(0)
        for row in rows:
            # A = log q(token) - log p(token), q the teacher and p the student that sampled it.
            # Its mean over what p samples is -KL(p || q): REINFORCE with A descends on it.
            mask = row[ASSISTANT_MASK]
            verdict = (row[TEACHER] - row[LOG_PROBS_FULL])[mask]
            if cfg.train.shuffle_verdicts:
                verdict = verdict[torch.randperm(len(verdict))]
            row[ADVANTAGE] = torch.zeros(len(mask), 1).masked_scatter(mask[:, None], verdict)
        return lazy_stack(rows)

    num_rollouts = setup.env.batch_size.numel()
    buffer = ReplayBuffer(storage=LazyStackStorage(num_rollouts), batch_size=num_rollouts)
    collector = build_collector(
        cfg.collector, setup.env, policy, replay_buffer=buffer, postproc=judge
    )
    collector.update_policy_weights_(actor.model)

    # L = - sum over sampled tokens of min(r A, clip(r, 1 - e, 1 + e) A) / number of tokens, with
    # r = p_now(token) / p_sampled(token): what is older than this step is corrected for.
    loss = GRPOLoss(
        actor,
        clip_epsilon=(cfg.train.clip_epsilon, cfg.train.clip_epsilon),
        temperature=cfg.policy.temperature,
    )
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
            metrics.add_rollouts(collector.collect())
        trained = buffer[:]
        advantages = torch.cat([row[ADVANTAGE][row[ASSISTANT_MASK]] for row in trained.unbind(0)])
        with timer("train"):
            batch = loss.pack(trained)
            window = loss.measure_window(batch)
            for _ in range(cfg.train.num_epochs or 1):
                outputs = []
                for part in batch.micro_batches(max_tokens=cfg.train.micro_batch_tokens):
                    outputs.append(loss(part, window=window))
                    gate.backward(outputs[-1], part)
                metrics.add_update(GRPOLossOutput.combine(outputs), gate.step())
        buffer.empty()
        with timer("sync"):
            collector.update_policy_weights_(actor.model)
        more = {"learning_rate": rate, "kl_to_teacher": -float(advantages.mean())}
        reduced = metrics.reduce(**more, **collection_metrics(collector))
        return StepRecord(step, reduced, trained, trained)

    curves = {"kl_to_teacher": "KL to the teacher, nats per token", "entropy": "entropy"}
    learner = Learner(setup.task, setup.held_out_env, actor, policy, collector, loss)
    return learn(RECIPE, cfg, learner, step_of, run, log, stop, curves=curves)


if __name__ == "__main__":
    run_recipe(RECIPE, main)
