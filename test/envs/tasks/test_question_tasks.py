"""GSM8K, MATH and Countdown on small local data: rewards, data on disk, and what is refused."""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer

from collectors import LLMCollector
from torchrl_envs import ChatEnv, DataLoadingPrimer
from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.countdown import CountdownEnv, countdown_rows, expression_value
from torchrl_envs.tasks.gsm8k import (
    GSM8KEnv,
    GSM8KPrepareQuestion,
    GSM8KRewardParser,
    make_gsm8k_env,
)
from torchrl_envs.tasks.math_problems import MATHEnv, last_boxed
from torchrl_envs.tasks.task import TaskEnv

GSM8K = [
    {"question": "<0> two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"},
    {"question": "<1> a thousand and 200?", "answer": "#### 1,200"},
    {"question": "<2> and now?", "answer": "7"},
    {"question": "<3> no answer?", "answer": "#### 9"},
]
REPLIES = {
    "<0>": ["<think>easy</think><answer>4.0</answer>"],
    "<1>": ["<think>hm</think><answer>$1,300</answer>"],
    "<2>": ["<answer> 7 </answer>"],
    "<3>": ["9 <answer>"],
}


@pytest.fixture
def replies(scripted):
    return scripted(REPLIES)


@pytest.mark.parametrize("form", ["rows", "saved", "saved with splits", "jsonl"])
def test_gsm8k_from_wherever_the_data_are(tmp_path, replies, form):
    source = GSM8K
    if form == "saved":
        datasets.Dataset.from_list(GSM8K).save_to_disk(tmp_path / "data")
        source = tmp_path / "data"
    elif form == "saved with splits":
        splits = {"train": datasets.Dataset.from_list(GSM8K)}
        datasets.DatasetDict(splits).save_to_disk(tmp_path / "data")
        source = str(tmp_path / "data")
    elif form == "jsonl":
        source = tmp_path / "data.jsonl"
        source.write_text("\n".join(map(json.dumps, GSM8K)))
    env = GSM8KEnv(dataset=source, num_envs=4, shuffle=False)
    end = env.step(replies(env.reset()))["next"]
    env.close()
    assert end["done"].all()
    assert end["reward"].shape == (4, 1, 1)
    assert end["reward"].view(-1).tolist() == pytest.approx([1.0, 0.1, 1.0, 0.0])
    assert end["success"].view(-1).tolist() == [True, False, True, False]
    assert end["reward_answer"].view(-1).tolist() == [1.0, 1.0, 1.0, 0.0]
    assert end["reward_think"].view(-1).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert end["reward_right"].view(-1).tolist() == pytest.approx([1.0, 0.1, 1.0, 0.0])
    assert end["scorable"].all()


def test_groups_and_turns(replies):
    env = make_gsm8k_env(GSM8K, num_envs=4, repeats=2, max_steps=3, shuffle=False, seed=3)
    batch = env.reset()
    assert batch["group_id"].tolist() == [0, 0, 1, 1]
    messages = batch["history"].get("prompt").snapshot().messages(2)
    assert [m["role"] for m in messages] == ["system", "user"]
    assert messages[1]["content"] == GSM8K[1]["question"]
    env.close()


def test_the_question_can_be_put_into_a_prompt(scripted):
    env = ChatEnv(batch_size=2).append_transform(DataLoadingPrimer(GSM8K))
    env.append_transform(GSM8KPrepareQuestion("Q: {question} A {number}:"))
    prompt = env.reset()["history"].get("prompt").snapshot()
    assert prompt.messages(1)[-1]["content"] == f"Q: {GSM8K[1]['question']} A {{number}}:"
    env.close()
    with pytest.raises(ValueError, match=r"no \{question\}"):
        GSM8KPrepareQuestion("Q:")


@pytest.mark.parametrize("add", [False, True], ids=["replaces", "adds when asked"])
@pytest.mark.parametrize("place", ["postproc", "buffer"])
def test_finished_trajectories_are_scored_again(replies, place, add):
    parser = GSM8KRewardParser(correct_reward=5.0, add_to_reward=add)
    buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=4)
    env = GSM8KEnv(dataset=GSM8K, num_envs=4, shuffle=False)
    if place == "buffer":
        buffer.append_transform(parser)
    postproc = parser if place == "postproc" else None
    collector = LLMCollector(env, replies, replay_buffer=buffer, postproc=postproc)
    collector.collect()
    collector.shutdown()
    rows = lazy_stack([buffer[i] for i in range(4)])
    first = [1.0, 0.1, 1.0, 0.0]
    expected = [5.0, 0.1, 5.0, 0.0]
    if add:
        expected = [a + b for a, b in zip(first, expected, strict=True)]
    assert rows["reward"].view(-1).tolist() == pytest.approx(expected)
    assert rows["success"].view(-1).tolist() == [True, False, True, False]


