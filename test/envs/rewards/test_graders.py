"""Verifiable rewards: what they find right, and what a hanging or greedy answer costs."""

import subprocess
import sys
import textwrap

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_data.batched_object import read_objects
from torchrl_envs import ChatEnv, DataLoadingPrimer, RepetitionPenalty, RewardFunctions
from torchrl_envs.graders.answers import (
    exact_match,
    final_text,
    hash_answer,
    hash_answer_match,
    normalize_number,
    read_tags,
    think_answer_format,
)
from torchrl_envs.graders.math_verify import MathVerifyReward, grade_math

HANGS = r"\boxed{9^{9^{9^9}}}"


def said(text):
    return [{"role": "assistant", "content": text}]


def test_mathematics_is_compared_by_value():
    cases = [
        (r"Hence \boxed{18}.", "18", 1.0),
        (r"The result is $\frac{2}{4}$", r"\frac{1}{2}", 1.0),
        ("<think>3?</think><answer>0.5</answer>", "1/2", 1.0),
        (r"$1 + x^2$", "$x^2+1$", 1.0),
        (r"\boxed{17}", "18", 0.0),
        ("I do not know", "18", 0.0),
        ("", "18", 0.0),
    ]
    assert [grade_math(text, gold) for text, gold, _ in cases] == [reward for *_, reward in cases]


def test_a_hanging_answer_costs_its_rollout_only_and_its_process(scripted, play):
    before = children()
    rows = [
        {"prompt": "<0>", "answer": "4"},
        {"prompt": "<1>", "answer": "4"},
        {"prompt": "<2>", "answer": ""},
        {"prompt": "<3>", "answer": "4"},
    ]
    strict = MathVerifyReward(num_workers=1, timeout_s=4.0)
    lenient = MathVerifyReward(num_workers=1, timeout_s=4.0, timeout_reward=0.25)
    env = ChatEnv(batch_size=4).append_transform(DataLoadingPrimer(rows))
    env.append_transform(RewardFunctions([strict, lenient]))
    script = {"<0>": [r"\boxed{4}"], "<1>": [HANGS], "<2>": ["4"], "<3>": [r"\boxed{2+2}"]}
    end = play(env, scripted(script))[0]
    assert end["scorable"].view(-1).tolist() == [True, False, False, True]
    assert end["reward"].view(-1).nan_to_num(-9.0).tolist() == [2.0, -9.0, -9.0, 2.0]
    errors = read_objects(end, "reward_errors")
    assert "MathVerifyReward raised" in errors[1]
    assert "was not graded within 4 s" in errors[1]
    assert "can't read the right answer ''" in errors[2]
    assert strict.num_timeouts == lenient.num_timeouts == 1
    assert len(children() - before) >= 2
    env.close()
    assert not children() - before, "closing the environment ended the processes"


def children():
    found = psutil.Process().children(recursive=True)
    # multiprocessing keeps one helper of its own until the program ends.
    return {p.pid for p in found if "resource_tracker" not in " ".join(p.cmdline())}


def test_a_column_that_the_data_lacks_is_named_before_the_first_rollout():
    env = ChatEnv(batch_size=1).append_transform(DataLoadingPrimer([{"prompt": "<0>"}]))
    env.append_transform(RewardFunctions([MathVerifyReward(answer_column="gold")]))
    with pytest.raises(ValueError, match=r"MathVerifyReward requires \['gold'\]"):
        env.check()
    env.close()


def test_a_program_without_a_main_guard_runs_once_and_its_workers_end_with_it(tmp_path):
    script = tmp_path / "trains.py"
    script.write_text(
        textwrap.dedent(
            r"""
            import sys, threading
            from torchrl_envs import DataLoadingPrimer, MathVerifyReward
            from torchrl_envs.episode.episode import Episode

            def more(row):
                return {**row, "more": row["number"] + offset}

            offset = 10
            sys.stdout.write("started\n")
            rows = [{"prompt": "<0>", "number": i} for i in range(4)]
            data = DataLoadingPrimer(rows, map_row=more, num_workers=1)
            reward = MathVerifyReward(num_workers=1, timeout_s=60)
            episodes = [Episode() for _ in range(4)]
            data.draw(episodes)
            assert [episode.example["more"] for episode in episodes] == [10, 11, 12, 13]
            assert reward([{"role": "assistant", "content": "0.5"}], answer="1/2") == 1.0
            hanging = [{"role": "assistant", "content": "\\boxed{9^{9^{9^9}}}"}]
            call = threading.Thread(target=reward, args=(hanging,), kwargs={"answer": "2"})
            call.start()
            sys.stdout.write("graded\n")
            sys.stdout.flush()
            call.join()
            """
        )
    )
    program = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert program.stdout.readline() == "started\n"
    assert program.stdout.readline() == "graded\n", "no worker ran the program again"
    running = psutil.Process(program.pid).children(recursive=True)
    assert len(running) == 4, "two workers, and their keepers"
    program.kill()
    assert program.communicate()[0] == ""
    assert psutil.wait_procs(running, timeout=60)[1] == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,200", "1200"),
        (" $1,200.50 ", "1200.5"),
        ("120.00", "120"),
        ("120.", "120"),
        ("+07", "7"),
        ("-0.0", "0"),
        ("-.50", "-0.5"),
        ("30%", "30"),
        ("1000", "1000"),
        ("12 apples", "12 apples"),
        ("1.2.3", "1.2.3"),
        ("-", "-"),
        ("", ""),
    ],
)
def test_numbers_are_normalised(text, number):
    assert normalize_number(text) == number


