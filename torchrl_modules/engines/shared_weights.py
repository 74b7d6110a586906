"""Frozen weights that the models of several engines have in common: adapters over one base.

What draws has them once, and an update of one engine leaves them as they are.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import accumulate, chain

from torch import Tensor

from torchrl_modules.scoring.wrapped_models import without_ddp

from .transformers import TransformersEngine


def note_shared_weights(engines: Iterable[object]) -> None:
    """Let an update of one engine leave the weights as they are that others draw with, too.

    Args:
        engines: those of this process that share frozen tensors are changed in place.
    """
    own = [engine for engine in engines if isinstance(engine, TransformersEngine)]
    shared = {id(value) for value in _shared(own)}
    for engine in own:
        state = without_ddp(engine.model).state_dict(keep_vars=True)
        names = {name for name, value in state.items() if id(value) in shared}
        # What belongs to a weight of 4 bits, such as its scales, has a name that goes on from its.
        names |= {name for name in state if not names.isdisjoint(accumulate(name.split("."), _dot))}
        engine.shared_names = engine.shared_names | names


def copies_of_shared(engines: Iterable[object]) -> dict[int, Tensor]:
    """One copy of each frozen tensor that several engines of this process have.

    Args:
        engines: any; others than those over a Transformers model share nothing.

    Returns:
        By the ``id`` of the tensor, for :meth:`.TransformersEngine.copied`.
    """
    shared = _shared(engine for engine in engines if isinstance(engine, TransformersEngine))
    # In one call: those that are views of one memory stay so.
    return dict(zip(map(id, shared), deepcopy(shared), strict=True))


def _dot(beginning: str, part: str) -> str:
    return f"{beginning}.{part}"


def _shared(engines: Iterable[TransformersEngine]) -> list[Tensor]:
    """The frozen parameters and the buffers that more than one engine's model has."""
    tensors: dict[int, Tensor] = {}
    count: Counter[int] = Counter()
    for engine in engines:
        of_model = {id(value): value for value in _frozen(engine)}
        tensors |= of_model
        count.update(of_model.keys())
    return [value for at, value in tensors.items() if count[at] > 1]


def _frozen(engine: TransformersEngine) -> Iterator[Tensor]:
    model = engine.inside
    return (x for x in chain(model.parameters(), model.buffers()) if not x.requires_grad)
