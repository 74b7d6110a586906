"""Preference data: the forms that are read, and what of a pair is trained."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_data import (
    ConversationEncoder,
    encode_demonstrations,
    pair_of,
    preference_rows,
    read_pair,
    row_tensordicts,
)

USER = {"role": "user", "content": "2 + 2?"}
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("4", "five"))
SYSTEM = {"role": "system", "content": "Be brief."}
WHOLE = ([USER, FOUR], [USER, FIVE], 1)

FORMS = {
    "texts": ({"prompt": "2 + 2?", "chosen": "4", "rejected": "five"}, WHOLE),
    "messages": ({"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]}, WHOLE),
    "no prompt": ({"chosen": [USER, FOUR], "rejected": [USER, FIVE]}, WHOLE),
    "a text, and conversations that begin with it": (
        {"prompt": "2 + 2?", "chosen": [USER, FOUR], "rejected": [USER, FIVE]},
        WHOLE,
    ),
    "keys without a value": (
        {"chosen": [USER | {"name": None}, FOUR | {"tool_calls": None}], "rejected": [USER, FIVE]},
        WHOLE,
    ),
    "a system prompt and a turn before": (
        {"prompt": [SYSTEM, USER, FOUR, USER], "chosen": "4", "rejected": "five"},
        ([SYSTEM, USER, FOUR, USER, FOUR], [SYSTEM, USER, FOUR, USER, FIVE], 4),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    row, expected = FORMS[name]
    assert read_pair(row) == (*expected, None)
    for margin in (None, 0, 2.5):
        assert read_pair({**row, "margin": margin}).margin == margin
    assert read_pair({**row, "margin": "2.5"}).margin == 2.5  # as a file of CSV has it


REFUSED = {
    "no answer": ({"prompt": "?", "chosen": "4"}, r"row 3 .* nothing in \['rejected'\]"),
    "a number": ({"prompt": "?", "chosen": 4, "rejected": "5"}, "'chosen' is a text or a list"),
    "the same": ({"prompt": "?", "chosen": "4", "rejected": "4"}, "are the same"),
    "other prompts": (
        {"chosen": [USER, FOUR], "rejected": [SYSTEM, FIVE]},
        r"0 messages in common, after which they go on with \['user', 'system'\]",
    ),
    "a user goes on": (
        {"chosen": [USER, FOUR, USER, FOUR], "rejected": [USER, FOUR, SYSTEM, FOUR]},
        r"2 messages in common, after which they go on with \['user', 'system'\]",
    ),
    "one is the beginning of the other": (
        {"chosen": [USER, FOUR, USER, FIVE], "rejected": [USER, FOUR]},
        r"go on with \['user', 'nothing more'\]",
    ),
    "a prompt that is not theirs": (
        {"prompt": "3?", "chosen": [USER, FOUR], "rejected": [USER, FIVE]},
        r"begin with messages of \['user', 'user'\], which are not those of 'prompt'",
    ),
    "no prompt at all": ({"chosen": [FOUR], "rejected": [FIVE]}, "have 0 messages in common"),
    "an unknown role": (
        {"prompt": [{"role": "judge", "content": "?"}], "chosen": "4", "rejected": "5"},
        r"Message 0 of row 3 has the unknown role 'judge'",
    ),
    "a margin that is a text": (
        {"prompt": "?", "chosen": "4", "rejected": "5", "margin": "much"},
        "row 3 .* 'margin' .* a finite number of at least 0, got 'much'",
    ),
    "a margin that is no number, in CSV": (
        {"prompt": "?", "chosen": "4", "rejected": "5", "margin": "nan"},
        "row 3 .* 'margin' .* a finite number of at least 0, got 'nan'",
    ),
    "a margin below 0": (
        {"prompt": "?", "chosen": "4", "rejected": "5", "margin": -1.0},
        "a finite number of at least 0, got -1.0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    row, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        read_pair(row, number=3)


def test_margins_are_in_the_rows_where_a_pair_has_one(chatml_tokenizer):
    encoder = ConversationEncoder(chatml_tokenizer)
    pair = {"prompt": "2 + 2?", "chosen": "4", "rejected": "five"}
    rows = preference_rows(encoder, [pair, {**pair, "margin": 2}])
    assert [row["margin"].item() for row in rows] == [0.0, 0.0, 2.0, 2.0]
    assert "margin" not in preference_rows(encoder, [pair])[0]


turns = st.lists(st.sampled_from(("yes", "no", "")), min_size=1, max_size=3)


@given(st.lists(turns, max_size=2), turns, turns)
def test_what_the_assistant_says_after_the_two_part_is_trained(
    chatml_tokenizer, shared, better, other
):
    """Of every turn the text and the token that ends it; tools that answer between are not."""

    def said(texts):
        for text in texts:
            yield {"role": "assistant", "content": text}
            yield {"role": "tool", "content": "4"}

    if better[0] == other[0]:
        better = [better[0] + "!", *better[1:]]
    begin = [USER, *(m for texts in shared for m in said(texts))]
    pair = pair_of([*begin, *said(better)], [*begin, *said(other)])
    assert pair.num_shared == len(begin)
    rows = preference_rows(ConversationEncoder(chatml_tokenizer), [pair, pair], first_row=5)
    assert [row["pair_id"].item() for row in rows] == [0, 0, 1, 1]
    assert [row["chosen"].item() for row in rows] == [True, False] * 2
    for row, texts, chat in zip(rows, (better, other) * 2, (pair[0], pair[1]) * 2, strict=True):
        mask = row["masks", "all_assistant_mask"]
        trained = chatml_tokenizer.decode(row["tokens", "full"][mask])
        assert trained == "".join(f"{text}<|im_end|>" for text in texts)
        [whole] = row_tensordicts(
            encode_demonstrations(ConversationEncoder(chatml_tokenizer), [chat])
        )
        assert row["tokens", "full"].equal(whole["tokens", "full"])
        assert not (mask & ~whole["masks", "all_assistant_mask"]).any()


def test_which_answer_can_not_be_shown_is_said(chatml_tokenizer):
    bad = {"role": "assistant", "content": "4", "name": "Ann"}
    with pytest.raises(ValueError, match=r"'rejected' of the preferences: .*row 7"):
        preference_rows(
            ConversationEncoder(chatml_tokenizer),
            [{"prompt": "2?", "chosen": "4", "rejected": [bad]}],
            first_row=7,
        )
