"""The life of a rollout's environment: made, reset, called, scored once, always closed."""

import asyncio
import json
import threading

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.transforms import Compose

from torchrl_data.batched_object import read_objects
from torchrl_data.conversation_io import read_conversations
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    EnvironmentTools,
    EpisodeTransform,
    RewardFunctions,
    StepCounter,
)


class Recorder:
    """Notes everything that happens to its instances."""

    made: list["Recorder"]

    def __init__(self):
        self.events = []
        self.made.append(self)

    def reset(self, *, number, seed=None):
        self.number, self.seed = number, seed
        self.events.append("reset")

    def echo(self, text: str) -> str:
        """Say it again.

        Args:
            text: What to say.
        """
        self.events.append(f"echo {text}")
        return f"{self.number}:{text}"

    def get_reward(self):
        self.events.append("get_reward")
        return float(self.number)

    def close(self):
        self.events.append("close")


@pytest.fixture
def recorder():
    """A class of its own for each test, with the list of its instances."""
    return type("Recorder", (Recorder,), {"made": []})


def by_number(recorder):
    """The instances in the order of their rows; they were made at once, so in any order."""
    return sorted(recorder.made, key=lambda made: made.number)


def make_rows(count, **columns):
    return [
        {"prompt": f"<{i}>", "number": i, **{k: v[i] for k, v in columns.items()}}
        for i in range(count)
    ]


def make_env(rows, *transforms, batch_size=None, **primer):
    size = batch_size or len(rows) * primer.get("group_size", 1)
    loader = DataLoadingPrimer(rows, **primer)
    return ChatEnv(batch_size=size).append_transform(Compose(loader, *transforms))


def tool_messages(end, row):
    messages = read_conversations(end, "prompt", who="test").messages(row)
    return [m["content"] for m in messages if m["role"] == "tool"]


def test_an_environment_per_rollout_from_reset_to_close(recorder, scripted, call_text, play):
    policy = scripted(
        {
            f"<{i}>": [call_text("echo", text=f"{i}-{turn}") for turn in range(i)] + ["done"]
            for i in range(3)
        }
    )
    env = make_env(make_rows(3), EnvironmentTools(recorder), group_size=2, seed=7)
    ends = play(env, policy)
    assert len(recorder.made) == 6
    for i, made in enumerate(by_number(recorder)):
        number = i // 2
        assert made.number == number
        calls = [f"echo {number}-{turn}" for turn in range(number)]
        assert made.events == ["reset", *calls, "get_reward", "close"]
        assert tool_messages(ends[i], i) == [f"{number}:{number}-{turn}" for turn in range(number)]
    seeds = [made.seed for made in by_number(recorder)]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3] != seeds[4]
    rewards = [end["reward"][i].item() for i, end in enumerate(ends)]
    assert rewards == [0, 0, 1, 1, 2, 2]
    assert ends[0]["reward"].shape == (6, 1, 1)
    play(env, policy)
    assert len(recorder.made) == 12, "a new episode has new environments"
    env.close()
    assert all(made.events.count("close") == 1 for made in recorder.made)


def test_a_reset_of_some_rows_leaves_the_others_alone(recorder, scripted, call_text):
    env = make_env(make_rows(2), EnvironmentTools(recorder), batch_size=2)
    policy = scripted([call_text("echo", text="x")])
    batch = env.step(policy(env.reset()))["next"]
    before = read_conversations(batch, "prompt", who="test")
    batch["_reset"] = torch.tensor([[False], [True]])
    after = read_conversations(env.reset(batch), "prompt", who="test")
    assert after[0] == before[0]
    assert [m["role"] for m in after.messages(1)] == ["user"]
    third = recorder.made.pop()
    first, second = by_number(recorder)
    assert first.events == ["reset", "echo x"], "the row that goes on keeps its environment"
    assert second.events == ["reset", "echo x", "close"]
    assert third.events == ["reset"]
    env.close()
    assert (first.events[-1], third.events[-1]) == ("close", "close")


def test_async_methods_are_awaited(scripted, call_text, play):
    closed = []

    class Async:
        async def reset(self, *, number):
            await asyncio.sleep(0)
            self.number = number
            return "ready"

        async def double(self, x: int) -> int:
            """Double a number.

            Args:
                x: The number.
            """
            await asyncio.sleep(0)
            return 2 * x

        async def get_reward(self):
            return self.number + 0.5

        async def close(self):
            closed.append(self.number)

    env = make_env(make_rows(2), EnvironmentTools(Async))
    ends = play(env, scripted([call_text("double", x=4), "done"]))
    assert tool_messages(ends[0], 0) == ["8"]
    assert [ends[i]["reward"][i].item() for i in range(2)] == [0.5, 1.5]
    assert sorted(closed) == [0, 1]
    env.close()


