"""Conversations for people: what is printed, and a page that runs nothing (A17)."""

import io
import re
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console
from tokenizers_for_tests import chatml_tokenizer

from torchrl_data import (
    ConversationEncoder,
    Conversations,
    History,
    TextHistory,
    builtin_template,
    conversation_html,
    row_tensordicts,
    show_conversation,
    show_messages,
)
from torchrl_data.conversation import Turn


def console():
    return Console(file=io.StringIO(), width=100, color_system=None)


def answered(content="hello", name=None):
    said = "message.content + '<|im_end|>\\n'"
    named = builtin_template("chatml").replace(said, f"(message.name or '') + {said}")
    encoder = ConversationEncoder(chatml_tokenizer(), chat_template=named)
    user = {"role": "user", "content": content} | ({"name": name} if name else {})
    state = encoder.encode_waiting(Conversations.from_messages([[user]]))
    ids = [*encoder.guard.encode_texts(["Déjà vu 😀"])[0], encoder.end_of_turn_id]
    answer = {"role": "assistant", "content": "Déjà vu 😀"}
    state = state.append_turns([Turn(ids, [-0.25] * len(ids), answer, 7)])
    return encoder.tokenizer, state, ids


def test_messages_tokens_and_reward_are_printed():
    tokenizer, state, ids = answered("[bold]hi[/bold] \x1b[31m\u202e")
    out = console()
    show_conversation(state, 0, tokenizer=tokenizer, reward=0.5, console=out)
    text = out.file.getvalue()
    # Rich's markup is shown and not applied; escape sequences and direction marks are spelled out.
    assert "[bold]hi[/bold] \\u001b[31m\\u202e" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "─ user ─" in text
    assert f"{len(ids)} sampled by the policy" in text
    assert "Déjà vu 😀<|im_end|>" in text
    assert "reward: 0.5" in text
    assert all(word in text for word in ("template", "content", "model", "assistant"))


def test_tokens_have_the_colour_of_their_source():
    tokenizer, state, _ = answered()
    out = Console(file=io.StringIO(), width=300, color_system="standard", force_terminal=True)
    show_conversation(state, 0, tokenizer=tokenizer, console=out)
    text = out.file.getvalue()
    green, blue, grey = "32", "34", "90"
    for code, shown in ((grey, "<|im_start|>"), (blue, "h"), (green, "<|im_end|>")):
        assert re.search(rf"\x1b\[(4;)?{code}m{re.escape(shown)}", text)


def test_a_history_shows_itself():
    out = console()
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"function": {"name": "look", "arguments": {"at": 1}}}],
        },
        {"role": "tool", "content": "42", "name": "look"},
    ]
    History.from_chats([chat]).show(console=out)
    text = out.file.getvalue()
    for shown in ("see", "[image: ...]", "(reasoning) hm", "-> look({'at': 1})", "tool (look)"):
        assert shown in text


def test_a_reward_may_be_a_tensor_and_has_one_name_for_one_row_and_one_for_several():
    """A reward as the entry of a batch has it, ``[1, 1]`` a row."""
    _, state, _ = answered()
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    out = console()
    show_conversation(state, 0, reward=torch.full((1, 1), 0.5), console=out)
    show_messages(chats[0], reward=torch.tensor(1.5), console=out)
    History.from_chats(chats[0]).show(reward=2.5, console=out)
    History.from_chats(chats).show(rewards=torch.tensor([3.5, 4.5]).view(2, 1, 1), console=out)
    shown = [line for line in out.file.getvalue().splitlines() if line.startswith("reward")]
    assert shown == [f"reward: {i}.5" for i in range(5)]
    assert "reward: 5.5" in conversation_html(state, reward=torch.tensor([5.5]))
    assert "reward: 6.5" in History.from_chats(chats[0]).to_html(reward=6.5)
    for show in (History.from_chats(chats).show, History.from_chats(chats).to_html):
        with pytest.raises(ValueError, match="2 rows, but 1 rewards"):
            show(reward=1.0)
        with pytest.raises(ValueError, match="either reward"):
            show(reward=1.0, rewards=[1.0, 2.0])


PAYLOADS = [
    f"{opening}{body}{closing}"
    for opening, closing in [
        ("<script>", "</script>"),
        ("</pre><script>", "</script>"),
        ("<img src=x onerror=", ">"),
        ("<svg/onload=", ">"),
        ('"><script>', "</script>"),
        ("'><iframe src=javascript:", ">"),
        ("</style><script>", "</script>"),
        ("<!--><script>", "</script>-->"),
        ("<body onload=", ">"),
        ("&lt;script&gt;<a href='javascript:", "'>x</a>"),
    ]
    for body in ("alert(1)", "fetch('//x')", "`${1}`", "\x00alert(1)", "eval(name)//")
]


class Page(HTMLParser):
    """Elements and their attributes."""

    def __init__(self):
        super().__init__()
        self.elements = []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))


ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "article", "h2", "section", "h3", "pre"),
    *("span", "p"),
}


