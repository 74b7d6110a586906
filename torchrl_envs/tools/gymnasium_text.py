"""Gymnasium environments of numbers as environments of text, so that a language model acts in them.

``task.factory=torchrl_envs.tools.gymnasium_text:make 'task.arguments={id: Blackjack-v1}'``.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torchrl_data import import_package

_NUMBER: Final = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_NUM_CHOICES: Final = 64
_DIGITS: Final = 4


class SpacesAsText:
    """An environment whose observations are told in numbers, and whose actions are read from text.

    Gymnasium's protocol: ``reset(seed=, options=) -> (text, info)`` and ``step(text) -> (text,
    reward, terminated, truncated, info)``. An action of ``Discrete`` is the first whole number of a
    text; one of ``MultiDiscrete`` or ``Box`` is as many numbers as it has; one of ``Text`` is the
    text. A text that names no action is one drawn from the seed of the reset: saying nothing is
    worth what acting by chance is, and episodes go on to their own end.

    Args:
        environment: a ``gymnasium.Env``.

    Raises:
        TypeError: its actions are of another space.
    """

    def __init__(self, environment: Any) -> None:
        self.env = environment
        space = environment.action_space
        self._kind = type(space).__name__
        if self._kind not in ("Discrete", "MultiDiscrete", "Box", "Text"):
            takes = "actions of Discrete, MultiDiscrete, Box and Text can be written as text"
            raise TypeError(f"SpacesAsText: {takes}, got {space}. Wrap the environment.")
        first = int(getattr(space, "start", 0)) if self._kind == "Discrete" else 0
        count = int(space.n) if self._kind == "Discrete" else 0
        self.choices: Sequence[str] = [
            str(first + each) for each in range(min(count, _NUM_CHOICES))
        ]
        """Actions of ``Discrete``; empty for other spaces."""
        self._asked = {
            "Discrete": f"Say a number from {first} to {first + count - 1}.",
            "Text": "Say what to do.",
        }.get(self._kind, f"Say {_size(space)} numbers, of {space}.")

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        """Begin an episode; returns what is seen, with how to act, and ``info``."""
        if seed is not None:
            self.env.action_space.seed(seed)
        observation, info = self.env.reset(seed=seed, options=None if not options else {**options})
        return f"{_told(observation)}\n{self._asked}", info

    def step(self, text: str) -> tuple[str, float, bool, bool, Any]:
        """Act with a text."""
        action, said = self._action(text), ""
        if action is None:
            action = self.env.action_space.sample()
            said = f"\nThat was no action, and {_told(action)} was taken. {self._asked}"
        observation, reward, terminated, truncated, info = self.env.step(action)
        return _told(observation) + said, float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _action(self, text: str) -> Any:
        """The action that a text names; ``None`` where it names none."""
        space, numbers = self.env.action_space, _NUMBER.findall(text[:1000])
        if self._kind == "Text":
            return text if space.contains(text) else None
        if self._kind == "Discrete":
            return int(numbers[0]) if numbers and numbers[0] in self.choices else None
        if len(numbers) != _size(space):
            return None
        values = [float(number) for number in numbers]
        if self._kind == "MultiDiscrete" and not all(value.is_integer() for value in values):
            return None
        numpy = import_package("numpy", who="SpacesAsText", install="pip install numpy")
        with numpy.errstate(invalid="ignore", over="ignore"):  # what is too large is no action
            array = numpy.array(values).astype(space.dtype).reshape(space.shape)
        return array if space.contains(array) else None


def make(id: str, **arguments: Any) -> Any:
    """A registered environment of Gymnasium, of text.

    Args:
        id: its name, ``"Blackjack-v1"``; ``"module:name"`` imports the module first.
        **arguments: of ``gymnasium.make``.

    Returns:
        The environment as it is where it speaks text already, else with :class:`SpacesAsText`.

    Raises:
        ValueError: Gymnasium has no such environment, or can't make it.
        ImportError: Gymnasium is not installed.
    """
    gymnasium = import_package("gymnasium", who="An environment", install="pip install gymnasium")
    try:
        environment = gymnasium.make(id, **arguments)
    except gymnasium.error.Error as error:
        raise ValueError(f"Gymnasium can't make {id!r}: {error}") from error
    spaces = environment.action_space, environment.observation_space
    is_text = all(type(space).__name__ == "Text" for space in spaces)
    return environment if is_text else SpacesAsText(environment)


def _size(space: Any) -> int:
    size = 1
    for length in space.shape:
        size *= int(length)
    return size


def _told(value: Any) -> str:
    """An observation as text: numbers rounded, names and places kept."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_told(each)}" for name, each in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(_told(each) for each in value)
    if hasattr(value, "tolist"):  # an array, or a number of NumPy
        value = value.tolist()
        return _told(value) if isinstance(value, list) else _told_number(value)
    return _told_number(value)


def _told_number(value: Any) -> str:
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) else str(value)
