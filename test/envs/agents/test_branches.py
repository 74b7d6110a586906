"""Which conversation a request goes on with, for any requests: against a slow reference."""

import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchrl_data import ConversationEncoder, Conversations
from torchrl_data.conversation import Turn
from torchrl_envs import Episode
from torchrl_envs.agents.branches import Branches
from torchrl_envs.agents.turns import RequestError, TurnRequest, comparable

REFUSED = "not this"
TOOLS = [
    [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]
    for name in ("look", "go")
]


def requests_of(seed, answers):
    """An agent's requests, each made of what it was told before: continued, cut, or begun anew."""
    rng = random.Random(seed)
    known = [([], None)]
    for answer in answers:
        messages, tools = rng.choice(known)
        if rng.random() < 0.3:
            messages = messages[: rng.randrange(0, len(messages) + 1)]
        if messages and messages[-1]["role"] == "user":
            messages = messages[:-1]
        if rng.random() < 0.2:
            tools = rng.choice([None, *TOOLS])
        asked = [*messages, {"role": "user", "content": rng.choice("ab")}]
        yield asked, tools, answer
        known.append(([*asked, {"role": "assistant", "content": answer}], tools))


def reference_rows(requests):
    """Tools, texts and the answers that are trained of each row: the longest that fits goes on.

    It does not where another row shares more turns.
    """
    rows = []
    for messages, tools, answer in requests:
        texts = [message["content"] for message in messages]
        fitting = [
            row
            for row in rows
            if row[0] == tools and row[1] == texts[: len(row[1])] and len(row[1]) < len(texts)
        ]
        row = max(fitting, key=lambda row: len(row[1]), default=None)
        ends = [
            end
            for row in rows
            for end in row[3]
            if row[0] == tools and row[1][:end] == texts[:end] and end < len(texts)
        ]
        if row is None or len(row[1]) < max(ends, default=0):
            row = (tools, [], [], [])
            rows.append(row)
        row[1][:] = [*texts, answer]
        row[2].append(answer)
        row[3].append(len(row[1]))
    return Counter((str(tools), *texts, *trained) for tools, texts, trained, _ in rows)


@settings(max_examples=60, deadline=None)
@example(seed=0, answers=["x"] * 12)
@given(seed=st.integers(0, 10**6), answers=st.lists(st.sampled_from("xy"), min_size=1, max_size=12))
def test_each_answer_is_in_one_row_and_what_fits_goes_on(chatml_tokenizer, seed, answers):
    encoder = ConversationEncoder(chatml_tokenizer)

    def encode(conversation):
        if conversation.last_message(0)["content"] == REFUSED:
            raise RequestError("no prompt")
        # With tokens or without them, as who looks at prompts early has it.
        return encoder.encode_waiting(conversation) if seed % 2 else conversation

    episode, branches = Episode(), Branches(encode)
    requests = list(requests_of(seed, answers))
    for number, (messages, tools, answer) in enumerate(requests):
        request = TurnRequest(messages, tools, None)
        refused = TurnRequest([*messages, {"role": "user", "content": REFUSED}], tools, None)
        with pytest.raises(RequestError):  # as if it had not come
            branches.go_on(episode, refused) if number else branches.begin(episode, refused)
        if number == 0:
            branches.begin(episode, request)
            episode.conversation = Conversations.from_messages([messages], [tools])
        else:
            branches.go_on(episode, request)
        assert list(map(comparable, episode.messages)) == list(map(comparable, messages))
        ids, content = encoder.encode_turn(answer, close=True)
        message = {"role": "assistant", "content": content}
        open_turn = encoder.encode_waiting(episode.conversation)
        # It reads what the whole request reads, whatever of it was sampled.
        (whole,) = encoder.encode_chats([messages], tools=tools, add_generation_prompt=True)
        assert open_turn.ids(0) == whole.ids
        episode.conversation = open_turn.append_turns([Turn(ids, [-1.0] * len(ids), message)])
        branches.add_reply(message)
    found = Counter()
    for row in episode.rows:
        texts = [message["content"] for message in row.messages(0)]
        sampled = row.token_ids(0)[row.assistant_mask(0)].tolist()
        text = encoder.decode([sampled])[0]
        trained = text.replace(encoder.decode([[encoder.end_of_turn_id]])[0], "")
        tools = row.tools(0)
        found[(str(tools and list(tools)), *texts, *trained)] += 1
    assert found == reference_rows(requests)
