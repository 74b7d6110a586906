"""Checks of what is held out: its loss, or its score, is worse at the end than it was before."""

import math
from statistics import fmean
from typing import Final

from .evidence import RunEvidence
from .run_finding import RunFinding

_RISE: Final = 1.1
"""Times the lowest loss."""
_NUM_TESTS: Final = 4
"""Of which the last quarter, two at least, is compared with the lowest one before."""


def held_out_worse(run: RunEvidence) -> RunFinding | None:
    """A model that unlearns what is held out, by the loss of rows or the score of a test."""
    return _loss_rose(run) or _score_fell(run)


def _loss_rose(run: RunEvidence) -> RunFinding | None:
    """The loss on held-out rows is lowest in the middle of the run, and rises after it."""
    name, tests = run.held_out_losses
    num_late = max(2, len(tests) // 4)
    if len(tests) < _NUM_TESTS:
        return None
    best_step, best = min(tests[:-num_late], key=lambda test: test[1])
    last_step, late = tests[-1][0], fmean(value for _, value in tests[-num_late:])
    if not late >= _RISE * best > 0:
        return None
    then = [step for step in run.steps if abs(step.get("step", math.nan) - best_step) <= 1]
    trained, at_end = run.mean("loss", then), run.mean("loss", run.last)
    is_by_heart = at_end < trained
    rate = run.setting("optim.learning_rate", max(run.values("learning_rate"), default=math.nan))
    of_training = (
        f", while that of the training went from {trained:.3g} to {at_end:.3g}: the rows are "
        "learnt by heart"
        if is_by_heart
        else f", and that of the training went from {trained:.3g} to {at_end:.3g}, too: the "
        "updates are too large"
    )
    of_steps = f"End there, with train.num_steps={best_step}; " if is_by_heart else ""
    more = "; or train on more rows" if is_by_heart else ""
    change = f"{of_steps}lower optim.learning_rate, which is {rate:.2g}{more}."
    return RunFinding(
        code="held_out_worse",
        explains=(last_step - best_step) / last_step,
        what=f"The loss on held-out rows ({name}) was {best:.3g} after step {best_step}, and is "
        f"{late:.3g} at the end{of_training if math.isfinite(trained) else ''}.",
        change=change[0].upper() + change[1:],
        numbers={"lowest": best, "lowest_step": best_step, "last": late},
    )


def _score_fell(run: RunEvidence) -> RunFinding | None:
    """The score of the last test is below that of an earlier one, and so are their intervals."""
    tests = run.held_out
    if len(tests) < 2:
        return None
    (best_step, best), (last_step, last) = max(tests, key=lambda test: test[1].value), tests[-1]
    if not last.high < best.low:
        return None
    rate = run.setting("optim.learning_rate", max(run.values("learning_rate"), default=math.nan))
    return RunFinding(
        code="held_out_worse",
        explains=(last_step - best_step) / last_step,
        what=f"On held-out {run.tested} the mean {run.score_name} was {best.value:.3g} "
        f"({best.low:.3g} to {best.high:.3g}) after step {best_step}, and is {last.value:.3g} "
        f"({last.low:.3g} to {last.high:.3g}) after step {last_step}.",
        change="Look at what is said there now and was said then; lower optim.learning_rate, "
        f"which is {rate:.2g}"
        + (f", or end there, with train.num_steps={best_step}." if best_step else "."),
        numbers={"best": best.value, "best_step": best_step, "last": last.value},
    )
