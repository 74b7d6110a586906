"""Three protocols, each with its own client: the same loop, the same tokens."""

import json

import anthropic
import openai
import pytest
from agents_for_tests import ADD, CALL, client_of, play, reason_of, said, sampled_texts
from hypothesis import example, given
from hypothesis import strategies as st

from torchrl_data.tool_calls.records import ParsedTurn, ToolCall
from torchrl_envs.agents.protocols import anthropic_messages, chat_completions, openai_responses
from torchrl_envs.agents.turns import Accepted, TurnReply, TurnRequest, comparable, reply_to

FUNCTION = ADD["function"]
NOTHING = Accepted({}, ())


USER = {"role": "user", "content": "x"}


def add(arguments):
    return str(sum(arguments.values()))


def by_chat_completions(endpoint, *, question, streamed=False):
    chat = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": question}]
    with client_of(endpoint) as client:
        while True:
            options = {"model": "any", "messages": chat, "tools": [ADD]}
            if streamed:
                message, reason = read_chunks(
                    client.chat.completions.create(**options, stream=True)
                )
            else:
                choice = client.chat.completions.create(**options).choices[0]
                message, reason = choice.message.model_dump(), choice.finish_reason
            chat.append(message)
            if reason != "tool_calls":
                return float(message["content"] == "5")
            for call in message["tool_calls"]:
                result = add(json.loads(call["function"]["arguments"]))
                chat.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def read_chunks(chunks):
    message, reason = {"role": "assistant", "content": "", "tool_calls": []}, None
    for chunk in chunks:
        (choice,) = chunk.choices
        message["content"] += choice.delta.content or ""
        message["tool_calls"] += [call.model_dump() for call in choice.delta.tool_calls or ()]
        reason = choice.finish_reason or reason
    return message, reason


def by_responses(endpoint, *, question, streamed=False):
    items = [{"role": "user", "content": question}]
    tool = {"type": "function", **FUNCTION}
    with client_of(endpoint) as client:
        while True:
            options = {
                "model": "any",
                "instructions": "Use tools.",
                "input": items,
                "tools": [tool],
            }
            if streamed:
                with client.responses.stream(**options) as stream:
                    texts = [e.delta for e in stream if e.type == "response.output_text.delta"]
                    response = stream.get_final_response()
                assert "".join(texts) == response.output_text
            else:
                response = client.responses.create(**options)
            items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return float(response.output_text == "5")
            for call in calls:
                result = add(json.loads(call.arguments))
                output = {"type": "function_call_output", "call_id": call.call_id}
                items.append({**output, "output": result})


def by_messages(endpoint, *, question, streamed=False, failing=()):
    tool = {k: FUNCTION[k] for k in ("name", "description")}
    tool["input_schema"] = FUNCTION["parameters"]
    chat = [{"role": "user", "content": question}]
    options = {"model": "any", "system": "Use tools.", "tools": [tool], "max_tokens": 50}
    url = endpoint.base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key=endpoint.api_key, max_retries=0) as client:
        while True:
            if streamed:
                with client.messages.stream(messages=chat, **options) as stream:
                    message = stream.get_final_message()
            else:
                message = client.messages.create(messages=chat, **options)
            chat.append({"role": "assistant", "content": message.content})
            if message.stop_reason != "tool_use":
                return float(message.content[0].text == "5")
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": add(block.input)}
                for block in message.content
                if block.type == "tool_use"
            ]
            if len(chat) // 2 in failing:  # the turns that called
                results = [{**result, "is_error": True} for result in results]
            chat.append({"role": "user", "content": results})


def streamed(program):
    return lambda endpoint, *, question: program(endpoint, question=question, streamed=True)


@pytest.mark.parametrize("text", ["I add.", ""])
@pytest.mark.parametrize(
    "program",
    [
        by_chat_completions,
        streamed(by_chat_completions),
        by_responses,
        streamed(by_responses),
        by_messages,
        streamed(by_messages),
    ],
)
def test_a_loop_is_one_conversation_in_each_protocol(chatml_tokenizer, program, text):
    last = play(chatml_tokenizer, program, [f"{text}{CALL}", "5"])
    assert reason_of(last) == "environment_done"
    assert last["reward"].item() == 1.0
    assert said(last) == [
        ("system", "Use tools."),
        ("user", "What is 2 + 3?"),
        ("assistant", f"{text}{CALL}"),
        ("tool", "5"),
        ("assistant", "5"),
    ]
    assert sampled_texts(last, chatml_tokenizer) == [f"{text}{CALL}5"]
    (tool,) = last["episode"][0].conversation.tools(0)
    assert tool == ADD


