"""Machines by bubblewrap: what they are made of, what runs in them, and that nothing is left."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tasks_for_tests import write_task

from torchrl_envs.harbor.bubblewrap import BubblewrapMachine
from torchrl_envs.harbor.dockerfile import instructions
from torchrl_envs.harbor.folders import read_task
from torchrl_envs.harbor.machines import MachineError, file_of, machine_type

ROOT = Path(__file__).parents[3]
DOCKERFILE = """\
# a comment
FROM debian:bookworm-slim
ARG GREETING=hello
RUN apt-get update && apt-get install -y --no-install-recommends bash \\
    coreutils && rm -rf /var/lib/apt/lists/*
ENV COLOR=red SHADE="dark $GREETING"
WORKDIR /srv/work
WORKDIR inner
COPY data.txt sub/ ./
COPY data.txt /etc/own.conf
RUN echo "$COLOR $GREETING" > made.txt
CMD ["sleep", "infinity"]
"""


@pytest.fixture
def started(tmp_path):
    """Starts the machine of a task whose texts are changed."""
    machines = []

    def start(**changed):
        task = read_task(write_task(tmp_path / f"task{len(machines)}", **changed))
        machines.append(BubblewrapMachine(task.place))
        machines[-1].start()
        return machines[-1]

    yield start
    for machine in machines:
        machine.stop()


def test_a_dockerfile_is_followed_and_its_files_are_the_same_the_second_time(started):
    texts = {"environment/Dockerfile": DOCKERFILE, "environment/sub/deep.txt": "deep"}
    said = []
    for _ in range(2):
        machine = started(**texts)
        done = machine.run(
            'pwd; ls; cat made.txt /etc/own.conf; echo "$COLOR $SHADE"; id -u', timeout_s=10
        )
        assert (done.status, done.stderr) == (0, "")
        said.append(done.stdout.splitlines())
    assert said[0] == said[1]
    assert said[0][0] == "/srv/work/inner"
    assert said[0][1:4] == ["data.txt", "deep.txt", "made.txt"]
    assert said[0][4:] == ["red hello", "some data", "red dark hello", "0"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("FROM nvidia/cuda:12", "has the programs of this machine"),
        ("FROM python:3.4", "the Python of this machine is"),
        ("FROM debian AS one", "images of several stages"),
        ("RUN apt-get install -y no-such-package-1", "no-such-package-1 is not installed"),
        ("RUN exit 3", "`exit 3` ended with status 3"),
        ("COPY missing.txt /", "there is no missing.txt in environment"),
        ("COPY ../task.toml /", "there is no ../task.toml in environment"),
        ("COPY --from=other /a /b", "--from=other can't be followed"),
        ("ADD https://example.com/x /x", "is on a network"),
        ("USER nobody", "a sandbox has one user"),
        ("ONBUILD RUN x", "ONBUILD can't be followed"),
        ("RUN <<END", "a here-document"),
    ],
)
def test_what_a_sandbox_can_not_be_is_refused_by_name(started, line, said):
    first = "" if line.startswith("FROM") else "FROM debian\n"
    with pytest.raises(MachineError, match=said) as raised:
        started(**{"environment/Dockerfile": f"{first}{line}\n"})
    assert "machine=bubblewrap can't run it" in str(raised.value)


def test_files_that_docker_would_leave_out_are_not_copied_in_silence(started):
    texts = {"environment/Dockerfile": "FROM debian\nCOPY . /srv/\n", "environment/key": "k"}
    started(**texts, **{"environment/.dockerignore": "# nothing\n\n"})
    with pytest.raises(MachineError, match=r"line 2: .dockerignore is not followed"):
        started(**texts, **{"environment/.dockerignore": "key\n"})


def test_a_continued_line_goes_on_after_comments_and_empty_lines_and_ends_with_the_file(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN a && \\\n  # why\n\n  b\nRUN c \\\n")
    told = [
        (each.name, each.text.split(), each.line) for each in instructions(tmp_path / "Dockerfile")
    ]
    assert told == [("FROM", ["debian"], 1), ("RUN", ["a", "&&", "b"], 2), ("RUN", ["c"], 6)]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("network_mode = 'public'", "a sandbox has no network"),
        ("gpus = 1", "needs a GPU"),
        ("docker_image = 'x/y:1'", "needs the image x/y:1"),
        ("[agent]\nuser = 'bob'", "the task has the user bob, and a sandbox has one, root"),
    ],
)
def test_settings_that_a_sandbox_can_not_keep_are_refused(started, setting, said):
    with pytest.raises(MachineError, match=said):
        started(**{"task.toml": f"[environment]\n{setting}\n"})


def test_output_is_cut_and_late_commands_are_killed(started):
    machine = started()
    done = machine.run(
        "echo begin; yes | head -c 500000; echo end", timeout_s=10, max_output_bytes=100
    )
    assert done.stdout.startswith("begin\ny\n")
    assert done.stdout.endswith("y\nend\n")
    assert "bytes were cut" in done.stdout
    assert len(done.stdout) < 200
    late = machine.run("sleep 60 & echo soon; sleep 60", timeout_s=0.3)
    assert (late.status, late.stdout) == (None, "soon\n")
    assert machine.run("cat; echo $?", timeout_s=5).stdout == "0\n"  # its input is empty
    assert machine.run("kill -9 $$", timeout_s=5).status == -9


def test_machines_of_a_process_with_many_open_files(started):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    numbers = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert started().run("cat; echo alive", timeout_s=5).stdout == "alive\n"
    finally:
        for number in numbers:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_goes_on_in_the_background_and_is_copied(started, tmp_path):
    machine = started()
    machine.run("(sleep 0.2; echo late > /tmp/late) > /dev/null 2>&1 &", timeout_s=5)
    assert machine.run("sleep 0.6; cat /tmp/late", timeout_s=5).stdout == "late\n"
    (tmp_path / "files/sub").mkdir(parents=True)
    (tmp_path / "files/sub/x").write_bytes(b"\0\xff")
    machine.upload(tmp_path / "files", "/opt/here")
    assert file_of(machine.download("/opt/here/sub"), "x") == b"\0\xff"
    assert machine.download("/opt/nothing") is None


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("touch /usr/bin/x", id="the system is read-only"),
        pytest.param("cat /etc/shadow", id="no file of others"),
        pytest.param("ls /work /root/.ssh", id="no folder of others"),
        pytest.param("unshare -r true", id="no namespaces"),
        pytest.param("mount -t tmpfs x /mnt", id="no mounts"),
        pytest.param("echo x > /proc/sys/kernel/core_pattern", id="no settings of the kernel"),
        pytest.param("head -c 700M /dev/zero > /tmp/big", id="the disk is limited"),
        pytest.param(": < /dev/tcp/1.1.1.1/53", id="no network"),
    ],
)
def test_what_programs_can_not_do(started, command):
    assert started().run(command, timeout_s=20).status not in (0, None)


def test_a_fork_bomb_ends_with_its_machine(started):
    machine = started()
    machine.run(":(){ :|:& };:", timeout_s=1)
    began = time.monotonic()
    machine.stop()
    assert time.monotonic() - began < 20
    with pytest.raises(MachineError, match="stopped"):
        machine.run("true", timeout_s=1)


def test_nothing_is_left_when_this_process_is_killed(tmp_path):
    write_task(tmp_path / "one")
    marker = f"313.{os.getpid()}"
    code = f"""
import os, signal
from torchrl_envs.harbor.bubblewrap import BubblewrapMachine
from torchrl_envs.harbor.folders import read_task
machine = BubblewrapMachine(read_task({str(tmp_path / "one")!r}).place)
machine.start()
machine.run("setsid sleep {marker} > /dev/null 2>&1 & echo", timeout_s=5)
print("ready", flush=True)
signal.pause()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 20
        while not sleepers(marker) and time.monotonic() < deadline:
            time.sleep(0.05)  # it was started in the background
        begun = sleepers(marker)
        os.kill(process.pid, signal.SIGKILL)
    assert begun
    deadline = time.monotonic() + 20
    while sleepers(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sleepers(marker)


def sleepers(marker):
    found = []
    for process in psutil.process_iter():
        try:
            found += [process] if marker in process.cmdline() else []
        except psutil.Error:
            continue
    return found


def test_machines_by_name():
    assert machine_type("bubblewrap") is BubblewrapMachine
    with pytest.raises(ValueError, match="machine must be one of bubblewrap, docker, podman"):
        machine_type("vmware")
    with pytest.raises(ValueError, match="can't be imported"):
        machine_type("no_such_package.environments:Cloud")


def test_a_container_that_can_not_be_had_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    task = read_task(write_task(tmp_path / "one"))
    with pytest.raises(MachineError, match="podman is not installed"):
        machine_type("podman")(task.place)
