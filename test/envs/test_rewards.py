"""Rewards of several sources: their sum, and what becomes of those that fail."""

import asyncio
import json
import math
import threading

import pytest
import torch
from torchrl.envs.transforms import Compose

from torchrl_data.loop_state import read_conversations
from torchrl_data.row_values import read_row_values
from torchrl_envs import ChatEnv, DataLoadingPrimer, EnvironmentTools, RewardFunctions, StepCounter


class Valued:
    """Has the value of its row."""

    def reset(self, *, number):
        self.number = number

    def get_reward(self):
        return float(self.number)


def make_env(functions, count=3, *, tools=Valued, **kwargs):
    rows = [{"prompt": f"<{i}>", "number": i, "answer": f"answer {i}"} for i in range(count)]
    parts = [DataLoadingPrimer(rows), RewardFunctions(functions, **kwargs)]
    if tools is not None:
        parts.append(EnvironmentTools(tools))
    return ChatEnv(batch_size=count, system_prompt="sys").append_transform(Compose(*parts))


@pytest.fixture
def score(scripted):
    """The last step of episodes of one turn."""

    def run(functions, count=3, **kwargs):
        env = make_env(functions, count, **kwargs)
        policy = scripted({f"<{i}>": [f"reply {i}"] for i in range(count)})
        end = env.step(policy(env.reset()))["next"]
        env.close()
        return end

    return run


def rewards(end, name=None):
    return end["reward" if name is None else ("rewards", name)].view(-1).tolist()


def test_sources_are_summed_with_their_weights(score):
    def ten(completions):
        return [10.0] * len(completions)

    def place(number):
        return number

    end = score([ten, place], weights=[0.5, -1.0])
    assert rewards(end) == [5.0, 5.0, 5.0], "i + 0.5 * 10 - i"
    assert rewards(end, "ten") == [10.0] * 3, "recorded without its weight"
    assert rewards(end, "place") == [0.0, 1.0, 2.0]
    assert rewards(end, "Valued") == [0.0, 1.0, 2.0]
    assert end["reward"].shape == (3, 1, 1)
    assert end["scorable"].all()


def test_a_function_gets_what_it_names(score):
    seen = {}

    def named(prompts, completions, environments, answer):
        seen.update(prompts=prompts, completions=completions, answer=answer)
        return [environment.number for environment in environments]

    def everything(**kwargs):
        seen["everything"] = sorted(kwargs)
        return [0] * 3

    end = score([named, everything])
    assert rewards(end, "named") == [0, 1, 2]
    assert seen["answer"] == ["answer 0", "answer 1", "answer 2"]
    assert seen["prompts"][1] == [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "<1>"},
    ]
    assert seen["completions"][2] == [{"role": "assistant", "content": "reply 2"}]
    assert seen["everything"] == [
        "answer",
        "completions",
        "environments",
        "number",
        "prompt",
        "prompts",
    ]


@pytest.mark.parametrize("kind", ["function", "environment"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        pytest.param(math.nan, "gave nan", id="NaN"),
        pytest.param(math.inf, "gave inf", id="infinity"),
        pytest.param(-math.inf, "gave -inf", id="minus infinity"),
        pytest.param("good", "'good', which is not a number", id="text"),
        pytest.param([1.0], "which is not a number", id="list"),
        pytest.param(torch.ones(2), "which is not a number", id="tensor"),
    ],
)
def test_a_bad_value_makes_its_row_alone_unscorable(score, kind, value, words):
    values = [1.0, value, 2.0]

    def source(completions):
        return values

    class Environment(Valued):
        def get_reward(self):
            return values[self.number]

    if kind == "function":
        end, name = score([source], tools=None), "source"
    else:
        end, name = score([lambda number: [0.0] * len(number)], tools=Environment), "Environment"
    assert end["scorable"].view(-1).tolist() == [True, False, True]
    errors = read_row_values(end, "reward_errors")
    assert [bool(error) for error in errors] == [False, True, False]
    assert words in errors[1]
    assert name in errors[1]
    assert end["reward"].isfinite().all(), "nothing that is not finite goes on"
    assert [rewards(end, name)[i] for i in (0, 2)] == [1.0, 2.0]
    assert math.isnan(rewards(end, name)[1])


def test_an_environment_that_raises_spoils_its_row_alone(score):
    class Fails(Valued):
        def get_reward(self):
            if self.number == 1:
                raise ZeroDivisionError("nothing to divide by")
            return 1.0

    end = score([lambda number: [1.0] * len(number)], tools=Fails)
    assert end["scorable"].view(-1).tolist() == [True, False, True]
    error = read_row_values(end, "reward_errors")[1]
    assert error.startswith("Fails.get_reward raised")
    assert "ZeroDivisionError: nothing to divide by" in error
    assert "test_rewards.py" in error, "the traceback"


