"""Mathematical answers, compared by the package math-verify in killable processes.

Needs ``pip install torchrl-agents[graders]``.
"""

import functools
import logging
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from torchrl_data.checks import POSITIVE, check_numbers
from torchrl_data.messages import Message
from torchrl_envs.concurrency.calls import CallTimeoutError
from torchrl_envs.processes import ToolProcesses

from .answers import final_text, read_tags

_MAX_MEMORY_MB: Final = 2048
_MAX_RESULT_BYTES: Final = 64


class MathVerifyReward:
    r"""1 where the last message's mathematical answer equals the right one, else 0.

    The answer is read from the last ``<answer>`` block if there is one, else from the whole
    message: a ``\boxed{}`` or other LaTeX, or the last number. An expression that takes too long
    to parse or to compare costs its own process only, which is killed; its rollout can't be scored,
    unless ``timeout_reward`` says what it gets.

    Use it as a reward function: ``RewardFunctions([MathVerifyReward()])``, which also closes it.

    Args:
        answer_column: of the data; LaTeX or plain.
        num_workers: processes.
        timeout_s: deadline for one rollout, from when a process takes it up; that of
            ``RewardFunctions`` counts the wait for a process too.
        timeout_reward: for a rollout that takes longer; ``None`` makes it unscorable.

    Raises:
        ValueError: a setting is not positive.
        ImportError: math-verify is not installed.
    """

    scores_one_rollout = True
    needs_messages = True

    def __init__(
        self,
        *,
        answer_column: str = "answer",
        num_workers: int = 2,
        timeout_s: float = 5.0,
        timeout_reward: float | None = None,
    ) -> None:
        if find_spec("math_verify") is None:
            raise ImportError(
                "MathVerifyReward needs the package math-verify, which is not installed: pip "
                "install torchrl-agents[graders]."
            )
        check_numbers("MathVerifyReward", POSITIVE, timeout_s=timeout_s)
        self.answer_column = answer_column
        self.timeout_reward = timeout_reward
        self.required_columns = (answer_column,)
        self.num_timeouts = 0
        self._processes = ToolProcesses(
            {"grade": grade_math},
            num_processes=num_workers,
            timeout_s=timeout_s,
            max_result_bytes=_MAX_RESULT_BYTES,
            max_memory_mb=_MAX_MEMORY_MB,
            preload=["math_verify"],
            start=False,
        )

    def __call__(self, completion: Sequence[Message], **columns: Any) -> float:
        """Score one rollout.

        Args:
            completion: its messages.
            **columns: of the data.

        Raises:
            TimeoutError: time was up, and ``timeout_reward`` is ``None``.
            RuntimeError: the right answer can't be read, or the process died.
        """
        arguments = {"response": final_text(completion), "right": str(columns[self.answer_column])}
        try:
            grade: Any = self._processes.call("grade", arguments)
            return float(grade)
        except CallTimeoutError:
            self.num_timeouts += 1
            if self.timeout_reward is not None:
                return self.timeout_reward
            raise TimeoutError(
                f"the answer was not graded within {self._processes.timeout_s:g} s"
            ) from None

    def close(self) -> None:
        """Kill the processes."""
        self._processes.close()


def grade_math(response: str, right: str) -> float:
    """Compare two answers; without a time limit, so run it in a killable process."""
    # It warns that its own time limits are off; here processes are killed instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    math_verify = import_module("math_verify")
    parse = functools.partial(math_verify.parse, parsing_timeout=None)
    expected = parse(right) or parse(f"${right}$")
    if not expected:
        raise ValueError(f"math-verify can't read the right answer {right!r:.200}")
    answer = read_tags(response).answer
    parsed = parse(answer) or parse(f"${answer}$") if answer else []
    return float(math_verify.verify(expected, parsed or parse(response), timeout_seconds=None))
