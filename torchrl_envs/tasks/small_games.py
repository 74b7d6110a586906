"""Small games as tasks: a model that starts from nothing learns them on a CPU."""

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Final

from torchrl_data.checks import check_counts, one_of
from torchrl_data.messages import Message
from torchrl_envs.tasks.games import (
    NUM_COLUMNS,
    NUM_GUESSES,
    NUM_LETTERS,
    NUM_ROWS,
    ROLES,
    WORDS,
    CatchGame,
    NimGame,
    WordleGame,
    around_argument,
    call_text,
    guess_feedback,
    is_won,
    perfect_move,
    random_move,
)

from .task import Row, Task, Turn, guesses_with_slips, played, split_rows

# Guess a number in as few guesses as bisection needs: an environment with state over many turns.
#
# The demonstrations guess the middle of what is possible, or any number: bisection with slips.

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


# Echo: the simplest environment with a tool: say a message to it.


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
        turns: list[Turn] = [("echo", {"message": message}, message)]
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


# Catch: move a paddle under a falling ball, turn by turn.
#
# The demonstrations move at random; where the ball is, is for the policy to see.

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
        turns: list[Turn] = []
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


# Wordle: find a word of five letters in six guesses.
#
# The demonstrations guess the first word that all marks so far allow, or any: the skill with slips.

WORDLE_PROMPT: Final = (
    "Find the word of five letters in {} guesses. After a guess, G marks a letter in its right "
    "place, Y a letter that is elsewhere in the word, X one that is not in it."
)
EASY: Final = (WORDS[::40], 4)
"""Words and guesses: so few that the embedded model can learn what each word says of others."""


class Wordle:
    """A secret word and a tool to guess it; the reward is 1 if the word was found."""

    def reset(self, *, word: str, num_guesses: int = NUM_GUESSES, **row: Any) -> None:
        """Take the word of a row."""
        del row
        self._game = WordleGame(word, num_guesses=num_guesses)

    def guess(self, word: str) -> str:
        """Guess a word.

        Args:
            word: Five letters.

        Returns:
            The letters and what they say, and whether that is the word.
        """
        marks = self._game.guess(word)
        end = ""
        if self._game.is_won:
            end = "\nfound"
        elif self._game.is_over:
            end = f"\nover, the word was {self._game.secret}"
        return f"{' '.join(word.strip().upper())}\n{' '.join(marks)}{end}"

    def get_reward(self) -> float:
        """1 if the word was found."""
        return float(self._game.is_won)


def wordle_task(
    *,
    level: str | None = None,
    num_rows: int = 4096,
    num_held_out: int = 256,
    num_demonstrations: int = 4096,
    seed: int = 0,
) -> Task:
    """Words to be found.

    Args:
        level: easy, 16 words and 4 guesses, which the embedded model can learn: each word is
            trained and tested; or own, all 632 words, and none of the test is ever the secret of a
            training row; easy for the embedded model and own for others when not given.
        num_rows: training rows; words come again.
        num_held_out: rows of the test.
        num_demonstrations: conversations for the warm start.
        seed: of everything.

    Raises:
        ValueError: there is no such level, or so many held-out words would leave none to train on.
    """
    rng = random.Random(seed)
    easy = one_of("level", level or "own", ["own", "easy"]) == "easy"
    words, num_guesses = EASY if easy else (WORDS, NUM_GUESSES)
    if easy:
        train_words, held_out = words, rng.choices(words, k=num_held_out)
    elif 0 <= num_held_out < len(words):
        shuffled = rng.sample(words, len(words))
        train_words, held_out = shuffled[num_held_out:], shuffled[:num_held_out]
    else:
        raise ValueError(f"wordle: num_held_out must be below {len(words)}, got {num_held_out}.")
    prompt = WORDLE_PROMPT.format(num_guesses)
    common = {"prompt": prompt, "num_guesses": num_guesses}
    train = [{**common, "word": rng.choice(train_words)} for _ in range(num_rows)]
    shown = [rng.choice(train) for _ in range(num_demonstrations)]
    call = around_argument("guess", "word")
    # Of a short list a word is read as a whole, and so is what is marked in it.
    read = [text for word in words if easy for text in (word, " ".join(word.upper()))]
    marks = [" ".join(each) for each in product("GXY", repeat=NUM_LETTERS)] if easy else []
    return Task(
        name="wordle",
        environment=Wordle,
        train_rows=train,
        held_out_rows=[{**common, "word": word} for word in held_out],
        demonstrations=guesses_with_slips(
            *(Wordle, shown, words),
            secret="word",
            argument="word",
            compare=guess_feedback,
            choose=min,
            num_guesses=num_guesses,
            right_fraction=0.2,
            rng=rng,
        ),
        num_warm_steps=1200,
        entropy_coeff=0.0,
        max_turns=num_guesses + 1,
        max_new_tokens=40,
        isolated="[a-z]| ?[A-Z]",
        phrases=[prompt, *ROLES, "done", "found", *call, *read, *marks],
    )


# Nim against a player that is written here; two policies can play it, too.
#
# The demonstrations make any moves that are allowed.

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
        turns: list[Turn] = []
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
