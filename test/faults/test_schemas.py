"""Arguments against schemas of servers: right as jsonschema says, and in time whatever they say."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, SchemaError

from torchrl_envs.tool_schemas import schema_tool


def make_tool(parameters, **options):
    function = {"name": "f", "description": "", "parameters": parameters}
    return schema_tool({"type": "function", "function": function}, **options)


NAMES = st.sampled_from(["a", "b", "ab", "x_1", ""])
LEAVES = st.sampled_from([0, 1, 1.0, True, False, None, "a", "ab", "ba", ""])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3)
)
PATTERNS = st.sampled_from(["^a", "b$", "a|b", "^[a-z]_[0-9]$", "", r"\d"])
SIMPLE = st.sampled_from(
    [True, False, {}, {"type": "integer"}, {"uniqueItems": True}, {"uniqueItems": False}]
)
SCHEMAS = st.recursive(
    SIMPLE | st.builds(lambda p: {"pattern": p}, PATTERNS),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(NAMES, inner, max_size=2),
            # jsonschema takes the empty pattern by itself for none.
            "patternProperties": st.dictionaries(PATTERNS.filter(bool), inner, max_size=2),
            "additionalProperties": inner,
            "propertyNames": inner,
            "items": inner,
            "uniqueItems": st.booleans(),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
        },
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(SCHEMAS, VALUES)
def test_what_is_wrong_is_what_jsonschema_says(schema, value):
    parameters = {"type": "object", "properties": {"x": schema}}
    error = make_tool(parameters).argument_error({"x": value})
    assert (error is None) == Draft202012Validator(parameters).is_valid({"x": value})


def test_the_empty_pattern_is_of_every_name():
    schema = {"type": "object", "patternProperties": {"": {}}, "additionalProperties": False}
    assert make_tool(schema).argument_error({"a": 0}) is None


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        pytest.param({"pattern": "^(a+)+$"}, "a" * 60 + "b", id="a pattern"),
        pytest.param({"patternProperties": {"^(a|aa)+$": {}}}, {"a" * 90 + "b": 1}, id="of names"),
        pytest.param(
            {"patternProperties": {"^(a|aa)+$": {}}, "additionalProperties": False},
            {"a" * 90 + "c": 1},
            id="of other names",
        ),
        pytest.param({"propertyNames": {"pattern": "^(a?)*$"}}, {"a" * 90 + "b": 1}, id="a name's"),
        pytest.param({"uniqueItems": True}, [[n, {}] for n in range(8000)], id="many items"),
        pytest.param({"$ref": "#/$defs/0"}, 1, id="references that multiply"),
    ],
)
def test_F08_no_schema_holds_the_program_up(schema, value):
    doubles = [{"$ref": f"#/$defs/{n + 1}"} for n in range(60)]
    definitions = {str(n): {"allOf": [double, double]} for n, double in enumerate(doubles)}
    tool = make_tool(
        {"type": "object", "properties": {"x": schema}, "$defs": {**definitions, "60": {}}}
    )
    for _ in range(5):
        error = tool.argument_error({"x": value})
        expected = ("the tool's own schema can't be used", "does not match")
        assert error is None or any(words in error for words in expected)
    start = time.process_time()
    tool.argument_error({"x": value})
    assert time.process_time() - start < 2
    assert tool.argument_error({}) is None


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"pattern": "("}, "'\\(' is not a 'regex'"),
        ({"patternProperties": {"[": {}}}, "'\\[' is not a 'regex'"),
        ({"pattern": "a" * 5000}, "5000 characters"),
        ({"allOf": [{"unevaluatedProperties": False, "patternProperties": {}}]}, "not supported"),
        ({"type": "no such type"}, "not valid under any"),
    ],
)
def test_schemas_that_can_not_be_used_are_refused_at_the_door(schema, words):
    with pytest.raises(SchemaError, match=words):
        make_tool({"type": "object", "properties": {"x": schema}})
    make_tool({"type": "object", "properties": {"pattern": {"default": {"pattern": "("}}}})
