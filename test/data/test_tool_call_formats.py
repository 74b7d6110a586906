"""Each family's format: what its own chat template writes parses back, and any text is survived."""

import json
import re
import time
from importlib.resources import files

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import FORGERY_EXAMPLES
from transformers.utils.chat_template_utils import render_jinja_template

from torchrl_data.templates.registry import builtin_template
from torchrl_data.tool_calls.formats import FORMATS
from torchrl_data.tool_calls.parser import (
    MAX_CALLS,
    detect_tool_call_format,
    parse_tool_calls,
    tool_call_parser,
)
from torchrl_data.tool_calls.records import MalformedCall, ParsedTurn, ToolCall

DS = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
XML = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"


def peer_template(name):
    return (files("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def written_by(begin, call, end):
    """A chat template that shows messages, and calls as a family writes them."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
        + begin
        + "{% for c in m.tool_calls %}{% set f = c.function %}"
        + call
        + "{% endfor %}"
        + end
        + "{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


LISTED = (
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
    "{{ '' if loop.last else ', ' }}"
)
# Templates of this toolkit, and the models' own as TRL ships them.
TEMPLATES = {
    "qwen": (builtin_template("qwen"), "hermes", 3),
    "qwen3": (builtin_template("qwen3"), "hermes", 3),
    "llama": (builtin_template("llama"), "llama3", 3),
    "mistral": (builtin_template("mistral"), "mistral", 3),
    "deepseek3": (builtin_template("deepseek3"), "deepseek", 3),
    "Qwen2.5": (peer_template("qwen2_5"), "hermes", 3),
    "Qwen3": (peer_template("qwen3"), "hermes", 3),
    "Qwen3.5": (peer_template("qwen3_5_nothink"), "qwen3_coder", 3),
    "Llama 3.1": (peer_template("llama3_1"), "llama3", 1),
    "Llama 3.2": (peer_template("llama3_2"), "llama3", 1),
    "DeepSeek V3": (peer_template("deepseekv3"), "deepseek", 3),
    "gpt-oss": (peer_template("gptoss"), "harmony", 1),
    "GLM 4.5": (peer_template("glm4moe"), "glm", 3),
    "Nemotron 3": (peer_template("nemotron_3_nano"), "qwen3_coder", 3),
    # As their makers' pages have it, the calls of a turn alone.
    "Kimi K2": (
        written_by(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}"
            "<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
        "kimi",
        3,
    ),
    "MiniMax M2": (
        written_by(
            "<minimax:tool_call>\n",
            '<invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}'
            '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n'
            "{% endfor %}</invoke>\n",
            "</minimax:tool_call>",
        ),
        "minimax",
        3,
    ),
    "Phi 4 mini": (
        written_by("<|tool_call|>[", LISTED, "]<|/tool_call|>"),
        "phi4mini",
        3,
    ),
    "Nemotron Nano 2": (written_by("<TOOLCALL>[", LISTED, "]</TOOLCALL>"), "nemotron", 3),
}
AS_TEXT = ("qwen3_coder", "glm", "minimax")
STOPS = ("<|im_end|>\n", "<|eot_id|>", "</s>", "<｜end▁of▁sentence｜>", "<|call|>")
VALUES = (
    st.integers(-9, 9) | st.booleans() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b_c", "path"]), VALUES, max_size=3)
SPELLED = [
    "</tool_call>",
    "</think>",
    '"',
    "{",
    "}]",
    "\\",
    "\n",
    "<|call|>",
    "]",
    "```",
    "é\ud7ff",
]


def rendered_turn(template, calls):
    """The assistant's turn as the template writes it, without the stop token."""
    user = {"role": "user", "content": "go"}
    # DeepSeek V3's template takes the arguments as JSON text.
    as_json = template == TEMPLATES["DeepSeek V3"][0]
    made = [
        {
            "type": "function",
            "id": f"call0000{i}",
            "function": {"name": n, "arguments": json.dumps(a) if as_json else a},
        }
        for i, (n, a) in enumerate(calls)
    ]
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": False}

    def render(messages, **more):
        text, _ = render_jinja_template(
            conversations=[messages], chat_template=template, **{**settings, **more}
        )
        return text[0]

    opening = render([user], add_generation_prompt=True)
    whole = render([user, {"role": "assistant", "content": "", "tool_calls": made}])
    # A template may open its turn otherwise than the generation prompt does (a thought, say).
    common = 0
    while whole[common : common + 1] == opening[common : common + 1] and common < len(opening):
        common += 1
    marker = whole.rfind("<", 0, common)  # both may go on with one
    if marker >= 0 and ">" not in whole[marker:common]:
        common = marker
    turn = whole[common:]
    for stop in STOPS:
        turn = turn.removesuffix(stop)
    return turn


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_a_template_writes_parses_back(name, data):
    template, written, most = TEMPLATES[name]
    tools = st.tuples(st.sampled_from(["add", "read_file", "look-up"]), ARGUMENTS)
    calls = data.draw(st.lists(tools, min_size=1, max_size=most))
    turn = parse_tool_calls(rendered_turn(template, calls), written)
    assert re.sub(r"(<think>)?\s*</think>", "", turn.content).strip() == ""  # it says nothing else
    if written in AS_TEXT:  # values are text; the tool's schema says what they are
        assert [(c.name, c.arguments.keys()) for c in turn.calls] == [
            (n, a.keys()) for n, a in calls
        ]
        assert all(call.is_text for call in turn.calls)
    else:
        assert [(call.name, call.arguments) for call in turn.calls] == calls


@pytest.mark.parametrize("spelled", SPELLED)
# Not where calls are closed by a control token, which is looked for first, or are not quoted.
@pytest.mark.parametrize(
    "name", [n for n, (_, w, _) in TEMPLATES.items() if w in ("hermes", "llama3", "mistral")]
)
def test_an_argument_may_spell_what_closes_a_call(name, spelled):
    template, written, _ = TEMPLATES[name]
    calls = [("echo", {"text": f"a{spelled}b"})]
    turn = parse_tool_calls(rendered_turn(template, calls), written)
    assert [(call.name, call.arguments) for call in turn.calls] == calls


@pytest.mark.parametrize(
    ("written", "text", "expected"),
    [
        ("llama3", '<|python_tag|>{"name": "a", "parameters": {"x": 1}}', [("a", {"x": 1})]),
        (
            "llama3",
            '{"type": "function", "name": "a", "parameters": {}}; {"name": "b", "parameters": {}}',
            [("a", {}), ("b", {})],
        ),
        ("llama3", 'Sure:\n{"name": "a", "arguments": {"x": [1]}}', [("a", {"x": [1]})]),
        (
            "mistral",
            '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]sub{"b": 2}',
            [("add", {"a": 1}), ("sub", {"b": 2})],
        ),
        ("deepseek", DS.format("add", '{"a": 1}'), [("add", {"a": 1})]),
        (
            "deepseek",
            DS.format("function", 'add\n```json\n{"a": "```"}\n```'),
            [("add", {"a": "```"})],
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.add <|constrain|>json<|message|>{"a": 1}',
            [("add", {"a": 1})],
        ),
        (
            "harmony",
            ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
            [("add", {"a": 1})],
        ),
        (
            "qwen3_coder",
            XML.format(
                "add", "<parameter=a>\n1\n</parameter>\n<parameter=b>\n x\n\n</parameter>\n"
            ),
            [("add", {"a": "1", "b": " x\n"})],
        ),
        ("qwen3_coder", "<function=add></function>", [("add", {})]),
        ("qwen3_coder", '<tool_call>{"name": "add", "arguments": {}}</tool_call>', [("add", {})]),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": {"t": "</tool_call>"}}</tool_call>',
            [("a", {"t": "</tool_call>"})],
        ),
    ],
)
def test_other_ways_to_write_a_call(written, text, expected):
    turn = parse_tool_calls(text, written)
    assert [(call.name, call.arguments) for call in turn.calls] == expected


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("llama3", '{"answer": 3}'),
        ("llama3", '{"name": "Bob", "age": 3}'),
        ("llama3", 'The call {"name": "a", "parameters": {}} is inside a line.'),
        ("harmony", "<|channel|>final<|message|>to=functions.add is how to call it"),
        ("harmony", "<|channel|>commentary<|message|>I will look."),
        ("mistral", "[1, 2] [TOOL_RESULTS]"),
        ("hermes", '{"name": "a", "arguments": {}}'),
        ("hermes", '<think>perhaps <tool_call>{"name": "a"}</tool_call>'),
        ("hermes", 'perhaps <tool_call>{"name": "a"}</tool_call></think>No.'),
    ],
)
def test_what_is_no_call(written, text):
    assert parse_tool_calls(text, written) == ParsedTurn(text, [], [])


