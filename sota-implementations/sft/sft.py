"""Supervised fine-tuning: a model learns what the assistant says in conversations.

torchrl-agents sft task=spell_backward task.right_fraction=1.0   # the task's own demonstrations
torchrl-agents sft data.dataset=chats.jsonl policy.model=Qwen/Qwen3-0.6B task=gsm8k profile=gpu
torchrl-agents sft experiment=control                       # the answers of other questions
"""

from dataclasses import dataclass, field, replace
from typing import Any

from torchrl_agents.settings.command_line import read_command_line
from torchrl_agents.settings.errors import SettingsError, refusing
from torchrl_agents.settings.field_rules import AT_LEAST_1, setting
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.schema import EngineConfig, EpisodeConfig, TrainConfig, TrainingConfig


@dataclass
class DemonstrationsConfig:
    """Conversations to learn from: the assistant's turns in them count."""

    dataset: str | None = None
    """Hub id, file or folder with conversations; none takes the task's demonstrations."""
    column: str = "messages"
    """Its column with the conversations, each a list of messages."""
    split: str | None = None
    """Of it; the only one, or train, when not given."""
    skip_bad_rows: bool = False
    """Leave out rows that hold no conversation (messages with a role and a content), that can't be
    shown in the chat template, or that are too long for the model, and log how many; else they are
    refused."""
    num_held_out: int = setting(64, AT_LEAST_1)
    """Conversations that are not trained on, whose loss is told."""
    shuffle_answers: bool = False
    """A control: each question gets the answer of another one."""


@dataclass
class SFTTrainConfig(TrainConfig):
    """Fine-tuning."""

    num_steps: int = 400
    batch_size: int = setting(32, AT_LEAST_1)
    """Conversations of a step."""


@dataclass
class SFTConfig(TrainingConfig):
    """Settings of ``sft.py``."""

    data: DemonstrationsConfig = field(default_factory=DemonstrationsConfig)
    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)
    train: SFTTrainConfig = field(default_factory=SFTTrainConfig)


RECIPE = Recipe(
    name="sft",
    summary="Supervised fine-tuning: a model learns what the assistant says in conversations.",
    example="data.dataset=chats.jsonl task=gsm8k policy.model=Qwen/Qwen3-0.6B profile=gpu",
    config=SFTConfig,
    groups={"engine": {"transformers": EngineConfig()}},
    needs_groups=False,
    embedded={"optim.learning_rate": 1e-2, "optim.max_grad_norm": 1.0},
    pretrained={"optim.learning_rate": 1e-5},
    # L = - (sum over the tokens that the assistant says of log p(token)) / number of these tokens
    loss=lambda _, actor: SFTLoss(actor),
    rehearse=lambda cfg, test, policy: encode(cfg, test, policy),
)

if __name__ == "__main__":
    read_command_line(RECIPE)  # what is wrong is said before torch is imported

import json
import logging
import random
from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDictBase, lazy_stack

from collectors import LLMCollector, StepMetrics
from objectives import SFTLoss, SFTLossOutput
from torchrl_agents.device_defaults import DEFAULT_TOKENS
from torchrl_agents.models.adapters import add_adapters
from torchrl_agents.parallel import share_model
from torchrl_agents.run import Run
from torchrl_agents.setup import Setup, build_task, load_models
from torchrl_agents.start import run_recipe
from torchrl_agents.training import Rollouts, Training, TrainingStep, learn
from torchrl_data import check_messages, row_tensordicts
from torchrl_envs import DataLoadingPrimer, load_rows
from torchrl_envs.datasets.row_stream import NumberedRows
from torchrl_envs.tasks.task import TaskEnv, digest_of
from torchrl_modules import LLMWrapperBase

_LOG = logging.getLogger("torchrl_agents")


