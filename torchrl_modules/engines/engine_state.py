"""Whether an engine in another process may serve: a state machine without any engine in it."""

from dataclasses import dataclass, replace
from enum import Enum


class EngineState(Enum):
    """What is known of an engine."""

    DEAD = "dead"
    """There is none, or it is gone or stuck."""
    STALE = "stale"
    """It runs, but has not acknowledged the weights that are wanted."""
    HEALTHY = "healthy"
    """It runs, and has acknowledged them."""


@dataclass(frozen=True)
class Supervision:
    """What is known of the present engine and the weights that are wanted; never changed in place.

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

    def started(self) -> "Supervision":
        """A new engine runs.

        Raises:
            RuntimeError: the earlier one is not known to be dead.
        """
        if self.state is not EngineState.DEAD:
            raise RuntimeError(
                f"Supervision: engine {self.incarnation} is {self.state.value}; another one is "
                "started only after it died."
            )
        return replace(self, state=EngineState.STALE, incarnation=self.incarnation + 1, served=None)

    def acknowledged(self, incarnation: int, version: int) -> "Supervision":
        """An engine says which version it serves; a newer one is wanted from now on."""
        if incarnation != self.incarnation or self.state is EngineState.DEAD:
            return self
        fresh = version >= self.wanted
        return replace(
            self,
            state=EngineState.HEALTHY if fresh else EngineState.STALE,
            served=version,
            wanted=max(version, self.wanted),
        )

    def died(self, incarnation: int) -> "Supervision":
        """An engine is gone or stuck."""
        if incarnation != self.incarnation:
            return self
        return replace(self, state=EngineState.DEAD, served=None)
