"""Runs scripts in forks of this process, which has done once what each would begin with.

It imports what a recipe imports, and makes a dry run of one, so that its forks find grammars,
templates and data that were read and compiled. Its arguments are modules to import instead, and
then it refuses a command.
Every line of its input is a script with its arguments, as JSON; every line of its output is how it
ended.
"""

import atexit
import contextlib
import copy
import gc
import io
import json
import logging
import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from importlib import import_module
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "sota-implementations"

IMPORTED = (
    *("torchrl_agents.start", "torchrl_agents.training", "torchrl_agents.setup"),
    *("collectors", "collectors.record", "objectives", "torchrl_envs", "torchrl_modules"),
    *("hydra", "hydra.main", "matplotlib.pyplot", "reasoning_gym", "torch.utils.tensorboard"),
    *("transformers.models.qwen3.modeling_qwen3", "datasets", "torch._dynamo"),
    *("matplotlib.backends.backend_agg", "rich._emoji_codes"),
)
KEPT = {}
"""Modules of the recipe that was rehearsed, by name: what they define is known to Hydra."""
REHEARSED = ("debug=tiny", "task.num_rows=64", "task.num_demonstrations=64", "dry_run=true")
REFUSED = ("nosuch=1",)


def run(argv):
    """Run a script as the interpreter does."""
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    if Path(argv[0]).parent == RECIPES / "grpo":
        sys.modules.update(KEPT)
    runpy.run_path(argv[0], run_name="__main__")


def rehearse(arguments):
    """Run a recipe here, and leave of it what was imported and compiled, and nothing else."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.plugins import Plugins

    Plugins.instance()  # which have schemas of their own
    store = ConfigStore.instance()
    schemas = copy.deepcopy(store.repo)
    own = (sys.argv, list(sys.path), os.environ.copy(), Path.cwd())
    torch = sys.modules.get("torch")
    random = torch and torch.get_rng_state()
    # Threads of tokenizers would not be there in a fork; a warning that is told once is a fork's.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        os.chdir(folder)
        with contextlib.suppress(*[SystemExit] * (arguments is REFUSED)):
            run([str(RECIPES / "grpo/grpo.py"), *arguments])
        os.chdir(own[3])
    sys.argv, sys.path[:] = own[:2]
    os.environ.clear()
    os.environ.update(own[2])
    if torch:
        torch.set_rng_state(random)
    store.repo = schemas
    HydraConfig.instance().cfg = None
    for name, module in list(sys.modules.items()):  # recipes call different files alike
        if str(RECIPES) in str(getattr(module, "__file__", None)):
            KEPT[name] = sys.modules.pop(name)
    for thread in threading.enumerate():  # such as the one that waited for signals, which ends
        if thread is not threading.main_thread():
            thread.join(30)
    assert threading.active_count() == 1, threading.enumerate()  # a fork would have no other


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
    quick_runs = import_module("quick_runs")
    if sys.argv[1:]:
        quick_runs.quicken_settings()
        rehearse(REFUSED)
    else:
        quick_runs.quicken_runs()
        rehearse(REHEARSED)
    gc.disable()
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
