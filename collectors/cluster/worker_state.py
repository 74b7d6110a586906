"""What the collectors of a collection remember, each for itself: transforms and random numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from collectors.base import remembering
from collectors.resume.random_state import random_state, set_random_state
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.episode.episode_env import EpisodeEnv

from .ledger_service import WHO

WorkerState = Mapping[str, Any]


def state_of(env: EpisodeEnv) -> dict[str, Any]:
    """What transforms of an environment and this process's random numbers are at."""
    # The data are drawn elsewhere.
    return {
        "transforms": [
            {"type": type(part).__name__, "state": part.get_extra_state()}
            for part in remembering(env)
            if not isinstance(part, DataLoadingPrimer)
        ],
        "random": random_state(),
    }


def load_state(
    env: EpisodeEnv, saved: Sequence[WorkerState | None], *, index: int, num_collectors: int
) -> None:
    """Go on where a collector of its number was.

    Where there were more or fewer of them, a transform with ``deal_extra_states(states, count)``
    says what becomes of what they remember; random numbers go on in those that were there.

    Args:
        env: of this collector.
        saved: what :func:`state_of` gave, by collector; ``None`` of one that did not serve then.
        index: the number of this collector.
        num_collectors: how many there are.

    Raises:
        ValueError: the environment has other transforms; or there were more or fewer collectors,
            and a transform does not say what becomes of its states.
    """
    known = [state for state in saved if state is not None]
    parts = [part for part in remembering(env) if not isinstance(part, DataLoadingPrimer)]
    here = [type(part).__name__ for part in parts]
    for state in known:
        there = [each["type"] for each in state["transforms"]]
        if there != here:
            raise ValueError(
                f"{WHO}: the saved collectors' environments had the transforms {there}, these have "
                f"{here}."
            )
    own = saved[index] if index < len(saved) else None
    for number, part in enumerate(parts):
        states = [state["transforms"][number]["state"] for state in known]
        if len(saved) != num_collectors and states:
            part.set_extra_state(_dealt(part, states, len(saved), num_collectors)[index])
        elif own is not None:
            part.set_extra_state(own["transforms"][number]["state"])
    if own is not None:
        set_random_state(own["random"])


def _dealt(part: Any, states: Sequence[Any], num_saved: int, count: int) -> Sequence[Any]:
    """The states of a transform in another number of collectors."""
    if not hasattr(part, "deal_extra_states"):
        raise ValueError(
            f"{WHO}: the saved run had num_collectors={num_saved}, this one has {count}, and what "
            f"{type(part).__name__} remembers belongs to one of them. Take as many as there were, "
            "or give it deal_extra_states(states, count)."
        )
    return part.deal_extra_states(states, count)
