"""Checks of the answers that are rewarded: wrong ones, one for all prompts, copies, loops.

A reward that rises says nothing of what it rewards. The answers do, beside the prompt, the data's
answer, each other, and those of the run's first steps.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from statistics import fmean
from typing import Final

from .evidence import RolloutFacts, RunEvidence
from .rollout_checks import ids_of
from .run_finding import RunFinding
from .window_change import Groups, WindowChange, change_between, has_risen, rollout_reward

_MEANT: Final = 0.5
"""Of the rewarded answers, from which on the data's answer is what the reward is meant for."""
_NUM_PROMPTS: Final = 8
_OFTEN: Final = 0.2
"""Of the prompts, from which on an answer is common."""


def _rewarded(run: RunEvidence) -> tuple[Groups, Groups]:
    """The rewarded rollouts of the first groups and of the last; none where no reward has risen.

    Rewarded is what has more than a rollout had in the first steps in the mean.
    """
    first, last = run.early_groups, run.late_groups
    if not has_risen(first, last):
        return [], []
    level = fmean(rollout_reward(row) for group in first for row in group)
    before, after = (
        [[row for row in group if rollout_reward(row) > level] for group in groups]
        for groups in (first, last)
    )
    return before, after


def wrong_is_rewarded(run: RunEvidence) -> RunFinding | None:
    """Right answers, by the data, become fewer while the reward rises, or are not what it pays."""
    rewarded = _rewarded(run)
    of_rewarded = change_between(*rewarded, lambda row: row.texts.is_right)
    of_all = change_between(run.early_groups, run.late_groups, lambda row: row.texts.is_right)
    if of_rewarded.before >= _MEANT and _halves(of_rewarded):
        change, whose = of_rewarded, "rewarded answers"
    elif has_risen(run.early_groups, run.late_groups) and _halves(of_all):
        change, whose = of_all, "answers"
    else:
        return None
    wrong = [row for group in rewarded[1] for row in group if row.texts.is_right is False]
    return RunFinding(
        code="wrong_is_rewarded",
        explains=len(wrong) / sum(map(len, run.late_groups)),
        what=f"The reward has risen, but {change.after:.0%} of the {whose} hold what the data have "
        f"as the answer, {change.before:.0%} in the first steps.",
        change="Score one of them with the reward function, and mend what gives it a reward "
        "(task.rewards); then begin from weights of before.",
        numbers={"right_before": change.before, "right_after": change.after},
        rows=ids_of(wrong),
    )


def _halves(change: WindowChange) -> bool:
    return change.is_sure and change.after <= change.before / 2


def one_answer(run: RunEvidence) -> RunFinding | None:
    """One of few texts that is said to many prompts, and rewarded."""
    rewarded = _rewarded(run)
    common = {
        (row.id, text)
        for end in rewarded
        for texts in [_common_texts(end)]
        for group in end
        for row in group
        if (text := row.texts.said) in texts and not row.texts.is_wanted
    }
    texts = Counter(text for (step, *_), text in common if step >= run.last[0]["step"])
    num_texts = len(texts)
    said = "one text" if num_texts == 1 else f"one of {num_texts} texts"
    likeliest = repr(texts.most_common(1)[0][0]) if texts else ""
    return _rising_share(
        *(run, rewarded, lambda row: (row.id, row.texts.said) in common),
        code="one_answer",
        least=0.5,
        what=f"are {said} that many prompts get: {likeliest:.80}",
        change="Score that text with the reward function on several prompts. If it is not what "
        "they ask for, mend the reward (task.rewards), and begin from weights of before.",
    )


def _common_texts(groups: Groups) -> set[str]:
    """The texts that a fifth of the prompts get, and three at least."""
    prompts: dict[str, set[str]] = defaultdict(set)
    for group in groups:
        for row in group:
            prompts[row.texts.said].add(row.texts.prompt)
    count = len(set().union(*prompts.values())) if prompts else 0
    if count < _NUM_PROMPTS:
        return set()
    return {text for text, its in prompts.items() if len(its) >= max(3, _OFTEN * count)}


def copied_prompt(run: RunEvidence) -> RunFinding | None:
    """Rewarded answers that are copied from the prompt, more than at the beginning."""
    return _rising_share(
        *(run, _rewarded(run), lambda row: row.texts.copies_prompt),
        code="copied_prompt",
        least=0.5,
        what="are copied from their prompt",
        change="Score a prompt as its own answer with the reward function; if that is not what "
        "is wanted, let what is copied count for nothing (task.rewards).",
    )


def repetition(run: RunEvidence) -> RunFinding | None:
    """Rewarded answers that say the same again and again, more than at the beginning."""
    return _rising_share(
        *(run, _rewarded(run), lambda row: row.texts.loops),
        code="repetition",
        least=0.3,
        what="repeat themselves in a loop",
        change="Let the reward (task.rewards) count once what is said again, or add "
        "torchrl_envs.graders.RepetitionPenalty to it.",
    )


def _rising_share(
    run: RunEvidence,
    rewarded: tuple[Groups, Groups],
    shows: Callable[[RolloutFacts], bool],
    *,
    code: str,
    least: float,
    what: str,
    change: str,
) -> RunFinding | None:
    """The finding that rewarded rollouts show something, twice as often as at the beginning.

    Args:
        run: whose they are.
        rewarded: rollouts of the first groups and of the last.
        shows: whether a rollout shows it.
        code: of the finding.
        least: the share from which on it is one.
        what: the rest of a sentence that begins with the rewarded answers.
        change: what to do.
    """
    share = change_between(*rewarded, shows)
    if not share.is_sure or share.after < max(least, 2 * share.before):
        return None
    rows = [row for group in rewarded[1] for row in group if shows(row)]
    return RunFinding(
        code=code,
        explains=len(rows) / sum(map(len, run.late_groups)),
        what=f"The reward has risen, but {share.after:.0%} of the rewarded answers (in the first "
        f"steps {share.before:.0%}) {what}.",
        change=change,
        numbers={"before": share.before, "after": share.after},
        rows=ids_of(rows),
    )
