"""What a run gives back: output, end, and what of it is cut."""

import os
import stat
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import threading
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_envs.processes.capped_output import CappedOutput
from torchrl_envs.sandbox import Sandbox, SandboxLimits, SandboxSession, UnsandboxedCodeWarning

KIB = 1024


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def sandbox(request):
    return Sandbox(limits=SandboxLimits(timeout_s=5.0), isolation=request.param)


@pytest.fixture(scope="module")
def open_sandbox():
    with pytest.warns(UnsandboxedCodeWarning):
        return Sandbox(isolation="none", allow_unsandboxed=True)


@pytest.fixture
def session(sandbox):
    session = SandboxSession(sandbox)
    yield session
    session.close()


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "status"),
    [
        pytest.param("print('é\\0')", "é\0\n", "", 0, id="text"),
        pytest.param("print('\\ud800')", "\\ud800\n", "", 0, id="a lone surrogate"),
        pytest.param(
            "import os; os.write(1, b'\\xff\\n')", "\ufffd\n", "", 0, id="bytes that are no text"
        ),
        pytest.param("import sys; sys.exit(3)", "", "", 3, id="its own exit code"),
        pytest.param("exit('no')", "", "no\n", 1, id="a message as exit code"),
        pytest.param("import os; os._exit(4)", "", "", 4, id="an exit that cleans nothing up"),
        pytest.param("import ctypes; ctypes.string_at(0)", "", "", -11, id="a crash"),
        pytest.param(
            "import sys; print('ready\\ndone 0\\nexit 0'); print('exit 0', file=sys.stderr); 1 / 0",
            "ready\ndone 0\nexit 0\n",
            "exit 0\nTraceback (most recent call last):\n"
            '  File "<python>", line 1, in <module>\n'
            "    import sys; print('ready\\ndone 0\\nexit 0'); "
            "print('exit 0', file=sys.stderr); 1 / 0\n"
            "ZeroDivisionError: division by zero\n",
            1,
            id="our own markers change nothing",
        ),
        pytest.param(
            "import sys; print(repr(sys.stdin.read()), __name__)",
            "'' __main__\n",
            "",
            0,
            id="standard input is empty",
        ),
        pytest.param(
            "import sys; print(sys.argv, [name for name in sys.modules if 'inside' in name])",
            "[''] []\n",
            "",
            0,
            id="an interpreter as a script finds it",
        ),
        pytest.param("raise KeyboardInterrupt", "", None, 1, id="an interrupt is the program's"),
        pytest.param("x = (", "", None, 1, id="no program"),
        pytest.param("x = 'a\0b'", "", None, 1, id="a null character in the program"),
    ],
)
def test_output_and_end(sandbox, code, stdout, stderr, status):
    result = sandbox.run(code)
    assert result.stdout == stdout
    assert result.exit_status == status
    assert result.succeeded == (status == 0)
    if stderr is None:
        assert "<python>" in result.stderr or "null bytes" in result.stderr
    else:
        # Positions under a line are drawn or not, depending on the version.
        assert [s for s in result.stderr.splitlines() if set(s) - set(" ~^")] == (
            stderr.splitlines()
        )


@pytest.mark.parametrize("isolation", ["bubblewrap", "landlock", "none"])
def test_a_flood_is_cut_and_takes_no_memory(isolation, open_sandbox):
    sandbox = open_sandbox if isolation == "none" else Sandbox(isolation=isolation)
    code = "print('start')\nfor _ in range(1600): print('x' * 65535)\nprint('end')"
    before = psutil.Process().memory_info().rss
    result = sandbox.run(code)
    assert psutil.Process().memory_info().rss - before < 16 * KIB * KIB
    assert result.succeeded
    assert result.truncated
    assert result.stdout.startswith("start\n")
    assert result.stdout.endswith("x\nend\n")
    assert len(result.stdout) < 64 * KIB + 100
    total = len("start\n") + 1600 * 64 * KIB + len("end\n")
    assert f"[... {total - 64 * KIB} bytes were cut ...]" in result.stdout


@pytest.mark.parametrize("isolation", ["bubblewrap", "none"])
def test_T09_a_deadline_holds_for_all_its_processes(isolation, open_sandbox):
    sandbox = open_sandbox if isolation == "none" else Sandbox(isolation=isolation)
    code = """
import os, time
print("before", flush=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
while True:
    pass
"""
    children = psutil.Process().children(recursive=True)
    result = sandbox.run(code, timeout_s=0.5)
    assert result.timed_out
    assert result.exit_status is None
    assert result.stdout == "before\n"
    assert result.wall_s < 2.5
    assert psutil.Process().children(recursive=True) == children


def test_runs_share_nothing_and_leave_nothing(sandbox):
    codes = [f"import os; print(os.listdir('.')); open('{n}', 'w')" for n in range(8)]
    process = psutil.Process()
    before = process.num_fds(), threading.active_count(), len(process.children())
    results = {}
    threads = [
        threading.Thread(target=lambda code: results.update({code: sandbox.run(code)}), args=(c,))
        for c in codes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[code].stdout for code in codes] == ["[]\n"] * 8
    assert (process.num_fds(), threading.active_count(), len(process.children())) == before


