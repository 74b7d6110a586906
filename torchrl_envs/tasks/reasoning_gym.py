"""Questions of the package reasoning-gym, which also scores the answers.

Needs the package ``reasoning-gym`` (``pip install torchrl-agents[train]``).
"""

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from torchrl_data.checks import one_of
from torchrl_data.messages import Message
from torchrl_envs.tasks import generator_names, load_reasoning_gym

from .demonstrations import Slips, common_phrases
from .easy_generators import EASY, RIGHT_FRACTION
from .task import Row, Task, split_rows


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
        dataset = load_reasoning_gym().create_dataset(generator, size=size, seed=seed, **settings)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym's {generator} refuses {settings}: {error}") from error
    common = {"generator": generator}
    texts = (({"prompt": e["question"], "answer": str(e["answer"])}, e) for e in dataset)
    return [{**text, **common, "entry": entry} for text, entry in texts]


# To make one is to make the generator, which may read files.
_scorer: Final = cache(lambda generator: load_reasoning_gym().get_score_answer_fn(generator))


def score_answer(answer: str, row: Mapping[str, Any]) -> float:
    """Reasoning-gym's own score of an answer, in [0, 1]."""
    return float(_scorer(row["generator"])(_answer(answer) or "", row["entry"]))


class Question:
    """A question, answered in words; the reward is 1 for a right answer and 0 for another one."""

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
    """Answer for reasoning-gym: the content of ``<answer>``, or all of the text."""
    extracted = load_reasoning_gym().utils.extract_answer(text)
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
    """A generator's questions, each answered in a single turn.

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
    level = one_of("level", level or "own", ["own", "easy"])
    easy = EASY.get(generator) if level == "easy" else None
    if level == "easy" and easy is None:
        raise ValueError(
            f"there are no easy questions of {generator}, and the embedded model learns no others: "
            "give it a model (policy.model=...), take a generator that has some "
            f"({', '.join(EASY)}), or try its own settings all the same (task.level=own)."
        )
    if right_fraction is None:
        right_fraction = easy.right_fraction if easy else RIGHT_FRACTION
    settings = {**(easy.settings if easy else {}), **(config or {})}
    rows = question_rows(generator, size=num_rows, seed=seed, config=settings)
    train, held_out = split_rows(rows, num_held_out, told_apart_by=["prompt"])
    rng, slips = random.Random(seed), Slips([row["answer"] for row in train], right_fraction)
    shown = [rng.choice(train) for _ in range(num_demonstrations)]
    return Task(
        name=generator,
        environment=Question,
        train_rows=train,
        held_out_rows=held_out,
        demonstrations=[
            [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": slips(row["answer"], rng)},
            ]
            for row in shown
        ],
        max_turns=1,
        max_new_tokens=max(len(row["answer"].encode()) for row in rows) + 1,
        num_warm_steps=easy.num_warm_steps if easy else None,
        final_answer=_answer,
        isolated=r"[\s\S]",
        phrases=common_phrases(train),
    )
