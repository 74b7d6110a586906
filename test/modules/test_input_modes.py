"""Prompts of all modes, from an environment or built by hand, and what the policy makes of them."""

import copy
import warnings

import pytest
import torch
import torchrl.data.llm
from tensordict import TensorDict

from torchrl_data import ChatHistory, History, Masks, Text, Tokens, builtin_template
from torchrl_envs import ChatEnv
from torchrl_modules import TransformersWrapper

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what TorchRL imports
    from torchrl.modules.llm import ChatHistory as ChatHistoryOfTorchRL

CHATS = [[{"role": "user", "content": text}] for text in ("hi", "a longer question 🙂", "x")]
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def make_policy(chatml_tokenizer, make_tiny_model):
    def make(input_mode, **kwargs):
        kwargs.setdefault("generate_kwargs", {"max_new_tokens": 6, "temperature": 0.0})
        return TransformersWrapper(
            make_tiny_model(), tokenizer=chatml_tokenizer, input_mode=input_mode, **kwargs
        )

    return make


def prompt_ids(tokenizer):
    """What the chat template's prompts of `CHATS` are in tokens."""
    history = History.from_chats(CHATS)
    return history.apply_chat_template(tokenizer=tokenizer, tokenize=True)


def batch_of(form, tokenizer, shape=(3,)):
    ids = prompt_ids(tokenizer)
    shape = torch.Size(shape)
    texts = tokenizer.batch_decode(ids)
    if form == "history":
        return TensorDict(
            {"history": ChatHistory(prompt=History.from_chats(CHATS), batch_size=3)}, 3
        )
    if form == "torchrl":
        theirs = torchrl.data.llm.History.from_chats(CHATS)
        return TensorDict({"history": ChatHistoryOfTorchRL(prompt=theirs, batch_size=3)}, 3)
    if form == "text":
        return TensorDict({"text": Text(prompt=texts, batch_size=3)}, 3)
    if form == "ragged":
        return TensorDict({"tokens": Tokens.from_rows(prompt=ids)}, 3)
    if form == "nested":
        nested = torch.nested.nested_tensor(ids, layout=torch.jagged)
        return TensorDict({"tokens": Tokens(prompt=nested, batch_size=3)}, 3)
    width = max(map(len, ids))
    pad = tokenizer.pad_token_id
    padded = torch.stack(
        [torch.cat([ids[i].new_full((width - len(ids[i]),), pad), ids[i]]) for i in range(3)]
    )
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in ids])
    return TensorDict(
        {
            "tokens": Tokens(prompt=padded, padded=True, batch_size=3),
            "masks": Masks(all_attention_mask=mask, batch_size=3),
        },
        3,
    )


FORMS = {
    "history": "history",
    "torchrl": "history",
    "text": "text",
    "ragged": "tokens",
    "nested": "tokens",
    "padded": "tokens",
}


@pytest.mark.parametrize("form", FORMS)
def test_the_same_prompt_by_hand_gives_the_same_turn_in_every_mode(
    form, make_policy, chatml_tokenizer
):
    batch = make_policy(FORMS[form])(batch_of(form, chatml_tokenizer))
    expected = make_policy("history")(batch_of("history", chatml_tokenizer))
    for i, (row, other) in enumerate(zip(batch.unbind(0), expected.unbind(0), strict=True)):
        for key in (
            ("tokens", "full"),
            ("tokens", "response"),
            ("masks", "all_assistant_mask"),
            ("log_probs", "full"),
        ):
            torch.testing.assert_close(row[key], other[key])
        assert row["tokens", "prompt"].tolist() == prompt_ids(chatml_tokenizer)[i].tolist()
    assert batch["history"].response.content == expected["history"].response.content
    assert batch["history"].response.role == [["assistant"]] * 3
    if form == "text":
        text = batch["text"]
        assert [p + r for p, r in zip(text.prompt, text.response, strict=True)] == text.full
        assert text.full == [
            chatml_tokenizer.decode(row["tokens", "full"]) for row in batch.unbind(0)
        ]


def test_an_empty_row_of_tokens_is_marked_alone(make_policy, chatml_tokenizer):
    ids = prompt_ids(chatml_tokenizer)
    rows = [ids[0], ids[0].new_zeros(0), ids[2]]
    batch = make_policy("tokens")(TensorDict({"tokens": Tokens.from_rows(prompt=rows)}, 3))
    alone = make_policy("tokens")(batch_of("ragged", chatml_tokenizer))
    assert batch["finish_reason"] == ["length", "error: the prompt is empty", "length"]
    for row in (0, 2):
        assert torch.equal(batch[row]["tokens", "full"], alone[row]["tokens", "full"])
    scored = make_policy("tokens", generate=False)(batch)
    assert scored[1]["log_probs", "full"].shape == (0,)
    for row in (0, 2):
        assert scored[row]["log_probs", "full"].equal(
            make_policy("tokens", generate=False)(alone)[row]["log_probs", "full"]
        )
    assert make_policy("tokens", generate=False)(batch[1:2])[0]["log_probs", "full"].shape == (0,)


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_a_prompt_that_is_shown_otherwise_than_it_is_sampled_from_is_refused(
    mode, make_policy, chatml_tokenizer
):
    dated = "{% if date is defined %}{{ date }}{% endif %}" + builtin_template("chatml")
    tokenizer = copy.deepcopy(chatml_tokenizer)
    tokenizer.chat_template = dated
    env = ChatEnv(
        batch_size=(1,), input_mode=mode, tokenizer=tokenizer, template_kwargs={"date": "today"}
    )
    batch = env.reset(TensorDict({"query": ["hi"]}, batch_size=[1]))
    with pytest.raises(ValueError, match=r"other text than the policy samples from.*chat template"):
        make_policy(mode)(batch)
    with pytest.raises(ValueError, match=r"date \('today' / 'not given'\)"):
        make_policy(mode, chat_template=dated)(batch)
    make_policy(mode, chat_template=dated, chat_template_kwargs={"date": "today"})(batch)
