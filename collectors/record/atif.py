"""A rollout of a record as a trajectory of ATIF, written and read."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from .files import json_line
from .foreign_atif import _OWN, check_atif
from .samples import RolloutSample
from .token_row import TrajectoryError

VERSION: Final = "ATIF-v1.7"


def write_atif(sample: RolloutSample, *, agent: str, version: str = "unknown") -> dict[str, Any]:
    """A recorded rollout as a trajectory.

    Args:
        sample: of a :class:`~collectors.record.RunRecord`.
        agent: a name for what ran, such as the run's.
        version: of it.

    Returns:
        What JSON can write. Each turn has the tokens that the policy read and those that it
        sampled, with their log-probs; :func:`read_rollout` gives the sample again.
    """
    steps = _steps(sample)
    own = {
        name: value for name, value in vars(sample).items() if name not in ("messages", "tokens")
    }
    tokens = dict(vars(sample.tokens))
    ids = tokens.pop("ids")
    last = next(
        (s["metrics"] for s in reversed(steps) if "prompt_token_ids" in s.get("metrics", {})), {}
    )
    told = [*last.get("prompt_token_ids", ()), *last.get("completion_token_ids", ())]
    extra = {"sample": own, "tokens": tokens}
    # Of the tokens only those after the last turn are not told by the turns.
    extra |= (
        {"tail_token_ids": ids[len(told) :]} if ids[: len(told)] == told else {"token_ids": ids}
    )
    where = f"{sample.step}/{sample.group_id}/{sample.index}"
    trajectory = {
        "schema_version": VERSION,
        "session_id": where,
        "trajectory_id": f"{where}/{sample.segment}",
        "agent": {"name": agent, "version": version},
        "steps": steps,
        "final_metrics": {
            "total_completion_tokens": sample.sampled_tokens,
            "total_steps": len(steps),
            "extra": {"reward": sample.reward, "advantage": sample.advantage},
        },
        "extra": {_OWN: extra},
    }
    return json.loads(json_line(trajectory, vars))


def write_atif_episode(
    samples: Sequence[RolloutSample], *, agent: str, version: str = "unknown"
) -> dict[str, Any]:
    """All rows of a recorded episode as one trajectory, with the rows that left others inside.

    Args:
        samples: the rows of one episode.
        agent: a name for what ran, such as the run's; rows whose author is known have that one.
        version: of it.

    Returns:
        The trajectory of the row that opened the episode. Rows that left a row are its
        ``subagent_trajectories``; the call of a sub-agent refers to it. :func:`read_episode` gives
        the samples again.
    """
    rows = {
        sample.segment: write_atif(sample, agent=sample.agent or agent, version=version)
        for sample in samples
    }
    root = next((s for s in samples if s.parent_segment not in rows), samples[0])
    rows[root.segment]["agent"]["name"] = agent
    for sample in samples:
        if sample is root:
            continue
        own, parent = rows[sample.segment], rows.get(sample.parent_segment, rows[root.segment])
        parent.setdefault("subagent_trajectories", []).append(own)
        if sample.row_kind == "sub_agent":
            _refer(parent, own["trajectory_id"], sample.parent_tokens)
    return rows[root.segment]


def _refer(parent: dict[str, Any], trajectory_id: str, num_tokens: int) -> None:
    """Let the results of the last call before a token name the trajectory of a sub-agent."""
    before = [
        step
        for step in parent["steps"]
        if step.get("tool_calls") and _num_tokens_until(step) <= num_tokens
    ]
    results = before[-1].get("observation", {}).get("results") if before else None
    if results:
        references = results[0].setdefault("subagent_trajectory_ref", [])
        references.append({"trajectory_id": trajectory_id})


def _num_tokens_until(step: Mapping[str, Any]) -> int:
    """Tokens that a turn read and sampled; 0 where they are not known."""
    metrics = step.get("metrics", {})
    return metrics.get("prompt_tokens", 0) + metrics.get("completion_tokens", 0)


def _steps(sample: RolloutSample) -> list[dict[str, Any]]:
    turns = dict(_turns(sample))
    steps: list[dict[str, Any]] = []
    for number, message in enumerate(sample.messages):
        text, role = message.get("content"), message.get("role")
        if role == "tool" and steps and steps[-1]["source"] == "agent":
            result: dict[str, Any] = {
                "content": text if isinstance(text, str) else json.dumps(text)
            }
            calls = [call["tool_call_id"] for call in steps[-1].get("tool_calls", ())]
            if message.get("tool_call_id") in calls:
                result["source_call_id"] = message["tool_call_id"]
            result["extra"] = {_OWN: {"message": message}}
            steps[-1].setdefault("observation", {"results": []})["results"].append(result)
            continue
        source = {"assistant": "agent", "system": "system"}.get(str(role), "user")
        shown = text if isinstance(text, str) else "" if text is None else json.dumps(text)
        step: dict[str, Any] = {"step_id": len(steps) + 1, "source": source, "message": shown}
        step["extra"] = {_OWN: {"message": message}}
        if source == "agent":
            calls = [
                _call(each, number, k) for k, each in enumerate(message.get("tool_calls") or ())
            ]
            if calls and all(calls):
                step["tool_calls"] = calls
            if isinstance(message.get("reasoning_content"), str):
                step["reasoning_content"] = message["reasoning_content"]
            if number in turns:
                step |= {"metrics": _metrics(sample, *turns[number]), "llm_call_count": 1}
            elif sample.parent_segment >= 0:  # another row's turn
                step["is_copied_context"] = True
        steps.append(step)
    return steps


def _turns(sample: RolloutSample) -> Iterator[tuple[int, tuple[int, int]]]:
    """Message and tokens of each turn whose tokens are one stretch."""
    start, found = 0, list[tuple[int | None, int, int]]()
    for span in sample.tokens.spans:
        if span.writer == "model":
            found.append((span.message, start, start + span.length))
        start += span.length
    for message, pieces in groupby(found, key=lambda piece: piece[0]):
        parts = list(pieces)
        if message is not None and len(parts) == 1:
            yield message, parts[0][1:]


def _metrics(sample: RolloutSample, start: int, end: int) -> dict[str, Any]:
    tokens = sample.tokens
    metrics: dict[str, Any] = {"prompt_tokens": start, "completion_tokens": end - start}
    metrics["prompt_token_ids"] = tokens.ids[:start]
    metrics["completion_token_ids"] = tokens.ids[start:end]
    log_probs = tokens.log_probs[start:end]
    if None not in log_probs:
        metrics["logprobs"] = log_probs
    return metrics


def _call(call: Any, message: int, number: int) -> dict[str, Any] | None:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, Mapping):
        return None
    own_id = str(call.get("id") or f"call_{message}_{number}")
    return {"tool_call_id": own_id, "function_name": function["name"], "arguments": arguments}


def read_rollout(trajectory: Mapping[str, Any]) -> RolloutSample:
    """The rollout that :func:`write_atif` wrote.

    Args:
        trajectory: parsed JSON.

    Raises:
        TrajectoryError: another program wrote it; :func:`rows_of_atif` reads it as rows.
    """
    check_atif(trajectory)
    own = (trajectory.get("extra") or {}).get(_OWN)
    if not isinstance(own, Mapping) or not {"sample", "tokens"} <= own.keys():
        raise TrajectoryError("the trajectory is of another program: read it with rows_of_atif")
    messages, ids = [], list[int]()
    for step in trajectory["steps"]:
        results = (step.get("observation") or {}).get("results", ())
        messages += [each["extra"][_OWN]["message"] for each in (step, *results)]
        metrics = step.get("metrics") or {}
        if "completion_token_ids" in metrics:
            ids = [*metrics["prompt_token_ids"], *metrics["completion_token_ids"]]
    ids = own["token_ids"] if "token_ids" in own else [*ids, *own["tail_token_ids"]]
    tokens = {**own["tokens"], "ids": ids}
    return RolloutSample.from_json({**own["sample"], "messages": messages, "tokens": tokens})


def read_episode(trajectory: Mapping[str, Any]) -> list[RolloutSample]:
    """The rows that :func:`write_atif_episode` wrote, in the order of ``segment``.

    Args:
        trajectory: parsed JSON.

    Raises:
        TrajectoryError: another program wrote it; :func:`rows_of_atif` reads it as rows.
    """
    inside = trajectory.get("subagent_trajectories") or ()
    rows = [read_rollout(trajectory), *(row for each in inside for row in read_episode(each))]
    return sorted(rows, key=lambda row: row.segment)
