"""Labelled answers: the forms that are read, and the rows with answers to other prompts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from torchrl_data import ConversationEncoder, keys, kto_rows, read_labelled, with_mismatched

USER = {"role": "user", "content": "2 + 2?"}
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("4", "five"))
ONE = [([USER, FOUR], 1, True)]

FORMS = {
    "texts": ({"prompt": "2 + 2?", "completion": "4", "label": True}, ONE),
    "messages": ({"prompt": [USER], "completion": [FOUR], "label": 1}, ONE),
    "a text, as in CSV": ({"prompt": "2 + 2?", "completion": "4", "label": "True"}, ONE),
    "undesirable, after a turn": (
        {"prompt": [USER, FOUR, USER], "completion": "five", "label": False},
        [([USER, FOUR, USER, FIVE], 3, False)],
    ),
    "a pair": (
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "five", "completion": None},
        [*ONE, ([USER, FIVE], 1, False)],
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    row, expected = FORMS[name]
    assert read_labelled(row) == expected


REFUSED = {
    "no label": (
        {"prompt": "?", "completion": "4"},
        r"row 3 has None in 'label'.*\['completion', ",
    ),
    "a rating": ({"prompt": "?", "completion": "4", "label": 5}, "row 3 has 5 in 'label'"),
    "minus one": ({"prompt": "?", "completion": "4", "label": -1}, "row 3 has -1 in 'label'"),
    "no answer": ({"prompt": "?", "completion": "", "label": True}, r"nothing in \['completion'\]"),
    "half a pair": ({"prompt": "?", "chosen": "4"}, r"row 3 .* nothing in \['rejected'\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    row, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        read_labelled(row, number=3)


def test_rows(chatml_tokenizer):
    data = [
        {"prompt": [USER, FOUR, USER], "completion": "five", "label": False},
        {"prompt": "1 + 1?", "chosen": "4", "rejected": "two"},
    ]
    rows = kto_rows(ConversationEncoder(chatml_tokenizer), data)
    decode = chatml_tokenizer.decode
    said = [decode(row[keys.TOKENS_FULL][row[keys.ASSISTANT_MASK]]) for row in rows]
    assert said[::2] == ["five<|im_end|>", "4<|im_end|>", "two<|im_end|>"]
    assert said[1] in said[2::2]
    assert said[3] == said[5] == said[0]
    assert [row[keys.LABEL].item() for row in rows] == [False] * 2 + [True] * 2 + [False] * 2
    assert [row[keys.MISMATCHED].item() for row in rows] == [False, True] * 3
    for row, other in zip(rows[::2], rows[1::2], strict=True):
        first = int(row[keys.ASSISTANT_MASK].int().argmax())
        assert torch.equal(row[keys.TOKENS_FULL][:first], other[keys.TOKENS_FULL][:first])
        assert not other[keys.ASSISTANT_MASK][:first].any()
    alone = kto_rows(ConversationEncoder(chatml_tokenizer), data, mismatched=False)
    assert [row[keys.MISMATCHED].item() for row in alone] == [False] * 3
    wrong = {"prompt": 4, "completion": "?", "label": True}
    with pytest.raises(ValueError, match="row 7: 'prompt' is a text or a list"):
        kto_rows(ConversationEncoder(chatml_tokenizer), [data[1], wrong], first_row=6)


def made_row(prompt, answer, *, label=True):
    """A row of a prompt that is a number repeated, and an answer of 100 and its number."""
    ids = torch.tensor([prompt] * (1 + prompt % 3) + [100, 200 + answer, 300])
    row = TensorDict({keys.TOKENS_FULL: ids, keys.LABEL: torch.tensor([label])})
    row[keys.ASSISTANT_MASK] = ids >= 100
    row[keys.ASSISTANT_MASK][-1] = False  # what a tool says
    return row


@given(st.lists(st.integers(0, 5), min_size=2, max_size=12), st.integers(0, 9), st.integers(3, 9))
def test_each_prompt_gets_the_answer_to_another_one(prompts, seed, most):
    rows = [made_row(prompt, place) for place, prompt in enumerate(prompts)]
    if len(set(prompts)) == 1:
        with pytest.raises(ValueError, match=r"labelled answers are to the same prompt"):
            with_mismatched(rows, seed=seed)
        return
    found = with_mismatched(rows, seed=seed, max_tokens=most)
    taken = []
    for (row, other), own, prompt in zip(found, rows, prompts, strict=True):
        assert row is own
        ids = other[keys.TOKENS_FULL].tolist()
        before = 1 + prompt % 3
        assert ids[:before] == [prompt] * before
        assert len(ids) == min(before + 3, most)
        assert other[keys.ASSISTANT_MASK].tolist() == [100 <= token < 300 for token in ids]
        assert other[keys.MISMATCHED].item()
        taken += [token - 200 for token in ids if 200 <= token < 300]
        assert all(prompts[token - 200] != prompt for token in ids if 200 <= token < 300)
    if len(set(prompts)) == len(prompts) and most == 9:
        assert sorted(taken) == [*range(len(prompts))]
    again = with_mismatched(rows, seed=seed, max_tokens=most)
    for (_, a), (_, b) in zip(found, again, strict=True):
        assert torch.equal(a[keys.TOKENS_FULL], b[keys.TOKENS_FULL])


def test_rows_that_have_no_answers_to_other_prompts():
    rows = [made_row(0, 0), made_row(1, 1)]
    rows[1][keys.ASSISTANT_MASK] = torch.zeros_like(rows[1][keys.ASSISTANT_MASK])
    with pytest.raises(ValueError, match="row 1 has no trained token"):
        with_mismatched(rows)
    rows = [made_row(0, 0), made_row(1, 1)]
    rows[0][keys.IMAGES] = torch.zeros(1)
    with pytest.raises(ValueError, match="row 0 has images"):
        with_mismatched(rows)
    assert with_mismatched([]) == []
