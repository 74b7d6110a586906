"""``make check``: which tests a change touches, and that the farthest are left out in time."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from changed import Deadline, Imports, folder_of

FILES = {
    "objectives/__init__.py": "if TYPE_CHECKING:\n    from .loss import Loss as Loss\n"
    "    from .gate import Gate as Gate\n",
    "objectives/loss.py": "from objectives import arithmetic\n",
    "objectives/gate.py": "",
    "objectives/arithmetic.py": "",
    "collectors/__init__.py": "",
    "collectors/deep.py": "def f():\n    from objectives.loss import Loss\n",
    "test/conftest.py": "",
    "test/helper.py": "import collectors.deep\n",
    "test/test_arithmetic.py": "from objectives.arithmetic import add\n",
    "test/test_loss.py": "from objectives import Loss\n",
    "test/test_gate.py": "from objectives import Gate\n",
    "test/test_deep.py": "import helper\n",
    "test/a/conftest.py": "from objectives.gate import Gate\n",
    "test/a/test_below.py": "",
}


@pytest.fixture
def imports(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Imports(tmp_path)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            "objectives/arithmetic.py",
            {"test/test_arithmetic.py": 1, "test/test_loss.py": 2, "test/test_deep.py": 4},
        ),
        # A lazy name of the package is of the module that has it, and of no other.
        ("objectives/gate.py", {"test/test_gate.py": 1, "test/a/test_below.py": 2}),
        ("test/test_gate.py", {"test/test_gate.py": 0}),
        ("README.md", {}),
    ],
)
def test_tests_near_a_change_by_the_number_of_imports(imports, changed, expected):
    found = imports.tests_near([changed])
    assert found == expected
    assert list(found.values()) == sorted(found.values())


def test_a_loss_of_this_repository_is_tested_by_its_own_tests_first():
    near = Imports().tests_near(["objectives/losses/mixed.py"])
    far = max(near.values())
    assert near["test/objectives/algorithms/test_streams.py"] == 1 < far
    assert "test/data/test_show.py" not in near


@pytest.mark.weekly
def test_after_the_deadline_no_test_begins_and_it_is_told(tmp_path):
    """One that would fail is among them."""
    (tmp_path / "test_one.py").write_text("def test_a(): assert False\n\ndef test_b(): pass\n")
    code = (
        "import sys, pytest; from changed import Deadline; "
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'test_one.py'], "
        "plugins=[Deadline(float(sys.argv[1]))]))"
    )
    ends = {}
    for seconds in ("-1", "1000"):
        done = subprocess.run(
            [sys.executable, "-c", code, seconds],
            cwd=tmp_path,
            env={"PYTHONPATH": str(Path(__file__).parent), "PATH": ""},
            capture_output=True,
            text=True,
        )
        ends[seconds] = done
    assert "2 tests of 1 files were left out" in ends["-1"].stdout
    assert ends["-1"].returncode == 0
    assert "left out" not in ends["1000"].stdout
    assert ends["1000"].returncode == 1
    assert Deadline(1.0)._left_out == []


def test_packages_and_folders_name_their_tests():
    assert folder_of("objectives") == folder_of("test/objectives") == "test/objectives"
    assert folder_of("torchrl_modules") == "test/modules"
    assert folder_of("torchrl_agents") == "test/sota"
    with pytest.raises(SystemExit, match=r"FOR=nothing: there are tests of .*objectives"):
        folder_of("nothing")
