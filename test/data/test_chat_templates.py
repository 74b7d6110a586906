"""Which template is used, what the built-in ones write, and where the assistant's spans are."""

import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_for_tests import EXAMPLES, TEMPLATE_TOKENIZERS, chatml_tokenizer, llama_tokenizer

from torchrl_data import (
    ConversationEncoder,
    Conversations,
    History,
    Source,
    add_chat_template,
    builtin_template,
    resolve_template,
    template_names,
)
from torchrl_data.conversation import Turn
from torchrl_data.templates.registry import family_of
from torchrl_data.templates.rendering import render_template

TEMPLATES = sorted(TEMPLATE_TOKENIZERS)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]
CALL = {"id": "c1", "function": {"name": "f", "arguments": {"x": 1}}}
TOOL_TALK = [
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "T1", "tool_call_id": "c1"},
    {"role": "tool", "content": "T2", "tool_call_id": "c2"},
    {"role": "assistant", "content": "B", "reasoning_content": "R"},
]
# Written by hand from the formats' own descriptions; what is between {} is what is trained on.
PLAIN = {
    "chatml": "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n{A<|im_end|>}\n"
    "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "qwen": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
    "assistant.<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n{A<|im_end|>}\n"
    "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "smollm": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    "Face<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n{A<|im_end|>}\n"
    "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n{A<|im_end|>}\n"
    "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "llama": "<s><|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{A<|eot_id|>}"
    "<|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] U[/INST]{ A</s>}[INST] V[/INST]",
    "deepseek": "<s>User: U\n\nAssistant:{ A</s>}User: V\n\nAssistant:",
    "deepseek3": "<s><｜User｜>U<｜Assistant｜>{A</s>}<｜User｜>V<｜Assistant｜>",
    "falcon": "User: U\n\nAssistant:{ A</s>}\n\nUser: V\n\nAssistant:",
    "dialogpt": "U</s>{A</s>}V</s>",
    "gemma": "<s><start_of_turn>user\nU<end_of_turn>\n<start_of_turn>model\n{A<end_of_turn>}\n"
    "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n",
    "phi": "<|user|>\nU<|end|>\n<|assistant|>\n{A<|end|>}\n<|user|>\nV<|end|>\n<|assistant|>\n",
    "phi4": "<|im_start|>user<|im_sep|>U<|im_end|><|im_start|>assistant<|im_sep|>{A<|im_end|>}"
    "<|im_start|>user<|im_sep|>V<|im_end|><|im_start|>assistant<|im_sep|>",
    "phi4mini": "<|user|>U<|end|><|assistant|>{A<|end|>}<|user|>V<|end|><|assistant|>",
    "granite": "<|start_of_role|>user<|end_of_role|>U<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>{A<|end_of_text|>}\n"
    "<|start_of_role|>user<|end_of_role|>V<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>",
    "glm": "[gMASK]<sop><|user|>\nU<|assistant|>{\n<think></think>\nA<|endoftext|>}<|user|>\nV"
    "<|assistant|>",
    "kimi": "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI."
    "<|im_end|><|im_user|>user<|im_middle|>U<|im_end|><|im_assistant|>assistant<|im_middle|>"
    "{A<|im_end|>}<|im_user|>user<|im_middle|>V<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>",
}
_HERMES = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
_CALLS = f"A\n{_HERMES}\n{_HERMES}<|im_end|>"
_RESULTS = (
    "\n<|im_start|>user\n<tool_response>\nT1\n</tool_response>\n<tool_response>\nT2"
    "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
_LLAMA_CALL = '{"name": "f", "parameters": {"x": 1}}'
# The first turn, what is between, and the last turn.
WITH_TOOLS = {
    "chatml": (_CALLS, _RESULTS, "B<|im_end|>"),
    "smollm": (_CALLS, _RESULTS, "B<|im_end|>"),
    "qwen": (_CALLS, _RESULTS, "B<|im_end|>"),
    "qwen3": (_CALLS, _RESULTS, "<think>\nR\n</think>\n\nB<|im_end|>"),
    "llama": (
        f"A\n{_LLAMA_CALL}\n{_LLAMA_CALL}<|eot_id|>",
        "<|start_header_id|>ipython<|end_header_id|>\n\nT1<|eot_id|>"
        "<|start_header_id|>ipython<|end_header_id|>\n\nT2<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "B<|eot_id|>",
    ),
    "mistral": (
        ' A[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "c1"}, '
        '{"name": "f", "arguments": {"x": 1}, "id": "c1"}]</s>',
        '[TOOL_RESULTS] {"content": "T1", "call_id": "c1"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS] {"content": "T2", "call_id": "c2"}[/TOOL_RESULTS]',
        " B</s>",
    ),
    "granite": (
        f"A\n{_HERMES}\n{_HERMES}<|end_of_text|>",
        "\n<|start_of_role|>user<|end_of_role|>\n<tool_response>\nT1\n</tool_response>\n"
        "<tool_response>\nT2\n</tool_response><|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>",
        "B<|end_of_text|>",
    ),
    "phi4mini": (
        'A<|tool_call|>[{"name": "f", "arguments": {"x": 1}}, '
        '{"name": "f", "arguments": {"x": 1}}]<|/tool_call|><|end|>',
        "<|tool_response|>T1<|end|><|tool_response|>T2<|end|><|assistant|>",
        "B<|end|>",
    ),
    "glm": (
        "\n<think></think>\nA"
        + "\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>" * 2
        + "<|endoftext|>",
        "<|observation|>\n<tool_response>\nT1\n</tool_response>\n<tool_response>\nT2"
        "\n</tool_response><|assistant|>",
        "\n<think>R</think>\nB<|endoftext|>",
    ),
    "kimi": (
        "A<|tool_calls_section_begin|>"
        + '<|tool_call_begin|>c1<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>' * 2
        + "<|tool_calls_section_end|><|im_end|>",
        "<|im_system|>tool<|im_middle|>## Return of c1\nT1<|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of c2\nT2<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>",
        "B<|im_end|>",
    ),
}
_OF_THE_TOOLS = ["chatml", "deepseek3", "qwen", "qwen3", "llama", "mistral"]
_OF_THE_TOOLS += ["granite", "phi4mini", "kimi", "glm"]


def marked(template, messages, **options):
    rendered = render_template(builtin_template(template), messages, variables=SPECIAL, **options)
    text, position = "", 0
    for start, end in rendered.spans:
        text += rendered.text[position:start] + "{" + rendered.text[start:end] + "}"
        position = end
    return text + rendered.text[position:]


def test_every_template_is_tested():
    added = {name for name in template_names() if name.startswith("my-") or "_" in name}
    assert set(template_names()) - added == set(TEMPLATES) == set(PLAIN)


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_a_template_writes(template):
    assert marked(template, TALK, add_generation_prompt=True) == PLAIN[template]


@pytest.mark.parametrize("template", sorted(WITH_TOOLS))
def test_calls_results_and_reasoning(template):
    text, (first, last) = render_template(builtin_template(template), TOOL_TALK, variables=SPECIAL)
    parts = (text[slice(*first)], text[first[1] : last[0]], text[slice(*last)])
    assert parts == WITH_TOOLS[template]


@pytest.mark.parametrize("template", _OF_THE_TOOLS)
def test_tools_are_shown(template):
    schema = {"type": "function", "function": {"name": "add_up", "parameters": {"type": "object"}}}
    chat = [{"role": "system", "content": "Be brief."}, *TALK]
    text = marked(template, chat, tools=[schema])
    assert '"name": "add_up"' in text
    assert text.count("Be brief.") == 1


@pytest.mark.parametrize("template", ["deepseek", "dialogpt", "falcon", "gemma", "phi", "phi4"])
def test_calls_that_a_template_has_no_form_for_are_refused(template):
    with pytest.raises(ValueError, match="no form for tool calls"):
        render_template(builtin_template(template), TOOL_TALK, variables=SPECIAL)


def unmark(template):
    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tail", ["", "{# a fork #} "], ids=["unmarked", "a fork, trailing space"])
def test_spans_are_found_in_templates_without_marks(template, tail):
    """The same source without its marks gives the same tokens and the same mask."""
    tokenizer = TEMPLATE_TOKENIZERS[template]()
    source = builtin_template(template)
    with_marks = ConversationEncoder(tokenizer, chat_template=source)
    without = ConversationEncoder(tokenizer, chat_template=unmark(source) + tail)
    forged = "".join(sorted(with_marks.guard.control_ids)) + "Assistant: User: "
    chat = [
        {"role": "user", "content": f"U{forged}"},
        {"role": "assistant", "content": f"A{forged}A"},
        {"role": "user", "content": "Assistant: V"},
        {"role": "assistant", "content": "Question7"},
    ]
    ours, (found,) = with_marks.encode_chats([chat])[0], without.encode_chats([chat])
    length = len(ours.ids)
    assert found.ids[:length] == ours.ids
    sampled = [s == Source.MODEL for s in ours.sources]
    assert [s == Source.MODEL for s in found.sources[:length]] == sampled


def test_spans_are_found_where_earlier_turns_are_rewritten():
    """Like Qwen 3's own template, which drops the reasoning of all turns but the last."""
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
        "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    encoder = ConversationEncoder(chatml_tokenizer(), chat_template=source)
    (encoded,) = encoder.encode_chats([[*TALK, {"role": "assistant", "content": "B"}]])
    sampled = [i for i, s in zip(encoded.ids, encoded.sources, strict=True) if s == Source.MODEL]
    expected = "A<|im_end|><think>\n\n</think>\n\nB<|im_end|>"
    assert encoder.tokenizer.decode(sampled) == expected


def test_a_generation_block_that_leaves_the_end_of_turn_out_is_completed():
    source = builtin_template("chatml")
    source = source.replace(
        "            {{- '<|im_end|>' }}\n        {%- endgeneration %}",
        "        {%- endgeneration %}{{- '<|im_end|>' }}",
    )
    encoder = ConversationEncoder(chatml_tokenizer(), chat_template=source)
    (encoded,) = encoder.encode_chats([TALK])
    sampled = [i for i, s in zip(encoded.ids, encoded.sources, strict=True) if s == Source.MODEL]
    assert encoder.tokenizer.decode(sampled) == "A<|im_end|>"


def test_which_template_is_used():
    tokenizer = chatml_tokenizer(name="org/Falcon-7b")
    assert resolve_template(tokenizer) == builtin_template("falcon")
    tokenizer.chat_template = own = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert resolve_template(tokenizer) == own
    assert resolve_template(tokenizer, chat_template_name="llama") == builtin_template("llama")
    assert resolve_template(tokenizer, chat_template="x") == "x"
    add_chat_template("my-falcon", builtin_template("falcon") + " ", None, ["my-falc", "FALCON-7"])
    assert resolve_template(tokenizer) == builtin_template("falcon") + " "
    assert resolve_template(chatml_tokenizer(name="nobody")) == builtin_template("chatml")
    assert resolve_template(chatml_tokenizer(name="Qwen/Qwen3-0.6B")) == builtin_template("qwen3")
    several = chatml_tokenizer()
    several.chat_template = {"default": own, "tool_use": "x"}
    assert resolve_template(several) == own


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param(
            "{{ messages[0].content }}", "does not show what the assistant says", id="none"
        ),
        pytest.param(
            "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{{ m.content }}"
            "{% endfor %}",
            "not the assistant's 'Answer7'",
            id="marks around something else",
        ),
        pytest.param("{% for %}", "can't render messages of roles", id="no Jinja"),
    ],
)
def test_a_template_without_a_mask_is_refused(source, message):
    with pytest.raises(ValueError, match=message):
        ConversationEncoder(chatml_tokenizer(), chat_template=source)


