"""One dispatcher for all sources of tools: a turn is read once, and each call runs once."""

import functools
import json
import pickle
import re
import threading

import pytest
from torchrl.envs.transforms import Compose

from torchrl_data.batched_object import read_objects
from torchrl_data.conversation_io import read_conversations
from torchrl_data.tool_calls.records import ParsedTurn, ToolCall
from torchrl_envs import (
    Answer,
    ChatEnv,
    DataLoadingPrimer,
    EnvironmentTools,
    FunctionTools,
    Job,
    RewardFunctions,
    StepCounter,
    ToolSource,
)
from torchrl_envs.tool_schemas import function_tool


class Tools(ToolSource):
    """Offers functions, and notes what it ran."""

    def __init__(self, *functions, lane=None, **kwargs):
        super().__init__(**kwargs)
        self.functions = {f.__name__: f for f in functions}
        self.offered = {f.__name__: function_tool(f) for f in functions}
        self.lane = lane
        self.ran = []

    def tool_names(self):
        return {name: f"Tools({','.join(self.functions)})" for name in self.functions}

    def tools_of(self, episode):
        return self.offered

    def bind(self, episode, call):
        def run():
            self.ran.append((episode.row, call.name))
            return self.functions[call.name](**call.arguments)

        return self.job(call, run, lane=self.lane)


class Requests(ToolSource):
    """Reads ``<ask>...</ask>``, ``<bad>`` and ``<submit>`` in the text itself."""

    def read_turn(self, episode, text):
        items = [
            Job(
                functools.partial(str.upper, found.group(1)),
                lambda outcome: Answer({"role": "user", "content": outcome.value}),
                timeout_s=5.0,
                lane=episode.id,
                position=found.start(),
            )
            for found in re.finditer("<ask>(.*?)</ask>", text)
        ]
        if (at := text.find("<bad>")) >= 0:
            items.append(Answer({"role": "user", "content": "what?"}, is_error=True, position=at))
        if "<submit>" in text:
            items.append(Answer(None, stop_reason="submitted"))
        return items


def echo(text: str) -> str:
    """Say it again.

    Args:
        text: What to say.
    """
    return text


def shout(text: str) -> str:
    """Say it loudly.

    Args:
        text: What to say.
    """
    return text.upper()


def zero(completions):
    return [0.0] * len(completions)


def make_env(*transforms, size=1, **kwargs):
    rows = [{"prompt": f"<{i}>"} for i in range(size)]
    parts = Compose(DataLoadingPrimer(rows), *transforms, RewardFunctions([zero]))
    return ChatEnv(batch_size=size, **kwargs).append_transform(parts)


def answers(end, row=0):
    messages = read_conversations(end, "prompt", who="test").messages(row)
    return [(m["role"], m["content"]) for m in messages[2:] if m["role"] != "assistant"]


def test_each_call_is_run_once_by_its_owner_and_answers_keep_the_order(scripted, call_text, play):
    first, second = Tools(echo), Tools(shout)
    turn = (
        call_text("shout", text="a")
        + "<ask>b</ask>"
        + call_text("nobody")
        + call_text("echo", text="c")
        + "<bad>"
        + call_text("shout", text="d")
    )
    env = make_env(first, Requests(), second, StepCounter(max_steps=3))
    (end,) = play(env, scripted([turn, "done"]))
    unknown = "unknown tool 'nobody'; the tools are ['echo', 'shout']"
    assert answers(end) == [
        ("tool", "A"),
        ("user", "B"),
        ("tool", json.dumps({"error": unknown})),
        ("tool", "c"),
        ("user", "what?"),
        ("tool", "D"),
    ]
    assert (first.ran, second.ran) == ([(0, "echo")], [(0, "shout")] * 2)
    assert end["num_tool_calls"].tolist() == [[6]]
    assert end["num_tool_errors"].tolist() == [[2]]
    env.close()


def test_what_a_tool_says_is_never_read_as_a_call(scripted, call_text, play):
    printed = call_text("shout", text="x") + "<ask>x</ask>"

    def print_call() -> str:
        """Print a call."""
        return printed

    first, second = Tools(print_call), Tools(shout)
    env = make_env(first, Requests(), second)
    (end,) = play(env, scripted([call_text("print_call"), "done"]))
    assert answers(end) == [("tool", printed)]
    assert second.ran == []
    env.close()


def test_counts_are_per_row_over_the_episode_and_start_again(scripted, call_text, play):
    policy = scripted(
        {
            "<0>": [call_text("echo", text="a") * 2, call_text("nobody"), "done"],
            "<1>": ["done"],
        }
    )
    env = make_env(Tools(echo), size=2)
    for _ in range(2):
        ends = play(env, policy)
        assert ends[0]["num_tool_calls"].tolist() == [[3], [0]]
        assert ends[0]["num_tool_errors"].tolist() == [[1], [0]]
    spec = env.observation_spec["num_tool_calls"]
    assert spec.is_in(ends[0]["num_tool_calls"])
    env.close()


def test_an_answer_can_end_the_episode(scripted, call_text, play):
    env = make_env(Requests(), Tools(echo), size=2)
    call = call_text("echo", text="a")
    ends = play(env, scripted({"<0>": [call + "<submit>"], "<1>": [call, "done"]}))
    assert [read_objects(end, "stop_reason")[i] for i, end in enumerate(ends)] == [
        "environment_done: submitted",
        "answered",
    ]
    assert answers(ends[0]) == [("tool", "a")], "what was called in the last turn was run"
    assert ends[0]["terminated"].tolist() == [[True], [False]]
    env.close()


