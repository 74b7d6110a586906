"""Rows of a data set as tasks: each becomes a folder in Harbor's format."""

import json
import re
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from torchrl_envs.datasets import DATA_FILES
from torchrl_envs.datasets.loading import load_rows

from .folders import (
    CONFIG,
    HarborTask,
    TaskFolder,
    TaskFolderError,
    hold,
    load_tasks,
    read_task,
    told_faults,
)

BASE_IMAGE: Final = "debian:bookworm"
"""The image of a row that names none."""
TEXTS: Final = ("prompt", "tests", "solution", "image", "dockerfile", "setup", "name", "workdir")
NUMBERS: Final = ("timeout_s", "tests_timeout_s", "cpus", "memory_mb", "storage_mb", "gpus")
_TEST: Final = """#!/bin/bash
# The reward is what the row's own tests write, or else whether they succeed.
chmod +x /tests/row.sh
/tests/row.sh
status=$?
[ -e /logs/verifier/reward.txt ] || [ -e /logs/verifier/reward.json ] ||
  { [ $status = 0 ] && echo 1 || echo 0; } > /logs/verifier/reward.txt
"""
_OF_ENVIRONMENT: Final = (
    *("docker_image", "workdir", "network_mode"),
    *("cpus", "memory_mb", "storage_mb", "gpus"),
)
_SETTINGS: Final = {
    "agent": {"timeout_sec": "timeout_s"},
    "verifier": {"timeout_sec": "tests_timeout_s", "environment_mode": "environment_mode"},
    "environment": {name: name for name in _OF_ENVIRONMENT},
}
"""Columns by table and name of ``task.toml``."""
_FILES: Final = "files"
_SETUP: Final = "setup.sh"


def tasks_of_rows(
    rows: Sequence[Mapping[str, Any]], *, skip_bad: bool = False
) -> tuple[list[HarborTask], dict[str, str]]:
    """The tasks of a data set.

    Args:
        rows: each with ``prompt``, the instruction, and ``tests``, a script that scores what was
            done: by ``/logs/verifier/reward.txt``, or else by its exit status. It may have
            ``image`` or ``dockerfile`` (a text; Debian when there is neither), ``setup`` (commands
            that are run once, when the image is made), ``files`` (texts by their path in the
            working directory), ``solution`` (a script), ``workdir``, ``network_mode``,
            ``timeout_s`` of the agent and ``tests_timeout_s``, ``cpus``, ``memory_mb``,
            ``storage_mb``, ``gpus`` and ``name``. With ``environment_mode`` ``"separate"`` the
            tests run in a fresh machine that gets the working directory alone. Other columns have
            no effect.
        skip_bad: leave out rows that are no task.

    Returns:
        The tasks in the order of the rows, and why others were left out, by their number.

    Raises:
        TaskFolderError: there is no row, or one is no task and ``skip_bad`` is false.
    """
    kept = TaskFolder()
    top = Path(kept.name)
    tasks, faults = [], {}
    for number, row in enumerate(rows):
        folder = top / f"row-{number:06d}"
        try:
            _write(folder, row, f"row {number}")
            task = read_task(folder)
        except TaskFolderError as error:
            faults[f"row {number}"] = str(error).replace(f"{folder}: ", f"row {number}: ")
            continue
        weakref.finalize(task, hold, kept)
        tasks.append(task)
    told_faults(faults, len(rows), "rows", skip_bad=skip_bad)
    return tasks, faults


def found_tasks(
    dataset: Any, *, split: str | None = None, skip_bad: bool = False
) -> tuple[list[HarborTask], dict[str, str]]:
    """The tasks of folders, of an archive or of rows.

    Args:
        dataset: a folder or an archive of tasks; or rows: a data file, what ``save_to_disk``
            wrote, with ``split`` an id on the hub, or the rows themselves.
        split: of rows that have several.
        skip_bad: leave out what is no task.

    Returns:
        The tasks, and why others were left out.

    Raises:
        FileNotFoundError: there is no such path.
        ValueError: there is no task, or one is broken and ``skip_bad`` is false.
    """
    path = Path(dataset).expanduser() if isinstance(dataset, str | Path) else None
    is_table = path is None or split is not None or path.suffix in DATA_FILES
    if path is not None and not is_table:
        is_table = any((path / f"dataset_{kind}.json").exists() for kind in ("info", "dict"))
    if path is not None and not is_table:
        return load_tasks(path, skip_bad=skip_bad)
    rows = load_rows(
        path if path and path.exists() else dataset, split=split, skip_bad_rows=skip_bad
    )
    return tasks_of_rows(rows, skip_bad=skip_bad)


