"""Guess a number in as few guesses as bisection needs: an environment with state over many turns.

The demonstrations guess the middle of what is possible, or any number: bisection with slips.
"""

import random
from typing import Any, Final

from torchrl_envs.tasks.call_texts import ROLES, around_argument
from torchrl_envs.tasks.demonstrations import guesses_with_slips
from torchrl_envs.tasks.task import Task

LARGEST: Final = 15
"""Numbers are 1 to this; four guesses always find one by bisection."""
MAX_GUESSES: Final = 4


class NumberGuessing:
    """A secret number and a tool to guess it."""

    def reset(self, *, number: int, **row: Any) -> None:
        """Take the number of a row."""
        del row
        self._number = number
        self._num_guesses = 0
        self._found = False

    def guess(self, n: int) -> str:
        """Guess the number.

        Args:
            n: The guess.
        """
        self._num_guesses += 1
        if self._num_guesses > MAX_GUESSES:
            raise ValueError("no guesses are left")
        self._found = self._found or n == self._number
        return _compare(n, self._number)

    def get_reward(self) -> float:
        """1 if the number was found."""
        return float(self._found)


def _compare(n: int, number: int) -> str:
    return "found" if n == number else "higher" if n < number else "lower"


def number_guessing_task(
    *, num_rows: int = 4096, num_held_out: int = 256, num_demonstrations: int = 8192, seed: int = 0
) -> Task:
    """Numbers to be guessed; the prompt is always the same and says nothing of the number.

    Args:
        num_rows: training rows.
        num_held_out: rows of the test, drawn independently: there is nothing to memorise.
        num_demonstrations: conversations for the warm start.
        seed: of everything.
    """
    rng = random.Random(seed)
    prompt = f"Find the number from 1 to {LARGEST} in {MAX_GUESSES} guesses."
    train, held_out = (
        [{"prompt": prompt, "number": rng.randint(1, LARGEST)} for _ in range(count)]
        for count in (num_rows, num_held_out)
    )
    shown = [rng.choice(train) for _ in range(num_demonstrations)]
    return Task(
        name="number_guessing",
        environment=NumberGuessing,
        train_rows=train,
        held_out_rows=held_out,
        demonstrations=guesses_with_slips(
            *(NumberGuessing, shown, range(1, LARGEST + 1)),
            secret="number",
            argument="n",
            compare=_compare,
            choose=lambda possible: possible[(len(possible) - 1) // 2],
            num_guesses=MAX_GUESSES,
            rng=rng,
        ),
        num_warm_steps=1200,
        entropy_coeff=0.0,
        max_turns=MAX_GUESSES + 1,
        max_new_tokens=28,
        isolated=r"\d+",
        phrases=[*ROLES, prompt, "done", *around_argument("guess", "n")],
    )
