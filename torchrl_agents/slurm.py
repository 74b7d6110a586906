"""The command ``torchrl-agents slurm``: a recipe as a job that goes on where its time ended."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from .command import ALIASES, recipes
from .settings import SUBMITS
from .settings.engine_nodes import ENDED, GPUS_VARIABLE, NODES_VARIABLE

USAGE: Final = """\
usage: torchrl-agents slurm [OPTIONS OF SBATCH] [--print] [--warn=SECONDS] RECIPE setting=value ...

torchrl-agents slurm --time=04:00:00 --gpus-per-node=1 grpo task=gsm8k policy.model=Qwen/Qwen3-0.6B
torchrl-agents slurm --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --time=1-0 grpo profile=gpu ...
torchrl-agents slurm --nodes=4 --engine-nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --time=1-0 \\
    grpo profile=gpu engine=vllm ...

Submits a job that runs a recipe, a rank for each task of SLURM (--ntasks-per-node=, 1 when not
given). Before its time is over the run saves and ends, and the job is queued again; it goes on in
the same folder (resume=auto). The settings are checked first, on this machine. All nodes have to
see this folder and this Python.

--print         show the job's script, and submit nothing
--engine-nodes=NUMBER
                the last nodes of the job start servers of engine=vllm or sglang for the run, as
                many as their GPUs allow (engine.per_node=); ranks are on the others
--warn=SECONDS  how long before the end of its time the run is told to save; 300 when not given.
                SLURM may do so a minute earlier
All other options are those of sbatch, by their long names and with = before the value:
--partition=, --account=, --time=, --nodes=, --cpus-per-task=, --mem=. See docs/distributed.md."""
_OURS: Final = (
    *("--ntasks-per-node", "--signal", "--requeue", "--no-requeue", "--open-mode", "--ntasks"),
    *("--array", "--wrap", "--test-only", "--parsable"),
)
"""Options of sbatch on which the job's script depends, or that make no sense here."""
_OF_TASKS: Final = (
    *("--gpus", "--gpus-per-task", "--gpus-per-socket", "--ntasks-per-gpu", "--tres-per-task"),
)
"""Options that give GPUs to tasks, of which a node with servers has one."""
_SCRIPT: Final = r"""#!/usr/bin/env bash
{options}
set -uo pipefail
cd {folder}
export PATH={programs}:"$PATH"{path}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Where the ranks meet.
MASTER_ADDR=${{nodes[0]}}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
echo "job $SLURM_JOB_ID, attempt $((${{SLURM_RESTART_COUNT:-0}} + 1)), on $SLURM_JOB_NODELIST"
# SLURM warns this shell, and this shell the ranks: each saves what is its own, and ends.
warned= ranks=
trap 'warned=yes; [ -z "$ranks" ] || kill -USR1 "$ranks"' USR1
{engines}srun --kill-on-bad-exit=1 {nodes}\
    ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}} \
    bash -c 'export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
        export LOCAL_WORLD_SIZE={tasks}; exec "$@"' rank \
    {command} &
ranks=$!
[ -z "$warned" ] || kill -USR1 "$ranks"
while :; do # a signal ends a wait
    wait "$ranks"
    status=$?
    kill -0 "$ranks" 2> /dev/null || break
done
{end}if [ -n "$warned" ] && [ "$status" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""
_ENGINES: Final = r"""# The last nodes start servers; rank 0 reads where, and asks with a secret.
TORCHRL_ENGINE_NODES=$(IFS=,; echo "${{nodes[*]:{ranked}}}")
TORCHRL_ENGINE_TOKEN=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
TORCHRL_ENGINE_HOSTS=$(mktemp)
export TORCHRL_ENGINE_NODES TORCHRL_ENGINE_TOKEN TORCHRL_ENGINE_HOSTS
trap 'rm -f "$TORCHRL_ENGINE_HOSTS"' EXIT
env -u SLURM_CPUS_PER_TASK -u SLURM_TRES_PER_TASK \
    srun --nodes={number} --ntasks={number} --ntasks-per-node=1 --cpu-bind=none \
    --nodelist="$TORCHRL_ENGINE_NODES" {program} \
    > >(cat > "$TORCHRL_ENGINE_HOSTS"; echo "{ended}" >> "$TORCHRL_ENGINE_HOSTS") &
