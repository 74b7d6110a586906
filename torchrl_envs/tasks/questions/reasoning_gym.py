"""Questions of the package reasoning-gym, which also scores the answers.

Needs the package ``reasoning-gym`` (``pip install torchrl-agents[train]``).
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from importlib import import_module
from typing import Any, Final

from torchrl_data.conversation.conversations import Message
from torchrl_envs.tasks.task import Row, Task, split_rows

from .demonstrations import common_phrases, demonstrations_with_slips
from .easy import RIGHT_FRACTION, easy_questions

_PLAIN: Final = (int, float, str, bool, type(None))


def _reasoning_gym() -> Any:
    try:
        return import_module("reasoning_gym")
    except ImportError as error:
        raise ImportError(
            "The package reasoning-gym is not installed: pip install reasoning-gym."
        ) from error


def generator_names() -> list[str]:
    """Names of all generators of reasoning-gym."""
    _reasoning_gym()
    return sorted(import_module("reasoning_gym.factory").DATASETS)


def generator_settings(generator: str) -> dict[str, Any]:
    """The settings of a generator that plain values can write, with their defaults.

    Args:
        generator: its name.

    Returns:
        Numbers, strings, booleans, ``None`` and lists of them, by name; size and seed are not
        among them.
    """
    kind = import_module("reasoning_gym.factory").DATASETS[generator][1]
    defaults = {}
    for one in fields(kind):
        make: Any = one.default_factory
        value = make() if one.default is MISSING else one.default
        value = list(value) if isinstance(value, tuple) else value
        plain = value if isinstance(value, list) else [value]
        if one.name not in ("size", "seed") and all(isinstance(x, _PLAIN) for x in plain):
            defaults[one.name] = value
    return defaults


def question_rows(
    generator: str, *, size: int, seed: int, config: Mapping[str, Any] | None = None
) -> list[Row]:
    """Rows of one generator."""
    if generator not in generator_names():
        raise ValueError(
            f"reasoning-gym has no generator {generator!r}; it has {', '.join(generator_names())}."
        )
    settings = dict(config or {})
    try:
        dataset = _reasoning_gym().create_dataset(generator, size=size, seed=seed, **settings)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym's {generator} refuses {settings}: {error}") from error
    return [
        {
            "prompt": entry["question"],
            "answer": str(entry["answer"]),
            "generator": generator,
            "entry": entry,
        }
        for entry in dataset
    ]


@cache
def _scorer(generator: str) -> Callable[[str, Any], float]:
    # To make one is to make the generator, which may read files.
    return _reasoning_gym().get_score_answer_fn(generator)


def score_answer(answer: str, row: Mapping[str, Any]) -> float:
    """Reasoning-gym's own score of an answer, in [0, 1]."""
    extracted = import_module("reasoning_gym.utils").extract_answer(answer)
    score = _scorer(row["generator"])
    return float(score(answer.strip() if extracted is None else extracted, row["entry"]))


class Question:
    """One question, answered in words; the reward is 1 for a right answer and 0 for another one."""

    def reset(self, *, entry: dict[str, Any], generator: str, **row: Any) -> None:
        """Take the question of a row."""
        del row
        self._row = {"entry": entry, "generator": generator}

    def get_reward(self, *, messages: Sequence[Message]) -> float:
        """Score the last message."""
        last = messages[-1]
        if last["role"] != "assistant":
            return 0.0
        return float(score_answer(last["content"], self._row) >= 1.0)


def _answer(text: str) -> str | None:
    """What reasoning-gym takes for the answer: what stands in ``<answer>``, or all of the text."""
    extracted = import_module("reasoning_gym.utils").extract_answer(text)
    return (text if extracted is None else extracted).strip() or None


def question_task(
    generator: str,
    *,
    level: str | None = None,
    num_rows: int = 8192,
    num_held_out: int = 256,
    num_demonstrations: int = 8192,
    right_fraction: float | None = None,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
) -> Task:
    """One generator's questions, each answered in a single turn.

    Args:
        generator: name of the generator.
        level: easy, what the embedded model can learn, or own, the generator's own settings; easy
            for the embedded model and own for others when not given.
        num_rows: rows to generate.
        num_held_out: rows held out.
        num_demonstrations: conversations for the warm start.
        right_fraction: fraction of the demonstrations that give the right answer; the others have
            slips, a letter or digit in place of another one. When not given 0.35, or what the
            generator's easy questions need for as many to be taken for right.
        seed: of everything.
        config: settings of the generator, also of those that make it easy.

    Raises:
        ValueError: there is no such generator or level, or too few different questions.
    """
    if level not in (None, "own", "easy"):
        raise ValueError(f"level must be own or easy, got {level!r}.")
    easy = easy_questions(generator) if level == "easy" else None
    if right_fraction is None:
        right_fraction = easy.right_fraction if easy else RIGHT_FRACTION
    settings = {**(easy.settings if easy else {}), **(config or {})}
    rows = question_rows(generator, size=num_rows, seed=seed, config=settings)
    train, held_out = split_rows(rows, num_held_out)
    return Task(
        name=generator,
        environment=Question,
        train_rows=train,
        held_out_rows=held_out,
        demonstrations=demonstrations_with_slips(
            train, num_demonstrations, right_fraction=right_fraction, rng=random.Random(seed)
        ),
        max_turns=1,
        max_new_tokens=max(len(row["answer"].encode()) for row in rows) + 1,
        num_warm_steps=easy.num_warm_steps if easy else None,
        final_answer=_answer,
        isolated=r"[\s\S]",
        phrases=common_phrases(train),
    )
