"""What can't be rendered or encoded costs its own row; what is configured wrongly, the run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_for_tests import EXAMPLES, TEMPLATE_TOKENIZERS, chatml_tokenizer

from torchrl_data import ConversationEncoder, Conversations, builtin_template
from torchrl_data.conversation import Turn
from torchrl_data.templates import sandbox
from torchrl_data.templates.rendering import render_template

GOOD = [{"role": "user", "content": "hi"}]
ANSWER = {"role": "assistant", "content": "A"}
IMAGE = {"type": "image", "url": "https://example.com/cat.jpg"}


def called(*calls):
    return [GOOD[0], {"role": "assistant", "content": "", "tool_calls": list(calls)}]


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return {"function": {"name": "f", "arguments": value}}


BAD = {
    "an image": ([{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}], "image"),
    "an unknown role": ([{"role": "wizard", "content": "x"}], "unknown role 'wizard'"),
    "no role": ([{"content": "x"}], "has the role None"),
    "a dict as content": ([{"role": "user", "content": {"a": 1}}], "has content of type dict"),
    "half a surrogate pair": ([{"role": "user", "content": "\ud800"}], "must be Unicode"),
    "calls that are no calls": (called("f"), "has no attribute 'name'"),
    "arguments that are no JSON": (called({"function": {"name": "f", "arguments": {1}}}), "JSON"),
    "arguments too deep": (called(nested(5000)), "recursion"),
}


@pytest.fixture(scope="module")
def encoder():
    return ConversationEncoder(chatml_tokenizer())


@EXAMPLES
@given(st.lists(st.sampled_from([None, *BAD]), min_size=1, max_size=6))
def test_the_others_are_encoded_as_if_it_were_not_there(encoder, kinds):
    alone = encoder.encode_waiting(Conversations.from_messages([GOOD]))
    rows = [GOOD if kind is None else BAD[kind][0] for kind in kinds]
    before = Conversations.from_messages(rows)
    encoded, errors = encoder.encode_rows(before)
    assert set(errors) == {i for i, kind in enumerate(kinds) if kind is not None}
    for i, kind in enumerate(kinds):
        if kind is None:
            assert encoded[i] == alone
        else:
            assert BAD[kind][1] in str(errors[i])
            assert isinstance(errors[i], ValueError | TypeError | RecursionError)
            assert encoded[i] == before[i], "left as it was"


@pytest.mark.parametrize("kind", ["an image", "half a surrogate pair"])
def test_a_later_turn_is_refused_alone_too(encoder, kind):
    state = encoder.encode_waiting(Conversations.from_messages([GOOD, GOOD]))
    turn = Turn([*encoder.guard.encode_texts(["A"])[0], encoder.end_of_turn_id], [0.0, 0.0], ANSWER)
    state = state.append_turns([turn, turn])
    grown = state.append_messages([BAD[kind][0], GOOD])
    encoded, errors = encoder.encode_rows(grown)
    assert list(errors) == [0]
    assert encoded[0] == grown[0]
    assert encoded.position(1).awaits_response
    with pytest.raises(ValueError, match=BAD[kind][1]) as caught:
        encoder.encode_waiting(grown)
    assert caught.value.__notes__ == ["This is row 0 of 2."]


def test_roles_that_must_alternate():
    source = (
        "{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    )
    encoder = ConversationEncoder(
        chatml_tokenizer(), chat_template=source + builtin_template("chatml")
    )
    encoded, errors = encoder.encode_rows(Conversations.from_messages([GOOD * 2, GOOD]))
    assert "roles must alternate" in str(errors.pop(0))
    assert not errors
    assert encoded.position(1).awaits_response


PARTS = [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]
SHOWS = (
    "{% for p in messages[0].content %}"
    "{{ p.text if p.type == 'text' else ('<img>' if p.type == 'image') }}{% endfor %}"
)


def test_a_template_shows_a_part_or_is_refused():
    assert render_template(SHOWS, PARTS).text == "x<img>"
    with pytest.raises(ValueError, match=r"leaves out .* message 0 \(user\).*'text', 'audio'"):
        render_template(
            SHOWS, [{"role": "user", "content": [PARTS[0]["content"][0], {"type": "audio"}]}]
        )
    for prints in (
        "{{ messages[0].content }}",
        "{{ 'x' + messages[0].content }}",
        "{{ 'x' ~ messages[0].content }}",
    ):
        with pytest.raises(ValueError, match=r"parts of the types \['text', 'image'\]"):
            render_template(prints, PARTS)
    two = [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]
    assert render_template("{{ messages[0].content }}", two).text == "ab"


# Tools -------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "function",
    "function": {
        "name": "add_up",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@pytest.mark.parametrize("template", sorted(TEMPLATE_TOKENIZERS))
def test_a_prompt_tells_of_the_tools_or_is_refused(template):
    encoder = ConversationEncoder(TEMPLATE_TOKENIZERS[template](), chat_template_name=template)
    state = Conversations.from_messages([GOOD], [[SCHEMA]])
    if template in ("falcon", "deepseek", "dialogpt", "gemma", "phi", "phi4"):
        with pytest.raises(ValueError, match=r"does not show tools.*know of \['add_up'\]"):
            encoder.encode_rows(state)
        with pytest.raises(ValueError, match="does not show tools"):
            encoder.encode_chats([GOOD], tools=[SCHEMA])
        with pytest.raises(ValueError, match="does not show tools"):
            encoder.check_tools([SCHEMA])
        said = [{"role": "system", "content": "Call add_up(a)."}, *GOOD]
        state = Conversations.from_messages([said], [[SCHEMA]])
    else:
        encoder.check_tools([SCHEMA])
    text = encoder.decode([encoder.encode_waiting(state).ids(0)])[0]
    assert "add_up" in text
    encoder.check_tools(None)


@pytest.mark.parametrize("spelling", ["Slot0123456789abcdefn0x", "Slot{}n9x", "Tool7", "Answer7"])
def test_no_content_spells_a_placeholder(spelling):
    encoder = ConversationEncoder(chatml_tokenizer())
    tool = {**SCHEMA["function"], "description": f"Adds {spelling}."}
    chat = [{"role": "user", "content": spelling}]
    state = Conversations.from_messages([chat], [[{"type": "function", "function": tool}]])
    text = encoder.decode([encoder.encode_waiting(state).ids(0)])[0]
    expected = render_template(
        encoder.template,
        chat,
        tools=[{"type": "function", "function": tool}],
        add_generation_prompt=True,
    ).text
    assert text == expected


def test_each_row_is_shown_its_own_tools():
    encoder = ConversationEncoder(chatml_tokenizer())
    named = [
        None if name is None else [{"type": "function", "function": {"name": name}}]
        for name in ("add", None, "subtract", "add")
    ]
    for _ in range(2):  # compiled, then from the cache
        state = encoder.encode_waiting(Conversations.from_messages([GOOD] * 4, named))
        for i, tools in enumerate(named):
            expected = render_template(
                encoder.template, GOOD, tools=tools, add_generation_prompt=True
            ).text
            assert encoder.decode([state.ids(i)])[0] == expected


@pytest.mark.parametrize("num_results", [1, 2, 3])
@pytest.mark.parametrize("closed", [True, False])
def test_the_closing_token_stands_once_after_a_turn(num_results, closed):
    """Whether the policy sampled it or was cut before it, and however many answers follow."""
    encoder = ConversationEncoder(chatml_tokenizer())
    results = [{"role": "tool", "content": f"r{i}"} for i in range(num_results)]
    expected = render_template(
        encoder.template, [*GOOD, ANSWER, *results], add_generation_prompt=True
    ).text
    turn = encoder.guard.encode_texts(["A"])[0]
    turn = [*turn, encoder.end_of_turn_id] if closed else turn
    for _ in range(2):
        state = encoder.encode_waiting(Conversations.from_messages([GOOD]))
        state = state.append_turns([Turn(turn, [0.0] * len(turn), ANSWER)])
        state = encoder.encode_waiting(state.append_messages([results]))
        assert encoder.decode([state.ids(0)])[0] == expected


# What a template does when it is run.

TWICE = (
    "{{% set n = namespace(s='aa') %}}{{% for _ in range(99) %}}{{% set n.s = {} %}}{{% endfor %}}"
)
FAULTS = {
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{% for i in range(10**9) %}{% endfor %}": "OverflowError: Range too big",
    "{{ 'a'.encode('nosuch') }}": "LookupError: unknown encoding",
    "{{ {}['a']['b'] }}": "has no attribute 'a'",
    "{{ 'a' * 10**10 }}": "more than 67108864 characters",
    "{{ 'a'.ljust(10**10) }}": "asks ljust for more than",
    "{{ 'a'|center(10**10) }}": "asks center for more than",
    "{{ '{:9999999999}'.format(1) }}": "with a width of more than",
    "{{ '%9999999999d' % 1 }}": "with a width of more than",
    "{{ [[0] * 1000] * 1000000 }}": "more than 1048576 items as text",
    "{{ 7 ** (10 ** 9) }}": "a number of more than 4096 bits",
    TWICE.format("n.s ~ n.s"): "more than 67108864 characters",
    TWICE.format("n.s + n.s"): "more than 67108864 characters",
    TWICE.format("n.s|replace('a', n.s)"): "more than 67108864 characters",
    "{% for _ in range(99999) %}{{ 'a' * 1000 }}{% endfor %}": "more than 67108864 characters",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_template_that_fails_or_makes_something_huge_costs_its_row(fault):
    source = f"{{% if messages[-1]['content'] == 'trigger' %}}{fault}{{% endif %}}"
    encoder = ConversationEncoder(
        chatml_tokenizer(), chat_template=source + builtin_template("chatml")
    )
    bad = [{"role": "user", "content": "trigger"}]
    encoded, errors = encoder.encode_rows(Conversations.from_messages([GOOD, bad, GOOD]))
    assert set(errors) == {1}
    assert FAULTS[fault] in str(errors[1])
    assert encoded.ids(0) == encoded.ids(2)


def test_loops_of_a_template_have_a_deadline(monkeypatch):
    monkeypatch.setattr(sandbox, "RENDER_S", 0.05)
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match=r"it computes for more than 0.05 s"):
        render_template(source, GOOD)


def test_bounds_change_nothing_that_a_template_says():
    source = (
        "{% for m in messages %}{{ m['role'] ~ ': ' ~ m.content + '!' }}{{ loop.index }}"
        "{% endfor %}{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 'a,b'.split(',')|join('-') }}"
        "{{ ', '.join(['q', 'r']) }}{{ 'xx'|replace('x', 'yz') }}{{ '%3d|%s' % (5, 'a') }}"
        "{{ '{:>4}'.format(7) }}{{ [1, 2] + [3] }}{{ 'a'|indent(2) }}{{ none }}"
    )
    said = "user: hi!1abababa1024a-bq, ryzyz  5|a   7[1, 2, 3]aNone".replace("abababa1", "ababab1")
    assert render_template(source, GOOD).text == said
