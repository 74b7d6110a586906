"""A penalty for saying the same again: the share of n-grams that are repeated."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from torchrl_data.conversation.record import Message
from torchrl_data.validation import check_counts, one_of

from .answers import message_text

Unit = Literal["words", "characters"]
UNITS: Final[tuple[Unit, ...]] = ("words", "characters")


def repeated_fraction(texts: Sequence[str], ngram_size: int, unit: Unit = "words") -> float:
    """The share of the n-grams of texts that have been there before, from 0 to below 1.

    Args:
        texts: n-grams lie within each.
        ngram_size: words or characters of an n-gram.
        unit: what it consists of: words are what white space separates, in lower case.

    Returns:
        ``1 - different n-grams / n-grams``; 0 where there are none.
    """
    seen, total = set(), 0
    for text in texts:
        parts = text.lower().split() if unit == "words" else list(text)
        for start in range(len(parts) - ngram_size + 1):
            seen.add(tuple(parts[start : start + ngram_size]))
            total += 1
    return 1 - len(seen) / total if total else 0.0


class RepetitionPenalty:
    """A reward from 0 (every n-gram is new) down to ``max_penalty`` (they are all the same).

    It is ``max_penalty * (1 - different n-grams / n-grams)`` of all that the policy said, its
    thoughts too; of tools and users nothing counts. A text of fewer than ``ngram_size`` words gets
    0. Use it as a reward function: ``RewardFunctions([right, RepetitionPenalty()])``.

    Args:
        ngram_size: words (or characters) of an n-gram.
        max_penalty: below 0.
        unit: ``"words"``, or ``"characters"`` for scripts without spaces (with n-grams of 10 and
            more, say).

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
        if not max_penalty < 0:
            raise ValueError(f"RepetitionPenalty: max_penalty must be below 0, got {max_penalty}.")
        self.ngram_size = ngram_size
        self.max_penalty = max_penalty
        self.unit: Unit = one_of("unit", unit, UNITS)

    def __call__(self, completions: Sequence[Sequence[Message]], **_: Any) -> list[float]:
        """Score rollouts.

        Args:
            completions: messages, per rollout.
        """
        fractions = [
            repeated_fraction(list(_said(messages)), self.ngram_size, self.unit)
            for messages in completions
        ]
        return [self.max_penalty * fraction for fraction in fractions]


def _said(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for message in messages:
        if message["role"] == "assistant":
            yield str(message.get("reasoning_content") or "")
            yield message_text(message)
