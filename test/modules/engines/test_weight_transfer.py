"""Weights as one flat run of bytes, and the group that carries them."""

import math
import socket
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from torchrl_modules.weight_transfer.broadcast_group import stateless_init_process_group
from torchrl_modules.weight_transfer.c10d import C10dWeightTransfer
from torchrl_modules.weight_transfer.file import weights_file
from torchrl_modules.weight_transfer.layout import WeightLayout
from torchrl_modules.weights.expected_weights import ExpectedWeights, next_version

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]
SHAPES = st.lists(st.integers(0, 5), max_size=3)


@given(
    entries=st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=8),
    bucket_bytes=st.integers(1, 400),
)
def test_what_is_laid_out_is_found_again(entries, bucket_bytes):
    weights = {
        f"w{i}": torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) + i
        for i, (dtype, shape) in enumerate(entries)
    }
    layout = WeightLayout.of(weights, bucket_bytes)
    other_end = WeightLayout(**layout.message)
    assert other_end.places == layout.places
    found = {}
    for bucket in layout.buckets():
        size = layout.size_of(bucket)
        assert len(bucket) == 1 or size <= bucket_bytes
        room = torch.full((size + 3,), 77, dtype=torch.uint8)
        flat = layout.fill(room, bucket, weights)
        assert len(flat) == size
        found |= other_end.views(flat, bucket)
    assert list(found) == list(weights)
    for name, value in weights.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"names": ["a", "a"]}, id="a name twice"),
        pytest.param({"names": ["a"]}, id="a name less"),
        pytest.param({"shapes": [[1]]}, id="a shape less"),
        pytest.param({"dtype_names": ["float32", "nothing"]}, id="no type"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(change):
    message = {
        "names": ["a", "b"],
        "dtype_names": ["float32", "float32"],
        "shapes": [[1], [2]],
        "bucket_bytes": 8,
    }
    assert WeightLayout(**message).num_bytes == 128
    with pytest.raises(ValueError, match="WeightLayout"):
        WeightLayout(**message | change)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as held:
        return held.getsockname()[1]


def join(world_size, timeout_s=20.0):
    """All members of a group, in threads of this process."""
    port, groups = free_port(), [None] * world_size

    def one(rank):
        groups[rank] = stateless_init_process_group(
            "127.0.0.1", port, rank, world_size, timeout_s=timeout_s
        )

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return groups


def test_rank_0_reaches_the_others_and_the_default_group_is_left_alone():
    had_default = torch.distributed.is_initialized()
    groups = join(3)
    tensors = [torch.arange(5) + 1, torch.zeros(5, dtype=torch.int64), torch.zeros(5).long()]
    threads = [
        threading.Thread(target=group.broadcast, args=(tensor,))
        for group, tensor in zip(groups, tensors, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(tensor.tolist() == [1, 2, 3, 4, 5] for tensor in tensors)
    assert torch.distributed.is_initialized() == had_default
    for group in groups:
        group.close()
        group.close()


def test_a_sender_that_does_not_come_is_an_error_in_time():
    sender, receiver = join(2, timeout_s=2.0)
    with pytest.raises(RuntimeError):
        receiver.broadcast(torch.zeros(5))
    for group in (sender, receiver):
        group.close()
    with pytest.raises(ValueError, match="rank 2 of 2"):
        stateless_init_process_group("127.0.0.1", 1, 2, 2)


@pytest.fixture
def used_store():
    """The first store of a process opens what the others share."""
    torch.distributed.TCPStore("127.0.0.1", free_port(), 1, is_master=True)


def lost_workers(fault):
    """The workers of an engine, which do not join."""

    def rpc(method, *_):
        if method == "torchrl_limits":
            return {"num_workers": 1}
        assert method == "torchrl_join"
        if fault is not None:
            raise fault
        return {}

    return rpc


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param(RuntimeError("the worker is gone"), "the worker is gone", id="they raise"),
        pytest.param(None, "did not join within 0.5 s", id="they do not come"),
    ],
)
@pytest.mark.usefixtures("used_store", "no_leaks")
def test_workers_that_do_not_join_leave_nothing_behind(fault, message):
    port = free_port()
    for _ in range(2):  # the port is free again
        with pytest.raises(RuntimeError, match=message):
            C10dWeightTransfer(lost_workers(fault), master_port=port, timeout_s=0.5)


def test_an_update_is_refused_as_a_whole_and_every_fault_is_named():
    own = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1), "d": torch.zeros(1)}
    new = {"a": torch.zeros(3), "b": torch.tensor([1.0, math.nan, 0.0]), "e": torch.zeros(1)}
    with pytest.raises(ValueError, match="refuses the weight update") as caught:
        ExpectedWeights.of(own).check(new, who="Engine")
    for words in (
        "Engine refuses",
        "5 faults",
        "a has shape (3,), not (2,)",
        "b holds NaN",
        "it lacks c",
        "it lacks d",
        "it has no use for e",
    ):
        assert words in str(caught.value)


