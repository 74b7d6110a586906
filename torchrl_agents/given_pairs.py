"""Pairs of answers that a recipe is given to learn from: read, encoded, drawn in steps."""

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from collectors import Estimate, bootstrap_interval
from objectives import RewardModelLoss
from objectives.losses.pair_loss import is_ahead, pairs_of
from torchrl_data import PreferencePair, keys, mark_pairs, pair_of, read_pair

from .given_conversations import (
    GivenChats,
    GivenReader,
    check_enough,
    encode_given,
    load_given,
    tell_seen,
    with_given,
)
from .given_units import Unit, stacked
from .held_out import HeldOut
from .models.reward_models import ChatRewardModel
from .parallel import reward_share
from .rank_jobs import RankJob, tell
from .run import Run
from .settings.recipe import Recipe
from .settings.schema import PairsConfig, TrainingConfig
from .setup import Setup, build_task


class GivenPairs(GivenChats):
    """The conversations of pairs, two for each, the better one first.

    Args:
        pairs: those that are learnt from or held out.
        numbers: of their rows.
    """

    def __init__(self, pairs: Sequence[PreferencePair], numbers: Sequence[int]) -> None:
        twice = [place for place in range(len(pairs)) for _ in range(2)]
        super().__init__(
            [chat for pair in pairs for chat in (pair.chosen, pair.rejected)],
            [numbers[place] for place in twice],
            [pairs[place].num_shared for place in twice],
        )
        self.margins = [pair.margin for pair in pairs]


def build_pairs(recipe: Recipe, cfg: Any, settings: dict[str, Any]) -> Setup:
    """The task, whose demonstrations are the answers of pairs, and the environment that tests.

    Args:
        recipe: whose run it is.
        cfg: the settings, with :class:`.PairsConfig` as ``data``.
        settings: those of the task.

    Raises:
        SettingsError: the settings or data of the task can't be used, or the pairs.
    """
    data: PairsConfig = cfg.data
    test = build_task(recipe, cfg, settings)
    if data.dataset is None:
        pairs, tools = _pairs_of_demonstrations(cfg, test)
        numbers: Sequence[int] = range(len(pairs))
    else:
        rows = load_given(data, lambda row, number: read_pair(row, number=number))
        pairs, tools = [row.read for row in rows], [row.tools for row in rows]
        numbers = [row.number for row in rows]
    check_enough(data, len(pairs), trains=cfg.train.num_steps > 0)
    if data.dataset is not None:
        env = None if recipe.gives_rewards else test.held_out_env
        tell_seen(data.num_held_out, [pair.chosen for pair in pairs], env)
    if data.shuffle_preferences:
        swaps = random.Random(cfg.seed)
        pairs = [_swapped(pair) if swaps.random() < 0.5 else pair for pair in pairs]
    twice = [schemas for schemas in tools for _ in range(2)]
    return with_given(test, GivenPairs(pairs, numbers), twice)


def _pairs_of_demonstrations(
    cfg: TrainingConfig, test: Setup
) -> tuple[list[PreferencePair], list[list[dict[str, Any]] | None]]:
    """Each of the task's demonstrations, and its conversation with the answer of another one."""
    chats: list[Any] = list(test.task.demonstrations)
    tools: list[Any] = list(test.task.demonstration_tools) or [None] * len(chats)
    order = random.Random(cfg.seed).sample(range(len(chats)), len(chats))
    pairs, kept = [], []
    for chat, other, schemas in zip(chats, order, tools, strict=True):
        worse = [*chat[:-1], chats[other][-1]]
        if worse != [*chat]:
            pairs.append(pair_of(chat, worse))
            kept.append(schemas)
    return pairs, kept


def _swapped(pair: PreferencePair) -> PreferencePair:
    return pair._replace(chosen=pair.rejected, rejected=pair.chosen)


def encode_pairs(
    cfg: Any, test: Setup, reader: GivenReader, *, as_scored: bool = False
) -> list[Unit]:
    """The pairs as two rows of tokens each, the better answer first, with the task's prompts.

    Args:
        cfg: the settings.
        test: has the task, with the pairs.
        reader: has the chat template and the most tokens of a row.
        as_scored: see :func:`.encode_given`.
    """
    found = encode_given(cfg, cfg.data, test, reader, rows_together=2, as_scored=as_scored)
    given: Any = test.task.demonstrations
    rows = [row for own in found.values() for row in own]
    mark_pairs(rows, [given.margins[place] for place in found])
    return list(found.values())


