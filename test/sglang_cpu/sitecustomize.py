"""Two operators that torchvision's build for CUDA lacks beside a torch for CPUs.

It names them while it is imported, which SGLang does; nothing calls them.
"""

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
