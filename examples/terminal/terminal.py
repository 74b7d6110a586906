"""An agent with a terminal mends a library that has a mistake; tests that it never sees score it.

    torchrl-agents grpo task=terminal policy=smollm2

To make one of your own, copy both files, and name yours by ``task.factory=terminal:make_task``.

Twenty problems, made here of the library in ``repository.toml``: each has one line changed for the
worse, and an issue that tells what somebody noticed. A part of them is held out. Every episode has
a sandbox of its own, without a network. What comes of it is run in a fresh one, on calls of all
functions, and compared outside with what is right, which no patch can read there or forge.
"""

import functools
import json
import random
import tomllib
from pathlib import Path

from torchrl_envs import Sandbox, SandboxSession
from torchrl_envs.tasks.task import Task

TEXTS = tomllib.loads(Path(__file__).with_name("repository.toml").read_text("utf-8"))
FILES, PROBLEMS = TEXTS["files"], TEXTS["problems"]
CALLS = [(problem["file"].removesuffix(".py"), c) for problem in PROBLEMS for c in problem["calls"]]
SHELL = "/usr/bin/bash"
START = """
import os, pathlib, subprocess, sys
folder = pathlib.Path("/tmp/repository")
folder.mkdir()
os.environ["PATH"] = os.path.dirname(sys.executable) + ":/usr/bin"

def shell(command):
    how = {"stdin": subprocess.DEVNULL, "stdout": 1, "stderr": 1, "cwd": folder}
    status = subprocess.run(["SHELL", "-c", command], **how).returncode
    if status:
        print(f"[exit status {status}]")

def edit(name, old, new):
    text = (folder / name).read_text()
    if (count := text.count(old)) != 1:
        sys.exit(f"{old!r} stands in {name} {count} times, not once")
    (folder / name).write_text(text.replace(old, new))
""".replace("SHELL", SHELL)
WRITE = """
for name, text in {files!r}.items():
    (folder / name).write_text(text)
"""
READ = """
import json
print(json.dumps({{name: (folder / name).read_text() for name in {names!r}}}))
"""
GRADE = """
import importlib, json, pathlib, sys
folder = pathlib.Path("/tmp")
sys.path.insert(0, "/tmp")
{write}
def result(module, call):
    try:
        return repr(eval(call, vars(importlib.import_module(module))))
    except BaseException as error:
        return type(error).__name__
print("\\n" + json.dumps([result(*each) for each in {calls!r}]))
"""
CHECK = """
import importlib
for module, call, right in {shown!r}:
    try:
        found = repr(eval(call, vars(importlib.import_module(module))))
    except Exception as error:
        found = repr(error)
    print("ok    " if found == right else "WRONG ", call, "gives", found)
"""


class Terminal:
    """A repository with a mistake, and a shell."""

    def __init__(self, sandbox: Sandbox, right: list[str]) -> None:
        self._sandbox, self._right = sandbox, right
        self._session = SandboxSession(sandbox)

    def reset(self, *, files: dict[str, str], **row) -> None:
        self._run(START + WRITE.format(files=files))

    def _run(self, code: str) -> str:
        result = self._session.run(code)
        if result.exit_status != 0:
            last = result.stderr.strip().rpartition("\n")[2]
            raise RuntimeError("the terminal was lost" if result.state_lost else last)
        return result.stdout

    def shell(self, command: str) -> str:
        """Run a command in the folder of the library.

        Args:
            command: For bash.
        """
        return self._run(f"shell({command!r})")

    def edit(self, file: str, old: str, new: str) -> str:
        """Replace a text that stands in a file once.

        Args:
            file: Its name.
            old: The text.
            new: What is put in its place.
        """
        return self._run(f"edit({file!r}, {old!r}, {new!r})") or "done"

    def get_reward(self) -> float:
        """1 if every function gives what it should, else 0."""
        try:
            files = json.loads(self._run(READ.format(names=list(FILES))))
        except (RuntimeError, ValueError):  # no files are left, or no terminal
            return 0.0
        return float(results(self._sandbox, files) == self._right)

    def close(self) -> None:
        self._session.close()


def results(sandbox: Sandbox, files: dict[str, str]) -> list[str]:
    """What all calls give, as text; fewer where the library ends the program."""
    program = GRADE.format(write=WRITE.format(files=files), calls=CALLS)
    last = sandbox.run(program).stdout.strip().rpartition("\n")[2]
    return json.loads(last) if last.startswith("[") and last.endswith("]") else []


def make_task(
    *,
    functions: list[str] | None = None,
    num_held_out: int = 6,
    max_turns: int = 8,
    seed: int = 0,
) -> Task:
    """The problems.

    Args:
        functions: train on their problems alone; on all that are not held out when not given.
        num_held_out: problems held out, three in ten at most.
        max_turns: of the agent.
        seed: of which problems are held out.
    """
    sandbox = Sandbox(packages=["/usr/bin"])  # its programs can be run
    right = results(sandbox, FILES)
    assert len(right) == len(CALLS)
    answers = dict(zip(CALLS, right, strict=True))
    shown = [(p["file"].removesuffix(".py"), p["calls"][0]) for p in PROBLEMS]
    check = CHECK.format(shown=[(*each, answers[each]) for each in shown])
    rows = []
    for problem in PROBLEMS:
        name, code = problem["file"], FILES[problem["file"]]
        assert code.count(problem["right"]) == 1
        broken = code.replace(problem["right"], problem["wrong"])
        prompt = f"A small Python library has a mistake. {problem['issue']}\nMend it; its files are"
        prompt += f" {', '.join(FILES)}. `python check.py` tries some calls."
        files = {**FILES, name: broken, "check.py": check}
        rows.append({"prompt": prompt, "function": problem["function"], "files": files})
    random.Random(seed).shuffle(rows)
    num_held_out = min(num_held_out, len(rows) * 3 // 10)
    wanted = {row["function"] for row in rows} if functions is None else set(functions)
    return Task(
        name="terminal",
        environment=functools.partial(Terminal, sandbox, right),
        train_rows=[row for row in rows[num_held_out:] if row["function"] in wanted],
        held_out_rows=rows[:num_held_out],
        columns=("prompt", "files"),
        prompt_column="prompt",
        max_turns=max_turns,
    )
