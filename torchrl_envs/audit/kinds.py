"""Kinds of tasks that can be audited, by how they are named on the command line."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from torchrl_data.import_path import import_callable
from torchrl_envs.openenv import OpenEnvCapacityError, OpenEnvSession
from torchrl_envs.tasks import settings_of_task
from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.environment_task import environment_task
from torchrl_envs.tasks.openenv import openenv_task
from torchrl_envs.tasks.task import Task
from torchrl_envs.tools.step_environments import StepEnvironments

from .audited_task import AuditedTask
from .step_task import Solution, StepTask
from .task_in_batch import TaskInBatch
from .verifiers_task import VerifiersTask

GYMNASIUM: Final = "gymnasium:"
OPENENV: Final = "openenv:"
VERIFIERS: Final = "verifiers:"
_NUM_SESSIONS: Final = 16
_CAPACITY_S: Final = 2.0
GYMNASIUM_TEXT: Final = "torchrl_envs.tools.gymnasium_text:make"
_SIZES: Final = {"num_rows": 128, "num_held_out": 8, "num_demonstrations": 512}
"""Of tasks that make their data: an audit needs few."""


def audited_task(
    name: str, settings: Mapping[str, Any], *, solution: str | None = None
) -> AuditedTask:
    """A task by its name.

    Args:
        name: ``gymnasium:NAME``; ``openenv:URL`` of a server; ``verifiers:TASKSET``;
            ``module:name`` of a function or class of the user's, which makes an environment or a
            ``Task``; or a name of the registry.
        settings: of the task, as ``task.KEY=VALUE`` of a recipe.
        solution: ``module:name`` of a function that gets an ``AgentView`` and returns what is
            right to answer, or ``None`` where there is no more to say.

    Raises:
        ValueError: there is no such task, or a setting is wrong.
        TypeError: what the name makes follows no known protocol.
        ImportError: a package is missing.
    """
    known: Solution | None = None
    if solution is not None:
        known = import_callable("--solution", solution)
    given = dict(settings)
    if name.startswith(GYMNASIUM):
        arguments = {"id": name.removeprefix(GYMNASIUM), **(given.pop("arguments", None) or {})}
        given |= {"factory": GYMNASIUM_TEXT, "arguments": arguments}
        task = environment_task(**_none_held_out(given), **given)
        return _of_task(task, name, "Gymnasium", known, is_own=False)
    if name.startswith(VERIFIERS):
        return VerifiersTask(name.removeprefix(VERIFIERS), given, known)
    if name.startswith(OPENENV):
        return _of_server(name, given, known)
    if ":" in name:
        given["factory"] = name
        task = environment_task(**_none_held_out(given), **given)
        return _of_task(task, name, "own module", known, is_own=True)
    return _of_task(_of_registry(name, given), name, "task of the registry", known, is_own=True)


def _of_registry(name: str, given: Mapping[str, Any]) -> Task:
    sizes = {key: size for key, size in _SIZES.items() if key in settings_of_task(name)}
    return make_task(name, **{**sizes, **_none_held_out(given), **given})


def _none_held_out(given: Mapping[str, Any]) -> dict[str, int]:
    """Of data that are given all rows can be played: none has to be held out for an audit."""
    has_data = given.get("dataset") is not None and "num_held_out" not in given
    return {"num_held_out": 0} if has_data else {}


def _of_server(name: str, given: Mapping[str, Any], solution: Solution | None) -> AuditedTask:
    """A session of a server in each episode; how many it holds is asked first."""
    url = name.removeprefix(OPENENV)
    sizes = {"num_rows": 1, "num_held_out": 1, **_none_held_out(given)}
    task = openenv_task(**{"base_url": url, **sizes, **given})
    held = asyncio.run(_sessions_held(url))
    faults = []
    if held < _NUM_SESSIONS:
        what = f"the server held {held} of {_NUM_SESSIONS} sessions that were opened at once"
        faults.append(("capacity", what))
    return TaskInBatch(
        task, name=name, kind="OpenEnv", solution=solution, is_forkable=False, faults=faults
    )


async def _sessions_held(url: str) -> int:
    """Return how many of some sessions a server holds at the same time."""
    sessions = [OpenEnvSession(url, capacity_timeout_s=_CAPACITY_S) for _ in range(_NUM_SESSIONS)]
    try:
        results = await asyncio.gather(
            *(session.reset(seed=0) for session in sessions), return_exceptions=True
        )
    finally:
        await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)
    return sum(not isinstance(result, OpenEnvCapacityError) for result in results)


def _of_task(
    task: Task,
    name: str,
    kind: str,
    solution: Solution | None,
    *,
    is_own: bool,
) -> AuditedTask:
    parts = [] if task.tools is None else list(task.tools(True))
    if len(parts) == 1 and isinstance(parts[0], StepEnvironments) and task.rewards is None:
        return StepTask(task, parts[0], name=name, kind=kind, is_own=is_own, solution=solution)
    return TaskInBatch(task, name=name, kind=kind, is_own=is_own, solution=solution)
