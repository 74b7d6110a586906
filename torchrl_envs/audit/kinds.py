"""Kinds of tasks that can be audited, by how they are named on the command line."""

from collections.abc import Mapping
from typing import Any, Final

from torchrl_data.import_path import import_callable
from torchrl_envs.tasks import settings_of_task
from torchrl_envs.tasks.external import environment_task
from torchrl_envs.tasks.registry import make_task
from torchrl_envs.tasks.task import Task
from torchrl_envs.tools.step_environments import StepEnvironments

from .audited_task import AuditedTask
from .step_task import Solution, StepTask
from .task_in_batch import TaskInBatch

GYMNASIUM: Final = "gymnasium:"
_TEXT: Final = "torchrl_envs.tools.gymnasium_text:make"
_SIZES: Final = {"num_rows": 128, "num_held_out": 8, "num_demonstrations": 512}
"""Of tasks that make their data: an audit needs few."""


def audited_task(
    name: str, settings: Mapping[str, Any], *, solution: str | None = None
) -> AuditedTask:
    """A task by its name.

    Args:
        name: ``gymnasium:NAME``; ``module:name`` of a function or class of the user's, which makes
            an environment or a ``Task``; or a name of the registry.
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
        task = environment_task(factory=_TEXT, arguments=arguments, **given)
        return _of_task(task, name, "Gymnasium", known, is_own=False)
    if ":" in name and "//" not in name:
        task = environment_task(factory=name, **given)
        return _of_task(task, name, "own module", known, is_own=True)
    return _of_task(_of_registry(name, given), name, "task of the registry", known, is_own=True)


def _of_registry(name: str, given: Mapping[str, Any]) -> Task:
    sizes = {key: size for key, size in _SIZES.items() if key in settings_of_task(name)}
    return make_task(name, **{**sizes, **given})


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
