"""Any nested state comes back to the bit and with its types, waited for or not."""

import struct
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from same_state import assert_same
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from collectors import CheckpointStore
from collectors.checkpoint import files

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128),
    *(torch.int64, torch.uint8, torch.bool, torch.uint16, torch.float8_e5m2),
]
# Every NaN, too: any eight bytes are a float.
floats = st.binary(min_size=8, max_size=8).map(lambda data: struct.unpack("<d", data)[0])
text = st.text(st.characters(), max_size=6)
plain = st.one_of(
    *(st.none(), st.booleans(), st.integers(), floats, text, st.binary(max_size=4)),
    st.sampled_from([2**600, -(2**4096), -0.0, "!", float("inf")]),
)


@st.composite
def tensors(draw, batch=()):
    shape = [*batch, *draw(st.lists(st.integers(0, 3), max_size=2))]
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 99))
    most = 2 if dtype == torch.bool else 256
    value = torch.empty(shape, dtype=dtype)
    if value.numel():
        data = np.random.default_rng(seed).integers(0, most, value.nbytes, np.uint8)
        value.view(-1).view(torch.uint8).copy_(torch.from_numpy(data))
    # Other ways to lie in memory.
    how = draw(st.sampled_from(["as it is", "turned", "every other"]))
    if how == "turned" and len(shape) == 2:
        return value.t().contiguous().t()
    if how == "every other" and shape:
        return torch.stack([value, value], -1)[..., 0]
    return value


arrays = st.builds(
    lambda seed, shape, dtype: np.random.default_rng(seed).integers(0, 99, shape).astype(dtype),
    st.integers(0, 99),
    st.lists(st.integers(0, 3), max_size=2).map(tuple),
    st.sampled_from(["<i4", ">f8", "<u2", "?", "<c8", "<U3", "S2"]),
)
keys = st.one_of(text, st.integers(-3, 3), st.sampled_from(["!", "0", "1", "of"]))


# What rows hold beside tensors.
nested = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2).map(tuple),
        st.lists(inner, max_size=2),
        st.dictionaries(keys, inner, max_size=2),
    ),
    max_leaves=4,
)


@st.composite
def tensordicts(draw):
    batch = torch.Size(draw(st.sampled_from([(), (2,), (2, 3)])))
    names = draw(st.lists(st.sampled_from(["a", "b.c", "row"]), unique=True, min_size=1))
    leaf = st.one_of(
        tensors(batch),
        nested.map(lambda value: NonTensorData(value, batch_size=batch)),
        st.just(TensorDict({}, batch_size=batch)),
    )
    one = TensorDict._new_unsafe({name: draw(leaf) for name in names}, batch_size=batch)
    if draw(st.booleans()):
        return one
    other = {name: draw(leaf) for name in names}
    ragged = TensorDict._new_unsafe(other, batch_size=batch)
    stacks = [
        LazyStackedTensorDict(one, ragged, stack_dim=draw(st.integers(0, len(batch)))),
        NonTensorStack(*[NonTensorData(draw(nested), batch_size=batch) for _ in range(2)]),
    ]
    return draw(st.sampled_from(stacks))


values = st.recursive(
    st.one_of(plain, tensors(), arrays),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        tensordicts(),
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    "value",
    [
        *(datetime(2026, 1, 2), datetime(2026, 1, 2, 3, 4, 5, 6), date(2026, 1, 2), time(3, 4)),
        datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=-5))),
        *(Decimal("1.50"), Decimal("-1E+9"), pd.Timestamp("2026-01-02 03:04:05.123456789")),
    ],
    ids=repr,
)
def test_what_columns_of_data_sets_hold_comes_back(value, tmp_path):
    with CheckpointStore(tmp_path, on_error="raise") as store:
        store.save(1, {"value": value})
        found = store.load().state["value"]
    assert (type(found), repr(found)) == (type(value), repr(value))


@settings(derandomize=True, deadline=None, phases=(Phase.generate, Phase.shrink))
@given(value=values, wait=st.booleans())
def test_any_state_comes_back(tmp_path_factory, value, wait):
    synced, files.os.fsync = files.os.fsync, lambda _: None
    try:
        folder = tmp_path_factory.mktemp("any")
        with CheckpointStore(folder, on_error="raise") as store:
            store.save(1, {"value": value}, wait=wait)
            assert_same(store.load().state["value"], value)
    finally:
        files.os.fsync = synced