def test_a_result_that_is_an_error_is_in_the_record(chatml_tokenizer):
    """Of three calls the second one; the policy reads that it failed."""

    def program(endpoint, *, question):
        return by_messages(endpoint, question=question, failing=(2,))

    last = play(chatml_tokenizer, program, [CALL, CALL, CALL, "5"])
    (episode,) = last["episode"]
    assert [(c.tool, c.turn, c.is_error) for c in episode.tool_calls] == [
        ("add", 1, False),
        ("add", 2, True),
        ("add", 3, False),
    ]
    assert (episode.num_tool_calls, last["num_tool_errors"].item()) == (3, 1)
    heard = [text for role, text in said(last) if role == "tool"]
    assert heard == ["5", "Error: 5", "5"]
    assert last["reward"].item() == 1.0


@pytest.mark.parametrize(
    ("read", "body", "words"),
    [
        (chat_completions, {"messages": "x"}, "messages and tools are lists"),
        (openai_responses, {"input": 3}, "input is a string or a list"),
        (openai_responses, {"input": "x", "previous_response_id": "r"}, "whole conversation"),
        (openai_responses, {"input": "x", "tools": [{"type": "web_search"}]}, "a tool is"),
        (openai_responses, {"input": [{"type": "reasoning"}]}, "messages, function calls and"),
        (openai_responses, {"input": "x", "background": True}, "background=True can't take"),
        (openai_responses, {"input": "x", "instructions": [{}]}, "instructions are a string"),
        (
            openai_responses,
            {"input": "x", "include": ["message.output_text.logprobs"]},
            "log-probs are not told",
        ),
        (anthropic_messages, {"messages": [{"role": "tool", "content": "x"}]}, "of no user"),
        (anthropic_messages, {"messages": [{"role": "user"}]}, "has no content"),
        (anthropic_messages, {"messages": [], "top_k": 5}, "top_k=5 can't take effect"),
        (
            anthropic_messages,
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "text alone is taken",
        ),
        (anthropic_messages, [], "the body is a JSON object"),
        (chat_completions, {"messages": [USER], "stream": "no"}, "stream is true or false"),
        (openai_responses, {"input": "x", "stream": 1}, "stream is true or false, got 1"),
        (anthropic_messages, {"messages": [USER], "stream": []}, "stream is true or false"),
    ],
)
def test_what_a_protocol_can_not_have_is_refused(read, body, words):
    with pytest.raises(ValueError, match=words):
        read.read_request(body, NOTHING)


@pytest.mark.parametrize(
    ("content", "is_error", "shown"),
    [
        ("no file", True, "Error: no file"),
        ("ERROR 5", True, "ERROR 5"),
        ("no file", False, "no file"),
    ],
)
def test_a_policy_is_shown_that_its_tool_failed(content, is_error, shown):
    block = {"type": "tool_result", "tool_use_id": "c", "content": content, "is_error": is_error}
    body = {"messages": [USER, {"role": "user", "content": [block]}]}
    request = anthropic_messages.read_request(body, NOTHING)
    assert request.messages[-1] == {"role": "tool", "tool_call_id": "c", "content": shown}
    assert request.failed == (("c",) if is_error else ())


TEXTS = st.text(max_size=8)
CALLS = st.lists(
    st.dictionaries(st.sampled_from("abc"), st.integers() | TEXTS, max_size=2), max_size=2
)


@given(TEXTS, CALLS)
def test_what_comes_back_is_what_was_told(text, calls):
    """A client that sends an answer back as it got it goes on with the same conversation."""
    message = {"role": "assistant", "content": text}
    if calls:
        message["content"] = text or None
        message["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": "f", "arguments": json.dumps(arguments)},
            }
            for number, arguments in enumerate(calls)
        ]
    reply = TurnReply(message, "stop", 1, 1)
    asked = TurnRequest([], None, None)
    user = {"role": "user", "content": "x"}

    def back(protocol, name, items):
        body = {name: [user, *items, user]}
        _, *said, _ = protocol.read_request(body, NOTHING).messages
        (one,) = said
        return comparable(one)

    choice = chat_completions.write_reply(reply, asked, "m")["choices"][0]
    assert back(chat_completions, "messages", [choice["message"]]) == comparable(message)
    output = openai_responses.write_reply(reply, asked, "m")["output"]
    assert back(openai_responses, "input", output) == comparable(message)
    content = anthropic_messages.write_reply(reply, asked, "m")["content"]
    given_back = [{"role": "assistant", "content": content}]
    assert back(anthropic_messages, "messages", given_back) == comparable(message)


