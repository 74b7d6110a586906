"""What the audit reads in texts: answers that were told, words to try, and actions."""

import json
import random

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from torchrl_envs.audit.audited_task import AgentView
from torchrl_envs.audit.scripted_agents import (
    by_chance,
    constant_agents,
    hinted,
    hinted_word,
    said,
    words_of,
)

ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
PLAIN = st.text(st.characters(categories=["L", "Nd"], include_characters=" "), max_size=40)
HINTS = ("answer", "answers", "solution", "secret", "expected", "expected output", "ground truth",
         "ground_truth", "target", "label", "correct", "correct move", "gold")  # fmt: skip
LINKS = (" is ", ": ", " = ", '": "', "** are ")
KINDS = ("string", "integer", "number", "boolean", "array", "object")


def view(opening, observation="", tools=()):
    return AgentView(opening, observation, 0, (), tools, {})


@given(ANY, ANY, st.sampled_from(["", *HINTS]), st.sampled_from(LINKS))
@example("the answer is .", "", "", "")
@example("answer: ,\nsolution: x", "", "", "")
@example("the answer is . 0", "", "", "")
def test_a_hint_is_a_part_of_what_was_shown(opening, observation, hint, link):
    shown = view(opening + hint + link, observation)
    text, word = hinted(shown), hinted_word(shown)
    assert (text is None) == (word is None) or word is None
    if text is not None:
        assert text
        assert text in f"{shown.opening}\n{observation}\n[]"
        assert "\n" not in text
    if word is not None:
        before, found, _ = text.partition(word)
        assert found
        assert all(letter.isspace() or letter in ".,;)" for letter in before)
        assert not any(letter.isspace() for letter in word)


@given(PLAIN, st.sampled_from(HINTS), st.sampled_from(LINKS), PLAIN, PLAIN)
def test_an_answer_that_is_told_is_read(before, hint, link, answer, after):
    """Whatever stands before it and in the lines after it, if that tells no other answer."""
    answer = answer.strip()
    assume(answer and hinted(view(f"{before}\n{after}")) is None)
    assume(hinted(view(answer)) is None)
    shown = view(f"{before}\nThe {hint}{link}{answer}\n{after}")
    if not answer.casefold().startswith(("is ", "are ", "was ", "were ")):
        assert hinted(shown) == answer
        assert hinted_word(shown) == answer.split()[0]


@given(PLAIN)
def test_where_nothing_is_told_nothing_is_read(text):
    assume(not any(word in text.casefold() for word in ("answer", "solution", "secret", "target",
                   "expected", "ground", "label", "correct", "gold")))  # fmt: skip
    assert hinted(view(text)) is None
    assert hinted_word(view(text)) is None


@given(ANY, ANY)
def test_words_to_try_were_shown(opening, observation):
    words = words_of(view(opening, observation))
    assert words
    assert len(words) == len({*words}) <= 60
    shown = f"{observation}\n{opening}"
    assert all(word in shown for word in words) or words[0] == "0"


@st.composite
def tools(draw):
    """The schema of a tool with arguments of any kinds."""
    shapes = {}
    for name in draw(st.lists(st.sampled_from("abc"), unique=True)):
        shape = {"type": draw(st.sampled_from(KINDS))}
        if shape["type"] == "integer" and draw(st.booleans()):
            shape |= {"minimum": 2, "maximum": 5}
        if draw(st.booleans()):
            shape = {"anyOf": [shape, {"type": "null"}]}
        shapes[name] = shape
    return {"function": {"name": "go", "parameters": {"properties": shapes}}}


@given(tools(), ANY, st.integers(0, 9))
@example({"function": {"name": "go", "parameters": {"properties": {"a": {"type": "number"}}}}},
         "nan", 0)  # fmt: skip
def test_every_call_of_a_tool_is_json(tool, text, seed):
    shown = view(text, tools=[tool])
    texts = [by_chance(shown, random.Random(seed)), said(lambda _: text)(shown, random.Random(0))]
    constants = constant_agents((), [tool]).values()
    texts += [each(shown, random.Random(0)) for each in constants]
    for call in texts:
        if call.startswith('<tool_call>{"name": "go"') and call.endswith("</tool_call>"):
            body = json.loads(
                call.removeprefix("<tool_call>").removesuffix("</tool_call>"),
                parse_constant=lambda word: pytest.fail(f"{word} is no JSON"),
            )
            assert body["name"] == "go"
            assert body["arguments"].keys() <= {"a", "b", "c"}


@given(ANY | st.from_regex(r"(-?[0-9]{1,400}(\.[0-9])?[ ,]?){1,4}", fullmatch=True))
@example("1e400 1")
@example("1e300, 2")
def test_an_action_that_is_read_is_one(text):
    gymnasium = pytest.importorskip("gymnasium")
    from torchrl_envs.tools.gymnasium_text import SpacesAsText

    spaces = gymnasium.spaces
    for space in (spaces.Discrete(5, start=2), spaces.MultiDiscrete([3, 4]),
                  spaces.Box(-1.0, 1.0, (2,)), spaces.Box(0, 9, (2,), dtype=int)):  # fmt: skip
        env = gymnasium.Env()
        env.action_space = space
        action = SpacesAsText(env)._action(text)
        assert action is None or space.contains(action)


@given(
    st.integers(0, 2), st.integers(0, 3), st.sampled_from(["{} {}", "({}, {})", "go {} then {}!"])
)
def test_an_action_that_is_written_is_read(first, second, form):
    gymnasium = pytest.importorskip("gymnasium")
    from torchrl_envs.tools.gymnasium_text import SpacesAsText

    env = gymnasium.Env()
    env.action_space = gymnasium.spaces.MultiDiscrete([3, 4])
    assert SpacesAsText(env)._action(form.format(first, second)).tolist() == [first, second]
