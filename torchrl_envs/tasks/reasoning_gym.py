"""Questions of reasoning-gym as tasks, answered at once or with a calculator."""

import math
import random
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from torchrl_data.checks import one_of
from torchrl_data.messages import Message
from torchrl_data.tool_calls.parser import parse_tool_calls
from torchrl_data.tool_calls.records import ToolCall

from . import generator_names, load_reasoning_gym
from .task import Row, Slips, Task, common_phrases, played, split_rows

# What a model of 0.1 million parameters learns of reasoning-gym within minutes.
#
# ``docs/learning.md`` has what it learnt of each, and how that was measured.

RIGHT_FRACTION: Final = 0.35
"""Of the demonstrations, that have no slip."""


@dataclass(frozen=True, kw_only=True)
class Easy:
    """Settings that make a generator's questions easy."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Of the generator, with which its questions are short."""
    num_warm_steps: int = 600
    """Steps of the warm start."""
    right_fraction: float = RIGHT_FRACTION
    """Of its demonstrations; less where an answer may have a slip and be right all the same."""


_TABLES: Final = tomllib.loads(Path(__file__).with_name("easy.toml").read_text("utf-8"))
EASY: Final = {name: Easy(**table) for name, table in _TABLES.items()}
"""Generators by name."""


# Questions of the package reasoning-gym, which also scores the answers.
#
# Needs the package ``reasoning-gym`` (``pip install torchrl-agents[train]``).


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


# Arithmetic with a calculator: read the question, choose the tool, call it, give its result.
#
# The questions and their scoring are reasoning-gym's (chain_sum, products, gcd,
# fraction_simplification). The demonstrations pick a *random* tool: they show how to call one and
# to answer with what it returns, not which to choose.

GENERATORS: Final[dict[str, dict[str, Any]]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 99},
    "fraction_simplification": {
        "min_value": 1,
        "max_value": 12,
        "min_factor": 2,
        "max_factor": 8,
        "styles": ("plain",),
    },
}


class Calculator(Question):
    """Five tools on two integers, and a question that one of them answers."""

    def add(self, a: int, b: int) -> str:
        """Add two integers.

        Args:
            a: The first number.
            b: The second number.
        """
        return str(a + b)

    def subtract(self, a: int, b: int) -> str:
        """Subtract the second integer from the first.

        Args:
            a: The number to subtract from.
            b: The number to subtract.
        """
        return str(a - b)

    def multiply(self, a: int, b: int) -> str:
        """Multiply two integers.

        Args:
            a: The first number.
            b: The second number.
        """
        return str(a * b)

    def gcd(self, a: int, b: int) -> str:
        """Find the greatest common divisor of two integers.

        Args:
            a: The first number.
            b: The second number.
        """
        return str(math.gcd(a, b))

    def simplify(self, a: int, b: int) -> str:
        """Simplify the fraction a/b.

        Args:
            a: The numerator.
            b: The denominator.
        """
        if b == 0:
            raise ZeroDivisionError("the denominator is 0")
        divisor = math.gcd(a, b)
        return f"{a // divisor}/{b // divisor}"


TOOLS: Final[dict[str, Callable[[Any, int, int], str]]] = {
    name: tool for name, tool in vars(Calculator).items() if not name.startswith("_")
}


def chose_right_tool(completions: Sequence[Sequence[Message]], tool: Sequence[str]) -> list[float]:
    """1 where the first tool that was called is the right one."""
    chosen = []
    for messages, name in zip(completions, tool, strict=True):
        calls = parse_tool_calls(messages[0]["content"]).calls if messages else []
        first = calls[0] if calls else None
        chosen.append(float(isinstance(first, ToolCall) and first.name == name))
    return chosen


def calculator_task(
    *, num_rows: int = 4096, num_held_out: int = 256, num_demonstrations: int = 8192, seed: int = 0
) -> Task:
    """Questions of four generators, to be answered with five tools.

    Args:
        num_rows: most rows; as many for each tool.
        num_held_out: rows held out.
        num_demonstrations: conversations for the warm start.
        seed: of everything.

    Raises:
        ValueError: too few different questions to hold so many out.
    """
    rng = random.Random(seed)
    of_generator = {"products": "multiply", "gcd": "gcd", "fraction_simplification": "simplify"}
    by_tool: dict[str, list[Row]] = {name: [] for name in TOOLS}
    for i, (generator, config) in enumerate(GENERATORS.items()):
        settings = {"size": num_rows, "seed": len(GENERATORS) * seed + i, "config": config}
        for row in {each["prompt"]: each for each in question_rows(generator, **settings)}.values():
            row["tool"] = of_generator.get(generator) or (
                "subtract" if "-" in row["entry"]["metadata"]["expression"] else "add"
            )
            by_tool[row["tool"]].append(row)
    # In turn, so that no tool is right more often than another one.
    rows = [row for turn in zip(*by_tool.values(), strict=False) for row in turn]
    train, held_out = split_rows(rows[:num_rows], num_held_out, told_apart_by=["prompt"])
    demonstrations: list[list[Message]] = []
    for _ in range(num_demonstrations):
        prompt = rng.choice(train)["prompt"]
        a, b = map(int, re.findall(r"\d+", prompt)[:2])
        name = rng.choice([name for name in TOOLS if b != 0 or name != "simplify"])
        result = TOOLS[name](None, a, b)
        turns = played(prompt, [(name, {"a": a, "b": b}, result)])
        demonstrations.append([*turns[:-1], {"role": "assistant", "content": result}])
    return Task(
        name="calculator",
        environment=Calculator,
        train_rows=train,
        held_out_rows=held_out,
        demonstrations=demonstrations,
        max_turns=4,
        max_new_tokens=28,
        metrics=(chose_right_tool,),
    )
