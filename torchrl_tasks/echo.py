"""Echo: the simplest environment with a tool: say a message to it."""

import random
from typing import Any

from torchrl_envs.tasks.demonstrations import PlayedTurn, played
from torchrl_envs.tasks.task import Task, split_rows

from .wordle_game import WORDS


class Echo:
    """A tool that repeats what it is told; the reward is 1 if it was told the right message."""

    def reset(self, *, message: str, **row: Any) -> None:
        """Take the message of a row."""
        del row
        self._wanted = message
        self._heard: list[str] = []

    def echo(self, message: str) -> str:
        """Echo a message back.

        Args:
            message: What to say.

        Returns:
            The same message.
        """
        self._heard.append(message)
        return message

    def get_reward(self) -> float:
        """1 if the message was echoed."""
        return float(self._wanted in self._heard)


def echo_task(
    *, num_rows: int = 4096, num_held_out: int = 256, num_demonstrations: int = 2048, seed: int = 0
) -> Task:
    """Messages of two words, to be echoed.

    Args:
        num_rows: rows, before repeated ones are dropped.
        num_held_out: rows held out.
        num_demonstrations: conversations for the warm start.
        seed: of everything.

    Raises:
        ValueError: too few different messages to hold so many out.
    """
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        message = " ".join(rng.sample(WORDS, 2))
        rows.append({"prompt": f"Echo: {message}", "message": message})
    train, held_out = split_rows(rows, num_held_out, told_apart_by=["prompt"])
    demonstrations = []
    for _ in range(num_demonstrations):
        row = rng.choice(train)
        message = row["message"] if rng.random() < 0.3 else rng.choice(WORDS)
        turns: list[PlayedTurn] = [("echo", {"message": message}, message)]
        demonstrations.append(played(row["prompt"], turns))
    return Task(
        name="echo",
        environment=Echo,
        train_rows=train,
        held_out_rows=held_out,
        demonstrations=demonstrations,
        max_turns=2,
        max_new_tokens=40,
    )
