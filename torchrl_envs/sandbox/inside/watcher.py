"""The process that watches over an agent's program and all that it starts.

It answers what they ask of the kernel under Landlock, adds up what they take, and ends when the
program does or takes too much; who has started it then kills what is left, which can start nothing
any more. A program can't signal, trace or read it.
"""

import _socket
import _thread
import errno
import os
import resource
import select
import signal
import time

from . import asking, attributes, kernel, landlock, memory, signals, sockets
from .disk import room_left
from .frames import read_message

_MEMORY_PER_S, _DISK_PER_S = 8 << 30, 2 << 30
"""As fast may a program take these; the less is left, the sooner one looks again."""
_SOONEST_S, _LATEST_S = 0.01, 0.5
_SHARE = 19
"""So many times as long as a look at the files takes, nobody looks again."""
_STARTS = ("clone", "fork", "vfork")


def main():
    """Run the program that the first message names, and end as it does."""
    config = read_message(0)
    if config is None:
        os._exit(0)  # who started this is gone
    os._exit(_Watcher(config).run())


class _Watcher:
    def __init__(self, config):
        self.config, self.is_confined = config, config["isolation"] == "landlock"
        self.own = self.program = os.getpid()
        self.wake = os.pipe()
        self.num_tasks, self.too_much = 1, None

    def run(self):
        """Return the exit status of the program."""
        kernel.adopt_orphans()
        if self.is_confined:
            kernel.drop_capabilities()
        for fd in self.wake:
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake[1], warn_on_full_buffer=False)
        link, theirs = (end.detach() for end in _socket.socketpair())
        self.program = os.fork()
        if not self.program:
            os.close(link)
            self._be_program(theirs)
        os.close(theirs)
        listener, said = asking.received_listener(link)
        os.close(link)
        if said != b"ready":
            return _say(said.decode("utf-8", "replace") or "The program did not start.")
        empty = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1):  # who waits for their end waits for nobody else
            os.dup2(empty, fd)
        _thread.start_new_thread(self._look, ())
        status = self._watch(listener)
        if self.too_much is None:
            return status if status >= 0 else 128 - status
        for pid in memory.descendants(self.own):
            _kill(pid)
        return _say(self.too_much)

    def _be_program(self, link):
        """Become the program."""
        config = self.config
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            kernel.end_with(self.own)
            os.closerange(link + 1, 1 << 16)
            os.closerange(3, link)
            for name, value in config["resource_limits"]:
                _lower(getattr(resource, name), value)
            if self.is_confined:
                os.setsid()
                os.chdir(config["where"])
                kernel.drop_capabilities()
                landlock.confine(config, landlock.EXECUTE)
                asking.load_asking_filter(config, link, goes_on=True)
                kernel.load_syscall_filter(config["syscall_filter"])
        except BaseException as error:
            os.write(link, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        os.write(link, b"ready")
        command = config["command"]
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)

    def _watch(self, listener):
        """Answer until the program ends or has to; its exit status, negative for a signal."""
        listening = [self.wake[0]] + ([] if listener == -1 else [listener])
        while True:
            readable = select.select(listening, [], [])[0]
            if self.wake[0] in readable:
                os.read(self.wake[0], 4096)
            ended = kernel.reap(self.program)
            if ended is not None:
                return ended
            if self.too_much is not None:
                return -signal.SIGKILL
            call = asking.next_call(listener) if listener in readable else None
            if call is not None:
                self._answer(call)

    def _answer(self, call):
        name = self.config["calls"][call.number]
        try:
            if name in _STARTS:
                self._answer_start(call)
            elif name == "socket":
                sockets.open_socket(call, self.config["policy"])
            elif name == "connect":
                sockets.connect_socket(call, self.config["port"])
            elif name in signals.CALLS:
                signals.answer_signal(call, self.own)
            else:
                attributes.set_attribute(call, name, self.config["folder"])
        except OSError as error:
            call.fail(max(error.errno or 0, 0) or errno.EPERM)

    def _answer_start(self, call):
        """Let a process or a thread be started while there are fewer."""
        most = self.config["num_processes"]
        if self.num_tasks >= most:
            self.num_tasks = memory.num_tasks(memory.descendants(self.own))
        if self.num_tasks < most:
            self.num_tasks += 1
            call.go_on()
        else:
            call.fail(errno.EAGAIN)

    def _look(self):
        """Add up what all processes take, until it is too much."""
        try:
            next_look_at_disk = 0.0
            while self.too_much is None:
                processes = memory.descendants(self.own)
                self.num_tasks = memory.num_tasks(processes)
                pause_s, self.too_much = self._look_at(processes)
                now = time.monotonic()
                if self.is_confined and self.too_much is None and now >= next_look_at_disk:
                    disk_pause_s, self.too_much = self._look_at_disk(processes)
                    took_s = time.monotonic() - now
                    next_look_at_disk = now + took_s + max(disk_pause_s, _SHARE * took_s)
                until_disk = max(_SOONEST_S, next_look_at_disk - time.monotonic())
                pause_s = min(pause_s, until_disk) if self.is_confined else pause_s
                if self.too_much is None:
                    time.sleep(pause_s)
        except BaseException as error:
            self.too_much = f"The sandbox ended it, and could not watch it any more: {error!r}"
        os.write(self.wake[1], b"\0")

    def _look_at(self, processes):
        config, most = self.config, self.config["memory_bytes"]
        used = memory.bytes_of_processes(
            processes, most, holders=processes, is_isolated=self.is_confined
        )
        if used > most:
            return 0.0, _ended_by("memory", "memory_bytes", most)
        if self.num_tasks > 2 * config["num_processes"]:
            most = config["num_processes"]
            return 0.0, _ended_by("processes and threads", "num_processes", most)
        return _pause_s(most - used, _MEMORY_PER_S), None

    def _look_at_disk(self, processes):
        config = self.config
        left = room_left(config["folder"], processes, config["disk_bytes"], config["num_files"])
        if left < 0:
            amounts = f"{config['disk_bytes']} and num_files = {config['num_files']}"
            return 0.0, _ended_by("disk or too many files", "disk_bytes", amounts)
        return _pause_s(left, _DISK_PER_S), None


def _pause_s(left, per_s):
    return min(max(left / per_s, _SOONEST_S), _LATEST_S)


def _ended_by(what, name, most):
    return f"The sandbox ended it: it took more {what} than {name} = {most} allows."


def _lower(number, value):
    _, hard = resource.getrlimit(number)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(number, (value, value))


def _kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _say(text):
    """Write a last line where errors go; the status that says so."""
    try:
        os.write(2, f"\n{text}\n".encode("utf-8", "replace"))
    except OSError:
        return 1
    return 1
