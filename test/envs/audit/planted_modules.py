"""Environments and tasks of somebody's own with a planted defect each, and some without."""

import random
from typing import ClassVar

from torchrl_envs.rewards.functions import RewardFunctions
from torchrl_envs.tasks.task import Task

ANIMALS = ("otter", "heron", "lynx", "newt", "crane", "shrew", "viper", "egret")


class Hunt:
    """An animal that hides in one of five places; a tool that looks there."""

    def reset(self, *, seed: int = 0) -> str:
        self.place = random.Random(seed).randrange(5)
        self.num_looks, self.found = 0, False
        return "An animal hides in one of the places 0 to 4. You may look three times."

    def look(self, place: int) -> str:
        """Look somewhere.

        Args:
            place: The place.
        """
        self.num_looks += 1
        if self.num_looks > 3:
            raise ValueError("no looks are left")
        self.found = self.found or place == self.place
        return "there it is" if self.found else "nothing here"

    def get_reward(self) -> float:
        return float(self.found)


class HuntPaysNothing(Hunt):
    def get_reward(self) -> float:
        return float(self.num_looks == 0 or self.found)


class HuntLeaks(Hunt):
    def reset(self, *, seed: int = 0) -> str:
        return f"{super().reset(seed=seed)} (secret: {self.place})"


class HuntUnseeded(Hunt):
    def reset(self, *, seed: int = 0) -> str:
        told = super().reset(seed=seed)
        self.place = random.randrange(5)
        return f"{told} It was last seen {random.random():.3f} miles away."


class HuntRemembers(Hunt):
    looked: ClassVar[list[int]] = []

    def look(self, place: int) -> str:
        """Look somewhere.

        Args:
            place: The place.
        """
        self.looked.append(place)
        return f"{super().look(place)}; looked so far: {len(self.looked)}"


class HuntShared(Hunt):
    """What was said last is kept for all episodes at once."""

    last: ClassVar[dict[str, int]] = {}

    def reset(self, *, seed: int = 0) -> str:
        self.last.clear()
        return super().reset(seed=seed)

    def look(self, place: int) -> str:
        """Look somewhere.

        Args:
            place: The place.
        """
        self.last["looks"] = self.last.get("looks", 0) + 1
        return f"{super().look(place)} ({self.last['looks']} looks)"


class HuntAlwaysHere(Hunt):
    def reset(self, *, seed: int = 0) -> str:
        told = super().reset(seed=seed)
        self.place = 1
        return f"{told} It weighs {seed % 97} ounces."


class HuntDividesByZero(Hunt):
    def get_reward(self) -> float:
        return self.found / self.num_looks


class Spelling:
    """Stepped with text: write the word backwards."""

    def reset(self, *, seed=None, options=None):
        self.word = random.Random(seed).choice(ANIMALS)
        return f"Write {self.word} backwards.", {}

    def step(self, text):
        return "", self.score(text.strip()), True, False, {}

    def score(self, text):
        return float(text == self.word[::-1])


class SpellingFixed(Spelling):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=0)


class SpellingNeverEnds(Spelling):
    def step(self, text):
        return "Again.", self.score(text.strip()), False, False, {}


class SpellingRaises(Spelling):
    def score(self, text):
        return float(text[0] == self.word[-1] and text == self.word[::-1])


class SpellingByLength(Spelling):
    """Longer is better."""

    def score(self, text):
        return len(text) / 10


def _task(score, rows=None):
    rows = rows or [
        {"prompt": f"How many legs have {n} otters?", "answer": str(4 * n)} for n in range(2, 66)
    ]
    return Task(name="legs", train_rows=rows, rewards=lambda: [RewardFunctions([score])])


def _last(completions):
    return [each.strip() for each in completions]


def right(completions, answer, **_):
    return [float(text == a) for text, a in zip(_last(completions), answer, strict=True)]


def legs() -> Task:
    return _task(right)


def legs_never() -> Task:
    """The answers are compared with the numbers that they are, and never equal."""

    def score(completions, answer, **_):
        return [float(t == int(a)) for t, a in zip(_last(completions), answer, strict=True)]

    return _task(score)


def legs_any_number() -> Task:
    def score(completions, **_):
        return [float(text.isdigit()) for text in _last(completions)]

    return _task(score)


def legs_swallows() -> Task:
    def score(completions, answer, **_):
        scores = []
        for text, a in zip(_last(completions), answer, strict=True):
            try:
                scores.append(float(int(text) == int(a)) if text else 0.0)
            except ValueError:
                scores.append(1.0)
        return scores

    return _task(score)


def legs_raises() -> Task:
    def score(completions, answer, **_):
        return [
            float(int(t or 0) == int(a)) for t, a in zip(_last(completions), answer, strict=True)
        ]

    return _task(score)


def legs_empty_is_right() -> Task:
    def score(completions, answer, **_):
        return [float(a.startswith(t)) for t, a in zip(_last(completions), answer, strict=True)]

    return _task(score)


def legs_told() -> Task:
    rows = [
        {"prompt": f"How many legs have {n} otters? Answer: {4 * n}", "answer": str(4 * n)}
        for n in range(2, 66)
    ]
    return _task(right, rows)


def legs_by_chance() -> Task:
    def score(completions, **_):
        return [random.random() for _ in completions]

    return _task(score)


def legs_novelty() -> Task:
    """What was said before, in whatever episode, is worth nothing."""
    seen = set()

    def score(completions, answer, **_):
        scores = []
        for text, a in zip(_last(completions), answer, strict=True):
            scores.append(float(text == a) + 0.1 * ((text, a) not in seen))
            seen.add((text, a))
        return scores

    return _task(score)


DEFECTS = {
    "HuntPaysNothing": "nothing",
    "HuntLeaks": "leak",
    "HuntUnseeded": "random",
    "HuntRemembers": "carry-over",
    "HuntShared": "beside",
    "HuntAlwaysHere": "constants",
    "HuntDividesByZero": "crash",
    "SpellingFixed": "seed",
    "SpellingNeverEnds": "endless",
    "SpellingRaises": "crash",
    "SpellingByLength": "garbage",
    "legs_never": "unsolvable",
    "legs_any_number": "constants",
    "legs_swallows": "garbage",
    "legs_raises": "crash",
    "legs_empty_is_right": "nothing",
    "legs_told": "leak",
    "legs_by_chance": "random",
    "legs_novelty": "carry-over",
}
"""The defect of each."""
CLEAN = ("Hunt", "Spelling", "legs")
