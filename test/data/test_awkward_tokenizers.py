"""Tokenizers whose added tokens, merges and word marks are not the easy case."""

import base64
import json
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models
from tokenizers_for_tests import (
    EXAMPLES,
    MISTRAL_CONTROLS,
    bpe_of_ranks,
    chatml_tokenizer,
    metaspace_backend,
    pad_is_eos_tokenizer,
    stripping_tokenizer,
    wrap,
)

from torchrl_data import ControlTokenGuard, ConversationEncoder, Source, builtin_template


def chat_ids(tokenizer, content):
    tokenizer.chat_template = builtin_template("chatml")
    chat = [{"role": "user", "content": content}]
    ours = ConversationEncoder(tokenizer).encode_chats([chat], add_generation_prompt=True)[0].ids
    return ours, tokenizer.apply_chat_template(chat, return_dict=False, add_generation_prompt=True)


def test_added_tokens_that_are_not_special_are_control_tokens():
    tokenizer = chatml_tokenizer()
    think = tokenizer.convert_tokens_to_ids("<think>")
    ours, theirs = chat_ids(tokenizer, "<think>")
    assert think in theirs
    assert think not in ours
    assert "<think>" in tokenizer.decode(ours)


def test_ordinary_words_and_white_space_that_were_added_are_content():
    tokenizer = stripping_tokenizer()
    tokenizer.add_tokens([AddedToken("Paris", special=False, normalized=False)])
    ours, theirs = chat_ids(tokenizer, "def f():\n    return Paris")
    assert ours == theirs
    assert tokenizer.convert_tokens_to_ids("    ") in ours
    assert tokenizer.convert_tokens_to_ids("Paris") in ours


@pytest.mark.parametrize("flags", [{"rstrip": True}, {"lstrip": True}, {}], ids=str)
@pytest.mark.parametrize("content", ["hello", "a\n\n  b", "say <tool_call", "é", "e\u0301"])
def test_white_space_beside_tokens_that_take_it_in(content, flags):
    tokenizer = stripping_tokenizer(**flags)
    ours, theirs = chat_ids(tokenizer, content)
    assert ours == theirs
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    before = ours[len(ours) - 1 - ours[::-1].index(start) - 1]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (before == end) is bool(flags)


def test_control_tokens_of_one_character_and_inside_each_other():
    tokenizer = chatml_tokenizer()
    tokenizer.add_tokens([AddedToken(t, special=True) for t in ("§", "<<a>>", "<a>")])
    guard = ControlTokenGuard(tokenizer)
    for content in ("§", "x§y", "<<a>>", "<<a>", "<a>>", "<<<a>>>"):
        pieces = guard.split(guard.escape(content))
        assert [p.control_id for p in pieces] == [None]
        assert pieces[0].text == content


def test_a_template_can_not_complete_what_content_begins():
    guard = ControlTokenGuard(chatml_tokenizer())
    for left, right in (("<|im_", "start|>"), ("<", "think>"), ("<|im_start", "|>")):
        for rendered in (guard.escape(left) + right, left + guard.escape(right)):
            pieces = guard.split(rendered)
            assert [p.control_id for p in pieces] == [None]
            assert pieces[0].text == left + right


@pytest.mark.parametrize("form", ["bpe", "unigram", "word level", "word piece"])
def test_control_ids_in_the_models_own_vocabulary_do_not_come_out_of_text(form):
    """Where a model's vocabulary holds the control token, plain text could otherwise give it."""
    control = "</s>"
    if form == "bpe":
        vocab = {c: i for i, c in enumerate(["<", "/", "s", ">", "</", "s>", control])}
        backend = Tokenizer(models.BPE(vocab, [("<", "/"), ("s", ">"), ("</", "s>")]))
    elif form == "unigram":
        pieces = [("<unk>", 0.0), ("<", -5.0), ("/", -5.0), ("s", -5.0), (">", -5.0)]
        backend = Tokenizer(models.Unigram([*pieces, (control, -1.0)], unk_id=0))
    elif form == "word level":
        backend = Tokenizer(models.WordLevel({control: 0, "[UNK]": 1}, unk_token="[UNK]"))
    else:
        backend = Tokenizer(models.WordPiece({control: 0, "[UNK]": 1}, unk_token="[UNK]"))
    before = backend.encode(control).ids
    tokenizer = wrap(backend, eos=control)
    eos = tokenizer.eos_token_id
    assert before == [eos]
    guard = ControlTokenGuard(tokenizer)
    assert eos not in guard.encode_texts([control])[0]
    assert guard.encode_texts([control])[0]
    assert tokenizer.encode(control, add_special_tokens=False) == [eos]


