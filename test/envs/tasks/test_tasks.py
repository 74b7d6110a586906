"""The bundled tasks: they can be solved, cannot be cheated, and hold their test rows out."""

import math
import re
from dataclasses import replace
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_data import ConversationEncoder
from torchrl_data.conversation_io import read_conversations
from torchrl_data.tool_calls.parser import parse_tool_calls
from torchrl_envs import FunctionTools
from torchrl_envs.datasets.difficulty_pools import IDS_PER_EPOCH
from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.calculator import TOOLS, calculator_task
from torchrl_envs.tasks.reasoning_gym import question_task
from torchrl_envs.tasks.task import Task, TaskEnv, load_task_rows, split_rows
from torchrl_tasks.number_guessing import NumberGuessing, number_guessing_task

SMALL = {"num_rows": 120, "num_held_out": 20, "num_demonstrations": 60}


@pytest.fixture(scope="module")
def calculator():
    return calculator_task(**SMALL)


def run_task(task, rows, policy, play):
    env = TaskEnv(
        replace(task, train_rows=rows), num_envs=len(rows), shuffle=False, show_schemas=False
    )
    ends = play(env, policy)
    env.close()
    return ends


def test_the_right_tool_solves_every_calculator_question(calculator, scripted, call_text, play):
    script, metric = {}, {True: 1.0, False: 0.0}
    for i, row in enumerate(calculator.held_out_rows):
        a, b = map(int, re.findall(r"\d+", row["prompt"])[:2])
        name = row["tool"] if i % 2 else next(t for t in TOOLS if t != row["tool"])
        result = TOOLS[name](None, a, b) if b or name != "simplify" else "0"
        script[row["prompt"]] = [call_text(name, a=a, b=b), result]
    # The longest first: a question may be part of another one.
    script = dict(sorted(script.items(), key=lambda item: -len(item[0])))
    rows = calculator.held_out_rows
    ends = run_task(calculator, rows, scripted(script), play)
    for i, row in enumerate(rows):
        said = script[row["prompt"]][1]
        assert ends[i]["reward"][i].item() == float(said == row["answer"]), row
        assert ends[i]["rewards", "chose_right_tool"][i].item() == metric[bool(i % 2)]
        if i % 2:
            assert said == row["answer"]


def test_calculator_demonstrations_show_the_format_and_not_the_choice(calculator):
    tools = {row["prompt"]: row["tool"] for row in calculator.train_rows}
    right = 0
    for user, call, tool, answer in calculator.demonstrations:
        assert answer["content"] == tool["content"]
        right += call["tool_calls"][0]["function"]["name"] == tools[user["content"]]
    assert 0 < right < len(calculator.demonstrations) / 2
    held_out = {row["prompt"] for row in calculator.held_out_rows}
    assert len(held_out) == 20
    assert not held_out & tools.keys()
    per_tool = [list(tools.values()).count(name) for name in TOOLS]
    assert max(per_tool) - min(per_tool) <= 5, "as many questions for each tool"


@pytest.mark.parametrize("number", range(1, 16))
def test_bisection_finds_every_number_in_four_guesses(number):
    environment = NumberGuessing()
    environment.reset(number=number, prompt="ignored")
    low, high = 1, 15
    for _ in range(4):
        guess = (low + high) // 2
        answer = environment.guess(guess)
        if answer == "found":
            break
        low, high = (guess + 1, high) if answer == "higher" else (low, guess - 1)
    assert environment.get_reward() == 1.0


def test_a_fifth_guess_is_refused():
    environment = NumberGuessing()
    environment.reset(number=15)
    for guess in (1, 2, 3, 4):
        assert environment.guess(guess) == "higher"
    with pytest.raises(ValueError, match="no guesses are left"):
        environment.guess(15)
    assert environment.get_reward() == 0.0


