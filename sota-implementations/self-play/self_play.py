"""Self-play: one policy in both seats of a game learns from winning and losing against itself.

torchrl-agents self-play                              # the embedded model learns Nim
torchrl-agents self-play policy.model=Qwen/Qwen3-0.6B engine=vllm profile=gpu
torchrl-agents self-play experiment=control           # a control: shuffled rewards
"""

from config import SelfPlayConfig

from torchrl_agents.settings.command_line import read_command_line
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.recipe import Recipe

RECIPE = Recipe(
    name="self_play",
    summary="Self-play: one policy in both seats of a game learns from playing against itself.",
    example="task=nim task.largest=20",
    config=SelfPlayConfig,
    embedded={
        "warm_start.num_steps": 300,
        "optim.learning_rate": 3e-3,
        "train.kl_to_ref_coeff": 0.02,
    },
    pretrained={"train.kl_to_ref_coeff": 0.0},
    needs_groups=False,
    # L = sum over sampled tokens of (beta KL(p_now, p_start) - min(r A, clip(r, 0.8, 1.2) A))
    #     / number of tokens, with r = p_now(token) / p_sampled(token)
    loss=lambda cfg, actor: GRPOLoss(
        actor,
        temperature=cfg.policy.temperature,
        kl_to_ref_coeff=cfg.train.kl_to_ref_coeff or None,
    ),
    parts=lambda cfg: {
        "train.baseline_decay": lambda: build_baseline(cfg),
        "opponents": lambda: check_opponents(cfg.opponents, engine=cfg.engine.name),
    },
)

if __name__ == "__main__":
    read_command_line(RECIPE)  # what is wrong is said before torch is imported

from game_collector import AGENT, PAST, SEATS, GameCollector
from opponent_pool import OpponentPool, check_opponents

from objectives import GRPOLoss, MCAdvantage, RoleBaseline
from torchrl_agents.collection import before_buffer, rollout_buffer
from torchrl_agents.parallel import freeze_reference, share_model
from torchrl_agents.run import Run
from torchrl_agents.setup import Setup, build_task, load_models, warm_up
from torchrl_agents.start import run_recipe
from torchrl_agents.training import Rollouts, Training, learn


def build_baseline(cfg: SelfPlayConfig) -> MCAdvantage:
    """The advantages of both seats, each row by itself: a past version's seat has no row."""
    roles = (AGENT, PAST)  # it wins more often against the past than against itself
    return MCAdvantage(1, estimator=RoleBaseline(by=roles, decay=cfg.train.baseline_decay))


def build(recipe: Recipe, cfg: SelfPlayConfig, settings: dict) -> Setup:
    """The task and its environments: a game for two, collected in batches."""
    if (cfg.collector.mode, cfg.collector.group_size) != ("sync", SEATS):
        raise SettingsError(
            "self-play needs collector=sync with collector.group_size=2, the seats of a game; got "
            f"collector.mode={cfg.collector.mode}, group_size={cfg.collector.group_size}."
        )
    setup = build_task(recipe, cfg, settings)
    if setup.task.game is None:
        raise SettingsError(f"task={cfg.task.id} is no game for two; task=nim is one.")
    return setup


def main(cfg: SelfPlayConfig, setup: Setup, run: Run) -> dict:
    """Train as the settings say; gives the result."""
    actor, policy = load_models(cfg, setup, run)
    actor, policy = warm_up(cfg, setup, run, actor, policy)
    reference, frozen = freeze_reference(cfg, run, actor, weight=cfg.train.kl_to_ref_coeff)
    actor, policy = share_model(cfg, run, actor, policy)  # with the ranks of torchrun

    # Past versions play a share of the games, each game from the other seat; they are not trained.
    pool = OpponentPool(cfg.opponents, cfg, actor) if cfg.opponents.every is not None else None

    # A = R - b of the seat, then b <- decay b + (1 - decay) R: who moves first may win more often,
    # and a baseline of both seats together would praise the seat instead of the play.
    advantage = build_baseline(cfg)
    assert setup.task.game is not None
    collector = GameCollector(
        *(setup.env, policy, setup.task.game, pool),
        replay_buffer=rollout_buffer(advantage),
        postproc=before_buffer(cfg, reference),
    )
    past = {} if pool is None else {"opponents": pool}
    training = Training(
        *(cfg, run, setup, actor, policy, Rollouts(collector)),
        parts={"advantage": advantage, **past, **frozen},
        measure=(lambda _: {}) if pool is None else pool.after,
    )
    # Each step: play, train on both seats, play with the new weights. The test is against others.
    return learn(training)


if __name__ == "__main__":
    run_recipe(RECIPE, main, build)
