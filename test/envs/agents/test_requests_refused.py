"""What a program may not ask for, and how it is told."""

import contextlib
import copy
import http.client
import json
import socket
import threading
import time

import anthropic
import httpx
import openai
import pytest
import torch
from agents_for_tests import ADD, ROWS, asks_once, play
from tensordict import TensorDictBase
from torchrl.envs.transforms import Compose

from collectors import LLMCollector
from torchrl_data import Conversations
from torchrl_envs import AgentProgram, ChatEnv, DataLoadingPrimer, TokenBudget
from torchrl_envs.agents.program_prompt import as_prompt
from torchrl_envs.agents.server import AgentServer
from torchrl_envs.agents.turns import Accepted
from torchrl_envs.testing.scripted_turns import ScriptedTurns
from torchrl_modules import TransformersWrapper
from torchrl_modules.engines.engine import Generation

USER = {"role": "user", "content": "x"}


def call(name, arguments):
    function = {"name": name, "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function}


def asks(told, endpoint, **parameters):
    try:
        told.append(asks_once(endpoint, **parameters))
    except openai.APIStatusError as error:
        told.append(error)
    return 1.0


@pytest.fixture
def small_policy(make_tiny_model, chatml_tokenizer):
    torch.manual_seed(0)
    return TransformersWrapper(
        make_tiny_model(),
        tokenizer=chatml_tokenizer,
        generate_kwargs={"max_new_tokens": 5, "temperature": 0.5, "stop": ["Observation:"]},
    )


def collect(policy, tokenizer, program, *parts, timeout_s=20.0):
    """One episode, with a policy that encodes."""
    agent = AgentProgram(program, timeout_s=timeout_s)
    env = ChatEnv(batch_size=1, tokenizer=tokenizer).append_transform(
        Compose(DataLoadingPrimer(ROWS, group_size=1), agent, *parts)
    )
    with LLMCollector(env, policy) as collector:
        return collector.collect()


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"temperature": 0.2}, "temperature=0.2 can't take effect: turns are drawn"),
        ({"stop": ["\n"]}, "stop=.*ignored_parameters"),
        ({"n": 2}, "n=2"),
        ({"logprobs": True}, "logprobs=True"),
        ({"extra_body": {"top_k": 3}}, "top_k=3"),
        ({"max_tokens": 0}, "most tokens are a whole number"),
        ({"max_tokens": 1.5}, "most tokens are a whole number"),
        ({"tools": [ADD], "tool_choice": "none"}, "tool_choice='none' can't take effect"),
        ({"messages": []}, "there is no message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role 'robot'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing is left to be answered"),
        ({"tools": [{"type": "web_search"}]}, "a tool is a function with a name"),
        ({"messages": [{"role": "<none>", "content": "x"}]}, "no message has the role '<none>'"),
        (
            {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
            "function_call, which tool_calls have replaced",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "text alone is taken",
        ),
    ],
)
def test_what_can_not_take_effect_is_refused_and_said(chatml_tokenizer, parameters, words):
    def program(endpoint):
        with pytest.raises(openai.BadRequestError, match=words):
            asks_once(endpoint, **parameters)
        return float(asks_once(endpoint) == "one")

    assert play(chatml_tokenizer, program, ["one"])["reward"].item() == 1.0


def test_parameters_that_are_ignored_may_say_anything(chatml_tokenizer):
    def program(endpoint):
        return float(asks_once(endpoint, temperature=0.2, seed=3, user="me") == "one")

    options = {"ignored_parameters": ["temperature", "seed"]}
    assert play(chatml_tokenizer, program, ["one"], **options)["reward"].item() == 1.0


@pytest.mark.parametrize(
    "parameters",
    [
        {"max_tokens": 10**30},
        {"extra_body": {"max_tokens": 16.0}},
        {"tool_choice": "none", "parallel_tool_calls": False},
        {"temperature": 0.5, "stop": "Observation:"},
        {"top_p": 1, "stop": ["Observation:"]},
        {"extra_body": {"top_k": -1, "reasoning_effort": "none"}},
    ],
)
def test_what_happens_anyway_may_be_asked_for(small_policy, chatml_tokenizer, parameters):
    told = []
    trajectories = collect(small_policy, chatml_tokenizer, lambda e: asks(told, e, **parameters))
    assert trajectories["stop_reason"] == ["response_length"]
    assert len(told) == 1


