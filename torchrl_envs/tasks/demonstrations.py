"""Conversations that a model made here is warmed up with: answers with slips in them, and games."""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

from torchrl_data.checks import check_numbers
from torchrl_data.messages import Message

from .call_texts import ROLES
from .task import Row

PlayedTurn = tuple[str, Mapping[str, Any], str]
"""A call: the tool, its arguments, and what it answered."""
_KINDS: Final = (str.isdigit, str.isupper, str.islower)
_WORD: Final = re.compile(r"\b[^\W\d_]{2,}\b")
_RUN: Final = re.compile(r"\b[^\W\d_](?:[^\W\d_]|\s)*[^\W\d_]\b")
_LINE: Final = re.compile(r"^(?=.*[^\W\d_]{2}).*\S", re.MULTILINE)
_NUM_TEXTS: Final = 1024
_SHARE: Final = 0.02


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
        check_numbers("", "(0, 1]", right_fraction=right_fraction)
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


def played(opening: str, turns: Iterable[PlayedTurn]) -> list[Message]:
    """A game that was played to its end.

    Args:
        opening: what the first prompt says.
        turns: how it was played.
    """
    messages: list[Message] = [{"role": "user", "content": opening}]
    for name, arguments, answer in turns:
        call = {"function": {"name": name, "arguments": dict(arguments)}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": answer})
    return [*messages, {"role": "assistant", "content": "done"}]


def guesses_with_slips(
    make: Callable[[], Any],
    rows: Iterable[Row],
    candidates: Sequence[Any],
    *,
    secret: str,
    argument: str,
    compare: Callable[[Any, Any], str],
    choose: Callable[[Sequence[Any]], Any],
    num_guesses: int,
    rng: random.Random,
    right_fraction: float = 0.4,
) -> list[list[Message]]:
    """Games in which a secret is guessed: with what is known of it or, a slip, without.

    Args:
        make: makes an environment with the tool ``guess``.
        rows: with a prompt and a secret each.
        candidates: what a secret may be.
        secret: the column with it.
        argument: of the tool.
        compare: what a guess says of a secret.
        choose: from the candidates that all answers so far allow, in their order.
        num_guesses: most guesses.
        rng: draws them.
        right_fraction: the probability that a guess is chosen so; a slip is any candidate.
    """
    compare = cache(compare)

    def guesses(row: Row) -> Iterator[PlayedTurn]:
        environment = make()
        environment.reset(**row)
        possible = candidates
        for _ in range(num_guesses):
            is_right = rng.random() < right_fraction
            guess = choose(possible) if is_right else rng.choice(candidates)
            yield "guess", {argument: guess}, environment.guess(guess)
            if guess == row[secret]:
                return
            said = compare(guess, row[secret])
            possible = [each for each in possible if compare(guess, each) == said]

    return [played(row["prompt"], guesses(row)) for row in rows]


def common_phrases(rows: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Lines, words in a row and single words that many prompts have, and the names of the roles.

    Args:
        rows: with a prompt each.
    """
    texts = [row["prompt"] for row in rows[:_NUM_TEXTS]]
    phrases = list(ROLES)
    for pattern in (_LINE, _RUN, _WORD):  # of what is in no phrase yet
        counts = Counter(phrase for text in texts for phrase in set(pattern.findall(text)))
        common = sorted(text for text, count in counts.items() if count >= _SHARE * len(texts))
        longest_first = sorted(common, key=len, reverse=True)
        if common:
            found = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")
            texts = [found.sub("\n0\n", text) for text in texts]
        phrases += common
    return tuple(dict.fromkeys(phrases))