def test_tied_weights_need_to_be_given_once_only():
    table = torch.zeros(2, 2)
    expected = ExpectedWeights.of({"embedding": table, "head": table, "norm": torch.zeros(1)})
    norm = {"norm": torch.ones(1)}
    for name in ("embedding", "head"):
        taken = expected.check({name: torch.ones(2, 2), **norm}, who="Engine")
        assert taken.keys() == {"embedding", "norm"}
        assert torch.equal(taken["embedding"], torch.ones(2, 2))
    with pytest.raises(ValueError, match="are tied"):
        expected.check({"embedding": table, "head": torch.ones(2, 2), **norm}, who="Engine")
    for nothing in ({}, norm):
        with pytest.raises(ValueError, match="lacks embedding"):
            expected.check(nothing, who="Engine")


@pytest.mark.parametrize(
    "version", [pytest.param(1 << 63, id="beyond 64 bits"), True, 1.0, -1, 0], ids=str
)
def test_a_version_that_no_token_could_carry_is_refused(version):
    with pytest.raises(ValueError, match="version"):
        next_version(version, 0, who="Engine")
    assert next_version((1 << 63) - 1, 0, who="Engine") == (1 << 63) - 1


@pytest.mark.parametrize("is_near", [True, False])
@pytest.mark.parametrize("in_memory", [True, False])
def test_what_is_handed_over_is_read_again_and_leaves_nothing(tmp_path, is_near, in_memory):
    generator = torch.Generator().manual_seed(0)
    sent = {
        f"w{i}": torch.randn(shape, generator=generator).to(dtype)
        for i, (shape, dtype) in enumerate(
            [
                ((3, 2), torch.float32),
                ((), torch.bfloat16),
                ((0, 4), torch.float16),
                ((5,), torch.int8),
            ]
        )
    }
    sent["of another order"] = sent["w0"].T
    sent["tied"] = sent["w0"]
    where = {"directory": None if in_memory else str(tmp_path), "is_near": is_near}
    with (
        weights_file(sent, **where, who="Engine") as path,
        weights_file(sent, dtype=torch.bfloat16, **where, who="Engine") as narrow,
    ):
        read, narrowed = load_file(path), load_file(narrow)
    assert not list(tmp_path.iterdir())
    del sent["tied"]  # its values are there under the other name
    assert read.keys() == narrowed.keys() == sent.keys()
    for name, value in sent.items():
        assert read[name].dtype == value.dtype
        assert torch.equal(read[name], value), name
        is_wide = value.dim() > 1 and value.dtype == torch.float32
        expected = value.bfloat16() if is_wide else value
        assert narrowed[name].dtype == expected.dtype
        assert torch.equal(narrowed[name], expected), name
    for wrong, message in [([1.0], "no whole"), (torch.ones(1, dtype=torch.complex64), "complex")]:
        with (
            pytest.raises(ValueError, match=f"Engine refuses .*{message}"),
            weights_file({"a": wrong}, **where, who="Engine"),
        ):
            pass
