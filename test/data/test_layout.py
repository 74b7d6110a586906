"""The layouts of a batch and the ways between them: full = prompt + response, to the token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tokenizers_for_tests import EXAMPLES, chatml_tokenizer

from torchrl_data import (
    ChatHistory,
    ConversationEncoder,
    Conversations,
    History,
    LogProbs,
    Masks,
    Text,
    Tokens,
    write_conversations,
)
from torchrl_data.conversation import Turn

QUESTION = {"role": "user", "content": "What is 2 + 2?"}
ANSWER = {"role": "assistant", "content": "It is 4."}
ROWS = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=6), st.lists(st.integers(0, 9), max_size=6)),
    min_size=1,
    max_size=5,
)


def tensors(rows):
    return [torch.tensor(row, dtype=torch.int64) for row in rows]


@EXAMPLES
@given(ROWS, st.integers(0, 9))
def test_padding_and_back_is_exact_whatever_the_pad_id(rows, pad_id):
    """Also where the pad id is a real token: padding is told apart by the mask alone."""
    tokens = Tokens.from_rows(
        prompt=tensors(p for p, _ in rows),
        response=tensors(r for _, r in rows),
        full=tensors(p + r for p, r in rows),
    )
    padded, masks = tokens.to_padded(pad_id)
    widest = max(len(p) for p, _ in rows)
    assert padded.full.shape == (len(rows), widest + max(len(r) for _, r in rows))
    for i, (prompt, response) in enumerate(rows):
        start = widest - len(prompt)
        assert padded.full[i, start : widest + len(response)].tolist() == prompt + response
        assert masks.all_attention_mask[i].nonzero().view(-1).tolist() == list(
            range(start, widest + len(response))
        )
    back = padded.to_ragged(masks)
    for name in ("prompt", "response", "full"):
        assert [row.tolist() for row in back.rows(name)] == [
            row.tolist() for row in tokens.rows(name)
        ]


@EXAMPLES
@given(ROWS)
def test_views_hold_the_same_values(rows):
    full = [p + r + [1] for p, r in rows]
    tokens = Tokens.from_rows(full=tensors(full))
    values, lengths = tokens.packed("full")
    assert values.tolist() == [i for row in full for i in row]
    assert lengths.tolist() == [len(row) for row in full]
    assert [row.tolist() for row in tokens.nested("full").unbind()] == full
    width = max(map(len, full))
    assert tokens.dense("full", value=-1, side="left").tolist() == [
        [-1] * (width - len(row)) + row for row in full
    ]
    assert tokens[len(rows) - 1].full.tolist() == full[-1]
    held = TensorDict({"tokens": tokens}, batch_size=[len(rows)])
    assert held[0]["tokens", "full"].tolist() == full[0]


def test_messages_to_tokens_to_text_and_back():
    tokenizer = chatml_tokenizer()
    system = {"role": "system", "content": "Be brief."}
    history = ChatHistory(
        prompt=History.from_chats([[system, QUESTION], [QUESTION]]),
        full=History.from_chats([[system, QUESTION, ANSWER], [QUESTION, ANSWER]]),
        batch_size=[2],
    )
    tokens = history.to_tokens(tokenizer)
    for i in range(2):
        prompt, response, full = (tokens.rows(n)[i] for n in ("prompt", "response", "full"))
        assert torch.equal(torch.cat([prompt, response]), full)
        assert tokenizer.decode(response) == "It is 4.<|im_end|>"
    text = tokens.to_text(tokenizer)
    assert isinstance(text, Text)
    assert list(text.response) == ["It is 4.<|im_end|>"] * 2
    assert [p + r for p, r in zip(text.prompt, text.response, strict=True)] == list(text.full)
    parsed = tokens.to_history(tokenizer)
    assert parsed.full.to_chats() == history.full.to_chats()
    assert parsed.prompt.to_chats() == history.prompt.to_chats()
    assert parsed.response.to_chats() == [[ANSWER], [ANSWER]]
    assert list(history.to_text(tokenizer).full) == list(text.full)


def test_text_to_tokens_concatenates():
    tokenizer = chatml_tokenizer()
    tokens = Text(prompt=["the f", "a"], response=["ox", ""], batch_size=[2]).to_tokens(tokenizer)
    for prompt, response, full in zip(
        tokens.rows("prompt"), tokens.rows("response"), tokens.rows("full"), strict=True
    ):
        assert torch.equal(torch.cat([prompt, response]), full)
    assert tokens.rows("full")[0].tolist() != tokenizer("the fox")["input_ids"]


def test_conversations_give_the_tokens_that_they_hold():
    """The sampled tokens are no tokenizer's: tokenizing the text again would give others."""
    tokenizer = chatml_tokenizer()
    encoder = ConversationEncoder(tokenizer)
    state = encoder.encode_waiting(Conversations.from_messages([[QUESTION]]))
    ids = [*tokenizer.convert_tokens_to_ids(["I", "t"]), encoder.end_of_turn_id]
    state = state.append_turns([Turn(ids, [-1.0] * 3, {"role": "assistant", "content": "It"})])
    batch = TensorDict(batch_size=[1])
    write_conversations(batch, "full", state)
    tokens = batch["history"].to_tokens(tokenizer)
    assert tokens.rows("response")[0].tolist() == ids
    assert tokens.rows("full")[0].tolist() == state.ids(0)
    assert batch["history"].full.content == [[QUESTION["content"], "It"]]
    assert batch["history"].apply_chat_template(
        tokenizer=tokenizer, add_generation_prompt=False
    ) == [tokenizer.decode(state.ids(0)) + "\n"]


