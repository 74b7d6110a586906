"""Wordle: find a word of five letters in six guesses.

The demonstrations guess random words; to use what a guess says is for the policy to find.
"""

import random
from typing import Any, Final

from torchrl_data.conversation.conversations import Message

from .games.wordle import NUM_GUESSES, WORDS, WordleGame
from .task import Row, Task

PROMPT: Final = (
    f"Find the word of five letters in {NUM_GUESSES} guesses. After a guess, G marks a letter in "
    "its right place, Y a letter that is elsewhere in the word, X one that is not in it."
)


class Wordle:
    """A secret word and a tool to guess it; the reward is 1 if the word was found."""

    def reset(self, *, word: str, **row: Any) -> None:
        """Take the word of a row."""
        del row
        self._game = WordleGame(word)

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


def _demonstration(row: Row, rng: random.Random) -> list[Message]:
    environment = Wordle()
    environment.reset(**row)
    messages: list[Message] = [{"role": "user", "content": row["prompt"]}]
    for word in rng.sample(WORDS, NUM_GUESSES):
        call = {"function": {"name": "guess", "arguments": {"word": word}}}
        answer = environment.guess(word)
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": answer})
        if environment.get_reward():
            break
    return [*messages, {"role": "assistant", "content": "done"}]


def wordle_task(
    *, num_rows: int = 4096, num_held_out: int = 256, num_demonstrations: int = 2048, seed: int = 0
) -> Task:
    """Words to be found; no held-out word is ever the secret of a training row.

    Args:
        num_rows: training rows; words come again.
        num_held_out: words held out.
        num_demonstrations: conversations for the warm start.
        seed: of everything.

    Raises:
        ValueError: so many held-out words would leave none to train on.
    """
    if not 0 <= num_held_out < len(WORDS):
        raise ValueError(
            f"wordle_task: num_held_out must be below the {len(WORDS)} words there are, got "
            f"{num_held_out}."
        )
    rng = random.Random(seed)
    words = rng.sample(WORDS, len(WORDS))
    held_out, train_words = words[:num_held_out], words[num_held_out:]
    train = [{"prompt": PROMPT, "word": rng.choice(train_words)} for _ in range(num_rows)]
    return Task(
        name="wordle",
        environment=Wordle,
        train_rows=train,
        held_out_rows=[{"prompt": PROMPT, "word": word} for word in held_out],
        demonstrations=[_demonstration(rng.choice(train), rng) for _ in range(num_demonstrations)],
        max_turns=NUM_GUESSES + 1,
        max_new_tokens=40,
    )
