"""Conversations that a recipe is given to learn from: loaded, checked, encoded, drawn in steps.

A step draws units of rows: a conversation, or the two of a pair.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from collectors import LLMCollector, StepMetrics
from torchrl_data import row_tensordicts, train_answer
from torchrl_envs import DataLoadingPrimer, load_rows
from torchrl_envs.datasets.row_stream import NumberedRows
from torchrl_envs.tasks.task import TaskEnv, digest_of
from torchrl_modules import LLMWrapperBase

from .models.reward_models import ChatRewardModel
from .settings.errors import SettingsError, refusing
from .settings.schema import GivenDataConfig, TrainingConfig
from .setup import Setup
from .training import Rollouts

Read = TypeVar("Read")
GivenReader = LLMWrapperBase | ChatRewardModel
"""What reads conversations: it has a chat template, and a length that it takes."""
_LOG = logging.getLogger("torchrl_agents")
_WHERE = "(the first row is row 0)"


class GivenRow(NamedTuple, Generic[Read]):
    """A row of a data set."""

    number: int
    """In the data set."""
    read: Read
    """The conversation, or pair, that it holds."""
    tools: list[dict[str, Any]] | None
    """JSON schemas of its tools, if it names any."""


def load_given(
    data: GivenDataConfig, read: Callable[[Mapping[str, Any], int], Read]
) -> list[GivenRow[Read]]:
    """Load the rows of ``data.dataset`` that can be used.

    Args:
        data: the settings; with a data set.
        read: reads a row of a number; raises a ValueError or TypeError for one that can't be used.

    Returns:
        The rows, as they were read.

    Raises:
        SettingsError: the data can't be read; or rows can't be used, and are not to be left out.
    """
    with refusing(f"data.dataset={data.dataset!r}"):
        options: Any = {"split": data.split, "skip_bad_rows": data.skip_bad_rows}
        found, bad = list[GivenRow[Read]](), dict[int, str]()
        for number, row in enumerate(load_rows(data.dataset, **options)):
            try:
                found.append(GivenRow(number, read(row, number), schemas_of(row)))
            except (TypeError, ValueError) as error:
                bad[number] = str(error)
        told = f"{len(bad)} of {len(found) + len(bad)} rows (the first is row 0)"
        if bad and not (data.skip_bad_rows and found):
            raise ValueError(
                f"{next(iter(bad.values()))} So it is with {told}; data.skip_bad_rows=true "
                "leaves them out, unless it is all."
            )
        if bad:
            which = f"are left out: {[*bad][:5]}. {next(iter(bad.values()))}"
            _LOG.warning("%s hold no %s, and %s", told, data.what, which)
    return found


class GivenChats(NumberedRows):
    """Conversations that know which rows of the data they are of.

    Args:
        chats: messages of each.
        numbers: of their rows.
        num_prompt: so many messages of each are its prompt, of which nothing is trained; 0 where
            all that the assistant says is.
    """

    def __init__(
        self, chats: Sequence[Any], numbers: Sequence[int], num_prompt: Sequence[int]
    ) -> None:
        super().__init__(chats)
        self.numbers, self.num_prompt = numbers, num_prompt


def schemas_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The column ``tools``, JSON schemas or JSON text of them, as TRL's data sets have it."""
    found = row.get("tools")
    found = json.loads(found) if isinstance(found, str) else found
    return [json.loads(tool) if isinstance(tool, str) else tool for tool in found or ()] or None


def check_enough(data: GivenDataConfig, num_given: int, *, trains: bool = True) -> None:
    """Some of what is given is left to train on.

    Args:
        data: the settings.
        num_given: so many conversations, or pairs, there are.
        trains: whether the run makes a step; where it tests alone, all may be held out.

    Raises:
        SettingsError: all of them would be held out, or there are not so many.
    """
    if not trains and num_given < data.num_held_out:
        raise SettingsError(
            f"There are {num_given} {data.what}, and data.num_held_out={data.num_held_out} are to "
            "be tested: give a smaller number."
        )
    if trains and num_given <= data.num_held_out:
        raise SettingsError(
            f"Of {num_given} {data.what} data.num_held_out={data.num_held_out} leaves none to "
            "train on: hold out fewer, set data.dataset, or another task."
        )


def tell_seen(num_held_out: int, chats: Sequence[Sequence[Any]], env: TaskEnv | None) -> None:
    """Say whether what is tested on is trained on, too: conversations, and prompts of the task.

    Args:
        num_held_out: so many of the conversations are not trained on, the first ones.
        chats: all of them.
        env: in which a policy is tested; ``None`` where none is.
    """
    held_out, trained = chats[:num_held_out], chats[num_held_out:]
    known = {digest_of(chat, place) for place, chat in enumerate(trained)}
    if again := sum(digest_of(chat, -1) in known for chat in held_out):
        told = "%d of the %d held-out conversations are trained on, too: the held-out loss is lower"
        _LOG.warning(f"{told} than that of new ones. Leave repetitions out.", again, len(held_out))
    asked = {text for chat in trained for text in user_texts(chat)}
    for loader in [] if env is None else env.transforms_of(DataLoadingPrimer):
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


