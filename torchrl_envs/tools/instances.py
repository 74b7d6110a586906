"""Instance of a user's environment for each episode: made, reset, and always closed."""

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from torchrl_envs.concurrency.calls import accepted_arguments, run_call
from torchrl_envs.concurrency.outcome import Call, Outcome
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeStartError

Factory = Callable[[], Any]
_log = logging.getLogger(__name__)


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

    def reset(self, columns: Mapping[str, Any]) -> Any:
        """Reset it with what it asks for; nothing where it could not be made."""
        if self.environment is None:
            return None
        reset = self.environment.reset
        return reset(**accepted_arguments(reset, columns, drop="seed"))

    async def reset_async(self, columns: Mapping[str, Any]) -> Any:
        """The same for an environment whose ``reset`` is ``async``."""
        waiting = self.reset(columns)
        return None if waiting is None else await waiting

    def closing(self, reason: str) -> Call | None:
        """Give it up: return how it is closed, if it has been made and can be."""
        del reason
        with self._lock:
            self._abandoned = True
        return getattr(self.environment, "close", None)


async def start_instance(
    owner: Any,  # an EpisodeTransform with timeout_s and start_timeout_s
    episode: Episode,
    instance: Instance,
    cls: type,
    columns: Mapping[str, Any],
) -> Any:
    """Make and reset the environment of an episode, which holds it from then on."""
    closing: Any = {"closing": instance.closing, "timeout_s": owner.timeout_s}
    episode.resources.add(owner, instance, name=cls.__name__, **closing)
    is_async = inspect.iscoroutinefunction(getattr(cls, "reset", None))
    reset = functools.partial(instance.reset_async if is_async else instance.reset, columns)
    outcomes = await owner.call(instance.make, reset, timeout_s=owner.start_timeout_s)
    for outcome, what in zip(outcomes, ("constructor", "reset"), strict=True):
        if outcome.error is not None:
            raise EpisodeStartError(f"{instance.name}: {what}") from outcome.error
    return outcomes[-1].value


def log_close_error(closed: Any, outcome: Outcome) -> None:
    """Log the error of closing an environment, if there was one."""
    if outcome.error is not None:
        _log.warning("%s.close failed", type(closed).__name__, exc_info=outcome.error)
