"""Observations of an environment on reset, and where in the conversation they go."""

from collections.abc import Mapping
from typing import Any


def with_observation(query: Any, observation: Any) -> Any:
    """The query with an observation, in its last message if that is the user's, or in one more."""
    if observation is None or observation in ("", []):
        return query
    if not isinstance(observation, str) and not (
        isinstance(observation, list)
        and all(isinstance(part, Mapping) and "type" in part for part in observation)
    ):
        raise TypeError(
            "An environment's reset returns a string, a list of content parts or None, got "
            f"{type(observation).__name__}."
        )
    if isinstance(query, str):
        joined = _joined(query, observation)
        return joined if isinstance(joined, str) else [{"role": "user", "content": joined}]
    if query and query[-1]["role"] == "user":
        last = {**query[-1], "content": _joined(query[-1]["content"], observation)}
        return [*query[:-1], last]
    return [*query, {"role": "user", "content": observation}]


def _joined(content: str | list[Any], observation: str | list[Any]) -> str | list[Any]:
    """A message's content and an observation after it; parts as soon as one of them has parts."""
    if not content:
        return observation
    if isinstance(content, str) and isinstance(observation, str):
        return f"{content}\n\n{observation}"
    parts: list[Any] = []
    for each in (content, observation):
        parts += [{"type": "text", "text": each}] if isinstance(each, str) else each
    return parts
