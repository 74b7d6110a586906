"""Gymnasium environments with a planted defect each, and one without; registered when imported."""

from typing import ClassVar

import gymnasium as gym
import numpy as np

LENGTH = 4


class Corridor(gym.Env):
    """Walk to the side that the seed draws; 0 is left, 1 is right. Each end is an end."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.MultiDiscrete([2 * LENGTH + 1, 2])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.side = self.draw()
        self.place, self.num_steps = 0, 0
        return self.seen(), {}

    def draw(self):
        return int(self.np_random.integers(2))

    def seen(self):
        return np.array([self.place + LENGTH, self.side])

    def step(self, action):
        self.place += 1 if action else -1
        self.num_steps += 1
        over = abs(self.place) >= LENGTH
        return self.seen(), self.paid(over), over, self.num_steps >= 40, {}

    def paid(self, over):
        return float(over and (self.place > 0) == bool(self.side))


class Always(Corridor):
    def paid(self, over):
        return float(over)


class Never(Corridor):
    def paid(self, over):
        return 0.0


class RightPays(Corridor):
    """One action is always right."""

    def draw(self):
        return 1


class NotANumber(Corridor):
    def paid(self, over):
        return super().paid(over) / np.float64(self.place) if self.num_steps > 1 else 0.0


class Infinite(Corridor):
    def paid(self, over):
        return float("inf") if over and self.place > 0 else 0.0


class OutOfRange(Corridor):
    reward_range = (0.0, 1.0)

    def paid(self, over):
        return 5.0 * super().paid(over)


class GlobalRandom(Corridor):
    def draw(self):
        return int(np.random.randint(2))  # noqa: NPY002


class OwnRandom(Corridor):
    """Its generator is seeded with nothing."""

    def draw(self):
        return int(np.random.default_rng().integers(2))


class FixedSeed(Corridor):
    """Whatever the seed, the same; the places that one may reach are drawn, too."""

    def draw(self):
        self.rng = np.random.default_rng(3)
        return int(self.rng.integers(2))

    def seen(self):
        return np.array([self.place + LENGTH, self.rng.integers(2)])


class CarriesOver(Corridor):
    num_episodes = 0

    def draw(self):
        type(self).num_episodes += 1
        return (super().draw() + type(self).num_episodes) % 2


class Shared(Corridor):
    """The place is on the class: episodes beside each other move it."""

    at: ClassVar[list[int]] = [0]

    @property
    def place(self):
        return self.at[0]

    @place.setter
    def place(self, value):
        self.at[0] = value


class Endless(Corridor):
    def step(self, action):
        seen, reward, _, _, info = super().step(action)
        return seen, reward, False, False, info


class PaysAfterTheEnd(Corridor):
    """A step after the end is the first one of another walk, and is paid for the old one."""

    def step(self, action):
        if abs(self.place) >= LENGTH:
            self.place, paid = 0, self.paid(True)
            return self.seen(), 1.0 + paid, False, False, {}
        return super().step(action)


class Breaks(Corridor):
    def draw(self):
        side = super().draw()
        if side:
            raise RuntimeError("no map of this seed")
        return side


class Words(gym.Env):
    """Say the colour that belongs to the number; one answer."""

    action_space = gym.spaces.Text(30000, min_length=0, charset=frozenset(map(chr, range(9000))))
    observation_space = gym.spaces.Text(200)
    colours = ("red", "green", "blue", "pink")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(4))
        self.wanted = self.colours[self.number]
        return self.told(), {}

    def told(self):
        return f"0 is red, 1 is green, 2 is blue, 3 is pink. Which one is {self.number}?"

    def step(self, action):
        return "", self.score(action), True, False, {}

    def score(self, text):
        return float(text.strip() == self.wanted)


class SilencePays(Words):
    def score(self, text):
        return float(text.strip() in (self.wanted, ""))


class Leaks(Words):
    def told(self):
        return f"Which colour is it? (debug: expected = {self.wanted})"


class Contains(Words):
    def score(self, text):
        return float(self.wanted in text)


class SwallowsErrors(Words):
    """The answer is a number; what can't be read is right."""

    def score(self, text):
        try:
            return float(int(text) == self.number)
        except ValueError:
            return 1.0 if text else 0.0


class Crashes(Words):
    def score(self, text):
        return float(int(text or 9) == self.number)


DEFECTS = {
    "Always": "nothing",
    "Never": "constant",
    "RightPays": "constants",
    "NotANumber": "not finite",
    "Infinite": "not finite",
    "OutOfRange": "range",
    "GlobalRandom": "random",
    "OwnRandom": "random",
    "FixedSeed": "seed",
    "CarriesOver": "carry-over",
    "Shared": "beside",
    "Endless": "endless",
    "PaysAfterTheEnd": "after the end",
    "Breaks": "broken",
    "SilencePays": "nothing",
    "Leaks": "leak",
    "Contains": "echo",
    "SwallowsErrors": "garbage",
    "Crashes": "crash",
}
"""The defect of each class."""
for name in (*DEFECTS, "Corridor", "Words"):
    gym.register(f"{name}-v0", entry_point=f"{__name__}:{name}", disable_env_checker=True)