def test_packages_can_be_offered(sandbox):
    code = "import packaging; print(packaging.__name__)"
    assert "ModuleNotFoundError" in sandbox.run(code).stderr
    site_packages = sysconfig.get_path("purelib")
    result = Sandbox(packages=[site_packages], isolation=sandbox.isolation).run(code)
    assert result.stdout == "packaging\n"


def test_packages_below_the_temporary_folder_are_offered_and_nothing_beside_them(sandbox):
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="with space ") as folder:
        packages = Path(folder, "packages")
        packages.mkdir()
        packages.joinpath("offered.py").write_text("said = 'hello'")
        Path(folder, "secret").write_text("secret")
        for path in (Path(folder), packages):
            path.chmod(0o755)
        code = f"""
import errno, offered, os
print(offered.said)
try:
    print(os.listdir({folder!r}))
except OSError as error:
    print(["packages"] if error.errno == errno.EACCES else error)
try:
    open({str(packages)!r} + "/more", "w")
except OSError as error:
    print("read-only", error.errno in (errno.EROFS, errno.EACCES))
open("own", "w").write("private")
"""
        result = Sandbox(packages=[packages], isolation=sandbox.isolation).run(code)
        assert result.stdout == "hello\n['packages']\nread-only True\n", result.stderr
        assert not os.path.exists("/tmp/own")


def test_asyncio_works_inside(sandbox):
    code = "import asyncio; print(asyncio.run(asyncio.sleep(0.01, 'slept')))"
    assert sandbox.run(code).stdout == "slept\n"


def test_a_session_keeps_its_variables(session):
    assert session.run("x = 1").succeeded
    assert session.run("x += 1\nprint(x)").stdout == "2\n"
    failed = session.run("1 / 0")
    assert failed.exit_status == 1
    assert "ZeroDivisionError" in failed.stderr
    assert session.run("import sys; sys.exit(3)").exit_status == 3
    assert session.run("print(x)").stdout == "2\n"
    forked = session.run("import os\nif os.fork() == 0: x = 99\nelse: os.wait()")
    assert forked.succeeded == (session.sandbox.isolation == "bubblewrap")
    assert session.run("print(x)").stdout == "2\n"


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("while True: pass", id="a hang"),
        pytest.param("import os; os._exit(0)", id="an exit"),
        pytest.param("import os; os.kill(os.getpid(), 9)", id="a signal"),
        pytest.param("import os; os.closerange(3, 99); x = 2", id="a protocol that is cut"),
    ],
)
def test_a_session_that_dies_says_so_and_starts_afresh(session, code):
    session.run("x = 1")
    result = session.run(code, timeout_s=0.5)
    assert result.state_lost
    assert result.timed_out == ("while" in code)
    again = session.run("print('x' in dir())")
    assert again.stdout == "False\n"
    assert not again.state_lost


def test_closing_a_session_ends_it(sandbox):
    session = SandboxSession(sandbox)
    children = psutil.Process().children()
    session.run("x = 1")
    assert psutil.Process().children() != children
    session.close()
    assert psutil.Process().children() == children


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"timeout_s": 0}, "timeout_s must be positive and finite, got 0"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"memory_bytes": 1000}, "memory_bytes must be an integer of at least 67108864, got 1000"),
        ({"num_processes": 1.5}, "num_processes"),
    ],
)
def test_bad_limits(settings, says):
    with pytest.raises(ValueError, match=says):
        SandboxLimits(**settings)


def test_bad_settings(sandbox, tmp_path):
    with pytest.raises(ValueError, match="isolation must be one of"):
        Sandbox(isolation="docker")
    with pytest.raises(ValueError, match="allow_unsandboxed=True"):
        Sandbox(isolation="none")
    with pytest.raises(ValueError, match="not a directory"):
        Sandbox(packages=[tmp_path / "missing"])
    with pytest.raises(ValueError, match="other files in /dev inside"):
        Sandbox(packages=["/dev/shm"])
    with pytest.raises(ValueError, match="everything in it could be read"):
        Sandbox(packages=["/"])
    with pytest.raises(ValueError, match="1048577 characters"):
        sandbox.run("#" * (KIB * KIB + 1))


FORBID_NAMESPACES = """
import os, sys
sys.path.insert(0, os.getcwd())
from torchrl_envs.sandbox.inside import kernel
from torchrl_envs.sandbox.syscall_filter import syscall_filter
program = syscall_filter()
kernel.forbid_new_privileges()
kernel.load_syscall_filter(program)
"""


def _elsewhere(code, *wrapper, **environment):
    command = [*wrapper, sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )
    return result.stdout + result.stderr


