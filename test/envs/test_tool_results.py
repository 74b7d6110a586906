"""Whatever a tool returns or raises, the model reads valid text of bounded length."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_envs.concurrent_calls import Outcome
from torchrl_envs.tool_results import MAX_ERROR_CHARS, result_text

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.binary(max_size=30)
    | st.text(st.characters(codec=None), max_size=30),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3)
        | st.frozensets(st.integers(), max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(VALUES, st.integers(0, 40))
def test_any_value_is_text_of_bounded_length(value, cap):
    text = result_text(Outcome(value), max_chars=cap)
    assert text.encode("utf-8").decode("utf-8") == text
    head, _, mark = text.partition("\n[... ")
    if mark.endswith(" more characters were cut]"):
        assert len(head) <= cap
    else:
        assert len(text) <= cap


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec=None), max_size=50) | st.just("x" * 10_000))
def test_any_error_is_a_json_object(message):
    text = result_text(Outcome(error=OSError(message)))
    said = json.loads(text)["error"]
    assert said.startswith("OSError: ")
    assert len(said) < MAX_ERROR_CHARS + 60
    assert text.encode("utf-8")


def test_an_error_that_can_not_be_shown_is_named():
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError

    expected = {"error": "Odd: <Odd that can't be shown: RuntimeError>"}
    assert json.loads(result_text(Outcome(error=Odd()))) == expected


def test_what_contains_itself_is_shown_all_the_same():
    loop = []
    loop.append(loop)
    assert result_text(Outcome(loop)) == "[[...]]"
