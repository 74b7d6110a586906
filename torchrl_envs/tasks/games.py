"""Rules of small games and how they are told.

Plain Python, so that an environment server can import them too.
"""

import json
import random
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

# Catch: a ball falls through a grid, and a paddle on the last row has to be under it.

NUM_ROWS: Final = 10
NUM_COLUMNS: Final = 5
DIRECTIONS: Final = {"left": -1, "stay": 0, "right": 1}


class CatchGame:
    """A ball."""

    def __init__(
        self, seed: int, *, num_rows: int = NUM_ROWS, num_columns: int = NUM_COLUMNS
    ) -> None:
        if num_rows < 2 or num_columns < 1:
            raise ValueError(
                f"CatchGame needs at least 2 rows and 1 column, got {num_rows} and {num_columns}."
            )
        self.num_rows = num_rows
        self.num_columns = num_columns
        self.ball_row = 0
        self.ball_column = random.Random(seed).randrange(num_columns)
        self.paddle_column = num_columns // 2

    @property
    def is_over(self) -> bool:
        """Whether the ball has reached the last row."""
        return self.ball_row == self.num_rows - 1

    @property
    def reward(self) -> float:
        """1 if the ball was caught, -1 if it was missed, 0 before that."""
        if not self.is_over:
            return 0.0
        return 1.0 if self.ball_column == self.paddle_column else -1.0

    def move(self, direction: str) -> None:
        """Move the paddle; the ball falls one row."""
        if direction not in DIRECTIONS:
            raise ValueError(f"the direction must be left, stay or right, not {direction!r:.40}")
        if self.is_over:
            raise ValueError("the game is over")
        column = self.paddle_column + DIRECTIONS[direction]
        self.paddle_column = min(max(column, 0), self.num_columns - 1)
        self.ball_row += 1

    def board(self) -> str:
        """The grid as text: ``o`` is the ball, ``=`` the paddle, ``*`` a caught ball."""
        grid = [["."] * self.num_columns for _ in range(self.num_rows)]
        grid[-1][self.paddle_column] = "="
        caught = self.is_over and self.ball_column == self.paddle_column
        grid[self.ball_row][self.ball_column] = "*" if caught else "o"
        return "\n".join("".join(row) for row in grid)


# Wordle: find a word of five letters in six guesses.

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


# Nim with one heap: take one to three in turn; who takes the last one wins.

MOST: Final = 3
"""The most that a move takes."""


class NimGame:
    """A heap and two players, 0 and 1; 0 begins.

    Args:
        heap: how many there are.
    """

    def __init__(self, heap: int) -> None:
        if heap < 1:
            raise ValueError(f"NimGame needs a heap of at least 1, got {heap}.")
        self.heap = heap
        self.turn = 0
        """Who moves."""
        self.winner: int | None = None
        """Who has won, once the game is over."""

    @property
    def is_over(self) -> bool:
        """Whether somebody has won."""
        return self.winner is not None

    def take(self, n: int) -> None:
        """Move; a move that is not allowed loses.

        Args:
            n: how many to take, 1 to 3.

        Raises:
            ValueError: the game is over.
        """
        if self.is_over:
            raise ValueError("the game is over")
        if not 1 <= n <= min(MOST, self.heap):
            self.forfeit()
            return
        self.heap -= n
        if self.heap == 0:
            self.winner = self.turn
        self.turn = 1 - self.turn

    def forfeit(self) -> None:
        """End the game: the player who is to move gives up."""
        self.winner = 1 - self.turn

    def view(self) -> str:
        """Return what the players see."""
        return f"The heap has {self.heap}."


def is_won(heap: int) -> bool:
    """Return whether who is to move can win: all heaps but the multiples of four."""
    return heap % (MOST + 1) != 0


def perfect_move(heap: int, rng: random.Random) -> int:
    """Leave a multiple of four; where that can't be, any move."""
    return heap % (MOST + 1) or random_move(heap, rng)


def random_move(heap: int, rng: random.Random) -> int:
    """Any move that is allowed."""
    return rng.randint(1, min(MOST, heap))


# What the tokenizer of the embedded model has as one token: calls of tools, and parts of them.

ROLES: Final = ("user", "assistant")
"""As the template writes them; what a tool answers is the user's, too."""


def call_text(tool: str, arguments: dict[str, Any]) -> str:
    """A call as the template writes it between its control tokens.

    Args:
        tool: its name.
        arguments: by name.
    """
    return f"\n{json.dumps({'name': tool, 'arguments': arguments})}\n"


def around_argument(tool: str, argument: str) -> list[str]:
    """Return what stands before and after the value in a call with one argument, but for quotes.

    Args:
        tool: its name.
        argument: its name.
    """
    return [part.strip(" ") for part in call_text(tool, {argument: 0}).split("0")]
