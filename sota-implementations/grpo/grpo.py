"""GRPO, top to bottom: a language model learns a task in an environment that scores it.

    python sota-implementations/grpo/grpo.py                          # the embedded model
    python sota-implementations/grpo/grpo.py task=number_guessing seed=1
    python sota-implementations/grpo/grpo.py task=gsm8k policy.model=Qwen/Qwen3-0.6B engine=vllm
    python sota-implementations/grpo/grpo.py --help                   # every setting
    torchrun --nproc-per-node=2 sota-implementations/grpo/grpo.py     # two ranks train

The last line of the output is one JSON object with the result. Log, metrics, the learning curve,
all rollouts, checkpoints and the trained model are in a new folder
``outputs/grpo/<task>/<name>-<number>``, to which ``outputs/grpo/<task>/<name>`` then shows. A run
that was stopped goes on, as if it had not been, with ``resume=auto`` or ``resume=<folder>``.
"""

import torchrl_agents  # noqa: F401 (before torch)

# isort: split
from pathlib import Path
from typing import Any

from build import (
    GROUPS,
    GRPOConfig,
    NoActor,
    build_advantage,
    build_loss,
    build_pools,
    build_postproc,
    check_correction,
    policy_output,
)
from torchrl.data import LazyStackStorage, ReplayBuffer

from objectives import NonFiniteGate, StepOutcome
from torchrl_agents.parallel import Crew, freeze_reference, share_model
from torchrl_agents.run import Run, RunLog, StopSignals
from torchrl_agents.settings.schema import Recipe
from torchrl_agents.start import run_recipe
from torchrl_agents.tasks import Setup, build_collector, load_policies
from torchrl_agents.training import MicroBatches, Rollouts, Tests, Trainer, Updates, training
from torchrl_envs import RewardFunctions
from torchrl_modules import TransformersWrapper


def build_updates(cfg: GRPOConfig, actor: TransformersWrapper, folder: Path, crew: Crew) -> Updates:
    """The loss and its optimizer, on every rank."""
    # L = - sum over sampled tokens of min(r A, clip(r, 1 - low, 1 + high) A) / number of tokens,
    # with r = p_now(token) / p_sampled(token); loss=... takes another one.
    loss = build_loss(
        cfg.loss,
        actor,
        temperature=cfg.policy.temperature,
        max_tokens=(cfg.collector.max_turns or 1) * (cfg.policy.max_new_tokens or 1),
    )
    return Updates(cfg, actor, loss, folder, crew, one_pass)


def one_pass(loss: Any, gate: NonFiniteGate, batch: MicroBatches) -> tuple[Any, StepOutcome]:
    """A gradient over all rows of a step, in micro-batches, and an optimizer step."""
    outputs = []
    for part in batch.parts:
        outputs.append(loss(part, window=batch.window))
        gate.backward(outputs[-1], part)
    return policy_output(outputs, ranks=batch.ranks), gate.step()


RECIPE = Recipe(
    name="grpo",
    summary="GRPO: a language model learns a task in an environment that scores it.",
    example="task=gsm8k task.dataset=rows.jsonl policy.model=Qwen/Qwen3-0.6B profile=gpu",
    script=Path(__file__),
    config=GRPOConfig,
    groups=GROUPS,
    embedded={"loss.entropy_coeff": 0.01},
    pretrained={"loss.entropy_coeff": 0.0},
    updates=build_updates,
    parts=lambda cfg: {
        "loss": lambda: build_loss(
            cfg.loss, NoActor(), temperature=cfg.policy.temperature, max_tokens=1
        ),
        "loss.advantage": lambda: build_advantage(cfg.loss, cfg.collector.group_size),
        "loss.sampler_correction": lambda: check_correction(cfg),
        "train.drop_solved_at": lambda: build_pools(cfg),
    },
)


def main(cfg: GRPOConfig, setup: Setup, run: Run, log: RunLog, stop: StopSignals) -> dict:
    """Train as the settings say; gives the result."""
    task, env, held_out_env = setup
    actor, policy = load_policies(cfg, setup, log, warm=not run.goes_on)
    reference, frozen = None, {}
    if cfg.loss.kl_to_ref_coeff:
        reference, frozen = freeze_reference(cfg, run.ranks, actor)
    crew, actor, policy = share_model(cfg, run.ranks, actor, policy)  # with the ranks of torchrun

    # A_i = (r_i - mean of the group) / (deviation of the group), for each of the G rollouts of one
    # prompt: the collector fills the buffer with groups, and the buffer gives them advantages.
    num_rollouts = env.batch_size.numel()
    advantage = build_advantage(cfg.loss, cfg.collector.group_size)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(num_rollouts), transform=advantage, batch_size=num_rollouts
    )
    for functions in env.transforms_of(RewardFunctions):
        functions.trainer_state.max_steps = cfg.train.num_steps
    collector = build_collector(
        cfg,
        env,
        policy,
        replay_buffer=buffer,
        postproc=build_postproc(cfg, reference, build_pools(cfg, env)),
    )

    trainer = Trainer(
        cfg=cfg,
        run=run,
        actor=actor,
        policy=policy,
        updates=build_updates(cfg, actor, run.folder, crew),
        data=Rollouts(collector, buffer),
        num_epochs=cfg.train.num_epochs or 1,
        parts={"advantage": advantage, **frozen},
    )
    tests = Tests(task, held_out_env, collector)
    with training(RECIPE, trainer, tests, log, stop) as (steps, result):
        for step in steps:  # records, tests, checkpoints and signals are around them
            step.draw()  # the collector fills the buffer, which gives its groups advantages
            for _ in step.passes():  # train.num_epochs, over the groups that have a signal
                step.update()  # on every rank: `one_pass`
            step.push()  # the policy gets the new weights
    return result


if __name__ == "__main__":
    run_recipe(RECIPE, main)