def test_environments_are_routed_by_a_column(recorder, scripted, call_text, play):
    class Other:
        def reset(self, **row):
            self.row = row

        def shout(self, text: str) -> str:
            """Say it loudly.

            Args:
                text: What to say.
            """
            return text.upper()

        def get_reward(self):
            return -1.0

    rows = make_rows(2, environment=["recorder", "other"])
    tools = EnvironmentTools({"recorder": recorder, "other": Other})
    env = make_env(rows, tools)
    batch = env.reset()
    row = tools.instance(1).row
    assert row == {**rows[1], "prompt": "<1>"}, "**row gets the columns, and no seed"
    schemas = [read_conversations(batch, "prompt", who="test").tools(i) for i in range(2)]
    assert [[s["function"]["name"] for s in schema] for schema in schemas] == [["echo"], ["shout"]]
    ends = play(env, scripted([call_text("shout", text="hi") + call_text("echo", text="hi"), "x"]))
    unknown = "unknown tool 'shout'; the tools are ['echo']"
    assert tool_messages(ends[0], 0) == [json.dumps({"error": unknown}), "0:hi"]
    assert tool_messages(ends[1], 1)[0] == "HI"
    assert "unknown tool 'echo'" in tool_messages(ends[1], 1)[1]
    assert ends[0]["rewards", "recorder"][0].item() == 0
    assert ends[1]["rewards", "other"][1].item() == -1
    assert ends[1]["rewards", "recorder"][1].isnan(), "an environment scores its own rows only"
    env.close()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        pytest.param("ask", [("user", "ask\n\nseen")], id="string"),
        pytest.param([{"role": "user", "content": "a"}], [("user", "a\n\nseen")], id="messages"),
        pytest.param(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            [("user", "a"), ("assistant", "b"), ("user", "seen")],
            id="nobody asked last",
        ),
        pytest.param("", [("user", "seen")], id="empty"),
    ],
)
def test_what_reset_says_is_added_to_the_query(prompt, expected):
    class Says:
        def reset(self):
            return "seen"

        def get_reward(self):
            return 0

    data = [{"prompt": prompt}]
    env = make_env(data, EnvironmentTools(Says))
    messages = read_conversations(env.reset(), "prompt", who="test").messages(0)
    assert [(m["role"], m["content"]) for m in messages] == expected
    assert data == [{"prompt": prompt}], "the data are not written to"
    env.close()


class Awkward:
    """Tools that fail in every way."""

    gate: threading.Event

    def reset(self, *, number):
        self.number = number

    def fine(self, x: int) -> str:
        """Work.

        Args:
            x: A number.
        """
        return f"fine {x}"

    def fails(self) -> str:
        """Fail."""
        raise ValueError("x" * 5000)

    def exits(self) -> str:
        """End the program."""
        raise SystemExit(1)

    def hangs(self) -> str:
        """Never return."""
        self.gate.wait()
        return "late"

    def floods(self) -> str:
        """Say far too much."""
        return "y" * 1_000_000

    def odd(self) -> object:
        """Return an object that can't be shown."""

        class Odd:
            def __str__(self):
                raise RuntimeError("no text")

        return Odd()

    def surrogate(self) -> str:
        """Return what is not text."""
        return "a\ud800b\0"

    def data(self) -> dict:
        """Return data."""
        return {"é": [1, None]}

    def get_reward(self):
        return 1.0


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        pytest.param("fails", "ValueError: " + "x" * 1000, id="raises"),
        pytest.param("exits", "SystemExit: 1", id="exits"),
        pytest.param("hangs", "CallTimeoutError: no answer within 0.3 s", id="hangs"),
        pytest.param({"name": "nothing"}, "unknown tool 'nothing'", id="unknown tool"),
        pytest.param({"name": "reset"}, "unknown tool 'reset'", id="the lifecycle is no tool"),
        pytest.param({"name": "get_reward"}, "unknown tool 'get_reward'", id="nor the reward"),
        pytest.param({"name": "fine"}, "'x' is a required property", id="missing argument"),
        pytest.param(
            {"name": "fine", "arguments": {"x": "1"}}, "'1' is not of type 'integer'", id="type"
        ),
        pytest.param(
            {"name": "fine", "arguments": {"x": 1, "self": 2}}, "'self' was unexpected", id="self"
        ),
        pytest.param("<tool_call>{oops</tool_call>", "malformed tool call", id="malformed"),
        pytest.param("<tool_call>", "not closed", id="not closed"),
    ],
)
def test_a_failing_call_is_answered_and_disturbs_no_other(
    scripted, call_text, play, turn, expected
):
    awkward = type("Awkward", (Awkward,), {"gate": threading.Event()})
    if isinstance(turn, dict):
        turn = f"<tool_call>{json.dumps(turn)}</tool_call>"
    elif not turn.startswith("<"):
        turn = call_text(turn)
    fine = call_text("fine", x=1) + call_text("fine", x=2)
    env = make_env(make_rows(2), EnvironmentTools(awkward, timeout_s=0.3))
    ends = play(env, scripted({"<0>": [turn, "done"], "<1>": [fine, "done"]}))
    awkward.gate.set()
    (answer,) = tool_messages(ends[0], 0)
    assert expected in json.loads(answer)["error"]
    assert len(answer) < 3000
    assert tool_messages(ends[1], 1) == ["fine 1", "fine 2"]
    assert [ends[i]["reward"][i].item() for i in range(2)] == [1, 1]
    env.close()


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        pytest.param("data", '{"é": [1, null]}', id="data become JSON"),
        pytest.param("surrogate", "a?b\0", id="not text"),
        pytest.param("odd", "<Odd that can't be shown: RuntimeError>", id="no str"),
        pytest.param("floods", "y" * 100 + "\n[... 999900 more characters were cut]", id="flood"),
    ],
)
def test_any_result_is_text_of_bounded_length(scripted, call_text, play, tool, expected):
    env = make_env(make_rows(1), EnvironmentTools(Awkward, max_result_bytes=100))
    ends = play(env, scripted([call_text(tool), "done"]))
    assert tool_messages(ends[0], 0) == [expected]
    env.close()