def test_a_function_that_raises_makes_its_rows_unscorable_and_is_named(score):
    def fails(completions):
        raise KeyError("answer")

    end = score([fails])
    assert not end["scorable"].any()
    assert all("fails raised" in error for error in read_row_values(end, "reward_errors"))
    assert rewards(end, "Valued") == [0, 1, 2], "the others are recorded"


@pytest.mark.parametrize("value", [None, 1.0, [1.0], [1.0] * 4], ids=repr)
def test_a_wrong_number_of_rewards_is_an_error_that_says_what_is_expected(score, value):
    def wrong(completions):
        return value

    end = score([wrong])
    assert not end["scorable"].any()
    error = read_row_values(end, "reward_errors")[0]
    assert (
        f"wrong must return one reward per completion: expected a list of 3, got {value}" in error
    )


def test_none_does_not_apply_and_is_no_error(score):
    class Sometimes(Valued):
        def get_reward(self):
            return None if self.number == 0 else 1.0

    def never(completions):
        return [None] * 3

    end = score([never], tools=Sometimes)
    assert end["scorable"].view(-1).tolist() == [False, True, True]
    assert read_row_values(end, "reward_errors") == [""] * 3
    assert rewards(end) == [0.0, 1.0, 1.0]
    assert all(math.isnan(value) for value in rewards(end, "never"))


def test_functions_of_one_name_are_told_apart(score):
    sources = [lambda number, i=i: [float(i)] * len(number) for i in range(3)]
    end = score(sources, tools=None)
    names = ["<lambda>", "<lambda>_2", "<lambda>_3"]
    assert [rewards(end, name)[0] for name in names] == [0.0, 1.0, 2.0]
    assert rewards(end) == [3.0] * 3


def test_functions_run_at_once_and_may_be_async(score):
    barrier = threading.Barrier(2, timeout=20)

    def waits(completions):
        barrier.wait()
        return [1.0] * 3

    async def awaits(completions):
        await asyncio.to_thread(barrier.wait)
        return [2.0] * 3

    assert rewards(score([waits, awaits], tools=None)) == [3.0] * 3


def test_a_reward_past_its_deadline_is_unscorable(score):
    gate = threading.Event()

    def hangs(completions):
        gate.wait()

    end = score([hangs], timeout_s=0.2)
    gate.set()
    assert not end["scorable"].any()
    assert "no answer within 0.2 s" in read_row_values(end, "reward_errors")[0]


def test_the_reward_sees_the_whole_conversation_once(scripted, call_text, play):
    asked = []

    class Judge:
        def reset(self, *, number):
            self.number = number

        def ping(self) -> str:
            """Answer."""
            return "pong"

        async def get_reward(self, messages):
            asked.append([(m["role"], m["content"]) for m in messages])
            return 1.0

    rows = [{"prompt": "<0>", "number": 0}]
    env = ChatEnv(batch_size=1).append_transform(
        Compose(DataLoadingPrimer(rows), EnvironmentTools(Judge), StepCounter(max_steps=5))
    )
    ping = call_text("ping")
    play(env, scripted([ping, "done"]))
    assert asked == [
        [("user", "<0>"), ("assistant", ping), ("tool", "pong"), ("assistant", "done")]
    ]
    env.close()


@pytest.mark.parametrize(
    ("functions", "weights", "words"),
    [
        pytest.param([], None, "at least one function", id="no function"),
        pytest.param([print], [1.0, 2.0], "1 functions but 2 weights", id="weights"),
    ],
)
def test_wrong_settings_are_named(functions, weights, words):
    with pytest.raises(ValueError, match=words):
        RewardFunctions(functions, weights=weights)


def test_what_a_model_reads_of_an_error_is_json(scripted, call_text, play):
    class Fails(Valued):
        def fails(self) -> str:
            """Fail."""
            raise ValueError('a "quoted" word\nand a line')

    rows = [{"prompt": "<0>", "number": 0}]
    env = ChatEnv(batch_size=1).append_transform(
        Compose(DataLoadingPrimer(rows), EnvironmentTools(Fails))
    )
    (end,) = play(env, scripted([call_text("fails"), "done"]))
    content = read_conversations(end, "prompt", who="test").messages(0)[2]["content"]
    assert json.loads(content) == {"error": 'ValueError: a "quoted" word\nand a line'}
    env.close()
