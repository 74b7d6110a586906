"""Shows the record of a run: in the terminal, or as a page that opens in any browser.

    torchrl-agents view RUN                        # look around
    torchrl-agents view RUN --step 3 --group 0 --colour ratio
    torchrl-agents view RUN --prompt 17            # where is it?
    torchrl-agents view RUN [RUN ...] --html out/  # a folder with a page

A run is the folder that a script leaves, or any other with a record in it.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Final

from rich.console import Console

from .browser import Browser
from .html import write_html
from .prompt_history import find_prompts
from .run_record import RunRecord
from .samples import RolloutSample
from .terminal import COLOURS, prompt_view

_MOST_RUNS: Final = 4


def _show(arguments: argparse.Namespace, console: Console) -> None:
    """Show what the arguments ask for."""
    runs = [RunRecord(path) for path in arguments.runs]
    place = [arguments.step, arguments.group, arguments.sample]
    given = [part for part in place if part is not None]
    if arguments.html is not None:
        if len(runs) > _MOST_RUNS:
            raise ValueError(f"a page shows at most {_MOST_RUNS} runs, got {len(runs)}.")
        console.print(str(write_html(runs, arguments.html)), markup=False, soft_wrap=True)
    elif len(runs) > 1:
        raise ValueError("the terminal shows one run; give --html to compare several.")
    elif arguments.prompt is not None:
        for history in find_prompts(runs[0], arguments.prompt):
            console.print(prompt_view(history))
    else:
        browser = Browser(runs[0], keep=partial(_is_kept, arguments))
        if arguments.step is None and sys.stdin.isatty() and console.is_terminal:
            _look_around(browser, arguments.colour)
        elif place[: len(given)] != given:
            raise ValueError("--sample goes with --group and --step, --group with --step.")
        else:
            console.print(browser.view(given, arguments.colour).printed())
    for each in runs:
        for damage in dict.fromkeys(each.damage):
            console.print(f"not read: {damage}", style="yellow", markup=False)


def _look_around(browser: Browser, colour: str) -> None:
    if find_spec("textual") is None:
        raise LookupError("looking around needs textual (pip install textual); or give --step.")
    from .app import RecordApp

    RecordApp(browser, colour=colour).run()


def _is_kept(arguments: argparse.Namespace, sample: RolloutSample) -> bool:
    """Return whether the filters of the command let a sample through."""
    if arguments.reward is not None:
        low, high = arguments.reward
        if sample.reward is None or not low <= sample.reward <= high:
            return False
    if arguments.stop_reason is not None and sample.stop_reason != arguments.stop_reason:
        return False
    return not arguments.tool_errors or sample.num_tool_errors > 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command; gives the exit status."""
    description, _, _ = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="torchrl-agents view", description=description)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--html", metavar="OUT", help="write a page into this folder")
    parser.add_argument("--step", type=int, help="show a step")
    parser.add_argument("--group", type=int, help="and a group of it, by its number there")
    parser.add_argument("--sample", type=int, help="and a sample of that, by its number there")
    parser.add_argument("--prompt", help="where is it: a number, or a word of its text")
    parser.add_argument("--colour", choices=COLOURS, default="writer", help="of tokens")
    parser.add_argument("--reward", type=float, nargs=2, metavar=("LOW", "HIGH"), help="filter")
    parser.add_argument("--stop-reason", help="filter: how a sample ended")
    parser.add_argument("--tool-errors", action="store_true", help="filter: a tool said an error")
    try:
        _show(parser.parse_args(argv), Console(highlight=False))
    except (FileNotFoundError, FileExistsError, ValueError, LookupError) as error:
        print(f"view: {error.args[0] if error.args else error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
