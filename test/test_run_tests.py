"""A second try hides nothing: what passes then alone is named, and too much of it fails the run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import chosen_files
import run_tests

FAILS_ONCE = """
from pathlib import Path
import pytest

def first_time(name):
    mark = Path(__file__).with_name(name)
    first = not mark.exists()
    mark.touch()
    return first

def test_steady(): pass
def test_unsteady(): assert not first_time("unsteady")
@pytest.mark.parametrize("case", ["one", "two"])
def test_excused(case): assert not first_time("excused" + case)
"""
BROKEN = "def test_broken(): assert False"
DIES = "import os\ndef test_dies(): os._exit(7)"
IN_TEARDOWN = """
import pytest
@pytest.fixture
def leaky():
    yield
    raise OSError("left behind")
def test_leaks(leaky): pass
"""
KNOWN = {"test_it.py::test_excused": "a server of theirs", "test_it.py::test_broken": "none"}


@pytest.fixture(autouse=True)
def unset_profile(monkeypatch):
    monkeypatch.setenv("HYPOTHESIS_PROFILE", "")  # so that what is set is undone
    monkeypatch.delenv("HYPOTHESIS_PROFILE")


@pytest.fixture
def outcome_of(tmp_path, monkeypatch):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(source):
        (tmp_path / "test_it.py").write_text(source)
        part = run_tests.Part("it", ("test_it.py",))
        (outcome,) = run_tests.run_parts([part], KNOWN, tmp_path)
        return outcome

    return run


def test_flaky_is_told_unless_known_and_broken_fails_though_known(outcome_of):
    outcome = outcome_of(FAILS_ONCE + BROKEN)
    assert outcome.failed == ["test_it.py::test_broken"]
    assert outcome.flaky == ["test_it.py::test_unsteady"]
    assert outcome.known == ["test_it.py::test_excused[one]", "test_it.py::test_excused[two]"]
    assert not outcome.passed
    told = run_tests.summary([outcome], KNOWN).splitlines()
    assert told[1] == "tests it: FAILED"
    assert [line.split()[0] for line in told[2:]] == ["failed", "FLAKY,", "known", "known"]
    assert "a server of theirs" in told[-1]


def test_what_failed_in_an_earlier_run_is_not_held_against_this_one(outcome_of):
    assert not outcome_of(BROKEN).passed
    assert outcome_of("def test_fine(): pass").passed


def test_known_flaky_alone_passes(outcome_of):
    outcome = outcome_of(FAILS_ONCE.replace('assert not first_time("unsteady")', "pass"))
    assert outcome.passed
    assert len(outcome.known) == 2


@pytest.mark.parametrize(
    ("source", "failed", "broken"),
    [
        pytest.param(DIES, [], "pytest ended with status 7", id="the process dies"),
        pytest.param("import nothing_of_this", ["test_it.py"], "status 2", id="can't be collected"),
        pytest.param(IN_TEARDOWN, ["test_it.py::test_leaks"], "", id="fails in its teardown"),
    ],
)
def test_no_failure_is_lost(source, failed, broken, outcome_of):
    outcome = outcome_of(source)
    assert outcome.failed == failed
    assert broken in outcome.broken
    assert bool(broken) == bool(outcome.broken)
    assert not outcome.passed


@pytest.mark.parametrize("weekly", [False, True])
def test_main_fails_with_any_part(weekly, monkeypatch, capsys):
    compiled = []

    def run_parts(parts, known, more):
        assert compiled == [True]
        assert more == ["-x"]
        marks = {part.arguments[1].endswith(" and (weekly or hypothesis)") for part in parts}
        assert os.environ.get("HYPOTHESIS_PROFILE") == ("thorough" if weekly else None)
        assert marks == {weekly}
        assert {"--timeout=900" in part.arguments for part in parts} == {weekly}
        return [run_tests.Outcome(part.name, ["x"] * (part.name == "of units")) for part in parts]

    monkeypatch.setattr(run_tests, "choose", lambda: chosen_files.Choice(frozenset(), "some"))
    monkeypatch.setattr(run_tests, "compile_imports", lambda: compiled.append(True))
    monkeypatch.setattr(run_tests, "run_parts", run_parts)
    assert run_tests.main(["--weekly", "-x"] if weekly else ["-x"]) == 1
    told = capsys.readouterr().out
    assert "tests of units: FAILED" in told
    assert "tests of engines: passed" in told
    assert f"These were tests of {'all files' if weekly else 'some'}." in told


@pytest.mark.parametrize(
    ("arguments", "num_flaky", "status"),
    [([], 2, 0), ([], 3, 1), (["--weekly"], 1, 1), (["--weekly"], 0, 0)],
)
def test_main_fails_with_too_many_flaky_tests(arguments, num_flaky, status, monkeypatch, capsys):
    def run_parts(parts, known, more):
        names = ["x", "y", "z"][:num_flaky]
        flaky = {"of units": names[:2], "of pages": names[2:]}
        return [run_tests.Outcome(part.name, flaky=flaky.get(part.name, ())) for part in parts]

    monkeypatch.setattr(run_tests, "choose", lambda: chosen_files.Choice(frozenset(), "some"))
    monkeypatch.setattr(run_tests, "compile_imports", lambda: None)
    monkeypatch.setattr(run_tests, "run_parts", run_parts)
    assert run_tests.main(arguments) == status
    told = capsys.readouterr().out
    assert told.count("FLAKY") == num_flaky
    assert ("tests of units: passed, flaky" in told) == (num_flaky > 0)


def test_what_is_imported_before_all_parts_is_there():
    assert all((run_tests.ROOT / path).is_dir() for path in run_tests.IMPORTED)


@pytest.mark.parametrize("weekly", [False, True])
def test_each_file_is_in_one_part(weekly):
    """And what needs vLLM in one of those besides."""
    all_parts = run_tests.WEEKLY_PARTS if weekly else run_tests.PARTS
    for path in (run_tests.ROOT / "test").rglob("test_*.py"):
        name = str(path.relative_to(run_tests.ROOT))
        for engine in ("not vllm", *["vllm"] * ("mark.vllm" in path.read_text(encoding="utf-8"))):
            marks = f"{engine} and {run_tests.WEEKLY if weekly else 'not weekly'}"
            parts = [part.name for part in all_parts if is_in(name, marks, part.arguments)]
            assert path == Path(__file__) or len(parts) == 1, (name, marks, parts)


def is_in(name, marks, arguments):
    _, own, *paths = arguments
    left_out = [path.removeprefix("--ignore=") for path in paths if path.startswith("--")]
    return own == marks and is_below(name, set(paths)) and not is_below(name, left_out)


def is_below(name, paths):
    return any(name == path or name.startswith(f"{path}/") for path in paths)


def test_of_two_parts_each_has_its_own_failures_and_second_try(tmp_path, monkeypatch, capfd):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    waits = "import time\nfrom pathlib import Path\n" + (
        "def test_meets(): \n"
        "    Path({own!r}).touch()\n"
        "    while not Path({other!r}).exists(): time.sleep(0.01)\n"
    )
    for own, other in (("a", "b"), ("b", "a")):
        source = waits.format(own=str(tmp_path / own), other=str(tmp_path / other))
        (tmp_path / f"test_{own}.py").write_text(source + (BROKEN if own == "b" else ""))
    parts = [run_tests.Part(x, (f"test_{x}.py",)) for x in "ab"]
    first, second = run_tests.run_parts(parts, {}, tmp_path)
    assert first.passed
    assert second.failed == ["test_b.py::test_broken"]
    told = capfd.readouterr().out
    assert told.count("test_broken") > 0


def test_list_of_known_flaky_tests_names_real_ones_with_reasons(tmp_path):
    for name in run_tests.known_flaky():
        file, _, function = name.partition("::")
        source = (run_tests.ROOT / file).read_text(encoding="utf-8")
        assert f"def {function.partition('[')[0]}(" in source
    bare = tmp_path / "known.txt"
    bare.write_text("# fine\n\ntest_it.py::test_a\n")
    with pytest.raises(ValueError, match=r"file::test: reason.*test_it\.py::test_a"):
        run_tests.known_flaky(bare)


RECIPE = "sota-implementations/own"
FILES_OF_A_REPOSITORY = {
    "pyproject.toml": '[project]\ndependencies = ["torch"]\n',
    "objectives/__init__.py": "",
    "objectives/near.py": "",
    "docs/page.md": "",
    "test/test_house.py": "",
    "test/docs/test_pages.py": "",
    "test/sota/test_own_script.py": "",
    "test/objectives/test_near.py": "from objectives import near\n",
    **{f"test/objectives/test_far_{n}.py": "" for n in range(40)},
}


@pytest.fixture
def repository(tmp_path):
    """A repository, and how to commit files at an hour."""

    def commit(files, hour):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        when = {"GIT_COMMITTER_DATE": f"{1_800_000_000 + 3600 * hour} +0000"}
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "more"]):
            subprocess.run(["git", *command], cwd=tmp_path, env=os.environ | when, check=True)
        return chosen_files.choose(tmp_path)

    commit(FILES_OF_A_REPOSITORY, 0)
    return commit


def test_files_near_to_recent_commits_run_and_the_others_within_four_days(repository, tmp_path):
    far = {name for name in FILES_OF_A_REPOSITORY if "far" in name}
    ran = []
    for day in range(1, 5):
        choice = repository({"objectives/near.py": f"x = {day}\n"}, 24 * day)
        assert "test/objectives/test_near.py" not in choice.left_out
        assert "test/test_house.py" not in choice.left_out
        ran.append(far - choice.left_out)
        assert chosen_files.choose(tmp_path) == choice
    assert set.union(*ran) == far
    assert sum(map(len, ran)) == len(far)
    # What changed long before is not recent; what is not committed is.
    later = repository({"docs/page.md": "words"}, 24 * 4 + 7)
    assert "test/docs/test_pages.py" not in later.left_out
    assert (
        "test/sota/test_own_script.py" not in repository({f"{RECIPE}/a.yaml": ""}, 24 * 5).left_out
    )
    (tmp_path / "test/objectives/test_far_0.py").write_text("# changed\n")
    (tmp_path / "test/objectives/test_new.py").write_text("")
    left_out = chosen_files.choose(tmp_path).left_out
    assert not {"test/objectives/test_far_0.py", "test/objectives/test_new.py"} & left_out


@pytest.mark.parametrize(
    "files",
    [
        {"requirements/train.txt": "torch==2\n"},
        {"pyproject.toml": '[project]\ndependencies = ["torch", "numpy"]\n'},
    ],
)
def test_other_packages_are_tested_by_all_files(files, repository):
    assert not repository(files, 24).left_out
    assert repository({"docs/page.md": "words"}, 48).left_out


def test_settings_of_tools_are_no_other_packages(repository):
    text = FILES_OF_A_REPOSITORY["pyproject.toml"] + "[tool.x]\ny = 1\n"
    assert repository({"pyproject.toml": text}, 24).left_out


def test_without_a_history_all_files_run(repository, tmp_path):
    shutil.rmtree(tmp_path / ".git")
    assert chosen_files.choose(tmp_path) == (
        frozenset(),
        "all files, because there is no history of commits",
    )


def test_parts_have_the_chosen_files_and_none_is_run_without_any():
    parts = [
        run_tests.Part("folders", ("-m", "not vllm", "test/a", "test", "--ignore=test/b")),
        run_tests.Part("files", ("-m", "vllm", "test/a/test_1.py", "test/a/test_2.py")),
        run_tests.Part("one", ("-m", "vllm", "test/a/test_1.py")),
    ]
    folders, files = run_tests.chosen_of(parts, {"test/a/test_1.py"})
    assert files.arguments == ("-m", "vllm", "test/a/test_2.py")
    assert sorted(folders.arguments[2:]) == [
        *("--ignore=test/a/test_1.py", "--ignore=test/b", "test", "test/a"),
    ]
    assert run_tests.chosen_of(parts, ()) == parts