def test_a_text_that_ends_a_turn_is_trained_and_not_shown(small_policy, chatml_tokenizer):
    """The program sends back what it was shown, which goes on with the row as it was drawn.

    One that does not ask for the policy's stop sees all of it: it may be the end of a call.
    """
    told = []
    drawn, _ = small_policy.encoder.encode_turn("I look.Observation: it")

    def generate(prompts, params, **kwargs):
        return [Generation(drawn, [-1.0] * len(drawn), "stop") for _ in prompts]

    small_policy.engine.generate = generate

    def program(endpoint):
        chat = [USER]
        for stop in ({"stop": "Observation:"}, {"stop": ["Observation:"]}, {}):
            asks(told, endpoint, messages=chat, **stop)
            chat += [{"role": "assistant", "content": told[-1]}, USER]
        url = endpoint.base_url.removesuffix("/v1")
        with anthropic.Anthropic(base_url=url, api_key=endpoint.api_key, max_retries=0) as client:
            options = {"stop_sequences": ["Observation:"], "max_tokens": 5}
            told.append(client.messages.create(model="m", messages=chat, **options))
        return 1.0

    trajectories = collect(small_policy, chatml_tokenizer, program)
    *texts, message = told
    assert texts == ["I look.", "I look.", "I look.Observation: it"]
    assert message.content[0].text == "I look."
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Observation:")
    (row,) = trajectories.unbind(0)
    sampled = row["tokens", "full"][row["masks", "all_assistant_mask"]]
    assert chatml_tokenizer.decode(sampled) == "I look.Observation: it" * 4


BODIES = [
    b"{",
    b"[]",
    b"\xff\xfe",
    b'{"messages": ' + b"[" * 100_000,
    {"messages": [{"role": "assistant", "tool_calls": True}, USER]},
    {"messages": [{"role": "assistant", "tool_calls": [True]}, USER]},
    {"messages": [{"role": ["user"], "content": "x"}]},
    {"messages": [{**USER, "content": 5}]},
    {"messages": [{**USER, "content": "\ud800"}]},
    {"messages": [{**USER, "content": [["a"]]}]},
    {"messages": [USER], "tools": [None]},
    {"messages": [{"role": "assistant", "tool_calls": [call("f", "[1, 2]")]}, USER]},
    {"messages": [{"role": "assistant", "tool_calls": [call("f", "5")]}, USER]},
]


def test_nothing_that_is_sent_breaks_the_server(chatml_tokenizer):
    told = []

    def program(endpoint):
        for body in BODIES:
            for path in ("chat/completions", "responses", "messages"):
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                key = {"authorization": f"Bearer {endpoint.api_key}"}
                said = httpx.post(f"{endpoint.base_url}/{path}", content=data, headers=key)
                told.append((said.status_code, said.json()["error"]["type"]))
        return float(asks_once(endpoint) == "one")

    assert play(chatml_tokenizer, program, ["one"])["reward"].item() == 1.0
    assert set(told) == {(400, "invalid_request_error")}


def test_a_turn_is_bounded_as_the_program_asks(chatml_tokenizer):
    bounds = []

    class Notes(ScriptedTurns):
        def __call__(self, batch: TensorDictBase) -> TensorDictBase:
            bounds.append(batch["max_new_tokens"].tolist())
            return super().__call__(batch)

    def program(endpoint):
        asks_once(endpoint, max_tokens=7)
        asks_once(endpoint)
        return 1

    agent = AgentProgram(program)
    env = ChatEnv(batch_size=1, tokenizer=chatml_tokenizer).append_transform(
        Compose(DataLoadingPrimer(ROWS, group_size=1), agent)
    )
    env.rollout(3, Notes(chatml_tokenizer, ["one", "two"]))
    env.close()
    assert bounds[0] == [7]


def test_a_prompt_that_can_not_be_one_is_refused_and_the_program_goes_on(
    make_tiny_model, chatml_tokenizer
):
    chatml_tokenizer = copy.deepcopy(chatml_tokenizer)
    chatml_tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
        "{{ raise_exception('the system speaks first') }}{% endif %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    policy = TransformersWrapper(
        make_tiny_model(), tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 5}
    )
    told = []
    late = [USER, {"role": "system", "content": "Now be brief."}]
    called = {"role": "assistant", "content": "", "tool_calls": [call("add", "{}")]}

    def program(endpoint):
        asks(told, endpoint, messages=late)
        asks(told, endpoint, tools=[ADD])
        asks(told, endpoint)
        asks(told, endpoint, messages=late)
        asks(told, endpoint, messages=[USER, called, USER])
        return asks(told, endpoint)

    trajectories = collect(policy, chatml_tokenizer, program)
    refused = [told[number] for number in (0, 1, 3, 4)]
    assert [type(error) for error in refused] == [openai.BadRequestError] * 4
    assert "the system speaks first" in str(refused[0])
    assert "does not show tools" in str(refused[1])
    assert "Message 1 (assistant) has a call of 'add'" in str(refused[3])
    assert isinstance(told[2], str)
    assert isinstance(told[5], str)
    assert trajectories["stop_reason"] == ["response_length"] * 2
    assert trajectories["num_turns"].tolist() == [2, 2]