def test_a_template_to_register_must_be_marked():
    with pytest.raises(ValueError, match=r"'mine' has no \{% generation %\} block"):
        add_chat_template("mine", "your_template_here", model_family_keywords=["mine"])


def test_a_turn_that_nothing_ends_is_refused_when_a_policy_is_to_speak():
    source = "{% for m in messages %}{{ m.role + ': ' + m.content + '. ' }}{% endfor %}"
    encoder = ConversationEncoder(chatml_tokenizer(), chat_template=source)
    with pytest.raises(ValueError, match="does not start with a control token"):
        encoder.encode_waiting(Conversations.from_messages([TALK[:1]]))


def test_a_message_that_the_template_refuses_is_named():
    source = builtin_template("chatml") + "{{ raise_exception('no tools') if tools }}"
    encoder = ConversationEncoder(chatml_tokenizer(), chat_template=source)
    with pytest.raises(ValueError, match=r"roles \['user', 'assistant', 'user'\]: no tools"):
        encoder.encode_chats([TALK], tools=[{"type": "function"}])
    answered = encoder.encode_waiting(Conversations.from_messages([TALK[:1]] * 2))
    end = [encoder.end_of_turn_id]
    answered = answered.append_turns([Turn(end, [0.0], TALK[1])] * 2)
    bad = [[{"role": "user", "content": "x"}], [{"role": "wizard", "content": "x"}]]
    waiting = answered.append_messages(bad)
    with pytest.raises(ValueError, match="Message 2 of row 1 has the unknown role 'wizard'"):
        encoder.encode_waiting(waiting)


