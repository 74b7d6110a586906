"""Cap of the groups that an engine has room for, by how full its cache is."""

import asyncio
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torchrl_data.checks import check_counts, check_numbers
from torchrl_modules.engines.engine import EngineDied, EngineLoad
from torchrl_modules.engines.engine_load import tells_load

from .group_runner import GroupRunner

_MAX_PATIENCE: Final = 32


@dataclass(frozen=True)
class LoadCap:
    """Cap of the groups that run at once: as many as the engine's cache has room for.

    A vLLM engine whose cache is full puts off requests and reads them again later; the fuller it
    is, the more often. So while more than ``trim_above`` of the cache is in use, or requests are
    put off, fewer groups may run, and the youngest are given back: they have the least to lose, and
    run again later, with the same seeds. While less than ``grow_below`` is in use and all groups
    run that may, more may; but not before as many have ended since the last change as may run,
    because a response needs its most room at its end, and twice as many whenever that proves too
    many again.

    It is for requests that are dear to read again: long ones, on engines that are far too small for
    all of them. Short ones are drawn faster the more there are, put off or not.

    Args:
        max_inflight_tasks: most episodes that run at once, however empty the cache; -1: all that
            the ledger admits.
        grow_below: fraction of the cache in use.
        trim_above: fraction of the cache in use; fewer groups, in proportion.
        grow: by what the number of groups is multiplied; at least one is added.
        cut: by what the number of groups is multiplied when a request was put off.
        interval_s: seconds between two looks.

    Raises:
        ValueError: a number is out of its range, or ``grow_below`` above ``trim_above``.
    """

    max_inflight_tasks: int = -1
    grow_below: float = 0.6
    trim_above: float = 0.8
    grow: float = 1.25
    cut: float = 0.8
    interval_s: float = 0.25

    def __post_init__(self) -> None:
        who = "LoadCap"
        if self.max_inflight_tasks != -1:
            check_counts(who, max_inflight_tasks=self.max_inflight_tasks)
        check_numbers(
            who, "(0, 1)", grow_below=self.grow_below, trim_above=self.trim_above, cut=self.cut
        )
        check_numbers(who, "(0, inf)", interval_s=self.interval_s)
        check_numbers(who, "(1, inf)", grow=self.grow)
        if self.grow_below > self.trim_above:
            raise ValueError(
                f"LoadCap: grow_below={self.grow_below} is above trim_above={self.trim_above}, "
                "so that groups would be begun and given back in turns."
            )


class GroupCap:
    """The number of groups that may run, from one look at the engine to the next.

    Args:
        rules: how it follows the load.
        most: it is never above; at first it is that.
        engine: tells its load to :meth:`follow`.
    """

    def __init__(self, rules: LoadCap, most: int, engine: Any = None) -> None:
        self._rules = rules
        self._most = most
        self._engine = engine
        self.num_groups = most
        """So many may run: from 1 to ``most``."""
        self.load = EngineLoad(0.0, 0)
        """At the last look."""
        self._version: Hashable = None
        self._is_settled = False
        self._ended_before = 0
        """Groups that had ended at the last change."""
        self._has_grown = False
        """At the last change."""
        self._patience = 1
        """How many times as many groups as may run have to end before more may."""

    def observe(self, load: EngineLoad, num_running: int, num_ended: int, version: Hashable) -> int:
        """Look at the engine.

        Args:
            load: of the engine.
            num_running: groups whose episodes run now.
            num_ended: groups whose episodes have run to their ends, ever.
            version: of the engine's weights. After an update requests are read again, too, which
                is no sign of too many: in the interval of an update and in the next, none counts.

        Returns:
            How many groups may run from now on.
        """
        rules, before = self._rules, self.num_groups
        now = min(before, max(1, num_running))
        was_settled, self._is_settled = self._is_settled, version == self._version
        counts = was_settled and self._is_settled
        if counts and load.num_preemptions > self.load.num_preemptions:
            self.num_groups = math.floor(rules.cut * now)
        elif load.cache_use > rules.trim_above:
            self.num_groups = math.floor(now * rules.trim_above / load.cache_use)
        elif (
            load.cache_use < rules.grow_below
            and num_running >= before
            and num_ended - self._ended_before >= before * self._patience
        ):
            self.num_groups = max(before + 1, math.floor(rules.grow * before))
        self.num_groups = min(max(1, self.num_groups), self._most)
        if self.num_groups != before:
            self._ended_before = num_ended
            # Whether growing has led to too many, or could be followed by more of it.
            has_grown = self.num_groups > before
            if self._has_grown:
                patience = self._patience // 2 if has_grown else 2 * self._patience
                self._patience = min(max(1, patience), _MAX_PATIENCE)
            self._has_grown = has_grown
        self.load, self._version = load, version
        return self.num_groups

    async def follow(self, runner: GroupRunner) -> None:
        """Let as many groups run as the engine has room for, until it is cancelled."""
        while True:
            runner.limit_groups(self.num_groups)
            await asyncio.sleep(self._rules.interval_s)
            try:
                load = await self._engine.measure_load()
            except (EngineDied, ConnectionError):
                continue  # Its requests hear of it.
            self.observe(load, len(runner.running), runner.num_ended, self._engine.version)

    def metrics(self) -> dict[str, float]:
        """Return how it is now."""
        return {
            "collect/max_groups": float(self.num_groups),
            "collect/cache_use": self.load.cache_use,
            "collect/preemptions": float(self.load.num_preemptions),
        }


def cap_of(
    engine: Any, most: int, max_inflight_tasks: int | LoadCap, *, who: str
) -> GroupCap | None:
    """Return what follows the load of an engine; ``None`` where that is not asked for.

    Args:
        engine: draws.
        most: groups that run at once.
        max_inflight_tasks: a number is kept whatever the load.
        who: asks.

    Raises:
        ValueError: the engine can't tell its load.
    """
    if not isinstance(max_inflight_tasks, LoadCap):
        return None
    if not tells_load(engine):
        raise ValueError(
            f"{who}: {type(engine).__name__} does not tell how full its cache is, so LoadCap can't "
            "follow it (AsyncVLLMEngine and vLLM servers do). Give max_inflight_tasks a number."
        )
    return GroupCap(max_inflight_tasks, most, engine)


def together(loads: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return what caps of several engines tell, as one; empty where there is none.

    Args:
        loads: of each, see :meth:`GroupCap.metrics`.
    """
    reduced = {"max_groups": sum, "cache_use": max, "preemptions": sum}
    names = [(f"collect/{name}", of) for name, of in reduced.items() if loads]
    return {name: float(of([load[name] for load in loads])) for name, of in names}