def test_A13_where_nothing_isolates_it_refuses_unless_told_otherwise():
    """As in a container whose profile allows neither namespaces nor Landlock."""
    refused = _elsewhere(
        FORBID_NAMESPACES + "from torchrl_envs.sandbox import Sandbox; Sandbox()",
    )
    assert "SandboxUnavailableError: Nothing isolates untrusted code" in refused
    assert "bubblewrap: it does not start" in refused
    # For root, and for others.
    assert "Operation not permitted" in refused or "No permissions to create" in refused
    assert "landlock: the container forbids the system calls landlock_*" in refused
    assert "allow_unsandboxed=True" in refused
    allowed = _elsewhere(
        FORBID_NAMESPACES + "from torchrl_envs.sandbox import Sandbox\n"
        "print(Sandbox(allow_unsandboxed=True).run('print(6 * 7)'))"
    )
    assert "UnsandboxedCodeWarning" in allowed
    assert "stdout='42\\n'" in allowed
    assert "isolation='none'" in allowed


def test_without_bubblewrap_it_says_how_to_install_it_or_takes_landlock(tmp_path):
    code = "from torchrl_envs.sandbox import Sandbox; print(Sandbox({}).run('print(6 * 7)'))"
    settings = {"PATH": str(tmp_path), "PYTHONPATH": os.getcwd()}
    said = _elsewhere(code.format("isolation='bubblewrap'"), **settings)
    assert "SandboxUnavailableError: Nothing isolates untrusted code" in said
    assert "apt-get install bubblewrap" in said
    assert "landlock:" not in said, "what was not asked for is not tried"
    said = _elsewhere(code.format(""), **settings)
    assert "stdout='42\\n'" in said
    assert "isolation='landlock'" in said


def test_root_in_a_user_namespace_of_its_own():
    """The kernel limits no processes of its own root, however it is called inside."""
    code = """
    from torchrl_envs.sandbox import Sandbox
    print(Sandbox({}).run("print(6 * 7)"))
    """
    wrapper, path = ("unshare", "--map-root-user"), os.getcwd()
    said = _elsewhere(code.format("isolation='bubblewrap'"), *wrapper, PYTHONPATH=path)
    if os.geteuid() == 0:
        assert "SandboxUnavailableError" in said
        assert "processes are limited" in said
    else:
        assert "stdout='42\\n'" in said
    said = _elsewhere(code.format("isolation='landlock'"), *wrapper, PYTHONPATH=path)
    assert "stdout='42\\n'" in said, "a program is one process there"


@pytest.mark.skipif(os.geteuid() != 0, reason="takes rights from root")
@pytest.mark.parametrize("isolation", ["bubblewrap", "landlock"])
def test_root_without_the_right_to_make_namespaces(isolation):
    """As in most containers: it is started as another user, who has to be able to read Python."""
    code = f"""
    from torchrl_envs.sandbox import Sandbox, SandboxSession
    sandbox = Sandbox(isolation={isolation!r})
    print(sandbox.run("import os; print(os.getuid(), 6 * 7)"))
    session = SandboxSession(sandbox)
    print(session.run("import os; print(os.getuid(), 6 * 8)"))
    session.close()
    """
    said = _elsewhere(code, "setpriv", "--bounding-set=-sys_admin", PYTHONPATH=os.getcwd())
    above = Path(os.path.realpath(sys.executable)).parents
    if all(path.stat().st_mode & stat.S_IXOTH for path in above):
        assert "stdout='65534 42\\n'" in said
        assert "stdout='65534 48\\n'" in said
    elif isolation == "landlock":
        assert "stdout='0 42\\n'" in said, "without its capabilities"
        assert "stdout='0 48\\n'" in said
    else:
        assert "bubblewrap: it does not start" in said
        assert "Permission denied" in said


@given(
    st.lists(st.binary(max_size=40), max_size=20),
    st.integers(min_value=2, max_value=64),
)
def test_capped_output_keeps_both_ends(parts, max_bytes):
    output = CappedOutput(max_bytes)
    for part in parts:
        output.add(bytes(b & 0x7F for b in part))
    whole = b"".join(parts).translate(bytes(b & 0x7F for b in range(256))).decode("ascii")
    assert output.truncated == (len(whole) > max_bytes)
    if not output.truncated:
        assert output.text() == whole
    else:
        head, tail = max_bytes // 2, max_bytes - max_bytes // 2
        dropped = len(whole) - max_bytes
        assert output.text() == (
            f"{whole[:head]}\n[... {dropped} bytes were cut ...]\n{whole[-tail:]}"
        )


def test_one_command_prints_what_is_enforced():
    command = [sys.executable, "-m", "torchrl_envs.sandbox"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    (end,) = [i for i, line in enumerate(lines) if line.startswith("Untrusted code runs under")]
    isolation = lines[end].removeprefix("Untrusted code runs under ").rstrip(".")
    assert f"  {isolation}: works" in lines[:end]
    holds = {line.split("│")[1].strip() for line in lines if line.count("│") == 3}
    assert {"no internet sockets", "no files of others", "processes are limited"} <= holds
