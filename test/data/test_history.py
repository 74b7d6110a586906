"""History: the chat format in and out, growing, and TorchRL's documented examples."""

import json
import pickle

import pytest
import torch
import torchrl.data.llm
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from tokenizers_for_tests import EXAMPLES, chatml_tokenizer, llama_tokenizer

from torchrl_data import ContentBase, History, add_chat_template

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I should add.",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "add", "arguments": {"a": [2, 2]}},
            }
        ],
    },
    {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "add"},
    {"role": "assistant", "content": "It is", "is_complete": False, "weight": 0.5},
]

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
TEXTS = st.text(max_size=20)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXTS},
    optional={
        "tool_calls": st.lists(
            st.dictionaries(st.text(max_size=5), VALUES), min_size=1, max_size=2
        ),
        "tool_responses": st.lists(TEXTS, min_size=1, max_size=2),
        "tool_call_id": TEXTS,
        "name": TEXTS,
        "reasoning_content": TEXTS,
        "is_complete": st.just(False),
        "weight": st.floats(0, 1),
    },
)
CHATS = st.lists(st.lists(MESSAGES, min_size=1, max_size=4), min_size=1, max_size=3)


@EXAMPLES
@given(CHATS)
def test_round_trips_are_exact(chats):
    history = History.from_chats(chats)
    assert history.to_chats() == chats
    assert json.loads(json.dumps(history.to_chats())) == chats
    assert history[0].to_chats() == chats[0]
    assert History.from_tensordict(history.to_tensordict()).to_chats() == chats
    held = TensorDict({"history": history}, batch_size=[len(chats)])
    assert held[-1]["history"].to_chats() == chats[-1]


def test_a_history_survives_pickle_and_a_batch():
    history = History.from_chats([CHAT, CHAT[:2]])
    assert pickle.loads(pickle.dumps(history)).to_chats() == [CHAT, CHAT[:2]]
    assert torch.stack([history[0][:2], history[1]]).shape == (2, 2)


def test_rows_of_unequal_lengths():
    history = History.from_chats([CHAT, CHAT[:2]])
    assert history.shape == (2, -1)
    assert history[:, -1].content == ["It is", "What is 2 + 2?"]
    assert history[..., 0].role == ["system", "system"]
    assert history[0, 2].tool_calls == CHAT[2]["tool_calls"]
    assert history[0].tool_call_id == [None, None, None, "c1", None]
    assert history[1].tool_calls is None
    assert history.role[1] == ["system", "user"]


@pytest.mark.parametrize("inplace", [True, False])
def test_append_and_extend(inplace):
    bye = {"role": "user", "content": "Bye"}
    history = History.from_chats(CHAT[:2])
    longer = history.append(History(**bye), inplace=inplace)
    assert longer.to_chats() == [*CHAT[:2], bye]
    assert len(history) == (3 if inplace else 2)
    batch = History.from_chats([CHAT, CHAT[:2]])
    longer = batch.append(History.from_chats([bye, bye]), dim=-1, inplace=inplace)
    assert longer.to_chats() == [[*CHAT, bye], [*CHAT[:2], bye]]
    longer = batch[1:].extend(History.from_chats([[bye]]), inplace=inplace)
    assert [len(row) for row in longer.to_chats()] == [3 if inplace else 2, 1]
    both = History.from_chats([CHAT[:2], CHAT[:1]])
    two = History.from_chats([[bye, bye], [bye, bye]])
    assert both.extend(two, dim=1).to_chats() == [[*CHAT[:2], bye, bye], [CHAT[0], bye, bye]]


def test_parts_of_a_message():
    parts = lazy_stack(
        [ContentBase(type="text", text="What?"), ContentBase(type="image", url="http://x/y.png")]
    )
    history = lazy_stack([History(role="user", content=parts), History(role="user", content="z")])
    chat = history.to_chats()
    assert chat[0]["content"] == [
        {"type": "text", "text": "What?"},
        {"type": "image", "url": "http://x/y.png"},
    ]
    assert History.from_chats(chat).to_chats() == chat
    single = ContentBase(type="text", text="Hm", batch_size=())
    for content in (single, [single], [{"type": "text", "text": "Hm"}], (single,)):
        message = {"role": "user", "content": content}
        assert History.from_chats([message]).to_chats()[0]["content"] == [
            {"type": "text", "text": "Hm"}
        ]
    mixed = [{"role": "user", "content": [parts, {"type": "text", "text": "Well"}]}]
    assert History.from_chats([mixed]).to_chats()[0][0]["content"] == [
        *chat[0]["content"],
        {"type": "text", "text": "Well"},
    ]
    with pytest.raises(ValueError, match="unknown type 'smell'"):
        ContentBase(type="smell")


