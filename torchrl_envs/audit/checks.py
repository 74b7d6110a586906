"""The checks of an audit, the same for every kind of task that implements ``AuditedTask``."""

import math
import os
import pickle
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from types import FrameType
from typing import Any, Final

from .audited_task import AgentView, AuditedTask, Played, Say, play, repeating, replay
from .findings import Finding, Report
from .scripted_agents import (
    FORMS,
    GARBAGE,
    Explorer,
    after_calls,
    by_chance,
    by_chance_from,
    constant,
    constant_agents,
    echoed,
    hinted,
    hinted_word,
    knowing,
    said,
    silent,
)

_EXPLORED_STEPS: Final = 6000
_SHARE_OF_SOLUTION: Final = 0.9
"""An agent that deserves nothing is blamed from this share of the solution's reward on."""
_NUM_REPLAYED: Final = 4
_NUM_AGAIN: Final = 24
"""So many episodes are alike by chance once in eight million times, if they toss one coin each."""
_CHILD_S: Final = 20


def audit(
    task: AuditedTask, *, num_episodes: int = 12, num_rollouts: int = 8, num_explored: int = 400
) -> Report:
    """Let scripted agents do a task, and judge it by what they are rewarded.

    Args:
        task: of any kind.
        num_episodes: seeds, or rows, that each agent gets.
        num_rollouts: rollouts of a group, for the share of groups with a signal.
        num_explored: most episodes of the agent that explores.
    """
    return _Audit(task, num_episodes, num_rollouts, num_explored).run()


