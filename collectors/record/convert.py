"""The command ``torchrl-agents convert``: rollouts as ATIF, pairs or labels, others' as rows."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from collectors.record.run_record import RunRecord, runs_named

from .atif import write_atif_episode
from .files import json_line
from .foreign_atif import rows_of_atif
from .rollout_label import labelled_rollouts
from .rollout_pair import LeftOut, preference_pairs
from .samples import RolloutSample, StepSummary
from .token_row import SampledTurn, TokenRow, TrajectoryError, rows_of_turns

USAGE = """\
torchrl-agents convert RUN FOLDER      a run's recorded rollouts as ATIF, a file each
torchrl-agents convert RUN PAIRS       pairs of a better and a worse rollout of a prompt, one a line
                                       of PAIRS (.jsonl)
torchrl-agents convert RUN LABELS --labels X   single rollouts, desirable where the reward is X or
                                       more, one a line of LABELS (.jsonl)
torchrl-agents convert FILES ROWS      trajectories as rows, one a line of ROWS (.jsonl)

FOLDER, PAIRS, LABELS and ROWS are new: what is there is not written over.
A run is the folder that a recipe leaves, evaluate among them. A pair has prompt, chosen, rejected
and tools, as TRL's preference data have them; chosen_reward and rejected_reward; and step, group,
chosen_sample and rejected_sample, by which torchrl-agents view finds the rollouts. A labelled
rollout has prompt, completion, label and tools; reward; and step, group and sample.
FILES is a .json, a .jsonl, or a folder of them. They may hold ATIF 1.0 to 1.8, traces of verifiers,
or OpenEnv's TrainingTrace. A row has messages, which the recipe sft reads, and where the trajectory
has them, token_ids, sampled, log_probs and reward."""
_OPTIONS: Final = ("pairs", "min_difference", "labels", "drop_truncated", "steps")
_DIFFERENT: Final = (
    "Sample more rollouts of each prompt (collector.group_size=, or evaluate.num_samples= of "
    "evaluate), at a higher policy.temperature, or ask prompts that are neither too hard nor too "
    "easy."
)
_LONGER: Final = "Allow longer turns (policy.max_new_tokens=)."
_REMEDIES: Final = {
    LeftOut.NO_REWARD: "Run a task that has a reward.",
    LeftOut.TRUNCATED: f"{_LONGER[:-1]}, or leave --drop-truncated out.",
    LeftOut.TOO_CLOSE: "Give a smaller --min-difference.",
    LeftOut.BEST_TRUNCATED: _LONGER,
    LeftOut.TOO_FEW: _DIFFERENT,
    LeftOut.EQUAL_REWARDS: _DIFFERENT,
    LeftOut.EQUAL_TEXTS: _DIFFERENT,
}
"""What to do where a reason leaves no pair; none for what can't be otherwise."""


def main(arguments: Sequence[str]) -> int:
    """Convert, and print what came of it.

    Args:
        arguments: of the command line.

    Returns:
        0; or 1 where something could not be read, which is named.
    """
    given = _parser().parse_args(list(arguments))
    if not given.source.exists():
        there = runs_named(given.source)
        print(f"torchrl-agents convert: there is no {given.source}.{there}", file=sys.stderr)
        return 1
    try:
        record = RunRecord(given.source) if given.source.is_dir() else None
    except FileNotFoundError as error:
        if (given.source / "run.json").is_file():  # a run, and no folder of trajectories
            print(f"torchrl-agents convert: {error}", file=sys.stderr)
            return 1
        record = None
    try:
        _check_options(given, record)
        if record is None:
            return _write_rows(given.source, given.target)
        steps = _chosen_steps(record, given.steps)
        if given.labels is not None:
            return _write_labels(record, steps, given)
        if given.target.suffix == ".jsonl":
            return _write_pairs(record, steps, given)
        return _write_record(record, steps, given.target)
    except (ValueError, OSError) as error:  # a TrajectoryError, or a format that is newer
        print(f"torchrl-agents convert: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torchrl-agents convert", usage=USAGE, add_help=True)
    parser.add_argument("source", type=Path, help="RUN or FILES")
    parser.add_argument("target", type=Path, help="FOLDER, PAIRS, LABELS or ROWS")
    parser.add_argument(
        "--steps",
        type=int,
        nargs=2,
        metavar=("FIRST", "LAST"),
        help="of a run: only the rollouts of these steps",
    )
    parser.add_argument(
        "--pairs",
        choices=("best", "all"),
        help="of each group the pair whose rewards differ most (best, which is the default), or "
        "each pair of different rewards and texts",
    )
    parser.add_argument(
        "--min-difference",
        type=float,
        metavar="X",
        help="only pairs whose rewards differ by X or more; default: by anything",
    )
    parser.add_argument(
        "--labels",
        type=float,
        metavar="X",
        help="single rollouts instead of pairs, with the label true where the reward is X or more",
    )
    parser.add_argument(
        "--drop-truncated",
        action="store_true",
        help="leave out rollouts that a limit of tokens cut; by default such a rollout is never "
        "chosen or desirable, and may be rejected or undesirable",
    )
    return parser


