"""The protocol that a kind of task implements to be audited, and an episode as it was played."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple, Protocol


class AgentView(NamedTuple):
    """Everything that a scripted agent reads before it answers."""

    opening: str
    """The prompt, and what the reset said."""
    observation: str
    """What was said last."""
    turn: int
    """Number of answers before this one."""
    choices: Sequence[str]
    """Answers that are known to be possible; empty where that is not known."""
    tools: Sequence[Mapping[str, Any]]
    """JSON schemas of tools that can be called."""
    row: Mapping[str, Any]
    """The row of the data, which a solution may read and no other agent does."""


class AuditedEpisode(Protocol):
    """A running episode."""

    opening: str
    choices: Sequence[str]
    tools: Sequence[Mapping[str, Any]]
    row: Mapping[str, Any]

    @property
    def is_over(self) -> bool:
        """Return whether it has ended."""
        ...

    @property
    def has_ended(self) -> bool:
        """Return whether it ended by itself, and not at a limit of turns."""
        ...

    @property
    def error(self) -> str:
        """The error that broke it off, in words; empty where none did."""
        ...

    @property
    def rewards(self) -> Sequence[float]:
        """Reward of each step, where the kind has such."""
        ...

    def answer(self, text: str) -> str:
        """Answer, and return what is said to that."""
        ...

    def reward(self) -> float | None:
        """Reward of the episode so far; ``None`` where it can't be scored."""
        ...

    def after_end(self, text: str) -> tuple[float, bool] | None:
        """Answer once more after the end: reward and end; ``None`` where that is refused."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


Say = Callable[[AgentView, Random], str | None]
"""An agent: its next answer, or ``None`` where it has no more to say."""


@dataclass
class Played:
    """An episode that was played."""

    seed: int
    opening: str
    answers: list[str] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    reward: float | None = None
    error: str = ""
    has_ended: bool = False
    times_s: dict[str, list[float]] = field(default_factory=dict)

    def differs_from(self, other: "Played") -> str:
        """Return what is different, in words; empty where nothing is."""
        if self.opening != other.opening:
            return f"it began with {self.opening!r:.120}, and with {other.opening!r:.120}"
        for turn, pair in enumerate(zip(self.observations, other.observations, strict=False)):
            if pair[0] != pair[1]:
                return f"answer {turn} was met by {pair[0]!r:.120}, and by {pair[1]!r:.120}"
        if len(self.observations) != len(other.observations):
            return f"it took {len(self.observations)} turns, and {len(other.observations)}"
        if repr(self.reward) != repr(other.reward):
            return f"the reward was {self.reward}, and {other.reward}"
        return ""

    def evidence(self) -> str:
        """Return seed, answers and reward as text."""
        shown = [text if len(text) <= 60 else f"{text[:57]}..." for text in self.answers[:8]]
        more = f" and {len(self.answers) - 8} more" if len(self.answers) > 8 else ""
        return f"seed {self.seed}, answers {shown}{more}, reward {self.reward}"


class AuditedTask(Protocol):
    """A task of any kind."""

    name: str
    kind: str
    max_turns: int
    not_asked: Mapping[str, str]
    """Checks that it can't be asked, and why."""
    reward_range: tuple[float, float] | None
    """Declared; ``None`` where none is."""
    is_own: bool
    """Whether whoever audits it can mend it, as opposed to an environment of a package."""
    is_in_process: bool
    """Whether its code runs in this thread."""
    faults: Sequence[tuple[str, str]]
    """Defects that were seen as it was opened, and what was seen."""
    is_forkable: bool
    """Whether a fork of this process has a copy of all that its code keeps."""
    num_rows: int
    """Different rows of its data; 0 where episodes differ in their seed alone."""

    def start(self, seed: int) -> AuditedEpisode:
        """Start an episode; raises where that fails."""
        ...

    def play_many(self, say: Say, seeds: Sequence[int], draw: int) -> "list[Played]":
        """Play an episode of each seed, the draws of the agent counted from one on."""
        ...

    def solutions(self) -> Mapping[str, Callable[[AgentView], str | None]]:
        """Agents that know more than others, by name; ``solution`` begins it where all is right."""
        ...


def play(task: AuditedTask, say: Say, seed: int, *, draw: int = 0) -> Played:
    """Play an episode to its end, to the agent's, or to the limit of turns.

    Args:
        task: what is played.
        say: the agent.
        seed: of the episode.
        draw: of the agent's own random numbers.

    Raises:
        Exception: whatever starting the episode raises.
    """
    rng, times = Random(draw), dict[str, list[float]]()

    def timed(what: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        times.setdefault(what, []).append(time.perf_counter() - began)
        return result

    episode: AuditedEpisode = timed("reset", lambda: task.start(seed))
    try:
        played = Played(seed, episode.opening, times_s=times)
        seen = episode.opening
        while not episode.is_over and len(played.answers) < task.max_turns:
            view = AgentView(
                *(episode.opening, seen, len(played.answers)),
                *(episode.choices, episode.tools, episode.row),
            )
            text = say(view, rng)
            if text is None:
                break
            played.answers.append(text)
            seen = timed("step", lambda text=text: episode.answer(text))
            played.observations.append(seen)
        played.reward = timed("reward", episode.reward)
        played.rewards = list(episode.rewards)
        played.error, played.has_ended = episode.error, episode.has_ended
        return played
    finally:
        episode.close()


def replay(task: AuditedTask, played: Played) -> Played:
    """Play an episode again, with the same seed and the same answers."""
    return play(task, repeating(played.answers), played.seed)


def repeating(answers: Sequence[str]) -> Say:
    """An agent that says given answers, one after the other."""
    left = iter(answers)

    def say(view: AgentView, rng: Random) -> str | None:
        del view, rng
        return next(left, None)

    return say
