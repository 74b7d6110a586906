"""Countdown: reach a number with some others, each used once, by the four operations."""

import ast
import operator
import random
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final

from torchrl_data.checks import check_counts

from .tagged_reward import NONE_BESIDE, TaggedReward
from .task import Task, TaskEnv, load_task_rows, tagged_answer, with_solutions

COUNTDOWN_PROMPT: Final = (
    "You are given numbers and a target. First reason inside <think> and </think>, then give an "
    "arithmetic expression with the value of the target, which uses each number exactly once and "
    "only + - * / and parentheses, inside <answer> and </answer>."
)
MAX_EXPRESSION_CHARS: Final = 500
_OPERATIONS: Final[dict[type, Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def countdown_rows(
    num_rows: int,
    *,
    num_count: int = 4,
    max_number: int = 100,
    max_target: int = 1000,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Problems that can be solved: the target is the value of a random expression."""
    check_counts("countdown_rows", num_rows=num_rows, max_number=max_number, max_target=max_target)
    check_counts("countdown_rows", 2, num_count=num_count)
    rng = random.Random(seed)
    rows = []
    while len(rows) < num_rows:
        numbers = [rng.randint(1, max_number) for _ in range(num_count)]
        solution, value = str(numbers[0]), numbers[0]
        for number in numbers[1:]:  # every intermediate value is a positive integer
            choices = {"+": value + number, "*": value * number}
            if value > number:
                choices["-"] = value - number
            if value % number == 0:
                choices["/"] = value // number
            sign = rng.choice(sorted(choices))
            solution, value = f"({solution} {sign} {number})", choices[sign]
        if 1 <= value <= max_target:
            rng.shuffle(numbers)
            prompt = f"Numbers: {', '.join(map(str, numbers))}. Target: {value}."
            row = {"prompt": prompt, "numbers": numbers, "target": value, "solution": solution}
            rows.append(row)
    return rows


def expression_value(expression: str) -> tuple[Fraction, Counter[int]] | None:
    """The exact value of an arithmetic expression, and the numbers in it. Nothing is executed."""
    # Gives value and numbers, or `None` for anything else (a division by zero too).
    if len(expression) > MAX_EXPRESSION_CHARS:
        return None
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        numbers: Counter[int] = Counter()
        return _value(tree.body, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, numbers: Counter[int]) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _value(node.left, numbers), _value(node.right, numbers)
        return _OPERATIONS[type(node.op)](left, right)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers[node.value] += 1
        return Fraction(node.value)
    raise ValueError("not a number, and not one of the four operations")


class CountdownRewardParser(TaggedReward):
    """1 for an expression that uses each number once and has the target's value, 0.1 for another.

    It writes ``reward_answer``, ``reward_think``, ``reward_right`` and ``success``.

    Args:
        format_reward: for an answer that is wrong.
        correct_reward: for one that is right.
        **kwargs: see :class:`~torchrl_envs.rewards.answer.AnswerReward`.
    """

    required_columns = ("numbers", "target")

    def _is_right(self, answer: str, row: Mapping[str, Any]) -> bool:
        """Return whether the expression has the value of the target, and uses the numbers."""
        return expression_value(answer) == (row["target"], Counter(row["numbers"]))


def countdown_task(
    *,
    num_rows: int = 4096,
    num_count: int = 4,
    max_number: int = 100,
    max_target: int = 1000,
    format_reward: float = 0.1,
    system_prompt: str | None = COUNTDOWN_PROMPT,
    num_held_out: int = 256,
    num_demonstrations: int = 1024,
    seed: int = 0,
) -> Task:
    """Countdown problems, made here.

    Args:
        num_rows: problems, before repeated ones are dropped.
        num_count: numbers in each.
        max_number: the largest of them.
        max_target: the largest target.
        format_reward: for an answer that is wrong.
        system_prompt: says which format the answer has.
        num_held_out: problems held out.
        num_demonstrations: conversations for a warm start, with the problems' solutions.
        seed: of the problems.

    Raises:
        ValueError: a setting is out of range, or there are too few different problems.
    """
    sizes = {"num_count": num_count, "max_number": max_number, "max_target": max_target}
    rows = countdown_rows(num_rows, **sizes, seed=seed)
    train, held_out = load_task_rows(rows, num_held_out=num_held_out, told_apart_by=["prompt"])
    task = Task(
        name="countdown",
        train_rows=train,
        held_out_rows=held_out,
        rewards=lambda: [CountdownRewardParser(format_reward=format_reward)],
        columns=("prompt", "numbers", "target"),
        final_answer=tagged_answer,
        system_prompt=system_prompt,
        max_new_tokens=64,
    )
    return with_solutions(
        task, num_demonstrations, lambda row: f"<think></think><answer>{row['solution']}</answer>"
    )


class CountdownEnv(TaskEnv):
    """Countdown problems, made here.

    Args:
        num_rows: different problems.
        num_count: numbers in each.
        max_number: the largest of them.
        max_target: the largest target.
        compute_reward: whether to score with :class:`CountdownRewardParser`.
        seed: of the problems, their order and the groups' seeds.
        system_prompt: says which format the answer has.
        **kwargs: see :class:`~torchrl_envs.tasks.task.TaskEnv`.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        *,
        num_rows: int = 4096,
        num_count: int = 4,
        max_number: int = 100,
        max_target: int = 1000,
        compute_reward: bool = True,
        seed: int = 0,
        system_prompt: str | None = COUNTDOWN_PROMPT,
        **kwargs: Any,
    ) -> None:
        sizes = {"num_count": num_count, "max_number": max_number, "max_target": max_target}
        task = countdown_task(
            num_rows=num_rows, **sizes, system_prompt=system_prompt, seed=seed, **NONE_BESIDE
        )
        super().__init__(task, compute_reward=compute_reward, seed=seed, **kwargs)
