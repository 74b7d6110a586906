r"""MATH: competition problems, whose answers are compared by value.

Hendrycks et al., 2021, arXiv:2103.03874. A row has ``problem`` and ``solution``; the answer is in
the solution's last ``\boxed{}``.
"""

from typing import Any, Final

from torchrl_envs.graders.answers import think_answer_format
from torchrl_envs.graders.math_verify import MathVerifyReward
from torchrl_envs.rewards.functions import RewardFunctions

from .tagged_reward import NONE_BESIDE
from .task import Row, Task, TaskEnv, load_task_rows, tagged_answer, with_solutions

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
        task = math_task(**data, **grades, num_workers=num_workers, **NONE_BESIDE)
        super().__init__(task, compute_reward=compute_reward, **kwargs)