class HeldOutPairs(HeldOut):
    """Asks a reward model which answer of each held-out pair is the better one.

    Args:
        cfg: the settings.
        run: has the ranks.
        actor: the reward model, of which each rank has a part.
        loss: of the pairs.
        pairs: that are held out.
    """

    score_name = "accuracy"
    labels = ("pairs of a step", "held-out pairs")

    def __init__(
        self,
        cfg: TrainingConfig,
        run: Run,
        actor: ChatRewardModel,
        loss: RewardModelLoss,
        pairs: Sequence[Unit],
    ) -> None:
        super().__init__(cfg)
        self._run, self._actor, self._loss, self._pairs = run, actor, loss, pairs
        self._batch = loss.pack(stacked(pairs))

    def _test(self, step: int) -> tuple[int, TensorDictBase]:
        tell(self._run.ranks, RankJob.SCORE_ROWS)
        rewards = reward_share(self.cfg, self._run.ranks, self._actor, self._batch)
        assert rewards is not None
        window = self._loss.measure_window(self._batch)
        loss = self._loss.of_rewards(self._batch, rewards, window).total()
        chosen, rejected = pairs_of(rewards)
        found = {"chosen_reward": chosen, "rejected_reward": rejected}
        return step, TensorDict({**found, "loss": loss.expand(len(chosen))}, [len(chosen)])

    def score(self, rows: TensorDictBase) -> tuple[dict[str, float], dict[str, Estimate]]:
        """See the base class: ``accuracy``, of equal rewards one half, and the mean rewards."""
        chosen, rejected = rows["chosen_reward"].double(), rows["rejected_reward"].double()
        difference = chosen - rejected
        right = is_ahead(difference)
        right[difference.isnan()] = math.nan
        values = {"accuracy": right, "chosen_reward": chosen, "rejected_reward": rejected}
        estimates = {name: _estimate(each, self.cfg) for name, each in values.items()}
        spread = right.std(correction=0).item() / math.sqrt(len(right))
        scores = {"loss": rows["loss"][0].item(), "accuracy_standard_error": spread}
        return scores | {name: each.value for name, each in estimates.items()}, estimates

    def caption(self, estimates: Mapping[str, Estimate]) -> str:
        """See the base class."""
        count, level = estimates["accuracy"].num_prompts, 100 * self.cfg.evaluate.level
        return f"{count} pairs; in brackets {level:g} % intervals over the pairs."

    def identity(self) -> dict[str, Any]:
        """See the base class."""
        ids = self._batch.ids.numpy().tobytes() + self._batch.lengths.numpy().tobytes()
        return {"held_out_pairs": hashlib.sha256(ids).hexdigest()[:16]}

    def show(self, tests: Mapping[str, TensorDictBase | None]) -> None:
        """See the base class: the two answers of some pairs, and their rewards."""
        decode: Any = self._actor.tokenizer.decode
        for title, rows in tests.items():
            if rows is None or not self.cfg.evaluate.num_shown:
                continue
            table = Table(title=title, show_lines=True)
            for name in ("the better answer", "reward", "the other one", "reward"):
                table.add_column(name, justify="right" if name == "reward" else "left")
            for pair, row in zip(self._pairs[: self.cfg.evaluate.num_shown], rows, strict=False):
                told = []
                for each, name in zip(pair, ("chosen_reward", "rejected_reward"), strict=True):
                    said = each["tokens", "full"][each[keys.ASSISTANT_MASK]]
                    told += [Text(decode(said, skip_special_tokens=True)), f"{row[name]:.3f}"]
                table.add_row(*told)
            Console().print(table)


def _estimate(values: Tensor, cfg: TrainingConfig) -> Estimate:
    """The mean of a number of each pair, and its interval over the pairs that have one."""
    known = values[values.isfinite()]
    if not len(known):
        return Estimate(math.nan, math.nan, math.nan, 0)
    interval = bootstrap_interval(known, level=cfg.evaluate.level)
    return Estimate(known.mean().item(), *interval, len(known))
