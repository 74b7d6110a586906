"""A program that runs a command once its standard input has ended.

``python -I -S afterwards.py FOLDER COMMAND...``: whoever starts it holds the other end of a pipe,
which ends with them however they end. FOLDER, unless it is empty, is removed after the command. Run
by its path, without the rest of the package.
"""

import os
import shutil
import signal
import subprocess
import sys

if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1 << 12):
        pass
    folder, *command = sys.argv[1:]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    done = subprocess.run(command, check=False, **streams)  # type: ignore[arg-type]
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(done.returncode)