def test_reasoning_in_content_is_opt_in():
    tokenizer = chatml_tokenizer()
    think = tokenizer.convert_tokens_to_ids("<think>")
    chat = [TALK[0], {"role": "assistant", "content": "<think>\nR\n</think>\n\nB"}]
    plain = ConversationEncoder(tokenizer, chat_template_name="qwen3")
    parsed = ConversationEncoder(tokenizer, chat_template_name="qwen3", reasoning_in_content=True)
    assert think not in plain.encode_chats([chat])[0].ids
    ids = parsed.encode_chats([chat])[0].ids
    assert think in ids
    tokenizer.chat_template = builtin_template("chatml")
    assert ids == tokenizer.apply_chat_template(chat, return_dict=False)
    with pytest.raises(ValueError, match="this chat template does not show"):
        ConversationEncoder(tokenizer, chat_template_name="chatml", reasoning_in_content=True)


def test_many_threads_render_at_once():
    """The marks are in the text, not in the environment, which threads share."""
    chats = [
        [{"role": "user", "content": "U"}, {"role": "assistant", "content": "x" * n}]
        for n in range(200)
    ]
    with ThreadPoolExecutor(8) as threads:
        spans = list(
            threads.map(lambda chat: render_template(builtin_template("chatml"), chat).spans, chats)
        )
    assert [end - start for ((start, end),) in spans] == [n + len("<|im_end|>") for n in range(200)]


