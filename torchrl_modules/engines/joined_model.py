"""One model in the place of several that are adapters over one base: a pass reads rows of all.

Drawing a token reads every weight once, for however many rows. Models that are drawn from one
after the other read their base once each; joined, they read it once. A layer with adapters
multiplies by those of all models at once, and of each row all but its own model's are multiplied
by 0. (Chen et al., 2024, Punica, arXiv:2310.18547, gather each row's own in a kernel; models of
one training run are few, and their ranks are small.)

Whose row it is follows from its token ids: those of model m are counted on from m times the number
of embeddings. So rows of two models have no token in common for whatever compares rows: equal
prompts, shared prefixes, and caches of earlier turns.

Shape legend: A rows, T tokens, M models, R rank of all adapters of a layer, D inputs, E outputs.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init
from transformers import PreTrainedModel

from torchrl_modules.scoring.wrapped_models import has_hooks, is_distributed, tuned_layers

from .cast_weights import twin_of


class CannotJoinError(ValueError):
    """Models have to be drawn from one by one; the message says why."""


class JoinedModel:
    """Computes each row with the adapters of its own model.

    Args:
        models: over one base, whose tensors they share. Some may have no adapters, and a layer may
            have some in a few of them only. One may be there several times.
        acting: the names of the adapters of each that act; those that act in its own layers when
            not given.

    Raises:
        CannotJoinError: they have not one base, or adapters of another kind than plain LoRA.
    """

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        acting: Sequence[Collection[str]] | None = None,
    ) -> None:
        _check_base(models, acting)
        self.model: Any = twin_of(models[0])
        """It draws; its adapters are current after :meth:`refresh`."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        """Parts of its own adapters, and the adapters of models that belong there."""
        embedding = self.model.get_input_embeddings()
        self._num_ids = embedding.num_embeddings
        rows = _RowsOfModels()
        for name in dict.fromkeys(name for model in models for name in tuned_layers(model)):
            layers: list[Any] = [model.get_submodule(name) for model in models]
            own = [
                each
                for number, layer in enumerate(layers)
                for each in _adapters(number, layer, None if acting is None else acting[number])
            ]
            self._join_layer(name, own, len(models), rows)
        if tuned_layers(self.model):
            raise CannotJoinError("a layer with adapters is in two places")
        self.model.set_input_embeddings(_EmbeddingOfModels(embedding, rows))
        self.refresh()

    def mark(self, number: int) -> int:
        """Say what is added to the token ids of a model.

        Args:
            number: of the model, in the order in which they were given.
        """
        return number * self._num_ids

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the adapters of all models as they are now."""
        for own, source in self._copies:
            own.copy_(source)

    def _join_layer(
        self, name: str, adapters: Sequence["_Adapter"], num_models: int, rows: "_RowsOfModels"
    ) -> None:
        """Put a layer with the adapters of all models in the place of the first model's."""
        here = self.model.get_submodule(name)
        joined: nn.Module = getattr(here, "base_layer", here)
        if adapters:
            own = _JoinedLinear(joined, adapters, rows, num_models)
            self._copies += own.copies(adapters)
            joined = own
        above, _, last = name.rpartition(".")
        setattr(self.model.get_submodule(above), last, joined)


class _Adapter(NamedTuple):
    """Of one model, in one layer."""

    number: int
    """Of the model."""
    down: Tensor
    """``[r, D]``."""
    up: Tensor
    """``[E, r]``."""
    scale: float


class _RowsOfModels:
    """The models that a pass has rows of: the embedding says so, and the layers behind it ask."""

    def __init__(self) -> None:
        self._scales: dict[tuple[tuple[float, ...], ...], int] = {}
        self.tables: list[Tensor] = []
        """Each ``[M, R]``: of a model, the scale of its own columns, and 0 for those of others."""
        self.scales: list[Tensor] = []
        """The same of each row of this pass, ``[A, 1, R]``."""

    def table(self, values: list[list[float]], like: Tensor) -> int:
        """The number of a table; layers whose adapters are alike have one."""
        number = self._scales.setdefault(tuple(map(tuple, values)), len(self.tables))
        if number == len(self.tables):
            self.tables.append(torch.tensor(values, device=like.device))
        return number

    def begin(self, numbers: Tensor) -> None:
        """A pass begins, with rows of these models, int64 ``[A]``."""
        self.scales = [table[numbers][:, None] for table in self.tables]


