"""Wordle: find a word of five letters in six guesses."""

import random
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Final

WORDS: Final = tuple(Path(__file__).with_name("wordle_words.txt").read_text("utf-8").split())
"""Common English words of five letters."""
NUM_LETTERS: Final = 5
NUM_GUESSES: Final = 6


def guess_feedback(guess: str, secret: str) -> str:
    """Return what a guess says about the secret.

    Args:
        guess: as long as the secret.
        secret: the word to find.

    Returns:
        A letter per letter: ``G`` right letter and place, ``Y`` the letter is elsewhere in the
        word, ``X`` it is not. A letter is marked as often as the secret has it.

    Examples:
        >>> guess_feedback("speed", "crepe")
        'XYGYX'
    """
    unmatched = Counter(s for g, s in zip(guess, secret, strict=True) if g != s)
    marks = []
    for letter, other in zip(guess, secret, strict=True):
        if letter == other:
            marks.append("G")
        elif unmatched[letter] > 0:
            unmatched[letter] -= 1
            marks.append("Y")
        else:
            marks.append("X")
    return "".join(marks)


class WordleGame:
    """A secret word."""

    def __init__(
        self,
        secret: str | None = None,
        *,
        seed: int | None = None,
        allowed: Collection[str] | None = None,
        num_guesses: int = NUM_GUESSES,
    ) -> None:
        self.secret = random.Random(seed).choice(WORDS) if secret is None else secret.lower()
        if not _is_word(self.secret) or (allowed is not None and self.secret not in allowed):
            raise ValueError(
                f"WordleGame: the secret must be an allowed word of {NUM_LETTERS} letters, got "
                f"{secret!r}."
            )
        self.allowed = allowed
        self.num_guesses = num_guesses
        self.guesses: list[str] = []

    @property
    def is_won(self) -> bool:
        """Whether the word was found."""
        return self.secret in self.guesses

    @property
    def is_over(self) -> bool:
        """Whether the word was found or no guess is left."""
        return self.is_won or len(self.guesses) >= self.num_guesses

    def guess(self, word: str) -> str:
        """Guess a word."""
        if self.is_over:
            raise ValueError("the game is over")
        word = word.strip().lower()
        if not _is_word(word):
            raise ValueError(f"a guess has {NUM_LETTERS} letters from a to z, not {word!r:.40}")
        if self.allowed is not None and word not in self.allowed:
            raise ValueError(f"{word!r} is not in the word list")
        self.guesses.append(word)
        return guess_feedback(word, self.secret)


def _is_word(text: str) -> bool:
    return len(text) == NUM_LETTERS and text.isascii() and text.isalpha() and text.islower()