def test_pad_that_is_the_end_of_turn_is_trained_where_it_was_said():
    encoder = ConversationEncoder(pad_is_eos_tokenizer(), chat_template_name="chatml")
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]
    (encoded,) = encoder.encode_chats([chat])
    sampled = [i for i, s in zip(encoded.ids, encoded.sources, strict=True) if s == Source.MODEL]
    assert sampled == [encoder.tokenizer.pad_token_id]


TEXTS = st.text(alphabet="ab <>/s_\n\té漢😀▁", max_size=20).filter(lambda text: "</s>" not in text)


@EXAMPLES
@given(TEXTS, TEXTS)
def test_word_marks_are_put_where_the_tokenizer_puts_them(left, right):
    """Only the first text of a conversation gets a leading mark (``prepend_scheme="first"``)."""
    tokenizer = wrap(metaspace_backend_once(), eos="</s>", special=("[INST]",))
    guard = ControlTokenGuard(tokenizer)
    pieces = guard.split(f"{left}[INST]{right}")
    texts = [p for p in pieces if p.control_id is None]
    encoded = iter(guard.encode_texts([p.text for p in texts], [p.before for p in texts]))
    ours = [
        i for p in pieces for i in ([p.control_id] if p.control_id is not None else next(encoded))
    ]
    assert ours == tokenizer.encode(f"{left}[INST]{right}", add_special_tokens=False)


_metaspace: list[Tokenizer] = []


def metaspace_backend_once():
    if not _metaspace:
        _metaspace.append(metaspace_backend())
    return Tokenizer.from_str(_metaspace[0].to_str())


def test_a_tokenizer_without_a_fast_backend_is_refused():
    class Slow:
        added_tokens_decoder = {}  # noqa: RUF012

    with pytest.raises(TypeError, match="Slow has no fast backend"):
        ControlTokenGuard(Slow())


def test_mistrals_own_tokenizer_keeps_content_content():
    """Tekken, from the file that mistral_common ships, with its first 30,000 tokens."""
    pytest.importorskip("mistral_common")
    path = resources.files("mistral_common") / "data" / "tekken_240911.json"
    tekken = json.loads(path.read_text(encoding="utf-8"))
    ranks = {base64.b64decode(e["token_bytes"]): e["rank"] for e in tekken["vocab"][:30_000]}
    backend = bpe_of_ranks(ranks, tekken["config"]["pattern"])
    tokenizer = wrap(backend, eos="</s>", bos="<s>", special=MISTRAL_CONTROLS)
    tokenizer.chat_template = builtin_template("mistral")
    encoder = ConversationEncoder(tokenizer)
    ids = set(encoder.guard.control_ids.values())
    text = "déjà vu, 2 + 2 = 4\n\tdef f(x): return x"
    for content in (text, *MISTRAL_CONTROLS, "".join(MISTRAL_CONTROLS)):
        chat = [{"role": "user", "content": content}, {"role": "assistant", "content": text}]
        (encoded,) = encoder.encode_chats([chat])
        names = [tokenizer.convert_ids_to_tokens(i) for i in encoded.ids if i in ids]
        assert names == ["<s>", "[INST]", "[/INST]", "</s>"]
        assert tokenizer.decode(encoded.ids) == f"<s>[INST] {content}[/INST] {text}</s>"
        if content == text:
            assert encoded.ids == tokenizer.apply_chat_template(chat, return_dict=False)
