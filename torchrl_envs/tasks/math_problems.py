r"""MATH: competition problems, whose answers are compared by value.

Hendrycks et al., 2021, arXiv:2103.03874. A row has ``problem`` and ``solution``; the answer is in
the solution's last ``\boxed{}``.
"""

from typing import Any, Final

from torchrl_envs.graders.answers import think_answer_format
from torchrl_envs.graders.math_verify_reward import MathVerifyReward
from torchrl_envs.rewards.functions import RewardFunctions

from .question_env import QuestionEnv

SYSTEM_PROMPT: Final = (
    "You solve mathematical problems. First reason inside <think> and </think>, then give the "
    "result, in LaTeX where it needs any, inside <answer> and </answer>."
)


def last_boxed(text: str) -> str | None:
    r"""What is inside the last ``\boxed{}`` of a text, nested braces included.

    Args:
        text: LaTeX.

    Returns:
        The content, or ``None`` if there is no closed one.
    """
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


class MATHEnv(QuestionEnv):
    """Problems of MATH; 1 for a right result, and a little for the format.

    Args:
        dataset: a hub id, a local path, or the rows themselves.
        compute_reward: whether to score, with
            :class:`~torchrl_envs.graders.math_verify_reward.MathVerifyReward`.
        format_reward: for one ``<think>`` and one ``<answer>`` block, in addition.
        timeout_s: deadline for the comparison of one result.
        num_workers: processes that compare.
        system_prompt: says which format the answer has.
        **kwargs: see :class:`~torchrl_envs.tasks.question_env.QuestionEnv`.

    Raises:
        ValueError: the data lack ``problem`` or ``solution``, or a solution has no result.
        ImportError: math-verify or pebble is not installed.
    """

    def __init__(
        self,
        *,
        dataset: Any = "DigitalLearningGmbH/MATH-lighteval",
        compute_reward: bool = True,
        format_reward: float = 0.1,
        timeout_s: float = 5.0,
        num_workers: int = 2,
        system_prompt: str | None = SYSTEM_PROMPT,
        **kwargs: Any,
    ) -> None:
        rewards = []
        if compute_reward:
            grade = MathVerifyReward(timeout_s=timeout_s, num_workers=num_workers)
            weights = [1.0, format_reward]
            rewards = [RewardFunctions([grade, think_answer_format], weights=weights)]
        super().__init__(
            dataset,
            rewards,
            columns=["problem", "solution"],
            map_row=_with_answer,
            prompt_column="problem",
            system_prompt=system_prompt,
            **kwargs,
        )


def _with_answer(row: dict[str, Any]) -> dict[str, Any]:
    answer = last_boxed(row.get("solution") or "")
    if answer is None:
        raise ValueError(f"the solution has no \\boxed{{}}: {row.get('solution')!r:.200}")
    return {**row, "answer": answer}
