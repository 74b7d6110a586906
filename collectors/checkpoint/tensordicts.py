"""TensorDicts, their stacks, and the tensorclasses that may be stored."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

import torch
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_tensorclass,
)

from torchrl_data.conversation.batched_object import BatchedObject, RowObjects, view_of
from torchrl_data.conversation.conversations import Conversations
from torchrl_data.conversation.record_state import conversation_states, conversations_from_states
from torchrl_data.layout.export import HistoryView

from .decoding import DECODERS, Decoder
from .encoding import TAG, Encoder, StagingBuffers
from .tensor_file import TensorFile

# Imported when a checkpoint has one, since some are expensive.
_OWN: Final = {
    "ChatHistory": "torchrl_data.layout.containers",
    "ContentBase": "torchrl_data.conversation.content",
    "History": "torchrl_data.history.history",
    "IFEvalScoreData": "torchrl_envs.tasks.ifeval",
    "LogProbs": "torchrl_data.layout.containers",
    "Masks": "torchrl_data.layout.containers",
    "Text": "torchrl_data.layout.containers",
    "Tokens": "torchrl_data.layout.containers",
}


class Tensorclasses:
    """The tensorclasses that may be stored and loaded, by name: this library's and some more.

    Args:
        further: classes of your own.

    Raises:
        TypeError: one is no tensorclass.
        ValueError: two have one name.
    """

    def __init__(self, further: Sequence[type] = ()) -> None:
        self._further: dict[str, type] = {}
        for cls in further:
            name = getattr(cls, "__name__", repr(cls))
            if not (isinstance(cls, type) and is_tensorclass(cls)):
                raise TypeError(f"CheckpointStore: tensorclasses has {name}, which is none.")
            if name in _OWN or name in self._further:
                raise ValueError(
                    f"CheckpointStore: tensorclasses has a second {name}; rename the class."
                )
            self._further[name] = cls

    def name(self, cls: type) -> str | None:
        """The name of a class that may be stored."""
        name = cls.__name__
        known = self._further.get(name) is cls or _OWN.get(name) == cls.__module__
        return name if known else None

    def named(self, name: Any) -> Any:
        """The class of a name.

        Raises:
            ValueError: there is none.
        """
        if name in self._further:
            return self._further[name]
        if name not in _OWN:
            raise ValueError(
                f"it holds the tensorclass {name!r:.80}, which is not listed in "
                "CheckpointStore(tensorclasses=)"
            )
        return getattr(import_module(_OWN[name]), name)


class StateEncoder(Encoder):
    """An encoder that knows TensorDicts, too."""

    def __init__(self, tensorclasses: Tensorclasses, buffers: StagingBuffers | None = None) -> None:
        super().__init__(buffers)
        self._tensorclasses = tensorclasses

    def _other(self, value: Any) -> Any:
        if (encode := _ENCODERS.get(type(value))) is not None:
            return encode(self, value)
        if is_tensorclass(value):
            return self._tensorclass(value)
        return super()._other(value)

    def _tensordict(self, value: TensorDict) -> Any:
        tree: dict[str, Any] = {TAG: "TensorDict", "size": list(value.batch_size)}
        if value.device is not None:
            tree["on_device"] = True
        if value._has_names():
            tree["names"] = list(value.names)
        tree["of"] = {key: self.under(key, item) for key, item in value.items()}
        return tree

    def _lazy_stack(self, value: LazyStackedTensorDict) -> Any:
        tree = {TAG: type(value).__name__, "dim": value.stack_dim}
        if value._has_names():
            tree["names"] = list(value.names)
        parts = enumerate(value.tensordicts)
        tree["of"] = [self.under(number, part) for number, part in parts]
        return tree

    def _non_tensor(self, value: NonTensorData) -> Any:
        data = self.encode(value.__dict__["_non_tensordict"]["data"])
        return {TAG: "NonTensorData", "size": list(value.batch_size), "of": data}

    def _batched_object(self, value: BatchedObject) -> Any:
        snapshot, view = value.snapshot(), view_of(value)
        if isinstance(snapshot, Conversations) and (view is None or type(view) is HistoryView):
            rows: Any = conversation_states(snapshot)
        elif type(snapshot) is RowObjects and view is None:
            rows = list(snapshot)
        else:
            shown = "" if view is None else f" shown by a {type(view).__name__}"
            raise self.error(
                f"cannot store rows of {type(snapshot).__name__}{shown}; store the rows of a "
                "collector"
            )
        return {
            TAG: "BatchedObject",
            "size": list(value.batch_size),
            "type": type(snapshot).__name__,
            "view": None if view is None else view.part,
            "of": self.encode(rows),
        }

    def _tensorclass(self, value: Any) -> Any:
        name = self._tensorclasses.name(type(value))
        if name is None:
            raise self.refused(value, "name its class in CheckpointStore(tensorclasses=[...])")
        fields = value.__dict__["_non_tensordict"]
        return {
            TAG: "tensorclass",
            "name": name,
            "of": self.encode(value.__dict__["_tensordict"]),
            "fields": {key: self.under(key, item) for key, item in fields.items()},
        }

    def _memory_mapped(self, value: MemoryMappedTensor) -> Any:
        return self._tensor(value.as_subclass(torch.Tensor))


_ENCODERS: Final[dict[Any, Callable[[Any, Any], Any]]] = {
    TensorDict: StateEncoder._tensordict,
    LazyStackedTensorDict: StateEncoder._lazy_stack,
    NonTensorStack: StateEncoder._lazy_stack,
    NonTensorData: StateEncoder._non_tensor,
    BatchedObject: StateEncoder._batched_object,
    MemoryMappedTensor: StateEncoder._memory_mapped,
}


class StateDecoder(Decoder):
    """A decoder that knows TensorDicts, too."""

    def __init__(self, tensors: TensorFile, tensorclasses: Tensorclasses) -> None:
        super().__init__(tensors)
        self._tensorclasses = tensorclasses

    def kinds(self) -> dict[str, Callable[[Any, dict[str, Any]], Any]]:
        """How each kind of tagged object is read."""
        return _DECODERS

    def _tensordict(self, tree: dict[str, Any]) -> TensorDict:
        size = torch.Size(tree["size"])
        entries = {key: self.decode(item) for key, item in _mapping(tree["of"]).items()}
        for key, item in entries.items():
            shape = getattr(item, "shape", None)
            if shape is None or shape[: len(size)] != size:
                raise ValueError(
                    f"the entry {key!r:.80} of a TensorDict {list(size)} is a "
                    f"{type(item).__name__} of the shape {shape}"
                )
        device = torch.device("cpu") if tree.get("on_device") else None
        value = TensorDict._new_unsafe(entries, batch_size=size, device=device)
        if "names" in tree:
            value.names = tree["names"]
        return value

    def _lazy_stack(self, tree: dict[str, Any]) -> LazyStackedTensorDict:
        cls: Any = NonTensorStack if tree[TAG] == "NonTensorStack" else LazyStackedTensorDict
        value = cls(*self._list(tree["of"]), stack_dim=tree["dim"])
        if "names" in tree:
            value.names = tree["names"]
        return value

    def _non_tensor(self, tree: dict[str, Any]) -> NonTensorData:
        return NonTensorData(self.decode(tree["of"]), batch_size=tree["size"])

    def _batched_object(self, tree: dict[str, Any]) -> BatchedObject:
        rows, view = self._list(tree["of"]), tree["view"]
        size = torch.Size(tree["size"])
        if len(rows) != size.numel():
            raise ValueError(f"a batch {list(size)} has {len(rows)} values")
        snapshot: Any = RowObjects(rows)
        if tree["type"] == "Conversations":
            snapshot = conversations_from_states(rows)
        return BatchedObject.of(snapshot, size, view=None if view is None else HistoryView(view))

    def _tensorclass(self, tree: dict[str, Any]) -> Any:
        cls = self._tensorclasses.named(tree["name"])
        fields = {key: self.decode(item) for key, item in _mapping(tree["fields"]).items()}
        return cls._from_tensordict(self.decode(tree["of"]), fields)


def _mapping(tree: Any) -> Mapping[str, Any]:
    if not isinstance(tree, dict):
        raise ValueError(f"it holds a {type(tree).__name__} where entries by name belong")
    return tree


_DECODERS: Final[dict[str, Callable[[Any, dict[str, Any]], Any]]] = {
    **DECODERS,
    "TensorDict": StateDecoder._tensordict,
    "LazyStackedTensorDict": StateDecoder._lazy_stack,
    "NonTensorStack": StateDecoder._lazy_stack,
    "NonTensorData": StateDecoder._non_tensor,
    "BatchedObject": StateDecoder._batched_object,
    "tensorclass": StateDecoder._tensorclass,
}
