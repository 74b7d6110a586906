"""The sandbox in a container that was started with Docker's default options: Landlock's place."""

import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from agent_attacks import ATTACKS, NUMBERS, WORKS, counting
from attacks import CALLS, LIMITS, ON_LANDLOCK, all_in_one, program_of

sys.path.append(str(Path(__file__).parents[1]))

from container_engines import BASE, engine, have_base

PROGRAM = """
import dataclasses, json, os, sys
from torchrl_envs.sandbox import Sandbox, SandboxLimits, SandboxSession
attacks = json.load(sys.stdin)
sandbox = Sandbox(limits=SandboxLimits(**attacks.pop("limits")), packages=["/outside/packages"])
told = {name: dataclasses.asdict(sandbox.run(code)) for name, code in attacks.items()}
session = SandboxSession(sandbox)
session.run("import os, threading\\nthreading.Thread(target=print, args=(os.getuid(),)).start()")
told["reason"] = Sandbox.reasons_against()["bubblewrap"]
told["session"] = dataclasses.asdict(session.run("print(os.getuid(), os.listdir('.'))"))
session.close()
told["left"] = [name for name in os.listdir("/tmp") if name.startswith("sandbox-")]
json.dump(told, sys.stdout)
"""
AGENTS = """
import asyncio, json, os, socket, sys, warnings
from torchrl_envs.agents.agent_command import AgentCommand, AgentEndpoint
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    command = AgentCommand(["python3"], folder="/outside/work",
        sandbox=["/outside/packages"], environment={"MINE": "1"})
told = {"isolation": command.isolation, "warned": str(warned[0].message)}
policy, other = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
endpoint = AgentEndpoint(f"http://127.0.0.1:{policy.getsockname()[1]}/v1", "key", "any")
os.environ["OF_THE_TRAINER"] = "secret"
for name, program in json.load(sys.stdin).items():
    for place, link in (("{policy}", policy), ("{other}", other)):
        program = program.replace(place, str(link.getsockname()[1]))
    command.command = [sys.executable, "-c", program]
    told[name] = asyncio.run(command(endpoint))
other.setblocking(False)
try:
    told["reached"] = other.accept()[1]
except BlockingIOError:
    told["reached"] = None
told["left"] = [name for name in os.listdir("/tmp") if name.startswith("sandbox-")]
json.dump(told, sys.stdout)
"""
COPIES = "import shutil\nopen('one', 'w')\nshutil.copy('one', 'two')"
DELETED = """
held = [open(str(n), "wb", buffering=0) for n in range(20)]
for file in held:
    os.unlink(file.name)
    file.write(bytes(1 << 20))
time.sleep(30)
"""


@pytest.fixture(scope="module")
def docker():
    with pytest.MonkeyPatch.context() as patch, engine("docker") as variables:
        for name, value in variables.items():
            patch.setenv(name, value)
        have_base("docker")
        yield


def _python():
    """This Python where others may read it, else the image's of the same version."""
    folders = Path(os.path.realpath(sys.executable)).parents
    if all(folder.stat().st_mode & stat.S_IXOTH for folder in folders):
        return os.path.realpath(sys.executable)
    if os.path.exists(f"/usr/bin/python3.{sys.version_info.minor}"):
        return f"/usr/bin/python3.{sys.version_info.minor}"
    pytest.skip("the image has another version of Python, and others can't read this one")


def _places(outside):
    """This Python, this project, what it imports, and what a program may not touch."""
    libraries = f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}"
    places = {str(Path(__file__).parents[2]): "/project"}
    places |= {sysconfig.get_path("purelib"): "/packages", str(outside): "/outside"}
    same = [sys.base_prefix, shutil.which("bwrap")]
    same += [f"{libraries}/{name}" for name in ("libseccomp.so.2", "libstdc++.so.6")]
    places |= {path: path for path in same}
    return [word for here, there in places.items() for word in ("-v", f"{here}:{there}")]


def _put_outside(place, user):
    (place / "packages").mkdir()
    (place / "packages" / "os.py").write_text("x = 1")
    (place / "secret").write_text("secret")
    for path in (place, *place.rglob("*")):
        path.chmod(0o777)
        os.chown(path, int(user), int(user))


def _told(program, user, outside, sent):
    """What a program prints in a container, in which it may write outside."""
    command = ["docker", "run", "--rm", "-i", "--user", user, *_places(outside)]
    command += ["-e", "PYTHONPATH=/project:/packages", "-e", "SECRET=secret", "-e"]
    command += ["PYTHONDONTWRITEBYTECODE=1", BASE, _python(), "-c", program]
    done = subprocess.run(
        command, input=json.dumps(sent), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("user", ["0", "1000"])
def test_agents_in_a_container_with_default_options(user, docker, tmp_path):
    for name in ("work", "sandbox-other"):
        (tmp_path / name).mkdir()
    (tmp_path / "sandbox-other" / "answer").write_text("secret")
    _put_outside(tmp_path, user)
    names = NUMBERS | {"trainer": 1, "folder": "/outside", "name": "probe"}
    names |= {"secret": "/outside/secret", "other_episode": "/outside/sandbox-other"}
    programs = {name: counting(attack, names) for name, attack in ATTACKS.items()}
    told = _told(AGENTS, user, tmp_path, programs | {"works": counting(WORKS, names)})
    assert told.pop("isolation") == "landlock"
    assert "enforces less than bubblewrap" in told.pop("warned")
    assert told.pop("left") == []
    assert told.pop("reached") is None
    assert told.pop("works") == 1
    assert told.keys() == ATTACKS.keys()
    assert min(told.values()) > 0
    assert (tmp_path / "secret").read_text() == "secret"
    assert sorted(os.listdir(tmp_path)) == ["packages", "sandbox-other", "secret", "work"]


@pytest.mark.slow
@pytest.mark.parametrize(("user", "inside"), [("0", 65534), ("1000", 1000)])
def test_in_a_container_with_default_options(user, inside, docker, tmp_path):
    _put_outside(tmp_path, user)
    victim = CALLS | {
        "trainer": 1,
        "folder": "/outside",
        "name": "probe",
        "secret": "/outside/secret",
    }
    victim |= {"copy": "/outside/packages", "abstract": "\0x", "socket": "/outside/x", "shared": 0}
    sent = {"attacks": all_in_one(ON_LANDLOCK, victim)}
    sent |= {"disk": program_of(DELETED, {}), "copies": COPIES, "limits": vars(LIMITS)}
    told = _told(PROGRAM, user, tmp_path, sent)
    assert told.pop("left") == []
    assert "it does not start" in told.pop("reason"), "namespaces are not allowed"
    assert {result["isolation"] for result in told.values()} == {"landlock"}
    assert told.pop("session")["stdout"] == f"{inside} []\n"
    assert told.pop("disk")["out_of_disk"]
    # A user of its own may change the modes of its files.
    assert (told.pop("copies")["exit_status"] == 0) == (inside == 65534)
    result = told.pop("attacks")
    assert result["exit_status"] == 0, result
    assert all(name in result["stdout"] for name in ON_LANDLOCK)
    assert "ESCAPED" not in result["stdout"], result
    assert (tmp_path / "secret").read_text() == "secret"
    assert sorted(os.listdir(tmp_path)) == ["packages", "secret"]
