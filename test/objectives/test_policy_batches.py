"""Losses on what policies and encoders write: ragged output as it is, and demonstrations."""

import math

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from objectives import DistillationLoss, GRPOLoss, SFTLoss
from torchrl_data import (
    ConversationEncoder,
    Conversations,
    Source,
    encode_demonstrations,
    row_tensordicts,
)
from torchrl_envs import ChatEnv
from torchrl_modules import TransformersWrapper

CHATS = [
    [
        {"role": "user", "content": f"What is {i} + {i}?"},
        {"role": "assistant", "content": f"It is {2 * i}."},
        {"role": "user", "content": "say it again please"},
        {"role": "assistant", "content": f"{2 * i}"},
    ]
    for i in range(3)
]


@pytest.fixture
def make_policy(make_tiny_model, chatml_tokenizer):
    def make(**options):
        settings = {"max_new_tokens": 5}
        return TransformersWrapper(
            make_tiny_model(), tokenizer=chatml_tokenizer, generate_kwargs=settings, **options
        )

    return make


@pytest.fixture
def policy(make_policy):
    return make_policy()


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_a_loss_takes_the_ragged_output_of_a_policy(make_policy, chatml_tokenizer, mode):
    policy = make_policy(input_mode=mode)
    env = ChatEnv(batch_size=(2,), tokenizer=chatml_tokenizer, input_mode=mode)
    query = TensorDict({"query": ["hello", "What is 2 + 2? say it"]}, batch_size=[2])
    out = policy(env.reset(query)).set("advantage", torch.tensor([1.0, -2.0]).view(2, 1, 1))
    rows = lazy_stack(list(out.unbind(0)))
    for loss in (SFTLoss(policy), GRPOLoss(policy)):
        got, want = loss.pack(out), loss.pack(rows)
        assert torch.equal(got.ids, want.ids)
        assert torch.equal(got.target_mask, want.target_mask)
        for name, value in want.entries.items():
            assert torch.equal(got.entries[name], value), name
        assert got.num_targets > 0
    on_policy = GRPOLoss(policy)(out)
    torch.testing.assert_close(on_policy.ratio_mean, torch.tensor(1.0))


def test_demonstrations_train_what_the_assistant_says_and_nothing_else(policy, chatml_tokenizer):
    """By decoding what is trained: both turns with their closing token; nothing is left open."""
    conversations = encode_demonstrations(policy.encoder, CHATS)
    rows = row_tensordicts(conversations)
    for chat, row in zip(CHATS, rows, strict=True):
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        said = [chat[1]["content"], chat[3]["content"]]
        assert chatml_tokenizer.decode(ids[mask]) == "".join(f"{text}<|im_end|>" for text in said)
        turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>" for m in chat]
        assert chatml_tokenizer.decode(ids) == "\n".join(turns)
        assert chatml_tokenizer.decode(row["tokens", "response"]) == f"{said[1]}<|im_end|>"
        assert row["log_probs", "full"].isnan().equal(mask), "nobody sampled it"
    assert not any(position.awaits_response for position in conversations.positions)
    output = SFTLoss(policy)(lazy_stack(rows))
    assert output.num_active_tokens == sum(row["masks", "all_assistant_mask"].sum() for row in rows)
    scores = []
    for row in rows:
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        logits = policy.model(ids[None]).logits[0].log_softmax(-1)
        scores.append(logits[:-1].gather(-1, ids[1:, None])[mask[1:], 0])
    torch.testing.assert_close(output.loss_sft, -torch.cat(scores).mean())


def test_a_demonstration_goes_on_as_a_conversation(policy):
    demonstration = encode_demonstrations(policy.encoder, CHATS[:1])
    asked = demonstration.append_messages([[{"role": "user", "content": "and now?"}]])
    state = policy.encoder.encode_waiting(asked)
    assert state.position(0).awaits_response
    again = policy.encoder.encode_waiting(
        Conversations.from_messages([[*CHATS[0], {"role": "user", "content": "and now?"}]])
    )
    assert state.ids(0) == again.ids(0)
    assert int((state.sources(0) == Source.MODEL).sum()) == demonstration.assistant_mask(0).sum()


def test_nothing_to_train_raises_and_says_what_to_do(policy, chatml_tokenizer):
    opened = ConversationEncoder(chatml_tokenizer).encode_waiting(
        Conversations.from_messages(CHATS)
    )
    batch = lazy_stack(row_tensordicts(opened))
    for loss in (SFTLoss, DistillationLoss):
        for row in batch.unbind(0):
            row["next", "teacher_log_probs", "full"] = row["log_probs", "full"]
        with pytest.raises(ValueError, match=r"no token of the 3 rows.*encode_demonstrations"):
            loss(policy)(batch)
        assert loss(policy, allow_empty=True)(batch).total().item() == 0
    with pytest.raises(ValueError, match=r"the assistant says nothing in row 1.*\['user'\]"):
        encode_demonstrations(policy.encoder, [CHATS[0], CHATS[1][:1]])


def test_demonstrations_are_no_rollouts(policy):
    """Nobody sampled them, so a loss that goes by the sampler leaves them out."""
    rows = row_tensordicts(encode_demonstrations(policy.encoder, CHATS))
    for row in rows:
        row["advantage"] = torch.ones(1, 1)
    output = GRPOLoss(policy)(lazy_stack(rows))
    assert (output.num_rows_left_out, output.total()) == (3, 0)
    assert math.isfinite(GRPOLoss(policy, old_policy="current")(lazy_stack(rows)).total().item())


def with_padding(row, width, *, real):
    """The row padded on the right; ``real`` False makes all of it padding."""
    length = len(row["tokens", "full"])
    padded = TensorDict({"advantage": row["advantage"]})
    for key in (("tokens", "full"), ("masks", "all_assistant_mask"), ("log_probs", "full")):
        padded[key] = torch.cat([row[key], row[key].new_zeros(width - length)])
    padded["masks", "all_attention_mask"] = (torch.arange(width) < length) & real
    return padded


@pytest.mark.parametrize("padded", [False, True], ids=["rows of 0 tokens", "all-False masks"])
def test_empty_rows_count_and_harm_nothing(make_tiny_model, chatml_tokenizer, make_row, padded):
    """With the real scorer, which takes no empty sequence."""
    actor = TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer)
    loss = GRPOLoss(actor, aggregation="sequence_mean")
    full = [make_row(i, advantage=1.0 - i) for i in range(2)]
    if padded:
        empty = [with_padding(full[0], 12, real=False)] * 2
        full = [with_padding(row, 12, real=True) for row in full]
    else:
        empty = [make_row(9, prompt=0, turns=(), advantage=1.0)] * 2
    stack = torch.stack if padded else lazy_stack
    got = loss(stack([empty[0], full[0], empty[1], full[1]]))
    want = loss(stack(full))
    torch.testing.assert_close(got.loss_objective * 2, want.loss_objective)
    assert got.num_sequences.item() == 4
    alone = loss(stack(empty))
    alone.total().backward()
    assert (alone.total().item(), alone.num_sequences.item()) == (0, 2)


def test_an_id_beyond_the_vocabulary_is_named(make_tiny_model, chatml_tokenizer, make_row):
    actor = TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer)
    rows = [make_row(i, advantage=1.0) for i in range(3)]
    rows[1]["tokens", "full"][4] = 10**6
    with pytest.raises(ValueError, match="token 4 of sequence 1 has the id 1000000"):
        GRPOLoss(actor)(lazy_stack(rows))
