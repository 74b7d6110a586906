"""One user's environment per episode: made, reset, and always closed."""

import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from torchrl_envs.concurrency.calls import Call, accepted_arguments, run_call
from torchrl_envs.concurrency.cleanup import log_close_error
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeStartError, EpisodeTransform

Factory = Callable[[], Any]


class Instance:
    """The environment of one episode; it appears when its constructor returns."""

    def __init__(self, name: str, factory: Factory) -> None:
        self.name = name
        self._factory = factory
        self._lock = threading.Lock()
        self._abandoned = False
        self.environment: Any = None

    def make(self) -> None:
        """Call the constructor; what comes after :meth:`closing` was asked closes itself."""
        environment = self._factory()
        with self._lock:
            self.environment = environment
            too_late = self._abandoned
        if too_late and hasattr(environment, "close"):
            log_close_error(environment, run_call(environment.close))

    def reset(self, cls: type, columns: Mapping[str, Any]) -> Call:
        """A call of ``reset``, sync or ``async`` as the class has it."""
        if inspect.iscoroutinefunction(getattr(cls, "reset", None)):
            return functools.partial(self._reset_async, columns)
        return functools.partial(self._reset, columns)

    def _arguments(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        return accepted_arguments(self.environment.reset, columns, drop="seed")

    def _reset(self, columns: Mapping[str, Any]) -> Any:
        if self.environment is None:
            return None  # it could not be made, which is the episode's error
        return self.environment.reset(**self._arguments(columns))

    async def _reset_async(self, columns: Mapping[str, Any]) -> Any:
        if self.environment is None:
            return None
        result: Coroutine[Any, Any, Any] = self.environment.reset(**self._arguments(columns))
        return await result

    def closing(self, reason: str) -> Call | None:
        """Nobody needs it any more: how it is closed, if it has been made and can be."""
        del reason
        with self._lock:
            self._abandoned = True
        return getattr(self.environment, "close", None)

    def __repr__(self) -> str:
        return f"Instance({self.name!r})"


async def start_instance(
    owner: EpisodeTransform,
    episode: Episode,
    instance: Instance,
    cls: type,
    columns: Mapping[str, Any],
    *,
    start_timeout_s: float,
    timeout_s: float,
) -> Any:
    """Make and reset the environment of an episode, which holds it from then on."""
    episode.resources.add(
        owner, instance, closing=instance.closing, timeout_s=timeout_s, name=cls.__name__
    )
    made, reset = await owner.call(
        instance.make, instance.reset(cls, columns), timeout_s=start_timeout_s
    )
    if made.error is not None:
        raise EpisodeStartError(f"{instance.name}: constructor") from made.error
    if reset.error is not None:
        raise EpisodeStartError(f"{instance.name}: reset") from reset.error
    return reset.value