def test_what_guesses_are_told_is_true():
    for messages in number_guessing_task(**SMALL).demonstrations:
        guesses = [
            message["tool_calls"][0]["function"]["arguments"]["n"]
            for message in messages
            if message.get("tool_calls")
        ]
        answers = [message["content"] for message in messages if message["role"] == "tool"]
        told = list(zip(guesses, answers, strict=True))
        low = max((n + 1 for n, answer in told if answer == "higher"), default=1)
        high = min((n - 1 for n, answer in told if answer == "lower"), default=15)
        assert low <= high
        assert all(low <= n <= high for n, answer in told if answer == "found")
        assert not any(parse_tool_calls(m["content"]).calls for m in messages)


def test_any_generator_is_a_task_of_one_turn(scripted, play):
    task = question_task("spell_backward", **SMALL)
    rows = task.held_out_rows[:4]
    script = {row["prompt"]: [row["answer"] if i % 2 else "wrong"] for i, row in enumerate(rows)}
    ends = run_task(task, rows, scripted(script), play)
    assert [ends[i]["reward"][i].item() for i in range(4)] == [0, 1, 0, 1]


def test_the_same_seed_makes_the_same_task():
    tasks = [make_task("number_guessing", seed=seed, **SMALL) for seed in (0, 0, 1)]
    assert tasks[0] == tasks[1]
    assert tasks[0].train_rows != tasks[2].train_rows


@pytest.mark.parametrize(
    ("build", "words"),
    [
        pytest.param(
            lambda: make_task("calculater"), "no task 'calculater'.*calculator", id="name"
        ),
        pytest.param(
            lambda: calculator_task(num_rows=30, num_held_out=29), "too few to hold", id="held out"
        ),
        pytest.param(
            lambda: question_task("gcd", config={"min_numers": 1}, **SMALL),
            "gcd refuses .*min_numers",
            id="setting",
        ),
    ],
)
def test_what_can_not_be_made_is_named(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def shop(**settings):
    """A task with a tool, whose demonstration is of its first row."""
    question = {"role": "user", "content": "q0"}
    call = {"type": "function", "function": {"name": "gcd", "arguments": {"a": 4, "b": 6}}}
    chat = [question, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rows = [{"prompt": f"q{i}"} for i in range(4)]
    return Task(name="shop", train_rows=rows, demonstrations=[chat], **settings)


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("system_prompt", [None, "Be brief."])
def test_a_demonstration_has_the_prompt_of_the_episodes(shown, system_prompt, chatml_tokenizer):
    def gcd(a: int, b: int) -> int:
        """Divide.

        Args:
            a: One.
            b: Other.
        """
        return math.gcd(a, b)

    task = shop(
        tools=lambda show: [FunctionTools([gcd], show_schemas=show)], system_prompt=system_prompt
    )
    env = TaskEnv(task, shuffle=False, show_schemas=shown)
    encoder = ConversationEncoder(chatml_tokenizer)
    opening = read_conversations(env.reset(), "prompt", who="test")
    (prompt,) = [encoder.encode_waiting(opening).ids(0)]
    (taught,) = [env.encode_demonstrations(encoder).ids(0)]
    assert taught[: len(prompt)] == prompt
    assert ("Divide." in encoder.decode([prompt])[0]) == shown
    # Schemas of a demonstration's own go before those of the environment.
    schema = {"type": "function", "function": {"name": "gcd", "description": "Own."}}
    env.task = replace(task, demonstration_tools=[[schema]])
    (text,) = encoder.decode([env.encode_demonstrations(encoder).ids(0)])
    assert "Own." in text
    assert "Divide." not in text


def test_demonstrations_of_several_environments_say_which_they_are_about(chatml_tokenizer):
    makers = {"a": NumberGuessing, "b": NumberGuessing}
    rows = [{"prompt": f"q{i}", "environment": "ab"[i % 2], "number": 1} for i in range(4)]
    task = replace(shop(environment=makers), train_rows=rows)
    encoder = ConversationEncoder(chatml_tokenizer)
    with pytest.raises(ValueError, match=r"several environments .*policy.show_tool_schemas=false"):
        TaskEnv(task).encode_demonstrations(encoder)
    TaskEnv(task, show_schemas=False).encode_demonstrations(encoder)


# Held-out rows ------------------------------------------------------------------------------------


def test_rows_with_one_prompt_are_told_apart_by_their_columns():
    rows = [{"prompt": "Open the vault.", "code": n % 50} for n in range(100)]
    train, held_out = split_rows(rows, 10)
    assert [row["code"] for row in held_out] == list(range(10))
    assert [row["code"] for row in train] == list(range(10, 50)), "repeated rows are one"
    assert "50 different rows have 1 prompt(s) in all" in held_out.note
    with pytest.raises(
        ValueError, match=r"Only 50 of 100 rows are different, .* hold out at most 25"
    ):
        split_rows(rows, 26)
    with pytest.raises(ValueError, match="Only 1 of 9 rows") as refused:
        split_rows([rows[0]] * 9, 2)
    assert "at most" not in str(refused.value), "0 would be refused, too"


def test_no_prompt_is_in_both_where_there_are_enough_and_no_row_is_lost():
    rows = [{"prompt": f"<{n % 6}>", "answer": n} for n in range(18)]
    train, held_out = split_rows(rows, 2)
    assert [row["answer"] for row in held_out] == [0, 1]
    assert [row["answer"] for row in train] == [n for n in range(18) if n % 6 > 1]
    assert held_out.note == ""
    by_prompt, _ = split_rows(rows, 2, told_apart_by=["prompt"])
    assert [row["answer"] for row in by_prompt] == [2, 3, 4, 5]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=4, max_size=30))
