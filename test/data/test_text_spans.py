"""Spans of text: any two tokenizers, any text, cut anywhere."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers_for_tests import (
    EXAMPLES,
    byte_level_backend,
    chatml_tokenizer,
    deepseek_tokenizer,
    llama_tokenizer,
    mistral_tokenizer,
    stripping_tokenizer,
    wrap,
)

from torchrl_data import (
    ConversationEncoder,
    Conversations,
    SpanAligner,
    Turn,
    align_spans,
    builtin_template,
)
from torchrl_data.images import noise_image
from torchrl_data.text_spans.spans import TextSpan
from torchrl_data.text_spans.token_bytes import TokenBytes, spelled_text
from torchrl_modules.tiny_model import train_tokenizer

ODD = st.sampled_from(
    ["\U0001f642", "日本語", "é", "e\u0301", "<|im_end|>", "<think>", " ", "\n\n", "▁"]
)
TEXT = st.lists(st.one_of(ODD, st.text(max_size=6)), max_size=6).map("".join)
QUESTION = {"role": "user", "content": "hello, what is 2 + 2?"}


def encoder(tokenizer, template):
    return ConversationEncoder(tokenizer, chat_template_name=template)


ENCODERS = {
    "chatml": encoder(chatml_tokenizer(), "chatml"),
    "tiny": encoder(train_tokenizer(["What is 2 + 2? It is four."] * 8, vocab_size=300), "chatml"),
    "llama": encoder(llama_tokenizer(), "llama"),
    "mistral": encoder(mistral_tokenizer(), "mistral"),
    "deepseek": encoder(deepseek_tokenizer(), "deepseek3"),
    "nfc": encoder(stripping_tokenizer(), "chatml"),
}
SPELLED = {name: TokenBytes(each.tokenizer) for name, each in ENCODERS.items()}


def sampled(student, ids, *, prompt=(QUESTION,), message=None, tools=None):
    """A conversation in which the student sampled a turn of these tokens."""
    message = message or {"role": "assistant", "content": student.decode([ids])[0]}
    opened = student.encode_waiting(Conversations.from_messages([list(prompt)], [tools]))
    return opened.append_turns([Turn(ids, [-1.0] * len(ids), message)])


@EXAMPLES
@given(st.integers(1, 12).flatmap(lambda n: st.tuples(*[st.sets(st.integers(1, n))] * 2)))
def test_groups_are_the_smallest_that_end_together(cuts):
    ends = [sorted(one) for one in cuts]
    spans = align_spans(*ends)
    # By brute force: the bytes where both may be cut, and what each token covers.
    common = [byte for byte in range(1, 13) if all(byte in one for one in cuts)]
    groups = [
        [[i for i, end in enumerate(one) if before < end <= byte] for one in ends]
        for before, byte in zip([0, *common], common, strict=False)
    ]
    assert [
        [list(range(part.start, part.stop)) for part in (span.student, span.teacher)]
        for span in spans
    ] == groups


def test_groups_by_hand():
    """``ab|c|de|fgh`` and ``abc|d|ef|gh``; the last but one, without the bytes of ``d``."""
    student, teacher = [2, 3, 5, 8], [3, 4, 6, 8]
    first, rest = TextSpan(slice(0, 2), slice(0, 1)), TextSpan(slice(2, 4), slice(1, 4))
    assert align_spans(student, teacher) == [first, rest]
    assert align_spans(student, teacher, without=[(3, 4)]) == [first]
    assert align_spans(student, teacher, without=[(2, 3)]) == [rest]
    assert align_spans([2, None, 5], [2, 3, 5]) == [
        TextSpan(slice(0, 1), slice(0, 1)),
        TextSpan(slice(1, 3), slice(1, 3)),
    ]
    nothing = align_spans([0, 1, 1], [1])  # tokens that spell nothing
    assert nothing == [TextSpan(slice(0, 3), slice(0, 1))]


@EXAMPLES
@given(st.binary(max_size=12), st.lists(st.integers(0, 12), max_size=6))
def test_bytes_that_are_no_text(whole, cuts):
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    spelled = spelled_text([whole[a:b] for a, b in pairwise(places)])
    replaced = whole.decode(errors="replace")
    cut_at_end = len(replaced) - len(spelled.text)
    assert replaced == spelled.text + "\ufffd" * cut_at_end
    assert cut_at_end <= 1
    text = spelled.text.encode()
    for end, place in zip(spelled.ends, places[1:], strict=True):
        if end is not None and (end == len(text) or text[end] & 0xC0 != 0x80):
            assert whole[:place].decode(errors="replace").encode() == text[:end]
    for start, stop in spelled.broken:
        assert text[start:stop] == "\ufffd".encode()
    assert len(spelled.broken) == spelled.text.count("\ufffd") - whole.count("\ufffd".encode())


@pytest.mark.parametrize("name", ENCODERS)
@EXAMPLES
@given(text=TEXT)
def test_tokens_spell_what_they_encode(name, text):
    if name == "mistral":
        text = text.replace("▁", "")  # which it can't tell from a space
    ids = ENCODERS[name].guard.encode_texts([text])[0]
    spelled = b"".join(SPELLED[name].of(ids, text=text))
    normal = normalizers.NFC().normalize_str(text) if name == "nfc" else text
    assert spelled == normal.encode()


@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        ("chatml", "llama"),
        ("llama", "chatml"),
        ("tiny", "mistral"),
        ("mistral", "chatml"),
        ("chatml", "tiny"),
        ("tiny", "deepseek"),
        ("llama", "nfc"),
    ],
)
@EXAMPLES
@given(text=TEXT, kept=st.integers(1, 40), stops=st.booleans(), data=st.data())
def test_a_span_has_the_same_bytes_on_both_sides(student, teacher, text, kept, stops, data):
    ours, theirs = ENCODERS[student], ENCODERS[teacher]
    ids = ours.guard.encode_texts([text])[0][:kept]  # cut in the middle of a character
    noise = data.draw(st.lists(st.integers(0, len(ours.tokenizer) - 1), max_size=4))
    if data.draw(st.booleans()):  # whatever is sampled, control tokens too
        ids = [*ids, *noise]
    ids += [ours.end_of_turn_id] if stops or not ids else []
    rows = sampled(ours, ids)
    [row] = SpanAligner(ours, theirs).align(rows)
    start = rows.position(0).response_start
    prompt = theirs.encode_chats([[QUESTION]], add_generation_prompt=True)[0].ids
    assert row.ids[: len(prompt)] == prompt
    ends = [(start, len(prompt)), *((s.student.stop, s.teacher.stop) for s in row.spans)]
    for span, before in zip(row.spans, ends, strict=False):
        mine = ids[span.student.start - start : span.student.stop - start]
        its = row.ids[span.teacher]
        assert mine
        assert its
        assert span.student.start >= before[0]
        assert span.teacher.start >= before[1]
        if mine[-1] in ours.stop_token_ids and span.student.stop == start + len(ids):
            assert (len(mine), its) == (1, [theirs.end_of_turn_id])
            continue
        first = b"".join(SPELLED[student].of(mine, begins=False))
        second = b"".join(SPELLED[teacher].of(its, begins=False))
        # Mistral's may put a space before a text.
        spelled = [
            {part, part.removeprefix(b" ")} if name == "mistral" else {part}
            for name, part in ((student, first), (teacher, second))
        ]
        assert spelled[0] & spelled[1]
    if student != "mistral" and teacher not in ("mistral", "nfc") and not noise:
        # All of a text is taught, but for what follows the last whole character.
        said = b"".join(SPELLED[student].of(ids))
        if said.decode(errors="ignore").encode() == said:
            assert sum(s.student.stop - s.student.start for s in row.spans) == len(ids)


def test_what_is_taught_by_hand():
    """Half of a character between two sentences teaches nothing; they and the end do."""
    ours, theirs = ENCODERS["tiny"], ENCODERS["llama"]
    four = ours.guard.encode_texts(["It is four."])[0]
    [half, *_] = ours.guard.encode_texts(["é"])[0]
    ids = [*four, half, *four, ours.end_of_turn_id]
    [row] = SpanAligner(ours, theirs).align(sampled(ours, ids))
    start = sampled(ours, ids).position(0).response_start
    taught = {i - start for span in row.spans for i in range(span.student.start, span.student.stop)}
    missing = set(range(len(ids))) - taught
    assert len(four) in missing
    assert missing <= {len(four) - 1, len(four), len(four) + 1}, "its neighbours at most"
    assert len(ids) - 1 in taught
    texts = [theirs.decode([row.ids[span.teacher]])[0] for span in row.spans]
    assert texts[0] == "It"
    assert texts[-1] == "<|eot_id|>"
    assert "\ufffd" not in "".join(texts)


def test_control_tokens_of_both_are_one_span_and_others_are_text():
    ours = ENCODERS["chatml"]
    think = ours.tokenizer.convert_tokens_to_ids("<think>")
    ids = [think, *ours.guard.encode_texts(["so"])[0], ours.end_of_turn_id]
    shared = SpanAligner(ours, ENCODERS["deepseek"]).align(sampled(ours, ids))[0]
    its = ENCODERS["deepseek"].tokenizer.convert_tokens_to_ids("<think>")
    assert shared.ids[shared.spans[0].teacher] == [its]
    llama = ENCODERS["llama"]
    spelled = SpanAligner(ours, llama).align(sampled(ours, ids))[0]
    first = spelled.ids[spelled.spans[0].teacher]
    assert len(first) > 1
    assert llama.decode([first]) == ["<think>"]


def test_turns_and_what_tools_say_between_them():
    ours, theirs = ENCODERS["chatml"], ENCODERS["tiny"]
    first = [*ours.guard.encode_texts(["it is"])[0], ours.end_of_turn_id]
    second = ours.guard.encode_texts(["4, I say"])[0]
    rows = sampled(ours, first, message={"role": "assistant", "content": "it is"})
    rows = ours.encode_waiting(rows.append_messages([[{"role": "user", "content": "go on"}]]))
    rows = rows.append_turns(
        [Turn(second, [-1.0] * len(second), {"role": "assistant", "content": "4, I say"})]
    )
    both = Conversations.cat([rows, sampled(ours, first)])
    row, other = SpanAligner(ours, theirs).align(both)
    chat = [
        QUESTION,
        {"role": "assistant", "content": "it is"},
        {"role": "user", "content": "go on"},
    ]
    prompt = theirs.encode_chats([chat], add_generation_prompt=True)[0].ids
    assert row.ids == prompt + theirs.guard.encode_texts(["4, I say"])[0]
    mask = rows.assistant_mask(0)
    taught = [i for span in row.spans for i in range(span.student.start, span.student.stop)]
    assert taught == mask.nonzero().flatten().tolist()
    assert other.ids == row.ids[: len(other.ids)]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_what_can_not_be_aligned_is_named():
    ours = ENCODERS["chatml"]
    ids = [*ours.guard.encode_texts(["so"])[0], ours.end_of_turn_id]
    with_tools = sampled(ours, ids, tools=[TOOL])
    with pytest.raises(ValueError, match=r"Row 0 has tools.*'hermes'.*'llama3'"):
        SpanAligner(ours, ENCODERS["llama"]).align(with_tools)
    image = {"type": "image", "url": f"data:image/png;base64,{noise_image(0)}"}
    picture = {"role": "user", "content": [image]}
    seen = sampled(ours, ids).row(0)
    seen._records[0].messages[0] = picture
    with pytest.raises(ValueError, match="Row 0 has images"):
        SpanAligner(ours, ENCODERS["llama"]).align(seen)
    begun = [QUESTION, {"role": "assistant", "content": "it "}]
    opened = ours.encode_waiting(Conversations.from_messages([begun], goes_on=True))
    going_on = opened.append_turns(
        [Turn(ids, [-1.0] * len(ids), {"role": "assistant", "content": "is"})]
    )
    with pytest.raises(ValueError, match="a turn goes on in a message of the prompt"):
        SpanAligner(ours, ENCODERS["llama"]).align(going_on)
    source = builtin_template("chatml") + "{% if add_generation_prompt %}<think>\n{% endif %}"
    thinks = ConversationEncoder(chatml_tokenizer(), chat_template=source)
    with pytest.raises(
        ValueError, match=r"ends with 'no tag', and that of the teacher's with '<th"
    ):
        SpanAligner(ours, thinks)


def test_vocabularies_whose_bytes_are_not_known():
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
    with pytest.raises(ValueError, match=r"its decoder \(None\) is neither byte-level"):
        TokenBytes(wrap(words, eos="</s>"))
    lower = byte_level_backend()
    lower.normalizer = normalizers.Lowercase()
    with pytest.raises(ValueError, match=r"spell 'a b  c.*A tokenizer that changes text"):
        TokenBytes(wrap(lower, eos="</s>"))
    pieces = Tokenizer(models.BPE({"▁": 0, "a": 1}, [], unk_token=None))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces.decoder = decoders.Metaspace()
    with pytest.raises(ValueError, match="has no token for some of it"):
        TokenBytes(wrap(pieces, eos="</s>"))


def test_ends_of_characters_that_are_cut():
    parts = [b"a", b"\xe6", b"\x97\xa5", b"", b"b\xf0", b"\x9f"]
    spelled = spelled_text(parts)
    assert spelled.text == "a日b"
    assert spelled.ends == [1, 2, 4, 4, None, None]
    assert list(accumulate(map(len, parts)))[:4] == spelled.ends[:4]
