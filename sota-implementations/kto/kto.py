"""Learning from labelled answers (KTO): desirable ones become likelier, and the others less.

torchrl-agents kto data.dataset=labels.jsonl policy.model=Qwen/Qwen3-0.6B task=gsm8k profile=gpu
torchrl-agents convert outputs/grpo/gsm8k/seed0 labels.jsonl --labels 1  # rollouts that exist
torchrl-agents kto experiment=control                                    # labels at random
"""

from config import KTOConfig

from torchrl_agents.settings.command_line import read_command_line
from torchrl_agents.settings.option_settings import given_options
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.schema import EngineConfig

RECIPE = Recipe(
    name="kto",
    summary="Learning from labelled answers (KTO): desirable ones become likelier, others less.",
    example="data.dataset=labels.jsonl task=gsm8k policy.model=Qwen/Qwen3-0.6B profile=gpu",
    config=KTOConfig,
    groups={"engine": {"transformers": EngineConfig()}},
    needs_groups=False,
    embedded={"optim.learning_rate": 1e-3, "optim.max_grad_norm": 1.0},
    pretrained={"optim.learning_rate": 1e-6},
    # L = mean over answers of weight (1 - sigma(+- beta (log-ratio of the answer - KL))), where KL
    # is the mean log-ratio of answers to other prompts, at least 0
    loss=lambda cfg, actor: KTOLoss(actor, **given_options(cfg.loss, KTOOptions)),
    rehearse=lambda cfg, test, policy: encode_labelled(cfg, test, policy),
)

if __name__ == "__main__":
    read_command_line(RECIPE)  # what is wrong is said before torch is imported

import logging
import random
from collections.abc import Sequence
from typing import Any

import torch

from collectors import LLMCollector
from objectives import KTOLoss, KTOOptions
from torchrl_agents.given_conversations import (
    GivenChats,
    check_enough,
    encode_given,
    load_given,
    tell_seen,
    with_given,
)
from torchrl_agents.given_units import Unit
from torchrl_agents.models.adapters import add_adapters
from torchrl_agents.parallel import share_model
from torchrl_agents.referenced_rows import HeldOutUnits, ReferencedRows, write_reference
from torchrl_agents.run import Run
from torchrl_agents.settings.errors import SettingsError, refusing
from torchrl_agents.setup import Setup, build_task, load_models
from torchrl_agents.start import run_recipe
from torchrl_agents.training import Training, learn
from torchrl_data import LabelledAnswer, label_row, read_labelled, with_mismatched
from torchrl_modules import LLMWrapperBase

_LOG = logging.getLogger("torchrl_agents")
_BALANCED = (0.8, 1.7)
"""Of the weights of all desirable answers and of all others: what a run is not warned of."""


class LabelledChats(GivenChats):
    """Conversations that end with an answer, and whether that is desirable.

    Args:
        answers: of the rows.
        numbers: of their rows.
        labels: of each.
    """

    def __init__(
        self, answers: Sequence[LabelledAnswer], numbers: Sequence[int], labels: Sequence[bool]
    ) -> None:
        chats = [answer.messages for answer in answers]
        super().__init__(chats, numbers, [answer.num_prompt for answer in answers])
        self.labels = labels


def build(recipe: Recipe, cfg: KTOConfig, settings: dict[str, Any]) -> Setup:
    """The task, whose demonstrations are the labelled answers, and the environment that tests."""
    test, data = build_task(recipe, cfg, settings), cfg.data
    if data.dataset is None:
        answers, tools = _labelled_demonstrations(cfg, test)
        numbers = [*range(len(answers))]
    else:
        rows = load_given(data, lambda row, number: read_labelled(row, number=number))
        each = [(answer, row.number, row.tools) for row in rows for answer in row.read]
        answers, numbers, tools = ([*column] for column in zip(*each, strict=True))
    check_enough(data, len(answers))
    labels = [answer.label for answer in answers]
    if data.shuffle_labels:
        labels = random.Random(cfg.seed).sample(labels, len(labels))
    if len(set(labels[data.num_held_out :])) == 1:
        raise SettingsError(
            f"All {len(labels) - data.num_held_out} {data.what} to train on have the label "
            f"{str(labels[-1]).lower()}: KTO learns from some that are desirable and others that "
            "are not. Shuffle the rows if they are sorted; torchrl-agents sft learns from answers "
            "that are all desirable."
        )
    _tell_weights(cfg, labels[data.num_held_out :])
    if data.dataset is not None:
        tell_seen(data.num_held_out, [answer.messages for answer in answers], test.held_out_env)
    return with_given(test, LabelledChats(answers, numbers, labels), tools)


