"""A simulated user with tools of its own: what it does there, who sees it, and what it may cost."""

import json
import pickle
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import LLMCollector, StreamingCollector
from objectives import MCAdvantage
from torchrl_data.batched_object import read_objects
from torchrl_data.conversation_io import read_conversations
from torchrl_data.tool_calls.call_messages import calls_of_message, message_with_calls
from torchrl_data.tool_calls.records import ToolCall
from torchrl_envs import (
    ChatCompletions,
    ChatEnv,
    DataLoadingPrimer,
    EnvironmentTools,
    EpisodeLostError,
    FunctionTools,
    PolicyAnswers,
    RewardErrorLimit,
    SimulatedUser,
    StepCounter,
    user_tool,
)
from torchrl_modules import BatchingEngine

END = "###STOP###"
PAID = "Paid."


class Phone:
    """A line that the policy sees, and a telephone that only its owner can switch on."""

    def reset(self, **row):
        self.is_on, self.is_paid = False, False

    def line(self) -> str:
        """Say whether the line is up."""
        return "up" if self.is_on else "down"

    @user_tool
    def switch(self, is_on: bool) -> str:
        """Switch the telephone.

        Args:
            is_on: Whether it is on afterwards.
        """
        if self.is_on == is_on:
            raise RuntimeError("no change")
        self.is_on = is_on
        return "switched"

    @user_tool
    def drop(self) -> str:
        """Drop the telephone."""
        raise EpisodeLostError("in pieces")

    def get_reward(self):
        return float(self.is_on)


def tell_time() -> str:
    """Tell the time."""
    return "noon"


def call(name, arguments=None, number=1):
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"id": f"call{number}", "type": "function", "function": function}


def calls(*given, content=""):
    made = [call(*each, number=i) for i, each in enumerate(given)]
    return {"role": "assistant", "content": content, "tool_calls": made}


class Scripted:
    """A user who says its lines, one for each time that it is asked in an episode."""

    def __init__(self, *lines):
        self.lines, self.asked, self.offered = lines, [], []

    def __call__(self, questions, *, tools):
        self.asked += questions
        self.offered += [[t["function"]["name"] for t in schemas] for schemas in tools]
        said = [sum(m["role"] == "assistant" for m in each[3:]) for each in questions]
        return [self.lines[min(n, len(self.lines) - 1)] for n in said]


def env_of(user, *, num=1, group_size=1, limit=6, factory=Phone, prompts=("No line.",), **kwargs):
    rows = [{"prompt": prompt, "scenario": "Your telephone is off."} for prompt in prompts]
    return ChatEnv(batch_size=num).append_transform(
        Compose(
            DataLoadingPrimer(rows, group_size=group_size),
            SimulatedUser(user, **kwargs),
            EnvironmentTools(factory),
            RewardErrorLimit(1.0),
            StepCounter(max_steps=limit),
        )
    )


def said(messages):
    return [(message["role"], message.get("content")) for message in messages]


def chat_of(end):
    return said(read_conversations(end, "prompt", who="test").messages(0))


def reason_of(end):
    return read_objects(end, "stop_reason")[0]


LINES = [calls(("tell_time",), ("switch", {"is_on": True}), content="Hm."), "It is on.", END]


def test_the_user_acts_on_the_state_of_the_policys_tools_and_only_its_words_are_heard(
    scripted, play, call_text
):
    user = Scripted(*LINES)
    env = env_of(user, tools=[tell_time])
    turns = ["Switch it on.", call_text("line"), "It is up."]
    (end,) = play(env, scripted(turns))
    env.close()
    assert chat_of(end) == [
        ("user", "No line."),
        ("assistant", turns[0]),
        ("user", "It is on."),
        ("assistant", turns[1]),
        ("tool", "up"),
        ("assistant", turns[2]),
    ]
    assert (reason_of(end), end["reward"].item()) == ("environment_done: user", 1.0)
    assert end["num_tool_calls"].item() == 1, "the user's are not the policy's"
    assert user.offered == [["tell_time", "switch", "drop"]] * 3
    told, *rest = user.asked[1][3:]
    assert told == {"role": "user", "content": "Switch it on."}
    assert rest == [
        LINES[0],
        {"role": "tool", "content": "noon", "name": "tell_time", "tool_call_id": "call0"},
        {"role": "tool", "content": "switched", "name": "switch", "tool_call_id": "call1"},
    ]
    shown = read_conversations(end, "prompt", who="test").tools(0)
    assert [tool["function"]["name"] for tool in shown] == ["line"]


def test_the_policy_can_not_call_what_is_the_users(scripted, play, call_text):
    env = env_of(Scripted(END))
    (end,) = play(env, scripted([call_text("switch", is_on=True), "Done."]))
    env.close()
    assert "unknown tool 'switch'; the tools are ['line']" in chat_of(end)[2][1]
    assert end["reward"].item() == 0.0


