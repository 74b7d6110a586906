"""Typed clients as OpenEnv's environment packages ship them, on OpenEnv's own client class.

The client is loaded from the servers' virtual environment. ``openenv.core`` imports the server too,
whose dependencies exclude ours, so the two packages are made here, empty, around its files.
"""

import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from process import REPOSITORY

_SITE = next((REPOSITORY / ".venv-openenv" / "lib").glob("python3*/site-packages"))


def _empty_package(name: str, path: Path) -> None:
    package = types.ModuleType(name)
    package.__path__ = [str(path)]
    sys.modules.setdefault(name, package)


_empty_package("openenv", _SITE / "openenv")
_empty_package("openenv.core", _SITE / "openenv" / "core")

from openenv.core.client_types import StepResult  # noqa: E402
from openenv.core.env_client import EnvClient  # noqa: E402


class _Client(EnvClient):
    observation: type

    def _step_payload(self, action: Any) -> dict[str, Any]:
        return vars(action)

    def _parse_result(self, payload: dict[str, Any]) -> StepResult:
        reward, done = payload.get("reward"), payload.get("done", False)
        observation = self.observation(payload["observation"], reward, done)
        return StepResult(observation=observation, reward=reward, done=done)

    def _parse_state(self, payload: dict[str, Any]) -> dict[str, Any]:
        return payload


class _Observation:
    def __init__(self, fields: dict[str, Any], reward: float | None, done: bool) -> None:
        self.reward, self.done = reward, done
        for name, value in fields.items():
            setattr(self, name, value)


@dataclass
class EchoAction:
    message: str


class EchoEnv(_Client):
    observation = _Observation


@dataclass
class TextArenaAction:
    message: str


class _Messages(_Observation):
    def __init__(self, fields: dict[str, Any], reward: float | None, done: bool) -> None:
        super().__init__(fields, reward, done)
        self.messages = [types.SimpleNamespace(**message) for message in fields["messages"]]


class TextArenaEnv(_Client):
    observation = _Messages


@dataclass
class OpenSpielAction:
    action_id: int


class OpenSpielEnv(_Client):
    observation = _Observation
