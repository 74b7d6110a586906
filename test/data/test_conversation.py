"""Token records: append-only, and every snapshot stays what it was."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_for_tests import EXAMPLES

from torchrl_data import Conversations, EncodedMessages, Source, row_tensordicts
from torchrl_data.conversation import Turn
from torchrl_data.layout import conversation_tokens

ANSWER = {"role": "assistant", "content": "a"}


def opened(conversations, ids):
    new = EncodedMessages(ids, [Source.CONTENT] * len(ids))
    return conversations.append_encoded([new] * len(conversations))


def started(count=1):
    conversations = Conversations.from_messages([[{"role": "user", "content": "q"}]] * count)
    return opened(conversations, [1, 2, 3])


def test_a_turn_by_hand():
    state = started(2).append_turns([Turn([7, 8], [-0.5, -1.5], ANSWER, 3), None])
    assert state.ids(0) == [1, 2, 3, 7, 8]
    assert state.assistant_mask(0).tolist() == [False] * 3 + [True] * 2
    torch.testing.assert_close(state.log_probs(0), torch.tensor([0.0, 0, 0, -0.5, -1.5]))
    assert state.policy_versions(0).tolist() == [-1, -1, -1, 3, 3]
    assert state.position(0).response_start == 3
    assert not state.position(0).awaits_response
    assert state.position(1).awaits_response
    assert state.ids(1) == [1, 2, 3]
    state = state.append_messages([[{"role": "tool", "content": "t"}], []])
    assert state.waiting_messages(0) == [{"role": "tool", "content": "t"}]
    assert state.waiting_messages(1) == []


def test_appending_to_an_old_snapshot_forks_it():
    base = started()
    left = base.append_turns([Turn([7], [-1.0], ANSWER)])
    right = base.append_turns([Turn([8, 9], [-2.0, -3.0], ANSWER)])
    assert (left.ids(0), right.ids(0)) == ([1, 2, 3, 7], [1, 2, 3, 8, 9])
    assert base.ids(0) == [1, 2, 3]
    assert left != right
    assert copy.deepcopy(left) is left


STEPS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["answer", "message", "open"])), max_size=12
)


@EXAMPLES
@given(STEPS)
def test_every_snapshot_stays_what_it_was(steps):
    """Any snapshot may be continued at any time; a plain copy of the lists is the model."""
    snapshots = [(started(), [1, 2, 3], 1)]
    for number, (which, kind) in enumerate(steps):
        state, ids, messages = snapshots[which % len(snapshots)]
        waits = state.position(0).awaits_response
        if kind == "answer" and waits:
            state = state.append_turns([Turn([100 + number], [-1.0], ANSWER)])
            snapshots.append((state, [*ids, 100 + number], messages + 1))
        elif kind == "message":
            state = state.append_messages([[{"role": "user", "content": str(number)}]])
            snapshots.append((state, ids, messages + 1))
        elif kind == "open" and not waits:
            snapshots.append((opened(state, [200 + number]), [*ids, 200 + number], messages))
    for state, ids, messages in snapshots:
        assert state.ids(0) == ids
        assert len(state.messages(0)) == messages


def test_wrong_order_and_wrong_counts_are_refused():
    answered = started().append_turns([Turn([7], [-1.0], ANSWER)])
    with pytest.raises(RuntimeError, match="Row 0 does not await a response"):
        answered.append_turns([Turn([7], [-1.0], ANSWER)])
    with pytest.raises(ValueError, match="Row 0 has 2 sampled tokens but 1 log-probs"):
        started().append_turns([Turn([7, 8], [-1.0], ANSWER)])
    with pytest.raises(IndexError, match="Row 5 of 1"):
        started()[5]


def test_rows_hold_full_as_prompt_and_response():
    state = started(2).append_turns([Turn([7, 8], [-0.5, -1.5], ANSWER, 4)] * 2)
    row = row_tensordicts(state)[1]
    assert row["tokens", "prompt"].tolist() == [1, 2, 3]
    assert row["tokens", "response"].tolist() == [7, 8]
    assert row["tokens", "full"].tolist() == [1, 2, 3, 7, 8]
    assert row["masks", "all_assistant_mask"].tolist() == [False] * 3 + [True] * 2
    assert row["masks", "all_attention_mask"].all()
    assert row["log_probs", "full"].tolist() == [0, 0, 0, -0.5, -1.5]
    assert row["policy_versions", "full"].tolist() == [-1, -1, -1, 4, 4]
    # The export is a copy: the record goes on growing.
    opened(state, [9, 9, 9])
    assert row["tokens", "full"].tolist() == [1, 2, 3, 7, 8]
    tokens, masks, log_probs = conversation_tokens(state)
    assert [r.tolist() for r in tokens.rows("full")] == [[1, 2, 3, 7, 8]] * 2
    assert masks.rows("all_assistant_mask")[0].sum() == 2
    assert log_probs.rows("response")[0].tolist() == [-0.5, -1.5]


def test_versions_may_differ_by_row_and_by_token():
    turns = [Turn([7, 8], [-0.5, -1.5], ANSWER, versions) for versions in ([3, 4], 5)]
    state = started(2).append_turns(turns)
    assert state.policy_versions(0).tolist() == [-1, -1, -1, 3, 4]
    assert state.policy_versions(1).tolist() == [-1, -1, -1, 5, 5]
    with pytest.raises(ValueError, match="Row 0 has 2 sampled tokens but 1 policy versions"):
        started(2).append_turns([turns[0]._replace(versions=[3]), turns[1]])


def in_two_turns():
    """An answer of two tokens, a message, and an answer of one; everything is recorded of them."""
    first = Turn(
        [7, 8],
        [-0.5, -1.5],
        ANSWER,
        3,
        {"entropy": [0.1, 0.2]},
        [b"a", b"b"],
        torch.zeros(5, 1, 1, dtype=torch.uint8),
    )
    state = started().append_turns([first])
    state = opened(state.append_messages([[{"role": "user", "content": "more"}]]), [4])
    last = Turn(
        [9],
        [-2.0],
        ANSWER,
        4,
        {"entropy": [0.3]},
        [b"c"],
        torch.ones(7, 1, 1, dtype=torch.uint8),
    )
    return state, state.append_turns([last])


def test_a_response_is_taken_anew_from_where_it_began():
    before, after = in_two_turns()
    again = after.before_response()
    assert again == before
    assert again.position(0).awaits_response
    other = again.append_turns([Turn([10], [-3.0], ANSWER, 5)])
    assert (other.ids(0), after.ids(0)) == ([1, 2, 3, 7, 8, 4, 10], [1, 2, 3, 7, 8, 4, 9])
    for unfit in (again, started(), Conversations.from_messages([[ANSWER]])):
        with pytest.raises(RuntimeError, match="Row 0 does not end with a response"):
            unfit.before_response()


def test_what_was_sampled_in_another_row_is_read_in_this_one():
    _, after = in_two_turns()
    row = after.begun_elsewhere(6, 3)
    assert row.ids(0) == after.ids(0)
    assert row.messages(0) == after.messages(0)
    assert row.assistant_mask(0).tolist() == [False] * 6 + [True]
    assert row.log_probs(0).tolist() == [0.0] * 6 + [-2.0]
    assert row.policy_versions(0).tolist() == [-1] * 6 + [4]
    torch.testing.assert_close(row.extra(0)["entropy"], torch.tensor([0.0] * 6 + [0.3]))
    assert row.sampling_masks(0) == [b""] * 6 + [b"c"]
    assert torch.equal(row.routed_experts(0), after.routed_experts(0))  # it reads them, too
    assert (row.first_response(0), row.num_tokens_before_policy(0)) == (3, 6)
    # The row that it left keeps what it sampled.
    assert after.log_probs(0).tolist() == [0.0, 0.0, 0.0, -0.5, -1.5, 0.0, -2.0]
