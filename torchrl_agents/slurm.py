"""The command ``torchrl-agents slurm``: a recipe as a job that goes on where its time ended."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from .command import ALIASES, recipes

USAGE: Final = """\
usage: torchrl-agents slurm [OPTIONS OF SBATCH] [--print] [--warn=SECONDS] RECIPE setting=value ...

torchrl-agents slurm --time=04:00:00 --gpus-per-node=1 grpo task=gsm8k policy.model=Qwen/Qwen3-0.6B
torchrl-agents slurm --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --time=1-0 grpo profile=gpu ...

Submits a job that runs a recipe, a rank for each task of SLURM (--ntasks-per-node=, 1 when not
given). Before its time is over the run saves and ends, and the job is queued again; it goes on in
the same folder (resume=auto). The settings are checked first, on this machine. All nodes have to
see this folder and this Python.

--print         show the job's script, and submit nothing
--warn=SECONDS  how long before the end of its time the run is told to save; 300 when not given.
                SLURM may do so a minute earlier
All other options are those of sbatch, by their long names and with = before the value:
--partition=, --account=, --time=, --nodes=, --cpus-per-task=, --mem=. See docs/distributed.md."""
_OURS: Final = (
    *("--ntasks-per-node", "--signal", "--requeue", "--no-requeue", "--open-mode", "--ntasks"),
    *("--array", "--wrap", "--test-only", "--parsable"),
)
"""Options of sbatch on which the job's script depends, or that make no sense here."""
_SCRIPT: Final = r"""#!/usr/bin/env bash
{options}
set -uo pipefail
cd {folder}
export PATH={programs}:"$PATH"{path}
# Where the ranks meet.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
echo "job $SLURM_JOB_ID, attempt $((${{SLURM_RESTART_COUNT:-0}} + 1)), on $SLURM_JOB_NODELIST"
# SLURM warns this shell, and this shell the ranks: each saves what is its own, and ends.
warned=
trap 'warned=yes; scancel --signal=USR1 "$SLURM_JOB_ID.0"' USR1
srun --kill-on-bad-exit=1 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}} \
    bash -c 'export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
        export LOCAL_WORLD_SIZE={tasks}; exec "$@"' rank \
    {command} &
ranks=$!
while :; do # a signal ends a wait
    wait "$ranks"
    status=$?
    kill -0 "$ranks" 2> /dev/null || break
done
if [ -n "$warned" ] && [ "$status" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


class SlurmJob(NamedTuple):
    """A recipe that is to run as a job of SLURM.

    Args:
        options: of sbatch, ``--name=value`` each.
        recipe: its name.
        settings: of the recipe, as they are typed.
        num_tasks: ranks on each node.
        warn_s: seconds before the end of its time at which the run is told to save.
    """

    options: Sequence[str]
    recipe: str
    settings: Sequence[str]
    num_tasks: int = 1
    warn_s: int = 300

    @property
    def script(self) -> str:
        """The script that sbatch takes, for this folder and this Python."""
        names = {each.partition("=")[0] for each in self.options}
        usual = {"--job-name": self.recipe, "--output": "%x-%j.log"}
        options = [
            *(f"{name}={value}" for name, value in usual.items() if name not in names),
            *self.options,
            f"--ntasks-per-node={self.num_tasks}",
            f"--signal=B:USR1@{self.warn_s}",
            *("--requeue", "--open-mode=append"),
        ]
        given = {each.partition("=")[0] for each in self.settings}
        settings = [shlex.quote(each) for each in self.settings]
        if "name" not in given:
            settings.append('"name=slurm-$SLURM_JOB_ID"')
        if "resume" not in given:
            settings.append("resume=auto")
        path = os.environ.get("PYTHONPATH")
        program = [shlex.quote(sys.executable), "-m", "torchrl_agents", self.recipe]
        return _SCRIPT.format(
            options="\n".join(f"#SBATCH {each}" for each in options),
            folder=shlex.quote(str(Path.cwd())),
            programs=shlex.quote(str(Path(sys.executable).parent)),
            path=f"\nexport PYTHONPATH={shlex.quote(path)}" if path else "",
            tasks=self.num_tasks,
            command=" ".join([*program, *settings]),
        )


def read_job(arguments: Sequence[str]) -> SlurmJob:
    """Read what is typed behind ``torchrl-agents slurm``.

    Args:
        arguments: options, the name of a recipe, its settings.

    Raises:
        ValueError: there is no such recipe, an option has no value or is none of sbatch's here, or
            a number is none.
    """
    words = [*arguments]
    own = {"--ntasks-per-node": "1", "--warn": "300"}
    options: list[str] = []
    while words and words[0].startswith("-"):
        name, _, value = (word := words.pop(0)).partition("=")
        if name in own and value:
            own[name] = value
        elif name in _OURS or name in own:
            raise ValueError(
                f"{word} is no option here: the job's script says how its ranks are started, "
                "warned and queued again. Ranks on each node are --ntasks-per-node=8."
            )
        elif not name.startswith("--"):
            raise ValueError(
                f"{word}: options of sbatch are given by their long names, --time=1-0."
            )
        else:
            options.append(word)
    known = [*recipes(), *ALIASES]
    if not words or words[0] not in known:
        found = repr(words[0]) if words else "none"
        hint = " Options of sbatch have a = before their value." if options else ""
        raise ValueError(f"a recipe is due, one of {', '.join(known)}; got {found}.{hint}")
    for name, value in own.items():
        if not (value.isdecimal() and int(value) > 0):
            raise ValueError(f"{name}={value} must be a whole number, at least 1.")
    recipe, *settings = words
    if wrong := [each for each in settings if each.startswith("-")]:
        raise ValueError(
            f"{wrong[0]} stands behind the recipe, where its settings are: options of sbatch come "
            "before it, and of the recipe's own only settings can be in a job."
        )
    return SlurmJob(options, recipe, settings, int(own["--ntasks-per-node"]), int(own["--warn"]))


def main(arguments: Sequence[str]) -> int:
    """Check a recipe's settings, and submit it as a job.

    Args:
        arguments: see :data:`USAGE`.

    Returns:
        0; 2 for bad usage or settings; or what sbatch ended with.
    """
    words = [each for each in arguments if each != "--print"]
    if not words or {"--help", "-h"} & {*words}:
        print(USAGE)
        return 0 if words else 2
    try:
        job = read_job(words)
    except ValueError as error:
        print(f"torchrl-agents slurm: {error}", file=sys.stderr)
        return 2
    if len(words) < len(arguments):
        print(job.script, end="")
        return 0
    shown = [sys.executable, "-m", "torchrl_agents", job.recipe, *job.settings, "--cfg", "job"]
    checked = subprocess.run(shown, capture_output=True, text=True, check=False)
    if checked.returncode != 0:
        sys.stderr.write(checked.stderr)
        return 2
    try:
        return subprocess.run(["sbatch"], input=job.script, text=True, check=False).returncode
    except FileNotFoundError:
        print(
            "torchrl-agents slurm: there is no sbatch here, the command that submits a job. Call "
            "it on a machine of the cluster, or take the script with --print.",
            file=sys.stderr,
        )
        return 2