class _Audit:
    """The episodes of one task, and what they show."""

    def __init__(self, task: AuditedTask, episodes: int, rollouts: int, explored: int) -> None:
        self.task, self.num_rollouts, self.num_explored = task, rollouts, explored
        self.seeds = range(episodes)
        self.played: dict[str, list[Played]] = {}
        """Episodes by agent."""
        self.findings: list[Finding] = []
        self.rates: list[float] = []
        self.has_choices = False
        self.signal: float | None = None

    def find(
        self, defect: str, what: str, *seen: Played, is_defect: bool = True, evidence: str = ""
    ) -> None:
        """Note a finding; of each name the first counts."""
        if any(found.defect == defect for found in self.findings):
            return
        evidence = evidence or "; ".join(played.evidence() for played in seen)
        self.findings.append(Finding(self.task.name, defect, what, evidence, is_defect))

    def run(self) -> Report:
        """Play and judge."""
        for defect, what in self.task.faults:
            self.find(defect, what)
        if self.findings:
            return self.report()
        try:
            first = play(self.task, silent, 0)
        except Exception as error:  # the task's own code
            self.find("broken", f"an episode can't be started: {_in_words(error)}")
            return self.report()
        self.probe()
        if not any(p.reward is not None for played in self.played.values() for p in played):
            self.find("broken", f"no episode of any agent was scored: {first.error}", first)
        self.judge_values()
        self.judge_agents()
        self.judge_solutions()
        self.judge_ends()
        if not any(found.defect == "broken" for found in self.findings):
            self.judge_repetition()
            self.judge_seeds()
        self.judge_groups()
        return self.report()

    # Episodes -----------------------------------------------------------------------------------

    def do(self, agent: str, say: Say, seeds: Sequence[int] | None = None) -> list[Played]:
        """Play an episode of each seed; one that can't be started is a finding."""
        played = self.played.setdefault(agent, [])
        chosen = self.seeds if seeds is None else seeds
        try:
            played += self.task.play_many(say, chosen, len(played))
        except Exception as error:  # the task's own code
            what = f"the agent {agent!r} could not play seeds {[*chosen][:4]}: {_in_words(error)}"
            self.find("broken", what)
        return played

    def probe(self) -> None:
        """Let every agent play."""
        self.do("nothing", silent)
        episode = self.task.start(0)
        choices, tools = list(episode.choices), list(episode.tools)
        episode.close()
        self.has_choices = bool(choices)
        for name, say in constant_agents(choices, tools).items():
            self.do(f"constant {name}", say)
        self.do("echo", said(echoed))
        self.copy_hints()
        if tools:
            self.copy_what_tools_tell()
        for name, text in GARBAGE.items():
            self.do(f"garbage: {name}", constant(text))
            if tools:
                self.do(f"garbage: {name}, to a tool", said(lambda _, t=text: t))
        self.do("chance", by_chance)
        self.explore()
        for name, say in self.task.solutions().items():
            self.do(name, knowing(say))

    def copy_hints(self) -> None:
        """Let agents copy what stands after words such as ``answer is``, if there is any."""
        for name, text_of in (("hint", hinted), ("hinted word", hinted_word)):
            for form in FORMS[:2]:
                agent = f"{name} {form.format('...')}"
                first = self.do(agent, said(text_of, form), self.seeds[:1])
                if not any(answer for played in first for answer in played.answers):
                    del self.played[agent]  # it had nothing to copy
                    return
                self.do(agent, said(text_of, form), self.seeds[1:])

    def copy_what_tools_tell(self) -> None:
        """Let an agent call each tool once, and copy what stands after such words in an answer."""
        for form in FORMS[:2]:
            agent = f"hint told by a tool {form.format('...')}"
            played = self.do(agent, after_calls(hinted_word, form))
            if not any(each.answers and each.answers[-1] for each in played):
                del self.played[agent]
                return

    def explore(self) -> None:
        """Let an agent that learns what it has tried play, as long as that is cheap."""
        if not self.task.is_in_process:
            return
        explorer, steps = Explorer(), 0
        for seed in range(self.num_explored):
            played = self.do("explorer", explorer, [seed])
            steps += len(played[-1].answers) if played else _EXPLORED_STEPS
            if steps >= _EXPLORED_STEPS:
                return

    def values(self, prefix: str) -> dict[str, list[float]]:
        """Rewards by agent, of agents whose every episode was scored."""
        found = {}
        for name, episodes in self.played.items():
            rewards = [each.reward for each in episodes if each.reward is not None]
            is_whole = len(rewards) == len(episodes) > 0 and all(map(math.isfinite, rewards))
            if name.startswith(prefix) and is_whole:
                found[name] = rewards
        return found

    @property
    def good(self) -> float | None:
        """Mean reward of the best solution; ``None`` where none is known."""
        means = [_mean(values) for values in self.values("solution").values()]
        return max(means, default=None)

    # Judgement ----------------------------------------------------------------------------------

    def judge_values(self) -> None:
        """Look at each reward, and at what broke episodes off."""
        for name, played in ((n, p) for n, all_ in self.played.items() for p in all_):
            rewards = [*played.rewards, *([] if played.reward is None else [played.reward])]
            if not all(map(math.isfinite, rewards)) or "finite" in played.error:
                self.find("not finite", f"the agent {name!r} gets a reward that is none", played)
            elif played.error:
                what = f"a text of the agent {name!r} loses the rollout: {played.error}"
                self.find("crash", what, played)
            elif self.task.reward_range is not None and played.reward is not None:
                low, high = self.task.reward_range
                if not low <= played.reward <= high:
                    what = f"the agent {name!r} gets {played.reward:g}, out of [{low:g}, {high:g}]"
                    self.find("range", what, played)

    def judge_agents(self) -> None:
        """Compare agents that deserve nothing with those that act, and with the solution."""
        everything = [v for values in self.values("").values() for v in values]
        if not everything or any(found.defect == "not finite" for found in self.findings):
            return
        least, top = min(everything), max(everything)
        if least == top:
            self.judge_constant_reward(top)
            return
        for defect, prefix, who in (
            ("nothing", "nothing", "that says nothing"),
            ("constants", "constant", "that always says {}"),
            ("echo", "echo", "that says the prompt again"),
            ("leak", "hint", "that copies what it reads after words such as 'answer:'"),
            ("garbage", "garbage", "of malformed text ({})"),
        ):
            silent_ones = self.values("nothing").get("nothing", [least])
            for name, values in self.values(prefix).items():
                is_more = defect == "nothing" or _mean(values) > _mean(silent_ones)
                if is_more and self.earns(values, top):
                    known = f"the solution gets {self.good:g}" if self.good else "no agent got more"
                    said_by = who.format(name.removeprefix(prefix).lstrip(": "))
                    what = f"an agent {said_by} gets {_mean(values):g} on average; {known}"
                    best = max(self.played[name], key=lambda each: each.reward or 0.0)
                    self.find(defect, what, best)
                    break

    def earns(self, values: Sequence[float], top: float) -> bool:
        """Return whether rewards are what good work is paid.

        Without a solution that is known, they have to be the highest that was seen, each time,
        while chance does worse.
        """
        if self.good is not None and self.good > _mean(self.values("chance").get("chance", [0.0])):
            return _mean(values) >= _SHARE_OF_SOLUTION * self.good > 0
        others = [v for vs in self.values("").values() for v in vs if v < top]
        return min(values) >= top > 0 and bool(others)

    def judge_constant_reward(self, value: float) -> None:
        """Say that every agent got the same."""
        agents = len(self.values(""))
        what = f"each of {agents} agents gets {value:g} in each episode"
        example = next(iter(self.played["chance"] or self.played["nothing"]))
        lengths = {len(played.answers) for played in self.played.get("explorer", [])}
        is_cut = len(lengths) < 2 and lengths != {1}  # no other end than the limit was found
        is_known = self.good is not None or (self.has_choices and not is_cut)
        if not is_known:
            what += ", and none of them knows what is right: give one that does (--solution)"
        self.find("constant", what, example, is_defect=is_known)

    def judge_solutions(self) -> None:
        """Look whether the solution is paid."""
        if self.good is None:
            return
        nothing = _mean(self.values("nothing").get("nothing", [0.0]))
        if self.good <= max(nothing, 0.0):
            name, values = max(self.values("solution").items(), key=lambda pair: _mean(pair[1]))
            what = f"the {name} gets {_mean(values):g} on average, and doing nothing {nothing:g}"
            self.find("unsolvable", what, self.played[name][0])

    def judge_ends(self) -> None:
        """Look whether episodes end by themselves, and what comes after."""
        everything = [played for episodes in self.played.values() for played in episodes]
        is_asked = "endless" not in self.task.not_asked and bool(everything)
        if is_asked and not any(played.has_ended for played in everything):
            longest = max(everything, key=lambda played: len(played.answers))
            steps = len(longest.answers)
            what = f"none of {len(everything)} episodes ended by itself, in {steps} steps"
            self.find("endless", what, longest)
        if "after the end" not in self.task.not_asked:
            self.judge_after_end()

    def judge_after_end(self) -> None:
        """Step after the end of some episodes, and see whether that is paid."""
        ended = [p for n, e in self.played.items() if n in ("explorer", "chance") for p in e]
        by_reward = sorted(
            (p for p in ended if p.has_ended and p.answers), key=lambda p: -(p.reward or 0.0)
        )
        for played in by_reward[:_NUM_REPLAYED]:
            episode = self.task.start(played.seed)
            try:
                for text in played.answers:
                    episode.answer(text)
                more = [episode.after_end(played.answers[-1]) for _ in range(2)]
            finally:
                episode.close()
            paid_on = [each[0] for each in more if each is not None and each[0] > 0 and not each[1]]
            if paid_on:
                what = f"a step after the end goes on, and is paid {paid_on[0]:g}"
                self.find("after the end", what, played, is_defect=self.task.is_own)

    # Repetition ---------------------------------------------------------------------------------

    def judge_repetition(self) -> None:
        """Play episodes again, also beside another one: they have to be the same."""
        for place, seed in enumerate([*self.seeds][:_NUM_REPLAYED] * 2):
            first = play(self.task, by_chance, seed, draw=7 + place)
            for other in (seed + 1, seed + 2):
                play(self.task, by_chance, other, draw=8)
            second = self.replayed(first, 100 + place)
            if difference := first.differs_from(second):
                defect, why = self.cause_of(first)
                what = f"the same seed and answers give another episode ({why}): {difference}"
                self.find(defect, what, first)
                return
        self.judge_beside()

    def cause_of(self, played: Played) -> tuple[str, str]:
        """Return the defect by which an episode is not the same again, and why."""
        if _are_alike(lambda number: self.replayed(played, number)):
            return "carry-over", "something stayed from the episodes before"
        if _are_alike(lambda _: self.replayed(played, 1)):
            return "random", "it draws from the global random numbers"
        if self.task.is_forkable and _are_alike(
            lambda _: _in_child(lambda: self.replayed(played, 1))
        ):
            return "carry-over", "it depends on the episodes before"
        return "random", "it draws numbers that the seed does not decide, or counts episodes"

    def replayed(self, played: Played, seed: int) -> Played:
        """Play an episode again, with the global random numbers of a seed."""
        with _global_random(seed):
            return replay(self.task, played)

    def judge_beside(self) -> None:
        """Play an episode while others are played beside it."""
        for seed in self.seeds[:_NUM_REPLAYED]:
            alone = play(self.task, by_chance, seed, draw=7)
            try:
                crowded = self.beside_others(alone)
            except Exception as error:  # the task's own code
                name = "capacity" if "capacity" in _in_words(error).lower() else "beside"
                self.find(name, f"a second episode at the same time fails: {_in_words(error)}")
                return
            if difference := alone.differs_from(crowded):
                what = f"an episode is another one while others run beside it: {difference}"
                self.find("beside", what, alone)
                return

    def beside_others(self, alone: Played) -> Played:
        """Play an episode again, with two others that take turns with it."""
        rng = Random(3)
        others = [self.task.start(alone.seed + 1)]
        episode = self.task.start(alone.seed)
        others.append(self.task.start(alone.seed + 2))
        try:
            again = Played(alone.seed, episode.opening)
            for text in alone.answers:
                for other in others:
                    if not other.is_over:
                        read = (other.opening, other.opening, 0, other.choices, other.tools, {})
                        other.answer(by_chance(AgentView(*read), rng))
                again.answers.append(text)
                again.observations.append(episode.answer(text))
            again.reward = episode.reward()
            return again
        finally:
            for each in (episode, *others):
                each.close()

    def judge_seeds(self) -> None:
        """Look whether different seeds give different episodes."""
        if self.task.num_rows > 1 or "seed" in self.task.not_asked or len(self.seeds) < 2:
            return
        for agent, episodes in self.played.items():
            its = episodes[: len(self.seeds)]
            same = [each for each in its if each.answers == its[0].answers]
            if agent != "chance" and any(its[0].differs_from(each) for each in same):
                return
        for draw in range(_NUM_AGAIN):
            first = play(self.task, by_chance, 0, draw=draw)
            for seed in self.seeds[1:]:
                if first.differs_from(play(self.task, repeating(first.answers), seed)):
                    return
        what = f"{len(self.seeds)} different seeds give the same episode"
        if self.task.is_in_process:
            fixed = _fixed_seed(self.task)
            if fixed is not None:
                what += f", because the generator is seeded with {fixed} each time"
                self.find("seed", what, self.played["chance"][0])
                return
        what += "; it seems to draw nothing, so that there is one prompt to learn"
        self.find("seed", what, self.played["chance"][0], is_defect=False)

    def judge_groups(self) -> None:
        """Play groups of rollouts, and see in how many their rewards differ."""
        solutions = self.values("solution")
        best = max(solutions, key=lambda name: _mean(solutions[name]), default=None)
        groups: list[list[float]] = [[] for _ in self.seeds]
        for draw in range(self.num_rollouts):
            if best is not None and draw % 2:
                played = self.played[best]
            else:
                played = self.do(f"chance, rollout {draw}", by_chance_from(draw))
            for group, each in zip(groups, played, strict=False):
                if each.reward is not None:
                    group.append(each.reward)
        top = max((value for group in groups for value in group), default=0.0)
        groups = [group for group in groups if group]
        self.rates = [sum(v >= top for v in group) / len(group) for group in groups]
        if groups:
            self.signal = sum(len({*group}) > 1 for group in groups) / len(groups)

    def report(self) -> Report:
        """The report so far."""
        rewards: dict[str, float | None] = {}
        for name, episodes in self.played.items():
            scored = [each.reward for each in episodes if each.reward is not None]
            rewards[name] = _mean(scored) if scored else None
        times: dict[str, list[float]] = {}
        for played in (p for episodes in self.played.values() for p in episodes):
            for what, values in played.times_s.items():
                times.setdefault(what, []).extend(values)
        means = {what: _mean(values) for what, values in times.items()}
        return Report(
            *(self.task.name, rewards, self.findings, means, self.task.not_asked),
            *(self.signal, self.rates),
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _in_words(error: BaseException) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}"[:300]


