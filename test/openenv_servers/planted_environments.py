"""Environments of an OpenEnv server with a planted defect each, and one without."""

import random
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State


class ColourAction(Action):
    """Say the colour."""

    colour: str


class ColourObservation(Observation):
    text: str


class Colour(Environment):
    """The colour of a number, in one answer."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    colours = ("red", "green", "blue", "pink")

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        self.number = self.draw(seed or 0)
        self.wanted = self.colours[self.number]
        return ColourObservation(text=self.told())

    def draw(self, seed: int) -> int:
        return random.Random(seed).randrange(4)

    def told(self) -> str:
        return f"0 is red, 1 is green, 2 is blue, 3 is pink. Which one is {self.number}?"

    def step(self, action: ColourAction, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return ColourObservation(
            text="That was it.", done=True, reward=self.score(action.colour.strip())
        )

    def score(self, text: str) -> float:
        return float(text == self.wanted)

    @property
    def state(self) -> State:
        return State(step_count=0)


class SilencePays(Colour):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        told = super().reset(seed)
        return told.model_copy(update={"reward": 1.0})


class Leaks(Colour):
    def told(self) -> str:
        return f"Which colour is it? expected: {self.wanted}"


class Unseeded(Colour):
    def draw(self, seed: int) -> int:
        return random.randrange(4)


class Fixed(Colour):
    def draw(self, seed: int) -> int:
        return random.Random(0).randrange(4)


class Contains(Colour):
    def score(self, text: str) -> float:
        return float(self.wanted in text)


class Counts(Colour):
    """A counter of the server is in what is told."""

    num_episodes = 0

    def told(self) -> str:
        Counts.num_episodes += 1
        return f"{super().told()} (game {Counts.num_episodes})"


class Swallows(Colour):
    def score(self, text: str) -> float:
        try:
            return float(int(text) == self.number)
        except ValueError:
            return 1.0


class AlwaysRed(Colour):
    def told(self) -> str:
        return f"Which colour has number {self.number}?"

    def score(self, text: str) -> float:
        return float(text == "yes")


PLANTED = (SilencePays, Leaks, Unseeded, Fixed, Contains, Counts, Swallows, AlwaysRed, Colour)
