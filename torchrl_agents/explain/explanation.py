"""All that holds a run back, ordered by how much of its rollouts each finding explains."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from . import held_out_course, reward_course, rewarded_answers, rollout_checks, update_checks
from .evidence import RunEvidence
from .run_finding import RunFinding

GAMED: Final[tuple[Callable[[RunEvidence], RunFinding | None], ...]] = (
    reward_course.reward_jump,
    rewarded_answers.wrong_is_rewarded,
    rewarded_answers.one_answer,
    rewarded_answers.copied_prompt,
    rewarded_answers.repetition,
    reward_course.sources_part,
    reward_course.held_out_parts,
    reward_course.reward_by_length,
)
"""What is looked for where the reward rises, those that say most first."""
CHECKS: Final[tuple[Callable[[RunEvidence], RunFinding | None], ...]] = (
    update_checks.shuffled_rewards,
    rollout_checks.unscorable,
    *GAMED,
    update_checks.not_finite,
    update_checks.stale_sampler,
    update_checks.lost_critic,
    update_checks.learning_rate_too_large,
    update_checks.kl_runaway,
    rollout_checks.off_policy,
    rollout_checks.same_texts,
    rollout_checks.unread_calls,
    rollout_checks.cut,
    update_checks.nothing_trained,
    update_checks.no_pairs,
    held_out_course.held_out_worse,
    update_checks.learning_rate_too_small,
    update_checks.clipped_gradients,
    update_checks.clipped_tokens,
    update_checks.too_short,
    rollout_checks.constant_reward,
    rollout_checks.no_signal,
)
"""What is looked for, causes before what they cause: where two findings explain the same fraction,
the one that is further up comes first."""
_SAME: Final = {"no_signal": ("constant_reward", "greedy_sampling", "entropy_gone")}
"""A finding that says less than one of those."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What holds a run back."""

    folder: Path
    """Of the run."""
    num_steps: int
    """That were made."""
    first_reward: float
    """The mean of the first steps; NaN where there is none."""
    last_reward: float
    """The mean of the last steps."""
    findings: tuple[RunFinding, ...]
    """Those that explain most first; empty for a run that nothing holds back."""
    counts_steps: bool = False
    """Whether findings explain fractions of its steps: of a run that has no rollouts."""
    damage: tuple[str, ...] = ()
    """What could not be read, and why."""

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        findings = [finding.as_json() for finding in self.findings]
        return {**vars(self), "folder": str(self.folder), "findings": findings}


def gamed_rewards(path: str | Path) -> list[RunFinding]:
    """Find what shows that the reward of a run is gamed; also while it goes on.

    Args:
        path: the folder of a run, with a record of rollouts.

    Raises:
        FileNotFoundError: there is none.
    """
    run = RunEvidence(path)
    return [finding for check in GAMED if (finding := check(run)) is not None]


def explain_run(path: str | Path) -> Explanation:
    """Say what holds a run back, from the record that it left; also while it goes on.

    Example::

        for finding in explain_run("outputs/grpo/calculator/seed0").findings:
            print(finding.code, finding.explains, finding.what, finding.change)

    Args:
        path: the folder of a run, with ``metrics.jsonl`` or a record of rollouts.

    Raises:
        FileNotFoundError: there is neither.
        ValueError: no step was made yet; the message has the last line of the log.
    """
    run = RunEvidence(path)
    if not run.steps:
        raise ValueError(
            f"{path} has no step yet, so there is nothing to explain.{_last_words(run.folder)}"
        )
    found = [finding for check in CHECKS if (finding := check(run)) is not None]
    codes = {finding.code for finding in found}
    found = [each for each in found if not codes & {*_SAME.get(each.code, ())}]
    found.sort(key=lambda finding: -round(finding.explains, 2))  # stable: causes stay first
    return Explanation(
        folder=run.folder,
        num_steps=len(run.steps),
        first_reward=run.mean("reward", run.first),
        last_reward=run.mean("reward", run.last),
        findings=tuple(found),
        counts_steps=not run.values("reward") and run.record is None,
        damage=tuple(dict.fromkeys(run.record.damage)) if run.record else (),
    )


def _last_words(folder: Path) -> str:
    """The last line of the log of a run, in words; empty where there is none."""
    logs = [*folder.glob("*.log")]
    lines = [line for log in logs for line in log.read_text(encoding="utf-8").splitlines() if line]
    return f" {logs[0].name} ends with: {lines[-1].strip()}" if lines else ""
