"""Catch: move a paddle under a ball that falls through a grid, turn by turn.

The demonstrations move at random; where the ball is, is for the policy to see.
"""

import random
from typing import Any, Final

from torchrl_data.messages import Message
from torchrl_envs.tasks.call_texts import call_text
from torchrl_envs.tasks.demonstrations import PlayedTurn, played
from torchrl_envs.tasks.task import Task

from .catch_game import NUM_COLUMNS, NUM_ROWS, CatchGame

CATCH_PROMPT: Final = (
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
        end = "\ncaught" if self._game.reward > 0 else "\nmissed"
        return self._game.board() + (end if self._game.is_over else "")

    def get_reward(self) -> float:
        """1 if the ball was caught, 0 if it was missed or still falls."""
        return max(self._game.reward, 0.0)


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
    train, held_out = (
        [{"prompt": CATCH_PROMPT, "start": rng.randrange(2**31)} for _ in range(count)]
        for count in (num_rows, num_held_out)
    )

    def demonstration() -> list[Message]:
        environment = Catch()
        board = environment.reset(**rng.choice(train))
        turns: list[PlayedTurn] = []
        for _ in range(NUM_MOVES):
            direction = rng.choice(["left", "right", ""])
            name, arguments = ("move", {"direction": direction}) if direction else ("stay", {})
            turns.append((name, arguments, getattr(environment, name)(**arguments)))
        return played(f"{CATCH_PROMPT}\n\n{board}", turns)

    # Moves, lines of the board with something in them, and how many lines have nothing.
    calls = [call_text("move", {"direction": each}) for each in ("left", "right")]
    nothing = "." * NUM_COLUMNS
    columns = range(NUM_COLUMNS)
    marked = [f"{nothing[:i]}{mark}{nothing[i + 1 :]}" for mark in "o=*" for i in columns]
    empty = ["\n".join([nothing] * count) for count in range(1, NUM_ROWS)]
    return Task(
        name="catch",
        environment=Catch,
        train_rows=train,
        held_out_rows=held_out,
        demonstrations=[demonstration() for _ in range(num_demonstrations)],
        num_warm_steps=200,
        entropy_coeff=0.0,
        max_turns=NUM_MOVES + 1,
        max_new_tokens=32,
        phrases=[CATCH_PROMPT, *calls, call_text("stay", {}), *marked, *empty],
    )