def test_rows_are_split_without_overlap(pairs):
    rows = [
        {"prompt": f"<{a}>", "image": bytes([b]), "day": date(2026, 1, b + 1)} for a, b in pairs
    ]
    distinct = {(row["prompt"], row["image"]) for row in rows}
    if len(distinct) < 4:
        return
    train, held_out = split_rows(rows, 2)
    both = [(row["prompt"], row["image"]) for row in (*held_out, *train)]
    assert len(held_out) == 2
    assert len(set(both)) == len(both)
    assert [rows[n] for n in train.numbers] == list(train)
    if held_out.note:
        assert set(both) == distinct
    else:
        prompts = {row["prompt"] for row in held_out}
        assert len(prompts) == 2
        assert not prompts & {row["prompt"] for row in train}


def test_groups_count_rows_as_the_data_do_held_out_ones_included():
    """Of nine rows the first two are held out, and row 4 is row 3 again."""
    rows = [{"prompt": f"row {n - (n == 4)} of the data"} for n in range(9)]
    train, held_out = split_rows(rows, 2)
    assert train.note.startswith("1 of 9 rows repeat an earlier row and are left out.")
    task = Task(name="rows", train_rows=train, held_out_rows=held_out)
    for is_held_out, numbers in ((False, [2, 3, 5, 6, 7, 8]), (True, [0, 1])):
        env = TaskEnv(task, held_out=is_held_out, num_envs=2 * len(numbers), shuffle=False)
        batch = env.reset()
        groups = batch["group_id"].flatten().tolist()
        assert groups == [epoch * IDS_PER_EPOCH + n for epoch in (0, 1) for n in numbers]
        prompts = read_conversations(batch, "prompt", who="test")
        said = [prompts.messages(i)[-1]["content"] for i in range(len(groups))]
        assert said == 2 * [f"row {n} of the data" for n in numbers]
        env.close()


def test_a_split_that_is_trained_on_is_told():
    rows = {"train": tuple({"prompt": str(n)} for n in range(8)), "test": ({"prompt": "t"},)}
    assert "trained on" in load_task_rows(rows, held_out_split="train", num_held_out=2)[1].note
    assert load_task_rows(rows, held_out_split="test", num_held_out=1)[1].note == ""


def test_data_without_the_column_of_the_prompts_are_told_which_one_may_hold_them():
    rows = [{"question": f"{i}?", "answer": "1"} for i in range(4)]
    told = r"needs the columns \['prompt'\].*of a recipe task\.prompt_column=question\)"
    with pytest.raises(ValueError, match=told):
        load_task_rows(rows, num_held_out=2)
    rows = [{"a": "?"}] * 4
    with pytest.raises(ValueError, match=r"task\.prompt_column=\.\.\.\)"):
        load_task_rows(rows, num_held_out=2)