def _check_options(given: argparse.Namespace, record: RunRecord | None) -> None:
    """Refuse options that would do nothing, or are out of range."""
    values = {name: getattr(given, name) for name in _OPTIONS}
    is_given = {name: value is not None and value is not False for name, value in values.items()}
    found = [f"--{name.replace('_', '-')}" for name in _OPTIONS if is_given[name]]
    if record is None and found:
        raise TrajectoryError(
            f"{found[0]} is for the record of a run, and {given.source} is none: no "
            "rollouts/step-*.jsonl.gz. Leave it out, or name the folder of a run."
        )
    of_pairs = [name for name in found if name != "--steps"]
    if of_pairs and given.target.suffix != ".jsonl":
        raise TrajectoryError(
            f"{of_pairs[0]} is for pairs and labels, and {given.target} is a folder for ATIF: name "
            "a file that ends in .jsonl, or leave the option out."
        )
    if given.labels is not None and (beside := {"--pairs", "--min-difference"} & {*found}):
        raise TrajectoryError(
            f"{min(beside)} is for pairs, and --labels for single rollouts: leave one of them out."
        )
    if given.labels is not None and not isfinite(given.labels):
        raise TrajectoryError(f"--labels must be a finite number, got {given.labels}.")
    least = given.min_difference
    if least is not None and not 0 <= least < float("inf"):
        raise TrajectoryError(f"--min-difference must be a number from 0 on, got {least}.")


def _chosen_steps(record: RunRecord, bounds: Sequence[int] | None) -> list[StepSummary]:
    if not record.steps:
        raise TrajectoryError(f"nothing of the record can be read: {'; '.join(record.damage)}")
    first, last = bounds or (record.steps[0].step, record.steps[-1].step)
    steps = [summary for summary in record.steps if first <= summary.step <= last]
    if not steps:
        raise TrajectoryError(
            f"--steps {first} {last} names no step of {record.run_folder}, which has steps "
            f"{record.steps[0].step} to {record.steps[-1].step}."
        )
    return steps


def _write_pairs(record: RunRecord, steps: Sequence[StepSummary], given: argparse.Namespace) -> int:
    target = _new_file(given.target)
    lines, differences = list[bytes](), list[float]()
    left_out, num_groups, num_recorded = Counter[LeftOut](), 0, 0
    for step in steps:
        numbers = {group.group_id: number for number, group in enumerate(step.groups)}
        found = preference_pairs(
            record.samples(step.step),
            all_pairs=given.pairs == "all",
            min_difference=given.min_difference or 0.0,
            drop_truncated=given.drop_truncated,
        )
        left_out += found.left_out
        num_groups, num_recorded = num_groups + len(step.groups), num_recorded + found.num_groups
        for pair in found.pairs:
            lines.append(json_line({**pair.to_json(), "group": numbers[pair.group_id]}, str))
            differences.append(pair.chosen_reward - pair.rejected_reward)
    told = _told_left_out(left_out, num_groups - num_recorded)
    if not lines:
        remedies = (_REMEDIES.get(reason) for reason, _ in left_out.most_common())
        remedy = next(filter(None, remedies), "")
        what = f"{record.run_folder} gives no pair of {num_groups} groups. Left out: {told}."
        raise TrajectoryError(f"{what} {remedy}".rstrip())
    target.write_bytes(b"".join(lines))
    print(
        f"{len(lines)} pairs of {num_groups} groups in {target}; their rewards differ by "
        f"{fmean(differences):.3g} on average"
    )
    if told:
        print(f"left out: {told}")
    return _name_damage(record)


