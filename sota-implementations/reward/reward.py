"""A reward model: of two answers to a prompt the better one gets the larger reward.

torchrl-agents reward data.dataset=pairs.jsonl policy.model=Qwen/Qwen3-0.6B profile=gpu
torchrl-agents reward train.num_steps=0 policy.model=FOLDER data.dataset=pairs.jsonl   # tests it
torchrl-agents reward experiment=control                            # better and worse at random
"""

from config import UNUSED, RewardConfig

from torchrl_agents.settings.command_line import read_command_line
from torchrl_agents.settings.option_settings import given_options
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.schema import EngineConfig

RECIPE = Recipe(
    name="reward",
    summary="A reward model: of two answers the better one gets the larger reward.",
    example="data.dataset=pairs.jsonl policy.model=Qwen/Qwen3-0.6B profile=gpu",
    config=RewardConfig,
    groups={"engine": {"transformers": EngineConfig()}},
    needs_groups=False,
    gives_rewards=True,
    unused=UNUSED,
    embedded={"optim.learning_rate": 1e-3, "optim.max_grad_norm": 1.0},
    pretrained={"optim.learning_rate": 1e-5},
    # L = - mean over pairs of log sigmoid(reward of the better - reward of the other answer)
    loss=lambda cfg, actor: RewardModelLoss(actor, **given_options(cfg.loss, RewardModelOptions)),
    rehearse=lambda cfg, test, policy: rehearse(cfg, test, policy),
)

if __name__ == "__main__":
    read_command_line(RECIPE)  # what is wrong is said before torch is imported

from typing import Any, cast

import torch

from objectives import RewardModelLoss, RewardModelOptions
from torchrl_agents.given_pairs import HeldOutPairs, encode_pairs
from torchrl_agents.given_pairs import build_pairs as build
from torchrl_agents.given_units import GivenUnits, Unit
from torchrl_agents.models.reward_models import check_beginning, load_reward_model
from torchrl_agents.parallel import share_reward_model
from torchrl_agents.run import Run
from torchrl_agents.setup import Setup
from torchrl_agents.start import run_recipe
from torchrl_agents.training import Training, learn
from torchrl_modules import LLMWrapperBase
from torchrl_modules.engines.transformers import TransformersEngine


def rehearse(cfg: RewardConfig, test: Setup, policy: LLMWrapperBase) -> list[Unit]:
    """Check the model, which has no weights, and encode the pairs."""
    check_beginning(cfg, cast("TransformersEngine", policy.engine).inside.config)
    return encode_pairs(cfg, test, policy, as_scored=True)


def main(cfg: RewardConfig, test: Setup, run: Run) -> dict[str, Any]:
    """Train as the settings say; gives the result."""
    with run.log.phase("loading the model"):
        model = load_reward_model(cfg, test.task)
    actor = share_reward_model(cfg, run, model)  # with its adapters, and the ranks of torchrun
    torch.manual_seed(cfg.seed)
    with run.log.phase("encoding the pairs"):
        pairs = encode_pairs(cfg, test, actor, as_scored=True)
    held_out, trained = pairs[: cfg.data.num_held_out], pairs[cfg.data.num_held_out :]
    test_loss = RewardModelLoss(actor, **given_options(cfg.loss, RewardModelOptions))
    training = Training(
        *(cfg, run, test, actor, actor),
        GivenUnits(None, trained, cfg.train.batch_size, cfg.seed),
        held_out=HeldOutPairs(cfg, run, actor, test_loss, held_out),
        curves={
            "loss": "loss of a pair",
            "chosen_reward": "reward of the better answers",
            "rejected_reward": "reward of the others",
        },
    )
    return learn(training)


if __name__ == "__main__":
    run_recipe(RECIPE, main, build)
