"""The list of a checkpoint's files, with the length and SHA-256 of each, and of itself."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from . import fsio
from .errors import CheckpointError
from .tensor_file import Written, write_file

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
_MAX_BYTES: Final = 1 << 26
# The file is JSON; its first line is the SHA-256 of what stands between these two.
_START: Final = b'{"sha256":"%s",\n"manifest":'
_END: Final = b"}\n"


def write_manifest(folder: Path, about: dict[str, Any], files: dict[str, Written]) -> None:
    """Write the manifest of a folder and sync it."""
    listed = {
        name: {"bytes": file.num_bytes, "sha256": file.sha256} for name, file in files.items()
    }
    body = json.dumps({"format": FORMAT, **about, "files": listed}, indent=1).encode()
    head = _START % hashlib.sha256(body).hexdigest().encode()
    write_file(folder / MANIFEST, [head, body, _END])


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder, if it is whole.

    Raises:
        CheckpointError: it is missing, changed, or of another format.
    """
    path = folder / MANIFEST
    try:
        text = _read(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}).") from error
    head = len(_START % (b"0" * 64))
    body = text[head : -len(_END)]
    if text != _START % hashlib.sha256(body).hexdigest().encode() + body + _END:
        raise CheckpointError(f"{path}: its SHA-256 is not that of what it says; it was changed.")
    try:
        manifest = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no JSON ({error}).") from error
    _check(path, manifest)
    return manifest


def _read(path: Path) -> bytes:
    descriptor = fsio.open_file(path)
    try:
        count = fsio.size(descriptor)
        if count > _MAX_BYTES:
            raise OSError(f"it has {count} bytes, a manifest at most {_MAX_BYTES}")
        buffer = bytearray(count)
        fsio.read_into(descriptor, memoryview(buffer), 0)
        return bytes(buffer)
    finally:
        fsio.close(descriptor)


def _check(path: Path, manifest: Any) -> None:
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise CheckpointError(
            f"{path}: has the format {found!r:.80}, this version reads {FORMAT}. Read it with the "
            "version that wrote it."
        )
    match manifest:
        case {"step": int(), "save": int(), "metric": None | float() | int(), "files": dict(files)}:
            good = all(
                isinstance(file, dict)
                and type(file.get("bytes")) is int
                and isinstance(file.get("sha256"), str)
                for file in files.values()
            )
        case _:
            good = False
    if not good:
        raise CheckpointError(f"{path}: lacks what a manifest has, or has it in another form.")


def check_lengths(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """What is wrong with the names and lengths of a folder's files; nothing is opened."""
    listed, found = manifest["files"], fsio.tree(folder)
    found.pop(MANIFEST, None)
    missing = [name.encode(errors="backslashreplace").decode() for name in set(listed) - set(found)]
    problems = [f"{folder}/{name:.500}: is missing" for name in sorted(missing)]
    for name, count in found.items():
        if count is None:
            problems.append(f"{folder / name}: is no regular file")
        elif name not in listed:
            problems.append(f"{folder / name}: is not in the manifest")
        elif count != listed[name]["bytes"]:
            problems.append(
                f"{folder / name}: has {count} bytes, the manifest says {listed[name]['bytes']}"
            )
    return problems


def verify(folder: Path, manifest: dict[str, Any], share: tuple[int, int] = (0, 1)) -> None:
    """Check every file of a folder against its manifest.

    Args:
        folder: of the checkpoint.
        manifest: of the folder.
        share: read only every so many-th file, from one on: ``(first, every)``.

    Raises:
        CheckpointError: naming each file that differs, and how.
    """
    try:
        problems = check_lengths(folder, manifest)
        named = {problem.split(": ")[0] for problem in problems}
        for name in list(fsio.tree(folder))[share[0] :: share[1]]:
            path = folder / name
            if name == MANIFEST or str(path) in named:
                continue
            if sha256(path) != manifest["files"][name]["sha256"]:
                problems.append(f"{path}: its SHA-256 is not that of the manifest; it was changed")
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error}).") from error
    if problems:
        raise CheckpointError("; ".join(problems) + ".")


def sha256(path: Path) -> str:
    """The digest of a file, in hexadecimal."""
    digest = hashlib.sha256()
    descriptor = fsio.open_file(path)
    try:
        for chunk in fsio.chunks(descriptor):
            digest.update(chunk)
    finally:
        fsio.close(descriptor)
    return digest.hexdigest()
