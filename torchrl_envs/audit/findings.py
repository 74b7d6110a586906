"""Findings of an audit, and what to change for each."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

REMEDIES: Final[dict[str, str]] = {
    "nothing": "Give an answer that is empty, or an episode without an action, no reward.",
    "constants": "Draw tasks whose answers differ, or give the constant answer no reward.",
    "echo": "Compare the answer with what is right, not with words that the prompt has, too.",
    "leak": "Leave the answer out of what the agent reads.",
    "garbage": "Give malformed text the reward of a wrong answer, also where reading it fails.",
    "crash": "Read any text without raising: a rollout that is lost can't teach to avoid it.",
    "tampering": "Score in a machine that the agent had no access to.",
    "clock": "Score contents, not the dates of files.",
    "random": "Draw everything from the seed that the reset gets, from a generator of its own.",
    "carry-over": "Keep the state of an episode on its own object, and reset all of it.",
    "beside": "Keep the state of an episode on its own object, not on the class or the module.",
    "seed": "Seed the generator with the seed that the reset gets.",
    "not finite": "Return finite numbers: look for a division by zero or a logarithm of zero.",
    "range": "Keep rewards in the declared range, or declare the right one.",
    "constant": "Make better episodes score more: a group of equal rewards teaches nothing.",
    "unsolvable": "Mend what scores, or the solution: no reward, and no policy can learn.",
    "endless": "End the episode: at the goal, at a failure, or after a number of steps.",
    "after the end": "Give no reward, or raise, when a step comes after the end.",
    "capacity": "Let the server hold several sessions at once (max_concurrent_envs).",
    "no signal": "Take easier prompts where the solve rate is near 0, or show the form of an "
    "answer first (warm_start.num_steps); harder ones where it is near 1; or give partial rewards.",
    "broken": "Mend the task: it can't be read, started or scored.",
}
"""What to change, by the defect."""


class Finding(NamedTuple):
    """A fault of a task, or something to know about it."""

    task: str
    defect: str
    """A name in :data:`REMEDIES`."""
    what: str
    """The fault in words."""
    evidence: str = ""
    """Seed, answers and reward with which it was seen."""
    is_defect: bool = True
    """``False`` for what may be meant so: it is told, and the status stays 0."""

    @property
    def remedy(self) -> str:
        """A sentence that says what to change."""
        return REMEDIES[self.defect]


class Report(NamedTuple):
    """The findings about one task, and what they rest on."""

    task: str
    rewards: dict[str, float | None]
    """Mean reward by agent; ``None`` where no episode of it was scored."""
    findings: list[Finding]
    times_s: dict[str, float]
    """Mean seconds of a ``reset``, a ``step`` and a ``reward``, of those that were seen."""
    not_asked: Mapping[str, str] = {}
    """Checks that this kind of task can't be asked, and why."""
    signal_fraction: float | None = None
    """Fraction of the groups of rollouts whose rewards differ."""
    solve_rates: Sequence[float] = ()
    """Of each group, the fraction of rollouts with the highest reward that was seen."""

    def as_json(self) -> dict[str, Any]:
        """The report as plain values, the remedies with it."""
        findings = [{**found._asdict(), "remedy": found.remedy} for found in self.findings]
        plain = {**self._asdict(), "not_asked": dict(self.not_asked)}
        return {**plain, "solve_rates": list(self.solve_rates), "findings": findings}
