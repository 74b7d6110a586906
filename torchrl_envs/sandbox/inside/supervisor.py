"""The first process of a sandbox: starts the worker, watches it, reports how it ended.

Whatever happens to the supervisor ends the sandbox: when the first process of a process namespace
goes, the kernel kills the others. The program can't signal, trace or read it, holds none of its
descriptors, and can't make it wait: it writes to nothing that is full.
"""

import _socket
import os
import select
import signal
import time

from . import kernel, worker
from .frames import framed_bytes, read_message, write_all

_BUSY_POLL_S = 0.01
_IDLE_POLL_S = 0.05
_FOREVER = float("inf")


def main():
    """Set the sandbox up from the parent's first message, then run what it asks."""
    config = read_message(0)
    if config is None:
        os._exit(0)  # the parent is gone already
    status = config["status_fd"]
    try:
        if config["isolation"] != "none":
            kernel.make_private_disk(config)
            kernel.give_up_rights(config)
        once = None if config["persistent"] else read_message(0)
        supervisor = _Supervisor(config, once)
        is_worker = not supervisor.start_worker()
    except BaseException as error:
        write_all(status, f"error {type(error).__name__}: {error}\n".encode("ascii", "replace"))
        os._exit(1)
    if is_worker:
        supervisor.be_worker()
        return
    try:
        write_all(status, b"ready\n")
        write_all(status, supervisor.watch().encode("ascii") + b"\n")
    except BrokenPipeError:
        pass  # the parent is gone, so nobody is told
    finally:
        os._exit(0)


