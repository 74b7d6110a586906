"""Catch: move a paddle under a falling ball, turn by turn.

The demonstrations move at random; where the ball is, is for the policy to see.
"""

import random
from collections.abc import Iterator
from typing import Any, Final

from torchrl_data.conversation.conversations import Message

from .games.catch import NUM_ROWS, CatchGame
from .phrases import catch_phrases
from .questions.demonstrations import Turn, played
from .task import Row, Task

PROMPT: Final = (
    "The ball o falls one row each turn. Move the paddle = until the ball is on the last row, and "
    "be under it."
)
NUM_MOVES: Final = NUM_ROWS - 1


class Catch:
    """A ball, a paddle and tools to move it; the reward is 1 if the ball was caught."""

    def reset(self, *, start: int, **row: Any) -> str:
        """Drop a ball.

        Args:
            start: decides the ball's column.
            **row: other columns.
        """
        del row
        self._game = CatchGame(start)
        return self._game.board()

    def move(self, direction: str) -> str:
        """Move the paddle by one column.

        Args:
            direction: "left" or "right".

        Returns:
            The board.
        """
        if direction not in ("left", "right"):
            raise ValueError(f"the direction must be left or right, not {direction!r:.40}")
        return self._play(direction)

    def stay(self) -> str:
        """Leave the paddle where it is.

        Returns:
            The board.
        """
        return self._play("stay")

    def _play(self, direction: str) -> str:
        self._game.move(direction)
        end = ""
        if self._game.is_over:
            end = "\ncaught" if self._game.reward > 0 else "\nmissed"
        return f"{self._game.board()}{end}"

    def get_reward(self) -> float:
        """1 if the ball was caught, 0 if it was missed or still falls."""
        return max(self._game.reward, 0.0)


def _moves(environment: Catch, rng: random.Random) -> Iterator[Turn]:
    for _ in range(NUM_MOVES):
        direction = rng.choice(["left", "right", ""])
        name, arguments = ("move", {"direction": direction}) if direction else ("stay", {})
        yield name, arguments, getattr(environment, name)(**arguments)


def _demonstration(row: Row, rng: random.Random) -> list[Message]:
    environment = Catch()
    board = environment.reset(**row)
    return played(f"{row['prompt']}\n\n{board}", _moves(environment, rng))


def catch_task(
    *, num_rows: int = 4096, num_held_out: int = 256, num_demonstrations: int = 2048, seed: int = 0
) -> Task:
    """Balls to be caught.

    Args:
        num_rows: training rows.
        num_held_out: rows of the test, drawn independently: there is nothing to memorise.
        num_demonstrations: conversations for the warm start.
        seed: of everything.
    """
    rng = random.Random(seed)

    def rows(count: int) -> list[Row]:
        return [{"prompt": PROMPT, "start": rng.randrange(2**31)} for _ in range(count)]

    train, held_out = rows(num_rows), rows(num_held_out)
    return Task(
        name="catch",
        environment=Catch,
        train_rows=train,
        held_out_rows=held_out,
        demonstrations=[_demonstration(rng.choice(train), rng) for _ in range(num_demonstrations)],
        num_warm_steps=200,
        entropy_coeff=0.0,
        max_turns=NUM_MOVES + 1,
        max_new_tokens=32,
        phrases=[PROMPT, *catch_phrases()],
    )
