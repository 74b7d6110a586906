"""The first process inside a machine: runs commands, and says what came of them.

Its text is run by the machine's own Python, 3.8 or later, without the rest of the package. Requests
come on standard input, one after the other: a length of four bytes, JSON, and as many bytes of
standard input as that says.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time

GRACE_S = 0.2  # what a command's own output may take to arrive when the command has ended


def read(size):
    """So many bytes; fewer at the end of the input, which ends everything."""
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            os._exit(0)
        data += part
    return data


class Kept:
    """The start and the end of a stream."""

    def __init__(self, limit):
        self.limit, self.start, self.end, self.dropped = limit, bytearray(), bytearray(), 0

    def add(self, data):
        """Keep it, or part of it."""
        room = self.limit // 2 - len(self.start)
        self.start += data[: max(0, room)]
        self.end += data[max(0, room) :]
        extra = len(self.end) - (self.limit - self.limit // 2)
        if extra > 0:
            del self.end[:extra]
            self.dropped += extra

    def whole(self):
        """Text that was kept, with a mark where something is missing."""
        mark = b"\n[... %d bytes were cut ...]\n" % self.dropped if self.dropped else b""
        return bytes(self.start) + mark + bytes(self.end)


def feed(pipe, data):
    """Write what a command reads; it need not read it."""
    try:
        pipe.write(data)
        pipe.close()
    except OSError:
        pass


def run_command(asked, data):  # noqa: C901
    """Run one command to its end, or to its deadline."""
    try:
        child = subprocess.Popen(
            asked["argv"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=asked["workdir"],
            env=asked["variables"],
            start_new_session=True,
        )
    except OSError as error:
        return 127, b"", str(error).encode()
    assert child.stdout is not None
    assert child.stderr is not None
    threading.Thread(target=feed, args=(child.stdin, data), daemon=True).start()
    kept = {child.stdout.fileno(): Kept(asked["most"]), child.stderr.fileno(): Kept(asked["most"])}
    out, err = kept.values()
    deadline, status = time.monotonic() + asked["timeout_s"], None
    open_pipes = list(kept)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        ready = select.select(open_pipes, [], [], min(left, 0.02))[0] if open_pipes else []
        for number in ready:
            part = os.read(number, 1 << 16)
            kept[number].add(part)
            if not part:
                open_pipes.remove(number)
        if status is None:
            status = child.poll()
            if status is not None:
                deadline = min(deadline, time.monotonic() + GRACE_S)
            elif not open_pipes:
                time.sleep(0.005)
        if status is not None and not open_pipes:
            break
    if status is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    child.stdout.close()
    child.stderr.close()
    return status, out.whole(), err.whole()


def copy(source, target):
    """Copy what arrives at one socket to another."""
    try:
        while True:
            data = source.recv(1 << 16)
            if not data:
                break
            target.sendall(data)
    except OSError:
        pass
    for each, how in ((source, socket.SHUT_RD), (target, socket.SHUT_WR)):
        with contextlib.suppress(OSError):
            each.shutdown(how)


def open_door(port, path):
    """Connections to a port lead to a socket outside."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", port))
    listening.listen(128)

    def serve():
        while True:
            inner = listening.accept()[0]
            outer = socket.socket(socket.AF_UNIX)
            try:
                outer.connect(path)
            except OSError:
                inner.close()
                continue
            for pair in ((inner, outer), (outer, inner)):
                threading.Thread(target=copy, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()


def main():
    """Answer requests until there are no more."""
    settings = json.loads(sys.argv[1])
    for name, value in settings["limits"].items():
        hard = resource.getrlimit(getattr(resource, name))[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(getattr(resource, name), (value, value))
    if settings["door"]:
        open_door(*settings["door"])
    answers = os.dup(1)
    os.dup2(2, 1)
    while True:
        asked = json.loads(read(int.from_bytes(read(4), "big")))
        status, out, err = run_command(asked, read(asked["size"]))
        head = json.dumps({"status": status, "sizes": [len(out), len(err)]}).encode()
        answer = len(head).to_bytes(4, "big") + head + out + err
        while answer:
            answer = answer[os.write(answers, answer) :]
        try:  # orphans that have ended
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


if __name__ == "__main__":
    main()
