"""``torchrl-agents doctor`` in a process of its own, where some packages can't be found."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_data.releases import TESTED, installed_release

ROOT = Path(__file__).parents[2]


def doctor(*without, arguments=(), path=None):
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({list(without)}))\n"
        "from torchrl_agents.command import main\n"
        f"status = main(['doctor', *{list(arguments)}])\n"
        f"imports = '--import' in {list(arguments)}\n"
        "heavy = {'numpy', 'torch', 'transformers'} & {n for n, m in sys.modules.items() if m}\n"
        "assert bool(heavy) == imports\n"
        "sys.exit(status)"
    )
    environment = os.environ | (path or {})
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    lines = done.stdout.splitlines()
    # A name and what is told of it are apart, however long the name is.
    told = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in lines if line[:2] == "  ")
    return done.returncode, told, done.stderr


def test_what_is_missing_is_told_with_what_to_do_and_where_to_read():
    status, told, _ = doctor("vllm", "ray")
    assert status == 0
    assert told["the library"] == "ready"
    assert told["training"] == "ready"
    assert told["vLLM"] == 'missing vllm: pip install "torchrl-agents[vllm]" (docs/vllm.md)'
    assert told["Ray"] == 'missing ray: pip install "torchrl-agents[ray]" (docs/clusters.md)'


def test_without_what_the_library_needs_it_says_no():
    status, told, _ = doctor("tensordict")
    assert status == 1
    assert told["the library"].startswith("missing tensordict: pip install torchrl-agents ")


def test_a_program_by_any_of_its_names_will_do(tmp_path):
    there = {"PATH": str(tmp_path)}
    _, told, _ = doctor(path=there)
    names = "chromium or chromium-browser or google-chrome"
    assert told["a browser"].startswith(f"missing {names}: ")
    program = tmp_path / "google-chrome"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    _, told, _ = doctor(path=there)
    assert told["a browser"] == "ready"
    by_landlock = "ready (code: landlock; agents' programs: landlock)"
    assert told["untrusted code"] == by_landlock, "without bubblewrap"


def test_arguments_are_refused():
    status, told, error = doctor(arguments=["vllm"])
    assert (status, told) == (2, {})
    assert error == "torchrl-agents doctor takes --import or nothing, got ['vllm'].\n"


def test_releases_are_told_with_the_range_that_was_tested():
    _, told, _ = doctor()
    for package, (oldest, newest) in TESTED.items():
        here = installed_release(package)
        assert told[package] == f"{here} (tested: {oldest} to {newest})"


@pytest.mark.slow
def test_what_a_package_lacks_itself_is_told(tmp_path):
    """A package that is there, and breaks as it is imported: of a module that is missing, or so."""
    for name, code in {"ray": "import not_there", "peft": "raise KeyError('x')"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    without = ("vllm", "playwright", "mcp", "openai", "reasoning_gym")  # which take long
    status, told, _ = doctor(*without, arguments=["--import"], path=path)
    assert status == 0
    assert told["the library"] == "ready"
    assert "the module not_there that it needs is missing: pip install not_there." in told["Ray"]
    assert told["adapters"] == "'x'"


def test_pages_that_it_names_are_there():
    from torchrl_agents.command import FEATURES

    assert FEATURES
    for feature in FEATURES.values():
        assert (ROOT / feature["page"]).is_file()


def test_who_reads_no_more_is_told_nothing():
    """As behind ``| head``: no traceback, and the status of SIGPIPE."""
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from torchrl_agents.command import main; sys.exit(main(['doctor']))"
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("print('\\u4f60 \\xfc')", (0, b"\\u4f60 \\xfc\n", b"")),
        (
            "open('no/page.html', 'w')",
            (1, b"", b"torchrl-agents say: [Errno 2] No such file or directory: 'no/page.html'\n"),
        ),
    ],
    ids=["a letter that the output lacks", "a folder that is not there"],
)
def test_a_command_shows_what_it_can_and_names_the_file_that_it_can_not_write(
    body, wanted, tmp_path
):
    (tmp_path / "say.py").write_text(f"def main(rest):\n    {body}\n    return 0\n")
    code = "import sys; from torchrl_agents import command as c; "
    code += "c.COMMANDS['say'] = ('say:main', ''); sys.exit(c.main(['say']))"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == wanted
