"""The tokens of a conversation, whatever its content spells, for every built-in template.

The references are transformers' own rendering and tokenizing, never our renderer.
"""

from functools import cache
from itertools import groupby
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers_for_tests import EXAMPLES, FORGERY_EXAMPLES, TEMPLATE_TOKENIZERS

from torchrl_data import ConversationEncoder, Conversations, Source, builtin_template
from torchrl_data.conversation import Turn
from torchrl_data.templates import encoder as encoder_module

pytestmark = pytest.mark.hypothesis  # their properties are inside
TEMPLATES = sorted(TEMPLATE_TOKENIZERS)

QUESTION = [{"role": "user", "content": "x"}]


@cache
def encoder_of(template):
    tokenizer = TEMPLATE_TOKENIZERS[template]()
    tokenizer.chat_template = builtin_template(template)
    return ConversationEncoder(tokenizer)


def hf_text(encoder, chat, **options):
    return encoder.tokenizer.apply_chat_template(chat, tokenize=False, **options)


def hf_ids(encoder, chat, **options):
    return encoder.tokenizer.apply_chat_template(chat, return_dict=False, **options)


def controls_of(encoder):
    return sorted(encoder.guard.control_ids)


ODD = [
    "\ua720",
    "\ua721",
    "\ua7200\ua721",
    "\ue000",
    "\x00",
    "é",
    "e\u0301",
    "😀",
    "漢字",
    "\u200d",
]
PLAIN = [
    "hello",
    " ",
    "\n",
    "\n\n",
    "assistant\n",
    "User:",
    "Assistant:",
    "{%",
    "}}",
    '"',
    "\\",
    "7",
]


