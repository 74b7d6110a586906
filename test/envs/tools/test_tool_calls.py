"""The parser of tool calls is total, bounded and exact."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_data.tool_calls.parser import MAX_CALLS, parse_tool_calls
from torchrl_data.tool_calls.records import MalformedCall, ToolCall
from torchrl_data.tool_calls.strict_json import MAX_CALL_CHARS, MAX_DEPTH

OPEN, CLOSE = "<tool_call>", "</tool_call>"
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
PIECES = st.sampled_from(
    [OPEN, CLOSE, "{", "}", "[", "]", '"', "\\", ":", ",", '"name"', '"arguments"', "NaN", "1e999"]
)


def wrap(value):
    return f"{OPEN}\n{json.dumps(value)}\n{CLOSE}"


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES | st.text(max_size=6), max_size=30).map("".join))
def test_any_text_gives_calls_or_errors(text):
    turn = parse_tool_calls(text)
    assert len(turn.calls) <= MAX_CALLS + 1
    assert bool(turn.calls) == (OPEN in text)
    for call in turn.calls:
        assert isinstance(call, ToolCall | MalformedCall)


@settings(max_examples=150, deadline=None)
@given(JSON)
def test_any_json_value_is_a_call_only_if_it_looks_like_one(value):
    if CLOSE in json.dumps(value):
        return
    (call,) = parse_tool_calls(wrap(value)).calls
    looks_right = (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("arguments", {}), dict)
        and value.keys() <= {"name", "arguments", "id"}
    )
    assert isinstance(call, ToolCall) == looks_right


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.text(max_size=8), st.dictionaries(st.text(max_size=5), JSON, max_size=3)),
        max_size=MAX_CALLS,
    ),
    st.text(max_size=10),
)
def test_what_is_written_is_read_back_in_order(calls, around):
    if any("tool_call>" in json.dumps(call) for call in calls) or "tool_call>" in around:
        return
    text = around + "".join(wrap({"name": n, "arguments": a}) + around for n, a in calls)
    turn = parse_tool_calls(text)
    assert turn.calls == [ToolCall(name, arguments) for name, arguments in calls]
    assert turn.content == (around * (len(calls) + 1)).strip()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param('{"name": "a", "arguments": {}', "valid JSON", id="cut JSON"),
        pytest.param('{"name": "a", "name": "b"}', "given twice", id="a key twice"),
        pytest.param(
            '{"name": "a", "arguments": {"x": 1, "x": 2}}', "given twice", id="an argument twice"
        ),
        pytest.param('{"name": "a", "arguments": {"x": NaN}}', "NaN", id="NaN"),
        pytest.param('{"name": "a", "arguments": {"x": -Infinity}}', "Infinity", id="infinity"),
        pytest.param('{"name": "a", "arguments": {"x": 1e999}}', "finite", id="overflow"),
        pytest.param('{"name": "a", "arguments": [1]}', "must be an object", id="list"),
        pytest.param('{"name": "a", "arguments": null}', "must be an object", id="null"),
        pytest.param('{"name": 1}', '"name": <tool>', id="name is a number"),
        pytest.param('{"arguments": {}}', '"name": <tool>', id="no name"),
        pytest.param('{"name": "a", "argument": {}}', "not argument", id="unknown key"),
        pytest.param('["a"]', '"name": <tool>', id="no object"),
        pytest.param("", "valid JSON", id="nothing"),
        pytest.param("[" * 60_000, "deeper", id="depth"),
        pytest.param('{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}", "digits", id="int"),
        pytest.param("x" * (MAX_CALL_CHARS + 1), f"at most {MAX_CALL_CHARS}", id="size"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_and_spoils_no_other(body, words):
    text = f"{wrap({'name': 'first'})}{OPEN}{body}{CLOSE}{wrap({'name': 'last'})}"
    first, bad, last = parse_tool_calls(text).calls
    assert (first, last) == (ToolCall("first", {}), ToolCall("last", {}))
    assert isinstance(bad, MalformedCall)
    assert words in bad.error
    assert len(bad.error) < 500


def test_limits_are_met_exactly():
    nested = "x"
    for _ in range(MAX_DEPTH - 2):
        nested = [nested]
    deepest = {"name": "a", "arguments": {"x": nested}}
    assert isinstance(parse_tool_calls(wrap(deepest)).calls[0], ToolCall)
    too_deep = {"name": "a", "arguments": {"x": [nested]}}
    assert isinstance(parse_tool_calls(wrap(too_deep)).calls[0], MalformedCall)
    brackets = {"name": "a", "arguments": {"x": '[{"' * 100}}
    assert parse_tool_calls(wrap(brackets)).calls == [ToolCall("a", brackets["arguments"])]


def test_a_flood_of_calls_is_answered_once():
    turn = parse_tool_calls(wrap({"name": "a"}) * 10_000 + "tail")
    assert turn.calls[:MAX_CALLS] == [ToolCall("a", {})] * MAX_CALLS
    (refusal,) = turn.calls[MAX_CALLS:]
    assert f"at most {MAX_CALLS} calls" in refusal.error
    assert turn.content == ""


def test_a_call_that_is_not_closed_is_an_error_and_not_text():
    turn = parse_tool_calls(f'so {OPEN}{{"name": "a"}}')
    assert turn.content == "so"
    assert "not closed" in turn.calls[0].error