def test_messages_of_torchrl_are_read():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    parts = [torchrl.data.llm.ContentBase(type="text", text="See")]
    parts += [torchrl.data.llm.ContentBase(type="image", url="http://x/y.png")]
    theirs = torchrl.data.llm.History
    rows = [
        [theirs(role="user", content=lazy_stack(parts)), theirs(role="assistant", content="Well")],
        [
            theirs(role="assistant", content=None, tool_calls=[call]),
            theirs(role="tool", content="4", tool_responses=["4"]),
            theirs(role="assistant", content="It", is_complete=False),
        ],
    ]
    both = lazy_stack([lazy_stack(row) for row in rows])
    chats = [
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "See"},
                    {"type": "image", "url": "http://x/y.png"},
                ],
            },
            {"role": "assistant", "content": "Well"},
        ],
        [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "4", "tool_responses": ["4"]},
            {"role": "assistant", "content": "It", "is_complete": False},
        ],
    ]
    assert History.from_torchrl(both).to_chats() == chats
    assert History.from_torchrl(both[1]).to_chats() == chats[1]
    assert History.from_torchrl(both[0, 1]).to_chats() == chats[0][1]
    back = History.from_chats(chats).to_torchrl()
    assert type(back[1, 0]) is theirs
    assert History.from_torchrl(back).to_chats() == chats
    assert History.from_torchrl(back[1, 2]).to_chats() == chats[1][2]
    with pytest.raises(ValueError, match="unknown role 'judge'"):
        History.from_torchrl(theirs(role="judge", content="Yes"))
    with pytest.raises(TypeError, match="takes a History of torchrl"):
        History.from_torchrl(History(role="user", content="Hi"))


def test_nested_batches():
    nested = [[CHAT, CHAT[:1]], [CHAT[:2], CHAT]]
    history = History.from_chats(nested)
    assert history.batch_size[:2] == (2, 2)
    assert history.to_chats() == nested
    assert history[1, 0].to_chats() == CHAT[:2]
    assert History.from_chats([nested]).to_chats() == [nested]
    with pytest.raises(ValueError, match=r"Message 0 of row \(1, 0\) has the unknown role"):
        History.from_chats([[CHAT], [[{"role": "wizard", "content": "x"}]]])
    with pytest.raises(ValueError, match=r"row \(0, 1\) has none"):
        History.from_chats([[CHAT, []]])


@pytest.mark.parametrize(
    ("chats", "error", "message"),
    [
        pytest.param([], ValueError, "at least one message", id="no chats"),
        pytest.param([[]], ValueError, "row 0 has none", id="no messages"),
        pytest.param(
            [[CHAT[0]], [CHAT[0], {"role": "wizard", "content": "x"}]],
            ValueError,
            r"Message 1 of row 1 has the unknown role 'wizard'; the roles are \['system'",
            id="unknown role",
        ),
        pytest.param(
            [{"role": 3, "content": "x"}], TypeError, "Message 0 has the role 3", id="role"
        ),
        pytest.param(
            [CHAT[0], {"role": "user", "content": 4}],
            TypeError,
            r"Message 1 \(user\) has content of type int \(4\)",
            id="content that is no string",
        ),
        pytest.param(
            [{"role": "user", "content": [3]}], TypeError, "has a content part 3", id="part"
        ),
        pytest.param([{"role": "user"}], ValueError, "no content and no tool calls", id="nothing"),
        pytest.param([[CHAT[0], "hi"]], TypeError, "Message 1 of row 0 is a str", id="no dict"),
    ],
)
def test_bad_messages_are_named(chats, error, message):
    with pytest.raises(error, match=message):
        History.from_chats(chats)


# TorchRL's documented examples, but for the names on the hub