def test_errors_are_those_of_the_client(chatml_tokenizer):
    def program(endpoint):
        url = endpoint.base_url.removesuffix("/v1")
        with (
            anthropic.Anthropic(base_url=url, api_key=endpoint.api_key, max_retries=0) as client,
            pytest.raises(anthropic.BadRequestError, match="can't take effect"),
        ):
            client.messages.create(model="m", max_tokens=5, messages=[], stop_sequences=["a"])
        with (
            client_of(endpoint) as client,
            pytest.raises(openai.BadRequestError, match="can't take effect"),
        ):
            client.responses.create(model="m", input="x", temperature=0.1)
        return by_chat_completions(endpoint, question="x")

    assert play(chatml_tokenizer, program, ["5"])["reward"].item() == 1.0


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "required", "pattern", "nullable", "a"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


def reply_of(calls, tools=(ADD,), used_ids=(), finish_reason="stop"):
    parsed = ParsedTurn("", list(calls))
    options = {"finish_reason": finish_reason, "num_prompt_tokens": 1, "num_tokens": 1}
    request = TurnRequest([], list(tools), None)
    return reply_to(request, "text", parse=lambda _: parsed, used_ids=used_ids, **options)


@given(parameters=st.dictionaries(st.sampled_from(["type", "properties"]), JSON), text=st.text())
@example(parameters={"properties": {"a": {"type": "int"}}}, text="1")
@example(parameters={"properties": {"a": {"type": [{}]}}}, text="1")
@example(parameters={"properties": None}, text="1")
def test_a_schema_that_is_none_costs_nobody_anything(parameters, text):
    function = {"name": "add", "parameters": parameters}
    call = ToolCall("add", {"a": text}, is_text=True)
    reply = reply_of([call], [{"type": "function", "function": function}])
    if reply.finish_reason == "tool_calls":
        (written,) = reply.message["tool_calls"]
        assert list(json.loads(written["function"]["arguments"])) == ["a"]


def test_arguments_that_are_text_are_read_as_the_schema_says():
    reply = reply_of([ToolCall("add", {"a": "2", "b": "x"}, is_text=True)])
    (written,) = reply.message["tool_calls"]
    assert json.loads(written["function"]["arguments"]) == {"a": 2, "b": "x"}


def test_calls_have_the_models_own_names_or_short_ones():
    def ids(*own, used_ids=()):
        calls = [ToolCall("add", {}, id=name) for name in own]
        return [call["id"] for call in reply_of(calls, used_ids=used_ids).message["tool_calls"]]

    assert ids("abcDEF123", "abcDEF123", None) == ["abcDEF123", "call00001", "call00002"]
    assert ids(None, used_ids={"call00000", "call00001"}) == ["call00002"]
    assert ids("call00000", used_ids={"call00000"}) == ["call00001"]


def test_a_call_that_can_not_be_sent_is_text():
    for call in (ToolCall("add", {"a": "\ud800"}), ToolCall("\ud800", {})):
        reply = reply_of([ToolCall("add", {}), call])
        assert reply.message == {"role": "assistant", "content": "text"}
        assert reply.finish_reason == "stop"


def test_a_turn_that_was_cut_says_so_with_its_whole_calls():
    reply = reply_of([ToolCall("add", {"a": 1})], finish_reason="length")
    assert (reply.finish_reason, len(reply.message["tool_calls"])) == ("length", 1)
    assert reply_of([ToolCall("add", {"a": 1})]).finish_reason == "tool_calls"


def test_arguments_are_sent_in_the_order_in_which_the_model_wrote_them():
    (call,) = reply_of([ToolCall("add", {"b": {"d": 1, "c": 2}, "a": 3})]).message["tool_calls"]
    assert call["function"]["arguments"] == '{"b": {"d": 1, "c": 2}, "a": 3}'
