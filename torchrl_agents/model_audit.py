"""The command ``torchrl-agents audit``, with a model that plays by the recipe ``evaluate``."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from collectors.record import RunRecord
from torchrl_envs.audit.command import main as audit_main
from torchrl_envs.audit.kinds import GYMNASIUM, GYMNASIUM_TEXT, OPENENV, VERIFIERS
from torchrl_envs.audit.model_groups import ModelGroups

EMBEDDED: Final = "embedded"
"""Names the model of 0.1 million parameters that is built here."""
_ERROR: Final = "torchrl-agents evaluate:"
_MOST_SHOWN: Final = 600


def main(arguments: Sequence[str]) -> int:
    """Audit tasks; with ``--model`` a model plays them, too.

    Args:
        arguments: of the command line.

    Returns:
        0; 1 where a defect was found; 2 where nothing could be audited.
    """
    return audit_main(arguments, play=play_with_model)


def play_with_model(
    name: str,
    settings: Mapping[str, Any],
    model: str,
    further: Sequence[str],
    num_prompts: int,
    num_rollouts: int,
) -> ModelGroups:
    """Let a model play a task, in a process of its own.

    Args:
        name: of the task, as the audit takes it.
        settings: of the task.
        model: what ``policy.model`` takes, or ``embedded``.
        further: settings of the recipe ``evaluate``, such as ``policy.max_new_tokens=64``.
        num_prompts: held-out prompts.
        num_rollouts: of each prompt.

    Raises:
        ValueError: the recipe does not take the task, or its run failed.
    """
    words = [*task_words(name, settings), *further]
    words += [] if model == EMBEDDED else [f"policy.model={model}"]
    words += [f"evaluate.num_prompts={num_prompts}", f"evaluate.num_samples={num_rollouts}"]
    words += ["evaluate.num_shown=0"]
    with TemporaryDirectory() as folder:
        words.append(f"hydra.run.dir={folder}/run")
        done = subprocess.run(
            [sys.executable, "-m", "torchrl_agents", "evaluate", *words],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": _path()},
        )
        if done.returncode:
            said = (done.stderr or done.stdout).strip()
            why = said[max(0, said.rfind(_ERROR)) :].removeprefix(_ERROR)[:_MOST_SHOWN].strip()
            raise ValueError(f"{name}: the model {model} can't play it: {why}")
        result = json.loads(done.stdout.strip().splitlines()[-1])
        record = RunRecord(result["output_dir"])
        groups: dict[str, list[float]] = {}
        num_unscored = 0
        for step in record.steps:
            for group in step.groups:
                scored = [reward for reward in group.rewards if reward is not None]
                num_unscored += len(group.rewards) - len(scored)
                groups.setdefault(group.group_id, []).extend(scored)
    return ModelGroups(name, model, [g for g in groups.values() if g], num_unscored=num_unscored)


def _path() -> str:
    """The path by which modules of the user are found: this folder, too."""
    return os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))


def task_words(name: str, settings: Mapping[str, Any]) -> list[str]:
    """A task of the audit as a recipe takes it.

    Args:
        name: as the audit takes it.
        settings: of the task.

    Raises:
        ValueError: it is of a kind that no recipe has.
    """
    own = dict(settings)
    if name.startswith(VERIFIERS):
        raise ValueError(f"{name}: no recipe plays tasksets of verifiers: leave --model out.")
    if Path(name).exists():
        task, own = "harbor", {"dataset": name, **own}
    elif name.startswith(GYMNASIUM):
        arguments = {"id": name.removeprefix(GYMNASIUM), **(own.pop("arguments", None) or {})}
        task, own = "environment", {"factory": GYMNASIUM_TEXT, "arguments": arguments, **own}
    elif name.startswith(OPENENV):
        task, own = "openenv", {"base_url": name.removeprefix(OPENENV), **own}
    elif ":" in name:
        task, own = "environment", {"factory": name, **own}
    else:
        task = name
    return [f"task={task}", *(f"task.{key}={_value(value)}" for key, value in own.items())]


def _value(value: Any, *, inside: bool = False) -> str:
    """A value as settings are written; texts inside of others are quoted."""
    if isinstance(value, Mapping):
        pairs = (f"{key}: {_value(each, inside=True)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(each, inside=True) for each in value)}]"
    if isinstance(value, str):
        return json.dumps(value) if inside else value
    return json.dumps(value)
