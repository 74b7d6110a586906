"""Runs of the script that are killed at random times, again and again, and go on to their end.

    python benchmarks/collection/random_kills.py [--kills 200] [--steps 8] [--folder /tmp/kills]

`kill -9` at any time from the start of a run to its end, in the midst of a save too. After each of
them no process is left, and the newest checkpoint verifies. A run in batches ends with the metrics
and the weights of one that was left alone, to the bit. One that streams has trained the prompts in
the order of the data, each once, by its ledger and by its record, though groups are dropped: stale
ones, ones without a signal, those whose engine died, and those that it had no room for.
"""

import argparse
import importlib
import inspect
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from collectors import CheckpointStore
from collectors.checkpoint.errors import NoCheckpoint
from collectors.ledger import GroupLedger
from collectors.record import RunRecord
from collectors.record.prompt_history import prompt_histories
from torchrl_agents.found_run import CHECKPOINTS

TESTS = Path(__file__).parents[2] / "test" / "sota"

MAX_ATTEMPTS = inspect.signature(GroupLedger).parameters["max_attempts"].default
DROP = ("collector=streaming", "collector.staleness_policy=drop", "collector.max_staleness=1")


class Mode(NamedTuple):
    """How a run collects."""

    arguments: tuple[str, ...] = ()
    faults: bool = False
    """Whether the engine dies or is full now and then, and groups without a signal come again."""


MODES = {
    "in batches": Mode(),
    "streaming, wait": Mode(("collector=streaming",)),
    "streaming, drop": Mode(DROP),
    "streaming, wait, with faults": Mode(("collector=streaming",), faults=True),
    "streaming, drop, with faults": Mode(DROP, faults=True),
}


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    timed = ("time/", "throughput/")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


def check_ledger(folder: Path, num_groups: int) -> Counter[str]:
    """Of a run that streamed: what was dropped, why.

    Raises:
        AssertionError: a prompt was skipped, or trained twice.
    """
    ledger = CheckpointStore(folder / CHECKPOINTS).load().state["parts"]["collector"]["ledger"]
    accounts, prompts = ledger["accounts"], ledger["prompts"]
    dropped = {reason: groups for reason, (groups, _) in accounts["dropped"].items()}
    ends = [accounts[end][0] for end in ("trained", "returned", "in_flight")]
    assert accounts["offered"][0] == sum(ends) + sum(dropped.values())
    assert accounts["trained"][0] == num_groups
    done = [*range(prompts["frontier"]), *prompts["done_above"]]
    histories = {int(name): each for name, each in prompt_histories(RunRecord(folder)).items()}
    trained = {ordinal for ordinal in done if len(histories[ordinal].groups) == 1}
    assert len(trained) == sum(len(each.groups) for each in histories.values()) == num_groups
    for ordinal in set(done) - trained:  # Given up after as many attempts as there are.
        last = histories[ordinal].events[-1]
        assert (last["name"], last["attempt"]) == ("dropped", MAX_ATTEMPTS - 1)
    return Counter(dropped)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    settings = parser.parse_args()
    chooser = random.Random(settings.seed)
    folder = settings.folder or Path(tempfile.mkdtemp())
    common = {"checkpoint.every": 1, "train.num_steps": settings.steps}
    sys.path.insert(0, str(TESTS))
    server = importlib.import_module("test_stop_at_any_point").Server()
    with server.process:
        kills, dropped = Counter(), {name: Counter() for name in MODES}
        for turn, (name, mode) in enumerate(MODES.items()):
            arguments, faults = mode
            where = folder / str(turn)
            where.mkdir(parents=True)
            whole = server.run(
                where, *arguments, settings={**common, "name": "whole"}, faults=faults
            )
            assert whole["status"] == 0, whole["err"][-2000:]
            number = 0
            while kills[name] < settings.kills // len(MODES):
                number += 1
                own = {**common, "name": f"killed{number}"}
                while True:
                    after_s = chooser.uniform(0, whole["seconds"])
                    done = server.run(
                        *(where, *arguments),
                        settings={**own, "resume": "auto"},
                        kill_after_s=after_s,
                        faults=faults,
                    )
                    assert done["left"] == [], done
                    if done["status"] == 0:
                        break
                    assert done["status"] == -9, done["err"][-2000:]
                    kills[name] += 1
                    try:
                        CheckpointStore(done["folder"] / CHECKPOINTS).load()
                    except NoCheckpoint:
                        continue
                if not arguments:
                    assert metrics_of(done["folder"]) == metrics_of(whole["folder"])
                    weights = [
                        (run["folder"] / "model/model.safetensors").read_bytes()
                        for run in (done, whole)
                    ]
                    assert weights[0] == weights[1]
                else:
                    groups = 2 * settings.steps
                    dropped[name] += check_ledger(done["folder"], groups)
            print(f"{name}: {kills[name]} kills, {number} runs that ended, dropped {dropped[name]}")
        print(f"{kills.total()} kills")


if __name__ == "__main__":
    main()
