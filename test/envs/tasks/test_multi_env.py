"""Several tasks in one run: whose turn it is, and that each row meets its own task alone."""

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectors import LLMCollector, rollout_metrics
from torchrl_envs import RewardFunctions
from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.combined import combine_tasks, draw_schedule
from torchrl_envs.tasks.task import TaskEnv

shares = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=4)


@given(shares, st.integers(0, 99), st.data())
def test_each_stretch_holds_each_tasks_share(tasks, seed, data):
    sizes, shares = zip(*tasks, strict=True)
    order = draw_schedule(sizes, shares, seed)
    start = data.draw(st.integers(0, len(order)))
    end = data.draw(st.integers(start, len(order)))
    counts = Counter(task for task, _ in order[start:end])
    for task, share in enumerate(shares):
        mean = (end - start) * Fraction(share, sum(shares))
        # Each task is ahead or behind by less than one at either end, and so are the others.
        assert abs(counts[task] - mean) < 2 * len(tasks)
        rows = [row for k, row in order if k == task]
        assert rows == [j % sizes[task] for j in range(len(rows))], "in order, again and again"
        assert len(rows) >= sizes[task], "every row of every task was there"
    assert draw_schedule(sizes, shares, seed) == order


def test_another_seed_is_another_order_and_no_pattern_repeats():
    order = [task for task, _ in draw_schedule([500, 500], [0.5, 0.5], seed=0)]
    assert order != [task for task, _ in draw_schedule([500, 500], [0.5, 0.5], seed=1)]
    # Times uniform in [j, j + 1): the tasks alternate more often than a coin, less than always.
    changes = sum(a != b for a, b in pairwise(order)) / len(order)
    assert 0.55 < changes < 0.75
    with pytest.raises(ValueError, match="positive share for each of 2 tasks, got \\[1, 0\\]"):
        draw_schedule([1, 1], [1, 0], 0)