def test_a_thought_may_mention_a_call_without_making_it():
    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    for thought in (
        "<think>use <tool_call>?</think>",
        "use <tool_call>?</think>",
        call + "</think>",
    ):
        assert parse_tool_calls(thought + call).calls == [ToolCall("a", {})]
    spelled = '<tool_call>{"name": "a", "arguments": {"t": "</think>"}}</tool_call>'
    assert parse_tool_calls(spelled).calls == [ToolCall("a", {"t": "</think>"})]
    broken = '<tool_call>{"name": "a", "arguments": {"t": "</think>"</tool_call>'
    assert isinstance(parse_tool_calls(broken).calls[0], MalformedCall), "it is not passed over"


@pytest.mark.parametrize(
    ("written", "text", "error"),
    [
        ("hermes", "<tool_call>{oops</tool_call>", "not valid JSON"),
        ("hermes", '<tool_call>{"name": "a"', "not closed with </tool_call>"),
        ("qwen3_coder", "<tool_call><function=a><parameter=x>1", "no </parameter>"),
        ("qwen3_coder", "<tool_call><function=a><parameter=x>1</parameter>", "no </function>"),
        ("qwen3_coder", XML.format("a", "<parameter=x>1</parameter>" * 2), "given twice"),
        (
            "qwen3_coder",
            XML.format("a", f"<parameter=x>{'1' * 70_000}</parameter>"),
            "at most 65536",
        ),
        ("llama3", "<|python_tag|>import os", "one JSON object"),
        ("llama3", '{"name": "a", "parameters": {', "braces are closed"),
        ("llama3", '{"name": "a", "parameters": 1}', '"parameters" must be an object'),
        ("mistral", '[TOOL_CALLS] [{"name": "a"', "not closed with ]"),
        ("mistral", "[TOOL_CALLS] [1]", "a call is"),
        ("mistral", "[TOOL_CALLS] hello", "no name and JSON arguments"),
        ("deepseek", DS.format("function", "a"), "no JSON arguments"),
        ("deepseek", '<｜tool▁call▁begin｜>a<｜tool▁sep｜>{"x": 1}', "not closed with"),
        ("deepseek", "<｜tool▁call▁begin｜>a", "has no <｜tool▁sep｜>"),
        ("harmony", "<|channel|>commentary to=functions.a<|message|>{", "not valid JSON"),
        ("harmony", "<|channel|>commentary to=functions.a<|message|>[]", "must be an object"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_and_how_to_write_it(written, text, error):
    (call,) = parse_tool_calls(text, written).calls
    assert isinstance(call, MalformedCall)
    assert error in call.error
    assert call.error.endswith(FORMATS[written].example)


PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "a>",
        "</function>",
        "<parameter=",
        "</parameter>",
    ),
    *("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "name", "<think>", "</think>"),
    *(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "```json",
        "```",
        "\n",
        " ",
    ),
    *(
        "<|start|>",
        "assistant",
        "<|channel|>",
        " to=",
        "functions.a",
        "<|message|>",
        "<|call|>",
        "<|end|>",
    ),
    *('{"name": "a", "arguments": {}}', '{"name":', '"parameters"', "{", "}", "[", "]", '"', "\\"),
    *(":", ",", "1", "NaN", ";", "\0", "\ud800", "é"),
]


@pytest.mark.parametrize("written", FORMATS)
@FORGERY_EXAMPLES
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=25).map("".join))
def test_T08_any_text_gives_calls_or_errors(written, text):
    turn = parse_tool_calls(text, written)
    assert len(turn.calls) == len(turn.positions) <= MAX_CALLS + 1
    assert all(0 <= position < len(text) for position in turn.positions)
    assert list(turn.positions) == sorted(turn.positions)
    for call in turn.calls:
        if isinstance(call, ToolCall):
            assert isinstance(call.name, str)
            assert isinstance(call.arguments, dict)
        else:
            assert call.error


