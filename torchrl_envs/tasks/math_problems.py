r"""MATH: competition problems, whose answers are compared by value.

Hendrycks et al., 2021, arXiv:2103.03874. A row has ``problem`` and ``solution``; the answer is in
the solution's last ``\boxed{}``.
"""

from typing import Any, Final

from torchrl_envs.dataset_rows import dataset_rows, map_rows, require_columns
from torchrl_envs.graders.answers import think_answer_format
from torchrl_envs.graders.math_verify_reward import MathVerifyReward
from torchrl_envs.transforms.reward_functions import RewardFunctions

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
        split: which split.
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
        split: str = "train",
        compute_reward: bool = True,
        format_reward: float = 0.1,
        timeout_s: float = 5.0,
        num_workers: int = 2,
        system_prompt: str | None = SYSTEM_PROMPT,
        **kwargs: Any,
    ) -> None:
        rows = dataset_rows(dataset, split=split)
        require_columns(rows, ["problem", "solution"], "MATHEnv")
        rewards = []
        if compute_reward:
            grade = MathVerifyReward(timeout_s=timeout_s, num_workers=num_workers)
            weights = [1.0, format_reward]
            rewards = [RewardFunctions([grade, think_answer_format], weights=weights)]
        super().__init__(
            map_rows(rows, _answer),
            rewards,
            prompt_column="problem",
            system_prompt=system_prompt,
            **kwargs,
        )


def _answer(row: dict[str, Any]) -> dict[str, Any]:
    answer = last_boxed(row["solution"])
    if answer is None:
        raise ValueError(f"MATHEnv: a solution has no \\boxed{{}}: {row['solution']!r:.200}.")
    return {"answer": answer}
