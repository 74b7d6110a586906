"""Tasks with a simulated user: who plays it, what the orders of customers are paid, and mixes."""

from dataclasses import replace

import pytest

from torchrl_data.batched_object import read_objects
from torchrl_data.conversation_io import read_conversations
from torchrl_envs import ChatCompletions, SimulatedUser
from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.combined import combine_tasks
from torchrl_envs.tasks.environment_task import environment_task
from torchrl_envs.tasks.task import TaskEnv
from torchrl_envs.tasks.users import simulated_user
from torchrl_tasks.ordering import customer


def polite(completions):
    return [float("please" in str(completion)) for completion in completions]


def shy(questions):
    return ["I'd rather not say." if len(question) < 6 else "###STOP###" for question in questions]


def look_up() -> str:
    """Look the number up."""
    return "seven"


def careful(questions):
    """Looks up what it says."""
    look = {"tool_calls": [{"function": {"name": "look_up"}}]}
    return [look if q[-1]["role"] == "user" else q[-1]["content"] for q in questions]


ROWS = [{"prompt": f"Eggs {i}.", "scenario": f"You want {i}."} for i in range(8)]
HERE = __name__


def test_who_plays_the_user_is_a_server_or_a_function():
    assert simulated_user(None) is None
    by_name = simulated_user(f"{HERE}:shy", instructions="{prompt}", opens=True)
    assert by_name.user is shy
    assert (by_name.opens, by_name.required_columns) == (True, ["prompt"])
    server = simulated_user("http://localhost:1/v1", model="a")
    assert isinstance(server.user, ChatCompletions)
    assert (server.user.model, server.user.base_url) == ("a", "http://localhost:1/v1")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"user": "http://localhost:1/v1"}, "give user_model="),
        ({"user": f"{HERE}:shy", "user_model": "a"}, "is no server"),
        ({"user": f"{HERE}:missing"}, "missing"),
        ({"user_model": "a"}, "user_model has no effect"),
        ({"user_opens": True}, "user_opens has no effect"),
        ({"user_instructions": "Be brief."}, "user_instructions has no effect"),
        ({"user_tools": f"{HERE}:look_up"}, "user_tools has no effect"),
    ],
)
def test_settings_of_a_user_that_can_not_be_are_refused(settings, words):
    with pytest.raises((ValueError, AttributeError, ImportError), match=words):
        environment_task(rewards=f"{HERE}:polite", dataset=ROWS, num_held_out=2, **settings)


def test_a_task_of_ones_own_has_a_user(scripted, play):
    task = environment_task(
        rewards=f"{HERE}:polite", dataset=ROWS, num_held_out=2, user=f"{HERE}:shy", max_turns=3
    )
    env = TaskEnv(task)
    (end,) = play(env, scripted(["How many, please?", "Here."]))
    env.close()
    assert read_objects(end, "stop_reason") == ["environment_done: user"]
    assert end["reward"].item() == 1.0


def test_functions_by_name_are_the_tools_of_a_user(scripted, play):
    own = {"user": f"{HERE}:careful", "user_tools": f"{HERE}:look_up"}
    task = environment_task(rewards=f"{HERE}:polite", dataset=ROWS, num_held_out=2, **own)
    env = TaskEnv(task, max_steps=2)
    (end,) = play(env, scripted(["How many?"]))
    env.close()
    said = read_conversations(end, "prompt", who="test").messages(0)
    assert [m["content"] for m in said[1:3]] == ["How many?", "seven"]


def order(call_text, **arguments):
    return call_text("order", **{"item": "figs", "colour": "red", "number": 3} | arguments)


@pytest.mark.parametrize(
    ("turns", "arguments", "reward"),
    [
        ([], {}, 1.0),  # guessed, and right
        ([], {"number": 4}, 0.0),
        (["How many?"], {}, 0.8),
        (["How many?", "Which colour?"], {}, 0.6),
        (["Which color would you like?"], {"number": 2}, -0.2),
    ],
)
def test_a_customer_pays_for_the_right_order_less_its_answers(
    scripted, play, call_text, turns, arguments, reward
):
    row = {"prompt": "I would like figs.", "scenario": "You want 3 red figs."}
    row |= {"item": "figs", "colour": "red", "number": 3}
    task = make_task("ordering", num_rows=8, num_held_out=4, num_demonstrations=0)
    env = TaskEnv(task, map_row=lambda _: row)
    (end,) = play(env, scripted([*turns, order(call_text, **arguments), "Done."]))
    env.close()
    assert end["reward"].item() == pytest.approx(reward)
    assert read_objects(end, "stop_reason") == ["environment_done: user"]


def test_demonstrations_ask_at_random_and_say_nothing_that_is_not_known():
    task = make_task("ordering", num_rows=64, num_held_out=4, num_demonstrations=400)
    asked, right = [], 0
    by_prompt = {}
    for row in task.train_rows:
        by_prompt.setdefault(row["prompt"], []).append(row)
    for chat in task.demonstrations:
        texts = [m["content"] for m in chat if m["role"] == "assistant" and m["content"]]
        asked.append(len(texts) - 1)
        call = next(m["tool_calls"][0] for m in chat if m.get("tool_calls"))["function"]
        said = " ".join(m["content"] for m in chat if m["role"] == "user").lower()
        rows = by_prompt[chat[0]["content"]]
        arguments = call["arguments"]
        assert arguments["item"] in said
        for name in ("number", "colour"):
            words = {str(row[name]) for row in rows} & {*said.replace(".", "").split()}
            if words:  # what was said is what is ordered
                assert str(arguments[name]) in words
        right += any(all(arguments[k] == row[k] for k in arguments) for row in rows)
    assert {*asked} == {0, 1, 2}
    assert 0.3 < right / 400 < 0.9


def test_the_user_of_one_task_is_not_that_of_another(scripted, play):
    own = {"rewards": f"{HERE}:polite", "num_held_out": 2}
    with_user = environment_task(dataset=ROWS, user=f"{HERE}:shy", max_turns=3, **own)
    plain = environment_task(dataset=[{"prompt": f"Figs {i}."} for i in range(8)], **own)
    tasks = [replace(with_user, name="a"), replace(plain, name="b")]
    env = TaskEnv(combine_tasks("both", tasks), num_envs=2, shuffle=False)
    users = list(env.transforms_of(SimulatedUser))
    assert len(users) == 1
    ends = play(env, scripted(["How many?", "Here."]))
    env.close()
    reasons = [read_objects(ends[row], "stop_reason")[row] for row in range(2)]
    assert sorted(reasons) == ["answered", "environment_done: user"]


def test_a_customer_without_a_scenario_has_no_answer():
    question = [{"role": "system", "content": "?"}, {"role": "user", "content": "How many?"}]
    (answer,) = customer([question])
    assert "no scenario" in str(answer)