@given(
    st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-9999, max_value=9999)
)
def test_a_number_is_the_same_however_it_is_written(value):
    written = {f"{value}", f"{value:+}", f"${value:,}", f"{value}0", f" {value}. "}
    normal = {normalize_number(text) for text in written}
    assert len(normal) == 1
    assert float(normal.pop()) == float(value)


@given(st.text())
def test_readers_of_answers_never_raise(text):
    normalize_number(text)
    hash_answer(text)
    tags = read_tags(text)
    assert bool(tags.answers) == ("<answer>" in text and bool(tags.answers))
    think_answer_format([said(text)])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\n#### 72", "72"),
        ("#### 1\n#### 2\nmore", "2"),
        ("#### ", ""),
        ("72", None),
    ],
)
def test_the_answer_after_the_hashes(text, answer):
    assert hash_answer(text) == answer


def test_hash_answers_and_exact_answers():
    texts = ["#### 1,000", "1000", "so #### 5 \n", "####"]
    answers = ["reason #### 1000", "1000", "6", "####"]
    chats = [said(text) for text in texts]
    assert hash_answer_match(chats, answer=answers) == [1.0, 0.0, 0.0, 1.0]
    assert exact_match(chats, answer=answers) == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>\na\n</think>\n<answer>b</answer>\n", 1.0),
        ("<think>a</think><answer>b</answer> more", 0.0),
        ("<answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a<think>b</think></think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
    ],
)
def test_the_format_with_reasoning_and_answer(text, reward):
    assert think_answer_format([said(text)]) == [reward]


def test_the_last_message_counts_if_the_policy_wrote_it():
    assert final_text([*said("a"), {"role": "tool", "content": "b"}, *said("c")]) == "c"
    assert final_text([*said("a"), {"role": "tool", "content": "b"}]) == ""
    assert final_text([]) == ""
    assert final_text(said([{"type": "text", "text": "x"}, {"type": "image"}])) == "x"
    assert final_text(said(None)) == ""


def slow_penalty(texts, size, most):
    """Each n-gram is looked for among all earlier ones."""
    grams = []
    for text in texts:
        words = text.lower().split()
        grams += [words[i : i + size] for i in range(len(words)) if i + size <= len(words)]
    repeated = sum(gram in grams[:i] for i, gram in enumerate(grams))
    return most * repeated / len(grams) if grams else 0.0


WORDS = st.lists(st.sampled_from(["a", "A", "b", "c d"]), max_size=12).map(" ".join)


@given(st.lists(WORDS, min_size=1, max_size=3), st.integers(1, 4), st.floats(-3, -0.1))
def test_repetition_costs_the_share_of_repeated_ngrams(texts, size, most):
    messages = [message for text in texts for message in (said(text)[0], ANSWER)]
    (reward,) = RepetitionPenalty(size, most)([messages])
    assert reward == pytest.approx(slow_penalty(texts, size, most))
    assert most < reward <= 0


ANSWER = {"role": "tool", "content": "a a a a a a"}


def test_repetition_by_hand():
    # Of 7 words 5 trigrams; "the cat sat" is there twice: -2 * (1 - 4 / 5).
    chat = said("The cat sat, the cat sat, yes".replace(",", ""))
    assert RepetitionPenalty(3, -2.0)([chat]) == pytest.approx([-0.4])
    # Thoughts count; n-grams do not reach over the border of two texts.
    thought = {"role": "assistant", "content": "one two", "reasoning_content": "one two"}
    assert RepetitionPenalty(2)([[thought], said("one two"), said("one")]) == [-0.5, 0.0, 0.0]
    # Without spaces: 6 characters, 4 trigrams, of which 3 differ.
    assert RepetitionPenalty(3, unit="characters")([said("\u4f60\u597d\u5417" * 2)]) == [-0.25]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0,), "ngram_size"),
        ((3, 0.0), r"must be a .*, 0\), got 0.0"),
        ((3, -1.0, "letters"), "unit"),
    ],
)
def test_repetition_settings_that_make_no_sense_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        RepetitionPenalty(*arguments[:2], **({"unit": arguments[2]} if arguments[2:] else {}))


def test_repetition_reads_messages_of_string_data(scripted, play):
    env = ChatEnv(batch_size=1).append_transform(DataLoadingPrimer([{"prompt": "q"}]))
    env.append_transform(RewardFunctions([RepetitionPenalty(1)]))
    end = play(env, scripted(["a a"]))[0]
    assert end["reward"].item() == -0.5
