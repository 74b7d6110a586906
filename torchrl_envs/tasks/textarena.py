"""Single-player games of the package textarena as environments: Sudoku, 2048, Mastermind, ...

Needs the package ``textarena``. Its games draw from Python's global random numbers; here each
session has a state of its own, whatever runs beside it. Some games need word lists that the
package would download; nothing is downloaded here.
"""

import contextlib
import io
import random
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Any, Final

from torchrl_data import import_package
from torchrl_envs.concurrency.own_random import OwnRandom
from torchrl_envs.tasks import PREFIX

from .demonstrations import played
from .task import Task

MAX_TURNS: Final = 40


@cache
def _registry() -> Mapping[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()):
        import_package("textarena", who="A task textarena/<game>", install="pip install textarena")
    return import_module("textarena.envs.registration").ENV_REGISTRY


@contextlib.contextmanager
def _no_downloads(game: str) -> Iterator[None]:
    """TextArena's word games download word lists when they are imported; here that is an error."""
    nltk: Any = import_module("nltk")
    download = nltk.download

    def refuse(names: Any = None, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        raise LookupError(
            f"TextArena's {game} needs the word lists {names!r} of nltk. Install them once with "
            f"nltk.download({names!r}); nothing is downloaded during training."
        )

    nltk.download = refuse
    try:
        yield
    finally:
        nltk.download = download


class TextArenaGame:
    """A game for one player as an environment; :func:`textarena_environment` says which.

    The reward is the game's own at its end, usually 1 for a game that is won and the fraction that
    is solved otherwise; 0 for a game that did not end.
    """

    game: str

    def reset(self, *, seed: int, **row: Any) -> str:
        """Begin a game.

        Args:
            seed: the group's seed, or the row's ``game_seed`` where the data has one.
            **row: other columns.
        """
        seed = seed if row.get("game_seed") is None else row["game_seed"]
        self._is_over, self._reward = False, 0.0
        self._random = OwnRandom(seed)
        with self._random(), _no_downloads(self.game), contextlib.redirect_stdout(io.StringIO()):
            self._env = import_module("textarena").make(self.game)
            try:
                self._env.reset(num_players=1, seed=seed)
            except (AssertionError, ValueError) as error:
                message = f"TextArena's {self.game} can't be played alone: {error}"
                raise ValueError(message) from error
            # The games' prompts and boards pile up in the wrapper's text: kept to show what is new.
            self._shown = str(self._env.get_observation()[1])
        return self._shown

    def act(self, action: str) -> str:
        """Make a move in the game.

        Args:
            action: The move, in the notation that the game asks for.

        Returns:
            What the game says.
        """
        if self._is_over:
            raise ValueError("the game is over")
        with self._random(), contextlib.redirect_stdout(io.StringIO()):
            done, _ = self._env.step(action)
            self._is_over = bool(done)
            if not done:
                shown = str(self._env.get_observation()[1])
                new = shown.removeprefix(self._shown)
                self._shown = shown
                return new.strip()
            rewards, info = self._env.close()
        self._reward = float(rewards[0]) if rewards else 0.0
        reason = info[0].get("reason") if info else None
        return f"The game is over. {reason or ''}".strip()

    def get_reward(self) -> float:
        """The game's own reward."""
        return self._reward


def textarena_environment(game: str) -> type[TextArenaGame]:
    """An environment class for one game."""
    if game not in _registry():
        close = get_close_matches(game, _registry(), n=3) or sorted(_registry())
        raise ValueError(f"TextArena has no game {game!r}; it has {', '.join(close)}, ...")
    environment = type(game.partition("-")[0], (TextArenaGame,), {"game": game})
    environment().reset(seed=0)
    return environment


def textarena_task(
    game: str,
    *,
    num_rows: int = 4096,
    num_held_out: int = 256,
    num_demonstrations: int = 512,
    seed: int = 0,
) -> Task:
    """A game as a task.

    Args:
        game: its name.
        num_rows: training rows, each another game.
        num_held_out: rows of the test.
        num_demonstrations: conversations that show how to call the tool, with no skill.
        seed: of everything.

    Raises:
        ValueError: there is no such game, or it is not for one player.
        LookupError: the game needs word lists that are not installed.
    """
    environment = textarena_environment(game)
    rng = random.Random(seed)
    prompt = f"Play {game.partition('-')[0]}. Make each move with the tool act."

    train, held_out = (
        [{"prompt": prompt, "game_seed": rng.randrange(2**31)} for _ in range(count)]
        for count in (num_rows, num_held_out)
    )
    opening = f"{prompt}\n\n{environment().reset(seed=train[0]['game_seed'])}"
    demonstrations = []
    for _ in range(num_demonstrations):
        numbers = " ".join(str(rng.randint(0, 9)) for _ in range(rng.randint(1, 3)))
        demonstrations.append(played(opening, [("act", {"action": f"[{numbers}]"}, "ok")]))
    return Task(
        name=f"{PREFIX}{game}",
        environment=environment,
        train_rows=train,
        held_out_rows=held_out,
        demonstrations=demonstrations,
        max_turns=MAX_TURNS,
        max_new_tokens=32,
    )
