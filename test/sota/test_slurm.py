"""Recipes as jobs of SLURM: a real controller and two real nodes, all on this machine."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time

import psutil
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
    # The second node sees no process of the first one, as on another machine.
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    can_part = subprocess.run([*apart, "true"], capture_output=True, check=False).returncode == 0
    first, *others = (["slurmd", "-D", "-N", name] for name in NODES)
    daemons += [first, *([*apart, *other] if can_part else other for other in others)]
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
            # A daemon behind unshare, which is deaf to other signals, ends with it.
            process.send_signal(signal.SIGKILL if "unshare" in process.args[0] else signal.SIGTERM)
        for process in running:
            process.wait(timeout=60)


class Job:
    """A job that was submitted, as its user sees it."""

    def __init__(self, cluster, folder):
        self._cluster, self._folder = cluster, folder
        (self.number,) = self.ask("squeue", "--noheader", "--format=%A").split()

    def ask(self, *words):
        return subprocess.run(words, env=self._cluster, capture_output=True, text=True).stdout

    @property
    def log(self):
        path = self._folder / f"mine-{self.number}.log"
        return path.read_text() if path.exists() else ""

    @property
    def state(self):
        return re.search(r"JobState=(\w+)", self.ask("scontrol", "show", "job", self.number))[1]

    def wait_until(self, is_so):
        return wait_until(is_so, lambda: self.state + self.log[-5000:])

    def warn(self):
        """Warn it as before the end of its time, and let it begin again at once."""
        self.ask("scancel", "--batch", "--signal=USR1", self.number)
        self.wait_until(lambda: self.state == "PENDING")
        start = "StartTime=now+4"  # SLURM waits for two minutes
        self.ask("scontrol", "update", f"jobid={self.number}", start)

    def wait_for(self, text):
        ended = ("COMPLETED", "FAILED", "TIMEOUT")
        self.wait_until(lambda: text in self.log or self.state in ended)
        assert text in self.log, self.log[-5000:]

    def wait_for_end(self):
        self.wait_until(lambda: self.state in ("COMPLETED", "FAILED", "TIMEOUT"))
        return self.state


@pytest.fixture
def submit(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)

    def submit(*words):
        assert main(["--nodes=2", "--time=00:30:00", "--job-name=mine", *words]) == 0
        return Job(cluster, tmp_path)

    return submit


@pytest.mark.timeout(600)
def test_a_job_that_is_warned_saves_and_goes_on_in_its_folder(submit, tmp_path):
    settings = ["debug=tiny", "task=echo", "train.num_steps=20", "evaluate.num_prompts=2"]
    settings += ["evaluate.num_shown=0", "logger=none", "checkpoint.every=null"]
    job = submit("grpo", *settings)
    job.wait_for("grpo step 2/20")
    assert "NumNodes=2" in job.ask("scontrol", "show", "job", job.number)
    job.warn()
    assert "step 20/20" not in job.log
    assert job.wait_for_end() == "COMPLETED", job.log[-3000:]
    first, second = job.log.split(f"job {job.number}, attempt 2, on 127.0.0.[1-2]")
    assert first.startswith(f"job {job.number}, attempt 1, on 127.0.0.[1-2]")
    steps = [int(n) for n in re.findall(r"grpo step (\d+)/20", first + second)]
    assert steps == list(range(1, 21)), "each step was made once"
    assert "going on after step" in second
    (run,) = (tmp_path / "outputs/grpo/echo").glob("slurm-*-001")
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 20


MINE = "def letters(completions, **_): return [float(c.count('a')) for c in completions]\n"
WITH_SERVERS = (
    *("debug=tiny", "task.dataset=rows.jsonl", "task.rewards=mine:letters", "logger=none"),
    *("train.num_epochs=1", "optim.learning_rate=0.1", "evaluate.num_prompts=2"),
    *("evaluate.num_shown=0", "checkpoint.every=null", "engine=vllm"),
)


@pytest.fixture
def submit_with_servers(submit, tmp_path):
    """Submits a job whose second node starts a server of vLLM."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}?"}}\n' for n in range(20)))

    def submit_with_servers(*settings):
        return submit("--engine-nodes=1", "grpo", *WITH_SERVERS, *settings)

    return submit_with_servers


