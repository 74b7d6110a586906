"""``torchrl-agents`` is completed in a real shell, in a folder of its own, without torch."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def home(tmp_path):
    """A folder with a program, files of a user, and no torch to be imported."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/torchrl-agents"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m torchrl_agents "$@"\n')
    program.chmod(0o755)
    (tmp_path / "without/torch").mkdir(parents=True)
    (tmp_path / "without/torch/__init__.py").write_text("raise ImportError('torch was imported')")
    (tmp_path / "own/outputs").mkdir(parents=True)
    (tmp_path / "own/rows.jsonl").write_text("{}")
    (tmp_path / "inputrc").write_text("set bell-style none\nset enable-bracketed-paste off\n")
    return tmp_path


def environment(home):
    return {
        "PATH": f"{home}/bin:{os.environ['PATH']}",
        "HOME": str(home),
        "PYTHONPATH": f"{ROOT}:{home}/without:{ROOT}/test/quick_imports",
        "INPUTRC": f"{home}/inputrc",
        "TERM": "dumb",
        "PS1": "> ",
        "COLUMNS": "1000",
    }


def in_a_terminal(shell, lines, home):
    """What a shell prints for lines that are typed, each key after the other."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(home / "own")
        os.execvpe(shell[0], shell, environment(home))
    os.write(terminal, "".join(f"{line}\n" for line in [*lines, "exit"]).encode())
    said, deadline = b"", time.monotonic() + 120
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 1)[0]:
            try:
                new = os.read(terminal, 65536)
            except OSError:  # the shell has ended
                break
            if not new:
                break
            said += new
    os.close(terminal)
    os.waitpid(pid, 0)
    return said.decode(errors="replace")


# What is typed, up to the tab, and the line that comes of it.
LINES = {
    "torchrl-agents gr": "torchrl-agents grpo ",
    "torchrl-agents grpo task=number_": "torchrl-agents grpo task=number_guessing ",
    "torchrl-agents grpo collector.stal": "torchrl-agents grpo collector.staleness_policy=",
    "torchrl-agents grpo dry_run=t": "torchrl-agents grpo dry_run=true ",
    "torchrl-agents grpo task=wordle task.num_h": "torchrl-agents grpo task=wordle task.num_h",
    "torchrl-agents lora task=ife": "torchrl-agents lora task=ifeval ",
    "torchrl-agents evaluate engine.name=c": "torchrl-agents evaluate engine.name=chat ",
    "~/bin/torchrl-agents sft --mult": "~/bin/torchrl-agents sft --multirun ",
}
FILES = {
    "torchrl-agents grpo task.dataset=row": "torchrl-agents grpo task.dataset=rows.jsonl",
    "torchrl-agents view outp": "torchrl-agents view outputs/",
}
"""By bash alone; zsh does not look for files behind an ``=``."""
SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}


@pytest.mark.parametrize("shell", [name for name in SHELLS if shutil.which(name)])
def test_what_is_typed_goes_on(shell, home):
    """The line is not run: it becomes the text of a command that prints it."""
    start = f'eval "$(torchrl-agents completion {shell})"'
    lines = LINES | (FILES if shell == "bash" else {})
    ended = [f"{typed}\t>'\x01echo '<" for typed in lines]  # control-A goes to the line's start
    said = in_a_terminal(SHELLS[shell], [start, *ended], home)
    found = [line for line in said.splitlines() if line.startswith("<")]
    assert found == [f"<{line}>" for line in lines.values()]


def words(typed, home):
    done = subprocess.run(
        ["torchrl-agents", "completion", "words", typed],
        **{"capture_output": True, "text": True, "check": False, "timeout": 60},
        cwd=home / "own",
        env=environment(home),
    )
    return done.stdout.splitlines()


def test_every_command_is_offered(home):
    from torchrl_agents.command import ALIASES, COMMANDS, recipes

    offered = {word.rstrip() for word in words("torchrl-agents ", home)}
    assert offered == {*recipes(), *ALIASES, *COMMANDS, "--help"}
    assert {"grpo", "sft", "evaluate", "lora", "view", "completion"} <= offered


def test_settings_are_those_of_the_recipe_and_of_what_was_chosen_before(home):
    assert words("torchrl-agents evaluate o", home) == ["overwrite="]
    assert words("torchrl-agents grpo o", home) == ["optim.", "optim=", "overwrite="]
    # Arguments of `catch_task`, and the task's name.
    catch = words("torchrl-agents grpo seed=1 task=catch task.", home)
    assert catch == ["task.id=", "task.num_demonstrations=", "task.num_rows="]
    presets = words("torchrl-agents grpo 'task.x=a b' loss=dr", home)
    assert presets == ["loss=dr_grpo "]
    assert words("torchrl-agents grpo 'task.x=[a, ", home) == []


@pytest.mark.parametrize("asked", [["--help"], ["-h"], None])
@pytest.mark.parametrize("name", ["doctor", "completion"])
def test_commands_without_a_parser_have_help(capsys, name, asked):
    from torchrl_agents.command import main

    assert main(["help", name] if asked is None else [name, *asked]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"usage: torchrl-agents {name} ")
    assert said.err == ""


def test_other_shells_are_refused(capsys):
    from torchrl_agents.command import main

    assert main(["completion", "fish"]) == 2
    said = "torchrl-agents completion takes bash or zsh, got ['fish'].\n"
    assert capsys.readouterr() == ("", said)