def test_a_page_runs_nothing_whatever_the_conversation_spells():
    assert len(PAYLOADS) == 50
    for payload in PAYLOADS:
        tokenizer, state, _ = answered(payload, name=payload)
        call = {
            "role": "assistant",
            "content": payload,
            "tool_calls": [{"function": {"name": payload, "arguments": {payload: payload}}}],
        }
        pages = [
            conversation_html(state, tokenizer=tokenizer, rewards=[1.0]),
            History.from_chats([[call], [{"role": "tool", "content": payload}]]).to_html(),
        ]
        for page in pages:
            parsed = Page()
            parsed.feed(page)
            assert {tag for tag, _ in parsed.elements} <= ALLOWED
            for _, attributes in parsed.elements:
                assert not any(n.startswith("on") or n in ("src", "href") for n in attributes)
            policies = [a["content"] for _, a in parsed.elements if "http-equiv" in a]
            assert len(policies) == 1
            assert policies[0].startswith("default-src 'none'")
            assert "unsafe" not in policies[0]


def test_a_page_tells_what_a_token_is():
    tokenizer, state, ids = answered("a < b")
    page = conversation_html(state, tokenizer=tokenizer, rewards=[0.5])
    assert f'title="id {ids[-1]}, log-prob -0.25, policy version 7">&lt;|im_end|&gt;' in page
    assert "<pre>a &lt; b</pre>" in page
    assert "reward: 0.5" in page
    with pytest.raises(ValueError, match="1 rows, but 2 rewards"):
        conversation_html(state, rewards=[1, 2])


def test_the_style_sheet_is_the_one_that_the_policy_allows():
    import base64
    import hashlib

    page = History.from_chats([{"role": "user", "content": "x"}]).to_html()
    (style,) = re.findall(r"<style>(.*)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in page


# TextHistory --------------------------------------------------------------------------------------


def test_segments_of_a_text_history():
    history = TextHistory("What is 2+2?", torch.tensor([1, 2]))
    history.append_segment("4", torch.tensor([3, 4, 5]), system=False)
    history.append_segment("Right.", torch.tensor([6]))
    assert history.text == "What is 2+2?4Right."
    assert history.text_spans == [(0, 12), (12, 13), (13, 19)]
    assert history.token_spans == [(0, 2), (2, 5), (5, 6)]
    assert history.system_spans == [True, False, True]
    assert history.token_masks.tolist() == [0, 0, 1, 1, 1, 0]
    assert history.last_text_segment == "Right."
    query, response, mask = history.split_query_response_tokens()
    assert (query.tolist(), response.tolist(), mask.tolist()) == (
        [1, 2],
        [3, 4, 5, 6],
        [1, 1, 1, 0],
    )
    history.complete(truncated=True)
    assert history.completed
    assert history.truncated
    for text, tokens in (("", torch.tensor([1])), ("x", torch.tensor([])), ("x", None)):
        with pytest.raises(ValueError, match="needs text and tokens"):
            history.append_segment(text, tokens)
    with pytest.raises(ValueError, match="no segment"):
        TextHistory().split_query_response_tokens()


@pytest.mark.parametrize("segments", [0, 1, 3])
def test_a_text_history_is_shown_whatever_its_length(segments):
    history = TextHistory()
    for i in range(segments):
        history.append_segment(f"part {i}", torch.tensor([i]), system=i % 2 == 0)
    history.complete()
    out = console()
    history.show_text(show_legend=True, console=out)
    history.show_tokens(chatml_tokenizer(), console=out)
    text = out.file.getvalue()
    assert all(f"part {i}" in text for i in range(segments))
    assert "reward" not in text, "none was given"
    assert all(word in text for word in ("prompt", "system", "model"))
    history.reward = 0.0
    history.show_text(console=out)
    assert "reward: 0" in out.file.getvalue()


def test_a_text_history_of_a_conversation():
    tokenizer, state, ids = answered()
    history = TextHistory.from_conversations(state, 0, tokenizer, reward=2.0)
    assert history.tokens.tolist() == state.ids(0)
    assert history.token_masks.bool().tolist() == state.assistant_mask(0).tolist()
    assert history.system_spans == [True, False]
    assert history.last_text_segment == "Déjà vu 😀<|im_end|>"
    assert history.reward == 2.0
    assert TextHistory.from_conversations(state, 0, tokenizer, reward=torch.ones(1)).reward == 1.0
    assert history.token_spans[1][1] - history.token_spans[1][0] == len(ids)


def test_rows_of_a_collector_are_refused_with_what_shows_them():
    _, state, _ = answered()
    (row,) = row_tensordicts(state)
    words = r'takes Conversations, got TensorDict. Rows .* by rows\["history", "full"\].show'
    for show in (show_conversation, conversation_html):
        with pytest.raises(TypeError, match=f"{show.__name__} {words}"):
            show(row)
