"""A vLLM server of token ids that ends with its parent: ``python -m torchrl_modules.vllm.launch``.

It takes the options of ``vllm serve`` and adds those that `VLLMServerEngine` needs. It is meant for
one machine: the routes that update weights have no password, so it listens on a socket file in a
private directory (``--uds``) or on the loopback address. `start_server` runs one.
"""

import os
import runpy
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

from .http_client import JSONClient
from .runtime import PARENT_VARIABLE, import_vllm
from .settings import CPU_DEFAULTS, FIXED, WORKER, as_options

_PARENT: Final = PARENT_VARIABLE
_OPTIONS: Final = as_options(
    {"host": "127.0.0.1", "tokens_only": True, **FIXED, **WORKER},
)
_CPU_OPTIONS: Final = as_options(
    # A seed of a request and a prefill in chunks end the engine.
    {**CPU_DEFAULTS, "no_enable_chunked_prefill": True}
)
_ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause and update
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main() -> None:
    """Serve until killed, or until the parent that started this is gone."""
    if _PARENT in os.environ:
        parent = int(os.environ[_PARENT])
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    is_cpu = import_vllm(in_process=False).current_platform.is_cpu()
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        sys.argv.insert(1, "--model")  # as `vllm serve MODEL` has it; this entry would ignore it
    given = {argument.partition("=")[0] for argument in sys.argv}
    options = _OPTIONS | (_CPU_OPTIONS if is_cpu else {})
    sys.argv += _words({name: value for name, value in options.items() if name not in given})
    # The `vllm` command is broken in vllm-cpu 0.32; this module is what it would run.
    runpy.run_module("vllm.entrypoints.launchers.api_server.entry", run_name="__main__")


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

    It listens on a socket file that only this user can open, and does not outlive this process.

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
            _await_start(process, url, log_path, start_timeout_s)
            yield url
        finally:
            _end(process)


def _await_start(
    process: "subprocess.Popen[bytes]", url: str, log_path: Path, timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    with closing(JSONClient(url, timeout_s=5.0)) as client:
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(ConnectionError):
                if client.request("GET", "/health")[0] == 200:
                    return
            time.sleep(0.2)
    printed = log_path.read_text(errors="replace")[-3000:]
    raise RuntimeError(f"The vLLM server did not start (exit code {process.poll()}):\n{printed}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    # Its engine is a process of the same group; both go, whatever state they are in.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()
