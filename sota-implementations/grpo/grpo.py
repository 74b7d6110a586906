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

from build import (
    build_advantage,
    build_loss,
    build_pools,
    build_postproc,
    check_entries,
    check_old_policy,
)
from config import ALGORITHMS, GRPOConfig, LossConfig

from torchrl_agents.settings.command_line import read_command_line
from torchrl_agents.settings.recipe import Recipe

RECIPE = Recipe(
    name="grpo",
    summary="GRPO: a language model learns a task in an environment that scores it.",
    example="task=gsm8k task.dataset=rows.jsonl policy.model=Qwen/Qwen3-0.6B profile=gpu",
    config=GRPOConfig,
    groups={
        "loss": {
            "dr_grpo": LossConfig(name="dr_grpo", advantage_scale="none"),
            "dppo_kl": LossConfig(name="dppo", surrogate_settings={"divergence": "kl"}),
            "echo": LossConfig(name="dapo", observation_coeff=0.05),
            "maxrl": LossConfig(name="grpo", advantage="maxrl"),
            **{name: LossConfig(name=name) for name in ALGORITHMS},
        },
    },
    embedded={"loss.entropy_coeff": 0.01},
    pretrained={"loss.entropy_coeff": 0.0},
    parts=lambda cfg: {
        "collector.max_draws": lambda: refill_of(cfg.collector),
        "loss.advantage": lambda: build_advantage(cfg.loss, cfg.collector.group_size),
        "loss.old_policy": lambda: check_old_policy(cfg),
        "train.drop_solved_at and train.pools": lambda: build_pools(cfg),
    },
    # L = - sum over sampled tokens of min(r A, clip(r, 1 - low, 1 + high) A) / number of tokens,
    # with r = p_now(token) / p_sampled(token); loss=... takes another one.
    loss=lambda cfg, actor: build_loss(
        cfg.loss,
        actor,
        temperature=cfg.policy.temperature,
        max_tokens=(cfg.collector.max_turns or 1) * (cfg.policy.max_new_tokens or 1),
    ),
    rehearse=lambda cfg, setup, _: check_entries(cfg, setup.env),
    train=lambda training: train(training),
)

if __name__ == "__main__":
    read_command_line(RECIPE)  # what is wrong is said before torch is imported

from objectives import NonFiniteGate
from torchrl_agents.collection import build_collector, refill_of
from torchrl_agents.critic import first_critic
from torchrl_agents.learning_curve import CRITIC_CURVES, REWARD_CURVES
from torchrl_agents.optimizers import build_optimizer
from torchrl_agents.parallel import Follower, freeze_reference, share_critic, share_model
from torchrl_agents.run import Run
from torchrl_agents.setup import Setup, load_models, warm_up
from torchrl_agents.start import run_recipe
from torchrl_agents.training import Rollouts, Training
from torchrl_envs import RewardFunctions


def train(training: Training | Follower) -> dict:
    """Make the steps; every rank does, each with its share of the rows. Gives the result."""
    cfg, actor, critic = training.cfg, training.actor, training.critic
    loss = RECIPE.loss(cfg, actor)
    trained = [p for p in actor.parameters() if p.requires_grad]
    optimizer = build_optimizer(cfg.optim, trained, actor.model)
    gate = NonFiniteGate(
        optimizer,
        max_grad_norm=cfg.optim.max_grad_norm,
        dump_dir=training.folder / "not_finite",
        ranks=training.ranks,
    )
    with training.steps(loss, gate) as steps:  # records, tests, checkpoints and signals
        for step in steps:
            step.draw()  # rank 0: the collector fills the buffer, which gives advantages
            for share in step.passes():  # train.num_epochs, over the groups that have a signal
                if critic is not None:  # of loss.advantage=gae
                    step.note_critic(critic.update(share, step.number))
                    if step.number <= critic.num_warmup_steps:
                        continue
                outputs = []
                for part in share.micro_batches():  # as many rows as fit; gradients add up
                    outputs.append(loss(part, window=share.window))  # scores the sampled tokens
                    gate.backward(outputs[-1], part)
                outcome = gate.step()  # clips, and steps the optimizer if all is finite
                step.note(outputs, outcome)
            step.push()  # the policy gets the new weights
    return training.result


def main(cfg: GRPOConfig, setup: Setup, run: Run) -> dict:
    """Train as the settings say; gives the result."""
    actor, policy = load_models(cfg, setup, run)
    actor, policy = warm_up(cfg, setup, run, actor, policy)
    reference, frozen = freeze_reference(cfg, run, actor, weight=cfg.loss.kl_to_ref_coeff)
    begin = first_critic(cfg, actor)  # of loss.advantage=gae
    actor, policy = share_model(cfg, run, actor, policy)  # with the ranks of torchrun
    critic = share_critic(cfg, run, begin)

    # A_i = (r_i - mean of the group) / (deviation of the group), for each of the G rollouts of one
    # prompt: the collector fills a buffer with groups, and the buffer gives them advantages. With
    # a critic each token has its own, which the critic gives once the rows are drawn.
    refill = refill_of(cfg.collector)  # of groups without a signal: others are drawn, or none
    advantage = build_advantage(cfg.loss, cfg.collector.group_size, refill)
    postproc = build_postproc(cfg, reference, build_pools(cfg, setup.env))
    collector = build_collector(cfg, setup.env, policy, transform=advantage, postproc=postproc)
    for functions in setup.env.transforms_of(RewardFunctions):
        functions.trainer_state.max_steps = cfg.train.num_steps

    own = {} if advantage is None else {"advantage": advantage}
    shown = REWARD_CURVES if critic is None else CRITIC_CURVES
    settings = {"parts": {**own, **frozen}, "critic": critic, "curves": shown}
    return train(Training(cfg, run, setup, actor, policy, Rollouts(collector), **settings))


if __name__ == "__main__":
    run_recipe(RECIPE, main)
