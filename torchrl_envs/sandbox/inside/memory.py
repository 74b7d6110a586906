"""Memory that a program takes: that of its processes, and what the kernel holds for them."""

import os
import signal

_LOCK_BYTES = 256
_MAP_BYTES = 256  # what the kernel keeps of a map: 192 of it, and its place in a tree
_MAPS_PER_KB = 1024 / os.sysconf("SC_PAGE_SIZE")  # none is smaller than a page
_OWN = (b"VmRSS:", b"VmSwap:", b"VmPTE:")
_SHARE = (b"Pss:", b"SwapPss:")


def _most_bytes_of(pid, _, is_isolated):
    """At most so much memory of a process: in RAM, swapped out, and the kernel's for its maps."""
    fields = _fields_of(pid, "status")
    if is_isolated and not fields:
        # It has ended, or its first thread has, and the others could not be looked into.
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return 0
    maps = _MAPS_PER_KB * fields.get(b"VmSize:", 0)
    return int(_MAP_BYTES * maps) + 1024 * sum(fields.get(name, 0) for name in _OWN)


def _bytes_of(pid, most, _):
    """Memory of a process, its share of pages that others have too; maps are counted up to most."""
    fields = _fields_of(pid, "smaps_rollup")
    status = _fields_of(pid, "status")
    names = _SHARE if fields else _OWN  # those of a process that can't be looked into
    used = 1024 * sum((fields or status).get(name, 0) for name in names)
    used += 1024 * status.get(b"VmPTE:", 0) * bool(fields)
    try:
        with open(f"/proc/{pid}/maps", "rb", buffering=1 << 16) as maps:
            while used <= most and (part := maps.read(1 << 16)):
                used += _MAP_BYTES * part.count(b"\n")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return used


def _fields_of(pid, name):
    """Numbers of a file of a process, in kB; none where it has ended or can't be looked into."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            lines = [line.split() for line in file]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    return {words[0]: int(words[1]) for words in lines if words[-1:] == [b"kB"]}


def used_bytes(config, worker):
    """Memory of everything in a sandbox, in bytes; exact where it is near the limit."""
    most, isolation, used, locks_of = config["memory_bytes"], config["isolation"], 0, "/proc/locks"
    if isolation == "bubblewrap":
        processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        # Sockets of this network namespace, those too that no process holds just now.
        with open("/proc/net/sockstat", "rb") as sockets:
            used = int(sockets.readline().split()[2]) * config["socket_bytes"]
    elif isolation == "landlock":
        processes = [worker]
    else:
        processes, locks_of = descendants(os.getppid()), os.devnull
    with open(locks_of, "rb") as locks:
        # At first pages that processes share are counted for each of them, and as many maps as
        # there could be. Locks and maps are counted while they matter: a program that adds some
        # meanwhile would never be done with.
        for own_of in (_most_bytes_of, _bytes_of):
            own = 0
            for pid in processes:
                own += own_of(pid, most - used - own, isolation != "none")
            while used + own <= most and (line := locks.readline()):
                used += _LOCK_BYTES * _is_lock(line, worker if isolation == "landlock" else None)
            if used + own <= most:
                break
    return used + own


def _is_lock(line, holder):
    """Recognise a record lock in a line of /proc/locks, of a process where one is named."""
    words = line.partition(b" POSIX ")[2].split()
    return bool(words) and (holder is None or words[2] == b"%d" % holder)


def descendants(pid):
    """Processes that a process has started, and those that they have."""
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    waiting.extend(map(int, file.read().split()))
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent != pid:
            found.append(parent)
    return found
