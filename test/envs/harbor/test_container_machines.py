"""Machines by docker and podman: real engines, real images, and that nothing is left of them."""

import http.server
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from container_engines import BASE
from tasks_for_tests import write_task
from torchrl.envs.transforms import Compose

from torchrl_data import read_conversations
from torchrl_data.keys import PROMPT
from torchrl_envs import AgentProgram, ChatEnv, DataLoadingPrimer, StepCounter
from torchrl_envs.agents.known import find_agent
from torchrl_envs.containers import ContainerEngine
from torchrl_envs.containers.door import CLOSED_NETWORK, gateway_of
from torchrl_envs.containers.engine import ContainerError
from torchrl_envs.harbor.folders import load_tasks, read_task
from torchrl_envs.harbor.machines import MachineError, file_of
from torchrl_envs.harbor.trial import Trial
from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.harbor import named_program
from torchrl_envs.testing.scripted_turns import ScriptedTurns

ROOT = Path(__file__).parents[3]
DOCKERFILE = f"FROM {BASE}\nWORKDIR /app\nCOPY data.txt ./\n"
BOTH = pytest.mark.parametrize("program", ["docker", "podman"])


@pytest.fixture
def begun(tmp_path, engines):
    """Begins the task whose texts are changed, in a machine of an engine."""
    trials = []

    def begin(program="docker", *, endpoint=None, **changed):
        texts = {"environment/Dockerfile": DOCKERFILE, **changed}
        task = read_task(write_task(tmp_path / f"task{len(trials)}", **texts))
        trials.append(Trial(task, machine=engines(program), endpoint=endpoint))
        trials[-1].start()
        return trials[-1]

    yield begin
    for trial in trials:
        trial.stop()


def said(trial, command, timeout_s=20):
    done = trial.run(command, timeout_s=timeout_s)
    assert done.status == 0, done
    return done.stdout


@BOTH
def test_a_task_is_done_and_scored(begun, program):
    trial = begun(program, **{"task.toml": "[environment.env]\nCOLOR = 'red'\n"})
    assert said(trial, "pwd; ls; echo $COLOR; id -u; cat") == "/app\ndata.txt\nred\n0\n"
    said(trial, "echo hi > out.txt")
    assert trial.finish_step() is None
    assert trial.reward() == 1.0


@BOTH
def test_output_is_kept_in_bounded_memory_and_late_commands_are_killed(begun, program):
    trial = begun(program)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = trial.run(
        "echo begin; head -c 300M /dev/zero; echo end", timeout_s=60, max_output_bytes=99
    )
    cut = (300 << 20) + 10 - 99
    assert done.stdout.replace("\0", "") == f"begin\n\n[... {cut} bytes were cut ...]\nend\n"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # in KiB
    assert grown < 50 << 10
    late = trial.run("echo soon; echo why >&2; sleep 60", timeout_s=1)
    assert (late.stdout, late.stderr, late.status) == ("soon\n", "why\n", None)
    assert trial.run("pgrep sleep", timeout_s=20).status == 1
    assert trial.run("echo out; echo err >&2; exit 7", timeout_s=20) == ("out\n", "err\n", 7)
    assert trial.run("kill -9 $$", timeout_s=20) == ("", "", 137)  # early: it was not late


@pytest.mark.parametrize("others", ["$(pgrep -P 0 -x sh | grep -vx 1)", "-1"])
@pytest.mark.parametrize("files", ["one", "several"])
def test_a_command_that_kills_who_watches_it_costs_itself_alone(begun, others, files):
    trial = begun(**(services() if files == "several" else {}))
    done = trial.run(f"echo a; kill -9 {others}; exit 3", timeout_s=20)
    assert done.stdout == "a\n"
    assert done.status in (3, 137)
    assert said(trial, "echo alive") == "alive\n"