def _write_labels(
    record: RunRecord, steps: Sequence[StepSummary], given: argparse.Namespace
) -> int:
    target = _new_file(given.target)
    lines, labels, left_out, num_unrecorded = list[bytes](), Counter[bool](), Counter[LeftOut](), 0
    for step in steps:
        numbers = {group.group_id: number for number, group in enumerate(step.groups)}
        samples = list(record.samples(step.step))
        num_unrecorded += len(step.groups) - len({sample.group_id for sample in samples})
        found = labelled_rollouts(
            samples, threshold=given.labels, drop_truncated=given.drop_truncated
        )
        left_out += found.left_out
        for own in found.rollouts:
            lines.append(json_line({**own.to_json(), "group": numbers[own.group_id]}, str))
            labels[own.label] += 1
    told = _told_left_out(left_out, num_unrecorded)
    if len(labels) < 2:
        raise TrajectoryError(
            f"{record.run_folder} gives {len(lines)} labelled rollouts, of which {labels[True]} "
            f"have a reward of {given.labels:g} or more: some have to, and others not. Give "
            "--labels a number between the rewards that there are."
            + (f" Left out: {told}." if told else "")
        )
    target.write_bytes(b"".join(lines))
    print(
        f"{len(lines)} rollouts in {target}; {labels[True]} are desirable, with a reward of "
        f"{given.labels:g} or more, and {labels[False]} are not"
    )
    if told:
        print(f"left out: {told}")
    return _name_damage(record)


def _told_left_out(left_out: Counter[LeftOut], num_unrecorded: int) -> str:
    """Say what was left out, and why."""
    reasons = [f"{reason}: {count}" for reason, count in left_out.most_common()]
    if num_unrecorded:
        reasons.append(
            "groups that are not recorded (record.every=, record.max_groups_per_step=): "
            f"{num_unrecorded}"
        )
    return "; ".join(reasons)


def _new_file(target: Path) -> Path:
    if target.suffix != ".jsonl":
        raise TrajectoryError(f"{target} must end in .jsonl: each row becomes a line of it.")
    if target.exists():
        raise TrajectoryError(f"{target} is there already. Give a file that is not.")
    return target


def _name_damage(record: RunRecord) -> int:
    """Print what could not be read of a record; gives the status."""
    for each in dict.fromkeys(record.damage):
        print(f"not read: {each}", file=sys.stderr)
    return 1 if record.damage else 0