OPENERS = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<tool_call><function=a><parameter=b>",
    "llama3": '\n{"name": ',
    "mistral": "[TOOL_CALLS] [",
    "deepseek": "<｜tool▁call▁begin｜>a<｜tool▁sep｜>",
    "harmony": " to=a<|message|>",
    "glm": "<tool_call>a<arg_key>b</arg_key><arg_value>",
    "minimax": '<invoke name="a"><parameter name="b">',
    "kimi": "<|tool_call_begin|>a<|tool_call_argument_begin|>",
    "phi4mini": "<|tool_call|>[",
    "nemotron": "<TOOLCALL>[",
}


def example_of(written):
    """The call that a model is shown, with a tool and with arguments that can be read."""
    return FORMATS[written].example.replace("<tool>", '"tool"').replace("{...}", "{}")


@pytest.mark.parametrize("written", FORMATS)
def test_the_example_of_a_format_is_a_call(written):
    (call,) = parse_tool_calls(example_of(written), written).calls
    assert isinstance(call, ToolCall)
    assert call.name == "tool"


@pytest.mark.parametrize("written", FORMATS)
@pytest.mark.parametrize(
    "unit", ["OPENER", '"\\', "{", "[", " ", "\n", "</think>", '{"a":', "a" * 64, "<|message|>"]
)
@pytest.mark.timeout(20)
def test_T07_a_megabyte_takes_linear_time(written, unit):
    opener = OPENERS.get(written, FORMATS[written].example.partition("{")[0])
    unit = opener if unit == "OPENER" else unit
    seconds = []
    for size in (250_000, 1_000_000):
        text = opener + '{"name": "' + unit * (size // len(unit))
        start = time.perf_counter()
        parse_tool_calls(text, written)
        seconds.append(time.perf_counter() - start)
    # Four times the text: sixteen times the time would be quadratic, and minutes of it.
    assert seconds[1] < 10 * seconds[0] + 0.5


@pytest.mark.parametrize("written", FORMATS)
def test_T07_ten_thousand_calls_are_cut_at_the_cap(written):
    one = example_of(written) + "\n"
    calls = parse_tool_calls(one * 10_000, written).calls
    assert [call.name for call in calls[:-1]] == ["tool"] * MAX_CALLS
    assert "at most 16 calls" in calls[-1].error


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_read_off_the_chat_template(name, chatml_tokenizer):
    template, written, _ = TEMPLATES[name]

    class Tokenizer:
        chat_template = template
        name_or_path = ""

    assert detect_tool_call_format(Tokenizer()) == written
    assert tool_call_parser(None, Tokenizer()).keywords == {"format": written}


def test_without_a_template_the_name_decides_and_hermes_is_the_default():
    class Tokenizer:
        chat_template = None
        name_or_path = "meta-llama/Llama-3.1-8B"

    assert detect_tool_call_format(Tokenizer()) == "llama3"
    assert detect_tool_call_format(None) == "hermes"
    with pytest.raises(ValueError, match=r"no tool call format 'qwen9'; there are \['[a-z]"):
        tool_call_parser("qwen9")
    with pytest.raises(ValueError, match=r"'\w+'\], or mine:f, a function of yours\.$"):
        tool_call_parser("qwen9")
    with pytest.raises(ValueError, match=r"'\w+'\]\.$"):  # which takes names alone
        parse_tool_calls("", "qwen9")


def test_a_depth_of_a_hundred_thousand_and_a_huge_number_are_refused():
    for body, error in (
        (
            '{"name": "a", "arguments": {"x": ' + "[" * 30_000 + "]" * 30_000 + "}}",
            "deeper than 64",
        ),
        ('{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}", "5000 digits"),
        ('{"name": "a", "arguments": {"x": "' + "9" * 1_000_000 + '"}}', "at most 65536"),
    ):
        (call,) = parse_tool_calls(f"<tool_call>{body}</tool_call>").calls
        assert error in call.error
