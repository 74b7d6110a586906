"""The list of a checkpoint's files, with the length and SHA-256 of each, and of itself."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from .errors import CheckpointError
from .files import open_file, sha256, synced, tree

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
_MAX_BYTES: Final = 1 << 26
# The file is JSON; its first line is the SHA-256 of what stands between these two.
_START: Final = b'{"sha256":"%s",\n"manifest":'
_END: Final = b"}\n"


def write_manifest(folder: Path, about: dict[str, Any], files: dict[str, dict[str, Any]]) -> None:
    """Write the manifest of a folder and sync it; files are listed as :func:`synced` says them."""
    body = json.dumps({"format": FORMAT, **about, "files": files}, indent=1).encode()
    head = _START % hashlib.sha256(body).hexdigest().encode()
    (folder / MANIFEST).write_bytes(head + body + _END)
    synced(folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder, if it is whole.

    Raises:
        CheckpointError: it is missing, changed, or of another format.
    """
    path = folder / MANIFEST
    try:
        with open_file(path) as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise OSError(f"it has more than the {_MAX_BYTES} bytes of a manifest")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}).") from error
    body = text[len(_START % (b"0" * 64)) : -len(_END)]
    if text != _START % hashlib.sha256(body).hexdigest().encode() + body + _END:
        raise CheckpointError(f"{path}: its SHA-256 is not that of what it says; it was changed.")
    try:
        manifest = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no JSON ({error}).") from error
    found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
    if not isinstance(manifest, dict) or found != FORMAT:
        raise CheckpointError(
            f"{path}: has the format {found!r:.80}, this version reads {FORMAT}. Read it with the "
            "version that wrote it."
        )
    match manifest:
        case {"step": int(), "save": int(), "metric": None | float() | int(), "files": dict(files)}:
            listed = [
                isinstance(file, dict)
                and type(file.get("bytes")) is int
                and isinstance(file.get("sha256"), str)
                for file in files.values()
            ]
            if all(listed):
                return manifest
    raise CheckpointError(f"{path}: lacks what a manifest has, or has it in another form.")


def problems_of(
    folder: Path, manifest: dict[str, Any], share: tuple[int, int] | None = None
) -> list[str]:
    """Return what is wrong with the files of a folder, each of them named.

    Args:
        folder: of the checkpoint.
        manifest: of the folder.
        share: read every so many-th file, from one on, and compare its hash: ``(first, every)``;
            ``None`` compares names and lengths only, and opens nothing.
    """
    listed, found = manifest["files"], tree(folder)
    found.pop(MANIFEST, None)
    missing = [name.encode(errors="backslashreplace").decode() for name in set(listed) - set(found)]
    problems = [f"{folder}/{name:.500}: is missing" for name in sorted(missing)]
    read = set() if share is None else set(list(found)[share[0] :: share[1]])
    for name, count in found.items():
        path = folder / name
        if count is None:
            problems.append(f"{path}: is no regular file")
        elif name not in listed:
            problems.append(f"{path}: is not in the manifest")
        elif count != listed[name]["bytes"]:
            expected = listed[name]["bytes"]
            problems.append(f"{path}: has {count} bytes, the manifest says {expected}")
        elif name in read and sha256(path) != listed[name]["sha256"]:
            problems.append(f"{path}: its SHA-256 is not that of the manifest; it was changed")
    return problems
