"""Calls of the tools of games: few tokens for the embedded model, and the text as it was."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from torchrl_data.templates.registry import builtin_template
from torchrl_envs.tasks.by_name import make_task
from torchrl_modules.tiny_model import train_tokenizer

SMALL = {"num_rows": 40, "num_held_out": 20, "num_demonstrations": 40, "seed": 3}


def inside_calls(tokens):
    """The tokens between the control tokens of each call."""
    begins = [i for i, token in enumerate(tokens) if token == "<tool_call>"]
    return [tokens[begin + 1 : tokens.index("</tool_call>", begin)] for begin in begins]


def tokenizer_of(task):
    """As the embedded model has it, and what it was made from."""
    texts, _ = render_jinja_template(task.demonstrations, chat_template=builtin_template("chatml"))
    return train_tokenizer(texts, isolated=task.isolated, phrases=task.phrases), texts


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [
        pytest.param("catch", 1, id="each move is a token"),
        pytest.param("number_guessing", 4, id="what varies is the number"),
        pytest.param("nim", 4, id="and here how many"),
        pytest.param("wordle", 4 + 5, id="a word is its letters, between quotes"),
        pytest.param("wordle/easy", 4 + 1, id="a word of a short list is one token"),
    ],
)
def test_what_does_not_vary_in_a_call_is_one_token(name, num_tokens):
    name, _, level = name.partition("/")
    task = make_task(name, **SMALL, **({"level": level} if level else {}))
    tokenizer, texts = tokenizer_of(task)
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        calls = inside_calls([tokenizer.decode([i]) for i in ids])
        assert {len(call) for call in calls} == {num_tokens}
        prompt = task.train_rows[0]["prompt"]
        assert tokenizer.encode(prompt, add_special_tokens=False)[1:] == []


def test_letters_and_marks_are_tokens():
    """One each; of a short list of words all five."""
    answer = "C R I S P\nX Y G X X"
    for level, pieces in (
        ("own", ["C", " R", " I", " S", " P", "\n", "X", " Y", " G", " X", " X"]),
        ("easy", ["C R I S P", "\n", "X Y G X X"]),
    ):
        task = make_task("wordle", **SMALL, level=level)
        tokenizer, _ = tokenizer_of(task)
        assert [tokenizer.decode([i]) for i in tokenizer.encode(answer)] == pieces


@pytest.mark.parametrize("ball", ["o....", "..o..", "....o"])
def test_a_board_is_what_is_in_it_and_how_much_is_empty(ball):
    task = make_task("catch", **SMALL)
    tokenizer = train_tokenizer(["a"], isolated=task.isolated, phrases=task.phrases)
    before, after = "\n".join(["....."] * 3), "\n".join(["....."] * 5)
    ids = tokenizer.encode(f"{before}\n{ball}\n{after}\n..=..")
    pieces = [tokenizer.decode([i]) for i in ids]
    assert pieces == [before, "\n", ball, "\n", after, "\n", "..=.."]
