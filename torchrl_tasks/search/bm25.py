"""BM25 over pages in memory.

Robertson and Zaragoza, 2009, The Probabilistic Relevance Framework: BM25 and Beyond, equation
3.8.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

from torchrl_data.checks import check_numbers

_WORD: Final = re.compile(r"\w+")
"""What is compared: letters and digits, in lower case."""


class BM25:
    """Finds the texts that a query is about.

    A text's score is the sum over the words of the query of
    ``idf (k1 + 1) n / (n + k1 (1 - b + b length / mean length))``, n being how often the text has
    the word, and ``idf = ln(1 + (N - m + 0.5) / (m + 0.5))`` for a word that m of N texts have.

    Args:
        texts: what is searched.
        k1: how soon a word that comes again counts no more.
        b: how much longer texts pay for their length, in [0, 1].

    Raises:
        ValueError: there are no texts, or a number is out of range.
    """

    def __init__(self, texts: Sequence[str], *, k1: float = 1.2, b: float = 0.75) -> None:
        check_numbers("BM25", "[0, inf)", k1=k1)
        check_numbers("BM25", "[0, 1]", b=b)
        if not texts:
            raise ValueError("BM25: there are no texts to search.")
        counts = [Counter(_WORD.findall(text.lower())) for text in texts]
        mean_length = sum(each.total() for each in counts) / len(counts) or 1.0
        postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for index, each in enumerate(counts):
            norm = k1 * (1 - b + b * each.total() / mean_length)
            for word, n in each.items():
                postings[word].append((index, (k1 + 1) * n / (n + norm)))
        self._postings: dict[str, list[tuple[int, float]]] = {}
        """Of each word: the texts that have it, and what it adds to their scores."""
        for word, found in postings.items():
            idf = math.log(1 + (len(texts) - len(found) + 0.5) / (len(found) + 0.5))
            self._postings[word] = [(index, idf * share) for index, share in found]

    def scores(self, query: str) -> dict[int, float]:
        """The score of each text that has a word of the query, by its index."""
        scores: dict[int, float] = defaultdict(float)
        for word in _WORD.findall(query.lower()):
            for index, score in self._postings.get(word, ()):
                scores[index] += score
        return scores

    def search(self, query: str, limit: int) -> list[int]:
        """The indices of the best texts, the best first; of equal ones the first in order.

        Args:
            query: words.
            limit: most of them; texts without any of the words are never among them.
        """
        scores = self.scores(query)
        return sorted(scores, key=lambda index: (-scores[index], index))[:limit]