class _Supervisor:
    def __init__(self, config, once):
        self.config, self.once, self.worker = config, once, 0
        self.deadline = time.monotonic() + once["timeout_s"] if once else _FOREVER
        # A session's worker gets requests and answers over a socket: unlike a pipe it can't be
        # opened a second time, from the other side, through /proc.
        self.link = self.workers_link = -1
        self.outgoing, self.next_look = b"", 0.0
        self.wake = (-1, -1)
        self.starting = -1

    def start_worker(self):
        if not self.once:
            self.link, self.workers_link = (s.detach() for s in _socket.socketpair())
            os.set_blocking(self.link, False)
        self.wake = os.pipe()
        for fd in self.wake:
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake[1], warn_on_full_buffer=False)
        started, self.starting = os.pipe()
        self.worker = os.fork()
        if not self.worker:
            return 0
        for fd in (self.workers_link, self.starting):
            if fd != -1:
                os.close(fd)
        failure = os.read(started, 4096)
        os.close(started)
        if failure != b"ready":
            raise RuntimeError(failure.decode("utf-8", "replace") or "the worker died")
        return self.worker

    def be_worker(self):
        """Continue as the worker; returns when its program has ended."""
        keep = (self.starting,) if self.once else (self.workers_link, self.starting)
        try:
            worker.take_streams(keep)
            namespace = worker.prepare_interpreter(self.config)
            worker.restrict(self.config)
        except BaseException as error:
            os.write(self.starting, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        os.write(self.starting, b"ready")
        os.close(self.starting)
        if self.once is None:
            worker.run_requests(self.workers_link, namespace)
        elif status := worker.run_program(self.once["code"], namespace, keep_exit=True):
            raise SystemExit(status)

    def watch(self):
        """Wait until the worker ends or has to; say which."""
        listening = [0, self.wake[0]] + ([] if self.once else [self.link])
        while True:
            busy = self.deadline < _FOREVER
            writing = [self.link] if self.outgoing else []
            wait_s = _BUSY_POLL_S if busy else _IDLE_POLL_S
            readable, writable, _ = select.select(listening, writing, [], wait_s)
            if self.wake[0] in readable:
                _drain(self.wake[0])
            ended = self._reap()
            if ended is not None:
                return f"exit {ended}"
            now = time.monotonic()
            if now > self.deadline:
                return "timeout"
            if now >= self.next_look:  # not at every message: it takes longer than all the rest
                self.next_look = now + _BUSY_POLL_S
                if self._memory_bytes() > self.config["memory_bytes"]:
                    return "memory"
            if 0 in readable and not self._take_request():
                return "closed"
            if self.outgoing and writable:
                self._write()
            if self.link in readable:
                self._take_answer(listening)

    def _take_request(self):
        request = read_message(0)
        if request is None or self.once:
            return False
        _drain(self.link)  # what the last program said after its end
        self.deadline = time.monotonic() + request["timeout_s"]
        self.outgoing = framed_bytes(request)
        self._signal_all(signal.SIGCONT)
        self._write()
        return True

    def _write(self):
        try:
            self.outgoing = self.outgoing[os.write(self.link, self.outgoing) :]
        except BlockingIOError:
            return
        except OSError:
            self.outgoing = b""  # the worker closed its end, and is about to end

    def _take_answer(self, listening):
        try:
            line = os.read(self.link, 64)
        except OSError:
            line = b""
        if not line:
            listening.remove(self.link)  # the worker closed it, and is about to end
        elif self.deadline < _FOREVER:
            self.deadline = _FOREVER
            self.outgoing = b""
            self._signal_all(signal.SIGSTOP)  # nothing runs on until the next request
            text = line.decode("ascii", "replace").strip()
            number = int(text) if text.isdigit() and len(text) < 4 else 1
            write_all(self.config["status_fd"], b"done %d\n" % number)

    def _signal_all(self, number):
        """Signal every process but this one; the kernel lets none fork itself away from that."""
        all_but_this = [-1]
        if self.config["isolation"] == "none":
            all_but_this = [pid for pid in _descendants(os.getppid()) if pid != os.getpid()]
        for pid in all_but_this:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _reap(self):
        """The worker's exit status once it has one; orphans are buried."""
        ended = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            if pid == self.worker:
                ended = os.waitstatus_to_exitcode(status)

    def _memory_bytes(self):
        most, used, locks_of = self.config["memory_bytes"], 0, os.devnull
        processes = _descendants(os.getppid())
        if self.config["isolation"] != "none":
            processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
            # Sockets of this network namespace, those too that no process holds just now; and
            # record locks of the processes that this one sees.
            locks_of = "/proc/locks"
            with open("/proc/net/sockstat", "rb") as sockets:
                used = int(sockets.readline().split()[2]) * self.config["socket_bytes"]
        with open(locks_of, "rb") as locks:
            # At first pages that processes share are counted for each of them, and as many maps as
            # there could be. Locks and maps are counted while they matter: a program that adds some
            # meanwhile would never be done with.
            for own_of in (_most_bytes_of, _bytes_of):
                own = 0
                for pid in processes:
                    own += own_of(pid, most - used - own)
                while used + own <= most and (line := locks.readline()):
                    used += _LOCK_BYTES * (b" POSIX " in line)
                if used + own <= most:
                    break
        return used + own


_LOCK_BYTES = 256
_MAP_BYTES = 256  # what the kernel keeps of a map: 192 of it, and its place in a tree
_MAPS_PER_KB = 1024 / os.sysconf("SC_PAGE_SIZE")  # none is smaller than a page
_OWN = (b"VmRSS:", b"VmSwap:", b"VmPTE:")
_SHARE = (b"Pss:", b"SwapPss:")


def _most_bytes_of(pid, _):
    """At most so much memory of a process: in RAM, swapped out, and the kernel's for its maps."""
    fields = _fields_of(pid, "status")
    maps = _MAPS_PER_KB * fields.get(b"VmSize:", 0)
    return int(_MAP_BYTES * maps) + 1024 * sum(fields.get(name, 0) for name in _OWN)


def _bytes_of(pid, most):
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


def _drain(fd):
    try:
        while os.read(fd, 4096):
            pass
    except OSError:
        return


def _descendants(pid):
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