def _write_record(record: RunRecord, steps: Sequence[StepSummary], folder: Path) -> int:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TrajectoryError(
            f"{folder} must be a new or an empty folder: each rollout becomes a file in it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for step in steps:
        episodes: dict[tuple[str, int], list[RolloutSample]] = {}
        for sample in record.samples(step.step):
            episodes.setdefault((sample.group_id, sample.index), []).append(sample)
        for rows in episodes.values():
            number += 1
            path = folder / f"step-{step.step:06}-{number:06}.json"
            written = write_atif_episode(rows, agent=record.name)
            path.write_text(json.dumps(written), encoding="utf-8")
    print(f"{number} rollouts of {len(steps)} steps as ATIF in {folder}")
    return _name_damage(record)


def _write_rows(source: Path, target: Path) -> int:
    _new_file(target)
    rows: list[TokenRow] = []
    faults = []
    for name, value in _values(source):
        if isinstance(value, Exception):
            faults.append(f"{name}: {value}")
            continue
        try:
            rows += rows_of(value, source=name)
        except TrajectoryError as error:
            faults.append(f"{name}: {error}")
    if not rows:
        told = "".join(f"\n  {fault}" for fault in faults[:10])
        raise TrajectoryError(f"{source} holds no trajectory that can be read{told}")
    lines = (json.dumps(row.to_json(), ensure_ascii=False) for row in rows)
    target.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    count = sum(sum(row.sampled or ()) for row in rows)
    exact = sum(row.token_ids is not None for row in rows)
    print(f"{len(rows)} rows, {exact} of them with tokens, {count} sampled tokens, in {target}")
    for fault in faults:
        print(f"not read: {fault}", file=sys.stderr)
    return 1 if faults else 0


def _values(source: Path) -> Iterator[tuple[str, Any]]:
    """Parsed JSON of files, by where it stands; or why it can't be parsed."""
    files = [source]
    if source.is_dir():
        files = sorted(p for p in source.rglob("*") if p.suffix in (".json", ".jsonl"))
    for path in files:
        name = path.name if path == source else str(path.relative_to(source))
        text = path.read_text(encoding="utf-8")
        pieces = {name: text}
        if path.suffix == ".jsonl":
            lines = text.splitlines()
            pieces = {f"{name}:{n}": line for n, line in enumerate(lines, 1) if line.strip()}
        for where, piece in pieces.items():
            try:
                value = json.loads(piece)
            except ValueError as error:
                yield where, error
                continue
            many = value if isinstance(value, list) else [value]
            for number, each in enumerate(many, 1):
                yield (f"{where}[{number}]" if len(many) > 1 else where), each


def rows_of(value: Any, *, source: str = "") -> list[TokenRow]:
    """A trajectory of any known format as rows.

    Args:
        value: parsed JSON: ATIF, a trace of verifiers, or OpenEnv's ``TrainingTrace``.
        source: of it, for the rows.

    Raises:
        TrajectoryError: it is of no known format, or broken.
    """
    if not isinstance(value, Mapping):
        raise TrajectoryError(f"it is no object: {type(value).__name__}")
    if str(value.get("schema_version", "")).startswith("ATIF"):
        return rows_of_atif(value, source=source)
    if isinstance(value.get("nodes"), list):
        return rows_of_verifiers(value, source=source)
    if isinstance(value.get("turns"), list):
        return rows_of_training_trace(value, source=source)
    known = "ATIF (schema_version), a trace of verifiers (nodes) nor a TrainingTrace (turns)"
    raise TrajectoryError(f"it is neither {known}; it has {sorted(map(str, value))[:8]}")


def rows_of_training_trace(trace: Mapping[str, Any], *, source: str = "") -> list[TokenRow]:
    """OpenEnv's ``TrainingTrace``, which TRL trains on, as rows.

    Args:
        trace: parsed JSON; the mask of each turn covers its prompt and its answer.
        source: of it, for the rows.

    Raises:
        TrajectoryError: a turn's columns are of different lengths.
    """
    turns = []
    for number, turn in enumerate(trace["turns"], 1):
        try:
            prompt, ids = list(turn["prompt_token_ids"]), list(turn["completion_token_ids"])
            log_probs, mask = list(turn["per_token_logps"]), list(turn["loss_mask"])
        except (KeyError, TypeError) as error:
            raise TrajectoryError(f"turn {number} lacks {error}") from error
        if len(mask) != len(prompt) + len(ids) or len(log_probs) != len(ids):
            raise TrajectoryError(
                f"turn {number} has {len(prompt)} + {len(ids)} tokens, {len(mask)} in its mask and "
                f"{len(log_probs)} log-probs"
            )
        request, response = turn.get("request") or {}, turn.get("response") or {}
        choices = response.get("choices") or [{}]
        said = choices[0].get("message") or {}
        messages = [*(request.get("messages") or []), *([said] if said else [])]
        sampled = [bool(each) for each in mask[len(prompt) :]]
        own = SampledTurn(
            prompt=prompt, ids=ids, log_probs=log_probs, sampled=sampled, messages=messages
        )
        turns.append(own)
    if not turns:
        raise TrajectoryError("the trace has no turn")
    return rows_of_turns(turns, {"source": source})


def rows_of_verifiers(trace: Mapping[str, Any], *, source: str = "") -> list[TokenRow]:
    """A trace of verifiers 0.4, a graph of messages, as a row for each branch.

    A token that two branches share is marked as sampled in the first of them.

    Args:
        trace: parsed JSON.
        source: of it, for the rows.

    Raises:
        TrajectoryError: the graph is broken.
    """
    nodes = trace["nodes"]
    parents = {node.get("parent") for node in nodes}
    leaves = [number for number in range(len(nodes)) if number not in parents]
    rewards = [each for each in (trace.get("rewards") or {}).values() if each is not None]
    reward = sum(each["score"] * each.get("weight", 1.0) for each in rewards) if rewards else None
    seen: set[int] = set()
    rows = []
    for leaf in leaves:
        path, number = list[int](), leaf
        while number is not None:
            if not isinstance(number, int) or not 0 <= number < len(nodes) or number in path:
                raise TrajectoryError(f"the parents of node {leaf} lead nowhere: {number!r}")
            path.insert(0, number)
            number = nodes[number].get("parent")
        tools = nodes[path[0]].get("tools") or trace.get("tools") or []
        row = TokenRow(
            messages=[_verifiers_message(nodes[n]["message"]) for n in path],
            tools=[_function(tool) for tool in tools] or None,
            reward=reward,
            source=source if len(leaves) == 1 else f"{source}#{leaf}",
        )
        if any(nodes[n].get("token_ids") for n in path):
            ids, sampled, log_probs = list[int](), list[bool](), list[float | None]()
            for n in path:
                own, mask = list(nodes[n].get("token_ids") or ()), list(nodes[n].get("mask") or ())
                given = list(nodes[n].get("logprobs") or ())
                if len(mask) != len(own) or len(given) not in (0, sum(mask)):
                    raise TrajectoryError(
                        f"node {n} has {len(own)} tokens, {len(mask)} in its mask, of which "
                        f"{sum(mask)} sampled, and {len(given)} log-probs"
                    )
                values = iter(given or [None] * sum(mask))
                ids += own
                sampled += [bool(each) and n not in seen for each in mask]
                log_probs += [next(values) if each else None for each in mask]
            row.token_ids, row.sampled, row.log_probs = ids, sampled, log_probs
        seen.update(path)
        rows.append(row)
    return rows


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}


def _verifiers_message(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in message.items() if v is not None and k != "provider_state"}
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in kept.pop("tool_calls", ())
    ]
    return kept | ({"tool_calls": calls} if calls else {})
