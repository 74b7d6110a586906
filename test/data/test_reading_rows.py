"""Ragged rows read the same, whatever a batch holds them in."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from tokenizers_for_tests import EXAMPLES

from torchrl_data import Tokens
from torchrl_data.batched_object import write_objects
from torchrl_data.ragged.packed import read_rows

KEY = ("tokens", "full")
some_rows = st.lists(st.lists(st.integers(0, 1000), max_size=6), min_size=1, max_size=5)


def tensors(rows):
    return [torch.tensor(row, dtype=torch.int64) for row in rows]


def stack_of_rows(rows):
    return lazy_stack([TensorDict({KEY: row}) for row in tensors(rows)])


def rows_of_one_dimension_more(rows):
    return lazy_stack([TensorDict({KEY: row[:, None]}) for row in tensors(rows)])


def ragged_group(rows):
    return TensorDict({"tokens": Tokens.from_rows(full=tensors(rows))}, [len(rows)])


def jagged(rows):
    value = torch.nested.nested_tensor(tensors(rows), layout=torch.jagged)
    return TensorDict({KEY: value}, [len(rows)])


def strided(rows):
    value = torch.nested.nested_tensor(tensors(rows))
    return TensorDict({KEY: value}, [len(rows)])


def python_lists(rows):
    batch = TensorDict({"tokens": TensorDict(batch_size=[len(rows)])}, [len(rows)])
    batch["tokens"].set("full", NonTensorStack(*map(NonTensorData, rows)))
    return batch


def one_object_per_row(rows):
    batch = TensorDict({"tokens": TensorDict(batch_size=[len(rows)])}, [len(rows)])
    write_objects(batch["tokens"], "full", tensors(rows))
    return batch


def stack_of_stacks(rows):
    return lazy_stack([stack_of_rows(rows[:1]), stack_of_rows(rows[:1])])


RAGGED = [
    stack_of_rows,
    rows_of_one_dimension_more,
    ragged_group,
    jagged,
    strided,
    python_lists,
    one_object_per_row,
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("layout", RAGGED, ids=lambda layout: layout.__name__)
@given(rows=some_rows)
@EXAMPLES
def test_every_layout_gives_the_same_rows(layout, rows):
    found = read_rows(layout(rows), KEY)
    assert found is not None
    assert found.lengths.tolist() == [len(row) for row in rows]
    assert found.values.tolist() == [value for row in rows for value in row]
    assert [row.tolist() for row in found.split()] == rows


@given(size=st.tuples(st.integers(0, 3), st.integers(1, 3)), length=st.integers(0, 4))
@EXAMPLES
def test_a_dense_entry_has_rows_of_one_length(size, length):
    value = torch.arange(size[0] * size[1] * length).view(*size, length)
    rows = read_rows(TensorDict({KEY: value}, batch_size=size), KEY)
    assert rows is not None
    assert rows.lengths.tolist() == [length] * (size[0] * size[1])
    assert rows.values.tolist() == list(range(value.numel()))


def test_a_batch_of_two_dimensions_is_read_row_by_row():
    rows = read_rows(stack_of_stacks([[4, 5, 6]]), KEY)
    assert rows is not None
    assert [row.tolist() for row in rows.split()] == [[4, 5, 6], [4, 5, 6]]


def test_a_row_by_itself_is_one_row():
    rows = read_rows(TensorDict({"advantage": torch.tensor([[0.5]])}), "advantage")
    assert rows is not None
    assert (rows.values.tolist(), rows.lengths.tolist()) == ([0.5], [1])


@given(data=st.data(), rows=some_rows)
@EXAMPLES
def test_where_keeps_the_masked_values_of_each_row(data, rows):
    masks = [data.draw(st.lists(st.booleans(), min_size=len(r), max_size=len(r))) for r in rows]
    packed = read_rows(stack_of_rows(rows), KEY)
    assert packed is not None
    mask = torch.tensor([keep for row in masks for keep in row], dtype=torch.bool)
    kept = [
        [v for v, keep in zip(*pair, strict=True) if keep] for pair in zip(rows, masks, strict=True)
    ]
    assert [row.tolist() for row in packed.where(mask).split()] == kept


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(TensorDict(batch_size=[2]), id="no group"),
        pytest.param(TensorDict({KEY[0]: torch.zeros(2, 3)}, [2]), id="a value, not a group"),
        pytest.param(TensorDict({(*KEY, "more"): torch.zeros(2)}, [2]), id="a group, not a value"),
        pytest.param(
            lazy_stack([TensorDict({KEY: torch.zeros(2)}), TensorDict({"other": torch.zeros(2)})]),
            id="one row lacks it",
        ),
        pytest.param(
            TensorDict({"tokens": Tokens(prompt=torch.zeros(2, 1), batch_size=[2])}, [2]),
            id="an unset field",
        ),
    ],
)
def test_what_a_batch_or_one_of_its_rows_lacks_is_none(batch):
    assert read_rows(batch, KEY) is None
