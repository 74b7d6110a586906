"""Sets of tokens that tokens were drawn from, in few bytes, from row to loss."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from torchrl_data import Conversations, SamplingMasks, Turn, row_from_state, row_state
from torchrl_data.conversation_io import row_tensordicts
from torchrl_data.ragged.packed import read_sampling_masks
from torchrl_data.ragged.padded import padded_rows
from torchrl_data.sampling_masks import (
    encode_sets,
    pack_bits,
    sets_of_ids,
    unpack_bits,
)


def test_a_set_takes_two_bytes_a_token_or_a_bit_for_each_of_the_vocabulary():
    # 100 tokens of vocabulary are 13 bytes of bits: 6 ids of 2 bytes are less, 7 are not.
    assert sets_of_ids([[9, 2]], 100) == [b"\x02\x02\x00\x09\x00"]
    assert [len(each) for each in sets_of_ids([range(6), range(7), range(100)], 100)] == [
        13,
        14,
        14,
    ]
    # Above 65,536 an id takes 4.
    assert sets_of_ids([[70_000]], 100_000) == [b"\x04" + (70_000).to_bytes(4, "little")]
    # Token 8 is the lowest bit of the second byte.
    assert sets_of_ids([[0, 8]], 16) == [b"\x01\x01\x01"]


sets = st.integers(1, 90).flatmap(
    lambda size: st.tuples(
        st.just(size), st.lists(st.sets(st.integers(0, size - 1)), min_size=1, max_size=9)
    )
)


@given(sets, st.integers(0, 20), st.data())
def test_sets_come_back_as_they_were_whatever_part_of_them_is_taken(case, more, data):
    size, rows = case
    kept = torch.zeros(len(rows), size, dtype=torch.bool)
    for row, ids in enumerate(rows):
        kept[row, list(ids)] = True
    assert torch.equal(unpack_bits(pack_bits(kept), size), kept)
    masks = SamplingMasks.of(encode_sets(pack_bits(kept), size))
    assert masks.counts().tolist() == [len(ids) for ids in rows]
    assert SamplingMasks.from_ids(map(list, rows), size).kept(size).equal(kept)
    # A model with a larger vocabulary than the sampler's leaves the rest out.
    assert masks.kept(size + more)[:, :size].equal(kept)
    assert not masks.kept(size + more)[:, size:].any()
    index = torch.tensor(data.draw(st.lists(st.integers(0, len(rows) - 1))), dtype=torch.int64)
    assert masks.take(index).kept(size).equal(kept[index])
    flags = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    assert masks.take(torch.tensor(flags)).sets() == [
        s for s, flag in zip(masks.sets(), flags, strict=True) if flag
    ]


def test_what_can_not_be_a_set_of_these_tokens_is_refused():
    with pytest.raises(ValueError, match="outside the vocabulary of 8"):
        sets_of_ids([[8]], 8)
    with pytest.raises(ValueError, match="outside the vocabulary of 8"):
        SamplingMasks.from_ids([[9]], 800).kept(8)
    with pytest.raises(ValueError, match="outside the vocabulary of 3"):
        SamplingMasks.from_ids([[9]], 12).kept(3)
    with pytest.raises(ValueError, match="is damaged: it begins with 7"):
        SamplingMasks.of([b"\x07\x01"]).counts()
    for vocab_size in (8, 800):  # bits, ids
        masks = SamplingMasks.from_ids([[1], [], [3, 5]], vocab_size)
        masks.check_targets(torch.tensor([1, 0, 5]))
        with pytest.raises(ValueError, match="Token 2 of those that were sampled, 4, is not in"):
            masks.check_targets(torch.tensor([1, 0, 4]))
        with pytest.raises(ValueError, match="2 tokens and 3 sampling masks"):
            masks.check_targets(torch.tensor([1, 0]))
    row = TensorDict({("sampling_mask", "lengths"): torch.tensor([3, 3])})
    row["sampling_mask", "bytes"] = torch.zeros(5, dtype=torch.uint8)
    with pytest.raises(ValueError, match="row 0 has 2 lengths, which sum to 6, and 5 values"):
        read_sampling_masks(lazy_stack([row]), [2], who="test")


@pytest.fixture
def conversations():
    """Two rows: 3 tokens of a prompt and 2 drawn ones; 1 and 1, and another turn."""
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    start = Conversations.from_tokens([[5, 6, 7], [8]], chats, awaits_response=True)
    said = {"role": "assistant", "content": "x"}
    own = sets_of_ids([[1, 2], range(40)], 64), sets_of_ids([[4]], 64)
    turns = [
        Turn([1, 2], [-1.0, -1.0], said, 0, {}, own[0]),
        Turn([4], [0.0], said, 0, {}, own[1]),
    ]
    return start, start.append_turns(turns), own


def test_a_row_carries_the_sets_of_its_sampled_tokens(conversations, through_files):
    start, full, own = conversations
    assert full.sampling_masks(0) == [b"", b"", b"", *own[0]]
    assert full.sampling_masks(1) == [b"", *own[1]]
    assert not any(start.sampling_masks(0))  # an older snapshot never changes
    rows = row_tensordicts(full)
    padded = padded_rows(rows, pad_token_id=0)
    loaded = [row_from_state(through_files(row_state(row))) for row in rows]
    for batch, sizes in (
        (lazy_stack(rows), [5, 2]),
        (lazy_stack(loaded), [5, 2]),
        (padded, [5] * 2),
    ):
        masks = read_sampling_masks(batch, sizes, who="test")
        assert masks is not None
        real = batch["masks", "all_attention_mask"] if batch is padded else None
        masks = masks if real is None else masks.take(real.flatten())
        assert masks.sets() == [*full.sampling_masks(0), *full.sampling_masks(1)]
    # A row without the entry has no sets; its neighbours keep theirs.
    plain = row_tensordicts(start)[0].exclude("sampling_mask")
    mixed = read_sampling_masks(lazy_stack([plain, rows[1]]), [3, 2], who="test")
    assert mixed is not None
    assert mixed.sets() == [b"", b"", b"", *full.sampling_masks(1)]
    none = lazy_stack([plain.exclude("sampling_mask")])
    assert read_sampling_masks(none, [3], who="test") is None


def test_a_turn_needs_a_set_for_each_token(conversations):
    start, _, own = conversations
    said = {"role": "assistant", "content": "x"}
    turn = Turn([1, 2], [-1.0, -1.0], said, 0, {}, own[1])
    with pytest.raises(ValueError, match="Row 0 has 2 sampled tokens but 1 sampling masks"):
        start.append_turns([turn, None])
