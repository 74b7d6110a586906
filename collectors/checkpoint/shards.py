"""State dicts of which every rank holds a part: planned by DCP, stored as safetensors, no pickle.

``torch.distributed.checkpoint`` decides who writes what and reads it back into any other layout.
Its own files keep their index as a pickle, so the shards are written in the safetensors format
that its ``HuggingFaceStorageReader`` reads.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .checkpoint_group import CheckpointGroup
from .errors import CheckpointError
from .format import StagingBuffers
from .tensor_file import DTYPES, TensorEntry, as_bytes


class Shards(NamedTuple):
    """The part of a state dict that this rank writes."""

    file: str
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[Any, Any, str, Any]]:
    """The values of a nested state dict: what each is in, its key there, its place, and itself.

    Its place is its keys, joined by dots. A tuple is a value: what is loaded in place could not
    change it.
    """
    for key, item in list(value.items() if isinstance(value, Mapping) else enumerate(value)):
        place = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(item, Mapping | list) and item:
            yield from leaves(item, place)
        else:
            yield value, key, place, item


def flatten(name: str, state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors of a nested state dict and its other values, by their place.

    Raises:
        CheckpointError: two places have one name.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}
    for _, _, place, value in leaves(state):
        if place in tensors or place in plain:
            raise CheckpointError(f"sharded[{name!r}]: two values have the name {place!r}.")
        (tensors if isinstance(value, torch.Tensor) else plain)[place] = value
    return tensors, plain


def plan_shards(
    name: str,
    tensors: dict[str, torch.Tensor],
    ranks: CheckpointGroup,
    buffers: StagingBuffers | None,
) -> Shards:
    """Return what this rank writes; all ranks call it together.

    Args:
        name: of the state dict.
        tensors: DTensors, or tensors that are the same on all ranks.
        ranks: all that save.
        buffers: copy into these; ``None`` takes the tensors as they are.

    Raises:
        CheckpointError: a tensor can't be stored.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with ranks.agreed():
        planner.set_up_planner(tensors, is_coordinator=ranks.rank == 0)
        local_plan = planner.create_local_plan()
    plans = ranks.gather(local_plan)
    entries: dict[str, TensorEntry] = {}
    offsets = {}
    with ranks.agreed():
        # Every rank works the global plan out for itself; it is the same everywhere.
        plan = planner.finish_plan(planner.create_global_plan(plans)[0][ranks.rank])
        for item in plan.items:
            key, value = item.index.fqn, planner.resolve_data(item)
            assert isinstance(value, torch.Tensor)
            assert item.tensor_data is not None
            dtype = str(value.dtype).removeprefix("torch.")
            if dtype not in DTYPES or key in entries:
                raise CheckpointError(
                    f"sharded[{name!r}]: cannot store {key!r} of dtype {value.dtype}, or several "
                    "parts of it on one rank."
                )
            data = as_bytes(value)
            if buffers is not None:
                data = buffers.copied(f"{name}:{key}", data)
            entries[key] = TensorEntry(dtype, tuple(value.shape), data.cpu())
            offsets[key] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
    metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    return Shards(f"shard-{ranks.rank + 1:05d}-of-{ranks.size:05d}", entries, metadata)


def load_shards(
    folder: Path,
    name: str,
    tensors: dict[str, torch.Tensor],
    ranks: CheckpointGroup,
    *,
    may_lack: str | None = None,
) -> list[str]:
    """Fill tensors, sharded in whatever way, with what a folder holds; all ranks call it together.

    Args:
        folder: of the state dict.
        name: of the state dict.
        tensors: by their places.
        ranks: all that load.
        may_lack: what the folder may have none of begins with this; ``None`` for nothing.

    Returns:
        The places of what it has none of, which stays as it is.

    Raises:
        CheckpointError: the folder holds others, or of other shapes.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    if not tensors and not folder.is_dir():
        return []
    reader = HuggingFaceStorageReader(str(folder))
    with ranks.agreed():
        try:
            found: Any = reader.read_metadata().state_dict_metadata
        except Exception as error:
            # The files are whole, and say what was never saved.
            raise CheckpointError(f"{folder}: {error} ({type(error).__name__}).") from error
        stored = {key: tuple(value.size) for key, value in found.items()}
        missing = [key for key in tensors if key not in stored]
        lacking = [key for key in missing if may_lack is not None and key.startswith(may_lack)]
        tensors = {key: value for key, value in tensors.items() if key not in lacking}
        problems = [f"{key!r} is not in the checkpoint" for key in missing if key in tensors]
        problems += [f"{key!r} is not in the target" for key in stored if key not in tensors]
        problems += [
            f"{key!r} has the shape {tuple(value.shape)}, and {stored[key]} in the checkpoint"
            for key, value in tensors.items()
            if tuple(value.shape) != stored.get(key, tuple(value.shape))
        ]
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise CheckpointError(f"sharded {name!r}: {'; '.join(problems[:5])}{more}.")
    alone = ranks.group is None
    with warnings.catch_warnings():
        if alone:
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
        load(tensors, storage_reader=reader, process_group=ranks.group, no_dist=alone)
    return lacking