def test_documented_mask_example_needs_no_tokenizer():
    history = History.from_chats(
        [
            [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Hi there!"},
                {"role": "user", "content": "How are you?"},
                {"role": "assistant", "content": "I'm doing well, thanks!"},
            ]
        ]
    )
    result = history.apply_chat_template(
        chat_template_name="qwen",
        add_generation_prompt=False,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    # A token is a byte here: both answers, and the end of each turn.
    assert result["assistant_masks"].sum().item() == len("Hi there!I'm doing well, thanks!") + 2


LLAMA_2 = """
{% for message in messages %}
{%- if message['role'] == 'user' %}
{{ '<s>[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + '</s>' }}{% endgeneration %}
{%- endif %}
{% endfor %}
{%- if add_generation_prompt %}
{% generation %}{{ ' ' }}{% endgeneration %}
{%- endif %}
"""


@pytest.mark.parametrize("marks", [("<s>", "</s>"), ("", "")], ids=["as meant", "as printed"])
def test_documented_custom_template_is_found_by_the_tokenizers_name(marks):
    def parse_llama_text(text):
        import re

        pattern = r"\[INST\]\s*(.*?)\s*\[/INST\]\s*(.*?)\s*(?:</s>|$)"
        messages = []
        for question, answer in re.findall(pattern, text, re.DOTALL):
            messages.append(History(role="user", content=question.strip()))
            messages.append(History(role="assistant", content=answer.strip()))
        return lazy_stack(messages)

    template = LLAMA_2.replace("<s>", marks[0]).replace("</s>", marks[1])
    add_chat_template(
        template_name="my-llama",
        template=template,
        inverse_parser=parse_llama_text,
        model_family_keywords=["my-llama", "meta-my-llama"],
    )
    tokenizer = llama_tokenizer()
    tokenizer.name_or_path = "org/Meta-My-Llama-2-7b"
    history = History.from_chats(
        [[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there!"}]]
    )
    result = history.apply_chat_template(
        tokenizer=tokenizer,
        add_generation_prompt=False,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert result["assistant_masks"].shape[0] == 1
    assert "assistant_masks" in result
    mask = result["assistant_masks"][0].bool()
    assert tokenizer.decode(result["input_ids"][0][mask]) == "Hi there!" + marks[1]
    text = history.apply_chat_template(tokenizer=tokenizer, add_generation_prompt=False)
    parsed = History.from_text(text, chat_template_name="my-llama")
    assert parsed.role == history.role
    assert parsed.content == history.content


def test_documented_equivalence_with_the_tokenizers_own_template():
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    )
    history = History.from_chats([CHAT[:2], CHAT[1:2]])
    own = history.apply_chat_template(
        tokenizer=tokenizer,
        add_generation_prompt=False,
        chat_template=tokenizer.chat_template,
        tokenize=False,
    )
    ours = history.apply_chat_template(
        tokenizer=tokenizer,
        add_generation_prompt=False,
        chat_template_name="chatml_format",
        tokenize=False,
    )
    assert own == ours


def test_stack_of_single_messages_as_documented():
    parts = [History(role=role, content=f"CONTENT\nof {role}") for role in ("system", "user")]
    history = torch.stack(parts)
    assert history.role == ["system", "user"]
    text = history.apply_chat_template(tokenizer=chatml_tokenizer(), add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nCONTENT\nof system<|im_end|>\n"
        "<|im_start|>user\nCONTENT\nof user<|im_end|>\n<|im_start|>assistant\n"
    )
    spec = History(role=["system", "user"], content=["a", "b"], batch_size=(2,)).default_spec()
    assert isinstance(spec.zero(), History)


def test_placeholders_are_not_rendered():
    history = History.from_chats([CHAT[1], {"role": "<none>", "content": "gap"}])
    assert "gap" not in history.apply_chat_template(tokenizer=chatml_tokenizer())
    tokens = history.apply_chat_template(tokenizer=chatml_tokenizer(), tokenize=True)
    assert "gap" not in chatml_tokenizer().decode(tokens)


def test_continuing_the_last_message():
    tokenizer = chatml_tokenizer()
    history = History.from_chats([CHAT[1], {"role": "assistant", "content": "It is "}])
    text = history.apply_chat_template(tokenizer=tokenizer, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nIt is ")
    ids = history.apply_chat_template(
        tokenizer=tokenizer, continue_final_message=True, tokenize=True
    )
    assert tokenizer.decode(ids) == text


def test_padding_and_truncation():
    tokenizer = chatml_tokenizer()
    history = History.from_chats([CHAT[:2], CHAT[1:2]])
    ragged = history.apply_chat_template(
        tokenizer=tokenizer, tokenize=True, return_dict=True, add_generation_prompt=False
    )
    rows = [row["input_ids"] for row in ragged.unbind(0)]
    padded = history.apply_chat_template(
        tokenizer=tokenizer,
        tokenize=True,
        return_dict=True,
        add_generation_prompt=False,
        padding=True,
    )
    assert padded["input_ids"].shape == (2, max(map(len, rows)))
    assert padded["attention_mask"].sum(-1).tolist() == [len(row) for row in rows]
    short = history.apply_chat_template(
        tokenizer=tokenizer, tokenize=True, truncation=True, max_length=5
    )
    assert [len(row) for row in short] == [5, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "ask for one of them"),
        ({"return_tensors": "np"}, "'pt' or None"),
        ({"tokenize": False, "return_assistant_tokens_mask": True}, "need tokens"),
        ({"tokenize": True, "truncation": True}, "needs max_length"),
        ({"chat_template": "x", "chat_template_name": "chatml"}, "not both"),
        ({"chat_template_name": "nonsense"}, "no chat template named 'nonsense'; there are"),
    ],
)
def test_options_that_can_not_be_met(options, message):
    with pytest.raises(ValueError, match=message):
        History.from_chats(CHAT[:2]).apply_chat_template(tokenizer=chatml_tokenizer(), **options)


def test_dimensions_that_do_not_fit():
    history = History.from_chats(CHAT)
    with pytest.raises(ValueError, match="append adds an item with one dimension less"):
        history.append(history)
    with pytest.raises(ValueError, match="extend joins histories of as many dimensions"):
        history.extend(history[0])
    with pytest.raises(ValueError, match="is a single message"):
        history[0].apply_chat_template(tokenizer=chatml_tokenizer())
