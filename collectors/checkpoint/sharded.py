"""State dicts of which every rank holds a part: planned by DCP, stored as safetensors, no pickle.

``torch.distributed.checkpoint`` decides who writes what and reads it back into any other layout.
Its own files keep their index as a pickle, so the shards are written in the safetensors format that
its ``HuggingFaceStorageReader`` reads.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .encoding import StagingBuffers
from .errors import CheckpointError
from .ranks import Ranks
from .tensor_file import DTYPES, Entry, as_bytes


class FlatState(NamedTuple):
    """A nested state dict without its nesting."""

    tensors: dict[str, torch.Tensor]
    plain: dict[str, Any]


class Shards(NamedTuple):
    """What this rank writes of a state dict."""

    file: str
    entries: dict[str, Entry]
    metadata: dict[str, str]


def flatten(name: str, state: Mapping[str, Any]) -> FlatState:
    """Tensors and other values by their place, the keys joined by dots.

    Raises:
        CheckpointError: two places have one name.
    """
    flat = FlatState({}, {})
    for key, value in _leaves("", state):
        if key in flat.tensors or key in flat.plain:
            raise CheckpointError(f"sharded[{name!r}]: two values have the name {key!r}.")
        (flat.tensors if isinstance(value, torch.Tensor) else flat.plain)[key] = value
    return flat


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    # A tuple is a value: what is loaded in place could not change it.
    if isinstance(value, Mapping | list) and value:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), item)
    else:
        yield prefix, value


def plan_shards(
    name: str, tensors: dict[str, torch.Tensor], ranks: Ranks, buffers: StagingBuffers | None
) -> Shards:
    """What this rank writes; all ranks call it together.

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

    def local_plan() -> Any:
        planner.set_up_planner(tensors, is_coordinator=ranks.rank == 0)
        return planner.create_local_plan()

    plans = ranks.gather(ranks.agree(local_plan))

    def own_part() -> Shards:
        # Every rank works the global plan out for itself; it is the same everywhere.
        plan = planner.finish_plan(planner.create_global_plan(plans)[0][ranks.rank])
        values = [(item, planner.resolve_data(item)) for item in plan.items]
        return _staged(name, values, ranks, buffers)

    return ranks.agree(own_part)


def _staged(
    name: str, values: list[tuple[Any, Any]], ranks: Ranks, buffers: StagingBuffers | None
) -> Shards:
    """Items of a plan with their tensors, as they are written."""
    entries, offsets = {}, {}
    for item, value in values:
        key = item.index.fqn
        if value.dtype not in DTYPES or key in entries:
            raise CheckpointError(
                f"sharded[{name!r}]: cannot store {key!r} of dtype {value.dtype}, or several parts "
                "of it on one rank."
            )
        flat = as_bytes(value)
        if buffers is not None:
            flat = buffers.copied(f"{name}:{key}", flat)
        content = flat.cpu().numpy().data if len(flat) else b""
        entries[key] = Entry(DTYPES[value.dtype], tuple(value.shape), content)
        offsets[key] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
    metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    return Shards(f"shard-{ranks.rank + 1:05d}-of-{ranks.size:05d}", entries, metadata)


def load_shards(folder: Path, name: str, tensors: dict[str, torch.Tensor], ranks: Ranks) -> None:
    """Fill tensors, sharded in whatever way, with what a folder holds; all ranks call it together.

    Raises:
        CheckpointError: the folder holds others, or of other shapes.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    def checked() -> HuggingFaceStorageReader:
        reader = HuggingFaceStorageReader(str(folder))
        try:
            stored = reader.read_metadata().state_dict_metadata
        except Exception as error:
            # The files are whole, and say what was never saved.
            raise CheckpointError(f"{folder}: {error} ({type(error).__name__}).") from error
        _compare(name, tensors, {key: tuple(value.size) for key, value in stored.items()})  # type: ignore[union-attr]
        return reader

    if tensors or folder.is_dir():
        reader = ranks.agree(checked)
        alone = ranks.group is None
        with warnings.catch_warnings():
            if alone:
                warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
            load(tensors, storage_reader=reader, process_group=ranks.group, no_dist=alone)


def _compare(name: str, wanted: dict[str, torch.Tensor], stored: dict[str, tuple]) -> None:
    problems = [
        *(f"{key!r} is not in the checkpoint" for key in wanted if key not in stored),
        *(f"{key!r} is not in the target" for key in stored if key not in wanted),
        *(
            f"{key!r} has the shape {tuple(value.shape)}, and {stored[key]} in the checkpoint"
            for key, value in wanted.items()
            if key in stored and tuple(value.shape) != stored[key]
        ),
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"sharded {name!r}: {'; '.join(problems[:5])}{more}.")


def fill(name: str, target: Any, plain: Mapping[str, Any], prefix: str = "") -> None:
    """Put values that are no tensors where they were.

    Raises:
        CheckpointError: the target has a place that the checkpoint has not.
    """
    items = target.items() if isinstance(target, dict) else enumerate(target)
    for key, value in list(items):
        place = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict | list) and value:
            fill(name, value, plain, place)
        elif not isinstance(value, torch.Tensor):
            if place not in plain:
                raise CheckpointError(f"sharded {name!r}: {place!r} is not in the checkpoint.")
            target[key] = plain[place]
