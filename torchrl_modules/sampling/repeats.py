"""Several responses per prompt: the batch gets one dimension more.

Shape legend: B rows, n samples of each.
"""

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDictBase

from torchrl_data.batched_object import read_objects, write_objects
from torchrl_data.conversation import Conversations, stream_number


def repeat_rows(
    batch: TensorDictBase, prompt: Conversations, num_samples: int
) -> tuple[TensorDictBase, Conversations]:
    """Repeat each row n times, next to each other: the batch ``[*B, n]``, B x n conversations."""
    index = torch.arange(batch.numel()).repeat_interleave(num_samples)
    # Entries that hold a list of one Python value per row, which indexing does not see into.
    values = {
        str(key): read_objects(batch, str(key))
        for key, value in (() if isinstance(batch, LazyStackedTensorDict) else batch.items())
        if type(value) is NonTensorData and isinstance(value.data, list)
    }
    repeated_prompt = prompt[index]
    streams = [
        stream if stream is None else stream_number(stream, number)
        for row in range(len(prompt))
        for number, stream in enumerate([prompt.stream(row)] * num_samples)
    ]
    if None not in streams:
        repeated_prompt = repeated_prompt.with_streams([s for s in streams if s is not None])
    size = (*batch.batch_size, num_samples)
    repeated = batch.exclude(*values).reshape(-1)[index].reshape(size)
    for key, column in values.items():
        write_objects(repeated, key, [column[i] for i in index.tolist()])
    return repeated, repeated_prompt