def _tell_weights(cfg: KTOConfig, labels: Sequence[bool]) -> None:
    """Say so where answers of one label count for much more than the others."""
    options = KTOOptions(**given_options(cfg.loss, KTOOptions))
    num_desirable, of_others = sum(labels), options.undesirable_weight
    num_others = len(labels) - num_desirable
    share = options.desirable_weight * num_desirable / (of_others * num_others)
    if not _BALANCED[0] <= share <= _BALANCED[1]:
        _LOG.warning(
            "%d desirable answers of weight %.3g count %.2g times as much as %d others of weight "
            "%.3g; the paper of KTO takes 1 to 4/3 times. loss.desirable_weight=%.2g does.",
            *(num_desirable, options.desirable_weight, share, num_others, of_others),
            7 / 6 * of_others * num_others / num_desirable,
        )


def _labelled_demonstrations(
    cfg: KTOConfig, test: Setup
) -> tuple[list[LabelledAnswer], list[list[dict[str, Any]] | None]]:
    """Every second one of the task's demonstrations with its answer, and others with another's."""
    chats: list[Any] = list(test.task.demonstrations)
    tools: list[Any] = list(test.task.demonstration_tools) or [None] * len(chats)
    order = random.Random(cfg.seed).sample(range(len(chats)), len(chats))
    answers, kept = [], []
    for place, (chat, other, schemas) in enumerate(zip(chats, order, tools, strict=True)):
        said = chat[-1] if place % 2 == 0 else chats[other][-1]
        answers.append(LabelledAnswer([*chat[:-1], said], 0, said == chat[-1]))
        kept.append(schemas)
    return answers, kept


def encode_labelled(cfg: KTOConfig, test: Setup, policy: LLMWrapperBase) -> list[Unit]:
    """Each answer as a row of tokens, and its prompt with another answer, if the loss needs one."""
    found = encode_given(cfg, cfg.data, test, policy)
    labels = getattr(test.task.demonstrations, "labels")  # noqa: B009
    rows = []
    for place, (row,) in found.items():
        label_row(row, labels[place])
        rows.append(row)
    if not KTOOptions(**given_options(cfg.loss, KTOOptions)).compares_with_kl:
        return [[row] for row in rows]
    most: int | None = getattr(policy.engine, "max_model_len", None)
    with refusing("data"):
        return [*with_mismatched(rows, seed=cfg.seed, max_tokens=most)]


def main(cfg: KTOConfig, test: Setup, run: Run) -> dict:
    """Train as the settings say; gives the result."""
    torch.manual_seed(cfg.seed)  # of the adapters' first weights, too
    actor, policy = add_adapters(cfg, *load_models(cfg, test, run))
    actor, policy = share_model(cfg, run, actor, policy)  # with the ranks of torchrun
    with run.log.phase("encoding the answers"):
        units = encode_labelled(cfg, test, actor)
    held_out, trained = units[: cfg.data.num_held_out], units[cfg.data.num_held_out :]
    collector = LLMCollector(test.held_out_env, policy)
    sampler = ReferencedRows(collector, trained, cfg.train.batch_size, cfg.seed)
    needed = [*held_out, *sampler.first_units(cfg.train.num_steps)]
    write_reference(cfg, run, actor, needed, cfg.data.what)
    test_loss = KTOLoss(policy, **given_options(cfg.loss, KTOOptions))

    test_of_rows = HeldOutUnits(cfg, test_loss, held_out)
    training = Training(
        *(cfg, run, test, actor, policy, sampler),
        measure=test_of_rows.measure,
        curves={
            "accuracy": "answers on the right side",
            "held_out_accuracy": "the same, held out",
            "loss": "loss of an answer",
        },
    )
    return learn(training) | test_of_rows.scores()


if __name__ == "__main__":
    run_recipe(RECIPE, main, build)