def test_an_answer_ends_the_episode_only_when_asked(scripted, play):
    class Coach:
        def reset(self, **row):
            del row

        def hint(self) -> str:
            """Get a hint."""
            return "think"

    from torchrl_envs import EnvironmentTools

    call = '<tool_call>\n{"name": "hint", "arguments": {}}\n</tool_call>'
    turns = [call + "<answer>4</answer>", "<answer>5</answer>"]
    rewards = {}
    for ends in (True, False):
        env = ChatEnv(batch_size=1).append_transform(DataLoadingPrimer(GSM8K[:1]))
        env.append_transform(EnvironmentTools(Coach))
        env.append_transform(GSM8KRewardParser(set_done_if_answer=ends))
        (end,) = play(env, scripted(turns))
        rewards[ends] = end["reward"].item()
        env.close()
    assert rewards == pytest.approx({True: 1.0, False: 0.1})


def test_a_row_that_can_not_be_scored_marks_itself(scripted):
    rows = [*GSM8K[:1], {"question": "<1>", "answer": None}]
    env = GSM8KEnv(dataset=rows, num_envs=2, shuffle=False)
    end = env.step(scripted(REPLIES)(env.reset()))["next"]
    env.close()
    assert end["scorable"].all(), "None is text that is not the answer"
    assert end["reward"].view(-1).tolist() == pytest.approx([1.0, 0.1])
    broken = GSM8KRewardParser(answer_column="absent")
    broken.required_columns = ()
    env = ChatEnv(batch_size=1).append_transform(DataLoadingPrimer(GSM8K))
    env.append_transform(broken)
    end = env.step(scripted(REPLIES)(env.reset()))["next"]
    env.close()
    assert not end["scorable"].any()
    assert math.isnan(end["reward_right"].item())
    assert "KeyError: 'absent'" in end["reward_errors"][0]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: GSM8KEnv(dataset=[{"question": "a"}]), r"GSM8KEnv needs.*\['answer'\]"),
        (lambda: GSM8KEnv(dataset=[]), "no rows"),
        (lambda: GSM8KEnv(dataset=GSM8K, num_envs=3, repeats=2), "whole groups of 2"),
        (lambda: GSM8KRewardParser(weight=math.inf), "weight must be a finite number"),
        (lambda: MATHEnv(dataset=[{"problem": "a", "solution": "b"}]), "no .boxed"),
        (lambda: CountdownEnv(num_count=1), "num_count"),
    ],
)
def test_what_does_not_fit_is_named_at_construction(build, words):
    with pytest.raises(ValueError, match=words):
        build()


# MATH -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a", None),
        ("nothing", None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_box(text, inside):
    assert last_boxed(text) == inside


def test_math_compares_by_value(scripted):
    rows = [
        {"problem": "<0>", "solution": r"so \boxed{\frac{1}{2}}"},
        {"problem": "<1>", "solution": r"so \boxed{\sqrt{2}}"},
        {"problem": "<2>", "solution": r"so \boxed{3}"},
    ]
    script = {
        "<0>": ["<think>a</think><answer>0.5</answer>"],
        "<1>": [r"I say $\boxed{2^{1/2}}$"],
        "<2>": ["<think>a</think><answer>4</answer>"],
    }
    env = MATHEnv(dataset=rows, num_envs=3, shuffle=False, num_workers=1, timeout_s=20)
    end = env.step(scripted(script)(env.reset()))["next"]
    env.close()
    assert end["reward"].view(-1).tolist() == pytest.approx([1.1, 1.0, 0.1])


# Countdown --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value", "numbers"),
    [
        ("1 + 2 * 3", 7, [1, 2, 3]),
        ("(1 + 2) / 2", Fraction(3, 2), [1, 2, 2]),
        ("3 - 5", -2, [3, 5]),
    ],
)
def test_expressions_are_exact(expression, value, numbers):
    assert expression_value(expression) == (value, Counter(numbers))


@pytest.mark.parametrize(
    "expression",
    [
        "1/0",
        "2**9999999",
        "9" * 501,
        "__import__('os')",
        "1 if 2 else 3",
        "-1",
        "1.5 + 1",
        "True + 1",
        "a + 1",
        "1 +",
        "(" * 400,
        "",
        "1 = 1",
        "1 // 1",
        "\0",
    ],
    ids=lambda text: text[:12],
)
def test_nothing_else_is_an_expression(expression):
    assert expression_value(expression) is None


@given(st.text(alphabet="0123456789+-*/() .ab", max_size=40))
def test_evaluation_never_raises_and_agrees_with_python(text):
    result = expression_value(text)
    if result is not None:
        assert result[0] == Fraction(eval(text.strip(), {}, {"Fraction": Fraction})) or "/" in text


