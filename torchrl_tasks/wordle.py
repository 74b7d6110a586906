"""Wordle as a task.

The demonstrations guess the first word that all marks so far allow, or any: the skill with slips.
"""

import random
from itertools import product
from typing import Any, Final

from torchrl_data.checks import one_of
from torchrl_envs.tasks.call_texts import ROLES, around_argument
from torchrl_envs.tasks.demonstrations import guesses_with_slips
from torchrl_envs.tasks.task import Task

from .wordle_game import NUM_GUESSES, NUM_LETTERS, WORDS, WordleGame, guess_feedback

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