@cache
def evil_pieces(template):
    """Control tokens, halves of them, white space, emoji, marks, and the escapes themselves."""
    controls = controls_of(encoder_of(template))
    halves = [c[:n] for c in controls for n in (1, len(c) // 2, len(c) - 1)]
    tails = [c[n:] for c in controls for n in (1, len(c) // 2)]
    return [*controls, *halves, *tails, *ODD, *PLAIN]


def evil_text(template):
    pieces = st.sampled_from(evil_pieces(template))
    return st.lists(pieces, max_size=6).map("".join)


def evil_chat(template, seed):
    """As ``chats`` makes them, but drawn at once, for speed."""
    random = Random(seed)

    def content():
        return "".join(random.choices(evil_pieces(template), k=random.randint(0, 6)))

    messages = [{"role": "system", "content": content()}] * random.randint(0, 1)
    for _ in range(random.randint(1, 3)):
        messages.append({"role": "user", "content": content()})
        messages.append({"role": "assistant", "content": content()})
    return messages


def chats(template, content):
    """Conversations whose roles the template knows."""
    first = st.lists(st.just("system"), max_size=1)
    # Templates of plain words and Mistral want turns in turn.
    pairs = st.lists(st.tuples(content, content), min_size=1, max_size=3)

    def build(system, system_content, turns):
        messages = [{"role": role, "content": system_content} for role in system]
        for question, answer in turns:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        return messages

    return st.builds(build, first, content, pairs)


def model_runs(encoded):
    """Ids of each run of tokens that the assistant wrote."""
    pairs = zip(encoded.ids, encoded.sources, strict=True)
    groups = groupby(pairs, key=lambda pair: pair[1] == Source.MODEL)
    return [[i for i, _ in group] for is_model, group in groups if is_model]


def answer_text(template, answer, end):
    thought = "\n<think></think>" + ("\n" if answer else "")
    before = {"glm": thought, "mistral": " ", "deepseek": " ", "falcon": " "}
    return before.get(template, "") + answer + end


@pytest.mark.parametrize("template", TEMPLATES)
def test_content_never_becomes_a_control_token(template):
    encoder = encoder_of(template)
    control = set(encoder.guard.control_ids.values())

    @FORGERY_EXAMPLES
    @given(st.integers(0, 2**32))
    def holds(seed):
        chat = evil_chat(template, seed)
        (encoded,) = encoder.encode_chats([chat])
        innocent = [{**message, "content": "x"} for message in chat]
        expected = [i for i in hf_ids(encoder, innocent) if i in control]
        assert [i for i in encoded.ids if i in control] == expected
        if template == "mistral":
            return  # its tokenizer has no inverse: word marks at the beginning
        assert encoder.tokenizer.decode(encoded.ids) == hf_text(encoder, chat)
        end = encoder.tokenizer.decode([encoder.end_of_turn_id])
        answers = [m["content"] for m in chat if m["role"] == "assistant"]
        assert [encoder.tokenizer.decode(run) for run in model_runs(encoded)] == (
            [answer_text(template, answer, end) for answer in answers]
        )

    holds()


WORDS = st.lists(
    st.sampled_from(["hello", "the fox", "déjà vu", "2 + 2?", "jumps,\nover", "it is 4."]),
    min_size=1,
    max_size=5,
).map(" ".join)


@pytest.mark.parametrize("template", TEMPLATES)
def test_benign_ids_are_those_of_apply_chat_template(template):
    encoder = encoder_of(template)

    @EXAMPLES
    @given(chats(template, WORDS), st.booleans())
    def holds(chat, prompt):
        chat = chat[: -1 if prompt else None]
        (encoded,) = encoder.encode_chats([chat], add_generation_prompt=prompt)
        assert encoded.ids == hf_ids(encoder, chat, add_generation_prompt=prompt)

    holds()


@pytest.mark.parametrize("template", TEMPLATES)
def test_conversation_grows_by_the_tokens_that_were_sampled(template):
    """Sampled ids may be anything, control tokens too, and may lack the end of turn."""
    encoder = encoder_of(template)
    control = set(encoder.guard.control_ids.values())
    size = len(encoder.tokenizer)
    end = encoder.end_of_turn_id
    sampled = st.tuples(st.lists(st.integers(0, size - 1), max_size=5), st.booleans())

    @EXAMPLES
    @given(st.lists(st.tuples(evil_text(template), sampled), min_size=1, max_size=4))
    def holds(turns):
        state = Conversations.from_messages([[{"role": "user", "content": turns[0][0]}]])
        expected_mask = []
        for turn, (_, (ids, closes)) in enumerate(turns):
            before = state.ids(0)
            state = encoder.encode_waiting(state)
            assert state.ids(0)[: len(before)] == before
            expected_mask += [False] * (state.num_tokens(0) - len(before))
            added = state.ids(0)[len(before) :]
            if turn:
                closed = before[-1] == end
                assert [i for i in added if i in control] == (
                    ([] if closed else [end]) + delta_controls(encoder)
                )
            else:
                innocent = hf_ids(encoder, QUESTION, add_generation_prompt=True)
                assert [i for i in added if i in control] == [i for i in innocent if i in control]
            ids = [*ids, end] if closes or not ids else ids
            answer = {"role": "assistant", "content": "whatever it spells"}
            state = state.append_turns([Turn(ids, [-0.5] * len(ids), answer)])
            expected_mask += [True] * len(ids)
            assert state.ids(0)[-len(ids) :] == ids
            if turn + 1 < len(turns):
                content = turns[turn + 1][0]
                state = state.append_messages([[{"role": "user", "content": content}]])
        assert state.assistant_mask(0).tolist() == expected_mask

    holds()


@cache
def delta_controls(encoder):
    """Control ids that one more question adds to an answered one."""
    control = set(encoder.guard.control_ids.values())
    answered = [*QUESTION, {"role": "assistant", "content": "x"}]
    before = [i for i in hf_ids(encoder, answered) if i in control]
    after = hf_ids(encoder, [*answered, *QUESTION], add_generation_prompt=True)
    return [i for i in after if i in control][len(before) :]


@pytest.mark.parametrize("template", TEMPLATES)
def test_delta_is_what_the_whole_conversation_would_add(template):
    """The new tokens of a turn are the tail of the whole conversation's."""
    encoder = encoder_of(template)

    @EXAMPLES
    @given(chats(template, WORDS), WORDS)
    def holds(chat, question):
        new = {"role": "user", "content": question}
        (answered,) = encoder.encode_chats([chat])
        start = Conversations.from_messages([chat[:-1]])
        state = encoder.encode_waiting(start)
        prompt = state.num_tokens(0)
        last = len(answered.ids) - answered.sources[::-1].index(Source.MODEL)
        ids = answered.ids[prompt:last]
        state = state.append_turns([Turn(ids, [0.0] * len(ids), chat[-1])])
        state = encoder.encode_waiting(state.append_messages([[new]]))
        assert state.ids(0) == hf_ids(encoder, [*chat, new], add_generation_prompt=True)

    holds()


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_row_has_the_tokens_that_it_has_alone(template):
    """Whatever its neighbours sampled, and whether they ended their turn."""
    encoder = encoder_of(template)
    end = encoder.end_of_turn_id
    turn = st.tuples(
        st.lists(st.integers(0, len(encoder.tokenizer) - 1), max_size=3), st.booleans()
    )

    def grow(turns):
        state = encoder.encode_waiting(Conversations.from_messages([QUESTION] * len(turns)))
        sampled = [[*ids, end] if closes or not ids else ids for ids, closes in turns]
        answer = {"role": "assistant", "content": "x"}
        state = state.append_turns([Turn(ids, [-0.5] * len(ids), answer) for ids in sampled])
        state = encoder.encode_waiting(state.append_messages([QUESTION] * len(turns)))
        return [state.ids(i) for i in range(len(turns))]

    @EXAMPLES
    @given(st.lists(turn, min_size=2, max_size=3))
    @example([([end], False), ([0], False)])
    @example([([0], False), ([end], False)])
    def holds(turns):
        assert grow(turns) == [grow([turn])[0] for turn in turns]

    holds()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("template", TEMPLATES)
def test_an_answer_that_was_given_is_not_trained(template, compiled, monkeypatch):
    """An example of an assistant's turn in the prompt was not sampled, however it is rendered."""
    if not compiled:
        monkeypatch.setattr(encoder_module, "MAX_OPENINGS", 0)
    encoder = ConversationEncoder(encoder_of(template).tokenizer)
    shown = [*QUESTION, {"role": "assistant", "content": "y"}, *QUESTION]
    state = encoder.encode_waiting(Conversations.from_messages([shown]))
    assert state.ids(0) == hf_ids(encoder, shown, add_generation_prompt=True)
    assert not state.assistant_mask(0).any()


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_turn_that_comes_as_text_has_its_end_once(template):
    encoder = encoder_of(template)
    end = encoder.end_of_turn_id
    spelled = encoder.tokenizer.convert_ids_to_tokens(end)
    plain = encoder.guard.encode_texts(["it is 4."])[0]

    assert encoder.encode_turn("it is 4.") == (plain, "it is 4.")
    closed = ([*plain, end], "it is 4.")
    assert encoder.encode_turn("it is 4.", close=True) == closed
    assert encoder.encode_turn(f"it is 4.{spelled}") == closed
    assert encoder.encode_turn(f"it is 4.{spelled}", close=True) == closed
    assert encoder.encode_turn("", close=True) == ([end], "")
    inside = encoder.encode_turn(f"it{spelled}is", close=True)[0]
    assert inside.index(end) == len(inside) - 1  # within the text it is text

    assert encoder.decode_responses([[*plain, end], plain, [end, *plain], [end], []]) == [
        encoder.decode([plain])[0],
        encoder.decode([plain])[0],
        encoder.decode([[end, *plain]])[0],
        "",
        "",
    ]
