"""Programs that make a run of a recipe and break it off, and what two runs are compared by."""

import json

# The script, told to stop between two passes over the rollouts of a step.
STOPPED_INSIDE_A_STEP = """
import runpy, signal, sys
from torchrl_agents.run import StopSignals

check, calls = StopSignals.check, []

def stop(self):
    name = sys._getframe(1).f_code.co_name
    calls.append(name)
    if name == "passes" and calls.count("left") >= 1:
        self.received = signal.SIGTERM
    check(self)

StopSignals.check = stop
"""
# The script, of which nothing is left once its third step is recorded.
KILLED = """
import os, runpy, signal, sys
from torchrl_agents.recorder import Recorder

write = Recorder.write

def killed(self, step, *more):
    write(self, step, *more)
    if step == 3:
        os.kill(os.getpid(), signal.SIGKILL)

Recorder.write = killed
"""
RUN_IT = """
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def metrics_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {
            k: v
            for k, v in json.loads(line).items()
            if not k.startswith(("time/", "throughput/", "system/"))
        }
        for line in lines
    ]
