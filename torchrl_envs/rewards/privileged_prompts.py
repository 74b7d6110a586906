"""Prompts that tell a teacher more than the policy was told: a demonstration, or feedback."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torchrl_data.checks import check_numbers
from torchrl_data.messages import Message

_WITHOUT: Final = ("tool", "user")
"""Roles that tell a policy what came of its turn."""


class FinishedRollout(NamedTuple):
    """A rollout that is over, as a privileged prompt may tell of it."""

    prompt: list[Message]
    """What the policy was asked."""
    completion: list[Message]
    """What it said, and what tools and users answered."""
    row: Mapping[str, Any]
    """The row of the data; empty where there is none."""
    reward: float
    """NaN where it could not be scored."""
    reward_error: str
    """Why it could not be scored; empty otherwise."""
    group_id: int
    """Equal for the rollouts of one prompt."""

    @property
    def text(self) -> str:
        """The policy's turns, one after the other."""
        said = (m for m in self.completion if m["role"] == "assistant")
        return "\n".join(_text_of(message) for message in said)


PrivilegedPrompt = Callable[[Sequence[FinishedRollout]], Sequence[Sequence[Message] | None]]
"""From all rollouts of a batch to the prompt of each that the teacher sees; ``None`` for a rollout
of which nothing is taught."""


class DemonstrationPrompt:
    """Shows the teacher a demonstration: self-distillation fine-tuning (SDFT).

    Args:
        column: of the data, which holds an answer to the prompt, a string.
        template: is added to the last message of the prompt; ``{demonstration}`` is the answer.

    Raises:
        ValueError: the template does not show the demonstration.

    See Also:
        Shenfeld et al., 2026, "Self-Distillation Enables Continual Learning", arXiv:2601.19897.

    Example:
        >>> asked = [{"role": "user", "content": "2 + 2?"}]
        >>> rollout = FinishedRollout(asked, [], {"answer": "4"}, 0.0, "", 0)
        >>> DemonstrationPrompt("answer", template=" Say {demonstration}.")([rollout])
        [[{'role': 'user', 'content': '2 + 2? Say 4.'}]]
    """

    def __init__(
        self,
        column: str,
        *,
        template: str = (
            "\n\nThis is an example of a good answer:\n{demonstration}\n\nNow give your own answer."
        ),
    ) -> None:
        if "{demonstration}" not in template:
            raise ValueError(
                f"DemonstrationPrompt: the template {template!r} has no {{demonstration}}, so the "
                "teacher would see what the student sees."
            )
        self.column = column
        self._template = template

    def __call__(self, rollouts: Sequence[FinishedRollout]) -> list[list[Message] | None]:
        """See :data:`PrivilegedPrompt`."""
        prompts: list[list[Message] | None] = []
        for rollout in rollouts:
            shown = rollout.row.get(self.column)
            if not isinstance(shown, str):
                raise ValueError(
                    f"DemonstrationPrompt: the column {self.column!r} of a row must hold a string, "
                    f"got {shown!r:.80}; its columns are {sorted(rollout.row)}."
                )
            told = self._template.replace("{demonstration}", shown)
            prompts.append(_with_more(rollout.prompt, told))
        return prompts


class FeedbackPrompt:
    """Tells the teacher what came of a rollout: self-distillation policy optimization (SDPO).

    It sees a rollout of the same group that was solved, if another one was; and of a rollout that
    was not solved, what the environment answered (a tool's error, say), or what ``feedback`` says
    of it. A rollout of which there is neither is not taught.

    Args:
        solved_at: the reward from which on a rollout is solved.
        feedback: gives a text about a rollout that was not solved, ``""`` for none; ``None``: what
            tools and users said to the policy, and why its reward could not be computed.

    Raises:
        ValueError: ``solved_at`` is not finite.

    See Also:
        Hübotter et al., 2026, "Reinforcement Learning via Self-Distillation", arXiv:2601.20802.

    Example:
        >>> asked = [{"role": "user", "content": "2 + 2?"}]
        >>> said = [[{"role": "assistant", "content": text}] for text in ("5", "4")]
        >>> wrong = FinishedRollout(asked, said[0], {}, 0.0, "", 0)
        >>> right = FinishedRollout(asked, said[1], {}, 1.0, "", 0)
        >>> told, nothing = FeedbackPrompt()([wrong, right])
        >>> print(told[-1]["content"])
        2 + 2?
        <BLANKLINE>
        This is a correct answer:
        4
        <BLANKLINE>
        Now give your own answer.
        >>> nothing is None  # no other one is right
        True
    """

    def __init__(
        self, *, solved_at: float = 1.0, feedback: Callable[[FinishedRollout], str] | None = None
    ) -> None:
        check_numbers("FeedbackPrompt", solved_at=solved_at)
        self.solved_at = solved_at
        self._feedback = environment_feedback if feedback is None else feedback

    def __call__(self, rollouts: Sequence[FinishedRollout]) -> list[list[Message] | None]:
        """See :data:`PrivilegedPrompt`."""
        solved: dict[int, list[int]] = {}
        for number, rollout in enumerate(rollouts):
            if rollout.reward >= self.solved_at:
                solved.setdefault(rollout.group_id, []).append(number)
        prompts: list[list[Message] | None] = []
        for number, rollout in enumerate(rollouts):
            others = (each for each in solved.get(rollout.group_id, ()) if each != number)
            right = next(others, None)
            is_solved = rollout.reward >= self.solved_at
            feedback = "" if is_solved else self._feedback(rollout).strip()
            told = ""
            if right is not None:
                told += f"\n\nThis is a correct answer:\n{rollouts[right].text}"
            if feedback:
                told += f"\n\nAn earlier answer of yours was wrong. Of it was said:\n{feedback}"
            more = f"{told}\n\nNow give your own answer."
            prompts.append(_with_more(rollout.prompt, more) if told else None)
        return prompts


def environment_feedback(rollout: FinishedRollout) -> str:
    """Text that tools and users said to the policy, and why its reward could not be computed.

    Args:
        rollout: over.
    """
    said = [_text_of(m) for m in rollout.completion if m["role"] in _WITHOUT]
    return "\n".join([*said, rollout.reward_error]).strip()


def _text_of(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _with_more(prompt: Sequence[Message], text: str) -> list[Message]:
    """A prompt with a text added to its last message."""
    *before, last = prompt
    return [*before, {**last, "content": f"{_text_of(last)}{text}"}]
