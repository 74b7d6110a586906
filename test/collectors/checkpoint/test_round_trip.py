"""What is saved comes back to the bit, with its types; what can't be saved is named."""

import math
import random
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from same_state import assert_same
from tensordict import NonTensorData, TensorClass, TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import CheckpointError, CheckpointStore, LLMCollector
from objectives import MCAdvantage
from torchrl_data import (
    ChatHistory,
    ContentBase,
    Conversations,
    History,
    Text,
    Tokens,
    write_conversations,
)
from torchrl_envs import ChatEnv, DataLoadingPrimer, RewardFunctions, StepCounter
from torchrl_modules import TransformersWrapper

CHATS = [
    [{"role": "user", "content": "Grüße \ud800 \0"}],
    [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"a": 1}}]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ],
]


@pytest.fixture(params=[True, False], ids=["waited for", "on a thread"])
def stored(request, tmp_path):
    """Saves a value and gives back what is loaded."""

    def store(value):
        with CheckpointStore(tmp_path, on_error="raise") as checkpoints:
            checkpoints.save(1, {"value": value}, wait=request.param)
            return checkpoints.load().state["value"]

    return store


def optimizer_state():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 3, 5])
    return [model.state_dict(), optimizer.state_dict(), schedule.state_dict()]


def random_states():
    return (
        random.getstate(),
        np.random.get_state(),  # noqa: NPY002 (what a run saves)
        np.random.default_rng(3).bit_generator.state,
        torch.get_rng_state(),
    )


VALUES = {
    "numbers": [0, -1, 10**400, 2**20000, 0.1, -0.0, 5e-324, math.inf, -math.inf, math.nan, True],
    "keys of both kinds": {1: "int", "1": "str", -1: {}, "!": {"!": "tuple", "of": []}},
    "sequences": [[], (), ([],), [((), [None])], {"t": (1, [2, (3,)])}],
    "bytes": [b"", b"\0\xff", bytearray(b"x")],
    "strings": ["", "\ud800", "\0", "a" * 70000, "ü\u2028"],
    "ordered": OrderedDict([("b", 1), (2, OrderedDict())]),
    "counter": Counter({3: 2, 5: 1}),
    "arrays": [
        np.arange(6, dtype=">i2").reshape(2, 3).T,
        np.array(1.5),
        np.empty((0, 3), "<c16"),
        np.array(["a", "bc"]),
        np.array(["2026-01-01"], "<M8[ns]"),
        np.float32(0.1),
        np.int64(-1),
        np.bool_(True),
    ],
    "a NaN of its own": np.frombuffer(bytes.fromhex("7ff8dead00000001"), ">f8")[0].item(),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "views": [torch.arange(12).view(3, 4).t(), torch.ones(1).expand(3, 2), torch.arange(9)[::2]],
    "one element or none, of odd strides": [torch.arange(9)[::4][:n] for n in (0, 1)],
}


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_to_the_bit(stored, name):
    assert_same(stored(VALUES[name]), VALUES[name])


