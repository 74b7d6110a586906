"""Rollouts as ATIF, the trajectories that Harbor and others exchange, and back.

The format is that of ``harbor.models.trajectories`` in the package ``harbor`` 0.26 (ATIF 1.8; what
is written here is valid from 1.7 on). What it has no place for stands in ``extra``.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from collectors.record.files import json_line
from collectors.record.samples import RolloutSample

VERSION: Final = "ATIF-v1.7"
_KNOWN: Final = tuple(f"ATIF-v1.{minor}" for minor in range(9))
_OWN: Final = "torchrl_agents"
"""Under which name ``extra`` holds what only this library knows."""


class TrajectoryError(ValueError):
    """A file that can't be read as a trajectory; the message says where."""


@dataclass(kw_only=True)
class TokenRow:
    """A conversation as one row, to train on or to replay."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    """Schemas, as OpenAI's chat completions have them."""
    token_ids: list[int] | None = None
    """T of them; ``None`` where the trajectory has none."""
    sampled: list[bool] | None = None
    """Which of them a policy sampled and may be trained on, T."""
    log_probs: list[float | None] | None = None
    """Of the policy that sampled, in nats, T; ``None`` where there is none."""
    reward: float | None = None
    agent: str = ""
    source: str = ""
    """Which trajectory of which file it was."""

    def to_json(self) -> dict[str, Any]:
        """Fields of the record, without those that hold nothing."""
        return {name: value for name, value in vars(self).items() if value not in (None, "")}


# A rollout of a record, written.


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


# A trajectory of anybody, as rows.


def check_atif(trajectory: Any) -> None:
    """Check that a value has the form of a trajectory.

    Args:
        trajectory: parsed JSON.

    Raises:
        TrajectoryError: it has not.
    """
    if not isinstance(trajectory, Mapping):
        raise TrajectoryError(f"a trajectory is an object, got {type(trajectory).__name__}")
    version = trajectory.get("schema_version")
    if version not in _KNOWN:
        raise TrajectoryError(
            f"schema_version must be {_KNOWN[0]} to {_KNOWN[-1]}, got {version!r}"
        )
    agent, steps = trajectory.get("agent"), trajectory.get("steps")
    if not isinstance(agent, Mapping) or not isinstance(agent.get("name"), str):
        raise TrajectoryError("there is no agent with a name")
    if not isinstance(steps, list) or not steps:
        raise TrajectoryError("there are no steps")
    for number, step in enumerate(steps, 1):
        if not isinstance(step, Mapping) or step.get("step_id") != number:
            found = step.get("step_id") if isinstance(step, Mapping) else step
            raise TrajectoryError(f"step {number}: step_id must be {number}, got {found!r:.80}")
        if step.get("source") not in ("system", "user", "agent"):
            raise TrajectoryError(f"step {number}: source is {step.get('source')!r:.80}")
        if not isinstance(step.get("message"), str | list):
            raise TrajectoryError(f"step {number}: message must be a text or parts")
        metrics = step.get("metrics") or {}
        ids, log_probs = metrics.get("completion_token_ids"), metrics.get("logprobs")
        if ids is not None and log_probs is not None and len(ids) != len(log_probs):
            raise TrajectoryError(
                f"step {number}: {len(ids)} sampled tokens have {len(log_probs)} log-probs"
            )