def test_what_a_command_leaves_running_goes_on_and_is_buried(begun):
    trial = begun()
    began = time.monotonic()
    said(trial, "(sleep 1; echo late > /tmp/late; sleep 0.01 & exec sleep 300) & echo now", 60)
    assert time.monotonic() - began < 30  # it is not waited for, though it holds the output
    assert said(trial, "until [ -e /tmp/late ]; do sleep 0.1; done; cat /tmp/late") == "late\n"
    said(trial, "pkill sleep; until ! pgrep sleep; do sleep 0.1; done")  # no dead one stays


def test_files_go_in_and_come_out_as_they_are(begun, tmp_path):
    machine = begun().machine
    (tmp_path / "files/sub").mkdir(parents=True)
    (tmp_path / "files/sub/x y").write_bytes(b"\0\xff")
    (tmp_path / "files/run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "files/run.sh").chmod(0o755)
    machine.upload(tmp_path / "files", "/opt/here it's")
    assert file_of(machine.download("/opt/here it's/sub"), "x y") == b"\0\xff"
    assert machine.run("'/opt/here it'\\''s/run.sh'", timeout_s=20).stdout == "ran\n"
    assert machine.download("/opt/nothing") is None


@BOTH
def test_a_machine_has_the_means_of_its_task_and_no_network(begun, program):
    table = "[environment]\nmemory_mb = 64\nnetwork_mode = 'no-network'\n"
    trial = begun(program, **{"task.toml": table})
    filled = "python3 -c 'x = b\"x\" * (200 << 20)'"
    assert trial.run(filled, timeout_s=60).status == 137
    assert said(trial, "ls /sys/class/net") == "lo\n"
    assert trial.run(": < /dev/tcp/1.1.1.1/53", timeout_s=20).status == 1


def test_a_fork_bomb_ends_with_its_machine(begun):
    trial = begun()
    trial.run(":(){ :|:& };:", timeout_s=2)
    trial.stop()
    with pytest.raises(MachineError, match="stopped"):
        trial.run("true", timeout_s=1)


@pytest.mark.parametrize(
    ("dockerfile", "what"),
    [
        (f"FROM {BASE}\nRUN rm /usr/bin/timeout\n", "has no timeout, which commands in it need"),
        (f"FROM {BASE}\nRUN echo why >&2 && exit 3\n", "docker build failed: .*exit 3"),
        (f'FROM {BASE}\nENTRYPOINT ["no-such-program"]\n', "can't start harbor-.*no-such-prog"),
        (f'FROM {BASE}\nENTRYPOINT ["sleep", "0"]\n', "can't start harbor-.*invalid option"),
    ],
)
def test_an_image_that_can_not_be_a_machine_is_named(begun, dockerfile, what):
    with pytest.raises(MachineError, match=f"(?s)machine=docker: .*{what}"):
        begun(**{"environment/Dockerfile": dockerfile})
    left = subprocess.run(["docker", "ps", "-aq"], capture_output=True, text=True, check=True)
    assert left.stdout == ""


def test_an_image_that_no_registry_gives_is_named(begun):
    table = "[environment]\ndocker_image = 'localhost:9/no/such:1'\n"
    with pytest.raises(MachineError, match="docker can't fetch the image localhost:9/no/such:1"):
        begun(**{"task.toml": table})


def test_an_entry_point_of_the_image_goes_on_and_its_words_are_read(begun):
    entry = '#!/bin/sh\n(yes | head -c 1M; yes >&2) &\necho $$ > /tmp/started\nexec "$@"\n'
    dockerfile = f"FROM {BASE}\nWORKDIR /app\nCOPY entry /\nRUN chmod +x /entry\n"
    dockerfile += 'ENTRYPOINT ["/entry"]\n'
    trial = begun(**{"environment/Dockerfile": dockerfile, "environment/entry": entry})
    assert said(trial, "cat /tmp/started; pgrep -xc yes") == "1\n1\n"


USER = f"FROM {BASE}\nWORKDIR /app\nRUN chown nobody /app && umask 77 && echo secret > /root.txt\n"
NOBODY = f"{USER}USER nobody\n"
WHO = "echo $(id -un) $(cat /root.txt 2> /dev/null)"


@pytest.mark.parametrize(
    ("dockerfile", "table", "agent", "tests"),
    [
        (NOBODY, "", "nobody", "nobody"),
        (USER, "[agent]\nuser = 'nobody'\n", "nobody", "root secret"),
        (
            f"{USER}USER nobody\n",
            "[agent]\nuser = 0\n[verifier]\nuser = 65534\n",
            "root secret",
            "nobody",
        ),
    ],
)
def test_agent_and_tests_are_the_users_of_the_task(begun, dockerfile, table, agent, tests):
    """The tests are cleared and brought by root, whoever runs them."""
    test = f"#!/bin/bash\n[ \"$({WHO})\" = '{tests}' ] && [ -e /app/out.txt ]\n"
    test += "echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    files = {"environment/Dockerfile": dockerfile, "task.toml": table, "tests/test.sh": test}
    trial = begun(**files)
    assert said(trial, f"touch out.txt; {WHO}") == f"{agent}\n"
    said(trial, "echo 1 > /logs/verifier/reward.json; chmod 000 /logs/verifier/reward.json")
    trial.finish_step()
    assert trial.reward() == 1.0


@BOTH
def test_nothing_is_left_when_this_process_is_killed(tmp_path, engines, program):
    engines(program)
    write_task(tmp_path / "one", **{"environment/Dockerfile": DOCKERFILE})
    code = f"""
import signal
from torchrl_envs.harbor.machines import machine_type
from torchrl_envs.harbor.folders import read_task
machine = machine_type({program!r})(read_task({str(tmp_path / "one")!r}).place)
machine.start()
print(machine._container.name, flush=True)
signal.pause()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        name = process.stdout.readline().strip()
        assert is_there(program, name)
        os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while is_there(program, name) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_there(program, name)


def is_there(program, name):
    words = [program, "container", "inspect", name]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


# The way to the policy --------------------------------------------------------------------------


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def served():
    """A server of this machine alone."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


ASKED = "python3 -c 'import urllib.request as r; print(r.urlopen(\"http://{}/hi\").read())'"


@BOTH
def test_a_program_inside_reaches_the_policy(begun, served, program):
    first, second = (begun(program, endpoint=served) for _ in range(2))
    assert first.machine.endpoint == second.machine.endpoint != served
    first.stop()
    assert said(second, ASKED.format(second.machine.endpoint)) == "b'/hi'\n"
    assert second.run(ASKED.format(served), timeout_s=20).status == 1  # it is not its own machine
    endpoint = second.machine.endpoint
    second.stop()
    host, _, port = endpoint.rpartition(":")
    tried = ["bash", "-c", f": < /dev/tcp/{host}/{port}"]
    assert subprocess.run(tried, capture_output=True, check=False).returncode == 1


SERVES = "python3 -m http.server 8000 > /dev/null 2>&1 & until : < /dev/tcp/127.0.0.1/8000; "
SERVES += "do sleep 0.1; done 2> /dev/null; hostname -I"


def test_without_a_network_it_reaches_the_policy_alone(begun, served):
    table = {"task.toml": "[environment]\nnetwork_mode = 'no-network'\n"}
    closed, other = (begun(endpoint=served, **table) for _ in range(2))
    open_, third = begun(), begun()
    addresses = [said(trial, SERVES).strip() for trial in (other, third)]
    assert said(closed, ASKED.format(closed.machine.endpoint)) == "b'/hi'\n"
    tried = [f"timeout 3 bash -c ': < /dev/tcp/{address}/8000'" for address in addresses]
    assert [closed.run(each, timeout_s=20).status for each in tried] == [124, 124]
    assert open_.run(tried[1], timeout_s=20).status == 0
    found = ContainerEngine("docker").inspected("network", CLOSED_NETWORK)
    assert found["Internal"]  # and so the engine passes nothing on to the outside


def test_a_policy_that_can_not_be_reached_is_named_at_the_start(begun, served, monkeypatch):
    monkeypatch.setattr(ContainerEngine, "is_desktop", True)  # where it has a name of its own
    with pytest.raises(MachineError, match=r"can't reach the policy at host\.docker\.internal:"):
        begun(endpoint=served)


LISTED = "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['127.0.0.2']\n"
OPENED = "python3 -c 'import urllib.request as r; print(r.urlopen(\"http://{}/hi\").status)'"


def test_listed_hosts_are_reached_and_no_others(begun):
    with http.server.ThreadingHTTPServer(("0.0.0.0", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        trial, other = begun(**{"task.toml": LISTED}), begun()
        asked = [OPENED.format(f"127.0.0.{i}:{server.server_port}") for i in (2, 3)]
        assert said(trial, asked[0]) == "200\n"
        assert "HTTP Error 403: Forbidden" in trial.run(asked[1], timeout_s=20).stderr
        address = said(other, SERVES).strip()
        tried = f"timeout 3 bash -c ': < /dev/tcp/{address}/8000'"
        assert trial.run(tried, timeout_s=20).status == 124
        trial.stop()
        server.shutdown()


# Several containers -----------------------------------------------------------------------------

SERVICES = """\
services:
  main:
    depends_on: [store]
    environment:
      STORE: store
  store:
    build:
      context: ./store
"""
STORE = f"""\
FROM {BASE}
RUN mkdir -p /srv/http && echo 42 > /srv/http/number
CMD ["python3", "-m", "http.server", "-d", "/srv/http", "8000"]
"""
ASKS = 'until python3 -c \'import urllib.request as r; print(r.urlopen("http://store:8000/number")'
ASKS += ".read())' 2> /dev/null; do sleep 0.1; done"


def services(**changed):
    texts = {"environment/docker-compose.yaml": SERVICES, "environment/store/Dockerfile": STORE}
    return {"task.toml": "[environment]\nnetwork_mode = 'no-network'\n", **texts, **changed}


def test_services_of_a_task_are_reached_by_name_and_nothing_else_is(begun, served):
    trial = begun(endpoint=served, **services())
    assert said(trial, f"pwd; cat data.txt; {ASKS}", 60) == "/app\nsome data\nb'42\\n'\n"
    assert said(trial, ASKED.format(trial.machine.endpoint)) == "b'/hi'\n"
    other = begun()
    engine, name = ContainerEngine("docker"), trial.machine._container.name
    (network,) = engine.inspected("container", name)["NetworkSettings"]["Networks"]
    assert engine.inspected("network", network)["Internal"]
    address = said(other, SERVES).strip()
    assert trial.run(f"timeout 3 bash -c ': < /dev/tcp/{address}/8000'", timeout_s=20).status == 124
    said(trial, "echo hi > out.txt")
    trial.finish_step()
    assert trial.reward() == 1.0


def test_services_end_with_this_process(tmp_path, engines):
    engines("docker")
    write_task(tmp_path / "one", **{"environment/Dockerfile": DOCKERFILE, **services()})
    code = f"""
import signal
from torchrl_envs.harbor.machines import machine_type
from torchrl_envs.harbor.folders import read_task
machine = machine_type("docker")(read_task({str(tmp_path / "one")!r}).place)
machine.start()
print(machine._project._name, flush=True)
signal.pause()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        name = process.stdout.readline().strip()
        assert len(of_project("ps", name)) == 2
        assert len(of_project("network", name)) == 1
        os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while of_project("network", name) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert of_project("ps", name) == of_project("network", name) == []


def of_project(kind, name):
    label = f"label=com.docker.compose.project={name}"
    words = ["docker", *(["ps", "-a"] if kind == "ps" else [kind, "ls"]), "-q", "--filter", label]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("services: [main]", "must have a table of services"),
        ("services: {main: {network_mode: host}}", "service main network_mode=host"),
        ("services: {main: {}}\nnetworks: {x: {external: true}}", "the network x is an outside"),
        ("services: {main: {image: 'localhost:9/no:1'}}", "the services do not start|build failed"),
        ("a: {", "can't be read"),
    ],
)
def test_services_that_can_not_be_had_are_named(begun, text, what):
    with pytest.raises(MachineError, match=f"machine=docker: .*compose.yaml.*({what})"):
        begun(
            **services(**{"environment/docker-compose.yaml": text, "environment/Dockerfile": None})
        )


# Agents -----------------------------------------------------------------------------------------

MINI = """\
#!/usr/bin/env python3
import json, os, subprocess, sys, urllib.request
url, messages = os.environ["OPENAI_BASE_URL"], [{"role": "user", "content": sys.argv[-1]}]
while True:
    asked = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
    head = {"Content-Type": "application/json"}
    head["Authorization"] = "Bearer " + os.environ["OPENAI_API_KEY"]
    request = urllib.request.Request(url + "/chat/completions", json.dumps(asked).encode(), head)
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    if answer["content"] == "done":
        break
    out = subprocess.run(answer["content"], shell=True, capture_output=True, text=True).stdout
    messages += [answer, {"role": "user", "content": out}]
"""


def test_an_agent_of_the_image_does_a_task(tmp_path, engines, chatml_tokenizer):
    engines("docker")
    dockerfile = f"{DOCKERFILE}COPY mini /usr/local/bin/\nRUN chmod +x /usr/local/bin/mini\n"
    texts = {"environment/Dockerfile": dockerfile, "environment/mini": MINI}
    write_task(
        tmp_path / "one", **texts, **{"task.toml": "[environment]\nnetwork_mode = 'no-network'"}
    )
    tasks = {str(task.folder): task for task in load_tasks(tmp_path)[0]}
    program = named_program("mini-swe-agent", tasks, machine="docker")
    agent = AgentProgram(program, timeout_s=120.0)
    data = DataLoadingPrimer([{"prompt": "x", "task": folder} for folder in tasks])
    env = ChatEnv(batch_size=1, tokenizer=chatml_tokenizer).append_transform(
        Compose(data, agent, StepCounter(max_steps=8))
    )
    try:
        policy = ScriptedTurns(chatml_tokenizer, ["cat data.txt", "echo hi > out.txt", "done"])
        last = env.rollout(9, policy, break_when_any_done=True)[..., -1]["next"]
    finally:
        env.close()
    assert last["reward"].item() == 1.0
    (episode,) = last["episode"]
    assert len(episode.rows) == 1
    (row,) = read_conversations(last, PROMPT, who="test")
    assert [m["content"] for m in row.messages(0) if "data\n" in m["content"]] == ["some data\n"]


def test_an_agent_that_the_image_lacks_is_named(tmp_path, engines):
    engines("docker")
    write_task(tmp_path / "one", **{"environment/Dockerfile": DOCKERFILE})
    make_task("harbor", dataset=str(tmp_path), machine="docker", agent="codex")  # asked inside
    assert find_agent("codex").install == "npm install -g @openai/codex"


@pytest.mark.parametrize(
    ("block", "address"),
    [
        ({"Subnet": "127.0.0.0/8", "Gateway": "127.0.0.9"}, "127.0.0.9"),
        ({"Subnet": "127.0.0.0/8"}, "127.0.0.1"),  # docker, when it has just been installed
        ({"subnet": "127.0.0.0/8"}, "127.0.0.1"),
        ({"Subnet": "198.51.100.0/24"}, None),  # no interface of any machine has it
        ({"Subnet": "fd00::/64", "Gateway": "fd00::1"}, None),
        ({}, None),
    ],
)
def test_the_address_of_this_machine_in_a_network(block, address):
    engine = SimpleNamespace(program="docker", inspected=lambda *_: {"IPAM": {"Config": [block]}})
    if address is None:
        with pytest.raises(ContainerError, match="has no address in docker's network bridge"):
            gateway_of(engine, "bridge")
    else:
        assert gateway_of(engine, "bridge") == address
