"""The command ``torchrl-agents explain``: says in words what holds a run back.

    torchrl-agents explain RUN          # what is wrong, most important first
    torchrl-agents explain RUN --json   # the same for programs

A run is the folder that a recipe leaves, or any other with a record of rollouts in it; it may
still go on.
"""

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Sequence
from typing import Final

from collectors.record.files import finite

from .explanation import Explanation, explain_run

_WIDTH: Final = 96


def _lines(told: Explanation) -> list[str]:
    """The text that is printed of a run."""
    name = "/".join(told.folder.resolve().parts[-2:])
    reward = ""
    if told.first_reward == told.last_reward:  # of a few steps the first are the last ones
        reward = f", mean reward {told.first_reward:.3g}"
    elif math.isfinite(told.first_reward):
        reward = (
            f", reward {told.first_reward:.3g} in the first and {told.last_reward:.3g} in the last"
        )
    lines = [f"{name}: {told.num_steps} steps{reward}"]
    if not told.findings:
        return [*lines, "Nothing was found that holds this run back."]
    counted = "steps" if told.counts_steps else "rollouts"
    for number, finding in enumerate(told.findings, 1):
        text = f"{number}. {finding.code} ({finding.explains:.0%} of the {counted}): {finding.what}"
        rows = "; ".join(
            f"--step {row.step} --group {row.group} --sample {row.sample}" for row in finding.rows
        )
        lines += ["", *textwrap.wrap(text, _WIDTH, subsequent_indent="   ")]
        lines += textwrap.wrap(
            finding.change, _WIDTH, initial_indent="   Change: ", subsequent_indent="   "
        )
        if rows:
            lines.append(f"   See: torchrl-agents view {told.folder} {rows.split('; ')[0]}")
            lines += [f"        {each}" for each in rows.split("; ")[1:]]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """The command; gives the exit status."""
    description, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="torchrl-agents explain",
        description=f"{description}\n\n{rest}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(argv)
    try:
        told = explain_run(given.run)
    except (FileNotFoundError, ValueError) as error:
        print(f"torchrl-agents explain: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps(finite(told.as_json(), str)))
        return 0
    print("\n".join(_lines(told)))
    for damage in told.damage:
        print(f"not read: {damage}", file=sys.stderr)
    return 0