def test_every_problem_has_its_solution():
    rows = countdown_rows(200, num_count=4, max_number=20, max_target=50, seed=1)
    for row in rows:
        assert expression_value(row["solution"]) == (row["target"], Counter(row["numbers"]))
        assert 1 <= row["target"] <= 50
        assert max(row["numbers"]) <= 20
    assert rows == countdown_rows(200, num_count=4, max_number=20, max_target=50, seed=1)
    assert rows != countdown_rows(200, num_count=4, max_number=20, max_target=50, seed=2)


def test_countdown_is_scored_by_value_and_numbers(scripted):
    env = CountdownEnv(num_rows=3, num_envs=3, shuffle=False, seed=5)
    rows = countdown_rows(3, seed=5)
    answers = [rows[0]["solution"], f"{rows[1]['target']}", rows[2]["solution"] + " + 0"]
    script = {
        row["prompt"]: [f"<think>x</think><answer>{answer}</answer>"]
        for row, answer in zip(rows, answers, strict=True)
    }
    end = env.step(scripted(script)(env.reset()))["next"]
    env.close()
    assert end["reward"].view(-1).tolist() == pytest.approx([1.0, 0.1, 0.1])


def test_the_reasoning_gym_has_a_countdown_task_too():
    task = make_task("reasoning_gym/countdown", num_rows=40, num_held_out=5, num_demonstrations=3)
    assert all("target" in row["entry"]["metadata"] for row in itertools.islice(task.train_rows, 3))


def test_torch_is_not_changed_by_a_seed():
    state = torch.get_rng_state()
    countdown_rows(5)
    assert torch.equal(state, torch.get_rng_state())


# As tasks of a script ----------------------------------------------------------------------------

DATA = {
    "gsm8k": [
        {"question": f"<{i}> {i} + 1?", "answer": f"{i} + 1\n#### {i + 1}"} for i in range(8)
    ],
    "math": [{"problem": f"<{i}> ?", "solution": rf"so \boxed{{{i + 1}}}"} for i in range(8)],
    "ifeval": [
        {
            "prompt": f"<{i}> say cat",
            "instruction_id_list": ["keywords:existence"],
            "kwargs": [{"keywords": ["cat"]}],
        }
        for i in range(8)
    ],
}


@pytest.mark.parametrize("name", [*DATA, "countdown"])
def test_data_from_a_file_become_a_task(tmp_path, name, scripted):
    """Held-out rows are not trained on; what a demonstration says is right."""
    settings = {"num_rows": 8, "max_number": 9} if name == "countdown" else {}
    if name in DATA:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, DATA[name])))
        settings = {"dataset": str(path)}
    if name == "math":
        settings |= {"num_workers": 1, "timeout_s": 20}
    task = make_task(name, num_held_out=3, **settings)
    prompts = [row[task.prompt_column or "prompt"] for row in task.train_rows]
    held_out = [row[task.prompt_column or "prompt"] for row in task.held_out_rows]
    assert (len(prompts), len(held_out)) == (5, 3)
    assert not set(prompts) & set(held_out)
    if name == "ifeval":
        assert not task.demonstrations
        return
    says = {chat[-2]["content"]: [chat[-1]["content"]] for chat in task.demonstrations}
    assert list(says) == prompts
    assert all(chat[0]["role"] == "system" for chat in task.demonstrations)
    env = TaskEnv(task, num_envs=5, shuffle=False)
    end = env.step(scripted(says)(env.reset()))["next"]
    env.close()
    best = 1.1 if name == "math" else 1.0
    assert end["reward"].view(-1).tolist() == pytest.approx([best] * 5)


def test_a_split_can_be_held_out(tmp_path):
    parts = {"train": DATA["gsm8k"][:6], "test": DATA["gsm8k"][6:]}
    splits = {name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "data")
    load = {"dataset": str(tmp_path / "data"), "held_out_split": "test"}
    task = make_task("gsm8k", num_held_out=2, **load)
    assert list(task.train_rows) == parts["train"]
    assert list(task.held_out_rows) == parts["test"]
    with pytest.raises(ValueError, match="'test' has only 2 rows, too few to hold 3 out"):
        make_task("gsm8k", num_held_out=3, **load)


def test_held_out_groups_have_seeds_of_their_own():
    task = make_task("gsm8k", dataset=DATA["gsm8k"], num_held_out=4)
    task = replace(task, held_out_rows=task.train_rows)
    seeds = []
    for held_out in (False, True):
        env = TaskEnv(task, num_envs=4, shuffle=False, held_out=held_out)
        seeds.append(set(env.reset()["seed"].tolist()))
        env.close()
    assert not seeds[0] & seeds[1]


def test_a_configuration_of_the_data_has_a_name_too(tmp_path):
    datasets.Dataset.from_list(DATA["gsm8k"]).save_to_disk(tmp_path / "data")
    with pytest.raises(ValueError, match=r"name=.* do not apply"):
        make_task("gsm8k", dataset=str(tmp_path / "data"), name="main", num_held_out=2)
