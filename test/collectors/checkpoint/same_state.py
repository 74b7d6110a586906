"""Equality of states to the bit and to the type, worked out without the code under test."""

from collections import OrderedDict

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDictBase, is_tensorclass

from torchrl_data.batched_object import BatchedObject, view_of


def assert_same(found, saved, at="state"):
    assert type(found) is type(saved), f"{at}: {type(found)} was {type(saved)}"
    for kind, check in CHECKS.items():
        if isinstance(saved, kind):
            check(found, saved, at)
            return
    if is_tensorclass(saved):
        assert_same(found._tensordict, saved._tensordict, at)
        assert found._non_tensordict == saved._non_tensordict, at
        return
    assert found == saved, at


def _dict(found, saved, at):
    # As lists: the order counts, and 1 is not "1".
    assert list(map(repr, found)) == list(map(repr, saved)), at
    for key in saved:
        assert_same(found[key], saved[key], f"{at}[{key!r}]")
    if isinstance(saved, OrderedDict):
        assert getattr(found, "_metadata", None) == getattr(saved, "_metadata", None), at


def _sequence(found, saved, at):
    assert len(found) == len(saved), at
    for i, (one, other) in enumerate(zip(found, saved, strict=True)):
        assert_same(one, other, f"{at}[{i}]")


def _float(found, saved, at):
    assert np.float64(found).tobytes() == np.float64(saved).tobytes(), at


def _tensor(found, saved, at):
    saved = saved.detach().cpu().resolve_conj().resolve_neg()
    assert (found.dtype, found.shape) == (saved.dtype, saved.shape), at
    one, other = (x.contiguous().as_strided((x.numel(),), (1,)) for x in (found, saved))
    one, other = one.view(torch.uint8), other.view(torch.uint8)
    assert torch.equal(one, other), at


def _array(found, saved, at):
    assert (found.dtype.str, found.shape) == (saved.dtype.str, saved.shape), at
    assert found.tobytes() == saved.tobytes(), at


def _batched_object(found, saved, at):
    assert found.batch_size == saved.batch_size, at
    assert view_of(found) == view_of(saved), at
    assert_same(found.snapshot(), saved.snapshot(), f"{at}.snapshot")


def _non_tensor(found, saved, at):
    assert found.batch_size == saved.batch_size, at
    assert_same(found.data, saved.data, f"{at}.data")


def _lazy_stack(found, saved, at):
    assert (found.stack_dim, found.names) == (saved.stack_dim, saved.names), at
    assert_same(found.tensordicts, saved.tensordicts, at)


def _tensordict(found, saved, at):
    assert (found.batch_size, found.names) == (saved.batch_size, saved.names), at
    assert (found.device is None) == (saved.device is None), at
    assert_same(dict(found.items()), dict(saved.items()), at)


CHECKS = {
    dict: _dict,
    (np.ndarray, np.generic): _array,
    float: _float,
    torch.Tensor: _tensor,
    BatchedObject: _batched_object,
    NonTensorData: _non_tensor,
    (list, tuple): _sequence,
    LazyStackedTensorDict: _lazy_stack,
    TensorDictBase: _tensordict,
}