def test_states_of_modules_optimizers_and_generators_come_back(stored):
    value = [*optimizer_state(), *random_states()]
    assert_same(stored(value), value)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
    *(torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


def test_every_dtype_comes_back_as_any_safetensors_reader_sees_it(tmp_path):
    bits = torch.randint(0, 2, (48,), dtype=torch.uint8)
    value = {str(dtype): bits.view(dtype) for dtype in DTYPES}
    value |= {f"{dtype} [0, 2]": torch.empty(0, 2, dtype=dtype) for dtype in DTYPES}
    value |= {f"{dtype} []": bits[:16].view(dtype)[0] for dtype in DTYPES}
    with CheckpointStore(tmp_path) as store:
        path = store.save(0, value)
        assert_same(store.load().state, value)
    seen = load_file(path / "tensors.safetensors")
    same_there = [dtype for dtype in DTYPES if seen[str(dtype)].dtype == dtype]
    assert torch.bfloat16 in same_there
    assert len(same_there) == 16
    for dtype in same_there:
        assert torch.equal(seen[str(dtype)].view(torch.uint8), bits)


def test_one_memory_is_stored_once_and_is_one_memory_again(tmp_path):
    weight = torch.randn(1000, 10)
    with CheckpointStore(tmp_path) as store:
        path = store.save(0, {"embed": weight, "head": weight, "row": weight[0]})
        state = store.load().state
    assert state["embed"].data_ptr() == state["head"].data_ptr()
    assert_same(state, {"embed": weight, "head": weight, "row": weight[0]})
    assert (path / "tensors.safetensors").stat().st_size < 42_000


class Point(TensorClass["nocast"]):
    x: torch.Tensor
    label: str


def tensordicts():
    nested = TensorDict(
        {"a": torch.arange(6).view(2, 3), "b": {"c": NonTensorData("x", batch_size=[2])}},
        batch_size=[2],
        names=["rows"],
        device="cpu",
    )
    ragged = lazy_stack([TensorDict({"x": torch.rand(n), "y": {"z": {}}}) for n in (2, 0, 3)])
    history = History.from_chats([CHATS[1], CHATS[1][:1]])
    rows = [torch.arange(3), torch.arange(5)]
    shown = TensorDict({}, batch_size=[2])
    write_conversations(shown, "full", Conversations.from_messages(CHATS, [[{"name": "f"}], None]))
    return {
        "nested": nested,
        "ragged": ragged,
        "stack of stacks": lazy_stack([ragged, ragged], 1),
        "empty": TensorDict({}, batch_size=[0, 2]),
        "history": history,
        "message": history[0, 0],
        "chats": ChatHistory(full=history, batch_size=[2]),
        "tokens": Tokens.from_rows(full=rows),
        "padded": Tokens.from_rows(prompt=rows, response=rows, full=rows).to_padded(0),
        "text": Text.from_rows(full=["a", "b"]),
        "content": lazy_stack([ContentBase(type="text", text="a"), ContentBase(type="image")]),
        "values": NonTensorData({"a": (1, [2]), 3: None}, batch_size=[4]),
        "conversations": shown,
        "one of them": shown[1],
    }


@pytest.mark.parametrize("name", tensordicts())
def test_tensordicts_come_back_with_their_classes(stored, name):
    value = tensordicts()[name]
    assert_same(stored(value), value)


def test_a_tensorclass_has_to_be_named(tmp_path):
    point = Point(x=torch.ones(2), label="p", batch_size=[2])
    with (
        CheckpointStore(tmp_path / "a") as store,
        pytest.raises(
            CheckpointError, match=r"^state\['p'\]: cannot store .*Point; name its class in Check"
        ),
    ):
        store.save(1, {"p": point})
    with CheckpointStore(tmp_path / "b", tensorclasses=[Point]) as store:
        store.save(1, {"p": point})
        assert_same(store.load().state["p"], point)
    with pytest.raises(CheckpointError, match="tensorclass 'Point', which is not listed"):
        CheckpointStore(tmp_path / "b").load()


def one(completions):
    return [float(len(said)) for said in completions]


def test_collected_rows_come_back_as_they_lie_in_a_replay_buffer(
    stored, chatml_tokenizer, make_tiny_model
):
    policy = TransformersWrapper(
        make_tiny_model(0), tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 4}
    )
    rows = [{"prompt": "hi", "answer": 3}, {"prompt": "a longer question", "answer": None}]
    parts = [
        DataLoadingPrimer(rows, group_size=2),
        RewardFunctions([one]),
        StepCounter(max_steps=2),
    ]
    buffer = ReplayBuffer(
        storage=LazyStackStorage(4), transform=MCAdvantage(2), batch_size=4, pin_memory=False
    )
    env = ChatEnv(batch_size=4).append_transform(Compose(*parts))
    LLMCollector(env, policy, replay_buffer=buffer).collect()
    held = {"rows": [buffer._storage.get(i) for i in range(4)], "batch": buffer[:]}
    found = stored(held)
    assert_same(found, held)
    assert found["batch"]["history"].full.to_chats() == held["batch"]["history"].full.to_chats()
    again = ReplayBuffer(storage=LazyStackStorage(4), batch_size=4, pin_memory=False)
    again.extend(found["batch"])
    assert torch.equal(again[:]["tokens"].full[3], buffer[:]["tokens"].full[3])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [{"b": object()}]}, r"^state\['a'\]\[0\]\['b'\]: cannot store object; make it"),
        ({"a": {2.0: 1}}, r"^state\['a'\]: cannot store a key of type float, only str and int"),
        ({"a": {True: 1}}, r"^state\['a'\]: cannot store a key of type bool"),
        ({"a": (1, {2})}, r"^state\['a'\]\[1\]: cannot store set"),
        ({"a": np.array([object()])}, r"^state\['a'\]: cannot store a numpy array of dtype object"),
        ({"a": torch.eye(2).to_sparse()}, r"cannot store torch.Tensor; make it a plain dense"),
        ({"a": torch.empty(2, device="meta")}, r"meta device has no values"),
        (
            {"a": TensorDict({"x": NonTensorData({"y": random})})},
            r"^state\['a'\]\['x'\]\['y'\]: cannot store module",
        ),
    ],
)
def test_what_cannot_be_stored_is_named_and_leaves_nothing(tmp_path, state, message):
    with CheckpointStore(tmp_path) as store:
        with pytest.raises(CheckpointError, match=message):
            store.save(1, state)
        assert store.steps() == []
    assert not [path for path in tmp_path.iterdir() if path.name != ".lock"]


def test_a_state_that_holds_itself_is_refused(tmp_path):
    state = {"a": []}
    state["a"].append(state)
    with CheckpointStore(tmp_path) as store, pytest.raises(CheckpointError, match="holds itself"):
        store.save(1, state)


def test_the_state_may_change_once_save_has_returned(tmp_path):
    weight, counts = torch.zeros(1 << 20), {"seen": [1]}
    with CheckpointStore(tmp_path) as store:
        for step in range(1, 4):
            weight.fill_(step)
            counts["seen"].append(step)
            store.save(
                step, {"weight": weight, "counts": counts, "a": np.full(3, step)}, wait=False
            )
            weight.fill_(-1)
            counts["seen"].append(-1)
        for step in (2, 3):
            state = store.load(step).state
            assert (state["weight"] == step).all()
            assert state["counts"]["seen"][-1] == step
        assert store.steps() == [2, 3]
