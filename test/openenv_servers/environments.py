"""Environments of an OpenEnv server; imported by the server's interpreter only."""

import os
import time
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State

from torchrl_tasks.catch_game import CatchGame
from torchrl_tasks.wordle_game import WordleGame


class EchoAction(Action):
    """Say something to the environment, which says it again.

    Not only text can be said, but also how long to wait, or that the server dies.
    """

    message: str
    """What to say."""
    sleep_s: float = 0.0
    fail: bool = False
    kill_server: bool = False


class EchoObservation(Observation):
    echoed_message: str
    num_steps: int = 0
    was_reset: bool = False


class Echo(Environment):
    """Counts its steps, and knows whether it was reset."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(step_count=0)
        self._was_reset = False

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        if kwargs.get("fail"):
            raise ValueError("reset was told to fail")
        time.sleep(float(kwargs.get("sleep_s", 0)))
        self._state = State(step_count=0, episode_id=episode_id)
        self._was_reset = True
        return EchoObservation(echoed_message=f"ready, seed {seed}", was_reset=True)

    def step(self, action: EchoAction, timeout_s: float | None = None, **kwargs: Any) -> Any:
        if action.kill_server:
            os._exit(1)
        time.sleep(action.sleep_s)
        if action.fail:
            raise ValueError("step was told to fail")
        self._state.step_count += 1
        return EchoObservation(
            echoed_message=action.message,
            num_steps=self._state.step_count,
            was_reset=self._was_reset,
            reward=0.1 * len(action.message),
        )

    @property
    def state(self) -> State:
        return self._state


class AsyncEcho(Echo):
    """Sleeps without a thread, as a server of many sessions would."""

    async def step_async(
        self, action: EchoAction, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        import asyncio

        await asyncio.sleep(action.sleep_s)
        return self.step(action.model_copy(update={"sleep_s": 0.0}))


class CatchAction(Action):
    """Move the paddle; the ball falls one row."""

    action_id: int


class CatchObservation(Observation):
    info_state: list[float]
    legal_actions: list[int]


class Catch(Environment):
    """OpenSpiel's interface: the board is a list of numbers, the paddle's moves are 0, 1 and 2."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        self._game = CatchGame(seed or 0)
        return self._observation()

    def step(self, action: CatchAction, timeout_s: float | None = None, **kwargs: Any) -> Any:
        self._game.move(("left", "stay", "right")[action.action_id])
        return self._observation()

    def _observation(self) -> CatchObservation:
        board = self._game.board().replace("\n", "")
        return CatchObservation(
            info_state=[float(cell in "o=*") for cell in board],
            legal_actions=[0, 1, 2],
            done=self._game.is_over,
            reward=self._game.reward,
        )

    @property
    def state(self) -> State:
        return State(step_count=self._game.ball_row)


class TextArenaAction(Action):
    """Send a message to the game."""

    message: str


class TextArenaObservation(Observation):
    messages: list[dict[str, str]]


class Wordle(Environment):
    """TextArena's interface: each observation repeats all that was said before."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        self._game = WordleGame(kwargs.get("word"), seed=seed)
        self._text = "You have 6 guesses. Put each in brackets: [crane].\n"
        return self._observation()

    def step(self, action: TextArenaAction, timeout_s: float | None = None, **kwargs: Any) -> Any:
        word = action.message.strip("[] \n")
        try:
            marks = self._game.guess(word)
        except ValueError as error:
            self._text += f"You attempted an invalid move: {error}\n"
        else:
            self._text += f"{' '.join(word.upper())}\n{' '.join(marks)}\n"
        return self._observation()

    def _observation(self) -> TextArenaObservation:
        return TextArenaObservation(
            messages=[{"content": self._text}],
            done=self._game.is_over,
            reward=float(self._game.is_won),
        )

    @property
    def state(self) -> State:
        return State(step_count=len(self._game.guesses))