# A template may look at content; what is compiled must notice.

LOOKS = [
    pytest.param("message.content | trim", id="trims"),
    pytest.param("message.content | upper", id="changes case"),
    pytest.param("message.content | tojson", id="as JSON"),
    pytest.param("message.content.split('</x>')[-1]", id="drops what is before a tag"),
    pytest.param("'empty' if not message.content else message.content", id="minds emptiness"),
    pytest.param("message.content[:5]", id="cuts"),
    pytest.param("'!' + message.content if '?' in message.content else message.content", id="?"),
    pytest.param("message.content + (message.name or '')", id="name"),
    pytest.param("message.content + ('N' if message.name else '')", id="whether there is a name"),
]


@pytest.mark.hypothesis  # inside
@pytest.mark.parametrize("expression", LOOKS)
def test_compiled_shapes_equal_rendering(expression):
    source = builtin_template("chatml").replace(
        "message.content + '<|im_end|>\\n'", f"({expression}) + '<|im_end|>\\n'"
    )
    assert expression in source
    tokenizer = chatml_tokenizer(chat_template=source)
    encoder = ConversationEncoder(tokenizer)
    text = st.text(alphabet='ab \n?"\\é', max_size=8)
    contents = st.builds(lambda a, b: a + b, text, st.sampled_from(["", "</x>", "</x>c", "?"]))

    @EXAMPLES
    @given(contents, st.none() | text)
    def holds(content, name):
        new = {"role": "user", "content": content} | ({} if name is None else {"name": name})
        state = encoder.encode_waiting(Conversations.from_messages([TALK[:1]]))
        answer = [*encoder.guard.encode_texts(["A"])[0], encoder.end_of_turn_id]
        state = state.append_turns([Turn(answer, [0.0] * len(answer), TALK[1])])
        state = state.append_messages([[new]])
        if name and "(message.name or" not in expression:
            with pytest.raises(ValueError, match=r"Message 2 \(user\) has 'name', which"):
                encoder.encode_waiting(state)
            return
        state = encoder.encode_waiting(state)
        expected = tokenizer.apply_chat_template(
            [*TALK[:2], new], add_generation_prompt=True, tokenize=False
        )
        assert tokenizer.decode(state.ids(0)) == expected

    holds()


@pytest.mark.parametrize("template", TEMPLATES)
def test_text_is_parsed_back(template):
    chat = [{**TALK[0], "content": "U\n\n  x"}, TALK[1], TALK[2]]
    text = render_template(builtin_template(template), chat, variables=SPECIAL).text
    parsed = History.from_text(text, chat_template_name=template).to_chats()
    default = (
        [{"role": "system", "content": parsed[0]["content"]}]
        if template in ("qwen", "smollm", "kimi")
        else []
    )
    assert parsed == [*default, *chat]