@pytest.mark.parametrize("bound", ["the engine's", "the environment's"])
def test_a_prompt_that_is_too_long_can_be_shortened(make_tiny_model, chatml_tokenizer, bound):
    is_engines = bound == "the engine's"
    policy = TransformersWrapper(
        make_tiny_model(),
        tokenizer=chatml_tokenizer,
        generate_kwargs={"max_new_tokens": 5},
        max_model_len=60 if is_engines else None,
    )
    parts = [] if is_engines else [TokenBudget(max_model_len=60, min_turn_tokens=1)]
    told = []

    def program(endpoint):
        asks(told, endpoint, messages=[{**USER, "content": "a long story " * 30}])
        return asks(told, endpoint)

    trajectories = collect(policy, chatml_tokenizer, program, *parts)
    assert told[0].code == "context_length_exceeded"
    assert "maximum context length is 59 tokens" in str(told[0])
    assert isinstance(told[1], str)
    assert trajectories["stop_reason"] == ["response_length"]


def encoded_by(agent, conversation):
    """What the policy would be asked, that the environment saw last."""
    return as_prompt(conversation, agent._encoder, agent._max_tokens)


def test_of_a_prompt_that_is_far_too_long_only_the_beginning_is_encoded(
    make_tiny_model, chatml_tokenizer
):
    policy = TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer, max_model_len=60)
    agent, guard, encoded = AgentProgram(asks_once), policy.encoder.guard, []
    agent.check_policy(policy)

    def encode_texts(texts, starts=None, encode=guard.encode_texts):
        encoded.extend(map(len, texts))
        return encode(texts, starts)

    guard.encode_texts = encode_texts
    long = "what a page says " * 60_000
    called = {"role": "assistant", "content": "", "tool_calls": [call("add", {"a": long})]}
    chats = [[{**USER, "content": long}], [USER, {**called}, USER], [{**USER, "name": long}]]
    for chat in chats:
        with pytest.raises(ValueError, match="maximum context length is 59 tokens"):
            encoded_by(agent, Conversations.from_messages([chat]))
    with pytest.raises(ValueError, match="maximum context length is 59 tokens"):
        encoded_by(agent, Conversations.from_messages([[USER]], [[{"description": long}]]))
    assert sum(encoded) <= 4 * 4096


def test_what_a_server_reads_of_a_request_is_bounded(chatml_tokenizer, monkeypatch):
    monkeypatch.setattr("torchrl_envs.agents.server._BODY_S", 0.3)
    told = {}

    def program(endpoint):
        url, key = endpoint.base_url, {"authorization": f"Bearer {endpoint.api_key}"}
        pieces = [b" " * 600] * 2

        def post(content, headers):
            said = httpx.post(f"{url}/chat/completions", content=content, headers=headers)
            return said.status_code, said.json()["error"]["type"]

        told["long"] = post(b" " * 1001, key)
        told["long, in pieces"] = post(iter(pieces), key)
        told["as long as may be"] = post(b" " * 1000, key)
        told["of a stranger"] = post(b" " * 1001, {})
        with contextlib.closing(http.client.HTTPConnection(url.split("/")[2])) as connection:
            half = {**key, "content-length": "2"}
            connection.request("POST", "/v1/chat/completions", b"x", half)
            told["half sent"] = connection.getresponse().status
        for path in ("models", f"models/{endpoint.model}"):
            codes = [httpx.get(f"{url}/{path}", headers=h).status_code for h in (key, {})]
            told[path] = codes
        return float(asks_once(endpoint) == "one")

    last = play(chatml_tokenizer, program, ["one"], max_request_bytes=1000)
    assert last["reward"].item() == 1.0
    assert told == {
        "long": (413, "request_too_large"),
        "long, in pieces": (413, "request_too_large"),
        "as long as may be": (400, "invalid_request_error"),
        "of a stranger": (401, "authentication_error"),
        "half sent": 408,
        "models": [200, 401],
        "models/policy": [200, 401],
    }


def test_a_program_that_asks_for_what_is_refused_again_and_again_runs_out_of_time(
    make_tiny_model, chatml_tokenizer
):
    policy = TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer, max_model_len=60)

    def program(endpoint):
        told = []
        for _ in range(60):
            asks(told, endpoint, messages=[{**USER, "content": "a long story " * 30}])
            if not isinstance(told[-1], openai.BadRequestError):
                break
            time.sleep(0.1)

    trajectories = collect(policy, chatml_tokenizer, program, timeout_s=1.0)
    (reason,) = trajectories["stop_reason"]
    assert reason.startswith("environment_error: agent: CallTimeoutError")


