"""A checkpoint is read and verified, with the shards of several ranks."""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open

from .files import DTYPES, CheckpointError, Entry, as_bytes, open_file, problems_of, read_manifest
from .format import Decoder, StagingBuffers

# The processes that save and load one checkpoint together.

_T = TypeVar("_T")


class Ranks:
    """The ranks of a process group, or one process by itself.

    Args:
        group: of all that take part, each of which makes a ``Ranks``; ``None`` for one process.
    """

    # A group of its own: what is gathered on a thread must not meet what training sends meanwhile.

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group: Any = None
        self.rank, self.size = 0, 1
        if group is not None:
            members = dist.get_process_group_ranks(group)
            self.group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
            self.rank, self.size = dist.get_rank(group), len(members)

    def gather(self, value: _T) -> list[_T]:
        """The values of all ranks."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Goes on behind what is inside if that fails on no rank; all ranks enter it together.

        Raises:
            CheckpointError: it failed on another rank.
            Exception: it failed on this one, as it did.
        """
        error = None
        try:
            yield
        except Exception as caught:
            error = caught
        failures = self.gather(None if error is None else str(error))
        if error is not None:
            raise error
        told = [f"rank {rank}: {what}" for rank, what in enumerate(failures) if what is not None]
        if told:
            raise CheckpointError(" ".join(told))


# State dicts of which every rank holds a part: planned by DCP, stored as safetensors, no pickle.
#
# ``torch.distributed.checkpoint`` decides who writes what and reads it back into any other layout.
# Its own files keep their index as a pickle, so the shards are written in the safetensors format
# that its ``HuggingFaceStorageReader`` reads.


class Shards(NamedTuple):
    """What this rank writes of a state dict."""

    file: str
    entries: dict[str, Entry]
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
    with ranks.agreed():
        planner.set_up_planner(tensors, is_coordinator=ranks.rank == 0)
        local_plan = planner.create_local_plan()
    plans = ranks.gather(local_plan)
    entries: dict[str, Entry] = {}
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
            entries[key] = Entry(dtype, tuple(value.shape), data.cpu())
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

    if not tensors and not folder.is_dir():
        return
    reader = HuggingFaceStorageReader(str(folder))
    with ranks.agreed():
        try:
            found: Any = reader.read_metadata().state_dict_metadata
        except Exception as error:
            # The files are whole, and say what was never saved.
            raise CheckpointError(f"{folder}: {error} ({type(error).__name__}).") from error
        stored = {key: tuple(value.size) for key, value in found.items()}
        problems = [f"{key!r} is not in the checkpoint" for key in tensors if key not in stored]
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


# A checkpoint that was loaded, and how it is.

STATE: Final = "state.json"
TENSORS: Final = "tensors.safetensors"
SHARDED: Final = "sharded"


@dataclass(frozen=True)
class Checkpoint:
    """What :meth:`CheckpointStore.load` read, all of it verified."""

    step: int
    """Of training, as it was given to ``save``."""
    state: dict[str, Any]
    """What was saved, on the CPU."""
    path: Path
    """The checkpoint's folder; what ``files`` wrote lies there under its name."""
    manifest: Mapping[str, Any]
    """Step, metric, versions, and the length and SHA-256 of every file."""
    _plain: Mapping[str, Mapping[str, Any]] = field(repr=False)
    _ranks: Ranks = field(repr=False)

    @property
    def sharded(self) -> tuple[str, ...]:
        """The names under which state dicts were saved as ``sharded``."""
        return tuple(self._plain)

    def load_sharded(self, name: str, target: dict[str, Any]) -> None:
        """Fill a state dict with one that was saved as ``sharded``; all ranks call it together.

        Args:
            name: under which it was saved.
            target: nested dictionaries and lists of tensors, sharded in whatever way over however
                many ranks; they are filled in place. Other values are replaced.

        Raises:
            CheckpointError: there is none of the name, or it holds others, or of other shapes.
        """
        if name not in self._plain:
            raise CheckpointError(
                f"{self.path}: has no sharded state {name!r}; it has {sorted(self._plain)}."
            )
        tensors, _ = flatten(name, target)
        load_shards(self.path / SHARDED / name, name, tensors, self._ranks)
        plain = self._plain[name]
        for holder, key, place, value in leaves(target):
            if not isinstance(value, torch.Tensor):
                if place not in plain:
                    raise CheckpointError(f"sharded {name!r}: {place!r} is not in the checkpoint.")
                holder[key] = plain[place]


def read_checkpoint(path: Path, tensorclasses: Mapping[str, Any], ranks: Ranks) -> Checkpoint:
    """Verify and read the checkpoint of a folder; all ranks call it together.

    Raises:
        CheckpointError: it is not whole.
    """
    with ranks.agreed():
        manifest = read_manifest(path)
        try:
            problems = problems_of(path, manifest, (ranks.rank, ranks.size))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error}).") from error
        if problems:
            raise CheckpointError("; ".join(problems) + ".")
        try:
            with open_file(path / STATE) as file:
                tree = json.loads(file.read(), parse_constant=_refuse)
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path / STATE}: {error or type(error).__name__}.") from error
        try:
            tensors: Any = safe_open(path / TENSORS, framework="pt")
        except Exception as error:
            raise CheckpointError(f"{path / TENSORS}: {error}.") from error
        with tensors:
            try:
                # A copy, since what the library gives is the file itself.
                decoder = Decoder(lambda name: tensors.get_tensor(name).clone(), tensorclasses)
                decoded = decoder.decode(tree)
            except Exception as error:
                # The file says what was never saved; whatever that leads to, the file is wrong.
                raise CheckpointError(
                    f"{path / STATE}: {error} ({type(error).__name__})."
                ) from error
        match decoded:
            case {"state": dict(state), "sharded": dict(plain)}:
                pass
            case _:
                raise CheckpointError(f"{path / STATE}: holds no state.")
    return Checkpoint(manifest["step"], state, path, manifest, plain, ranks)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
