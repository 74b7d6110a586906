"""vLLM servers that are started here, watched over, and served to asyncio."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from torchrl_modules.engines.bridges import BlockingEngine, gather_rows
from torchrl_modules.engines.engine import ClosedOnLeaving, EngineDied, EngineLoad, Generation
from torchrl_modules.engines.fleet import EngineFleet
from torchrl_modules.engines.json_client import JSONClient
from torchrl_modules.sampling import SamplingParameters

from .access_control import TOKEN_VARIABLE
from .client import VLLMServerEngine
from .engine import AsyncVLLMEngine, VLLMEngine
from .requests import RespondingEngine, Row, WholeBatchEngine
from .runtime import CPU_DEFAULTS, FIXED, PARENT_VARIABLE, WORKER, as_options, import_vllm, serve

# A vLLM server of token ids that ends with its parent: ``python -m torchrl_modules.vllm.server``.
#
# It takes the options of ``vllm serve`` and adds those that `VLLMServerEngine` needs. It is meant
# for one machine: without ``--host``, ``--port`` or ``--uds`` it listens on a socket file in a
# directory that only this user can open, and prints its URL. On a TCP port every route asks for the
# token in the environment variable ``TORCHRL_VLLM_TOKEN``. `start_server` runs one.

_PARENT: Final = PARENT_VARIABLE
_OPTIONS: Final = {"host": "127.0.0.1", "tokens_only": True, **FIXED, **WORKER}
_GUARD: Final = "torchrl_modules.vllm.access_control.AccessControl"
_SHORTEST_TOKEN: Final = 16
_ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause and update
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_GUARDIAN: Final = """
import contextlib, os, shutil, signal, sys, time
import psutil

def lives(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != "zombie"

def end(family):
    for each in filter(lives, list(family)):
        with contextlib.suppress(psutil.Error):
            family.update(each.children(recursive=True))
    trackers = []
    for each in filter(lives, family - {psutil.Process()}):
        with contextlib.suppress(psutil.Error):
            if "resource_tracker" in " ".join(each.cmdline()):
                each.resume()  # left alone, it removes their shared memory, and ends
                trackers.append(each)
            else:
                each.kill()
    deadline = time.monotonic() + 5
    while any(map(lives, trackers)) and time.monotonic() < deadline:
        time.sleep(0.05)

signal.signal(signal.SIGTERM, lambda *_: sys.exit())
server, folder, parent, family = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), set()
try:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
        process = psutil.Process(server)
        family.add(process)
        while os.getppid() == parent and lives(process):
            family.update(process.children(recursive=True))
            time.sleep(0.5)
finally:
    try:
        end(family)
    finally:
        # Whoever would have removed it has ended; else it is there to be read, and removed then.
        if parent == server or os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)
