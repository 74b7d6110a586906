"""A vLLM server of token ids that ends with its parent: ``python -m torchrl_modules.vllm.launch``.

It takes the options of ``vllm serve`` and adds those that `VLLMServerEngine` needs. It is meant for
one machine: without ``--host``, ``--port`` or ``--uds`` it listens on a socket file in a directory
that only this user can open, and prints its URL. On a TCP port every route asks for the token in
the environment variable ``TORCHRL_VLLM_TOKEN``. `start_server` runs one.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from .http import TOKEN_VARIABLE, JSONClient
from .runtime import PARENT_VARIABLE, import_vllm, serve
from .settings import CPU_DEFAULTS, FIXED, WORKER, as_options

_PARENT: Final = PARENT_VARIABLE
_OPTIONS: Final = {"host": "127.0.0.1", "tokens_only": True, **FIXED, **WORKER}
_GUARD: Final = "torchrl_modules.vllm.http.AccessControl"
_SHORTEST_TOKEN: Final = 16
_ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause and update
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_GUARDIAN: Final = """
import os, signal, sys, time
parent, group = map(int, sys.argv[1:])
while os.getppid() == parent:
    time.sleep(0.2)
os.killpg(group, signal.SIGKILL)
"""
# vLLM counts ranks, which nobody reads, in a helper that is compiled as the first batch comes.
_EAGER_ENVIRONMENT: Final = {"TORCHDYNAMO_DISABLE": "1"}


def main() -> None:
    """Serve until killed, or until the parent that started this is gone."""
    if _PARENT in os.environ:
        parent = int(os.environ[_PARENT])
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        sys.argv.insert(1, "--model")  # as `vllm serve MODEL` has it; its server would ignore it
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        sys.argv += _access(_command_line_options(), folder)
        environment = dict(_ENVIRONMENT)
        is_cpu = import_vllm(in_process=False).current_platform.is_cpu()
        if is_cpu and "--no-enforce-eager" not in sys.argv:
            environment |= _EAGER_ENVIRONMENT
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        options = as_options(_OPTIONS | (CPU_DEFAULTS if is_cpu else {}))
        sys.argv += _words(
            {n: v for n, v in options.items() if _plain(n) not in _command_line_options()}
        )
        serve()


def _command_line_options() -> set[str]:
    """The options of the command line, ``--no-x`` as ``--x``."""
    return {_plain(word.partition("=")[0]) for word in sys.argv if word.startswith("--")}


def _plain(option: str) -> str:
    return option.replace("_", "-").replace("--no-", "--", 1)


def _access(options: set[str], folder: str) -> list[str]:
    """Options that say where the server listens and who may ask it."""
    words = ["--middleware", _GUARD]
    if not options & {"--host", "--port", "--uds"}:
        path = Path(folder, "socket")
        sys.stdout.write(f"unix://{path}\n")
        sys.stdout.flush()
        return [*words, "--uds", str(path)]
    if "--uds" not in options and len(os.environ.get(TOKEN_VARIABLE, "")) < _SHORTEST_TOKEN:
        raise SystemExit(
            "torchrl_modules.vllm.launch: on a TCP port every user of this machine could replace "
            f"the weights. Set {TOKEN_VARIABLE} to a secret of {_SHORTEST_TOKEN} letters or more, "
            "here and where VLLMServerEngine runs, or listen on a socket file: --uds PATH, or "
            "neither --host nor --port."
        )
    return words


def _words(options: Mapping[str, str | None]) -> list[str]:
    """As a command line holds them."""
    words: list[str] = []
    for name, value in options.items():
        words += [name] if value is None else [name, value]
    return words


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)  # its engine is a process of the same group


@contextmanager
def start_server(
    model: str,
    *,
    devices: Sequence[int | str] | None = None,
    start_timeout_s: float = 600.0,
    **options: Any,
) -> Iterator[str]:
    """Run a vLLM server beside this process, and end it on leaving.

    It listens on a socket file that only this user can open, and does not outlive this process,
    be it stopped.

    Args:
        model: a model's id on the hub, or a directory.
        devices: the GPUs that it may use, by number or UUID, with one shard of the model on each
            unless ``options`` say otherwise; those of this process when not given.
        start_timeout_s: how long it may take to start.
        options: of ``vllm serve``, for instance ``dtype="float32"``, ``max_model_len=512``,
            ``tensor_parallel_size=2``; ``True`` for a flag.

    Yields:
        The URL for `VLLMServerEngine`.

    Raises:
        RuntimeError: the server ends while it starts, or takes too long; the message holds the
            last lines that it printed.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        socket_path, log_path = Path(folder, "socket"), Path(folder, "log")
        environment = os.environ | {_PARENT: str(os.getpid())}
        if devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
            options = {"tensor_parallel_size": max(1, len(devices))} | options
        arguments = _words(as_options({"model": model, "uds": socket_path} | options))
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "torchrl_modules.vllm.launch", *arguments],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            url = f"unix://{socket_path}"
            with _guarded(process):
                _await_start(process, url, log_path, start_timeout_s)
                yield url
        finally:
            _end(process)


@contextmanager
def _guarded(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """A small process beside the server ends its group with this process, be the group stopped."""
    words = [sys.executable, "-S", "-c", _GUARDIAN, str(os.getpid()), str(process.pid)]
    guardian = subprocess.Popen(words, start_new_session=True)
    try:
        yield
    finally:
        guardian.kill()
        guardian.wait()


def _await_start(
    process: "subprocess.Popen[bytes]", url: str, log_path: Path, timeout_s: float
) -> None:
    with closing(JSONClient(url, timeout_s=5.0)) as client:
        if client.await_answer("/health", timeout_s, goes_on=lambda: process.poll() is None):
            return
    printed = log_path.read_text(errors="replace")[-3000:]
    raise RuntimeError(f"The vLLM server did not start (exit code {process.poll()}):\n{printed}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    # Its engine is a process of the same group; both go, whatever state they are in.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()