def test_a_policy_of_this_process_calls_in_its_own_format(scripted, play, call_text):
    asked = call_text("switch", is_on=True)
    other = scripted({"": [asked, "It is on.", END]})
    env = env_of(PolicyAnswers(other))
    (end,) = play(env, scripted(["Switch it on.", "Fine."]))
    env.close()
    assert chat_of(end)[2] == ("user", "It is on.")
    assert end["reward"].item() == 1.0
    (first, turn), (second, _), _ = other.engine.served
    text = other.encoder.tokenizer.decode
    assert '"switch"' in text(list(first))
    assert '"line"' not in text(list(first))
    assert second[: len(first) + len(turn.ids)] == (*first, *turn.ids), "nothing is encoded twice"
    assert "switched" in text(list(second[len(first) + len(turn.ids) :]))


def test_a_call_that_can_not_be_read_costs_the_episode(scripted, play):
    other = scripted({"": ["<tool_call>{</tool_call>"]})
    env = env_of(PolicyAnswers(other))
    (end,) = play(env, scripted(["Switch it on."]))
    env.close()
    assert "a call of the answer can't be read" in reason_of(end)
    assert not end["scorable"].item()


class Handler(BaseHTTPRequestHandler):
    bodies, lines = [], [calls(("switch", '{"is_on": true}')), "It is on.", END]

    def do_POST(self):
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        line = self.lines[len(self.bodies) - 1]
        message = {"role": "assistant", "content": line} if isinstance(line, str) else line
        reason = "stop" if isinstance(line, str) else "tool_calls"
        choice = {"index": 0, "finish_reason": reason, "message": message}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        data = json.dumps({**reply, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


def test_a_server_is_offered_tools_and_reads_what_they_gave(scripted, play):
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    user = ChatCompletions("m", base_url=f"http://127.0.0.1:{http.server_address[1]}/v1")
    env = env_of(user)
    (end,) = play(env, scripted(["Switch it on.", "Fine."]))
    env.close()
    http.shutdown()
    http.server_close()
    assert (chat_of(end)[2], end["reward"].item()) == (("user", "It is on."), 1.0)
    first, second, _ = Handler.bodies
    assert [tool["function"]["name"] for tool in first["tools"]] == ["switch", "drop"]
    called, answered = second["messages"][-2:]
    assert called["tool_calls"][0]["function"]["arguments"] == '{"is_on": true}'
    assert (answered["role"], answered["tool_call_id"]) == ("tool", "call0")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (("buy",), "unknown tool 'buy'; the tools are ['switch', 'drop']"),
        (("switch", {"is_on": 3}), "3 is not of type 'boolean'"),
        (("switch", "{"), "not valid JSON"),
        (("switch", "[1]"), "no object"),
        (("switch", {"is_on": False}), "RuntimeError: no change"),
    ],
)
def test_a_call_that_fails_is_answered_with_what_is_wrong(scripted, play, wrong, told):
    user = Scripted(calls(wrong), "I can't.", END)
    env = env_of(user)
    (end,) = play(env, scripted(["Switch it on.", "Pity."]))
    env.close()
    answer = user.asked[1][-1]
    assert told in json.loads(answer["content"])["error"]
    assert answer["tool_call_id"] == "call0"
    assert (reason_of(end), end["reward"].item()) == ("environment_done: user", 0.0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (calls(("drop",)), "EpisodeLostError: in pieces"),
        ({"tool_calls": [{"name": "switch"}]}, "each of tool_calls is"),
        ({"content": " "}, "says nothing"),
    ],
)
def test_what_can_not_go_on_costs_its_own_episode(scripted, play, line, words):
    def user(questions, *, tools):
        return [line if "<0>" in each[2]["content"] else END for each in questions]

    env = env_of(user, num=2, prompts=("<0>", "<1>"))
    ends = play(env, scripted(["Switch it on."]))
    env.close()
    first, second = (read_objects(ends[row], "stop_reason")[row] for row in range(2))
    assert first.startswith("environment_error")
    assert words in first
    assert (ends[0]["scorable"][0].item(), second) == (False, "environment_done: user")


@pytest.mark.parametrize(("max_calls", "is_lost"), [(3, False), (2, True)])
def test_calls_between_two_words_are_bounded_and_counted_anew_after_each(
    scripted, play, max_calls, is_lost
):
    three = [calls(("tell_time",), ("tell_time",)), calls(("tell_time",))]
    user = Scripted(*three, "Noon.", *three, END)
    env = env_of(user, tools=[tell_time], max_calls=max_calls)
    (end,) = play(env, scripted(["And now?"]))
    env.close()
    if is_lost:
        assert "called tools 3 times and said nothing" in reason_of(end)
        assert "max_calls=2" in reason_of(end)
    else:
        assert reason_of(end) == "environment_done: user"


