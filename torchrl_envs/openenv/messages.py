"""The JSON messages of an OpenEnv server: built and read, without any connection.

Requests are ``{"type": "reset" | "step" | "state" | "mcp" | "close", "data": {...}}``; answers
are ``{"type": "observation" | "state" | "mcp" | "error", "data": {...}}``.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from .errors import OpenEnvProtocolError, OpenEnvServerError

CAPACITY_REACHED: Final = "CAPACITY_REACHED"
FATAL_CODES: Final = frozenset({CAPACITY_REACHED, "FACTORY_ERROR", "SESSION_ERROR"})
"""Errors after which the server closes the session."""
ANSWERS: Final = {"reset": "observation", "step": "observation", "state": "state", "mcp": "mcp"}
"""The type of the answer to each type of request."""


class EnvResult(NamedTuple):
    """The answer of an environment to ``reset`` and ``step``."""

    observation: dict[str, Any]
    """The fields of the environment's own observation."""
    reward: float | None = None
    """Reward of the step; ``None`` where the environment gives none."""
    done: bool = False
    """Whether the episode is over."""
    metadata: dict[str, Any] = {}  # noqa: RUF012
    """What else the server says."""


def request(kind: str, data: Mapping[str, Any] | None = None) -> str:
    """A request as JSON."""
    message: dict[str, Any] = {"type": kind}
    if data is not None:
        message["data"] = dict(data)
    return json.dumps(message, allow_nan=False)


def answer_data(raw: str | bytes, *, kind: str) -> dict[str, Any]:
    """The data of an answer."""
    try:
        message = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise OpenEnvProtocolError(f"the server's answer is not JSON: {raw[:80]!r}") from error
    found = message.get("type") if isinstance(message, dict) else None
    data = message.get("data") if isinstance(message, dict) else None
    if found == "error" and isinstance(data, dict):
        rest = {key: value for key, value in data.items() if key not in ("code", "message")}
        code, text = str(data.get("code", "UNKNOWN")), str(data.get("message", ""))
        for each in errors if isinstance(errors := rest.get("errors"), list) else ():
            if isinstance(each, dict):  # what is wrong with a field
                each = f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg', each)}"
            text += f"; {each}"
        raise OpenEnvServerError(code, text, rest)
    if found != ANSWERS[kind] or not isinstance(data, dict):
        raise OpenEnvProtocolError(
            f"the server answered {kind!r} with {raw[:80]!r}, not with a message of type "
            f"{ANSWERS[kind]!r}"
        )
    return data


def env_result(data: Mapping[str, Any]) -> EnvResult:
    """The answer to ``reset`` or ``step``."""
    observation, reward = data.get("observation"), data.get("reward")
    done, metadata = data.get("done", False), data.get("metadata") or {}
    if not isinstance(observation, dict) or not isinstance(reward, int | float | None):
        raise OpenEnvProtocolError(
            "the server's answer must hold an observation (an object) and a reward (a number or "
            f"null), got {dict(data)!r:.200}"
        )
    if not isinstance(done, bool | None) or not isinstance(metadata, dict):
        raise OpenEnvProtocolError(
            f"the server's answer must hold done (true or false), got {dict(data)!r:.200}"
        )
    reward = None if reward is None else float(reward)
    return EnvResult(observation, reward, bool(done), dict(metadata))
