"""Facts of a collector's engine, by which the trainer makes what it pushes to it."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self


class ServedEngine(NamedTuple):
    """What an engine of another process takes; read where the engine itself would be."""

    max_adapters: int = 0
    """Sets of adapters that it draws with at once; 0: it takes whole weights."""
    shared_names: frozenset[str] = frozenset()
    """Entries that engines of other agents draw with, too; see `TransformersEngine`."""
    adapter_settings: tuple[Any, ...] = ()
    """How the adapters of its model act."""
    by_agent: "Mapping[str, ServedEngine] | None" = None
    """The engines of agents; ``None`` of an engine of one policy."""

    @classmethod
    def of(cls, engine: Any) -> Self:
        """Those of an engine of this process.

        Args:
            engine: any.
        """
        agents = getattr(engine, "by_agent", None)
        return cls(
            getattr(engine, "max_adapters", 0),
            getattr(engine, "shared_names", frozenset()),
            getattr(engine, "adapter_settings", ()),
            agents and {name: cls.of(own) for name, own in agents.items()},
        )