"""


def main() -> None:
    """Serve until killed, or until the parent that started this is gone."""
    if os.getppid() != int(os.environ.get(_PARENT, os.getppid())):
        raise SystemExit("torchrl_modules.vllm.server: the process that started it has ended.")
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        sys.argv.insert(1, "--model")  # as `vllm serve MODEL` has it; its server would ignore it
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        if _PARENT not in os.environ:  # whoever started it guards it
            _guard(os.getpid(), folder)
        sys.argv += _access(_command_line_options(), folder)
        # An engine inside the process that started this one sets it to 0; here it has its own.
        os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        vllm = import_vllm(in_process=False)
        os.environ.update({n: v for n, v in _ENVIRONMENT.items() if n not in os.environ})
        if is_cpu := vllm.current_platform.is_cpu():
            # Its processes are forks, which need not import everything again as those would that
            # vLLM spawns on a CPU. One that waits for another one spins for 2 ms, in the place of
            # a second, in which it would take a core that the other one, or a trainer, needs.
            vllm.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
            spins = vllm.SpinCondition
            spins.__init__ = partialmethod(spins.__init__, busy_loop_s=0.002)
        if is_cpu and "--no-enforce-eager" not in sys.argv:
            # vLLM counts ranks, which nobody reads, in a helper that is compiled as the first
            # batch comes.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        given = _command_line_options()
        settings = (_OPTIONS | (CPU_DEFAULTS if is_cpu else {})).items()
        sys.argv += as_options({n: v for n, v in settings if _plain(f"--{n}") not in given})
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
            "torchrl_modules.vllm.server: on a TCP port every user of this machine could replace "
            f"the weights. Set {TOKEN_VARIABLE} to a secret of {_SHORTEST_TOKEN} letters or more, "
            "here and where VLLMServerEngine runs, or listen on a socket file: --uds PATH, or "
            "neither --host nor --port."
        )
    return words


def _guard(server: int, folder: str) -> "subprocess.Popen[bytes]":
    """A small process that ends a server's family, stopped or not, with the server or with us."""
    words = [sys.executable, "-c", _GUARDIAN, str(server), folder, str(os.getpid())]
    return subprocess.Popen(words, start_new_session=True)


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

    Example:
        >>> with start_server("Qwen/Qwen3-0.6B", max_model_len=2048) as url:  # doctest: +SKIP
        ...     engine = VLLMServerEngine(url)
        ...     params = SamplingParameters(max_new_tokens=8)
        ...     [generation] = engine.generate([tokenizer.encode("What is 2 + 2?")], params)
        ...     engine.close()
        >>> len(generation.ids) == len(generation.log_probs)  # doctest: +SKIP
        True
    """
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        socket_path, log_path = Path(folder, "socket"), Path(folder, "log")
        environment = os.environ | {_PARENT: str(os.getpid()), "TMPDIR": folder}
        if devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
            options = {"tensor_parallel_size": max(1, len(devices))} | options
        arguments = as_options({"model": model, "uds": socket_path} | options)
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "torchrl_modules.vllm.server", *arguments],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        guardian = _guard(process.pid, folder)
        try:
            url = f"unix://{socket_path}"
            with closing(
                JSONClient(url, timeout_s=5.0, token=os.environ.get(TOKEN_VARIABLE))
            ) as client:
                is_up = client.await_answer(
                    "/health", start_timeout_s, goes_on=lambda: process.poll() is None
                )
            if not is_up:
                printed = log_path.read_text(errors="replace")[-3000:]
                raise RuntimeError(
                    f"The vLLM server did not start (exit code {process.poll()}):\n{printed}"
                )
            yield url
        finally:
            guardian.terminate()
            guardian.wait()
            # Should its guardian have been killed: its engine is a process of the same group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# An engine in another process that is replaced when it dies, and loses no request.


class SupervisedEngine(BlockingEngine):
    """An :class:`~torchrl_modules.engines.engine.Engine` that outlives its processes.

    It is a fleet (:class:`~torchrl_modules.EngineFleet`) of one server, ``inside``, of which
    ``inside.health()`` tells the state. When the engine is killed, or draws no token for
    ``stall_timeout_s``, it is ended and another one is started; one that does not start, or fails
    in the midst of an update, counts as one that died. It serves once it has acknowledged the
    weights that the last one had, or that are pushed then; what was in flight is drawn again, with
    the same seeds. Rows that were finished stay.

    Args:
        start: gives a context manager that starts an engine, gives its URL, and ends it on leaving,
            such as ``partial(start_server, "Qwen/Qwen3-0.6B")``.
        max_restarts: how many engines in a row may die without finishing a row.
        client_settings: of :class:`~torchrl_modules.vllm.client.VLLMServerEngine`, for instance
            ``stall_timeout_s``.

    Raises:
        RuntimeError: the first engine can't be started.
        ValueError: ``max_restarts`` is negative.
    """

    def __init__(
        self,
        start: Callable[[], AbstractContextManager[str]],
        *,
        max_restarts: int = 3,
        **client_settings: Any,
    ) -> None:
        open_server = partial(OwnServerEngine, start, **client_settings)
        super().__init__(EngineFleet([open_server], max_restarts=max_restarts))


class LLMOnDevice(SupervisedEngine):
    """vLLM on chosen devices, in a process of its own, which is replaced when it dies.

    TorchRL's class of this name was a ``vllm.LLM`` that could be placed when it ran as a Ray actor.
    Here the process is one of this machine, and the class is an engine for
    :class:`~torchrl_modules.vLLMWrapper`; inside a Ray actor it uses the devices of that one.

    Args:
        model: a model's id on the hub, or a directory.
        devices: the GPUs that it uses, by number or UUID; those of this process when not given.
        max_restarts: as for `SupervisedEngine`.
        stall_timeout_s: as for :class:`~torchrl_modules.vllm.client.VLLMServerEngine`.
        options: of :func:`start_server`.

    Raises:
        RuntimeError: the engine can't be started.
    """

    def __init__(
        self,
        model: str,
        *,
        devices: Sequence[int | str] | None = None,
        max_restarts: int = 3,
        stall_timeout_s: float = 30.0,
        **options: Any,
    ) -> None:
        super().__init__(
            partial(start_server, model, devices=devices, **options),
            max_restarts=max_restarts,
            stall_timeout_s=stall_timeout_s,
        )


def make_vllm_worker(
    model_name: str, *, devices: Sequence[int | str] | None = None, **options: Any
) -> VLLMEngine | LLMOnDevice:
    """An engine whose weights a trainer can update, for :class:`~torchrl_modules.vLLMWrapper`.

    Args:
        model_name: a model's id on the hub, or a directory.
        devices: the GPUs of an engine in a process of its own; without, it is built in this
            process.
        options: of :class:`~torchrl_modules.vllm.engine.VLLMEngine`, or of
            :class:`LLMOnDevice` with ``devices``.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: the engine can't be started.

    Example:
        >>> engine = make_vllm_worker("Qwen/Qwen3-0.6B", devices=[1])  # doctest: +SKIP
        >>> policy = vLLMWrapper(engine, tokenizer=tokenizer)  # doctest: +SKIP
        >>> engine.update_weights(trained.state_dict())  # doctest: +SKIP
        >>> engine.version  # doctest: +SKIP
        1
    """
    if devices is None:
        return VLLMEngine(model_name, **options)
    return LLMOnDevice(model_name, devices=devices, **options)


# Asynchronous engines for callers that wait, and engines that block for callers that await.


class BlockingVLLMEngine(WholeBatchEngine, BlockingEngine):
    """An :class:`~torchrl_modules.engines.engine.Engine` over an `AsyncVLLMEngine`."""

    # Calls of several threads share the engine's steps, and weights can be updated while they wait:
    # each response then says which version drew which token.

    # That of the engine inside, which knows the model's own end tokens.
    check_sampling = BlockingEngine.check_sampling  # type: ignore[assignment]
    end_token_ids = BlockingEngine.end_token_ids  # type: ignore[assignment]

    def __init__(self, engine: AsyncVLLMEngine) -> None:
        super().__init__(engine)
        self.engine = engine

    def _draw(self, rows: list[Row], params: SamplingParameters) -> list[Generation]:
        # The calls have deadlines of their own: `stall_timeout_s` of the engine.
        return self._loop.run(gather_rows(self.engine.draw(row, params) for row in rows))

    def close(self) -> None:
        """End the thread that waits; the engine goes on. May be called twice."""
        self._loop.close()


class AsyncServerEngine(RespondingEngine, ClosedOnLeaving):
    """An :class:`~torchrl_modules.engines.engine.AsyncEngine` over a vLLM server.

    More callers than the client has connections (its ``num_connections``) stand in line.

    Args:
        engine: the client; it is not closed with this.
    """

    def __init__(self, engine: VLLMServerEngine) -> None:
        self._inside: VLLMServerEngine = engine
        self._control = ThreadPoolExecutor(1, thread_name_prefix="vllm-control")
        self._prober = ThreadPoolExecutor(1, thread_name_prefix="vllm-prober")
        self._running: set[Future[Generation]] = set()
        self._is_closed = False

    async def draw(self, row: Row, params: SamplingParameters) -> Generation:
        """See `RespondingEngine.draw`."""
        self._check_open()
        version, call = self.version, self._inside.draw_one(row, params)
        self._running.add(call)
        try:
            generation = await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise EngineDied("AsyncServerEngine was closed.") from None
            raise
        finally:
            self._running.discard(call)
        # A server that has no labels has one version.
        return generation.drawn_by(version)

    can_keep_caches = True
    """`update_weights` takes ``recompute=False``."""

    async def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        recompute: bool = True,
    ) -> None:
        """See :meth:`~torchrl_modules.vllm.client.VLLMServerEngine.update_weights`."""
        update = partial(
            self._inside.update_weights, state_dict, version=version, recompute=recompute
        )
        await self._submit(self._control, update)

    async def pause(self) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.pause`."""
        await self._submit(self._control, self._inside.pause)

    async def resume(self) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.resume`."""
        await self._submit(self._control, lambda: self._inside.pause(paused=False))

    async def check_health(self) -> None:
        """Ask the server whether it is well.

        Raises:
            EngineDied: it is not, or it is gone.
            ConnectionError: it did not answer in time.
        """
        await self._submit(self._prober, self._inside.check_health)

    @property
    def tells_load(self) -> bool:
        """Whether the server reports its load, which it is asked for."""
        return self._inside.tells_load

    async def measure_load(self) -> EngineLoad:
        """See :meth:`~torchrl_modules.vllm.client.VLLMServerEngine.measure_load`."""
        return await self._submit(self._prober, self._inside.measure_load)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("AsyncServerEngine is closed.")

    def _submit(self, pool: ThreadPoolExecutor, function: Callable[[], Any]) -> asyncio.Future[Any]:
        self._check_open()
        return asyncio.wrap_future(pool.submit(function))

    def close(self) -> None:
        """Abort what is in flight and end the threads; the server goes on. May be called twice."""
        self._is_closed = True
        for call in list(self._running):
            call.cancel()
        for pool in (self._control, self._prober):
            pool.shutdown(cancel_futures=True)


class OwnServerEngine(AsyncServerEngine):
    """An :class:`~torchrl_modules.AsyncEngine` that has its server to itself.

    Args:
        start: the URL of a server that runs; or gives a context manager that starts one, gives its
            URL, and ends it on leaving, such as ``partial(start_server, "Qwen/Qwen3-0.6B")``.
        client_settings: of :class:`~torchrl_modules.vllm.client.VLLMServerEngine`, for instance
            ``stall_timeout_s``.

    Raises:
        ConnectionError: nobody answers at the URL.
        RuntimeError: the server can't be started, or takes no token ids.
    """

    def __init__(
        self, start: str | Callable[[], AbstractContextManager[str]], **client_settings: Any
    ) -> None:
        self.name = start if isinstance(start, str) else ""
        """Its URL, where that stays the same."""
        with ExitStack() as stack:
            url = stack.enter_context(nullcontext(start) if isinstance(start, str) else start())
            client = VLLMServerEngine(url, **client_settings)
            super().__init__(client)
            self._client = client
            self._process = stack.pop_all()

    def close(self) -> None:
        """Abort what is in flight, and end the server if it was started here."""
        self._process.close()  # first, so that nobody waits for it any more
        super().close()
        self._client.close()


if __name__ == "__main__":
    main()
