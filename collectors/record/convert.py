"""The command ``torchrl-agents convert``: rollouts as ATIF, and trajectories as rows."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from collectors.record.run_record import RunRecord

from .atif import write_atif_episode
from .foreign_atif import rows_of_atif
from .samples import RolloutSample
from .token_row import SampledTurn, TokenRow, TrajectoryError, rows_of_turns

USAGE = """\
torchrl-agents convert RUN FOLDER      a run's recorded rollouts as ATIF, a file each
torchrl-agents convert FILES ROWS      trajectories as rows, one a line of ROWS (.jsonl)

FOLDER and ROWS are new: what is there is not written over.
FILES is a .json, a .jsonl, or a folder of them. They may hold ATIF 1.0 to 1.8, traces of verifiers,
or OpenEnv's TrainingTrace. A row has messages, which the recipe sft reads, and where the trajectory
has them, token_ids, sampled, log_probs and reward."""


def main(arguments: Sequence[str]) -> int:
    """Convert, and print what came of it.

    Args:
        arguments: of the command line.

    Returns:
        0; or 1 where something could not be read, which is named.
    """
    parser = argparse.ArgumentParser(prog="torchrl-agents convert", usage=USAGE, add_help=True)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    given = parser.parse_args(list(arguments))
    if not given.source.exists():
        print(f"torchrl-agents convert: there is no {given.source}.", file=sys.stderr)
        return 1
    try:
        record = RunRecord(given.source) if given.source.is_dir() else None
    except FileNotFoundError as error:
        if (given.source / "run.json").is_file():  # a run, and no folder of trajectories
            print(f"torchrl-agents convert: {error}", file=sys.stderr)
            return 1
        record = None
    try:
        if record is not None:
            return _write_record(record, given.target)
        return _write_rows(given.source, given.target)
    except (TrajectoryError, OSError) as error:
        print(f"torchrl-agents convert: {error}", file=sys.stderr)
        return 1


def _write_record(record: RunRecord, folder: Path) -> int:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TrajectoryError(
            f"{folder} must be a new or an empty folder: each rollout becomes a file in it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for step in record.steps:
        episodes: dict[tuple[str, int], list[RolloutSample]] = {}
        for sample in record.samples(step.step):
            episodes.setdefault((sample.group_id, sample.index), []).append(sample)
        for rows in episodes.values():
            number += 1
            path = folder / f"step-{step.step:06}-{number:06}.json"
            written = write_atif_episode(rows, agent=record.name)
            path.write_text(json.dumps(written), encoding="utf-8")
    print(f"{number} rollouts of {len(record.steps)} steps as ATIF in {folder}")
    for each in record.damage:
        print(f"not read: {each}", file=sys.stderr)
    return 1 if record.damage else 0


def _write_rows(source: Path, target: Path) -> int:
    if target.suffix != ".jsonl":
        raise TrajectoryError(f"{target} must end in .jsonl: each row becomes a line of it.")
    if target.exists():
        raise TrajectoryError(f"{target} is there already. Give a file that is not.")
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
