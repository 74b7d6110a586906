"""Nim against a player that is written here; two policies can play it, too.

The demonstrations make any moves that are allowed.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from torchrl_data.checks import check_counts, one_of
from torchrl_data.messages import Message
from torchrl_envs.tasks.call_texts import ROLES, around_argument
from torchrl_envs.tasks.demonstrations import PlayedTurn, played
from torchrl_envs.tasks.task import Row, Task

from .nim_game import NimGame, is_won, perfect_move, random_move

NIM_PROMPT: Final = "Take 1, 2 or 3 from the heap in turn. Who takes the last one wins."
SMALLEST: Final = 5
"""The smallest heap to begin with."""
PLAYERS: Final[dict[str, Callable[[int, random.Random], int]]] = {
    "random": random_move,
    "perfect": perfect_move,
}
"""Who plays against the policy, by name."""


class Nim:
    """A game against one of :data:`PLAYERS`."""

    def reset(self, *, heap: int, opponent: str, begins: bool, seed: int, **row: Any) -> str:
        """Begin; the other one moves first where the policy does not.

        Args:
            heap: how many there are.
            opponent: who plays against the policy.
            begins: whether the policy moves first.
            seed: of the other one's moves.
            **row: other columns.
        """
        del row
        self._game = NimGame(heap)
        self._seat = 0 if begins else 1
        self._player = PLAYERS[opponent]
        self._rng = random.Random(seed)
        if not begins:
            self._game.take(self._player(self._game.heap, self._rng))
        return self._game.view()

    def take(self, n: int) -> str:
        """Take from the heap.

        Args:
            n: How many to take, 1 to 3.
        """
        self._game.take(n)
        if not self._game.is_over:
            self._game.take(self._player(self._game.heap, self._rng))
        if self._game.is_over:
            return "you win" if self._game.winner == self._seat else "you lose"
        return self._game.view()

    def get_reward(self) -> float:
        """1 for a game that was won; 0 for one that was lost or left."""
        return float(self._game.winner == self._seat)


def _metric(name: str) -> Callable[..., list[float | None]]:
    """The win rate against one of :data:`PLAYERS`."""

    def against(
        environments: Sequence[Nim], opponent: Sequence[str], **_: Any
    ) -> list[float | None]:
        pairs = zip(environments, opponent, strict=True)
        return [nim.get_reward() if other == name else None for nim, other in pairs]

    against.__name__ = f"against_{name}"
    return against


def nim_task(
    *,
    largest: int = 16,
    opponent: str = "random",
    num_rows: int = 4096,
    num_held_out: int = 256,
    num_demonstrations: int = 4096,
    seed: int = 0,
) -> Task:
    """Nim: take one to three from a heap in turn; who takes the last one wins.

    Args:
        largest: the largest heap to begin with.
        opponent: who plays the training rows where the policy does not play itself: random or
            perfect.
        num_rows: training rows, each a heap.
        num_held_out: rows of the test: against the random and the perfect player in turn, who
            begins in half of them; against the perfect one from heaps that can be won.
        num_demonstrations: conversations for the warm start.
        seed: of everything.

    Raises:
        ValueError: the largest heap is below 8, or there is no such player.
    """
    check_counts("nim", 8, largest=largest)
    opponent = one_of("opponent", opponent, list(PLAYERS), who="nim")
    rng = random.Random(seed)

    def row(player: str, begins: bool) -> Row:
        heap = rng.randint(SMALLEST, largest)
        while player == "perfect" and is_won(heap) != begins:
            heap = rng.randint(SMALLEST, largest)
        return {"prompt": NIM_PROMPT, "heap": heap, "opponent": player, "begins": begins}

    def demonstration() -> list[Message]:
        """A game of two players who move at random, from the seat of one of them."""
        environment, begins = Nim(), rng.random() < 0.5
        view = opening = environment.reset(**row("random", begins), seed=rng.randrange(2**31))
        turns: list[PlayedTurn] = []
        while view.startswith("The heap"):
            n = random_move(int(view.split()[-1].rstrip(".")), rng)
            view = environment.take(n)
            turns.append(("take", {"n": n}, view))
        return played(f"{NIM_PROMPT}\n\n{opening}", turns)

    players = list(PLAYERS)
    held_out = [row(players[i % 2], i // 2 % 2 == 0) for i in range(num_held_out)]
    train = [row(opponent, i % 2 == 0) for i in range(num_rows)]
    return Task(
        name="nim",
        environment=Nim,
        game=lambda row: NimGame(row["heap"]),
        train_rows=train,
        held_out_rows=held_out,
        demonstrations=[demonstration() for _ in range(num_demonstrations)],
        metrics=[_metric(name) for name in PLAYERS],
        max_turns=largest // 2 + 1,
        max_new_tokens=28,
        isolated=r"\d+",
        phrases=[
            *ROLES,
            NIM_PROMPT,
            "The heap has",
            "done",
            *around_argument("take", "n"),
        ],
    )
