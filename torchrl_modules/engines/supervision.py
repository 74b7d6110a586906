"""State machine that says whether an engine may serve, without any engine in it."""

from dataclasses import dataclass, replace
from enum import Enum


class EngineState(Enum):
    """The state of an engine."""

    DEAD = "dead"
    """There is none, or it is gone or stuck."""
    RESTARTING = "restarting"
    """Another one is being started, or looked for."""
    STALE = "stale"
    """It runs, but has not acknowledged the weights that are wanted."""
    SUSPECT = "suspect"
    """It has acknowledged them, but did not answer as it should; nothing new is asked of it."""
    HEALTHY = "healthy"
    """It runs, and has acknowledged them."""


_RUNNING = (EngineState.STALE, EngineState.SUSPECT, EngineState.HEALTHY)


@dataclass(frozen=True)
class Supervision:
    """The present engine and the weights that are wanted; never changed in place.

    An engine that comes back is stale, whatever it says it has: only an acknowledgement by the
    present incarnation makes it healthy. News of earlier incarnations change nothing.
    """

    state: EngineState = EngineState.DEAD
    incarnation: int = 0
    """How many engines have been started."""
    served: int | None = None
    """The version that the present one acknowledged."""
    wanted: int = 0
    """The version that may be served; an older one may not."""

    @property
    def may_serve(self) -> bool:
        """Tokens drawn now are of the weights that are wanted."""
        return self.state is EngineState.HEALTHY

    def restarting(self) -> "Supervision":
        """Another engine is being started.

        Raises:
            RuntimeError: the earlier one is not known to be dead.
        """
        self._check_next(EngineState.DEAD)
        return replace(self, state=EngineState.RESTARTING)

    def started(self) -> "Supervision":
        """A new engine runs.

        Raises:
            RuntimeError: the earlier one is not known to be dead.
        """
        self._check_next(EngineState.DEAD, EngineState.RESTARTING)
        return replace(self, state=EngineState.STALE, incarnation=self.incarnation + 1, served=None)

    def _check_next(self, *states: EngineState) -> None:
        if self.state not in states:
            raise RuntimeError(
                f"Supervision: engine {self.incarnation} is {self.state.value}; another one is "
                "started only after it died."
            )

    def acknowledged(self, incarnation: int, version: int) -> "Supervision":
        """An engine says which version it serves; a newer one is wanted from now on."""
        if incarnation != self.incarnation or self.state not in _RUNNING:
            return self
        fresh = version >= self.wanted
        return replace(
            self,
            state=EngineState.HEALTHY if fresh else EngineState.STALE,
            served=version,
            wanted=max(version, self.wanted),
        )

    def wants(self, version: int) -> "Supervision":
        """A newer version is wanted from now on; who serves another one is stale."""
        wanted = max(version, self.wanted)
        is_stale = self.state in _RUNNING and self.served != wanted
        return replace(self, state=EngineState.STALE if is_stale else self.state, wanted=wanted)

    def suspected(self, incarnation: int) -> "Supervision":
        """An engine that serves did not answer as it should."""
        if incarnation != self.incarnation or self.state is not EngineState.HEALTHY:
            return self
        return replace(self, state=EngineState.SUSPECT)

    def cleared(self, incarnation: int) -> "Supervision":
        """An engine that was suspected answers."""
        if incarnation != self.incarnation or self.state is not EngineState.SUSPECT:
            return self
        return replace(self, state=EngineState.HEALTHY)

    def died(self, incarnation: int) -> "Supervision":
        """An engine is gone or stuck, or another one did not start."""
        if incarnation != self.incarnation:
            return self
        return replace(self, state=EngineState.DEAD, served=None)
