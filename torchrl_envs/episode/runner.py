"""The one loop through an episode: begin, turns, finish, close.

:class:`EpisodeRunner` runs the events of many episodes at once; who drives it decides when.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from torchrl_data.conversation.conversations import Conversations, continues
from torchrl_data.stop_reasons import ENVIRONMENT_ERROR, UNSCORABLE_REASONS, kind_of
from torchrl_envs.concurrency.calls import ConcurrentCalls
from torchrl_envs.entries.rewards import Score
from torchrl_envs.tool_calls.results import error_line

from .driving import drive
from .episode import Episode
from .episode_transform import EpisodeStartError, EpisodeTransform, overrides
from .resources import Resources, close_left_open, close_resources
from .tool_source import ToolDispatcher

_EVENTS: Final = {
    "draw": ("draw",),
    "begin": ("begin",),
    "before_turn": ("before_turn", "before_turns"),
    "over": ("over",),
    "finish": ("finish", "finish_batch"),
}
"""Each event with the methods that take part in it."""
_log = logging.getLogger(__name__)


class EpisodeRunner:
    """Runs events of episodes, of all transforms in order.

    ``begin -> (before_turn -> the policy's turn -> after_turn)* -> finish -> close``

    Args:
        calls: runs what events wait for.
        dispatcher: answers turns that call tools; the first to see one.
    """

    def __init__(self, calls: ConcurrentCalls, dispatcher: ToolDispatcher) -> None:
        self.calls = calls
        self.dispatcher = dispatcher
        self._parts: dict[str, list[EpisodeTransform]] = {event: [] for event in _EVENTS}
        self._open: dict[int, Resources] = {}
        self._rows: dict[int, int] = {}
        weakref.finalize(self, close_left_open, self._open)

    def set_transforms(self, transforms: Sequence[EpisodeTransform]) -> None:
        """Who takes part, in order, without the dispatcher."""
        for number, transform in enumerate(transforms):
            transform.key = f"{type(transform).__name__}.{number}"
        self._parts = {
            event: [part for part in transforms if any(overrides(part, name) for name in forms)]
            for event, forms in _EVENTS.items()
        }

    def taking_part(self, event: str) -> Sequence[EpisodeTransform]:
        """The transforms that take part in an event, in order."""
        return self._parts[event]

    # Events -------------------------------------------------------------------------------------

    def draw(self, episodes: Sequence[Episode]) -> None:
        """Give new episodes their examples; one without data has a ``stop_reason`` afterwards."""
        self.hold(episodes)
        for transform in self._parts["draw"]:
            transform.draw(episodes)

    def hold(self, episodes: Sequence[Episode]) -> None:
        """Keep what new episodes will hold, until they are closed."""
        for episode in episodes:
            self._open[episode.id] = episode.resources
            self._rows[episode.id] = episode.row

    def begin(self, episodes: Sequence[Episode]) -> None:
        """Draw and start episodes; one that can't start gets a ``stop_reason``."""
        self.draw(episodes)
        for transform in self._parts["begin"]:
            running = transform.concerned([e for e in episodes if not e.stop_reason])
            errors = self._each(transform.begin, running)
            for number, error in errors.items():
                refuse_start(running[number], transform, error)
            # What it holds of others stays until its first step, which ends it.
            failed = [(running[n].resources, running[n].stop_reason) for n in errors]
            close_resources(failed, self.calls, owner=transform)
        for episode in episodes:
            if not episode.stop_reason:
                self.dispatcher.show_tools(episode)

    def before_turn(self, episodes: Sequence[Episode]) -> None:
        """Bound the next turn of episodes that go on; one may get a ``stop_reason`` instead."""
        for episode in episodes:
            episode.max_new_tokens = None
        for transform in self._parts["before_turn"]:
            running = [e for e in episodes if not e.stop_reason and not e.is_done]
            running = transform.concerned(running)
            if running:
                self._both(transform, "before_turn", "before_turns", running)

    def run(self, event: Callable[[Episode], Any], episodes: Sequence[Episode]) -> None:
        """Run an event, sync or ``async``, on each episode, then raise what the first raised."""
        errors = self._each(event, episodes)
        if errors:
            raise errors[min(errors)]

    def over(self, episodes: Sequence[Episode]) -> None:
        """Tell that episodes are over, each as soon as it is; to be told again says no more."""
        for transform in self._parts["over"]:
            for episode in transform.concerned(episodes):
                transform.over(episode)

    def finish(self, episodes: Sequence[Episode]) -> None:
        """Score episodes that are over; those that failed, or never began, get no reward."""
        self.over(episodes)
        for episode in episodes:
            episode.drop_unanswered()
            episode.score = Score()
            episode.metrics, episode.token_entries = {}, {}
        scored = [episode for episode in episodes if episode.is_scorable]
        for transform in self._parts["finish"]:
            concerned = transform.concerned(scored)
            if concerned:
                self._both(transform, "finish", "finish_batch", concerned)
        for episode in episodes:
            if not episode.is_scorable:
                is_failed = kind_of(episode.stop_reason) in UNSCORABLE_REASONS
                episode.score = Score(error=episode.stop_reason if is_failed else "")

    def close(self, episodes: Sequence[Episode]) -> None:
        """Give back what episodes hold, once; they are over, finished or given up."""
        held = [
            (resources, episode.stop_reason if episode.is_done else "")
            for episode in episodes
            if (resources := self._open.pop(episode.id, None)) is not None
        ]
        for episode in episodes:
            self._rows.pop(episode.id, None)
        if any(len(resources) for resources, _ in held):
            close_resources(held, self.calls)

    def close_rows(self, rows: Sequence[int] | None = None) -> None:
        """Give up the episodes that run in some rows of the environment's batch, or all."""
        wanted = None if rows is None else set(rows)
        ids = [i for i, row in self._rows.items() if wanted is None or row in wanted]
        held = [(self._open.pop(i), "") for i in ids]
        for i in ids:
            del self._rows[i]
        if any(len(resources) for resources, _ in held):
            close_resources(held, self.calls)

    def resources_in(self, row: int) -> Resources:
        """What the episode holds that runs in a row of the batch; nothing if none does."""
        found = [self._open[i] for i, own in self._rows.items() if own == row]
        return found[0] if found else Resources()

    def resources_of(self, episode: Episode) -> Resources:
        """What an episode holds; nothing if it is closed."""
        held = self._open.get(episode.id)
        return Resources() if held is None else held

    # How ----------------------------------------------------------------------------------------

    def _both(
        self, transform: EpisodeTransform, single: str, plural: str, episodes: Sequence[Episode]
    ) -> None:
        """An event of one transform, in its form for many and in that for one."""
        if overrides(transform, plural):
            getattr(transform, plural)(episodes)
        if overrides(transform, single):
            self.run(getattr(transform, single), episodes)

    def _each(
        self, event: Callable[[Episode], Any], episodes: Sequence[Episode]
    ) -> dict[int, Exception]:
        """Run an event of each episode; what was raised, by number."""
        errors: dict[int, Exception] = {}
        waiting: dict[int, Any] = {}
        for number, episode in enumerate(episodes):
            try:
                coroutine = event(episode)
            except Exception as error:
                errors[number] = error
            else:
                if coroutine is not None:
                    waiting[number] = coroutine
        if waiting:
            errors |= drive(waiting, self.calls)
        return errors


def take_over(episode: Episode, conversation: Conversations) -> None:
    """Go on with a conversation that somebody wrote; one that rewrites the past is a new row."""
    if continues(conversation, episode.conversation):
        episode.conversation = conversation
    else:
        episode.replace_conversation(conversation)


def refuse_start(episode: Episode, transform: EpisodeTransform, error: Exception) -> None:
    """An episode does not begin, because a transform raised: it gets its ``stop_reason``."""
    where = error.where if isinstance(error, EpisodeStartError) else type(transform).__name__
    cause = error.__cause__ if isinstance(error, EpisodeStartError) else error
    cause = error if cause is None else cause
    _log.warning("Row %d does not begin: %s failed", episode.row, where, exc_info=cause)
    episode.stop_reason = f"{ENVIRONMENT_ERROR}: {where}: {error_line(cause)}"
