"""A row as plain values, through files that hold no pickle, and back."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict
from tokenizers_for_tests import EXAMPLES

from torchrl_data import (
    ChatHistory,
    Conversations,
    EncodedMessages,
    History,
    Source,
    Turn,
    row_from_state,
    row_state,
    row_tensordicts,
    write_conversations,
)

QUESTION = {"role": "user", "content": "2 + 2?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
tensor = st.sampled_from(
    [
        torch.tensor([[1.0, math.nan]], dtype=torch.float64),
        torch.zeros(0, dtype=torch.int64),
        torch.tensor(True),
        torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
    ]
)
turns = st.lists(st.tuples(st.lists(st.integers(0, 2**40), max_size=4), st.booleans()), max_size=3)


def conversation(turns, waiting):
    """A conversation of some turns, sampled or not, and perhaps of a message that waits."""
    row = Conversations.from_messages([[QUESTION]], [TOOLS])
    for number, (ids, sampled) in enumerate(turns):
        row = row.append_encoded([EncodedMessages([1, 2], [Source.TEMPLATE, Source.CONTENT])])
        log_probs = [-0.1 * i for i in range(len(ids))] if sampled else None
        extra = {"entropy": [0.5] * len(ids)} if number == 1 else {}
        message = {"role": "assistant", "content": f"{number}", "tool_calls": [{"id": "a"}]}
        row = row.append_turns([Turn(ids, log_probs, message, number, extra)])
    return row.append_messages([[QUESTION]]) if waiting else row


@settings(EXAMPLES, max_examples=30)
@given(
    values=st.dictionaries(st.text(max_size=4), plain, max_size=4),
    held=tensor,
    turns=turns,
    waiting=st.booleans(),
)
def test_a_row_comes_back_from_files(through_files, same, values, held, turns, waiting):
    talk = conversation(turns, waiting)
    (row,) = row_tensordicts(talk)
    write_conversations(row, "full", talk)
    row["next"] = TensorDict({"held": held})
    row.set_non_tensor("row", values)
    row.set_non_tensor("note", "text")
    talk.append_messages([[{"role": "user", "content": "said after the row was taken"}]])

    back = row_from_state(through_files(row_state(row)))

    assert same(row_state(back), row_state(row))
    assert back["history", "full"].to_chats() == row["history", "full"].to_chats()
    for group in ("tokens", "masks", "log_probs", "history"):
        assert type(back[group]) is type(row[group])
    assert same(back["row"], values)
    assert back["note"] == "text"
    assert same(back["next", "held"], held)
    # The record itself, with what no entry of the row shows: it can be gone on with.
    saved = row_state(back)["entries"]["history"]["ChatHistory"]["entries"]["full"]
    (record,) = saved["conversations"]
    assert record["tools"] == TOOLS
    assert record["position"] == talk.position(0)._asdict()


def test_two_parts_of_a_history_and_one_of_messages():
    row = TensorDict({})
    prompt = Conversations.from_messages([[QUESTION]])
    write_conversations(row, "prompt", prompt)
    history = History.from_chats([QUESTION, {"role": "assistant", "content": "4"}])
    row["history"].set("full", history)
    back = row_from_state(row_state(row))
    assert isinstance(back["history"], ChatHistory)
    assert back["history"].prompt.to_chats() == [QUESTION]
    assert back["history"].full.to_chats()[1]["content"] == "4"


def test_numbers_of_numpy_are_numbers():
    row = TensorDict({"a": NonTensorData({"mean": np.float32(0.5), "count": np.int64(3)})})
    assert row_state(row)["entries"]["a"] == {"value": {"mean": 0.5, "count": 3}}


def test_the_state_does_not_change_with_the_row():
    row = TensorDict({"a": torch.zeros(2)})
    state = row_state(row)
    row["a"] += 1
    assert state["entries"]["a"].tolist() == [0, 0]


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(object(), id="an object"),
        pytest.param({1: "a"}, id="keys that JSON would make strings"),
        pytest.param(b"abc", id="bytes"),
        pytest.param([np.zeros(2)], id="an array"),
    ],
)
def test_what_has_no_plain_form_is_refused_by_name(value):
    row = TensorDict({"next": TensorDict({"image": NonTensorData(value)})})
    with pytest.raises(TypeError, match=r"\('next', 'image'.* has no plain form.*map_row="):
        row_state(row)