def test_one_message_a_row_gets_its_dimension():
    history = ChatHistory(response=History.from_chats([ANSWER, ANSWER]), batch_size=[2])
    assert history.response.shape == (2, 1)


@pytest.mark.parametrize("group", [Tokens, LogProbs, Masks, Text, ChatHistory])
def test_specs_make_their_group(group):
    spec = group.default_spec((2,))
    assert spec.data_cls is group
    assert set(spec.keys()) >= (
        {"all_attention_mask", "all_assistant_mask"}
        if group is Masks
        else {"prompt", "response", "full"}
    )


def test_what_can_not_be_converted_says_why():
    tokenizer = chatml_tokenizer()
    padded, _ = Tokens.from_rows(
        prompt=tensors([[1]]), response=tensors([[2]]), full=tensors([[1, 2]])
    ).to_padded(0)
    with pytest.raises(ValueError, match="a pad id may be a real token too"):
        padded.to_text(tokenizer)
    other = ChatHistory(
        prompt=History.from_chats([[QUESTION]]),
        full=History.from_chats([[{"role": "user", "content": "Why?"}, ANSWER]]),
        batch_size=[1],
    )
    with pytest.raises(ValueError, match="Row 0: the full conversation does not begin with"):
        other.to_tokens(tokenizer)
    with pytest.raises(ValueError, match="neither a prompt nor a full conversation"):
        ChatHistory(batch_size=[1]).to_tokens(tokenizer)
    with pytest.raises(ValueError, match=r"a tensor a row .*'prompt': 1, 'full': 2"):
        Tokens.from_rows(prompt=tensors([[1]]), full=tensors([[1], [2]]))
    with pytest.raises(ValueError, match=r"a tensor a row .*'prompt': 0"):
        Tokens.from_rows(prompt=[[1]])


@pytest.mark.parametrize("name", ["assistant_mask_all", "attention_mask_all", "mask"])
def test_an_entry_that_is_none_of_a_group_is_refused_with_those_that_are(name):
    masks = Masks.from_rows(all_assistant_mask=[torch.tensor([True, False]), torch.tensor([True])])
    rows = TensorDict({"masks": masks}, [2])
    assert [len(mask) for mask in rows["masks"].all_assistant_mask] == [2, 1]
    assert rows["masks"].all_attention_mask is None  # an entry that is not there
    with pytest.raises(AttributeError, match=f"Masks has no '{name}'; it has .'all_ass"):
        getattr(rows["masks"], name)
