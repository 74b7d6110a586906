"""Two encoders are the same where the same messages give the same tokens."""

import pickle

import pytest
from tokenizers_for_tests import chatml_tokenizer, llama_tokenizer

from torchrl_data import ConversationEncoder, check_same_rendering


def encoder(tokenizer=None, **kwargs):
    kwargs.setdefault("chat_template_name", "qwen3")
    return ConversationEncoder(tokenizer or chatml_tokenizer(), **kwargs)


def test_what_renders_alike_is_the_same():
    one, other = encoder(), encoder()
    check_same_rendering(one, one)
    check_same_rendering(one, other)
    other.tokenizer.backend_tokenizer.enable_padding(length=8)
    other.tokenizer.backend_tokenizer.enable_truncation(4)
    check_same_rendering(one, ConversationEncoder(other.tokenizer, chat_template_name="qwen3"))
    check_same_rendering(one, pickle.loads(pickle.dumps(other)))
    assert one.rendering.digest == other.rendering.digest


@pytest.mark.parametrize(
    ("other", "message"),
    [
        pytest.param(
            {"chat_template_kwargs": {"enable_thinking": False}},
            r"enable_thinking \('not given' / False\)",
            id="template kwargs",
        ),
        pytest.param({"chat_template_name": "chatml"}, "the chat template", id="template"),
        pytest.param(
            {"reasoning_in_content": True}, r"reasoning_in_content \(False / True\)", id="reasoning"
        ),
        pytest.param({"tokenizer": llama_tokenizer()}, "the tokenizer", id="tokenizer"),
    ],
)
def test_differences_are_named(other, message):
    with pytest.raises(ValueError, match=message):
        check_same_rendering(encoder(), encoder(**other))
    assert encoder().rendering.digest != encoder(**other).rendering.digest


def test_special_tokens_count_where_the_template_writes_them():
    tokenizers = [chatml_tokenizer(), chatml_tokenizer()]
    tokenizers[1].eos_token = "<|endoftext|>"
    check_same_rendering(*map(encoder, tokenizers))
    pair = [encoder(tokenizer, chat_template_name="falcon") for tokenizer in tokenizers]
    with pytest.raises(ValueError, match=r"eos_token \('<\|im_end\|>' / '<\|endoftext\|>'\)"):
        check_same_rendering(*pair)
