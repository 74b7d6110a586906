"""Disk that a program takes: what is in its folder, and what it has deleted and still holds.

The folder is on a disk that others use, too, so it is looked at again and again. The program is
hostile, and may change everything in it meanwhile: nothing here follows a link or trusts a path.
"""

import os
import stat

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 64
_BLOCK_BYTES = 512


def takes_too_much(folder, pid, max_bytes, max_files):
    """Tell that the program of a process has more bytes or files than these, or hides some."""
    return room_left(folder, [pid], max_bytes, max_files, are_hidden_too_much=True) < 0


def room_left(folder, pids, max_bytes, max_files, *, are_hidden_too_much=False):
    """Bytes that the programs of some processes may still write; below 0 where they have too much.

    A file that is deleted and mapped, and not open, has a size that nobody knows: it is as long as
    it is mapped, or too much.
    """
    room = _Room(max_bytes, max_files)
    try:
        top = os.open(folder, _FOLDER)
    except FileNotFoundError:
        return max_bytes  # removed as the run ends
    try:
        _add_folder(top, room, 1)
        deleted = {}
        for pid in () if room.is_over else pids:
            try:
                _add_deleted(folder, pid, room, deleted)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it has ended; till then it can't keep its supervisor from looking
        mapped = [size for size in deleted.values() if size is not None]
        room.num_bytes -= sum(mapped)
        room.is_over = room.is_over or room.num_bytes < 0 or (are_hidden_too_much and bool(mapped))
    finally:
        os.close(top)
    return -1 if room.is_over else room.num_bytes


class _Room:
    def __init__(self, max_bytes, max_files):
        self.num_bytes, self.num_files, self.seen = max_bytes, max_files, set()
        self.is_over = False

    def add(self, status):
        """Count a file once, however many names it has; each name is a file."""
        self.num_files -= 1
        if (status.st_dev, status.st_ino) not in self.seen:
            # Some file systems count their blocks only seconds later.
            self.num_bytes -= max(status.st_size, status.st_blocks * _BLOCK_BYTES)
        if status.st_nlink > 1:
            self.seen.add((status.st_dev, status.st_ino))
        self.is_over = self.is_over or self.num_bytes < 0 or self.num_files < 0


def _add_folder(fd, room, depth):
    with os.scandir(fd) as entries:
        for entry in entries:
            try:
                room.add(entry.stat(follow_symlinks=False))
                if entry.is_dir(follow_symlinks=False):
                    room.is_over = room.is_over or depth == _MAX_DEPTH
                    inner = -1 if room.is_over else open_folder(entry.name, fd)
                    if inner != -1:
                        try:
                            _add_folder(inner, room, depth + 1)
                        finally:
                            os.close(inner)
            except (FileNotFoundError, NotADirectoryError):
                continue  # it was there a moment ago
            except PermissionError:
                room.is_over = True  # it is hidden again as soon as it is found
            if room.is_over:
                return


def open_folder(name, above):
    """Open a folder in another one, which its owner may have made unreadable."""
    try:
        return os.open(name, _FOLDER, dir_fd=above)
    except PermissionError:
        place = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=above)
        try:
            path = f"/proc/self/fd/{place}"
            os.chmod(path, 0o700)
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        finally:
            os.close(place)


def _add_deleted(folder, pid, room, deleted):
    """Count the files without a name that a process has open; note how far others are mapped."""
    # deleted: by their numbers, `None` for a file that is counted.
    _add_open(pid, room, deleted)
    if not _mapped_deleted(folder, pid).keys() <= deleted.keys():
        _add_open(pid, room, deleted)  # it may have been opened since
        for number, size in _mapped_deleted(folder, pid).items():
            known = deleted.get(number, 0)
            deleted[number] = known if known is None else max(known, size)


def _add_open(pid, room, deleted):
    place = f"/proc/{pid}/fd"
    for name in os.listdir(place):
        try:
            status = os.stat(f"{place}/{name}")
        except FileNotFoundError:
            continue  # closed meanwhile
        is_file = not status.st_nlink and stat.S_ISREG(status.st_mode)
        if is_file and deleted.get(status.st_ino, 0) is not None:
            deleted[status.st_ino] = None
            room.add(status)


def _mapped_deleted(folder, pid):
    """Numbers of the files of a folder that are mapped and have no name, and how far they are."""
    below, found = b" " + os.fsencode(folder) + b"/", {}
    with open(f"/proc/{pid}/maps", "rb", buffering=1 << 16) as maps:
        for line in maps:
            if line.endswith(b" (deleted)\n") and below in line:
                where, _, offset, _, number, _ = line.split(None, 5)
                first, last = (int(part, 16) for part in where.split(b"-"))
                size = int(offset, 16) + last - first
                found[int(number)] = max(size, found.get(int(number), 0))
    return found


def remove_tree(folder):
    """Remove a folder whose program has ended, however deep and unreadable its content is."""
    try:
        top = open_folder(folder, None)
    except FileNotFoundError:
        return
    number = 0
    try:
        os.fchmod(top, 0o700)
        while names := os.listdir(top):
            for name in names:
                number = _remove_entry(name, top, number)
    finally:
        os.close(top)
    os.rmdir(folder)


def _remove_entry(name, top, number):
    """Remove an entry of a folder; folders in it are moved up first, so that none is too deep."""
    if not _is_removed_file(name, top):
        inner = open_folder(name, top)
        try:
            os.fchmod(inner, 0o700)
            for below in os.listdir(inner):
                if _is_removed_file(below, inner):
                    continue
                os.close(open_folder(below, inner))  # a folder that is moved has to be writable
                number = _move_up(below, inner, top, number)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=top)
    return number


def _is_removed_file(name, above):
    try:
        os.unlink(name, dir_fd=above)
    except (IsADirectoryError, PermissionError):
        return False
    return True


def _move_up(name, inner, top, number):
    while True:
        number += 1
        try:
            os.rename(name, f"moved-{number}", src_dir_fd=inner, dst_dir_fd=top)
        except OSError:
            if number > 1 << 20:
                raise
            continue  # the program has made one of this name
        return number
