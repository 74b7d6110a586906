"""Rewards of several sources: their sum, and what becomes of those that fail."""

import asyncio
import json
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torchrl.envs.transforms import Compose

from collectors import LLMCollector
from torchrl_data.batched_object import read_objects
from torchrl_data.conversation_io import read_conversations
from torchrl_envs import (
    AnswerReward,
    ChatEnv,
    DataLoadingPrimer,
    EnvironmentTools,
    RewardErrorLimit,
    RewardFunctions,
    StepCounter,
    TooManyRewardErrors,
    reward_metrics,
    row_reward,
)
from torchrl_modules import TransformersWrapper


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
        "completion_ids",
        "completions",
        "environments",
        "log_extra",
        "log_metric",
        "number",
        "prompt",
        "prompt_ids",
        "prompts",
        "trainer_state",
    ]


BAD = [
    pytest.param(math.nan, "gave nan", id="NaN"),
    pytest.param(math.inf, "gave inf", id="infinity"),
    pytest.param(-math.inf, "gave -inf", id="minus infinity"),
    pytest.param("good", "'good', which is not a number", id="text"),
    pytest.param([1.0], "which is not a number", id="list"),
    pytest.param(torch.ones(1), "which is not a number", id="tensor"),
]


@pytest.mark.parametrize("kind", ["function", "environment"])
@pytest.mark.parametrize(("value", "words"), BAD)
def test_D02_a_bad_value_makes_its_row_alone_unscorable(scripted, play, kind, value, words):
    values = [1.0, value, 2.0]
    used = [kind == "environment"]

    def source(completions):
        return values if used[0] else [0.0] * 3

    class Environment(Valued):
        def get_reward(self):
            return values[self.number]

    policy = scripted({f"<{i}>": ["reply"] for i in range(3)})
    if kind == "function":
        env, name = make_env([source], tools=None), "source"
        play(env, policy)
        used[0] = True
    else:
        functions = [lambda number: [0.0] * len(number)]
        env, name = make_env(functions, tools=Environment), "Environment"
    end = play(env, policy)[0]
    env.close()
    assert end["scorable"].view(-1).tolist() == [True, False, True]
    errors = read_objects(end, "reward_errors")
    assert [bool(error) for error in errors] == [False, True, False]
    assert words in errors[1]
    assert name in errors[1]
    assert end["reward"].isnan().view(-1).tolist() == [False, True, False], "and never infinite"
    assert [rewards(end, name)[i] for i in (0, 2)] == [1.0, 2.0]
    assert math.isnan(rewards(end, name)[1])


def test_nan_can_be_taken_for_none(score):
    end = score([lambda **_: [math.nan, None, 1.0]], tools=None, nan_applies=False)
    assert end["scorable"].view(-1).tolist() == [False, False, True]
    assert read_objects(end, "reward_errors") == [""] * 3


def test_an_environment_that_raises_spoils_its_row_alone(score):
    class Fails(Valued):
        def get_reward(self):
            if self.number == 1:
                raise ZeroDivisionError("nothing to divide by")
            return 1.0

    end = score([lambda number: [1.0] * len(number)], tools=Fails)
    assert end["scorable"].view(-1).tolist() == [True, False, True]
    error = read_objects(end, "reward_errors")[1]
    assert error.startswith("Fails.get_reward raised")
    assert "ZeroDivisionError: nothing to divide by" in error
    assert "test_rewards.py" in error, "the traceback"


def test_D01_a_function_that_raises_makes_its_rows_unscorable_and_is_named(score):
    def fails(completions):
        raise KeyError("answer")

    end = score([fails])
    assert not end["scorable"].any()
    assert all("fails raised" in error for error in read_objects(end, "reward_errors"))
    assert rewards(end, "Valued") == [0, 1, 2], "the others are recorded"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "expected a list of 3, got None"),
        (1.0, "expected a list of 3, got 1.0"),
        ([1.0], r"expected a list of 3, got \[1.0\]"),
        ([1.0] * 4, "expected a list of 3, got"),
        ("abc", "expected a list of 3, got 'abc'"),
        (torch.zeros(3, 1), "gave tensor.*which is not a number"),
        ([[1.0]] * 3, r"gave \[1.0\], which is not a number"),
        (["1.0"] * 3, "gave '1.0', which is not a number"),
    ],
    ids=["none", "scalar", "short", "long", "text", "tensor of two dimensions", "2-D", "strings"],
)
def test_D03_a_wrong_shape_is_raised_at_the_first_use(score, value, words):
    def wrong(completions):
        return value

    with pytest.raises(ValueError, match=f"reward function wrong .*{words}"):
        score([wrong])


