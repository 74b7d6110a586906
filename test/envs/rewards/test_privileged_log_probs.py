"""A policy that is its own teacher, with another prompt: values of the bare model."""

import math

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from torchrl_data import Conversations, Turn, row_tensordicts, write_conversations
from torchrl_envs import (
    DemonstrationPrompt,
    FeedbackPrompt,
    FinishedRollout,
    RetrievePrivilegedLogProb,
)
from torchrl_modules import TransformersWrapper

TEACHER, TAUGHT = ("next", "teacher_log_probs", "full"), ("next", "span_lengths", "full")
ASKED = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture(scope="module")
def policy(chatml_tokenizer, make_tiny_model):
    return TransformersWrapper(make_tiny_model(0), tokenizer=chatml_tokenizer, generate=False)


@pytest.fixture
def batch(policy):
    """A rollout of one turn, and one of two with what a tool said between them."""
    encoder = policy.encoder
    texts = [["It is 4."], ["It is 5.", "It is 4, I say"]]
    rows = encoder.encode_waiting(Conversations.from_messages([ASKED, ASKED]))
    turns = [encoder.encode_turn(text, close=True) for text in (texts[0][0], texts[1][0])]
    rows = rows.append_turns([spoken(*turn) for turn in turns])
    later = rows.append_messages([[], [{"role": "tool", "content": "no, not 5"}]])
    second = encoder.encode_waiting(later.row(1)).append_turns(
        [spoken(*encoder.encode_turn(texts[1][1]))]
    )
    rows = Conversations.cat([later.row(0), second])
    batch = lazy_stack(row_tensordicts(rows))
    write_conversations(batch, "full", rows)
    for row, reward in zip(batch.unbind(0), (1.0, 0.0), strict=True):
        row["reward"], row["group_id"] = torch.tensor([[reward]]), torch.tensor(7)
    return batch


def spoken(ids, text):
    log_probs = [-0.5 - i for i in range(len(ids))]
    return Turn(ids, log_probs, {"role": "assistant", "content": text})


def test_values_of_the_bare_model(batch, policy, reference_log_probs):
    told = [{"role": "user", "content": "What is 2 + 2? It is 4, I say, again and again"}]
    transform = RetrievePrivilegedLogProb(
        policy, encoder=policy.encoder, prompt=lambda rollouts: [told] * len(rollouts)
    )
    prompt = policy.encoder.encode_chats([told], add_generation_prompt=True)[0].ids
    for before, row in zip(batch.unbind(0), transform(batch).unbind(0), strict=True):
        mask, ids = row["masks", "all_assistant_mask"], row["tokens", "full"].tolist()
        start = int(mask.nonzero()[0])
        values = reference_log_probs(policy.model, prompt + ids[start:])[len(prompt) :]
        expected = torch.cat([torch.zeros(start), values]).masked_fill(~mask, 0.0)
        torch.testing.assert_close(row[TEACHER], expected)
        assert torch.equal(row[TAUGHT] > 0, mask)
        assert TEACHER not in before.keys(include_nested=True), "the input is not changed"


def test_with_the_prompt_of_the_policy_it_says_the_same(batch, policy, reference_log_probs):
    same = RetrievePrivilegedLogProb(
        policy, encoder=policy.encoder, prompt=lambda rollouts: [each.prompt for each in rollouts]
    )
    for row in same(batch).unbind(0):
        mask, ids = row["masks", "all_assistant_mask"], row["tokens", "full"].tolist()
        own = reference_log_probs(policy.model, ids)
        torch.testing.assert_close(row[TEACHER][mask], own[mask])


def test_what_is_not_taught_has_no_gap(batch, policy):
    short, long = (len(row["tokens", "full"]) for row in batch.unbind(0))
    assert short < long
    for settings, taught in (({}, [False, True]), ({"max_model_len": short}, [False, False])):
        transform = RetrievePrivilegedLogProb(
            policy,
            encoder=policy.encoder,
            prompt=lambda rollouts: [None, rollouts[1].prompt],
            **settings,
        )
        rows = transform(batch).unbind(0)
        assert [bool(row[TAUGHT].any()) for row in rows] == taught
        own = rows[0]["log_probs", "full"].masked_fill(~rows[0]["masks", "all_assistant_mask"], 0)
        assert torch.equal(rows[0][TEACHER], own)