@contextmanager
def _global_random(seed: int) -> Iterator[None]:
    """Python's and NumPy's global random numbers from a seed, and as they were afterwards."""
    numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
    python, other = random.getstate(), None if numpy is None else numpy.get_state()
    random.seed(seed)
    if numpy is not None:
        numpy.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(other)


def _are_alike(run: Callable[[int], Any]) -> bool:
    """Whether an episode is the same again and again; not where one does not come back.

    Args:
        run: plays it, the first time as number 0.
    """
    first = run(0)
    again = (run(number) for number in range(1, _NUM_AGAIN))
    return first is not None and all(x is not None and not x.differs_from(first) for x in again)


def _in_child(call: Callable[[], Any]) -> Any:
    """The result of a call in a fork of this process; ``None`` where it does not come back."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_CHILD_S)
        status = 1
        try:
            os.write(writing, pickle.dumps(call())[:60000])
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    return pickle.loads(data) if status == 0 and len(data) < 60000 else None


def _fixed_seed(task: AuditedTask) -> Any:
    """The seed that generators get in the resets of different seeds alike; ``None`` if none does.

    Raises:
        Exception: whatever starting an episode raises.
    """
    seen = []
    for seed in (11, 12):
        seeds: list[str] = []
        with _seeds_into(seeds):
            episode = task.start(seed)
            episode.close()
        seen.append(seeds)
    same = [a for a, b in zip(*seen, strict=False) if a == b]
    return same[0] if same and len(same) == len(seen[0]) else None


@contextmanager
def _seeds_into(seeds: list[str]) -> Iterator[None]:
    """Note the seeds that generators of Python and NumPy are given in this thread."""

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        del arg
        if event == "call" and frame.f_code.co_qualname == "Random.seed":
            seed = frame.f_locals.get("a")
            if seed is not None:
                seeds.append(repr(seed))

    numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
    make = None if numpy is None else numpy.default_rng

    def make_and_note(seed: Any = None) -> Any:
        if seed is not None:
            seeds.append(repr(seed))
        return make(seed)  # type: ignore[misc]

    if numpy is not None:
        numpy.default_rng = make_and_note
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)
        if numpy is not None:
            numpy.default_rng = make