def test_a_wrong_shape_later_costs_its_rows_only(scripted, play):
    calls = []

    def shrinks(completions):
        calls.append(len(completions))
        return [1.0] * (3 if len(calls) == 1 else 2)

    env = make_env([shrinks])
    policy = scripted({f"<{i}>": ["reply"] for i in range(3)})
    assert play(env, policy)[0]["scorable"].all()
    end = play(env, policy)[0]
    env.close()
    assert not end["scorable"].any()
    assert "expected a list of 3" in read_objects(end, "reward_errors")[0]


def test_none_does_not_apply_and_is_no_error(score):
    class Sometimes(Valued):
        def get_reward(self):
            return None if self.number == 0 else 1.0

    def never(completions):
        return [None] * 3

    end = score([never], tools=Sometimes)
    assert end["scorable"].view(-1).tolist() == [False, True, True]
    assert read_objects(end, "reward_errors") == [""] * 3
    assert str(rewards(end)) == "[nan, 1.0, 1.0]"
    assert all(math.isnan(value) for value in rewards(end, "never"))


def test_functions_of_one_name_are_told_apart(score):
    sources = [lambda number, i=i: [float(i)] * len(number) for i in range(3)]
    end = score(sources, tools=None)
    names = ["<lambda>", "<lambda>_2", "<lambda>_3"]
    assert [rewards(end, name)[0] for name in names] == [0.0, 1.0, 2.0]
    assert rewards(end) == [3.0] * 3


def test_names_are_unique_across_all_sources(scripted, play):
    def Valued_(number):
        return [1.0] * len(number)

    Valued_.__name__ = "Valued"
    rows = [{"prompt": "<0>", "number": 5}]
    env = ChatEnv(batch_size=1).append_transform(
        Compose(
            DataLoadingPrimer(rows),
            RewardFunctions([Valued_, Valued_]),
            RewardFunctions([Valued_]),
            EnvironmentTools(Valued),
        )
    )
    (end,) = play(env, scripted(["reply"]))
    env.close()
    values = {name: end["rewards", name].item() for name in end["rewards"].keys()}  # noqa: SIM118
    assert values == {"Valued": 5.0, "Valued_2": 1.0, "Valued_3": 1.0, "Valued_4": 1.0}
    assert end["reward"].item() == 8.0


def test_an_argument_that_nobody_gives_is_found_before_the_first_rollout():
    def needs(completions, solution, tolerance=0.1):
        return [0.0] * len(completions)

    env = make_env([needs])
    with pytest.raises(ValueError, match=r"needs requires \['solution'\].*\['answer', 'number'"):
        env.check()
    env.close()


def test_a_function_of_one_rollout_fails_and_hangs_for_its_own_rollout(score):
    gate = threading.Event()

    @row_reward
    def one(prompt, completion, environment, completion_ids, number):
        if number == 0:
            gate.wait()
        if number == 1:
            raise ValueError("no such answer")
        assert prompt[-1]["content"] == "<2>"
        assert completion == [{"role": "assistant", "content": "reply 2"}]
        assert environment.number == 2
        return len(completion_ids)

    @row_reward
    async def awaits(number):
        await asyncio.sleep(0)
        return number

    end = score([one, awaits], timeout_s=0.3)
    gate.set()
    assert end["scorable"].view(-1).tolist() == [False, False, True]
    errors = read_objects(end, "reward_errors")
    assert "no answer within 0.3 s" in errors[0]
    assert "ValueError: no such answer" in errors[1]
    assert rewards(end, "awaits") == [0.0, 1.0, 2.0]
    # "reply 2", the end of the turn: nothing of the prompt.
    full = read_conversations(end, "prompt", who="test")
    assert rewards(end, "one")[2] == float(full.assistant_mask(2).sum())


def test_an_exception_in_the_list_spoils_its_rollout_alone(score):
    end = score([lambda **_: [1.0, TimeoutError("too slow"), 3.0]], tools=None)
    assert str(rewards(end)) == "[1.0, nan, 3.0]"
    assert end["scorable"].view(-1).tolist() == [True, False, True]
    assert "TimeoutError: too slow" in read_objects(end, "reward_errors")[1]


