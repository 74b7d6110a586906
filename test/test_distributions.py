"""What is built needs no checkout: the wheel in an empty folder, the source with its script."""

import json
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import torchrl_data

ROOT = Path(__file__).parents[1]
LIBRARY = ("torchrl_data", "torchrl_modules", "torchrl_envs", "objectives", "collectors")
PACKAGES = (*LIBRARY, "torchrl_agents")
IMPORT_EVERYTHING = """
import importlib, json, sys
found = {}
for package in sys.argv[1:]:
    module = importlib.import_module(package)
    for name in module.__all__:
        getattr(module, name)
    found[package] = [module.__file__, module.__version__]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    build("sdist", ROOT, folder)
    (archive,) = folder.iterdir()
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """The wheel that the source distribution builds."""
    folder = tmp_path_factory.mktemp("wheel")
    build("wheel", source, folder)
    (path,) = folder.iterdir()
    return path


def build(target, source, folder):
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)


def test_source_distribution_has_the_script_and_what_its_commands_need(source):
    for path in ("Makefile", "LICENSE", "README.md", "CHANGELOG.md", ".ci/run"):
        assert (source / path).is_file(), path
    for folder in ("sota-implementations", "test", "benchmarks", "docs", "requirements"):
        ours = {p.relative_to(ROOT) for p in (ROOT / folder).rglob("*") if counts(p)}
        assert {p for p in ours if not (source / p).is_file()} == set()


def counts(path):
    return path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"


def test_wheel_holds_the_packages_whole_and_nothing_else(wheel):
    files = set(zipfile.ZipFile(wheel).namelist())
    metadata = f"torchrl_agents-{torchrl_data.__version__}.dist-info"
    assert {name.partition("/")[0] for name in files} == {*PACKAGES, metadata}
    ours = {
        p.relative_to(ROOT).as_posix() for k in PACKAGES for p in (ROOT / k).rglob("*") if counts(p)
    }
    scripts = ROOT / "sota-implementations"
    ours |= {
        f"torchrl_agents/recipes/{p.relative_to(scripts).as_posix()}"
        for p in scripts.rglob("*")
        if counts(p)
    }
    assert {name for name in files if not name.startswith(metadata)} == ours
    described = message_from_bytes(zipfile.ZipFile(wheel).read(f"{metadata}/METADATA"))
    assert described["Version"] == torchrl_data.__version__
    assert described["License-Expression"] == "MIT"


def test_wheel_works_from_an_empty_folder(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_EVERYTHING, *LIBRARY],
        cwd=empty,
        env={"PYTHONPATH": str(site), "PATH": "", "HOME": str(empty)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for package in LIBRARY:
        file, version = found[package]
        assert Path(file).is_relative_to(site)
        assert version == torchrl_data.__version__


def test_the_command_of_a_wheel_runs_its_recipes(wheel, tmp_path):
    """Installed without its dependencies, which are there: help, a dry run, and what is wrong."""
    environment, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    venv.create(environment, with_pip=False)
    (site,) = environment.glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", f"--python={environment}/bin/python", "--quiet"]
    install = ["install", "--disable-pip-version-check", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *install], check=True, timeout=120)
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])

    def command(*arguments):
        return subprocess.run(
            [environment / "bin/torchrl-agents", *arguments],
            cwd=empty,
            env={"PATH": "", "HOME": str(empty), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    assert f"{torchrl_data.__version__}\n" == command("--version").stdout
    helped = command("--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "  grpo " in helped.stdout
    wrong = command("gpro")
    assert (wrong.returncode, "Did you mean grpo?" in wrong.stderr) == (2, True)
    checked = command("grpo", "debug=dry_run", "evaluate.num_prompts=8", "task.num_rows=32")
    assert checked.returncode == 0, checked.stderr
    assert (empty / "outputs/grpo/calculator/seed0-001/config.yaml").exists()
