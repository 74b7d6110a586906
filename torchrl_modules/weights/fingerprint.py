"""Whether the weights of a model are still the same, whoever changes them and in whatever way."""

from collections.abc import Hashable
from typing import Final

import torch
from torch import Tensor, nn

_WORD: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@torch.no_grad()
def weights_fingerprint(model: nn.Module) -> Hashable:
    """Another one, in all likelihood, once any weight or buffer has another bit.

    Reads all weights once, as drawing one token does.

    Args:
        model: with its weights on a device.
    """
    tensors = [*model.parameters(), *model.buffers()]
    sums = [_sum_of_bits(tensor) for tensor in tensors]
    by_device: dict[torch.device, list[Tensor]] = {}
    for one in sums:
        by_device.setdefault(one.device, []).append(one)
    values = tuple(tuple(torch.stack(ones).tolist()) for ones in by_device.values())
    return values, tuple((t.data_ptr(), t._version) for t in tensors)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    flat = tensor.detach().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    words = flat.view(_WORD[flat.element_size()])
    size = words.element_size()
    if all(number % 8 == 0 for number in (words.numel() * size, words.storage_offset() * size)):
        words = words.view(torch.int64)  # as many bits at once as there are
    return words.sum(dtype=torch.int64)