def test_an_example_in_the_prompt_is_no_completion(scripted, play):
    seen = {}

    def look(prompts, completions, prompt_ids, completion_ids):
        seen.update(locals())
        return [0.0]

    shown = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    env = ChatEnv(batch_size=1).append_transform(
        Compose(DataLoadingPrimer([{"prompt": shown}]), RewardFunctions(look))
    )
    policy = scripted(["four"])
    play(env, policy)
    env.close()
    assert seen["prompts"] == [shown]
    assert seen["completions"] == [[{"role": "assistant", "content": "four"}]]
    ((prompt, said),) = policy.engine.served
    assert seen["prompt_ids"] == [list(prompt)]
    assert seen["completion_ids"] == [said.ids]


def test_D01_too_many_errors_end_the_run_with_a_summary(scripted, play):
    def fails(number):
        return [ValueError("no gold") if n % 2 else 1.0 for n in number]

    rows = [{"prompt": f"<{i}>", "number": i} for i in range(10)]
    parts = [DataLoadingPrimer(rows), RewardFunctions(fails)]
    policy = scripted({"": ["reply"]})
    env = ChatEnv(batch_size=10).append_transform(Compose(*parts))
    play(env, policy)  # 5 of 10 rollouts
    play(env, policy)  # 10 of 20: as many as 5 % of 200
    with pytest.raises(TooManyRewardErrors, match="15 of the last 30") as error:
        play(env, policy)
    assert "15 x fails raised ValueError: no gold" in str(error.value)
    env.close()
    for limit, stops in ((0.02, True), (1.0, False)):
        own = RewardErrorLimit(limit, window=100)
        parts = [DataLoadingPrimer(rows), RewardFunctions(fails), own]
        env = ChatEnv(batch_size=10).append_transform(Compose(*parts))
        if stops:
            with pytest.raises(TooManyRewardErrors, match="2% of 100"):
                play(env, policy)
        else:
            for _ in range(3):
                play(env, policy)
        env.close()


def test_scoring_that_closing_cut_short_is_no_failed_reward(scripted, play, caplog):
    """As of the rollouts that are scored while a streaming collector is closed."""
    begun, free = threading.Event(), threading.Event()

    def waits(completions):
        begun.set()
        free.wait(60)
        return [1.0] * len(completions)

    parts = [DataLoadingPrimer([{"prompt": "?"}]), RewardFunctions(waits), RewardErrorLimit(0.0)]
    env = ChatEnv(batch_size=4).append_transform(Compose(*parts))
    with ThreadPoolExecutor(1) as pool:
        playing = pool.submit(play, env, scripted({"": ["reply"]}))
        assert begun.wait(60)
        env.calls.abandon()
        ended = playing.result(60)  # 4 of 4, of which not one is allowed, and no error
    assert not any(row["scorable"].any() for row in ended)
    assert "could be scored" not in caplog.text
    free.set()
    env.close()


def test_rollouts_that_fail_before_they_are_scored_are_not_told_as_failed_rewards(
    make_tiny_model, chatml_tokenizer, play
):
    rows = [{"prompt": "What is 2 + 2? " * 20} for _ in range(16)]
    env = ChatEnv(batch_size=16).append_transform(DataLoadingPrimer(rows))
    policy = TransformersWrapper(
        make_tiny_model(),
        tokenizer=chatml_tokenizer,
        max_model_len=64,
        generate_kwargs={"max_new_tokens": 8},
    )
    words = r"^16 of the last 16 rollouts failed, 16 of them before they could be scored; 5%"
    with pytest.raises(TooManyRewardErrors, match=words) as error:
        play(env, policy)
    env.close()
    assert re.search(r"16 x error: .*the prompt has \d+ tokens", str(error.value))
    assert "Mend what ended the rollouts, or allow more" in str(error.value)


def test_functions_run_at_once_and_may_be_async(score):
    barrier = threading.Barrier(2, timeout=20)

    def waits(completions):
        barrier.wait()
        return [1.0] * 3

    async def awaits(completions):
        await asyncio.to_thread(barrier.wait)
        return [2.0] * 3

    assert rewards(score([waits, awaits], tools=None)) == [3.0] * 3


def test_D04_a_reward_past_its_deadline_is_unscorable(score):
    gate = threading.Event()

    def hangs(completions):
        gate.wait()

    end = score([hangs], timeout_s=0.2)
    gate.set()
    assert not end["scorable"].any()
    assert "no answer within 0.2 s" in read_objects(end, "reward_errors")[0]


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
        pytest.param([print], [math.nan], r"weights\[0\] must be a finite", id="a weight of NaN"),
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


# What could not be scored -------------------------------------------------------------------------


