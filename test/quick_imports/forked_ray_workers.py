"""Lets Ray start its workers as forks of one that has imported this library.

A worker that imports it anew takes five seconds of a core, more than what it then does in a test. A
Ray that is started within :func:`forked_workers`, or by a script that this file is given to run,
runs this file in the place of what sets up a worker. The first that it runs imports the library and
stays, to fork for itself and for those that come later, which ask it and end. It ends with Ray.
"""

import contextlib
import gc
import json
import os
import runpy
import shlex
import signal
import socket
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

IMPORTED = ("collectors.cluster.worker", "collectors.cluster.ledger_service", "objectives")
FOLDER = "TEST_RAY_FORKS"
"""A variable: the folder in which the first worker listens."""


@contextlib.contextmanager
def forked_workers():
    """Let the workers of a Ray that this process starts be forks."""
    from ray._private import ray_constants

    name = ray_constants.SETUP_WORKER_FILENAME
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        ray_constants.SETUP_WORKER_FILENAME = __file__
        try:
            yield
        finally:
            ray_constants.SETUP_WORKER_FILENAME = name
            del os.environ[FOLDER]


def ask(address, worker):
    """Ask the first worker for a fork that is the worker which this process should have become."""
    raylet = os.getppid()
    with socket.socket(socket.AF_UNIX) as asked:
        while asked.connect_ex(address):  # it is about to listen
            if os.getppid() != raylet:
                sys.exit("Ray has ended.")
            time.sleep(0.01)
        socket.send_fds(asked, [b"."], [0, 1, 2])
        asked.sendall(json.dumps(worker).encode())
        asked.shutdown(socket.SHUT_WR)
        asked.recv(1)  # it is in this process's group, which Ray ends with it


def serve(door, own):
    """Fork for this worker and for all that ask, until Ray ends.

    Ray's settings come from variables when it is imported, so that a fork has those of its cluster.
    """
    gc.disable()
    for name in IMPORTED:
        import_module(name)
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    raylet = os.getppid()
    door.settimeout(0.5)
    if not os.fork():
        return own, ()
    os.setpgid(0, os.getpgid(raylet))
    while os.getppid() == raylet:
        try:
            asked, _ = door.accept()
        except TimeoutError:
            continue
        with asked:
            asked.settimeout(None)
            _, files, *_ = socket.recv_fds(asked, 1, 3)
            with asked.makefile() as told:
                worker = json.load(told)
            if not os.fork():
                os.setpgid(0, worker["group"])
                return worker, files
        for file in files:
            os.close(file)
    sys.exit()


def become(worker, files):
    """Be a worker that Ray wants, in a fork."""
    from ray._private import workers

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(worker["environment"])
    os.chdir(worker["cwd"])
    os.execvp = become_again
    run([f"{workers.__path__[0]}/setup_worker.py", *worker["argv"]])


def become_again(_, args):
    """Stand for the call of that name, of ``bash -c "exec python default_worker.py ..."``."""
    sys.exit(run(shlex.split(args[2])[2:]))


def run(argv):
    """Run a script as an interpreter would."""
    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).parent)
    runpy.run_path(argv[0], run_name="__main__")


def main():
    folder = os.environ[FOLDER]
    worker = {"argv": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd()}
    worker["group"] = os.getpgrp()
    try:
        os.mkdir(f"{folder}/first")
    except FileExistsError:
        ask(f"{folder}/door", worker)
        return
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{folder}/door")
        door.listen(64)
        told = serve(door, worker)
    become(*told)


if __name__ == "__main__" and FOLDER in os.environ:
    main()
elif __name__ == "__main__":
    with forked_workers():
        run(sys.argv[1:])
