"""Names of SGLang's kernels for CPUs, which the index of packages has none of.

SGLang imports some by name wherever it runs on a CPU, and calls them where the CPU has AMX alone.
"""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not installed")

    return missing
