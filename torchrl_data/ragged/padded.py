"""Padded form of the token entries of a batch: prompt on the left, response on the right.

Shape legend: B rows, P and R tokens of the longest prompt and response.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import (
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)

from torchrl_data.keys import (
    FULL,
    MASKS,
    PROMPT,
    RESPONSE,
    ROUTED_EXPERTS,
    SAMPLING_MASK,
    TOKENS,
)
from torchrl_data.routed_experts import unknown_expert
from torchrl_data.sampling_masks import BYTES, LENGTHS

from .packed import entries_of, pad

_FILL = {"policy_versions": -1}


def _padded_experts(rows: Sequence[TensorDictBase], starts: Sequence[int]) -> torch.Tensor:
    """Experts ``[B, P + R, L, S]``, 255 or -1 in the gaps."""
    values = [row.get((ROUTED_EXPERTS, FULL)) for row in rows]
    options: dict[str, Any] = {
        "batch_first": True,
        "padding_value": unknown_expert(values[0].dtype),
    }
    pairs = list(zip(values, starts, strict=True))
    sequence = torch.nn.utils.rnn.pad_sequence
    left = sequence([v[:n] for v, n in pairs], padding_side="left", **options)
    return torch.cat([left, sequence([v[n:] for v, n in pairs], **options)], 1)


def padded_rows(rows: Sequence[TensorDictBase], *, pad_token_id: int) -> TensorDict:
    """Pad what :func:`~torchrl_data.row_tensordicts` gives.

    Args:
        rows: B rows, at least one, of the same entries.
        pad_token_id: fills the gaps of the tokens; ``("masks", "all_attention_mask")`` tells them
            from real ones.

    Returns:
        Dense entries: ``prompt`` ``[B, P]`` padded on the left, ``response`` ``[B, R]`` on the
        right, ``full`` and the masks ``[B, P + R]``. Gaps are False in masks, -1 in policy
        versions, 0 in what else there is.
    """
    starts = [row.get((TOKENS, PROMPT)).shape[-1] for row in rows]
    padded = TensorDict(batch_size=[len(rows)])
    if ROUTED_EXPERTS in rows[0].keys():  # noqa: SIM118
        padded.set((ROUTED_EXPERTS, FULL), _padded_experts(rows, starts))
    for group, entries in rows[0].items():
        fill = pad_token_id if group == TOKENS else _FILL.get(group, 0)
        is_group = is_tensor_collection(entries) and group != ROUTED_EXPERTS
        for name in entries_of(entries).keys() if is_group else ():
            assert name in (PROMPT, RESPONSE, FULL, LENGTHS, BYTES) or group == MASKS
            values = [row.get((group, name)) for row in rows]
            if (group, name) == (SAMPLING_MASK, BYTES):  # in the order of the tokens, without gaps
                padded.set((group, name), pad(values, value=0))
                continue
            cuts = {PROMPT: map(len, values), RESPONSE: [0] * len(rows)}.get(name, starts)
            parts = [(value[:n], value[n:]) for value, n in zip(values, cuts, strict=True)]
            left = pad([part for part, _ in parts], value=fill, side="left")
            right = pad([part for _, part in parts], value=fill)
            padded.set((group, name), torch.cat([left, right], -1))
    return padded