def servers(cluster):
    """Environments of vLLM's servers that the nodes of this cluster have started, by process."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "torchrl_modules.vllm.server" in process.cmdline():
                found[process] = process.environ()
    own = {p: e for p, e in found.items() if e.get("SLURM_CONF") == cluster["SLURM_CONF"]}
    return {p: e for p, e in own.items() if p.parent() not in own}  # engines are forks of theirs


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_a_node_of_its_own_draws_with_the_weights_of_each_step(
    submit_with_servers, cluster, tmp_path
):
    job = submit_with_servers("train.num_steps=3")
    job.wait_for("grpo step 1/3")
    (environment,) = servers(cluster).values()
    assert environment["SLURMD_NODENAME"] == "127.0.0.2"
    secrets = [environment["TORCHRL_ENGINE_TOKEN"], environment["TORCHRL_VLLM_TOKEN"]]
    lines = [" ".join(process.cmdline()) for process in psutil.process_iter()]
    assert not [line for line in lines if any(secret in line for secret in secrets)]
    assert job.wait_for_end() == "COMPLETED", job.log[-3000:]
    assert not any(secret in job.log for secret in secrets)
    assert not servers(cluster)
    (run,) = tmp_path.glob("outputs/grpo/*/slurm-*-001")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if step.get("optimizer_steps")]
    # The steps are large: drawn with other weights than the trainer has, the ratio is not 1.
    assert len(trained) >= 2
    assert [step["ratio_mean"] for step in trained] == pytest.approx([1] * len(trained), abs=1e-3)


@pytest.mark.weekly
@pytest.mark.vllm
@pytest.mark.timeout(1200)
def test_a_server_that_dies_and_a_job_that_is_warned_go_on(submit_with_servers, cluster):
    streams = ("collector=streaming", "collector.max_staleness=1")
    job = submit_with_servers("train.num_steps=12", *streams)
    job.wait_for("grpo step 2/12")
    (server,) = servers(cluster)
    server.kill()
    job.wait_for("127.0.0.2, server 0 is stale")  # it runs again, and gets the weights
    assert "127.0.0.2, server 0 is dead" in job.log
    assert "127.0.0.2: The vLLM server has ended by itself (exit code -9)" in job.log
    step = int(re.findall(r"grpo step (\d+)/12", job.log)[-1])
    job.wait_for(f"grpo step {step + 1}/12")
    (second,) = servers(cluster)
    job.warn()
    job.wait_until(lambda: not second.is_running())
    assert "step 12/12" not in job.log
    assert job.wait_for_end() == "COMPLETED", job.log[-3000:]
    first, second = job.log.split(f"job {job.number}, attempt 2, on 127.0.0.[1-2]")
    steps = [int(n) for n in re.findall(r"grpo step (\d+)/12", first + second)]
    assert steps == list(range(1, 13)), "each step was made once"
    assert "going on after step" in second
    assert not servers(cluster)


@pytest.mark.vllm
def test_a_server_that_does_not_start_ends_the_job_in_words(submit_with_servers, cluster):
    job = submit_with_servers("train.num_steps=3", "+engine.engine_kwargs.quantization=nonsense")
    assert job.wait_for_end() == "FAILED", job.log[-3000:]
    assert "127.0.0.2, server 0: RuntimeError: The vLLM server did not start" in job.log
    assert "nonsense" in job.log.partition("did not start")[2]
    assert not servers(cluster)


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


def test_the_last_nodes_start_servers_and_the_others_have_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = script_of(
        "--nodes=4", "--engine-nodes=1", "--ntasks-per-node=8", "--gpus-per-node=8",
        "grpo", "engine=vllm",
    )  # fmt: skip
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    # What its shell makes of four nodes: srun says what it is told, and scontrol which they are.
    programs = {"srun": 'echo "${@@Q}"; sleep 1', "scontrol": "printf 'a\\nb\\nc\\nd\\n'"}
    for name, words in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{words}\n")
        (tmp_path / name).chmod(0o755)
    told = text.replace('> >(cat > "$TORCHRL_ENGINE_HOSTS"', '> >(tee "$TORCHRL_ENGINE_HOSTS"')
    told = told.replace("export PATH=", "export PATH=.:")
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "[a-d]"}
    done = subprocess.run(
        ["bash"], input=told, env=environment, text=True, capture_output=True, check=True
    )
    lines = [shlex.split(line) for line in done.stdout.splitlines() if "torchrl_agents" in line]
    (engines,) = [words for words in lines if "torchrl_agents.engine_node" in words]
    assert {"--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--nodelist=d"} <= {*engines}
    (ranks,) = [words for words in lines if "torchrl_agents" in words]
    assert {"--nodes=3", "--ntasks=24", "--nodelist=a,b,c"} <= {*ranks}
    assert ranks[-4:] == ["engine=vllm", "name=slurm-7", "resume=auto", "engine.nodes=1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--engine-nodes=2 --nodes=2 grpo", "--nodes= a number above it, got 2"),
        ("--engine-nodes=1 grpo", "--nodes= a number above it, got 1"),
        ("--engine-nodes=1 --nodes=2-4 grpo", "--nodes= a number above it, got 2-4"),
        ("--engine-nodes=0 --nodes=2 grpo", "--engine-nodes=0 must be a whole number"),
        ("--engine-nodes=1 --nodes=2 --gpus-per-task=1 grpo", "--gpus-per-task gives GPUs to task"),
        ("--nodes=2 grpo engine.nodes=1", "engine.nodes= is set by --engine-nodes="),
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
    # What the ranks would refuse is refused here, as they are counted and with their nodes.
    shards = ["train.parallel=fsdp2", "train.num_replicas=2"]
    assert main(["--nodes=3", "grpo", "debug=tiny", *shards]) == 2
    assert "train.num_replicas=2 has to divide the 3 ranks" in capfd.readouterr().err
    nodes = ["--nodes=3", "--engine-nodes=2"]
    assert main([*nodes, "grpo", "debug=tiny"]) == 2
    assert "engine.nodes is for engine=vllm or sglang" in capfd.readouterr().err
    split = "+engine.engine_kwargs.tensor_parallel_size=3"
    assert main([*nodes, "--gres=gpu:h100:8", "grpo", "debug=tiny", "engine=vllm", split]) == 2
    assert "the 8 GPUs of a node are shared out evenly" in capfd.readouterr().err
    assert main([*nodes, "--gres=gpu:h100:6", "grpo", "debug=tiny", "engine=vllm", split]) == 2
    assert "there is no sbatch here" in capfd.readouterr().err
    assert main(["--print", "grpo", "debug=tiny"]) == 0
    assert capfd.readouterr().out.startswith("#!/usr/bin/env bash\n#SBATCH ")