def build(recipe: Recipe, cfg: SFTConfig, settings: dict[str, Any]) -> Setup:
    """The task, whose demonstrations are learnt, and the environment that tests."""
    test = build_task(recipe, cfg, settings)
    chats: Any = list(test.task.demonstrations)
    tools, numbers = list(test.task.demonstration_tools), list(range(len(chats)))
    if cfg.data.dataset is not None:
        with refusing(f"data.dataset={cfg.data.dataset!r}"):
            options: Any = {"split": cfg.data.split, "skip_bad_rows": cfg.data.skip_bad_rows}
            loaded, column = list(load_rows(cfg.data.dataset, **options)), cfg.data.column
            bad = {n: why for n, row in enumerate(loaded) if (why := fault_of(row, column, n))}
            told = f"{len(bad)} of {len(loaded)} rows (the first is row 0)"
            if bad and (not cfg.data.skip_bad_rows or len(bad) == len(loaded)):
                raise ValueError(
                    f"{next(iter(bad.values()))} So it is with {told}; data.skip_bad_rows=true "
                    "leaves them out, unless it is all."
                )
            if bad:
                which = f"are left out: {[*bad][:5]}. {next(iter(bad.values()))}"
                _LOG.warning("%s hold no conversation, and %s", told, which)
            numbers = [number for number in range(len(loaded)) if number not in bad]
            chats = [loaded[number][column] for number in numbers]
            tools = [schemas_of(loaded[number]) for number in numbers]
    check_enough(cfg, len(chats))
    if cfg.data.shuffle_answers:
        order = random.Random(cfg.seed).sample(range(len(chats)), len(chats))
        chats = [[*a[:-1], chats[i][-1]] for a, i in zip(chats, order, strict=True)]
    if cfg.data.dataset is not None:
        tell_seen(cfg.data.num_held_out, chats, test.held_out_env)
    chats = NumberedRows(chats)
    chats.numbers = numbers
    task = replace(test.task, demonstrations=chats, demonstration_tools=tools)
    test.held_out_env.task = task
    return test._replace(task=task)


def tell_seen(num_held_out: int, chats: Sequence[Sequence[Any]], env: TaskEnv) -> None:
    """Say whether what is tested on is trained on, too: conversations, and prompts of the task."""
    held_out, trained = chats[:num_held_out], chats[num_held_out:]
    known = {digest_of(chat, place) for place, chat in enumerate(trained)}
    if again := sum(digest_of(chat, -1) in known for chat in held_out):
        told = "%d of the %d held-out conversations are trained on, too: the held-out loss is lower"
        _LOG.warning(f"{told} than that of new ones. Leave repetitions out.", again, len(held_out))
    asked = {text for chat in trained for text in user_texts(chat)}
    for loader in env.transforms_of(DataLoadingPrimer):
        prompts = [user_texts(row[loader.prompt_column])[-1:] for row in loader.sample_rows()]
        seen = [text for last in prompts for text in last if text in asked]
        if seen:
            told = (
                "%d of the %d held-out prompts of the task are asked in conversations that are "
                "trained on, %.80r first: the tests say less about new prompts. Leave these "
                "conversations out, or test on other rows."
            )
            _LOG.warning(told, len(seen), len(prompts), seen[0])


def user_texts(prompt: str | Sequence[Any]) -> list[str]:
    """Texts of the user in a prompt, or in a conversation; other parts are left out."""
    if isinstance(prompt, str):
        return [prompt]
    said = [
        one.get("content")
        for one in prompt
        if isinstance(one, Mapping) and one.get("role") == "user"
    ]
    return [text for text in said if isinstance(text, str)]


def fault_of(row: Mapping[str, Any], column: str, number: int) -> str:
    """What is wrong with a row that holds no conversation; ``""`` if it holds one.

    Args:
        row: of the data.
        column: with the messages.
        number: of the row.
    """
    value = row.get(column)
    if not isinstance(value, list) or not value:
        return (
            f"row {number} has no list of messages in the column {column!r}, which data.column= "
            f"names; its columns are {sorted(row)}. A prompt and its completion are the messages "
            "[*prompt, *completion]."
        )
    try:
        check_messages(value, row=number)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def check_enough(cfg: SFTConfig, num_conversations: int) -> None:
    """Some conversations are left to train on.

    Raises:
        SettingsError: all of them would be held out.
    """
    if num_conversations <= cfg.data.num_held_out:
        raise SettingsError(
            f"Of {num_conversations} conversations data.num_held_out={cfg.data.num_held_out} "
            "leaves none to train on: hold out fewer, set data.dataset, or another task."
        )


def schemas_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The column ``tools``, JSON schemas or JSON text of them, as TRL's data sets have it."""
    found = row.get("tools")
    found = json.loads(found) if isinstance(found, str) else found
    return [json.loads(tool) if isinstance(tool, str) else tool for tool in found or ()] or None


