"""Easy questions of reasoning-gym: the model that is made here can say every answer."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.demonstrations import Slips, common_phrases
from torchrl_envs.tasks.easy_generators import EASY
from torchrl_envs.tasks.reasoning_gym import Question, question_task, score_answer
from torchrl_modules.tiny_model import train_tokenizer

MAX_PROMPT_TOKENS = 256
KINDS = (str.isdigit, str.isupper, str.islower)


@pytest.mark.parametrize("generator", EASY)
def test_easy_questions_can_be_learnt(generator):
    task = question_task(generator, level="easy", num_rows=1024, num_demonstrations=256)
    tokenizer = train_tokenizer(["a"], isolated=task.isolated, phrases=task.phrases)
    question = Question()
    longest = 0
    for row in task.held_out_rows:
        ids = tokenizer.encode(row["answer"])
        assert tokenizer.decode(ids) == row["answer"]
        prompt = tokenizer.encode(row["prompt"])
        assert tokenizer.decode(prompt) == row["prompt"]
        longest = max(longest, len(prompt))
        assert len(ids) < task.max_new_tokens
        question.reset(**row)
        assert question.get_reward(messages=[{"role": "assistant", "content": row["answer"]}]) == 1
    assert longest < MAX_PROMPT_TOKENS
    assert not {r["prompt"] for r in task.held_out_rows} & {r["prompt"] for r in task.train_rows}
    asked = {row["prompt"]: row for row in task.train_rows}
    scores = [score_answer(a["content"], asked[q["content"]]) for q, a in task.demonstrations]
    # 0.35, and four standard deviations
    assert 0.23 < sum(score >= 1 for score in scores) / len(scores) < 0.47


@given(
    st.lists(st.text("0179aBcé -/\n×", min_size=1, max_size=8), min_size=1, max_size=5),
    st.integers(0, 99),
)
def test_a_slip_is_another_character_of_the_same_kind(answers, seed):
    slips = Slips(answers, 0.01)
    used = set("".join(answers))
    for answer in answers:
        changed = slips(answer, random.Random(seed))
        choices = [{c for c in used if is_kind(c)} for is_kind in KINDS]
        if not any(len(each) > 1 and each & set(answer) for each in choices):
            assert changed in answers  # nothing can be slipped
            continue
        assert len(changed) == len(answer)
        for was, now in zip(answer, changed, strict=True):
            assert now in used
            for is_kind in KINDS:
                assert is_kind(was) == is_kind(now)
            assert was == now or was.isdigit() or was.isalpha()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param("7", 0.35, id="one digit"),
        pytest.param("1234567890", 0.35, id="ten digits"),
        pytest.param("-", 0.35 + 0.65 / 2, id="no digit: one of both answers"),
    ],
)
def test_as_many_answers_are_right_however_long_they_are(answer, expected):
    slips, rng = Slips([answer, "0123456789"], 0.35), random.Random(0)
    right = sum(slips(answer, rng) == answer for _ in range(4000)) / 4000
    assert right == pytest.approx(expected, abs=0.03)  # four standard deviations


def test_what_many_prompts_say_is_a_phrase():
    rows = [{"prompt": f"Add the numbers: {i}, then halve x{i}."} for i in range(200)]
    rows[0]["prompt"] = "rare words: the 7 8"
    for row, number in zip(rows[2:8], "abcdef", strict=True):  # a line, and single words
        row["prompt"] += f"\nSay 'it <as> 1.5':\n7 8\nwhat {number} is {number} {number} in"
    assert common_phrases(rows) == (
        *("user", "assistant"),
        "Say 'it <as> 1.5':",
        *("Add the numbers", "then halve"),
        *("in", "is", "what"),
    )


def test_a_phrase_is_one_token_but_inside_a_word():
    tokenizer = train_tokenizer(["a"], vocab_size=263, isolated=r"[\s\S]", phrases=["the sum"])
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the sum: 1")) == [
        *("theĠsum", ":", "Ġ", "1"),
    ]
    assert len(tokenizer.encode("the summer")) == len("the summer")
    with pytest.raises(ValueError, match="a phrase is empty, got"):
        train_tokenizer(["a"], phrases=["a", ""])


@given(
    st.lists(st.text("ab1<'| \n.×", min_size=1, max_size=4), max_size=4),
    st.text("ab1<'| \n.×", max_size=20),
    st.sampled_from([r"[\s\S]", r"\d"]),
)
@settings(max_examples=50, deadline=None)
def test_a_text_with_phrases_is_read_and_written_back(phrases, text, isolated):
    tokenizer = train_tokenizer(["a"], vocab_size=263, isolated=isolated, phrases=phrases)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    for phrase in phrases:
        assert len(tokenizer.encode(phrase)) == 1


def test_a_generator_without_easy_questions_says_what_to_do():
    words = "no easy questions of zebra_puzzles.*policy.model=.*spell_backward.*task.level=own"
    with pytest.raises(ValueError, match=words):
        question_task("zebra_puzzles", level="easy")
    with pytest.raises(ValueError, match=words):
        make_task("multi_env", tasks={"zebra_puzzles": 1}, level="easy")
    with pytest.raises(ValueError, match=r"level must be one of .*, got 'hard'"):
        question_task("gcd", level="hard")
    with pytest.raises(
        ValueError, match=r"right_fraction must be a finite number in \(0, 1\], got 0"
    ):
        question_task("gcd", right_fraction=0)


def test_settings_go_before_those_that_make_it_easy():
    task = question_task(
        "spell_backward",
        level="easy",
        config={"max_word_len": 4},
        **{"num_rows": 200, "num_held_out": 20, "num_demonstrations": 1},
    )
    assert {len(row["answer"]) for row in task.train_rows} == {3, 4}