def test_who_begins_calls_nothing_before_its_first_words(scripted, play):
    made = []

    class Counted(Phone):
        def reset(self, **row):
            super().reset(**row)
            made.append(self)

    user = Scripted(END)

    def answer(questions, *, tools):
        assert {len(schemas) for schemas in tools} == {2}
        user.asked += questions
        early = calls(("switch", {"is_on": True}))
        return [{2: early, 4: "No line."}.get(len(each), END) for each in questions]

    env = env_of(answer, num=2, group_size=2, opens=True, factory=Counted)
    ends = play(env, scripted(["Here."]))
    env.close()
    assert chat_of(ends[0]) == [("user", "No line."), ("assistant", "Here.")]
    assert "once the assistant has answered" in user.asked[1][-1]["content"]
    assert [len(each) for each in user.asked] == [2, 4, 6, 6], "asked once for both rollouts"
    assert [phone.is_on for phone in made] == [False, False]


def test_the_same_in_a_stream_and_in_a_batch(scripted, call_text):
    turns = ["Switch it on.", call_text("line"), "Fine."]
    prompts = [f"<{i}>" for i in range(4)]
    env = env_of(Scripted(*LINES), tools=[tell_time], num=8, group_size=2, prompts=prompts)
    batch = LLMCollector(env, scripted(turns)).collect()
    env.close()
    policy = scripted(turns)
    env = env_of(Scripted(*LINES), tools=[tell_time], num=8, group_size=2, prompts=prompts)
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(2))
    with StreamingCollector(
        env, policy, engine=BatchingEngine(policy.engine), replay_buffer=buffer, groups_per_step=4
    ) as collector:
        streamed = next(iter(collector))
    for rows in (batch, streamed):
        full = read_conversations(rows, "full", who="test")
        chats = [[m["content"] for m in full.messages(row)[1:]] for row in range(8)]
        assert chats == [[turns[0], "It is on.", turns[1], "up", turns[2]]] * 8
        assert rows["reward"].view(-1).tolist() == [1.0] * 8


def test_a_copy_for_another_process_has_the_tools():
    copy = pickle.loads(pickle.dumps(SimulatedUser(print, tools=[tell_time], max_calls=3)))
    assert (copy.max_calls, "tools=['tell_time']" in repr(copy)) == (3, True)


def test_the_user_has_a_conversation_that_can_be_read(scripted):
    env = env_of(Scripted(*LINES), tools=[tell_time])
    seen = []
    (user,) = env.transforms_of(SimulatedUser)
    plain = user.after_turn

    async def after_turn(episode):
        await plain(episode)
        seen.append([m["role"] for m in user.conversation_of(episode)])

    user.after_turn = after_turn
    LLMCollector(env, scripted(["Switch it on.", "Fine."])).collect()
    env.close()
    begun = ["system", "user", "assistant", "user", "assistant", "tool", "tool", "assistant"]
    assert seen == [begun, [*begun, "user", "assistant"]]


def test_tools_that_can_not_be_are_refused(scripted):
    with pytest.raises(ValueError, match="max_calls"):
        SimulatedUser(print, max_calls=0)
    with pytest.raises(TypeError, match="a list of functions"):
        SimulatedUser(print, tools=tell_time)
    with pytest.raises(TypeError, match="directly above def"):
        user_tool(classmethod(tell_time))
    shared = FunctionTools([tell_time])
    env = env_of(print, tools=shared).append_transform(shared)
    with pytest.raises(ValueError, match="a part of the environment, too"):
        env.check()

    def switch() -> str:
        """Switch."""
        return ""

    with pytest.raises(ValueError, match="two tools of the user are named 'switch'"):
        env_of(print, tools=[switch]).check()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
NAMED = st.builds(
    ToolCall,
    st.text("ab_", min_size=1),
    st.dictionaries(st.text(max_size=5), VALUES),
    st.none() | st.just("id1"),
    st.just(False),
)


@given(st.lists(NAMED, max_size=3), st.booleans())
def test_calls_are_read_as_they_were_written(wanted, as_text):
    message = message_with_calls({"role": "assistant"}, "", wanted)
    for each in message["tool_calls"] if as_text else ():
        each["function"]["arguments"] = json.dumps(each["function"]["arguments"])
    assert calls_of_message(message) == [(each, "") for each in wanted]


@given(VALUES)
def test_anything_in_the_place_of_calls_is_read_or_refused(value):
    message = {"role": "assistant", "tool_calls": value}
    if not value:
        assert calls_of_message(message) == []
    else:
        with pytest.raises(ValueError, match="each of tool_calls is"):
            calls_of_message(message)
