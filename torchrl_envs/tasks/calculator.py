"""Arithmetic with a calculator: read the question, choose the tool, call it, give its result.

The questions and their scoring are reasoning-gym's (chain_sum, products, gcd,
fraction_simplification). The demonstrations pick a *random* tool: they show how to call one and
to answer with what it returns, not which to choose.
"""

import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from torchrl_data.messages import Message
from torchrl_data.tool_calls.parser import parse_tool_calls
from torchrl_data.tool_calls.records import ToolCall

from .demonstrations import played
from .reasoning_gym import Question, question_rows
from .task import Row, Task, split_rows

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
