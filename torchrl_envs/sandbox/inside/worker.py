"""The process that runs the code: limits on itself first, then the code."""

import builtins
import os
import resource
import signal
import sys
import types

from . import asking, kernel, landlock
from .frames import read_message, write_all

_FILE_NAME = "<python>"
_EXIT_STATUS_OF_ERROR = 1


def restrict(config, supervisor):
    """Apply every limit to this process; nothing can lift one again."""
    os.setsid()
    if config["isolation"] == "landlock":
        os.environ["HOME"] = os.environ["TMPDIR"] = config["folder"]
        os.chdir(config["folder"])
    for name, value in config["resource_limits"]:
        number = getattr(resource, name)
        _, hard = resource.getrlimit(number)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    if config["isolation"] == "landlock":
        landlock.confine(config)
        asking.load_asking_filter(config, supervisor)
        own_pid = os.getpid().to_bytes(4, sys.byteorder)
        kernel.load_syscall_filter(config["syscall_filter"].replace(config["pid_mark"], own_pid))
    elif config["syscall_filter"]:
        kernel.load_syscall_filter(config["syscall_filter"])


def take_streams(keep):
    """Standard input is empty; no descriptor but those named stays open."""
    empty = os.open("/dev/null", os.O_RDONLY)
    os.dup2(empty, 0)
    kept = sorted({0, 1, 2, *keep})
    for low, high in zip(kept, [*kept[1:], 1 << 20], strict=True):
        os.closerange(low + 1, high)
    text = {"encoding": "utf-8", "closefd": False}
    sys.stdin = sys.__stdin__ = open(0, **text)  # noqa: SIM115
    text["errors"] = "backslashreplace"
    sys.stdout = sys.__stdout__ = open(1, "w", **text)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, **text)  # noqa: SIM115


def prepare_interpreter(config):
    """Prepare the interpreter as a program expects it, with an empty main module."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kernel.set_dumpable(True)
    builtins.exit = builtins.quit = sys.exit
    sys.argv = [""]
    for name in [name for name in sys.modules if name.partition(".")[0] == __package__]:
        del sys.modules[name]  # a program may have modules of that name
    sys.path.extend(config["packages"])
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    return main.__dict__


def run_requests(link, namespace):
    """Run what is asked, one after the other, in one namespace."""
    own = os.getpid()
    while (request := read_message(link)) is not None:
        status = run_program(request["code"], namespace)
        _flush()
        if os.getpid() != own:  # a process that the program forked, and that came back here
            os._exit(status)
        write_all(link, b"%d\n" % status)


def run_program(code, namespace, keep_exit=False):
    """Run a program; the status that a script of it would end with."""
    try:
        exec(compile(code, _FILE_NAME, "exec", dont_inherit=True), namespace)
    except SystemExit as stop:
        if keep_exit:
            raise
        if stop.code is None or isinstance(stop.code, int):
            return int(stop.code or 0) & 0xFF
        sys.stderr.write(f"{stop.code}\n")
        return _EXIT_STATUS_OF_ERROR
    except BaseException as error:
        _show(error, code)
        return _EXIT_STATUS_OF_ERROR
    return 0


def _show(error, code):
    """The traceback of the program's own frames, as the interpreter shows it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != _FILE_NAME:
        trace = trace.tb_next
    _flush()
    try:
        import linecache  # only now: these take a good part of the time to start
        import traceback

        lines = [line + "\n" for line in code.split("\n")]
        linecache.cache[_FILE_NAME] = (len(code), None, lines, _FILE_NAME)
        traceback.print_exception(type(error), error, trace)
    except MemoryError:
        sys.__excepthook__(type(error), error.with_traceback(trace), trace)


def _flush():
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # the program closed or replaced it
