"""Nim with one heap: take one to three in turn; who takes the last one wins."""

import random
from typing import Final

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
