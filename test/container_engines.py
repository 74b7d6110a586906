"""Docker and podman of this machine for tests, and an image that needs no registry.

Where a docker daemon answers, it is used, and keeps the images, which have names of their own. Else
one is started for the tests, which takes the rights of root, and goes with all that it has.
"""

import contextlib
import io
import os
import resource
import shutil
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path

import pytest

BASE = "torchrl-agents-test-base"
"""The image: Debian's basic programs and Python, from the packages of this machine."""
_PACKAGES = (
    *("base-files", "base-passwd", "bash", "coreutils", "dash", "findutils", "grep", "gzip"),
    *("hostname", "libc-bin", "mawk", "procps", "python3", "sed", "tar", "util-linux"),
)
_LEFT_OUT = ("doc", "man", "locale", "info", "lintian", "zoneinfo")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TEXTS = {  # what scripts of packages write
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/:/bin/sh\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
}
_BEGIN_S = 60.0


def base_files() -> bytes:
    """A ``.tar`` of what Debian's packages have put on this machine."""
    words = ["apt-cache", "depends", "--recurse", "--no-recommends", "--no-suggests"]
    words += ["--no-conflicts", "--no-breaks", "--no-replaces", "--no-enhances", "--installed"]
    names = sorted({line for line in _lines([*words, *_PACKAGES]) if line[:1].isalnum()})
    own = {"/bin", "/sbin", "/lib", "/lib64", "/usr/bin/awk", "/etc/alternatives/awk"}
    paths = {path for path in own if os.path.lexists(path)}
    left_out = tuple(f"/usr/share/{name}/" for name in _LEFT_OUT)
    for line in _lines(["dpkg", "-L", *names]):
        if line.startswith("/") and line != "/." and not line.startswith(left_out):
            folder, name = os.path.split(line)
            path = os.path.join(os.path.realpath(folder), name)
            paths |= {path} if os.path.lexists(path) else set()
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for path in sorted(paths):
            archive.inodes.clear()  # of two names of one file each is a file
            archive.add(path, path.lstrip("/"), recursive=False)
        for path, text in _TEXTS.items():
            member = tarfile.TarInfo(path)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return data.getvalue()


def have_base(program: str) -> None:
    """Have the image in an engine."""
    if subprocess.run([program, "image", "inspect", BASE], capture_output=True).returncode:
        change = ["-c", f"ENV PATH={_PATH}", "-c", 'CMD ["bash"]']
        subprocess.run([program, "import", *change, "-", BASE], input=base_files(), check=True)


@contextlib.contextmanager
def engine(program: str):
    """Variables by which an engine is found, for as long as it is used.

    Skips the test where this machine can't have it: it is not Linux, lacks the program, or its
    kernel or this user's rights don't allow containers.
    """
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    if program == "podman" and subprocess.run(["podman", "info"], capture_output=True).returncode:
        pytest.skip("podman can't run on this machine")
    with _podman() if program == "podman" else _docker() as variables:
        yield variables


@contextlib.contextmanager
def _podman():
    """Limits that this process may set, which is less than podman asks for in some machines."""
    lines = ["[containers]", "default_ulimits=["]
    for name, number in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
        hard = min(resource.getrlimit(number)[1] % (1 << 63), 4096)
        lines.append(f'  "{name}={hard}:{hard}",')
    lines += ["]", "[engine]", 'runtime="runc"']
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "containers.conf")
        path.write_text("\n".join(lines))
        yield {"CONTAINERS_CONF": str(path)}


@contextlib.contextmanager
def _docker():
    if subprocess.run(["docker", "info"], capture_output=True).returncode == 0:
        yield {}
        return
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip(
            "no docker daemon answers, and none can be started: that takes root and dockerd"
        )
    with tempfile.TemporaryDirectory() as folder:
        host = f"unix://{folder}/docker.sock"
        words = ["dockerd", "-H", host, "--data-root", f"{folder}/data", "--pidfile"]
        words += [f"{folder}/pid", "--exec-root", f"{folder}/run"]
        log = Path(folder, "log")
        with log.open("w") as file:
            daemon = subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True)
        try:
            variables = {"DOCKER_HOST": host}
            deadline = time.monotonic() + _BEGIN_S
            while subprocess.run(
                ["docker", "info"], capture_output=True, env={**os.environ, **variables}
            ).returncode:
                said = log.read_text()
                if daemon.poll() is not None:
                    pytest.skip(f"dockerd can't run on this machine: {said[-500:]}")
                if time.monotonic() > deadline:
                    pytest.fail(f"dockerd does not start: {said[-2000:]}")
                time.sleep(0.1)
            yield variables
        finally:
            daemon.terminate()
            daemon.wait()
            _unmount(folder)


def _unmount(folder: str) -> None:
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for path in sorted((path for path in mounts if path.startswith(folder)), reverse=True):
        subprocess.run(["umount", "-l", path], check=False)


def _lines(words: list[str]) -> list[str]:
    said = subprocess.run(words, capture_output=True, text=True, check=False)
    return said.stdout.splitlines()
