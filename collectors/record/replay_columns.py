"""Sampling masks and routed experts of a recorded row, as JSON has values.

Both are bytes already when a row carries them; a record has these bytes in base64, which its
compression makes small again.

Shape legend: T tokens of a row, L layers with experts, S experts of a token.
"""

import binascii
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

_TYPES: Final = ("uint8", "int16")


def masks_to_json(sets: Sequence[bytes]) -> dict[str, Any] | None:
    """Write the sets that the tokens of a row were drawn from.

    Args:
        sets: T, as :meth:`~torchrl_data.SamplingMasks.sets` gives them; empty where there is none.

    Returns:
        ``lengths``, T numbers of bytes, and ``bytes``, those of all sets in base64; ``None`` where
        no token has a set.
    """
    if not any(sets):
        return None
    return {"lengths": [len(each) for each in sets], "bytes": b64encode(b"".join(sets)).decode()}


def masks_from_json(column: Mapping[str, Any] | None, num_tokens: int) -> list[bytes]:
    """Read what :func:`masks_to_json` wrote.

    Args:
        column: that; ``None`` where there is none.
        num_tokens: T, of the row.

    Returns:
        T sets; none at all where nothing is recorded.

    Raises:
        ValueError: it is damaged, or of another row.
    """
    if column is None:
        return []
    data, lengths = _decode(column, "sampling_masks"), column["lengths"]
    if len(lengths) != num_tokens or min(lengths, default=0) < 0 or sum(lengths) != len(data):
        raise ValueError(
            f"A record's sampling_masks are of {len(lengths)} tokens and {sum(lengths)} bytes, and "
            f"there are {num_tokens} tokens and {len(data)} bytes: it is damaged."
        )
    sets, start = [], 0
    for length in lengths:
        sets.append(data[start : start + length])
        start += length
    return sets


def experts_to_json(experts: Tensor | None) -> dict[str, Any] | None:
    """Write the experts that the tokens of a row went to.

    Args:
        experts: uint8 or int16 ``[T, L, S]``; ``None`` where there are none.

    Returns:
        ``shape``, ``dtype`` and ``bytes``, row by row and little endian, in base64; or ``None``.
    """
    if experts is None:
        return None
    dtype = str(experts.dtype).removeprefix("torch.")
    data = experts.cpu().contiguous().numpy().astype(np.dtype(dtype).newbyteorder("<"))
    return {
        "shape": list(experts.shape),
        "dtype": dtype,
        "bytes": b64encode(data.tobytes()).decode(),
    }


def experts_from_json(column: Mapping[str, Any] | None, num_tokens: int) -> Tensor | None:
    """Read what :func:`experts_to_json` wrote.

    Args:
        column: that; ``None`` where there is none.
        num_tokens: T, of the row.

    Returns:
        ``[T, L, S]`` in its type, or ``None``.

    Raises:
        ValueError: it is damaged, or of another row.
    """
    if column is None:
        return None
    data, shape, name = _decode(column, "routed_experts"), column["shape"], column["dtype"]
    if name not in _TYPES:
        raise ValueError(
            f"A record's routed_experts are {name}, and must be one of {', '.join(_TYPES)}."
        )
    dtype = np.dtype(name).newbyteorder("<")
    is_whole = len(shape) == 3 and min(shape) >= 0 and shape[0] == num_tokens
    if not is_whole or int(np.prod(shape)) * dtype.itemsize != len(data):
        raise ValueError(
            f"A record's routed_experts are {shape} of {name} in {len(data)} bytes, and there are "
            f"{num_tokens} tokens: it is damaged."
        )
    values = np.frombuffer(data, dtype).astype(np.dtype(name))
    return torch.from_numpy(values).reshape(shape)


def _decode(column: Mapping[str, Any], name: str) -> bytes:
    try:
        return b64decode(column["bytes"], validate=True)
    except (KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f"A record's {name} can't be read: {error!r}.") from error
