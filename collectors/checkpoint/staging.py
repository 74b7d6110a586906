"""Host memory into which tensors are copied while training goes on."""

from typing import Final

import torch

_KEPT_BYTES: Final = 1 << 16


class StagingBuffers:
    """Copies of tensors by name; large ones reuse the memory of the save before.

    Fresh memory costs several times what the copy does, so it is kept between saves.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._used: set[str] = set()

    def begin(self) -> None:
        """Start the next save: what the last one copied is overwritten."""
        self._kept = {name: self._kept[name] for name in self._used if name in self._kept}
        self._used.clear()

    def copied(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """A copy in host memory of a uint8 tensor ``[N]``; it is there after :meth:`finish`."""
        on_host = values.device.type == "cpu"
        if on_host and len(values) < _KEPT_BYTES:
            return values.clone()
        self._used.add(name)
        kept = self._kept.get(name)
        if kept is None or len(kept) != len(values):
            kept = torch.empty(len(values), dtype=torch.uint8, pin_memory=not on_host)
            self._kept[name] = kept
        return kept.copy_(values, non_blocking=True)

    def finish(self) -> None:
        """Wait for copies that are on their way from a device."""
        if any(buffer.is_pinned() for buffer in self._kept.values()):
            torch.cuda.synchronize()
