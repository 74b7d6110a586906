"""A server of SGLang that is started here and ends with this process: `start_sglang_server`."""

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig

from torchrl_data.pretrained import load_pretrained
from torchrl_modules.engines.server_options import as_options
from torchrl_modules.engines.server_process import run_server
from torchrl_modules.weight_transfer.broadcast_group import free_port

from .launch import TOKEN_VARIABLE

_FIXED: Final = {
    # Token ids only; without its tokenizer, the end tokens are those of the model alone.
    "skip_tokenizer_init": True,
    # How many tokens it has drawn: a server that stands still is told from one that is busy.
    "enable_metrics": True,
}
_ON_CPU: Final = {
    "device": "cpu",
    # In float32 log-probs are those of the model that is trained.
    "dtype": "float32",
    # Of what can be installed from the index of packages, no kernel is for a CPU.
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "max_total_tokens": 1 << 16,
    # Its scheduler would keep a core busy that has nothing to do.
    "sleep_on_idle": True,
}
_LAUNCH: Final = str(Path(__file__).with_name("launch.py"))


@contextmanager
def start_sglang_server(
    model: str,
    *,
    devices: Sequence[int | str] | None = None,
    start_timeout_s: float = 600.0,
    python: str | None = None,
    address: tuple[str, int] | None = None,
    **options: Any,
) -> Iterator[str]:
    """Run a server of SGLang beside this process, and end it on leaving.

    It listens on a port of this machine alone (``address`` says where else), asks for a token that
    only this process knows, and does not outlive this process. The model's weights are taken in the
    type that they are saved in, and in bfloat16 where that is float32 and there is a GPU: SGLang
    would take float16.

    Args:
        model: a model's id on the hub, or a directory.
        devices: the GPUs that it may use, by number or UUID, with one shard of the model on each
            unless ``options`` say otherwise; those of this process when not given.
        start_timeout_s: how long it may take to start.
        python: the Python of the environment that SGLang is installed in; this one when not given.
            It needs other releases of some packages than the rest of a training environment.
        address: host and port to listen on; ``("0.0.0.0", port)`` is reached from other machines.
        options: of ``sglang serve``, for instance ``context_length=512``,
            ``mem_fraction_static=0.5``, ``tp_size=2``; ``True`` for a flag, ``False`` to leave it.

    Yields:
        The URL for `SGLangServerEngine`, with the token in it.

    Raises:
        RuntimeError: the server ends while it starts, or takes too long; the message holds the
            last lines that it printed.
        TypeError: an option is fixed by what an engine promises.
        ValueError: ``python`` is no program.

    Example:
        >>> with start_sglang_server("Qwen/Qwen3-0.6B") as url:  # doctest: +SKIP
        ...     engine = SGLangServerEngine(url)
        ...     params = SamplingParameters(max_new_tokens=8)
        ...     [generation] = engine.generate([tokenizer.encode("What is 2 + 2?")], params)
        ...     engine.close()
        >>> len(generation.ids) == len(generation.log_probs)  # doctest: +SKIP
        True
    """
    fixed = {*_FIXED, "host", "port", "api_key", "admin_api_key", "model", "model_path"}
    if clashes := sorted(fixed & set(options)):
        raise TypeError(f"start_sglang_server: {clashes} are what makes it an engine; leave them.")
    if python is not None and shutil.which(python) is None:
        raise ValueError(f"start_sglang_server: python={python!r} is no program.")
    is_cpu = options.get("device") == "cpu" or not torch.cuda.is_available()
    defaults = _ON_CPU if is_cpu else {"dtype": _dtype_on_gpu(model, options)}
    if devices is not None:
        defaults = {"tp_size": max(1, len(devices)), **defaults}
    token = secrets.token_urlsafe(24)
    host, port = address or ("127.0.0.1", free_port())
    near = "127.0.0.1" if host == "0.0.0.0" else host
    settings = {**_FIXED, **defaults, **options, "host": host, "port": port}
    settings = {name: value for name, value in settings.items() if value is not False}
    with tempfile.TemporaryDirectory(prefix="sglang-") as folder:
        environment: Mapping[str, str] = {
            **os.environ,
            TOKEN_VARIABLE: token,
            "TMPDIR": folder,
            **({"SGLANG_USE_CPU_ENGINE": "1"} if is_cpu else {}),
        }
        if devices is not None:
            environment = {**environment, "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
        words = [python or sys.executable, _LAUNCH, "--model-path", model, *as_options(settings)]
        with run_server(
            words,
            environment,
            folder,
            url=f"http://{near}:{port}",
            token=token,
            start_timeout_s=start_timeout_s,
            what="The SGLang server",
        ):
            yield f"http://:{token}@{near}:{port}"


def _dtype_on_gpu(model: str, options: Mapping[str, Any]) -> str:
    remote = bool(options.get("trust_remote_code"))
    config = load_pretrained(AutoConfig, model, trust_remote_code=remote)
    saved = getattr(config.get_text_config(), "dtype", None)
    return "float16" if saved == torch.float16 else "bfloat16"
