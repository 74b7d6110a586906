"""A disk that loses what was not synced, and the record of what a store does to it.

The model is POSIX's: the bytes of a file are safe once the file is synced, a name once its folder
is. What was not synced may be there or not: of each file any beginning of what was written since,
of each folder the names after any of the changes since.
"""

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

CALLS = {
    **{"fsync": "sync", "fchmod": "make_read_only", "rename": "rename"},
    **{"unlink": "remove_file", "rmdir": "remove_folder"},
}
"""Calls of the system, and what they do; what makes files and folders is seen by itself."""


@dataclass
class File:
    data: bytes = b""
    synced: int = 0
    """Bytes that are safe."""


@dataclass
class Folder:
    names: dict = field(default_factory=dict)
    history: list = field(default_factory=lambda: [{}])
    """The names as they are on the disk, and after each change since."""

    def changed(self):
        self.history.append(dict(self.names))


class Disk:
    """What a folder of the real disk holds, all of it safe, and what happens to it."""

    def __init__(self, root):
        self.root = root
        self.top = self._read(root)

    def _read(self, path):
        if path.is_file():
            data = path.read_bytes()
            return File(data, len(data))
        names = {child.name: self._read(child) for child in path.iterdir()}
        return Folder(names, [dict(names)])

    def _at(self, path):
        node = self.top
        for name in Path(path).relative_to(self.root).parts:
            node = node.names[name]
        return node

    def apply(self, change, path, *rest):
        path = Path(path)
        if change == "write":
            self._at(path).data += rest[0]
        elif change == "sync":
            file = self._at(path)
            file.synced = len(file.data)
        elif change == "sync_folder":
            folder = self._at(path)
            folder.history = [dict(folder.names)]
        elif change != "make_read_only":
            self._rename(change, path, *rest)

    def _rename(self, change, path, *rest):
        parent = self._at(path.parent)
        if change == "make_folder":
            parent.names[path.name] = Folder()
        elif change == "create":
            parent.names[path.name] = File()
        elif change == "rename":
            assert path.parent == rest[0].parent, "the model knows renames within a folder only"
            parent.names[rest[0].name] = parent.names.pop(path.name)
        else:
            removed = parent.names.pop(path.name)
            assert change == "remove_file" or not removed.names, "only empty folders go"
        parent.changed()

    def after_crash(self, target, choose):
        """Write what may be left; ``choose(n)`` is one of 0 ... n - 1, n - 1 the newest."""
        self._write(self.top, target, choose)

    def _write(self, node, path, choose):
        if isinstance(node, File):
            lost = len(node.data) - node.synced
            path.write_bytes(node.data[: node.synced + (choose(lost + 1) if lost else 0)])
            return
        path.mkdir()
        for name, child in node.history[choose(len(node.history))].items():
            self._write(child, path / name, choose)


# What a crash may leave: all that was done (the process died, not the machine), nothing that was
# not synced, and anything in between: names without bytes, bytes without names.
CRASHES = {
    "everything": lambda n: n - 1,
    "only what was synced": lambda _: 0,
    **{f"something ({seed})": random.Random(seed).randrange for seed in range(2)},
}


class Recorder:
    """Every change of the file system below a folder, from now on.

    What is written, by whomever, is seen before the next call of the system for which it could
    matter; half of a file may be all that got through.
    """

    def __init__(self, root):
        self.root = root
        self.changes = []
        self._known = {
            path: b"" if path.is_dir() else path.read_bytes() for path in root.rglob("*")
        }

    def look(self):
        """See what was made since."""
        for path, data in self._known.items():
            assert path.is_dir() or path.read_bytes() == data, f"{path} was written again"
        for path in sorted(set(self.root.rglob("*")) - set(self._known)):
            data = b"" if path.is_dir() else path.read_bytes()
            self._known[path] = data
            self.changes.append(("make_folder" if path.is_dir() else "create", path))
            half = len(data) // 2
            parts = [part for part in (data[:half], data[half:]) if part]
            self.changes += [("write", path, part) for part in parts]

    def note(self, change, at, *rest):
        """Note a call of the system that is about to be made."""
        self.look()
        is_folder = change == "sync" and at.is_dir()
        self.changes.append((f"{change}_folder" if is_folder else change, at, *rest))
        if change in ("rename", "remove_file", "remove_folder"):
            for path in [path for path in self._known if path.is_relative_to(at)]:
                data = self._known.pop(path)
                if rest:
                    self._known[rest[0] / path.relative_to(at)] = data


def recorded(monkeypatch, root):
    """A list that every change of the file system below a folder is appended to."""
    recorder = Recorder(root)

    def wrap(name, change):
        real = getattr(os, name)

        def call(first, *rest, dir_fd=None):
            at = Path(os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else first)
            if dir_fd is not None:
                at = Path(os.readlink(f"/proc/self/fd/{dir_fd}")) / at
            if at.is_relative_to(root):
                recorder.note(change, at, *(Path(new) for new in rest if change == "rename"))
            options = {} if dir_fd is None else {"dir_fd": dir_fd}
            return real(first, *rest, **options)

        monkeypatch.setattr(os, name, call)

    for name, change in CALLS.items():
        wrap(name, change)
    return recorder.changes