def test_good_and_bad_calls_of_a_turn_are_answered_in_order(scripted, call_text, play):
    turn = call_text("fine", x=1) + "<tool_call>?</tool_call>" + call_text("fine", x=2)
    env = make_env(make_rows(1), EnvironmentTools(Awkward))
    answers = tool_messages(play(env, scripted([turn, "done"]))[0], 0)
    assert [answers[0], answers[2]] == ["fine 1", "fine 2"]
    assert "malformed" in json.loads(answers[1])["error"]
    env.close()


def test_the_tools_of_all_rollouts_run_at_once(scripted, call_text, play):
    barrier = threading.Barrier(8, timeout=20)

    class Meets:
        def reset(self):
            barrier.wait()

        def meet(self) -> int:
            """Wait for the others."""
            return int(barrier.wait() >= 0)

        def get_reward(self):
            return float(barrier.wait() >= 0)

        def close(self):
            barrier.wait()

    env = make_env(make_rows(8), EnvironmentTools(Meets))
    ends = play(env, scripted([call_text("meet"), "done"]))
    assert [tool_messages(ends[i], i) for i in range(8)] == [["1"]] * 8
    assert ends[0]["reward"].sum() == 8
    assert not barrier.broken
    env.close()


def test_closing_leaves_no_thread_and_no_environment(recorder, scripted, call_text):
    before = set(threading.enumerate())

    async def kind(completions):
        return [0.0] * len(completions)

    env = make_env(make_rows(2), EnvironmentTools(recorder), RewardFunctions([kind]))
    batch = env.step(scripted({"<0>": [call_text("echo", text="x")], "<1>": ["x"]})(env.reset()))
    assert batch["next", "done"].view(-1).tolist() == [False, True]
    started = set(threading.enumerate()) - before
    assert started
    env.close()
    for thread in started:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in started)
    assert [made.events.count("close") for made in recorder.made] == [1, 1]


# How an episode ends ------------------------------------------------------------------------------


def test_why_an_episode_ends_and_its_flags(recorder, scripted, call_text, play, chatml_tokenizer):
    call = call_text("echo", text="x")
    cut = chatml_tokenizer.encode("half a th", add_special_tokens=False)
    policy = scripted({"<0>": ["done"], "<1>": [call] * 9, "<2>": [call, cut], "<3>": [call, "x"]})
    env = make_env(make_rows(4), EnvironmentTools(recorder), StepCounter(max_steps=3))
    ends = play(env, policy)
    reasons = [read_objects(end, "stop_reason")[i] for i, end in enumerate(ends)]
    # The engine cut it before the limit of the policy, so it was the model's own length.
    assert reasons == ["answered", "max_steps", "context_length", "answered"]
    assert [bool(end["truncated"][i]) for i, end in enumerate(ends)] == [False, True, True, False]
    assert [bool(end["terminated"][i]) for i, end in enumerate(ends)] == [True, False, False, True]
    assert all(end["done"][i] for i, end in enumerate(ends))
    assert [made.events[-2:] for made in recorder.made] == [["get_reward", "close"]] * 4
    assert [len([e for e in m.events if "echo" in e]) for m in by_number(recorder)] == [0, 3, 1, 1]
    env.close()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
