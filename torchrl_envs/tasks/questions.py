"""Questions with an answer that can be verified: GSM8K, MATH, Countdown."""

import ast
import operator
import random
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final

from torchrl_data.checks import check_counts
from torchrl_data.keys import REWARD
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform
from torchrl_envs.graders.answers import (
    hash_answer,
    normalize_number,
    read_tags,
    think_answer_format,
)
from torchrl_envs.graders.math_verify import MathVerifyReward
from torchrl_envs.rewards.answer import AnswerReward
from torchrl_envs.rewards.functions import RewardFunctions

from .task import Row, Task, TaskEnv, load_task_rows, tagged_answer, with_solutions

_PLAIN: Final[Any] = {"num_held_out": 0, "num_demonstrations": 0}
"""Settings of a task that is an environment alone."""


class _TaggedReward(AnswerReward):
    """Scores what stands in ``<answer>``: right, another answer, or none."""

    component_keys = ("reward_answer", "reward_think", "reward_right", "success")

    def __init__(
        self, *, format_reward: float = 0.1, correct_reward: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.format_reward = format_reward
        self.correct_reward = correct_reward

    def _is_right(self, answer: str, row: Mapping[str, Any]) -> bool:
        """Return whether an answer, which is not empty, is right."""
        raise NotImplementedError

    def components(self, text: str, row: Mapping[str, Any], query: str) -> dict[str, Any]:
        """See :class:`AnswerReward`."""
        del query
        tags = read_tags(text)
        success = bool(tags.answer) and self._is_right(tags.answer, row)
        wrong = self.format_reward if tags.answer else 0.0
        reward = self.correct_reward if success else wrong
        return {
            REWARD: reward,
            "reward_answer": float(bool(tags.answer)),
            "reward_think": float(bool(tags.think)),
            "reward_right": reward,
            "success": success,
        }


# GSM8K: word problems of primary school, answered with a number.
#
# Cobbe et al., 2021, arXiv:2110.14168. A row has ``question`` and ``answer``; the answer ends with
# ``#### `` and the number.

GSM8K_HUB_ID: Final = "openai/gsm8k"
GSM8K_PROMPT: Final = (
    "You solve word problems. First reason inside <think> and </think>, then give the number, and "
    "nothing else, inside <answer> and </answer>."
)


class GSM8KRewardParser(_TaggedReward):
    """1 for the right number in ``<answer>``, 0.1 for another one there, 0 without an answer.

    It writes ``reward_answer`` and ``reward_think`` (whether the blocks are there),
    ``reward_right`` and ``success``, ``[B, 1, 1]`` each.

    Args:
        format_reward: for an answer that is wrong.
        correct_reward: for one that is right.
        answer_column: of the data; what follows its last ``####``, or all of it.
        **kwargs: see :class:`~torchrl_envs.rewards.answer.AnswerReward`.
    """

    def __init__(
        self,
        *,
        format_reward: float = 0.1,
        correct_reward: float = 1.0,
        answer_column: str = "answer",
        **kwargs: Any,
    ) -> None:
        super().__init__(format_reward=format_reward, correct_reward=correct_reward, **kwargs)
        self.answer_column = answer_column
        self.required_columns = (answer_column,)  # type: ignore[misc]

    def _is_right(self, answer: str, row: Mapping[str, Any]) -> bool:
        """Return whether it is the number after the last ``####``."""
        gold = str(row[self.answer_column])
        marked = hash_answer(gold)
        return normalize_number(answer) == normalize_number(gold if marked is None else marked)


class GSM8KPrepareQuestion(EpisodeTransform):
    """Puts a question into a prompt.

    Args:
        template: text with ``{question}`` in it.

    Raises:
        ValueError: the template lacks it.
    """

    def __init__(
        self, template: str = "{question}\nThink step by step, then give the number."
    ) -> None:
        super().__init__()
        if "{question}" not in template:
            raise ValueError(
                f"{self._get_name()}: no {{question}} in the template {template!r:.80}."
            )
        self.template = template

    def begin(self, episode: Episode) -> None:
        """Change the query of an episode that begins.

        Raises:
            TypeError: it is no string.
        """
        if not isinstance(episode.query, str):
            raise TypeError(
                f"{self._get_name()} takes strings, got {type(episode.query).__name__}."
            )
        episode.query = self.template.replace("{question}", episode.query)


def gsm8k_task(
    *,
    dataset: Any = GSM8K_HUB_ID,
    name: str | None = None,
    split: str | None = None,
    held_out_split: str | None = None,
    skip_bad_rows: bool = False,
    system_prompt: str | None = GSM8K_PROMPT,
    format_reward: float = 0.1,
    num_held_out: int = 256,
    num_demonstrations: int = 1024,
) -> Task:
    """Questions of GSM8K, or of data like it.

    Args:
        dataset: a hub id, a local path, or the rows themselves.
        name: of the configuration, for a hub id.
        split: which to train on; the only one, or ``"train"``, when not given.
        held_out_split: which to test on; when not given, ``"test"`` of the hub's GSM8K, and rows
            of ``split`` of other data.
        skip_bad_rows: leave out rows that can't be used, and log how many; else they are refused.
        system_prompt: says which format the answer has.
        format_reward: for an answer that is wrong.
        num_held_out: rows held out.
        num_demonstrations: conversations for a warm start, with the data's own solutions.

    Raises:
        ValueError: there are too few rows, or no such split.
    """
    if isinstance(dataset, str) and dataset == GSM8K_HUB_ID:
        name, held_out_split = name or "main", held_out_split or "test"
    splits: Any = {"name": name, "split": split, "held_out_split": held_out_split}
    splits |= {"num_held_out": num_held_out, "prompt_column": "question"}
    train, held_out = load_task_rows(dataset, skip_bad_rows=skip_bad_rows, **splits)

    def final_answer(text: str) -> str | None:
        answer = read_tags(text).answer
        return normalize_number(answer) if answer else None

    def solution(row: Row) -> str | None:
        reasoning, mark, answer = str(row.get("answer")).rpartition("####")
        tagged = f"<think>{reasoning.strip()}</think><answer>{answer.strip()}</answer>"
        return tagged if mark else None

    task = Task(
        name="gsm8k",
        train_rows=train,
        held_out_rows=held_out,
        rewards=lambda: [GSM8KRewardParser(format_reward=format_reward)],
        columns=("question", "answer"),
        prompt_column="question",
        skip_bad_rows=skip_bad_rows,
        final_answer=final_answer,
        system_prompt=system_prompt,
    )
    return with_solutions(task, num_demonstrations, solution)


class GSM8KEnv(TaskEnv):
    """Questions of GSM8K.

    Args:
        dataset: a hub id, a local path, or the rows themselves.
        compute_reward: whether to score with :class:`GSM8KRewardParser`.
        system_prompt: says which format the answer has.
        name: of the configuration, for a hub id.
        split: which; the only one, or ``"train"``, when not given.
        **kwargs: see :class:`~torchrl_envs.tasks.task.TaskEnv`.

    Raises:
        ValueError: the data lack ``question`` or ``answer``, or a setting is out of range.

    Example:
        >>> rows = [{"question": "What is 2 + 2?", "answer": "2 and 2 are 4. #### 4"}]
        >>> env = GSM8KEnv(dataset=rows, num_envs=2, repeats=2)  # or dataset="openai/gsm8k"
        >>> batch = env.reset()
        >>> [messages[-1]["role"] for messages in batch["history"].prompt.to_chats()]
        ['user', 'user']
        >>> batch["group_id"].shape, batch["row"][0]["question"]
        (torch.Size([2]), 'What is 2 + 2?')
    """

    def __init__(
        self,
        *,
        dataset: Any = GSM8K_HUB_ID,
        compute_reward: bool = True,
        system_prompt: str | None = GSM8K_PROMPT,
        name: str | None = None,
        split: str | None = None,
        **kwargs: Any,
    ) -> None:
        task = gsm8k_task(
            dataset=dataset, name=name, split=split, system_prompt=system_prompt, **_PLAIN
        )
        super().__init__(task, compute_reward=compute_reward, **kwargs)


def make_gsm8k_env(
    dataset: Any = GSM8K_HUB_ID, num_envs: int = 1, repeats: int | None = None, **kwargs: Any
) -> GSM8KEnv:
    """Make a :class:`GSM8KEnv`.

    Args:
        dataset: a hub id, a local path, or the rows themselves.
        num_envs: rows of the environment.
        repeats: rollouts of one question.
        **kwargs: see :class:`GSM8KEnv`.

    Example:
        >>> rows = [{"question": "What is 2 + 2?", "answer": "2 and 2 are 4. #### 4"}]
        >>> env = make_gsm8k_env(rows, num_envs=2)
        >>> turns = ["<think>2 and 2</think><answer>4</answer>", "4"]
        >>> out = env.step(env.reset().set("text_response", turns))["next"]
        >>> out["reward"].shape, out["reward"].flatten()
        (torch.Size([2, 1, 1]), tensor([1., 0.]))
    """
    return GSM8KEnv(dataset=dataset, num_envs=num_envs, repeats=repeats, **kwargs)


# MATH: competition problems, whose answers are compared by value.
#
# Hendrycks et al., 2021, arXiv:2103.03874. A row has ``problem`` and ``solution``; the answer is in
# the solution's last ``\boxed{}``.

MATH_HUB_ID: Final = "DigitalLearningGmbH/MATH-lighteval"
MATH_PROMPT: Final = (
    "You solve mathematical problems. First reason inside <think> and </think>, then give the "
    "result, in LaTeX where it needs any, inside <answer> and </answer>."
)


def last_boxed(text: str) -> str | None:
    r"""Return what is inside the last ``\boxed{}`` of a text, nested braces included."""
    # Gives the content, or `None` if there is no closed one.
    _, mark, rest = text.rpartition("\\boxed{")
    depth = 1 if mark else 0
    for i, letter in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return rest[:i]
    return None


def math_task(
    *,
    dataset: Any = MATH_HUB_ID,
    name: str | None = None,
    split: str | None = None,
    held_out_split: str | None = None,
    skip_bad_rows: bool = False,
    system_prompt: str | None = MATH_PROMPT,
    format_reward: float = 0.1,
    timeout_s: float = 5.0,
    num_workers: int = 2,
    num_held_out: int = 256,
    num_demonstrations: int = 1024,
) -> Task:
    """Problems of MATH, or of data like it.

    Args:
        dataset: a hub id, a local path, or the rows themselves.
        name: of the configuration, for a hub id.
        split: which to train on; the only one, or ``"train"``, when not given.
        held_out_split: which to test on; when not given, ``"test"`` of the hub's MATH, and rows of
            ``split`` of other data.
        skip_bad_rows: leave out rows that can't be used, and log how many; else they are refused.
        system_prompt: says which format the answer has.
        format_reward: for one ``<think>`` and one ``<answer>`` block, in addition.
        timeout_s: deadline for the comparison of one result.
        num_workers: processes that compare.
        num_held_out: rows held out.
        num_demonstrations: conversations for a warm start, with the data's own solutions.

    Raises:
        ValueError: there are too few rows, or no such split.
    """
    if isinstance(dataset, str) and dataset == MATH_HUB_ID:
        held_out_split = held_out_split or "test"
    splits: Any = {"name": name, "split": split, "held_out_split": held_out_split}
    splits |= {"num_held_out": num_held_out, "prompt_column": "problem"}
    train, held_out = load_task_rows(dataset, skip_bad_rows=skip_bad_rows, **splits)

    def rewards() -> list[RewardFunctions]:
        grade = MathVerifyReward(timeout_s=timeout_s, num_workers=num_workers)
        return [RewardFunctions([grade, think_answer_format], weights=[1.0, format_reward])]

    def with_answer(row: Row) -> Row:
        answer = last_boxed(str(row.get("solution")))
        if answer is None:
            raise ValueError(f"the solution has no \\boxed{{}}: {row.get('solution')!r:.200}")
        return {**row, "answer": answer}

    def solution(row: Row) -> str | None:
        answer = last_boxed(str(row.get("solution")))
        tagged = f"<think>{row.get('solution')}</think><answer>{answer}</answer>"
        return None if answer is None else tagged

    task = Task(
        name="math",
        train_rows=train,
        held_out_rows=held_out,
        rewards=rewards,
        solved_by=("MathVerifyReward",),
        columns=("problem", "solution"),
        prompt_column="problem",
        map_row=with_answer,
        skip_bad_rows=skip_bad_rows,
        final_answer=tagged_answer,
        system_prompt=system_prompt,
    )
    return with_solutions(task, num_demonstrations, solution)


class MATHEnv(TaskEnv):
    """Problems of MATH; 1 for a right result, and a little for the format.

    Args:
        dataset: a hub id, a local path, or the rows themselves.
        compute_reward: whether to score, with
            :class:`~torchrl_envs.graders.math_verify.MathVerifyReward`.
        format_reward: for one ``<think>`` and one ``<answer>`` block, in addition.
        timeout_s: deadline for the comparison of one result.
        num_workers: processes that compare.
        system_prompt: says which format the answer has.
        name: of the configuration, for a hub id.
        split: which; the only one, or ``"train"``, when not given.
        **kwargs: see :class:`~torchrl_envs.tasks.task.TaskEnv`.

    Raises:
        ValueError: the data lack ``problem`` or ``solution``, or a solution has no result.
        ImportError: math-verify is not installed.
    """

    def __init__(
        self,
        *,
        dataset: Any = MATH_HUB_ID,
        compute_reward: bool = True,
        format_reward: float = 0.1,
        timeout_s: float = 5.0,
        num_workers: int = 2,
        system_prompt: str | None = MATH_PROMPT,
        name: str | None = None,
        split: str | None = None,
        **kwargs: Any,
    ) -> None:
        data = {"dataset": dataset, "name": name, "split": split, "system_prompt": system_prompt}
        grades = {"format_reward": format_reward, "timeout_s": timeout_s}
        task = math_task(**data, **grades, num_workers=num_workers, **_PLAIN)
        super().__init__(task, compute_reward=compute_reward, **kwargs)


# Countdown: reach a number with some others, each used once, by the four operations.

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


def evaluate(expression: str) -> tuple[Fraction, Counter[int]] | None:
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


class CountdownRewardParser(_TaggedReward):
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
        return evaluate(answer) == (row["target"], Counter(row["numbers"]))


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
            num_rows=num_rows, **sizes, system_prompt=system_prompt, seed=seed, **_PLAIN
        )
        super().__init__(task, compute_reward=compute_reward, seed=seed, **kwargs)
