"""A trajectory of anybody in ATIF, as rows."""

from collections.abc import Mapping
from typing import Any, Final

from .token_row import SampledTurn, TokenRow, TrajectoryError, rows_of_turns

_KNOWN: Final = tuple(f"ATIF-v1.{minor}" for minor in range(9))
_OWN: Final = "torchrl_agents"
"""Under which name ``extra`` holds what only this library knows."""


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
    turns: list[SampledTurn] = []
    messages: list[dict[str, Any]] = []
    for number, step in enumerate(trajectory["steps"], 1):
        before = list(messages)
        messages += _messages(step, number)
        its = step.get("metrics") or {}
        if step["source"] == "agent" and its.get("completion_token_ids") is not None:
            is_own = not step.get("is_copied_context")
            ids = its["completion_token_ids"]
            turns.append(
                SampledTurn(
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
