"""Catch: a ball falls through a grid, and a paddle on the last row has to be under it."""

import random
from typing import Final

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