class _EmbeddingOfModels(nn.Module):
    """Reads token ids that say whose they are."""

    def __init__(self, embedding: nn.Embedding, rows: _RowsOfModels) -> None:
        super().__init__()
        self.embedding = embedding
        self._rows = rows
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim

    @property
    def weight(self) -> Tensor:
        """Of the embedding."""
        return self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Embed ``[A, T]``; what pads a row on the left is anybody's."""
        self._rows.begin(ids[:, -1] // self.num_embeddings)
        return self.embedding(ids % self.num_embeddings)


class _JoinedLinear(nn.Module):
    """A linear layer with the adapters of all models, of which each row has its own model's."""

    def __init__(
        self,
        base_layer: nn.Module,
        adapters: Sequence[_Adapter],
        rows: _RowsOfModels,
        num_models: int,
    ) -> None:
        super().__init__()
        dtypes = {x.dtype for each in adapters for x in (each.down, each.up)}
        if len(dtypes) > 1:
            raise CannotJoinError(f"adapters of one layer have {sorted(map(str, dtypes))}")
        like, rank = adapters[0].down, sum(len(each.down) for each in adapters)
        options: dict[str, Any] = {"bias": False, "device": like.device, "dtype": like.dtype}
        self.base_layer = base_layer
        # Not initialised: torch's generator is that of the run.
        linear: Any = partial(skip_init, nn.Linear, **options)
        self.down: nn.Linear = linear(like.shape[1], rank).requires_grad_(False)
        self.up: nn.Linear = linear(rank, len(adapters[0].up)).requires_grad_(False)
        scales = [
            [each.scale * (each.number == number) for each in adapters for _ in each.down]
            for number in range(num_models)
        ]
        self._rows, self._table = rows, rows.table(scales, like)

    def copies(self, adapters: Sequence[_Adapter]) -> Iterator[tuple[Tensor, Tensor]]:
        """Its parts, and where they are copied from."""
        begin = 0
        for each in adapters:
            end = begin + len(each.down)
            yield self.down.weight[begin:end], each.down
            yield self.up.weight[:, begin:end], each.up
            begin = end

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``[A, T, E]`` of ``[A, T, D]``."""
        scales = self._rows.scales[self._table]
        if x.dim() != 3 or len(x) != len(scales):
            raise ValueError(f"a layer gets {tuple(x.shape)}, of {len(scales)} rows")
        result = self.base_layer(x)
        inner = self.down(x.to(self.down.weight.dtype))
        return (result + self.up(inner * scales.to(inner.dtype))).to(result.dtype)


def _names(layer: Any, acting: Collection[str] | None) -> Collection[str]:
    """The names of the adapters of a layer that act on what it computes."""
    # A layer without adapters has none of these attributes.
    own = () if getattr(layer, "disable_adapters", True) else layer.active_adapters
    names = own if acting is None else acting
    return [name for name in names if name in getattr(layer, "lora_A", ())]


def _adapters(number: int, layer: Any, acting: Collection[str] | None) -> Iterator[_Adapter]:
    """The adapters of one model that act on what a layer computes."""
    for name in _names(layer, acting):
        down, up = layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach()
        yield _Adapter(number, down, up, layer.scaling[name])


def _check_base(
    models: Sequence[PreTrainedModel], acting: Sequence[Collection[str]] | None
) -> None:
    """Check that models differ in plain adapters alone.

    Raises:
        CannotJoinError: they do not; the message says in which.
    """
    if any(has_hooks(model) or is_distributed(model) for model in models):
        raise CannotJoinError("a model has hooks")
    for number, model in enumerate(models):
        for name, layer in tuned_layers(model).items():
            if (kind := _other_kind(layer, None if acting is None else acting[number])) is not None:
                raise CannotJoinError(f"{name} has {kind}")
    if not isinstance(models[0].get_input_embeddings(), nn.Embedding):
        raise CannotJoinError("the input embedding is no plain one")
    base, *others = map(_base_of, models)
    for other in others:
        different = [name for name in {**base, **other} if base.get(name) is not other.get(name)]
        if different:
            raise CannotJoinError(f"{different[0]} is not the same in all models")


def _other_kind(layer: Any, acting: Collection[str] | None) -> str | None:
    """The kind of adapters that a layer has, if it is not plain LoRA that can be joined."""
    names = _names(layer, acting)
    module = type(layer).__module__
    if not (module == "peft.tuners.lora.layer" and type(layer).__name__ == "Linear"):
        return f"adapters of {module}.{type(layer).__name__}"
    if not isinstance(layer.base_layer, nn.Linear) or layer.fan_in_fan_out:
        return f"adapters over {type(layer.base_layer).__name__}"
    if layer.merged:
        return "merged adapters"
    if any(name in layer.lora_variant for name in names):
        return "adapters of another kind than plain LoRA, such as DoRA"
    if any(layer.lora_B[name].bias is not None for name in names):
        return "adapters with a bias"
    return None


def _base_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """All tensors of a model but its adapters, by the names that they have without any."""
    named = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return {name.replace(".base_layer.", "."): x for name, x in named if ".lora_" not in name}
