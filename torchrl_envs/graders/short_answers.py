"""Short answers compared as in SQuAD: exact match and F1 of words.

Rajpurkar et al., 2016, arXiv:1606.05250, section 6.1.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Final

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


def normalized_answer(text: str) -> str:
    """A text as it is compared: lower case, without punctuation, articles and further spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match_of(said: str, answers: str | Sequence[str]) -> float:
    """1 if a text is one of the right answers, else 0.

    Args:
        said: the text.
        answers: one, or all that are right.
    """
    own = normalized_answer(said)
    return float(any(own == normalized_answer(each) for each in _listed(answers)))


def f1_of(said: str, answers: str | Sequence[str]) -> float:
    """The harmonic mean of precision and recall of the words, for the best of the right answers.

    Args:
        said: the text.
        answers: one, or all that are right.
    """
    return max((_f1(said, each) for each in _listed(answers)), default=0.0)


def _f1(said: str, answer: str) -> float:
    own, right = normalized_answer(said).split(), normalized_answer(answer).split()
    if not own or not right:
        return float(own == right)
    common = (Counter(own) & Counter(right)).total()
    return 2 * common / (len(own) + len(right))


def _listed(answers: str | Sequence[str]) -> Sequence[str]:
    return [answers] if isinstance(answers, str) else answers
