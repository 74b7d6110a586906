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
    listed = [answers] if isinstance(answers, str) else answers
    return float(any(own == normalized_answer(each) for each in listed))


def f1_of(said: str, answers: str | Sequence[str]) -> float:
    """The harmonic mean of precision and recall of the words, for the best of the right answers.

    Args:
        said: the text.
        answers: one, or all that are right.
    """
    own, best = normalized_answer(said).split(), 0.0
    for answer in [answers] if isinstance(answers, str) else answers:
        right = normalized_answer(answer).split()
        if own and right:
            common = (Counter(own) & Counter(right)).total()
            best = max(best, 2 * common / (len(own) + len(right)))
        elif own == right:
            best = 1.0
    return best
