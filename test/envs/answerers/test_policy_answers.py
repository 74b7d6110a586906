"""A policy that answers questions goes on from the tokens of what it was asked before."""

import pickle

from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_data.batched_object import write_objects
from torchrl_data.conversation import EncodedMessages, Turn
from torchrl_data.conversation_io import read_conversations, write_conversations
from torchrl_data.keys import FINISH_REASON, FULL, PROMPT
from torchrl_envs import PolicyAnswers


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def test_what_goes_on_continues_and_what_differs_begins_anew(scripted):
    policy = scripted(["One.", "Two.", "Three."])
    answers = PolicyAnswers(policy)
    assert answers([[user("a")]]) == ["One."]
    known = [user("a"), said("One.")]
    # Two that go on from the same place, and one whose past is another one.
    other = [user("a"), said("Uno."), user("b")]
    asked = [[*known, user("b")], [*known, user("c")], other]
    assert answers(asked) == ["Two.", "Two.", "One."]
    served = [(prompt, turn.ids) for prompt, turn in policy.engine.served]
    begun = (*served[0][0], *served[0][1])
    assert [prompt[: len(begun)] == begun for prompt, _ in served[1:]] == [True, True, False]


def says_all(batch):
    """A policy whose answer says how long the conversation is, and how it ends."""
    chats = read_conversations(batch, PROMPT, who="test")
    texts = ["/".join(m["content"] for m in chats.messages(row)) for row in range(len(chats))]
    turns = [Turn([1], [0.0], said(f"<{len(text)}:{text[-9:]}>")) for text in texts]
    encoded = chats.append_encoded([EncodedMessages([], [])] * len(chats))
    write_conversations(batch, FULL, encoded.append_turns(turns))
    write_objects(batch, FINISH_REASON, ["stop"] * len(chats))
    return batch


@settings(max_examples=30)
@given(st.integers(0, 3), st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_answers_do_not_depend_on_what_is_remembered(max_remembered, asked):
    def ask_all(answers):
        chats, told = {}, []
        for number in asked:
            chat = [*chats.get(number, ()), user(f"{number}?")]
            (text,) = answers([chat])
            chats[number] = [*chat, said(text)]
            told.append(text)
        return told

    few = PolicyAnswers(says_all, max_remembered=max_remembered)
    copy = pickle.loads(pickle.dumps(few))
    assert ask_all(few) == ask_all(copy) == ask_all(PolicyAnswers(says_all))
    assert len(few._known) <= max_remembered


def test_conversations_of_two_streams_are_two(scripted):
    """Where the same was said in both, each goes on with random numbers of its own."""
    streams = []

    def policy(batch):
        chats = read_conversations(batch, PROMPT, who="test")
        streams.append([chats.stream(row) for row in range(len(chats))])
        return says_all(batch)

    answers = PolicyAnswers(policy)
    said_twice = answers([[user("a")]] * 2, streams=[7, 8])
    known = [[user("a"), said(text), user("b")] for text in said_twice]
    answers(known[::-1], streams=[8, 7])
    answers(known[:1], streams=[9])
    answers(known[:1])
    assert streams == [[7, 8], [8, 7], [9], [None]]
