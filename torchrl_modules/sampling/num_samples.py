"""Several responses per prompt: the batch gets one dimension more.

Shape legend: B rows, n samples of each.
"""

from collections.abc import Sequence

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDictBase

from torchrl_data.conversation.batched_object import read_objects, write_objects
from torchrl_data.conversation.conversations import Conversations


def repeat_rows(
    batch: TensorDictBase, prompt: Conversations, num_samples: int
) -> tuple[TensorDictBase, Conversations]:
    """Repeat each row n times, next to each other: the batch ``[*B, n]``, B x n conversations."""
    index = torch.arange(batch.numel()).repeat_interleave(num_samples)
    values = {key: read_objects(batch, key) for key in _row_value_keys(batch)}
    size = (*batch.batch_size, num_samples)
    repeated = batch.exclude(*values).reshape(-1)[index].reshape(size)
    for key, column in values.items():
        write_objects(repeated, key, [column[i] for i in index.tolist()])
    return repeated, prompt[index]


def _row_value_keys(batch: TensorDictBase) -> Sequence[str]:
    """Entries that hold a list of one Python value per row, which indexing does not see into."""
    if isinstance(batch, LazyStackedTensorDict):
        return []
    return [
        str(key)
        for key, value in batch.items()
        if type(value) is NonTensorData and isinstance(value.data, list)
    ]
