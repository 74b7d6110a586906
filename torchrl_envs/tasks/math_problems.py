r"""MATH: competition problems, whose answers are compared by value.

Hendrycks et al., 2021, arXiv:2103.03874. A row has ``problem`` and ``solution``; the answer is in
the solution's last ``\boxed{}``.
"""

from collections.abc import Mapping
from typing import Any, Final

from torchrl_envs.graders.answers import think_answer_format
from torchrl_envs.graders.math_verify_reward import MathVerifyReward
from torchrl_envs.rewards.functions import RewardFunctions

from .task import Task, TaskEnv, demonstrate, load_task_rows, tagged_answer

HUB_ID: Final = "DigitalLearningGmbH/MATH-lighteval"
SYSTEM_PROMPT: Final = (
    "You solve mathematical problems. First reason inside <think> and </think>, then give the "
    "result, in LaTeX where it needs any, inside <answer> and </answer>."
)


def last_boxed(text: str) -> str | None:
    r"""What is inside the last ``\boxed{}`` of a text, nested braces included."""
    # Gives the content, or `None` if there is no closed one.
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i]
    return None


def math_task(
    *,
    dataset: Any = HUB_ID,
    name: str | None = None,
    split: str | None = None,
    held_out_split: str | None = None,
    system_prompt: str | None = SYSTEM_PROMPT,
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
        system_prompt: says which format the answer has.
        format_reward: for one ``<think>`` and one ``<answer>`` block, in addition.
        timeout_s: deadline for the comparison of one result.
        num_workers: processes that compare.
        num_held_out: rows held out.
        num_demonstrations: conversations for a warm start, with the data's own solutions.

    Raises:
        ValueError: there are too few rows, or no such split.
    """
    is_hub = isinstance(dataset, str) and dataset == HUB_ID
    train, held_out = load_task_rows(
        dataset,
        name=name,
        split=split,
        held_out_split="test" if held_out_split is None and is_hub else held_out_split,
        num_held_out=num_held_out,
        prompt_column="problem",
    )

    def rewards() -> list[RewardFunctions]:
        grade = MathVerifyReward(timeout_s=timeout_s, num_workers=num_workers)
        return [RewardFunctions([grade, think_answer_format], weights=[1.0, format_reward])]

    return Task(
        name="math",
        train_rows=train,
        held_out_rows=held_out,
        rewards=rewards,
        columns=("problem", "solution"),
        prompt_column="problem",
        map_row=_with_answer,
        final_answer=tagged_answer,
        system_prompt=system_prompt,
        demonstrations=demonstrate(
            train,
            num_demonstrations,
            prompt_column="problem",
            system_prompt=system_prompt,
            answer=_solution,
        ),
    )


def _solution(row: Mapping[str, Any]) -> str | None:
    """A row's own solution, in the format that is asked for."""
    answer = last_boxed(row.get("solution") or "")
    return None if answer is None else f"<think>{row['solution']}</think><answer>{answer}</answer>"


class MATHEnv(TaskEnv):
    """Problems of MATH; 1 for a right result, and a little for the format.

    Args:
        dataset: a hub id, a local path, or the rows themselves.
        compute_reward: whether to score, with
            :class:`~torchrl_envs.graders.math_verify_reward.MathVerifyReward`.
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
        dataset: Any = HUB_ID,
        compute_reward: bool = True,
        format_reward: float = 0.1,
        timeout_s: float = 5.0,
        num_workers: int = 2,
        system_prompt: str | None = SYSTEM_PROMPT,
        name: str | None = None,
        split: str | None = None,
        **kwargs: Any,
    ) -> None:
        task = math_task(
            dataset=dataset,
            name=name,
            split=split,
            system_prompt=system_prompt,
            format_reward=format_reward,
            timeout_s=timeout_s,
            num_workers=num_workers,
            num_held_out=0,
            num_demonstrations=0,
        )
        super().__init__(task, compute_reward=compute_reward, **kwargs)


def _with_answer(row: dict[str, Any]) -> dict[str, Any]:
    answer = last_boxed(row.get("solution") or "")
    if answer is None:
        raise ValueError(f"the solution has no \\boxed{{}}: {row.get('solution')!r:.200}")
    return {**row, "answer": answer}