engines=$!
rank_nodes=$(IFS=,; echo "${{nodes[*]:0:{ranked}}}")
"""
_END_ENGINES: Final = r"""# Their servers have ended with rank 0; now so do they.
kill -USR2 "$engines" 2> /dev/null && timeout 30 tail --pid="$engines" -f /dev/null
kill "$engines" 2> /dev/null
wait "$engines"
"""


class SlurmJob(NamedTuple):
    """A recipe that is to run as a job of SLURM.

    Args:
        options: of sbatch, ``--name=value`` each.
        recipe: its name.
        settings: of the recipe, as they are typed.
        num_tasks: ranks on each node that has some.
        warn_s: seconds before the end of its time at which the run is told to save.
        num_nodes: of the job; ``None`` where it is not said before it starts.
        num_engine_nodes: of these, which start servers and have no ranks.
    """

    options: Sequence[str]
    recipe: str
    settings: Sequence[str]
    num_tasks: int = 1
    warn_s: int = 300
    num_nodes: int | None = 1
    num_engine_nodes: int = 0

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
        program = [shlex.quote(sys.executable), "-m"]
        settings = [shlex.quote(each) for each in self.settings]
        if "name" not in given:
            settings.append('"name=slurm-$SLURM_JOB_ID"')
        if "resume" not in given:
            settings.append("resume=auto")
        if self.num_engine_nodes:
            settings.append(f"engine.nodes={self.num_engine_nodes}")
        path = os.environ.get("PYTHONPATH")
        return _SCRIPT.format(
            options="\n".join(f"#SBATCH {each}" for each in options),
            folder=shlex.quote(str(Path.cwd())),
            programs=shlex.quote(str(Path(sys.executable).parent)),
            path=f"\nexport PYTHONPATH={shlex.quote(path)}" if path else "",
            tasks=self.num_tasks,
            command=" ".join([*program, "torchrl_agents", self.recipe, *settings]),
            **self._parts(" ".join([*program, "torchrl_agents.engine_node"])),
        )

    @property
    def num_ranked(self) -> int | None:
        """Nodes that have ranks; ``None`` where that is not known before the job starts."""
        return None if self.num_nodes is None else self.num_nodes - self.num_engine_nodes

    @property
    def num_gpus(self) -> int | None:
        """GPUs of each node, as far as the options say so."""
        for option in self.options:
            name, _, value = option.partition("=")
            words = value.split(":")
            if name == "--gpus-per-node" or (name == "--gres" and words[0] == "gpu"):
                count = words[-1].partition("(")[0]
                return int(count) if count.isdecimal() else None
        return None

    def _parts(self, program: str) -> dict[str, str]:
        """Parts of the script that are for nodes with servers."""
        ranked = self.num_ranked
        if not self.num_engine_nodes or ranked is None:
            return {"engines": "", "nodes": "", "end": ""}
        engines = _ENGINES.format(
            ranked=ranked, number=self.num_engine_nodes, program=program, ended=ENDED
        )
        count = f"--nodes={ranked} --ntasks={ranked * self.num_tasks}"
        nodes = f'{count} --nodelist="$rank_nodes" '
        return {"engines": engines, "nodes": nodes, "end": _END_ENGINES}


def read_job(arguments: Sequence[str]) -> SlurmJob:
    """Read what is typed behind ``torchrl-agents slurm``.

    Args:
        arguments: options, the name of a recipe, its settings.

    Raises:
        ValueError: there is no such recipe, an option has no value or is none of sbatch's here, a
            number is none, or nodes with servers do not go with the other options.
    """
    words = [*arguments]
    own = {"--ntasks-per-node": "1", "--warn": "300", "--engine-nodes": "0"}
    options: list[str] = []
    while words and words[0].startswith("-"):
        name, _, value = (word := words.pop(0)).partition("=")
        if name in own and value:
            if not (value.isdecimal() and int(value) > 0):
                raise ValueError(f"{word} must be a whole number, at least 1.")
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
    recipe, *settings = words
    if wrong := [each for each in settings if each.startswith("-")]:
        raise ValueError(
            f"{wrong[0]} stands behind the recipe, where its settings are: options of sbatch come "
            "before it, and of the recipe's own only settings can be in a job."
        )
    num_tasks, warn_s, num_engine_nodes = map(int, own.values())
    num_nodes = _num_nodes(options, settings, num_engine_nodes)
    return SlurmJob(options, recipe, settings, num_tasks, warn_s, num_nodes, num_engine_nodes)


def _num_nodes(
    options: Sequence[str], settings: Sequence[str], num_engine_nodes: int
) -> int | None:
    """Return how many nodes a job has, of which these start servers.

    Raises:
        ValueError: they do not go with the options or the settings.
    """
    given = {name: value for name, _, value in (each.partition("=") for each in options)}
    number = given.get("--nodes", "1")
    if any(each.partition("=")[0] == "engine.nodes" for each in settings):
        raise ValueError("engine.nodes= is set by --engine-nodes=: give that, before the recipe.")
    if not num_engine_nodes:
        return int(number) if number.isdecimal() else None
    who = f"--engine-nodes={num_engine_nodes}"
    if not number.isdecimal() or num_engine_nodes >= int(number):
        raise ValueError(
            f"{who} are the last of the job's nodes, and at least one has ranks: give --nodes= a "
            f"number above it, got {number}."
        )
    if of_tasks := [name for name in _OF_TASKS if name in given]:
        raise ValueError(
            f"{who}: {of_tasks[0]} gives GPUs to tasks, and a node with servers has one task. Say "
            "how many each node has: --gpus-per-node=8."
        )
    return int(number)


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
    if not _are_accepted(job):
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


def _are_accepted(job: SlurmJob) -> bool:
    """Check a recipe's settings as the ranks of a job will; what is wrong is told."""
    environment, settings = dict(os.environ), [*job.settings]
    if job.num_ranked is not None:  # or how many ranks there will be is not known
        environment |= {SUBMITS: "1", "WORLD_SIZE": str(job.num_ranked * job.num_tasks)}
    if job.num_engine_nodes:
        settings.append(f"engine.nodes={job.num_engine_nodes}")
        environment[NODES_VARIABLE] = ",".join(f"node-{i}" for i in range(job.num_engine_nodes))
        if job.num_gpus is not None:
            environment[GPUS_VARIABLE] = str(job.num_gpus)
    shown = [sys.executable, "-m", "torchrl_agents", job.recipe, *settings, "--cfg", "job"]
    checked = subprocess.run(shown, env=environment, capture_output=True, text=True, check=False)
    if checked.returncode != 0:
        sys.stderr.write(checked.stderr)
    return checked.returncode == 0
