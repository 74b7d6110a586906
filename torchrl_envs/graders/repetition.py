"""A penalty for saying the same again: the share of n-grams that are repeated."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

from torchrl_data.checks import check_counts, check_numbers, one_of
from torchrl_data.messages import Message

from .answers import text_of_message

Unit = Literal["words", "characters"]


class RepetitionPenalty:
    """A reward from 0 (every n-gram is new) down to ``max_penalty`` (they are all the same).

    It is ``max_penalty * (1 - different n-grams / n-grams)`` of all that the policy said, its
    thoughts too; of tools and users nothing counts. A text of fewer than ``ngram_size`` words gets
    0. Use it as a reward function: ``RewardFunctions([right, RepetitionPenalty()])``.

    Args:
        ngram_size: words (or characters) of an n-gram.
        max_penalty: below 0.
        unit: ``"words"``, which white space separates, in lower case; or ``"characters"`` for
            scripts without spaces (with n-grams of 10 and more, say). An n-gram lies within a text.

    Raises:
        ValueError: the size is not positive, the penalty not below 0, or there is no such unit.

    See Also:
        Yeo et al., 2025, arXiv:2502.03373, appendix C.2.

    Examples:
        >>> penalty = RepetitionPenalty(ngram_size=2, max_penalty=-1.0)
        >>> penalty([[{"role": "assistant", "content": "so it is so it is so"}]])
        [-0.5]
    """

    needs_messages = True

    def __init__(
        self, ngram_size: int = 3, max_penalty: float = -1.0, *, unit: Unit | str = "words"
    ) -> None:
        check_counts(ngram_size=ngram_size)
        check_numbers("RepetitionPenalty", "(-inf, 0)", max_penalty=max_penalty)
        self.ngram_size = ngram_size
        self.max_penalty = max_penalty
        self.unit: Unit = one_of("unit", unit, get_args(Unit))

    def __call__(self, completions: Sequence[Sequence[Message]], **_: Any) -> list[float]:
        """Score rollouts.

        Args:
            completions: messages, per rollout.
        """
        penalties, size = [], self.ngram_size
        for messages in completions:
            own = [message for message in messages if message["role"] == "assistant"]
            said = [str(message.get("reasoning_content") or "") for message in own]
            said += map(text_of_message, own)
            grams: list[tuple[str, ...]] = []
            for text in said:
                parts = text.lower().split() if self.unit == "words" else list(text)
                grams += [tuple(parts[i : i + size]) for i in range(len(parts) - size + 1)]
            fraction = 1 - len(set(grams)) / len(grams) if grams else 0.0
            penalties.append(self.max_penalty * fraction)
        return penalties