def rows_of_atif(trajectory: Mapping[str, Any], *, source: str = "") -> list[TokenRow]:
    """A trajectory and those of its sub-agents as rows.

    A turn whose prompt begins with all tokens before it goes on with its row; any other one (a
    history that was shortened, a retry) begins a row of its own. Each sampled token is in one row;
    what was copied from another trajectory is not marked as sampled.

    Args:
        trajectory: parsed JSON of ATIF 1.0 to 1.8.
        source: of it, for the rows.

    Returns:
        One row or several with tokens, or one without where no turn has the tokens of its prompt.

    Raises:
        TrajectoryError: it can't be read.
    """
    check_atif(trajectory)
    agent, metrics = trajectory["agent"], trajectory.get("final_metrics") or {}
    reward = (metrics.get("extra") or {}).get(
        "reward", (trajectory.get("extra") or {}).get("reward")
    )
    shared: dict[str, Any] = {"agent": agent["name"], "source": source}
    shared |= {"tools": agent.get("tool_definitions") or None, "reward": _number(reward)}
    turns: list[Turn] = []
    messages: list[dict[str, Any]] = []
    for number, step in enumerate(trajectory["steps"], 1):
        before = list(messages)
        messages += _messages(step, number)
        its = step.get("metrics") or {}
        if step["source"] == "agent" and its.get("completion_token_ids") is not None:
            is_own = not step.get("is_copied_context")
            ids = its["completion_token_ids"]
            turns.append(
                Turn(
                    prompt=its.get("prompt_token_ids"),
                    ids=ids,
                    log_probs=its.get("logprobs") or [None] * len(ids),
                    sampled=[is_own] * len(ids),
                    messages=[*before, messages[len(before)]],
                )
            )
    rows = rows_of_turns(turns, shared) if all(t.prompt is not None for t in turns) else []
    rows = rows or [TokenRow(messages=messages, **shared)]
    if turns and len(rows) == 1:
        rows[0].messages = messages
    for number, sub in enumerate(trajectory.get("subagent_trajectories") or (), 1):
        name = sub.get("trajectory_id") if isinstance(sub, Mapping) else None
        rows += rows_of_atif(sub, source=f"{source}#{name or number}")
    return rows


@dataclass(kw_only=True)
class Turn:
    """An answer of a model, with the tokens that it read."""

    prompt: list[int] | None
    ids: list[int]
    log_probs: Sequence[float | None]
    sampled: list[bool]
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation up to the answer."""


def rows_of_turns(turns: Sequence[Turn], shared: Mapping[str, Any]) -> list[TokenRow]:
    """Turns as rows: one that reads all of a row goes on with it.

    Args:
        turns: in their order, each with its prompt.
        shared: fields of all rows.
    """
    rows: list[TokenRow] = []
    for turn in turns:
        prompt = list(turn.prompt or ())
        begun = [
            r for r in rows if r.token_ids is not None and prompt[: len(r.token_ids)] == r.token_ids
        ]
        row = max(begun, key=lambda r: len(r.token_ids or ()), default=None)
        if row is None:
            row = TokenRow(messages=[], token_ids=[], sampled=[], log_probs=[], **shared)
            rows.append(row)
        assert row.token_ids is not None
        assert row.sampled is not None
        assert row.log_probs is not None
        new = prompt[len(row.token_ids) :]
        row.token_ids += [*new, *turn.ids]
        row.sampled += [*[False] * len(new), *turn.sampled]
        row.log_probs += [*[None] * len(new), *turn.log_probs]
        row.messages = turn.messages or row.messages
    return rows


def _messages(step: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    if (own := _own_message(step)) is not None:  # as it was before it was written
        results = (step.get("observation") or {}).get("results") or ()
        return [own, *(each for x in results if (each := _own_message(x)) is not None)]
    role = "assistant" if step["source"] == "agent" else step["source"]
    message: dict[str, Any] = {"role": role, "content": _text(step["message"], number)}
    if step.get("reasoning_content"):
        message["reasoning_content"] = step["reasoning_content"]
    calls = [
        {
            "id": call.get("tool_call_id"),
            "type": "function",
            "function": {"name": call["function_name"], "arguments": call.get("arguments") or {}},
        }
        for call in step.get("tool_calls") or ()
    ]
    if calls:
        message["tool_calls"] = calls
    names = {call["id"]: call["function"]["name"] for call in calls}
    found = [message]
    for result in (step.get("observation") or {}).get("results") or ():
        text, call_id = _text(result.get("content") or "", number), result.get("source_call_id")
        if call_id in names:
            found.append(
                {"role": "tool", "content": text, "tool_call_id": call_id, "name": names[call_id]}
            )
        else:
            found.append({"role": "tool" if calls else "user", "content": text})
    return found


def _own_message(holder: Mapping[str, Any]) -> dict[str, Any] | None:
    own = (holder.get("extra") or {}).get(_OWN)
    return own.get("message") if isinstance(own, Mapping) else None


def _text(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise TrajectoryError(f"step {number}: text alone can be read, got {kind!r:.80}")
    return "".join(part["text"] for part in content)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
