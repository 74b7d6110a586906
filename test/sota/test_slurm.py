"""Recipes as jobs of SLURM: a real controller and two real nodes, all on this machine."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time

import pytest

from torchrl_agents.slurm import main, read_job

NODES = ("127.0.0.1", "127.0.0.2")  # ranks meet at the name of the first one
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=8 State=UNKNOWN\n"
)
DEADLINE_S = 240


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_until(is_so, told):
    """Wait for something; where it does not come, say what is known."""
    begun = time.monotonic()
    while not (found := is_so()):
        assert time.monotonic() - begun < DEADLINE_S, told()
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Environment variables of a user of a cluster of two nodes."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "munge", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir(mode=0o711)
    port, *of_nodes = free_ports(1 + len(NODES))
    nodes = "".join(
        NODE.format(name=name, port=own) for name, own in zip(NODES, of_nodes, strict=True)
    )
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    text = CONFIGURATION.format(folder=folder, port=port, user=user)
    (folder / "slurm.conf").write_text(nodes + text)
    key = folder / "munge/key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    paths = f"{os.environ['PATH']}:/usr/sbin"
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": paths}
    files = {name: f"{folder}/munge/{name}" for name in ("socket", "pid-file", "log-file")}
    told = [f"--{name}={path}" for name, path in files.items()]
    told += [f"--key-file={key}", f"--seed-file={folder}/munge/seed", "--force", "--foreground"]
    daemons = [["munged", *told], ["slurmctld", "-D", "-c"]]
    daemons += [["slurmd", "-D", "-N", name] for name in NODES]
    running = []
    try:
        for daemon in daemons:
            program = shutil.which(daemon[0], path=paths)
            assert program, f"{daemon[0]} is missing: requirements/debian.txt"
            with (folder / f"{daemon[0]}.out").open("a") as out:
                running.append(
                    subprocess.Popen(
                        [program, *daemon[1:]], env=environment, stdout=out, stderr=out
                    )
                )
            if daemon[0] == "munged":
                wait_until(lambda: (folder / "munge/socket").exists(), lambda: "munged: no socket")

        def states():
            asked = ["sinfo", "--noheader", "--Node", "--format=%t"]
            return subprocess.run(asked, env=environment, capture_output=True, text=True).stdout

        wait_until(
            lambda: states().split() == ["idle"] * len(NODES),
            lambda: states() + (folder / "slurmctld.log").read_text()[-2000:],
        )
        yield environment
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(timeout=60)


@pytest.mark.timeout(600)
def test_a_job_that_is_warned_saves_and_goes_on_in_its_folder(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)

    def ask(*words):
        return subprocess.run(words, env=cluster, capture_output=True, text=True).stdout

    settings = ["debug=tiny", "task=echo", "train.num_steps=20", "evaluate.num_prompts=2"]
    settings += ["evaluate.num_shown=0", "logger=none", "checkpoint.every=null"]
    assert main(["--nodes=2", "--time=00:30:00", "--job-name=mine", "grpo", *settings]) == 0
    (job,) = ask("squeue", "--noheader", "--format=%A").split()

    def log():
        path = tmp_path / f"mine-{job}.log"
        return path.read_text() if path.exists() else ""

    def state():
        return re.search(r"JobState=(\w+)", ask("scontrol", "show", "job", job))[1]

    def told():
        return state() + log()[-3000:]

    wait_until(lambda: "grpo step 2/20" in log(), told)
    assert "NumNodes=2" in ask("scontrol", "show", "job", job)
    ask("scancel", "--batch", "--signal=USR1", job)  # as before the end of its time
    wait_until(lambda: state() == "PENDING", told)
    assert "step 20/20" not in log()
    ask("scontrol", "update", f"jobid={job}", "StartTime=now+4")  # SLURM waits for two minutes
    wait_until(lambda: state() in ("COMPLETED", "FAILED", "TIMEOUT"), told)
    assert state() == "COMPLETED", told()
    first, second = log().split(f"job {job}, attempt 2, on 127.0.0.[1-2]")
    assert first.startswith(f"job {job}, attempt 1, on 127.0.0.[1-2]")
    steps = [int(n) for n in re.findall(r"grpo step (\d+)/20", first + second)]
    assert steps == list(range(1, 21)), "each step was made once"
    assert "going on after step" in second
    (run,) = (tmp_path / "outputs/grpo/echo").glob("slurm-*-001")
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 20


def script_of(*arguments):
    return read_job(arguments).script


def test_the_script_says_what_was_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "a folder")
    text = script_of(
        "--nodes=2", "--ntasks-per-node=8", "--warn=60", "--output=x.log",
        "grpo", "task.system_prompt=it's a $HOME", "name=mine",
    )  # fmt: skip
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]
    assert sorted(options) == [
        "--job-name=grpo", "--nodes=2", "--ntasks-per-node=8", "--open-mode=append",
        "--output=x.log", "--requeue", "--signal=B:USR1@60",
    ]  # fmt: skip
    (line,) = [line for line in text.splitlines() if "-m torchrl_agents" in line]
    words = shlex.split(line.removesuffix("&"))
    assert words == [
        *(sys.executable, "-m", "torchrl_agents", "grpo"),
        *("task.system_prompt=it's a $HOME", "name=mine", "resume=auto"),
    ]
    assert "export PYTHONPATH='a folder'" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("-N2 grpo", "by their long names"),
        ("--time 4 grpo", "= before their value"),
        ("grpa task=echo", "a recipe is due"),
        ("--nodes=2", "got none"),
        ("--array=1-3 grpo", "--array=1-3 is no option here"),
        ("--warn grpo", "--warn is no option here"),
        ("--warn=soon grpo", "--warn=soon must be a whole number"),
        ("grpo --time=1-0", "stands behind the recipe"),
    ],
)
def test_what_can_not_be_a_job_is_refused(arguments, words, capsys):
    assert main(arguments.split()) == 2
    assert words in capsys.readouterr().err


def test_wrong_settings_and_a_machine_without_slurm_are_told(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["grpo", "task.nothing=1"]) == 2
    assert "no setting 'task.nothing'" in capfd.readouterr().err
    assert main(["grpo", "debug=tiny"]) == 2
    assert "there is no sbatch here" in capfd.readouterr().err
    assert main(["--print", "grpo", "debug=tiny"]) == 0
    assert capfd.readouterr().out.startswith("#!/usr/bin/env bash\n#SBATCH ")
