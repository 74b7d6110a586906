"""Conversations in a TensorDict: whatever happens to the batch, the rows stay right."""

import pickle

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from torchrl_data import (
    ChatHistory,
    Conversations,
    History,
    MissingEntryError,
    read_conversations,
    write_conversations,
)


def numbered(count):
    return Conversations.from_messages(
        [[{"role": "user", "content": str(i)}] for i in range(count)]
    )


def batch_of(count=4):
    batch = TensorDict({"number": torch.arange(count)}, batch_size=[count])
    write_conversations(batch, "prompt", numbered(count))
    return batch


def rows_of(batch):
    read = read_conversations(batch, "prompt", who="test")
    return [int(read.messages(i)[0]["content"]) for i in range(len(read))]


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda td: td[2], id="one row"),
        pytest.param(lambda td: td[1:3], id="slice"),
        pytest.param(lambda td: td[torch.tensor([2, 0, 2])], id="rows in another order, twice"),
        pytest.param(lambda td: td[td["number"] > 1], id="mask"),
        pytest.param(lambda td: td.unbind(0)[3], id="unbind"),
        pytest.param(lambda td: td.split(2)[1], id="split"),
        pytest.param(lambda td: td.gather(0, torch.tensor([3, 1])), id="gather"),
        pytest.param(lambda td: td.reshape(2, 2)[1], id="reshape"),
        pytest.param(lambda td: td[1:][1:][torch.tensor([1, 0])].clone(), id="several in turn"),
        pytest.param(lambda td: torch.stack([td, td[torch.tensor([3, 2, 1, 0])]]), id="stack"),
        pytest.param(lambda td: torch.cat([td[2:], td[:2]]), id="cat"),
        pytest.param(lambda td: lazy_stack([td[3], td[1]]), id="lazy stack"),
        pytest.param(lambda td: td[1:].unsqueeze(0).expand(2, 3), id="expand"),
        pytest.param(lambda td: pickle.loads(pickle.dumps(td[1:])), id="pickle"),
        pytest.param(lambda td: td[1:].to("cpu").apply(lambda x: x), id="to and apply"),
        pytest.param(lambda td: td[2:].clone(False).select("number", "history"), id="select"),
    ],
)
def test_rows_follow_the_batch(operation):
    result = operation(batch_of())
    assert rows_of(result) == result["number"].reshape(-1).tolist()


def test_reading_a_batch_as_it_was_written_gives_the_same_object():
    batch, conversations = TensorDict(batch_size=[3]), numbered(3)
    write_conversations(batch, "full", conversations)
    assert read_conversations(batch, "full", who="test") is conversations
    assert read_conversations(batch.clone(), "full", who="test") is conversations


def test_attributes_build_a_history_of_the_rows_that_are_asked_for():
    batch = batch_of()
    assert isinstance(batch["history"], ChatHistory)
    assert isinstance(batch["history"].prompt, History)
    assert batch["history"].prompt.shape == (4, 1)
    assert batch[2]["history"].prompt.content == ["2"]
    assert batch["history"].full is None
    stacked = torch.stack([batch, batch], dim=1)
    assert stacked["history"].prompt.shape == (4, 2, 1)


def test_writing_another_snapshot_leaves_earlier_batches_alone():
    before = batch_of()
    after = before.clone(False)
    after["history"] = after.get("history").clone(False)
    write_conversations(after, "prompt", numbered(4)[[3, 2, 1, 0]])
    assert rows_of(before) == [0, 1, 2, 3]
    assert rows_of(after) == [3, 2, 1, 0]


def test_what_is_missing_is_named():
    with pytest.raises(MissingEntryError, match=r"Policy reads \('history', 'full'\)"):
        read_conversations(batch_of(), "full", who="Policy")
    with pytest.raises(ValueError, match="3 rows can't hold 2 conversations"):
        write_conversations(TensorDict(batch_size=[3]), "prompt", numbered(2))
