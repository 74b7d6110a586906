"""The first process of a sandbox: starts the worker, watches it, reports how it ended.

Whatever happens to the supervisor ends the sandbox: when the first process of a process namespace
goes, the kernel kills the others. The program can't signal, trace or read it.
"""

import os
import select
import signal
import time

from . import enter, kernel, worker
from .frames import pack, read_message, write_all

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
        _enter(config)
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
        supervisor.kill_all()
        os._exit(0)


def _enter(config):
    isolation = config["isolation"]
    if isolation == "landlock":
        enter.become_first_process(config)
    if isolation == "none":
        kernel.adopt_orphans()
        return
    enter.make_private_disk(config)
    enter.give_up_rights(config)
    if isolation == "bubblewrap" and not config["persistent"]:
        kernel.die_with_parent()  # forgotten when the user changed


class _Supervisor:
    def __init__(self, config, once):
        self.config = config
        self.once = once
        self.worker = 0
        self.deadline = time.monotonic() + once["timeout_s"] if once else _FOREVER
        self.requests = self.answers = (-1, -1)
        self.wake = (-1, -1)
        self.starting = -1

    def start_worker(self):
        if not self.once:
            self.requests, self.answers = os.pipe(), os.pipe()
        self.wake = os.pipe()
        for fd in self.wake:
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake[1], warn_on_full_buffer=False)
        started, self.starting = os.pipe()
        self.worker = os.fork()
        if not self.worker:
            return 0
        for fd in (self.requests[0], self.answers[1], self.starting):
            if fd != -1:
                os.close(fd)
        failure = os.read(started, 4096)
        os.close(started)
        if failure != b"ready":
            raise RuntimeError(failure.decode("utf-8", "replace") or "the worker died")
        return self.worker

    def be_worker(self):
        """Continue as the worker; returns when its program has ended."""
        keep = (self.starting,) if self.once else (self.requests[0], self.answers[1], self.starting)
        try:
            worker.take_streams(keep)
            namespace = worker.prepare_interpreter(self.config)
            worker.restrict(self.config)
        except BaseException as error:
            os.write(self.starting, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        os.write(self.starting, b"ready")
        os.close(self.starting)
        if self.once is not None:
            worker.run_once(self.once["code"], namespace)
        else:
            worker.serve(self.requests[0], self.answers[1], namespace)

    def watch(self):
        """Wait until the worker ends or has to; say which."""
        listening = [0, self.wake[0]] + ([self.answers[0]] if not self.once else [])
        while True:
            busy = self.deadline < _FOREVER
            readable = select.select(listening, [], [], _BUSY_POLL_S if busy else _IDLE_POLL_S)[0]
            if self.wake[0] in readable:
                _drain(self.wake[0])
            ended = self._reap()
            if ended is not None:
                return f"exit {ended}"
            if time.monotonic() > self.deadline:
                return "timeout"
            if self._memory_bytes() > self.config["memory_bytes"]:
                return "memory"
            if 0 in readable and not self._pass_on():
                return "closed"
            if self.answers[0] in readable:
                self._report(listening)

    def _pass_on(self):
        request = read_message(0)
        if request is None or self.once:
            return False
        self.deadline = time.monotonic() + request["timeout_s"]
        write_all(self.requests[1], pack(request))
        return True

    def _report(self, listening):
        line = os.read(self.answers[0], 64)
        if not line:
            listening.remove(self.answers[0])  # the worker closed it, and is about to end
            return
        self.deadline = _FOREVER
        text = line.decode("ascii", "replace").strip()
        number = int(text) if text.isdigit() and len(text) < 4 else 1
        write_all(self.config["status_fd"], b"done %d\n" % number)

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
        if self.config["isolation"] == "none":
            processes = _descendants(os.getpid())
        else:
            processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        resident = sum(_resident_bytes(pid) for pid in processes)
        if resident <= self.config["memory_bytes"]:
            return resident
        # Pages that processes share were counted for each of them.
        return sum(_proportional_bytes(pid) for pid in processes)

    def kill_all(self):
        """Kill what is left, where no process namespace does it."""
        if self.config["isolation"] != "none":
            return
        while descendants := _descendants(os.getpid()):
            for pid in descendants:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self._reap()


def _drain(fd):
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        return


def _resident_bytes(pid):
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            fields = file.read().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGESIZE")


def _proportional_bytes(pid):
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except PermissionError:
        return _resident_bytes(pid)
    return 0


def _descendants(pid):
    found = []
    waiting = [pid]
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
