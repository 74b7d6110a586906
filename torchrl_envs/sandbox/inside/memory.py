"""Memory that a program takes: that of its processes, and what the kernel holds for them."""

import os
import signal

_LOCK_BYTES = 256
_MAP_BYTES = 256  # what the kernel keeps of a map: 192 of it, and its place in a tree
_MAPS_PER_KB = 1024 / os.sysconf("SC_PAGE_SIZE")  # none is smaller than a page
_USUAL_MAPS = 65530  # a process has no more of them, where the setting can't be read
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
    maps = min(_MAPS_PER_KB * fields.get(b"VmSize:", 0), _most_maps())
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


def _most_maps():
    """Return how many maps the kernel lets a process have."""
    try:
        with open("/proc/sys/vm/max_map_count", "rb") as file:
            return int(file.read()) + 1
    except OSError:
        return _USUAL_MAPS


def used_bytes(config, worker):
    """Memory of everything in a sandbox, in bytes; exact where it is near the limit."""
    most, isolation, used = config["memory_bytes"], config["isolation"], 0
    if isolation == "bubblewrap":
        processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        # Sockets of this network namespace, those too that no process holds just now.
        with open("/proc/net/sockstat", "rb") as sockets:
            used = int(sockets.readline().split()[2]) * config["socket_bytes"]
        return used + bytes_of_processes(processes, most - used)
    if isolation == "landlock":
        return bytes_of_processes([worker], most, holders=[worker])
    return bytes_of_processes(descendants(os.getppid()), most, os.devnull, is_isolated=False)


def bytes_of_processes(processes, most, locks_of="/proc/locks", *, holders=None, is_isolated=True):
    """Memory of processes, of their maps and of their record locks; exact where it is near most."""
    # holders: whose locks count, where those of others are seen, too.
    holders = holders and [b"%d" % pid for pid in holders]
    with open(locks_of, "rb") as locks:
        # At first pages that processes share are counted for each of them, and as many maps as
        # there could be. Locks and maps are counted while they matter: a program that adds some
        # meanwhile would never be done with.
        for own_of in (_most_bytes_of, _bytes_of):
            own = 0
            for pid in processes:
                own += own_of(pid, most - own, is_isolated)
            while own <= most and (line := locks.readline()):
                own += _LOCK_BYTES * _is_lock(line, holders)
            if own <= most:
                break
    return own


def _is_lock(line, holders):
    """Recognise a record lock in a line of /proc/locks, of some processes where they are named."""
    words = line.partition(b" POSIX ")[2].split()
    return bool(words) and (holders is None or words[2] in holders)


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


def num_tasks(processes):
    """Number of the threads of some processes; one that has ended counts until it is buried."""
    number = 0
    for pid in processes:
        try:
            number += len(os.listdir(f"/proc/{pid}/task"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return number
