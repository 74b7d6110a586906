"""The first process of a sandbox: starts the worker, watches it, reports how it ended.

Whatever happens to the supervisor ends the sandbox: when the first process of a process namespace
goes, the kernel kills the others; under Landlock, where the program is one process, it is killed
when its parent goes. The program can't signal, trace or read the supervisor, holds none of its
descriptors, and can't make it wait: it writes to nothing that is full.
"""

import _socket
import os
import select
import signal
import time

from . import asking, disk, kernel, memory, threads, worker
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
        if config["isolation"] == "bubblewrap":
            kernel.make_private_disk(config)
            kernel.give_up_rights(config)
        elif config["isolation"] == "landlock":
            kernel.drop_capabilities()
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
        write_all(status, supervisor.watched().encode("ascii", "replace") + b"\n")
    except BrokenPipeError:
        pass  # the parent is gone, so nobody is told
    finally:
        supervisor.clean_up()
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
        self.starting = self.listener = self.parent = -1
        self.has_ended = False
        self.folder, self.next_look_at_disk = config.get("folder"), 0.0

    def start_worker(self):
        if self.folder:
            self.parent = os.pidfd_open(self.config["parent"])
            if os.getppid() != self.config["parent"]:
                os._exit(0)  # it has ended
        if not self.once:
            self.link, self.workers_link = (s.detach() for s in _socket.socketpair())
            os.set_blocking(self.link, False)
        self.wake = os.pipe()
        for fd in self.wake:
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake[1], warn_on_full_buffer=False)
        started, self.starting = (s.detach() for s in _socket.socketpair())
        supervisor = os.getpid()
        self.worker = os.fork()
        if not self.worker:
            kernel.end_with(supervisor)
            return 0
        for fd in (self.workers_link, self.starting):
            if fd != -1:
                os.close(fd)
        self.listener, failure = asking.received_listener(started)
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
            worker.restrict(self.config, self.starting)
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
        listening += [fd for fd in (self.listener, self.parent) if fd != -1]
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
            if used_up := self._used_up(now):
                return used_up
            if self.parent in readable or (0 in readable and not self._take_request()):
                return "closed"
            if self.listener in readable:
                threads.answer_call(self.listener, self.worker, self.config["num_processes"])
            if self.outgoing and writable:
                self._write()
            if self.link in readable:
                self._take_answer(listening)

    def watched(self):
        """Wait for the end of the program, and see to it that nothing of it runs on."""
        try:
            how = self.watch()
        except Exception as error:
            how = f"error {type(error).__name__}: {error}"
        self._end()
        return how

    def _end(self):
        self._reap()
        if self.folder and not self.has_ended:  # else its number may be another one's
            os.kill(self.worker, signal.SIGKILL)
            os.waitpid(self.worker, 0)
            self.has_ended = True

    def clean_up(self):
        """Remove the folder of the program."""
        if self.folder:
            self._end()
            disk.remove_tree(self.folder)

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
        all_but_this = [self.worker if self.folder else -1]
        if self.config["isolation"] == "none":
            all_but_this = [pid for pid in memory.descendants(os.getppid()) if pid != os.getpid()]
        for pid in all_but_this:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _reap(self):
        """The worker's exit status once it has one; orphans are buried."""
        ended = kernel.reap(self.worker)
        self.has_ended = self.has_ended or ended is not None
        return ended

    def _used_up(self, now):
        """Name of a limit that is exceeded, memory or disk; they are looked at now and then."""
        limits = self.config
        if now >= self.next_look:  # not at every message: it takes longer than all the rest
            self.next_look = now + _BUSY_POLL_S
            if memory.used_bytes(limits, self.worker) > limits["memory_bytes"]:
                return "memory"
        if self.folder and now >= self.next_look_at_disk:
            amount = limits["disk_bytes"], limits["num_files"]
            if disk.takes_too_much(self.folder, self.worker, *amount):
                return "disk"
            # Many files take long to look at; the rest of the time is the program's.
            took = time.monotonic() - now
            self.next_look_at_disk = now + max(_BUSY_POLL_S, 4 * took)
        return None


def _drain(fd):
    try:
        while os.read(fd, 4096):
            pass
    except OSError:
        return