def with_given(
    test: Setup, given: Sequence[Any], tools: Sequence[Sequence[dict[str, Any]] | None]
) -> Setup:
    """The task with other demonstrations, which the environment that tests encodes from then on.

    Args:
        test: has the task, and the environment.
        given: conversations to learn from.
        tools: JSON schemas that each of them shows.
    """
    task = replace(test.task, demonstrations=given, demonstration_tools=tools)
    test.held_out_env.task = task
    return test._replace(task=task)


def encode_given(
    cfg: TrainingConfig,
    data: GivenDataConfig,
    test: Setup,
    reader: GivenReader,
    *,
    rows_together: int = 1,
    as_scored: bool = False,
) -> dict[int, list[TensorDict]]:
    """The task's demonstrations as rows of tokens, with the prompts that its episodes have.

    Args:
        cfg: the settings.
        data: of these.
        test: has the task, whose demonstrations are :class:`GivenChats`.
        reader: has the chat template and the most tokens of a row.
        rows_together: so many demonstrations that follow each other are a unit.
        as_scored: rows hold what a reward model reads of an episode: all that the template writes
            at the end, and no schemas of tools.

    Returns:
        The rows of each unit that can be used, by its place.

    Raises:
        SettingsError: one can't be encoded or is too long, and is not to be left out; or there are
            not enough.
    """
    given, skips, what = data.dataset, data.skip_bad_rows, data.what
    shown: Any = test.task.demonstrations
    places, numbers = range(len(shown)), shown.numbers
    num_units = len(places) // rows_together
    faults: dict[int, str] = {}
    with refusing(f"task={cfg.task.id}" if given is None else f"data.dataset={given!r}"):
        conversations = test.held_out_env.encode_demonstrations(
            reader.encoder, faults=faults if skips else None, only=places, as_scored=as_scored
        )
        rows = iter(row_tensordicts(conversations))
        units: dict[int, list[TensorDict]] = {}
        for place in places:
            if place not in faults:
                units.setdefault(place // rows_together, []).append(row := next(rows))
                # Opening messages of the task are no turns of the assistant.
                who, num_prompt = f"row {numbers[place]}", shown.num_prompt[place]
                if num_prompt:
                    train_answer(row, shown[place], num_prompt, who=who)
        units = {u: own for u, own in units.items() if len(own) == rows_together}
        number = {unit: numbers[unit * rows_together] for unit in range(num_units)}
        most: int | None = getattr(getattr(reader, "engine", reader), "max_model_len", None)
        long = [
            unit
            for unit, own in units.items()
            if most is not None and any(row["tokens", "full"].shape[-1] > most for row in own)
        ]
        too_long = (
            f"{len(long)} of {num_units} {what} are longer than the {most} tokens that the model "
            f"takes (policy.max_model_len=): rows {[number[unit] for unit in long[:5]]} {_WHERE}"
        )
        if long and not skips:
            raise ValueError(f"{too_long}. data.skip_bad_rows=true leaves them out.")
        if long:
            _LOG.warning("%s. They are left out.", too_long)
        if faults:
            told = "%d of %d %s can't be encoded, and are left out %s: row %d: %s"
            place, why = next(iter(faults.items()))
            count = len({each // rows_together for each in faults})
            _LOG.warning(told, count, num_units, what, _WHERE, numbers[place], why)
    check_enough(data, len(units) - len(long), trains=cfg.train.num_steps > 0)
    return {unit: own for unit, own in units.items() if unit not in set(long)}


class GivenRows(Rollouts):
    """Rows of a step, in an order that is drawn anew in each epoch.

    Args:
        collector: of the policy that is tested; ``None`` where none samples.
        units: of rows to train on; the rows of a unit stay together.
        batch_size: so many units in each step.
    """

    def __init__(
        self,
        collector: LLMCollector | None,
        units: Sequence[Sequence[TensorDictBase]],
        batch_size: int,
    ) -> None:
        super().__init__(collector)
        self.parts = {"conversations": self}
        self._units = units
        self._batch_size = batch_size
        self._order: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        """Return what is left of the epoch."""
        return {"order": list(self._order), "num_rows": len(self._units)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on in the middle of an epoch."""
        if state_dict["num_rows"] != len(self._units):
            raise ValueError(
                f"there were {state_dict['num_rows']} conversations, and are {len(self._units)}"
            )
        self._order = list(state_dict["order"])

    def draw(self, metrics: StepMetrics) -> tuple[None, TensorDictBase]:
        """Each unit once in each epoch."""
        del metrics
        while len(self._order) < self._batch_size:
            self._order.extend(self._next_epoch())
        chosen, self._order = self._order[: self._batch_size], self._order[self._batch_size :]
        return None, lazy_stack([row for i in chosen for row in self._units[i]])

    def _next_epoch(self) -> list[int]:
        """Draw the order of an epoch, as places of units."""
        return torch.randperm(len(self._units)).tolist()