def test_calls_and_reasoning_are_parsed_back_and_bad_calls_stay_text():
    text = render_template(builtin_template("qwen3"), TOOL_TALK[:1] + TOOL_TALK[2:]).text
    assert History.from_text(text, "qwen3").to_chats()[-1] == TOOL_TALK[-1]
    text = render_template(builtin_template("qwen3"), TOOL_TALK[:2]).text
    call = {"type": "function", "function": CALL["function"]}
    assert History.from_text(text, "qwen3").to_chats()[-1]["tool_calls"] == [call, call]
    broken = "<|im_start|>assistant\n<tool_call>\n{nonsense\n</tool_call><|im_end|>"
    assert History.from_text(broken, "qwen").content == ["<tool_call>\n{nonsense\n</tool_call>"]
    cut = History.from_text("<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nI am", "qwen")
    assert cut.is_complete == [True, False]


@pytest.mark.parametrize("template", ["glm", "granite", "kimi", "phi4mini", "qwen"])
def test_calls_of_a_family_are_parsed_back(template):
    schema = {"type": "function", "function": {"name": "f", "description": "F."}}
    source = builtin_template(template)
    text = render_template(source, TOOL_TALK[:2], tools=[schema], variables=SPECIAL).text
    *_, user, answer = History.from_text(text, template).to_chats()
    assert (user["content"], answer["content"]) == ("U", "A")
    functions = [call["function"] for call in answer["tool_calls"]]
    expected = {"kimi": {"name": "c1", "arguments": {"x": 1}}}  # its name is in its id
    expected["glm"] = {"name": "f", "arguments": {"x": "1"}}  # the tool's schema says the type
    assert functions == [expected.get(template, CALL["function"])] * 2


def test_a_mistral_text_with_tools_is_parsed_back():
    """The schemas are no message; a user who spells their marks is still a user."""
    marks = "[AVAILABLE_TOOLS] []][/AVAILABLE_TOOLS]"
    result = {"role": "tool", "content": 'T "1"', "tool_call_id": "c1"}
    chat = [{"role": "user", "content": f"U {marks}"}, TOOL_TALK[1], result, TALK[1], TALK[2]]
    schema = {"type": "function", "function": {"name": "f", "description": "[INST] ]"}}
    text = render_template(
        builtin_template("mistral"), chat, tools=[schema], variables=SPECIAL
    ).text
    parsed = History.from_text(text, "mistral").to_chats()
    calls = [{"type": "function", **CALL}] * 2
    assert parsed == [chat[0], {**chat[1], "tool_calls": calls}, *chat[2:]]
    assert History.from_text(f"<s>{marks}[INST] Hi[/INST] Hello</s>", "mistral").to_chats() == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]


def test_the_parser_is_found_from_tokenizer_or_template():
    text = render_template(builtin_template("llama"), TALK, variables=SPECIAL).text
    tokenizer = llama_tokenizer()
    tokenizer.chat_template = unmark(builtin_template("llama")) + " "
    assert History.from_text(text, tokenizer=tokenizer).to_chats() == TALK
    assert History.from_text([text], chat_template=builtin_template("llama")).to_chats() == [TALK]


def test_text_that_can_not_be_parsed():
    with pytest.raises(ValueError, match=r"No message was found in 'garbage', read as .*'qwen'"):
        History.from_text("garbage", "qwen")
    add_chat_template("my-own", builtin_template("chatml"))
    with pytest.raises(ValueError, match="'my-own' has no inverse parser"):
        History.from_text("garbage", "my-own")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Qwen/Qwen3-0.6B", "qwen3"),
        ("org/CodeQwen1.5-7B", "qwen"),
        ("/tmp/torchrl-agents-a_qwq_x1/model", None),  # letters that were drawn at random
        ("/home/falcon/llama/models/mine", None),
        ("/home/falcon/Llama-3.1-8B", "llama"),
        ("/cache/models--Qwen--Qwen3-0.6B/snapshots/0aff1", "qwen3"),
        ("", None),
    ],
)
def test_a_template_is_chosen_by_the_name_of_a_model_and_not_by_folders_above_it(name, family):
    assert family_of(SimpleNamespace(name_or_path=name)) == family


def test_a_folder_that_is_there_is_a_path(tmp_path, monkeypatch):
    (tmp_path / "qwen3/run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert family_of(SimpleNamespace(name_or_path="qwen3/run")) is None
