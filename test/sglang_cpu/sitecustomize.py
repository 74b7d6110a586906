"""What lets SGLang run beside a torch for CPUs, and start in less time.

Torchvision's build for CUDA names two operators while it is imported, which SGLang does, and which
nothing calls. The processes of a server are forks of the one that has imported SGLang: anew, each
takes twenty seconds of a core for that. Garbage is looked for less often, as in other interpreters
that tests start.
"""

import gc
import multiprocessing
import sys
from types import SimpleNamespace


class _BeforeTorchvision:
    """Defines the operators as soon as torchvision is looked for."""

    kept = SimpleNamespace()

    @classmethod
    def find_spec(cls, name: str, *_: object) -> None:
        if name == "torchvision" and not hasattr(cls.kept, "library"):
            import torch

            cls.kept.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                cls.kept.library.define(operator + signature)


sys.meta_path.insert(0, _BeforeTorchvision)
gc.set_threshold(100_000, 50, 100)

_set_start_method = multiprocessing.set_start_method


def _fork(method: str | None, force: bool = False) -> None:
    _set_start_method("fork" if method == "spawn" else method, force)


multiprocessing.set_start_method = _fork
