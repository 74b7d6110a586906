"""A disk that loses what was not synced, and the record of what a store does to it.

The model is POSIX's: the bytes of a file are safe once the file is synced, a name once its folder
is. What was not synced may be there or not: of each file any beginning of what was written since,
of each folder the names after any of the changes since.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

from collectors.checkpoint import fsio

CHANGES = (
    *("make_folder", "create", "write", "sync", "sync_folder"),
    *("make_read_only", "rename", "remove_file", "remove_folder"),
)


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


def recorded(monkeypatch):
    """A list that every change of the file system by a store is appended to."""
    changes, paths = [], {}

    def wrap(name):
        real = getattr(fsio, name)

        def call(first, *rest):
            if name in ("write", "sync", "make_read_only"):
                data = [bytes(rest[0])] if rest else []
                if name != "write" or data[0]:
                    # Half of a write may be all that got through.
                    half = len(data[0]) // 2 if data else 0
                    parts = ([data[0][:half]], [data[0][half:]]) if half else (data,)
                    changes.extend((name, paths[first], *part) for part in parts)
            else:
                changes.append((name, Path(first), *map(Path, rest)))
            result = real(first, *rest)
            if name in ("create", "open_file"):
                paths[result] = Path(first)
            return result

        monkeypatch.setattr(fsio, name, call)

    for name in CHANGES:
        wrap(name)
    real_open = fsio.open_file

    def open_file(path):
        descriptor = real_open(path)
        paths[descriptor] = Path(path)
        return descriptor

    monkeypatch.setattr(fsio, "open_file", open_file)
    return changes