def test_a_request_that_is_refused_gives_no_time_anew(make_tiny_model, chatml_tokenizer):
    policy = TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer, max_model_len=60)

    def program(endpoint):
        time.sleep(0.7)
        asks([], endpoint, messages=[{**USER, "content": "a long story " * 30}])
        time.sleep(0.7)  # the time is over, though not since the request
        return 1.0

    trajectories = collect(policy, chatml_tokenizer, program, timeout_s=1.0)
    (reason,) = trajectories["stop_reason"]
    assert reason.startswith("environment_error: agent: CallTimeoutError")


def test_what_is_seen_of_a_policy_is_that_of_the_last_one(small_policy, chatml_tokenizer):
    agent = AgentProgram(asks_once)
    small = TransformersWrapper(
        small_policy.model,
        tokenizer=chatml_tokenizer,
        max_model_len=20,
        generate_kwargs={"top_p": 0.5},
    )
    long = Conversations.from_messages([[{**USER, "content": "a long story " * 30}]])
    agent.check_policy(small)
    with pytest.raises(ValueError, match="maximum context length is 19 tokens"):
        encoded_by(agent, long)
    agent.check_policy(small_policy)
    assert encoded_by(agent, long).num_tokens(0) > 20
    assert agent._accepted["top_p"] == 1.0
    agent.check_policy(lambda batch: batch)
    assert encoded_by(agent, long) is long
    assert agent._accepted == {}


def test_a_program_is_told_why_its_episode_is_over(make_tiny_model, chatml_tokenizer):
    """A policy that was not looked at before gets every prompt; one that fails ends the episode."""
    policy = TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer, max_model_len=60)
    told, is_told = [], threading.Event()

    def program(endpoint):
        asks(told, endpoint, messages=[{**USER, "content": "a long story " * 30}])
        is_told.set()

    env = ChatEnv(batch_size=1, tokenizer=chatml_tokenizer).append_transform(
        Compose(DataLoadingPrimer(ROWS, group_size=1), AgentProgram(program))
    )
    last = env.rollout(9, policy)[..., -1]["next"]
    assert is_told.wait(20)
    env.close()
    reason = last["stop_reason"][0]
    assert "takes 60" in reason
    assert isinstance(told[0], openai.PermissionDeniedError)
    assert f"the episode is over: {reason}" in str(told[0])


# Heads of requests, before anybody is asked for a key.


@pytest.fixture
def server():
    server = AgentServer(
        host="127.0.0.1",
        port=0,
        model="policy",
        accepted=Accepted({}, ()),
        max_request_bytes=1 << 20,
        head_timeout_s=0.2,
    )
    yield server
    server.close()


def said(server, *pieces):
    """What the server answers to bytes, and the status of it; sending may be cut short."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                client.sendall(piece)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while chunk := client.recv(65536):
                answer += chunk
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


LONG = b"a" * 1_000_000


@pytest.mark.parametrize(
    ("pieces", "status", "words"),
    [
        pytest.param((b"GET /", *[LONG] * 3), 414, "first line is longer than 65536", id="URL"),
        pytest.param(
            (b"POST /v1/chat/completions HTTP/1.1\r\nX: ", *[LONG] * 3),
            431,
            "headers are longer than 65536",
            id="one header",
        ),
        pytest.param(
            (b"GET / HTTP/1.1\r\n", *[b"a: b\r\n" * 20_000] * 3), 431, "longer", id="many headers"
        ),
        pytest.param(
            (b"GET / HTTP/1.1\r\nHost: x\r\n",), 408, "headers had not arrived", id="no end"
        ),
        pytest.param((b"\x16\x03\x01 no HTTP\r\n\r\n",), 400, "Invalid HTTP", id="no HTTP"),
    ],
)
def test_heads_without_bound_are_refused_and_others_are_answered(server, pieces, status, words):
    found, error = said(server, *pieces)
    assert found == status
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none").models.list()


def test_a_program_that_thinks_between_two_requests_keeps_its_connection(server):
    session = server.open()
    with httpx.Client(base_url=server.url, headers={"x-api-key": session.key}) as client:
        for _ in range(2):
            assert client.get("/v1/models").status_code == 200
            time.sleep(0.5)  # longer than a head may take


def test_half_a_character_in_a_key_is_a_bad_request(server, caplog):
    session = server.open()
    for body in (b'{"\\ud800": 1}', b'{"messages": [{"role": "user", "\\ud800": "x"}]}'):
        given = httpx.post(
            f"{server.url}/v1/chat/completions",
            content=body,
            headers={"x-api-key": session.key, "content-type": "application/json"},
        )
        assert given.status_code == 400
        assert "half of a character" in given.json()["error"]["message"]
    assert "Traceback" not in caplog.text
