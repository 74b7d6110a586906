"""Runs scripts in forks of this process, which has imported once what each would import.

Its arguments are modules to import in place of those of a recipe.
Every line of its input is a script with its arguments, as JSON; every line of its output is how it
ended.
"""

import atexit
import contextlib
import gc
import json
import logging
import os
import runpy
import signal
import sys
import threading
import traceback
from importlib import import_module
from pathlib import Path

IMPORTED = (
    *("torchrl_agents.start", "torchrl_agents.training", "torchrl_agents.setup"),
    *("collectors", "collectors.record", "objectives", "torchrl_envs", "torchrl_modules"),
    *("hydra", "hydra.main", "matplotlib.pyplot", "reasoning_gym", "torch.utils.tensorboard"),
    *("transformers.models.qwen3.modeling_qwen3", "datasets", "torch._dynamo"),
)


def run(argv):
    """Run a script as the interpreter does."""
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")


def become_again(_, argv, environment):
    """What stands for the system's call of that name: the imports stay."""
    os.environ.update(environment)
    sys.exit(run(argv[1:]))


def become(job):
    """Be the process that ran the script; a script that becomes another one need not import."""
    status = 1
    os.execve = become_again
    try:
        os.chdir(job["cwd"])
        for name, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(job["environment"])
        signal.alarm(job["timeout"])
        run(job["argv"])
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(error.code + "\n")
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main():
    gc.disable()  # what is imported stays
    for name in sys.argv[1:] or IMPORTED:
        with contextlib.suppress(ImportError):  # a test takes some away
            import_module(name)
    gc.freeze()  # so that no fork looks through it, which would copy it
    gc.enable()
    for line in sys.stdin:
        job, pid = json.loads(line), os.fork()
        if not pid:
            become(job)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(json.dumps([job["out"], status]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
