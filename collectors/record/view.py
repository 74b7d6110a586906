"""Shows the record of a run: in the terminal, or as a page that opens in any browser.

    torchrl-agents view RUN                        # look around
    torchrl-agents view RUN --step 3 --group 0 --colour ratio
    torchrl-agents view RUN --prompt 17            # where is it?
    torchrl-agents view RUN [RUN ...] --html out/  # a folder with a page

A run is the folder that a script leaves, or any other with a record in it.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Final

from rich.console import Console

from .browse import Browser
from .html import write_html
from .prompts import find_prompts
from .reader import RunRecord
from .samples import RolloutSample
from .terminal import COLOURS, prompt_view

_MOST_RUNS: Final = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
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


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Do what the arguments say; gives the exit status."""
    console = console or Console(highlight=False)
    try:
        return _run(arguments, console)
    except (FileNotFoundError, FileExistsError, ValueError, LookupError) as error:
        print(f"view: {error.args[0] if error.args else error}", file=sys.stderr)  # noqa: T201
        return 1


def _run(arguments: argparse.Namespace, console: Console) -> int:
    runs = [RunRecord(path) for path in arguments.runs]
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
        browser = Browser(runs[0], keep=_filter(arguments))
        if arguments.step is None and sys.stdin.isatty() and console.is_terminal:
            _look_around(browser, arguments.colour)
        else:
            console.print(browser.view(_place(arguments), arguments.colour).printed())
    for each in runs:
        for damage in dict.fromkeys(each.damage):
            console.print(f"not read: {damage}", style="yellow", markup=False)
    return 0


def _place(arguments: argparse.Namespace) -> list[int]:
    place = [arguments.step, arguments.group, arguments.sample]
    given = [part for part in place if part is not None]
    if place[: len(given)] != given:
        raise ValueError("--sample goes with --group and --step, --group with --step.")
    return given


def _look_around(browser: Browser, colour: str) -> None:
    if find_spec("textual") is None:
        raise LookupError("looking around needs textual (pip install textual); or give --step.")
    from .app import RecordApp

    RecordApp(browser, colour=colour).run()


def _filter(arguments: argparse.Namespace) -> Callable[[RolloutSample], bool]:
    def keep(sample: RolloutSample) -> bool:
        if arguments.reward is not None:
            low, high = arguments.reward
            if sample.reward is None or not low <= sample.reward <= high:
                return False
        if arguments.stop_reason is not None and sample.stop_reason != arguments.stop_reason:
            return False
        return not arguments.tool_errors or sample.num_tool_errors > 0

    return keep


def main(argv: Sequence[str] | None = None) -> int:
    """The command; gives the exit status."""
    description, _, _ = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(prog="torchrl-agents view", description=description)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