def _write(folder: Path, row: Mapping[str, Any], whose: str) -> None:
    """Write a row's folder.

    Raises:
        TaskFolderError: a column is missing or is not what it must be.
    """
    texts = {name: _text(row, name, whose) for name in TEXTS}
    for name in ("prompt", "tests"):
        if not texts[name].strip():
            raise TaskFolderError(f"{whose}: a task needs the column {name}, a text.")
    if texts["image"] and texts["dockerfile"]:
        raise TaskFolderError(f"{whose}: it has image and dockerfile, of which a task takes one.")
    (folder / "environment").mkdir(parents=True)
    (folder / "instruction.md").write_text(texts["prompt"], encoding="utf-8")
    _script(folder / "tests/test.sh", _TEST)
    _script(folder / "tests/row.sh", texts["tests"])
    if texts["solution"]:
        _script(folder / "solution/solve.sh", texts["solution"])
    files = _files(row, whose)
    is_built = bool(texts["setup"] or files or not texts["image"])
    if is_built:
        _write_environment(folder / "environment", texts, files, whose)
    mode, artifacts = _text(row, "environment_mode", whose), list[str]()
    if mode == "separate":
        artifacts = [texts["workdir"] or ("" if texts["image"] or texts["dockerfile"] else "/app")]
        if not artifacts[0]:
            what = "environment_mode=separate needs workdir, which the tests are to see"
            raise TaskFolderError(f"{whose}: {what}.")
    lines = [f"artifacts = {_toml(artifacts)}", "[task]", f"name = {_toml(texts['name'] or whose)}"]
    values: dict[str, Any] = {"docker_image": "" if is_built else texts["image"]}
    values |= {"workdir": texts["workdir"], "network_mode": _text(row, "network_mode", whose)}
    values["environment_mode"] = mode
    values |= {name: _number(row, name, whose) for name in NUMBERS}
    for table, settings in _SETTINGS.items():
        lines.append(f"[{table}]")
        given = {name: values[column] for name, column in settings.items()}
        lines += [f"{name} = {_toml(x)}" for name, x in given.items() if x not in (None, "")]
    (folder / CONFIG).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _toml(value: Any) -> str:
    """Return a text or number as TOML has it: JSON's, but for signs of many bytes and one other."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _files(row: Mapping[str, Any], whose: str) -> Mapping[str, str]:
    """Return texts by their path.

    Raises:
        TaskFolderError: they are no such.
    """
    files = row.get("files") or {}
    if isinstance(files, str):  # a table of texts holds them as JSON
        try:
            files = json.loads(files)
        except json.JSONDecodeError as error:
            what = f"{whose}: files is a text that is no JSON: {error}"
            raise TaskFolderError(what) from error
    if not isinstance(files, Mapping):
        raise TaskFolderError(f"{whose}: files must be texts by their path, got {files!r:.80}.")
    files = {name: text for name, text in files.items() if text is not None}  # of other rows
    for name, text in files.items():
        path = PurePosixPath(name)
        if not isinstance(text, str) or not name or path.is_absolute() or ".." in path.parts:
            raise TaskFolderError(
                f"{whose}: files must be texts by their path below the working directory, got "
                f"{name!r:.80}: {text!r:.80}."
            )
    return files


def _write_environment(
    place: Path, texts: Mapping[str, str], files: Mapping[str, str], whose: str
) -> None:
    """Write a Dockerfile and what it copies."""
    lines = [texts["dockerfile"].rstrip() or f"FROM {texts['image'] or BASE_IMAGE}"]
    workdir = texts["workdir"] or ("" if texts["dockerfile"] or texts["image"] else "/app")
    lines += [f"WORKDIR {workdir}"] if workdir else []
    for name, text in files.items():
        path = place / _FILES / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise TaskFolderError(f"{whose}: files: {name!r:.80} can't be made: {error}") from error
        path.chmod(0o755 if text.startswith("#!") else 0o644)
    lines += [f"COPY {_FILES}/ ./"] if files else []
    if texts["setup"]:
        _script(place / _SETUP, texts["setup"])
        lines.append(f"COPY {_SETUP} /tmp/{_SETUP}")
        lines.append(f"RUN bash /tmp/{_SETUP} && rm /tmp/{_SETUP}")
    (place / "Dockerfile").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _text(row: Mapping[str, Any], name: str, whose: str) -> str:
    value = row.get(name)
    if not isinstance(value, str | None):
        raise TaskFolderError(f"{whose}: {name} must be a text, got {value!r:.80}.")
    return value or ""


def _number(row: Mapping[str, Any], name: str, whose: str) -> float | None:
    value = row.get(name)
    if isinstance(value, str) and re.fullmatch(r"[0-9]+(\.[0-9]*)?", value):  # as CSV has it
        value = float(value) if "." in value else int(value)
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise TaskFolderError(f"{whose}: {name} must be a number, got {value!r:.80}.")
    return value


def _script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = text.replace("\r\n", "\n")
    path.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}", encoding="utf-8")
    path.chmod(0o755)
