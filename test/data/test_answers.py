"""Rows of a prompt and its completion: the completion is learnt, and nothing of the prompt."""

import pytest

from torchrl_data import (
    ConversationEncoder,
    encode_demonstrations,
    read_completion,
    row_tensordicts,
    train_answer,
)

USER = {"role": "user", "content": "2 + 2?"}
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("4", "five"))
FORMS = {
    "texts": ({"prompt": "2 + 2?", "completion": "4"}, ([USER, FOUR], 1)),
    "messages": (
        {"prompt": [USER, FIVE, USER | {"name": None}], "completion": [FOUR]},
        ([USER, FIVE, USER, FOUR], 3),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    row, expected = FORMS[name]
    assert read_completion(row) == expected


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"completion": "4"}, r"row 7 has nothing in \['prompt'\]; its columns are"),
        ({"prompt": "?", "completion": 4}, "row 7: 'completion' is a text or a list of messages"),
        ({"prompt": "?", "completion": [USER]}, "row 7: the assistant says nothing in its compl"),
        ({"prompt": [{"role": "x", "content": ""}], "completion": "4"}, "Message 0 of row 7 has"),
    ],
)
def test_refused(row, words):
    with pytest.raises(ValueError, match=words):
        read_completion(row, number=7)


def test_what_the_prompt_has_the_assistant_say_is_not_trained(chatml_tokenizer):
    chat, num_prompt = read_completion({"prompt": [USER, FIVE, USER], "completion": "4"})
    encoded = encode_demonstrations(ConversationEncoder(chatml_tokenizer), [chat])
    [row] = row_tensordicts(encoded)

    def trained():
        return chatml_tokenizer.decode(row["tokens", "full"][row["masks", "all_assistant_mask"]])

    assert trained() == "five<|im_end|>4<|im_end|>"
    train_answer(row, chat, num_prompt, who="row 0")
    assert trained() == "4<|im_end|>"
    [row] = row_tensordicts(encoded)
    with pytest.raises(ValueError, match=r"row 0: .* writes the 1 turns .* in 2 pieces"):
        train_answer(row, chat[2:], 1, who="row 0")