@pytest.fixture
def files(tmp_path):
    """A data set of words and one of numbers, as those of gsm8k and math."""
    words = [{"question": f"word {i}", "answer": f"so\n#### {i}"} for i in range(12)]
    sums = [{"problem": f"sum {i}", "solution": rf"\boxed{{{i}}}"} for i in range(12)]
    for name, rows in (("words", words), ("sums", sums)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {name: str(tmp_path / f"{name}.jsonl") for name in ("words", "sums")}


def test_each_row_meets_its_own_task(files, scripted, call_text, play):
    """Rewards, prompts, tools and limits of turns of three kinds of task, in one batch."""
    tasks = {
        "words": {"task": "gsm8k", "share": 1, "dataset": files["words"], "system_prompt": "W"},
        "more": {"task": "gsm8k", "share": 1, "dataset": files["words"], "system_prompt": None},
        "guess": {"task": "number_guessing", "share": 2, "num_rows": 20},
    }
    task = make_task("multi_env", tasks=tasks, num_held_out=9, num_demonstrations=9)
    assert task.parts == ("words", "more", "guess")
    assert len(task.held_out_rows) == 9
    assert Counter(row["environment"] for row in task.held_out_rows) == dict.fromkeys(tasks, 3)
    kinds = Counter(row["environment"] for row in task.train_rows[:32])
    assert abs(kinds["guess"] - 16) <= 2
    assert len(task.demonstrations) == 9

    env = TaskEnv(task, num_envs=8, shuffle=False, max_steps=9)
    rows = task.train_rows[:8]
    guess = [call_text("guess", n=1)] * 8
    answer = "<think></think><answer>3</answer>"
    script = {"word": [answer], "Find": guess}
    ends = play(env, scripted(script))
    for i, row in enumerate(rows):
        end, name = ends[i], row["environment"]
        chat = end["history"].prompt[i]
        said = dict(zip(chat.role, chat.content, strict=True))
        assert said.get("system") == ("W" if name == "words" else None)
        if name == "guess":
            assert len([role for role in chat.role if role == "assistant"]) == 5, "not 9"
            assert end["rewards", "guess"][i].item() == float(row["number"] == 1)
            assert end["rewards", "GSM8KRewardParser"][i].isnan().all()
            assert not end["success"][i].any()
        else:
            is_right = row["answer"].endswith("#### 3")
            assert end["reward"][i].item() == pytest.approx(1.0 if is_right else 0.1)
            assert end["success"][i].item() is is_right
            assert end["rewards", "guess"][i].isnan().all()
            assert "<tool_response>" not in str(said)
    env.close()


def test_an_answer_to_a_question_calls_no_tool_of_another_task(files, scripted, call_text, play):
    tasks = {
        "words": {"task": "gsm8k", "dataset": files["words"]},
        "guess": {"task": "number_guessing"},
    }
    task = make_task("multi_env", tasks=tasks, num_held_out=2, num_demonstrations=2, num_rows=8)
    env = TaskEnv(task, num_envs=4, shuffle=False)
    ends = play(env, scripted([call_text("guess", n=8), "done"]))
    for i, row in enumerate(task.train_rows[:4]):
        assert ends[i]["num_tool_calls"][i].item() == (row["environment"] == "guess")
    env.close()


def test_what_is_measured_of_one_task_is_not_asked_of_others(scripted, play):
    """The metric of the calculator requires a column that the other task lacks."""
    tasks = {"calculator": 1, "number_guessing": 1}
    task = make_task("multi_env", tasks=tasks, num_rows=60, num_held_out=6, num_demonstrations=6)
    env = TaskEnv(task, num_envs=4, shuffle=False)
    ends = play(env, scripted(["done"]))
    assert len(list(env.transforms_of(RewardFunctions))) == 1
    for i, row in enumerate(task.train_rows[:4]):
        measured = ends[i]["rewards", "chose_right_tool"][i]
        assert measured.isnan().all() == (row["environment"] == "number_guessing")
    env.close()


@pytest.mark.parametrize(
    ("coeffs", "expected"),
    [
        pytest.param((0.01, 0.01), 0.01, id="as all say"),
        pytest.param((0.01, 0.0), 0.0, id="one can't bear it"),
        pytest.param((None, 0.002), 0.002, id="one leaves it to the recipe"),
        pytest.param((None, None), None, id="all do"),
    ],
)
def test_the_entropy_bonus_of_several_tasks_is_the_smallest(coeffs, expected):
    one = make_task("echo", num_rows=40, num_held_out=4, num_demonstrations=4)
    tasks = [
        replace(one, name=name, entropy_coeff=coeff)
        for name, coeff in zip("ab", coeffs, strict=True)
    ]
    assert combine_tasks("both", tasks).entropy_coeff == expected


def test_a_resumed_run_goes_on_in_the_schedule(scripted):
    task = make_task(
        "multi_env", tasks={"echo": 3, "catch": 1}, num_rows=30, num_held_out=4, seed=3
    )

    def env():
        return TaskEnv(task, num_envs=6, shuffle=False, seed=3)

    def names(batch):
        return [row["environment"] for row in batch["row"]]

    whole = env()
    expected = [names(whole.reset()) for _ in range(14)]  # more than one pass
    first = env()
    found = [names(first.reset()) for _ in range(9)]
    state = first.state_dict()
    first.close()
    later = env()
    later.load_state_dict(state)
    found += [names(later.reset()) for _ in range(4)]
    # The groups that were under way are drawn again.
    assert found == expected[:9] + expected[8:12]
    assert Counter(chain.from_iterable(expected))["echo"] == pytest.approx(63, abs=3)


def test_metrics_by_task(scripted, call_text):
    """Two groups of each task; the numbers to be guessed are told by the script's luck."""
    tasks = {"low": {"task": "number_guessing"}, "echo": {"share": 1}}
    task = make_task("multi_env", tasks=tasks, num_rows=40, num_held_out=4, num_demonstrations=4)
    env = TaskEnv(task, num_envs=16, repeats=2, shuffle=False)
    rows = task.train_rows[:8]
    policy = scripted({"Find": [call_text("guess", n=4), "done"], "": ["nothing is said"]})
    metrics = rollout_metrics(LLMCollector(env, policy).collect())
    numbers = [row["number"] for row in rows if row["environment"] == "low"]
    assert metrics["low/share"] == len(numbers) / 8
    assert metrics["low/share"] + metrics["echo/share"] == 1
    assert metrics["low/reward"] == pytest.approx(numbers.count(4) / len(numbers))
    assert metrics["low/groups/solve_all_fraction"] == metrics["low/reward"]
    assert (metrics["low/turns"], metrics["echo/turns"]) == (2, 1)
    mean = (
        metrics["low/share"] * metrics["low/reward"]
        + metrics["echo/share"] * metrics["echo/reward"]
    )
    assert metrics["reward"] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        pytest.param({"echo": 1, "cach": 1}, "no task 'cach'", id="name"),
        pytest.param(
            {"echo": "half"}, "share of echo must be a finite number, got 'half'", id="share"
        ),
        pytest.param({"echo": 1, "catch": -1}, "positive share", id="negative"),
        pytest.param({"a": {"task": "echo", "num_rwos": 3}}, "num_rwos", id="setting"),
    ],
)
def test_mixtures_that_can_not_be_made(tasks, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make_task("multi_env", tasks=tasks, num_held_out=4, num_demonstrations=4)