def test_half_of_the_rewards_make_no_mean_of_all(scripted):
    """A row that could not be scored is NaN: 1.0 is the mean of those that were."""

    @row_reward
    def half(number):
        if number % 2:
            raise ConnectionError("the judge hung up")
        return 1.0

    parts = [DataLoadingPrimer([{"prompt": f"<{i}>", "number": i} for i in range(4)])]
    parts += [RewardFunctions([half]), StepCounter(max_steps=1), RewardErrorLimit(1.0)]
    env = ChatEnv(batch_size=4).append_transform(Compose(*parts))
    batch = LLMCollector(env, scripted({f"<{i}>": ["said"] for i in range(4)})).collect()
    assert batch["reward"].nanmean().item() == 1.0
    assert batch["reward"].isnan().flatten().tolist() == [False, True, False, True]
    assert reward_metrics(batch)["reward/mean"] == 1.0
    env.close()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: [None] * 3, "3 x no reward applies"),
        (lambda: [math.nan] * 3, "3 x function gave nan"),
        (lambda: 1 / 0, "3 x function raised ZeroDivisionError: division by zero"),
    ],
    ids=["None", "NaN", "raises"],
)
def test_a_first_batch_without_a_reward_is_told_at_once_and_once(
    scripted, play, caplog, value, words
):
    is_over = []

    def function(completions):
        return [1.0] * 3 if is_over else value()

    env = make_env([function], tools=None)
    policy = scripted({f"<{i}>": ["reply"] for i in range(3)})
    assert play(env, policy)[0]["reward"].isnan().all()
    (told,) = [
        each.getMessage() for each in caplog.records if "None of the 3" in each.msg % each.args
    ]
    assert words in told
    is_over.append(True)
    play(env, policy)
    is_over.clear()
    play(env, policy)  # once something was scored, the limit of errors alone counts
    assert sum("None of the" in each.getMessage() for each in caplog.records) == 1
    env.close()


def test_a_batch_of_one_may_be_squeezed_and_a_later_wrong_shape_is_told(scripted, play, caplog):
    gives = [2.5]

    def squeezed(completions):
        return torch.tensor(gives[0]) if gives[0] is not None else None

    env = make_env([squeezed], 1, tools=None)
    policy = scripted({"<0>": ["reply"]})
    assert rewards(play(env, policy)[0]) == [2.5]
    gives[0] = None  # a function that returns nothing
    assert math.isnan(rewards(play(env, policy)[0])[0])
    assert "squeezed must return one reward per completion: expected a list of 1, got None" in (
        caplog.text
    )
    env.close()


def test_a_row_that_a_function_of_many_cannot_score_costs_its_own_group(scripted):
    """The group of row 1, of three: the others keep their rewards."""
    calls = []

    def fragile(completions, number):
        calls.append(list(number))
        return [1.0 / (n - 1) for n in number]

    rows = [{"prompt": f"<{i}>", "number": i} for i in range(3)]
    parts = [DataLoadingPrimer(rows, group_size=2), RewardFunctions([fragile])]
    env = ChatEnv(batch_size=6).append_transform(Compose(*parts, StepCounter(max_steps=1)))
    policy = scripted({f"<{i}>": ["said"] for i in range(3)})
    end = env.step(policy(env.reset()))["next"]
    assert str(rewards(end)) == "[-1.0, -1.0, nan, nan, 1.0, 1.0]"
    assert calls[0] == [0, 0, 1, 1, 2, 2]
    assert sorted(calls[1:]) == [[0, 0], [1, 1], [2, 2]]
    assert [bool(error) for error in read_objects(end, "reward_errors")] == [0, 0, 1, 1, 0, 0]
    env.close()


def test_a_parser_of_finished_rows_marks_what_it_cannot_score(scripted):
    class Parser(AnswerReward):
        component_keys = ()

        def components(self, text, row, query):
            return {"reward": {"a": 1.0, "b": None}[row["letter"]]}  # KeyError of "c"

    rows = [{"prompt": f"<{letter}>", "letter": letter} for letter in "abc"]
    parts = [DataLoadingPrimer(rows), StepCounter(max_steps=1)]
    env = ChatEnv(batch_size=3).append_transform(Compose(*parts))
    policy = scripted({f"<{letter}>": ["said"] for letter in "abc"})
    batch = LLMCollector(env, policy, postproc=Parser()).collect()
    assert str(batch["reward"].flatten().tolist()) == "[1.0, nan, nan]"
    assert batch["scorable"].flatten().tolist() == [True, False, False]
    assert [("KeyError: 'c'" in error) for error in batch["reward_errors"]] == [False, False, True]
    env.close()
