"""Preference learning (DPO): the better one of two answers becomes likelier.

torchrl-agents dpo data.dataset=pairs.jsonl policy.model=Qwen/Qwen3-0.6B task=gsm8k profile=gpu
torchrl-agents convert outputs/grpo/gsm8k/seed0 pairs.jsonl      # pairs of rollouts that exist
torchrl-agents dpo experiment=control                            # better and worse at random
"""

from config import DPOConfig

from torchrl_agents.settings.command_line import read_command_line
from torchrl_agents.settings.option_settings import given_options
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.schema import EngineConfig

RECIPE = Recipe(
    name="dpo",
    summary="Preference learning (DPO): the better one of two answers becomes likelier.",
    example="data.dataset=pairs.jsonl task=gsm8k policy.model=Qwen/Qwen3-0.6B profile=gpu",
    config=DPOConfig,
    groups={"engine": {"transformers": EngineConfig()}},
    needs_groups=False,
    embedded={"optim.learning_rate": 1e-3, "optim.max_grad_norm": 1.0},
    pretrained={"optim.learning_rate": 1e-6},
    # L = - mean over pairs of log sigmoid(beta (log-ratio of the better - of the other answer))
    loss=lambda cfg, actor: DPOLoss(actor, **given_options(cfg.loss, DPOOptions)),
    rehearse=lambda cfg, test, policy: encode_pairs(cfg, test, policy),
)

if __name__ == "__main__":
    read_command_line(RECIPE)  # what is wrong is said before torch is imported

import torch

from collectors import LLMCollector
from objectives import DPOLoss, DPOOptions
from torchrl_agents.given_pairs import build_pairs as build
from torchrl_agents.given_pairs import encode_pairs
from torchrl_agents.models.adapters import add_adapters
from torchrl_agents.parallel import share_model
from torchrl_agents.referenced_rows import HeldOutUnits, ReferencedRows, write_reference
from torchrl_agents.run import Run
from torchrl_agents.setup import Setup, load_models
from torchrl_agents.start import run_recipe
from torchrl_agents.training import Training, learn


def main(cfg: DPOConfig, test: Setup, run: Run) -> dict:
    """Train as the settings say; gives the result."""
    torch.manual_seed(cfg.seed)  # of the adapters' first weights, too
    actor, policy = add_adapters(cfg, *load_models(cfg, test, run))
    actor, policy = share_model(cfg, run, actor, policy)  # with the ranks of torchrun
    with run.log.phase("encoding the pairs"):
        pairs = encode_pairs(cfg, test, actor)
    held_out, trained = pairs[: cfg.data.num_held_out], pairs[cfg.data.num_held_out :]
    collector = LLMCollector(test.held_out_env, policy)
    sampler = ReferencedRows(collector, trained, cfg.train.batch_size, cfg.seed)
    test_loss = DPOLoss(policy, **given_options(cfg.loss, DPOOptions))
    if test_loss.options.has_reference:
        needed = [*held_out, *sampler.first_units(cfg.train.num_steps)]
        write_reference(cfg, run, actor, needed, cfg.data.what)

    test_of_rows = HeldOutUnits(cfg, test_loss, held_out)
    training = Training(
        *(cfg, run, test, actor, policy, sampler),
        measure=test_of_rows.measure,
        curves={
            "accuracy": "pairs in the right order",
            "held_out_accuracy": "the same, held out",
            "loss": "loss of a pair",
        },
    )
    return learn(training) | test_of_rows.scores()


if __name__ == "__main__":
    run_recipe(RECIPE, main, build)