def encode(cfg: SFTConfig, test: Setup, policy: LLMWrapperBase) -> Sequence[TensorDictBase]:
    """The conversations as tokens, with the prompts that the task's episodes have."""
    given, skips = cfg.data.dataset, cfg.data.skip_bad_rows
    numbers: Sequence[int] = test.task.demonstrations.numbers  # type: ignore[attr-defined]
    faults: dict[int, str] = {}
    with refusing(f"task={cfg.task.id}" if given is None else f"data.dataset={given!r}"):
        conversations = test.held_out_env.encode_demonstrations(
            policy.encoder, faults=faults if skips else None
        )
        rows = row_tensordicts(conversations)
        places = [place for place in range(len(numbers)) if place not in faults]
        most = policy.engine.max_model_len
        lengths = [row["tokens", "full"].shape[-1] for row in rows]
        is_long = [most is not None and length > most for length in lengths]
        long = [numbers[place] for place, x in zip(places, is_long, strict=True) if x]
        where = "(the first row is row 0)"
        too_long = (
            f"{len(long)} of {len(numbers)} conversations are longer than the {most} tokens that "
            f"the model takes (policy.max_model_len=): rows {long[:5]} {where}"
        )
        if long and not skips:
            raise ValueError(f"{too_long}. data.skip_bad_rows=true leaves them out.")
        if long:
            _LOG.warning("%s. They are left out.", too_long)
        if faults:
            told = "%d of %d conversations can't be encoded, and are left out %s: row %d: %s"
            place, why = next(iter(faults.items()))
            _LOG.warning(told, len(faults), len(numbers), where, numbers[place], why)
    check_enough(cfg, len(rows) - len(long))
    return [row for row, is_out in zip(rows, is_long, strict=True) if not is_out]


class ConversationSampler(Rollouts):
    """Rows of a step, in an order that is drawn anew in each epoch.

    Args:
        collector: of the policy that is tested.
        rows: to train on.
        batch_size: so many in each step.
    """

    def __init__(
        self, collector: LLMCollector, rows: Sequence[TensorDictBase], batch_size: int
    ) -> None:
        super().__init__(collector)
        self.parts = {"conversations": self}
        self._rows = rows
        self._batch_size = batch_size
        self._order: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        """Return what is left of the epoch."""
        return {"order": list(self._order), "num_rows": len(self._rows)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on in the middle of an epoch."""
        if state_dict["num_rows"] != len(self._rows):
            raise ValueError(
                f"there were {state_dict['num_rows']} conversations, and are {len(self._rows)}"
            )
        self._order = list(state_dict["order"])

    def draw(self, metrics: StepMetrics) -> tuple[None, TensorDictBase]:
        """Each conversation once in each epoch."""
        del metrics
        while len(self._order) < self._batch_size:
            self._order.extend(torch.randperm(len(self._rows)).tolist())
        chosen, self._order = self._order[: self._batch_size], self._order[self._batch_size :]
        return None, lazy_stack([self._rows[i] for i in chosen])


def main(cfg: SFTConfig, test: Setup, run: Run) -> dict:
    """Train as the settings say; gives the result."""
    actor, policy = add_adapters(cfg, *load_models(cfg, test, run))
    torch.manual_seed(cfg.seed)
    actor, policy = share_model(cfg, run, actor, policy)  # with the ranks of torchrun
    with run.log.phase("encoding the conversations"):
        rows = encode(cfg, test, actor)

    test_loss = SFTLoss(policy)
    held_out = test_loss.pack(lazy_stack(rows[: cfg.data.num_held_out]))
    rows = rows[cfg.data.num_held_out :]

    @torch.no_grad()
    def held_out_nll() -> float:
        window = test_loss.measure_window(held_out)
        parts = held_out.micro_batches(max_tokens=cfg.train.micro_batch_tokens or DEFAULT_TOKENS)
        return float(SFTLossOutput.combine([test_loss(part, window=window) for part in parts]).nll)

    def measure(step: TrainingStep) -> dict[str, float]:
        is_time = step.number % max(1, cfg.train.num_steps // 20) == 0
        return {"held_out_nll": held_out_nll()} if is_time else {}

    collector = LLMCollector(test.held_out_env, policy)
    training = Training(
        *(
            cfg,
            run,
            test,
            actor,
            policy,
            ConversationSampler(collector, rows, cfg.train.batch_size),
        ),
        measure=measure,
        curves={"loss": "loss, nats per token", "held_out_nll": "the same, held out"},
    )
    return learn(training) | {"held_out_nll": held_out_nll()}


if __name__ == "__main__":
    run_recipe(RECIPE, main, build)
