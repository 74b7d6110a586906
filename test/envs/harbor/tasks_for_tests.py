"""A task in Harbor's format, made of texts."""

from pathlib import Path

TASK = {
    "instruction.md": "<!-- benchmark canary 123 -->\n\nWrite the word hi to /app/out.txt.\n",
    "task.toml": "[verifier]\ntimeout_sec = 20.0\n",
    "environment/Dockerfile": "FROM debian:bookworm\nWORKDIR /app\nCOPY data.txt ./\n",
    "environment/data.txt": "some data\n",
    "tests/test.sh": "#!/bin/bash\n"
    '[ "$(cat /app/out.txt)" = hi ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n',
    "solution/solve.sh": "#!/bin/bash\necho hi > /app/out.txt\n",
}


def write_task(folder: Path, **changed):
    """Write the task; texts by path replace its own, and ``None`` leaves a file out."""
    for path, text in {**TASK, **changed}.items():
        if text is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    return folder