def test_what_a_prompt_is_told(batch, policy):
    seen = []

    def look(rollouts):
        seen.extend(rollouts)
        return [None] * len(rollouts)

    RetrievePrivilegedLogProb(policy, encoder=policy.encoder, prompt=look)(batch)
    first, second = seen
    assert (first.prompt, first.reward, first.group_id, first.text) == (ASKED, 1.0, 7, "It is 4.")
    assert [m["role"] for m in second.completion] == ["assistant", "tool", "assistant"]
    assert second.text == "It is 5.\nIt is 4, I say"
    told = FeedbackPrompt()(seen)
    assert told[0] is None, "the only one that is right"
    assert told[1][0]["content"] == (
        "What is 2 + 2?\n\nThis is a correct answer:\nIt is 4.\n\nAn earlier answer of yours was "
        "wrong. Of it was said:\nno, not 5\n\nNow give your own answer."
    )


def rollout(reward, group=0, completion=(), error="", **row):
    said = [{"role": "assistant", "content": f"of {reward}"}, *completion]
    return FinishedRollout(ASKED, said, row, reward, error, group)


def test_feedback_by_hand():
    """Rewards 1, 0.5 and NaN in a group; 0 alone in another one."""
    rows = [rollout(1.0), rollout(0.5), rollout(math.nan, error="late"), rollout(0.0, group=1)]
    right, half, late, alone = FeedbackPrompt()(rows)
    assert right is None
    assert "of 1.0" in half[0]["content"]
    assert "wrong" not in half[0]["content"], "nobody has said anything"
    assert "of 1.0" in late[0]["content"]
    assert "late" in late[0]["content"]
    assert alone is None
    right, half, *_ = FeedbackPrompt(solved_at=0.5)(rows)
    assert "of 0.5" in right[0]["content"]
    assert "of 1.0" in half[0]["content"], "the other one, not itself"
    said = FeedbackPrompt(feedback=lambda rollout: f"only {rollout.reward}")(rows)[3]
    assert "only 0.0" in said[0]["content"]
    assert rows[0].prompt == ASKED, "the prompt of the rollout is not changed"


def test_demonstrations_by_hand():
    [told] = DemonstrationPrompt("best")([rollout(0.0, best="It is {4}.")])
    assert told[0]["content"].startswith("What is 2 + 2?\n\nThis is an example")
    assert "\nIt is {4}.\n" in told[0]["content"]
    with pytest.raises(ValueError, match=r"'best' of a row must hold a string, got 4"):
        DemonstrationPrompt("best")([rollout(0.0, best=4)])
    with pytest.raises(ValueError, match=r"'answer' of a row .* columns are \['best'\]"):
        DemonstrationPrompt("answer")([rollout(0.0, best="4")])
    with pytest.raises(ValueError, match=r"has no \{demonstration"):
        DemonstrationPrompt("best", template="Look!")


def test_what_can_not_be_is_refused(batch, policy):
    given = {"encoder": policy.encoder, "prompt": lambda _: [None]}
    with pytest.raises(ValueError, match="gave 1 prompts for 2 rollouts"):
        RetrievePrivilegedLogProb(policy, **given)(batch)
    with pytest.raises(TypeError, match="score_packed"):
        RetrievePrivilegedLogProb(None, **given)
    with pytest.raises(TypeError, match="encoder must be that of the policy"):
        RetrievePrivilegedLogProb(policy, encoder=policy.tokenizer, prompt=given["prompt"])
    with pytest.raises(ValueError, match="temperature must be"):
        RetrievePrivilegedLogProb(policy, temperature=0.0, **given)
    warm = TransformersWrapper(
        policy.model, tokenizer=policy.tokenizer, generate_kwargs={"temperature": 0.5}
    )
    with pytest.raises(ValueError, match=r"samples at 0\.5"):
        RetrievePrivilegedLogProb(policy, **given).check_policy(warm)
    begun = [*ASKED, {"role": "assistant", "content": "It "}]
    opened = Conversations.from_messages([begun], goes_on=True)
    rows = policy.encoder.encode_waiting(opened).append_turns(
        [spoken(*policy.encoder.encode_turn("is 4."))]
    )
    going_on = lazy_stack([TensorDict(row.to_dict()) for row in row_tensordicts(rows)])
    write_conversations(going_on, "full", rows)
    with pytest.raises(ValueError, match="a turn that goes on in a message of its prompt"):
        RetrievePrivilegedLogProb(policy, **given)(going_on)
