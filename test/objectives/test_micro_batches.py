"""A batch that is packed once: its parts hold every row once, and train like the whole."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from objectives import DistillationLoss, GRPOLoss, PackedBatch, SFTLoss


def make_packed(lengths, target_lengths):
    """Rows whose values tell where they come from: id = 100 row + position."""
    ids, mask, entry = [], [], []
    for row, (length, targets) in enumerate(zip(lengths, target_lengths, strict=True)):
        ids += [100 * row + i for i in range(length)]
        mask += [i >= length - targets for i in range(length)]
        entry += [100 * row + i for i in range(length - targets, length)]
    return PackedBatch(
        ids=torch.tensor(ids, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        target_mask=torch.tensor(mask, dtype=torch.bool),
        target_lengths=torch.tensor(target_lengths, dtype=torch.int64),
        sampled=torch.ones(len(entry), dtype=torch.bool),
        entries={"advantage": torch.tensor(entry, dtype=torch.float32)},
    )


def rows_of(packed):
    """Each row as (ids, mask, advantages)."""
    ids = packed.ids.split(packed.lengths.tolist())
    masks = packed.target_mask.split(packed.lengths.tolist())
    values = packed.entries["advantage"].split(packed.target_lengths.tolist())
    return [
        (i.tolist(), m.tolist(), v.tolist()) for i, m, v in zip(ids, masks, values, strict=True)
    ]


row_sizes = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6)), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sizes=row_sizes, limit=st.integers(1, 12))
def test_parts_hold_every_row_once_and_keep_to_the_limit(sizes, limit):
    lengths = [length for length, _ in sizes]
    packed = make_packed(lengths, [min(targets, length) for length, targets in sizes])
    parts = list(packed.micro_batches(max_tokens=limit))
    assert [row for part in parts for row in rows_of(part)] == rows_of(packed)
    assert all(len(part.ids) <= limit or part.num_rows == 1 for part in parts)
    # As few parts as a run in order allows: no two neighbours would fit together.
    pairs = itertools.pairwise(parts)
    assert all(len(left.ids) + int(right.lengths[0]) > limit for left, right in pairs)
    by_rows = list(packed.micro_batches(num_rows=limit))
    assert [row for part in by_rows for row in rows_of(part)] == rows_of(packed)
    assert [part.num_rows for part in by_rows[:-1]] == [limit] * (len(by_rows) - 1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sizes=row_sizes, data=st.data())
def test_rows_are_taken_in_any_order(sizes, data):
    lengths = [length for length, _ in sizes]
    packed = make_packed(lengths, [min(targets, length) for length, targets in sizes])
    rows = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=6))
    got = rows_of(packed.take_rows(torch.tensor(rows, dtype=torch.int64)))
    assert got == [rows_of(packed)[row] for row in rows]
    keep = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    )
    got = rows_of(packed.take_rows(keep))
    assert got == [row for row, kept in zip(rows_of(packed), keep.tolist(), strict=True) if kept]


@pytest.mark.parametrize(
    "limits", [{}, {"max_tokens": 4, "num_rows": 1}, {"max_tokens": 0}], ids=["none", "both", "0"]
)
def test_a_limit_that_is_none_raises(limits):
    with pytest.raises(ValueError, match="max_tokens or num_rows"):
        next(make_packed([2], [1]).micro_batches(**limits))


def with_teacher(batch):
    for row in batch.unbind(0):
        row["next", "teacher_log_probs", "full"] = row["next", "ref_log_probs", "full"]
    return batch


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (GRPOLoss, {"kl_to_ref_coeff": 0.1}),
        (SFTLoss, {"kl_to_ref_coeff": 0.1}),
        (DistillationLoss, {"aggregation": "fixed_length", "max_tokens": 9}),
    ],
    ids=["grpo", "sft", "distillation"],
)
def test_packed_once_and_trained_in_parts_is_the_gradient_of_the_whole(
    make_scorer, make_batch, loss, options
):
    batch = with_teacher(make_batch())
    whole, parts = make_scorer(), make_scorer()
    loss(whole, **options)(batch).total().backward()
    module = loss(parts, **options)
    packed = module.pack(batch)
    assert module.pack(packed) is packed
    window = module.measure_window(packed)
    assert window == module.measure_window(batch) == module.measure_window(batch.split(2))
    shuffled = packed.take_rows(torch.randperm(packed.num_rows))
    for part in shuffled.micro_batches(num_rows=2):
        module(part, window=window).total().backward()
    assert whole.table.grad.abs().max() > 0
    torch.testing.assert_close(parts.table.grad, whole.table.grad)
