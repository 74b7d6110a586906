"""What a model made here is warmed up with: questions, and answers with slips in them."""

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from torchrl_data.conversation.conversations import Message
from torchrl_envs.tasks.task import Row

_KINDS: Final = (str.isdigit, str.isupper, str.islower)
_WORD: Final = re.compile(r"\b[^\W\d_]{2,}\b")
_RUN: Final = re.compile(r"\b[^\W\d_](?:[^\W\d_]|\s)*[^\W\d_]\b")
_LINE: Final = re.compile(r"^(?=.*[^\W\d_]{2}).*\S", re.MULTILINE)
_NUM_TEXTS: Final = 1024
_SHARE: Final = 0.02
_ROLES: Final = ("user", "assistant")


class Slips:
    """Answers in which each letter or digit may be another one, by chance.

    They are independent, as many as leave an answer right with the probability that is asked for:
    then what was written before says nothing of what comes.

    Args:
        answers: whose letters, and digits, are taken for each other.
        right_fraction: the probability that there is no slip, in (0, 1].

    Raises:
        ValueError: the fraction is out of range.
    """

    def __init__(self, answers: Sequence[str], right_fraction: float) -> None:
        if not 0 < right_fraction <= 1:
            raise ValueError(f"right_fraction must be in (0, 1], got {right_fraction}.")
        self._right_fraction = right_fraction
        self._answers = answers
        used = sorted(set().union(*answers))
        alphabets = [[c for c in used if is_kind(c)] for is_kind in _KINDS]
        self._others = {
            c: [other for other in alphabet if other != c]
            for alphabet in alphabets
            for c in alphabet
            if len(alphabet) > 1
        }

    def __call__(self, answer: str, rng: random.Random) -> str:
        """The answer, slips included."""
        count = sum(c in self._others for c in answer)
        if not count:  # Then a slip is the answer of another question.
            return answer if rng.random() < self._right_fraction else rng.choice(self._answers)
        probability = 1 - self._right_fraction ** (1 / count)
        return "".join(
            rng.choice(self._others[c]) if c in self._others and rng.random() < probability else c
            for c in answer
        )


def demonstrations_with_slips(
    rows: Sequence[Row], count: int, *, right_fraction: float, rng: random.Random
) -> list[list[Message]]:
    """Questions, each with an answer that has no slip with a probability.

    Args:
        rows: with a prompt and an answer each.
        count: conversations.
        right_fraction: the probability.
        rng: draws rows and slips.
    """
    slips = Slips([row["answer"] for row in rows], right_fraction)
    drawn = [rng.choice(rows) for _ in range(count)]
    return [
        [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": slips(row["answer"], rng)},
        ]
        for row in drawn
    ]


def common_phrases(rows: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Lines, words in a row and single words that many prompts have, and the names of the roles.

    Args:
        rows: with a prompt each.
    """
    texts = [row["prompt"] for row in rows[:_NUM_TEXTS]]
    phrases = list(_ROLES)
    for pattern in (_LINE, _RUN, _WORD):  # of what is in no phrase yet
        counts = Counter(phrase for text in texts for phrase in set(pattern.findall(text)))
        common = sorted(text for text, count in counts.items() if count >= _SHARE * len(texts))
        longest_first = sorted(common, key=len, reverse=True)
        if common:
            found = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")
            texts = [found.sub("\n0\n", text) for text in texts]
        phrases += common
    return tuple(dict.fromkeys(phrases))