def test_transforms_work_in_any_order(recorder, scripted, call_text, play, order):
    seen = []

    def after_the_calls(completions, environments, number):
        seen.append([environment.events[-1] for environment in environments])
        return [len(completion) * 10.0 for completion in completions]

    parts = [
        DataLoadingPrimer(make_rows(2)),
        EnvironmentTools(recorder),
        RewardFunctions([after_the_calls]),
        StepCounter(max_steps=2),
    ]
    env = ChatEnv(batch_size=2).append_transform(Compose(*(parts[i] for i in order)))
    call = call_text("echo", text="x")
    ends = play(env, scripted({"<0>": ["done"], "<1>": [call] * 5}))
    # <1>: call, answer, call, and perhaps the answer to the last call, which nobody reads.
    lengths = [round((ends[i]["rewards", "after_the_calls"][i].item()) / 10) for i in range(2)]
    assert lengths[0] == 1
    assert lengths[1] in (3, 4)
    assert ends[1]["reward"][1].item() == 1 + 10 * lengths[1]
    assert all(event != "close" for events in seen for event in events)
    assert [made.events[-1] for made in recorder.made] == ["close"] * 2
    env.close()


def test_a_row_that_can_not_be_generated_ends_alone(recorder, scripted, call_text):
    env = make_env(make_rows(2), EnvironmentTools(recorder))
    policy = scripted([call_text("echo", text="x")])
    generate = policy.engine.generate

    def refuse_row_0(prompts, params, **kwargs):
        good = generate(prompts, params, **kwargs)
        failed = good[0]._replace(ids=[], log_probs=[], finish_reason="error", error="too long")
        return [failed, *good[1:]]

    policy.engine.generate = refuse_row_0
    batch = env.step(policy(env.reset()))["next"]
    assert batch["done"].view(-1).tolist() == [True, False]
    assert batch["truncated"].view(-1).tolist() == [True, False]
    assert read_objects(batch, "stop_reason")[0] == "error: too long"
    first, second = by_number(recorder)
    assert first.events == ["reset", "close"], "what it did says nothing of the policy"
    assert not batch["scorable"][0]
    assert read_objects(batch, "reward_errors")[0] == "error: too long"
    assert second.events == ["reset", "echo x"]
    env.close()


def test_a_row_whose_messages_can_not_be_encoded_ends_alone(scripted):
    class SaysHalfACharacter(EpisodeTransform):
        def after_turn(self, episode):
            content = "\ud800" if episode.row == 0 else "go on"
            episode.say({"role": "user", "content": content})

    env = make_env(make_rows(2), SaysHalfACharacter())
    policy = scripted(["one", "two"])
    batch = env.step(policy(env.reset()))["next"]
    batch = env.step(policy(batch))["next"]
    assert batch["done"].view(-1).tolist() == [True, False]
    assert read_objects(batch, "stop_reason")[0].startswith("error: The tokenizer can't encode")
    env.close()


def test_a_chat_env_by_itself_ends_a_row_that_nobody_answered(scripted):
    env = ChatEnv(batch_size=2)
    batch = env.reset(TensorDict(batch_size=[2]).set_non_tensor("query", ["a", "\ud800"]))
    after = env.step(scripted(["hi", "never"])(batch))["next"]
    assert after["done"].view(-1).tolist() == [False, True]


def test_a_chat_env_by_itself(scripted):
    env = ChatEnv(batch_size=2, system_prompt="Be kind.")
    own = [{"role": "system", "content": "Be rude."}, {"role": "user", "content": "b"}]
    batch = env.reset(TensorDict(batch_size=[2]).set_non_tensor("query", ["a", own]))
    conversations = read_conversations(batch, "prompt", who="test")
    assert [m["content"] for m in conversations.messages(0)] == ["Be kind.", "a"]
    assert conversations.messages(1) == own
    full = read_conversations(scripted(["hi"])(batch), "full", who="test")
    after = env.step(batch)["next"]
    assert read_conversations(after, "prompt", who="test") == full
    assert not after["done"].any()