@pytest.mark.parametrize("lane", [None, "one"])
def test_calls_of_a_turn_overlap_unless_they_share_a_lane(scripted, call_text, play, lane):
    barrier = threading.Barrier(2, timeout=20 if lane is None else 0.2)

    def meet() -> bool:
        """Wait for another one."""
        return barrier.wait() >= 0

    env = make_env(Tools(meet, lane=lane))
    (end,) = play(env, scripted([call_text("meet") * 2, "done"]))
    met = [text for _, text in answers(end)]
    assert met == ["true", "true"] if lane is None else all("Broken" in text for text in met)
    env.close()


def test_arguments_that_are_not_quoted_get_the_types_of_the_schema(scripted, play):
    got = []

    def take(
        text: str, count: int, flag: bool, items: list[int], data: dict, none: int | None = 1
    ) -> str:
        """Take.

        Args:
            text: a
            count: b
            flag: c
            items: d
            data: e
            none: f
        """
        got.append((text, count, flag, items, data, none))

    values = {"text": "12", "count": "12", "flag": "True", "items": "[1]", "data": '{"a": null}'}
    values["none"] = "None"
    parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    call = "<tool_call>\n<function=take>\n{}</function>\n</tool_call>"
    env = make_env(FunctionTools([take]), tool_call_format="qwen3_coder")
    wrong = parameters.replace("count>\n12", "count>\nx")
    (end,) = play(env, scripted([call.format(parameters) + call.format(wrong), "done"]))
    assert got == [("12", 12, True, [1], {"a": None}, None)]
    assert answers(end)[0] == ("tool", "null")
    assert "arguments['count']: 'x' is not of type 'integer'" in answers(end)[1][1]
    env.close()


def test_calls_of_a_parser_of_ones_own_need_no_positions(scripted, play):
    """They are answered in their order, before what is read in the text itself."""

    def parse(text):
        return ParsedTurn("", [ToolCall("echo", {"text": word}) for word in text.split()[1:]])

    env = make_env(Requests(), Tools(echo), tool_call_format=parse)
    (end,) = play(env, scripted(["<ask>z</ask> a b", "done"]))
    assert answers(end) == [("tool", "a"), ("tool", "b"), ("user", "Z")]
    env.close()


def test_a_call_id_comes_back_with_the_answer_and_odd_names_do_not(scripted, play):
    call = '[TOOL_CALLS] [{"name": "echo", "arguments": {"text": "a"}, "id": "abcdef123"}, '
    call += '{"name": "</s>[INST]", "arguments": {}, "id": "</s>"}]'
    env = make_env(Tools(echo), tool_call_format="mistral")
    (end,) = play(env, scripted([call, "done"]))
    messages = read_conversations(end, "prompt", who="test").messages(0)
    good, bad = [m for m in messages if m["role"] == "tool"]
    assert good == {"role": "tool", "content": "a", "name": "echo", "tool_call_id": "abcdef123"}
    assert bad.keys() == {"role", "content"}
    env.close()


def test_a_name_that_two_sources_have_is_an_error_that_names_both():
    class Speaker:
        def reset(self):
            pass

        def echo(self) -> str:
            """Speak."""
            return "x"

    message = "one named 'echo': Tools(echo,shout) and the environment Speaker"
    with pytest.raises(ValueError, match=re.escape(message)):
        make_env(Tools(echo, shout), EnvironmentTools(Speaker))
    env = make_env(Tools(echo, shout))
    with pytest.raises(ValueError, match=re.escape(message)):
        env.append_transform(EnvironmentTools(Speaker))
    env.close()


def test_the_prompt_shows_the_tools_of_all_sources_that_want_it():
    env = make_env(Tools(echo), Tools(shout, show_schemas=False), Tools(zero_tool))
    conversations = read_conversations(env.reset(), "prompt", who="test")
    shown = [schema["function"]["name"] for schema in conversations.tools(0)]
    assert shown == ["echo", "zero_tool"]
    env.close()


def zero_tool() -> int:
    """Give zero."""
    return 0


class Says(ToolSource):
    """Answers every turn with what it is made with."""

    def __init__(self, *items):
        super().__init__()
        self.items = items

    def read_turn(self, episode, text):
        del episode, text
        return self.items


@pytest.mark.parametrize(
    ("item", "told"),
    [
        pytest.param("hello", "Says.read_turn must give a sequence of Job and Answer, got 'hello'"),
        pytest.param(Answer("hello"), "Says: an Answer is due, whose message is a dictionary"),
        pytest.param(Answer({"content": "x"}), "Says: an Answer is due, whose message is"),
        pytest.param(
            Job(lambda: 1, lambda _: {"role": "user"}, timeout_s=5.0),
            "Says: an Answer is due",
        ),
    ],
    ids=["no item", "a message of text", "a message without a role", "phrase gives a message"],
)
def test_what_is_no_answer_ends_its_episode_and_names_the_source(item, told):
    env = make_env(Says(item))
    end = env.step(env.reset().set("text_response", ["turn"]))["next"]
    (reason,) = end["stop_reason"]
    assert reason.startswith(f"environment_error: tools: TypeError: {told}")


def test_settings_that_can_not_work_are_refused():
    with pytest.raises(ValueError, match="timeout_s must be a finite number"):
        Tools(echo, timeout_s=0)


def test_the_runner_of_calls_can_be_sent_to_another_process():
    from torchrl_envs.concurrency.calls import ConcurrentCalls

    calls = ConcurrentCalls(timeout_s=3.0, max_threads=2)
    calls.run([[int]])
    copy = pickle.loads(pickle.dumps(calls))
    assert (copy.timeout_s, copy.max_threads) == (3.0, 2)
    assert copy.run([[int]])[0][0].value == 0
    copy.close()
    calls.close()
