"""Rows of an episode as a tree: each sampled token trained once, with the gradient of its row."""

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tensordict import lazy_stack

from collectors.trajectory_rows import trajectory_rows
from objectives import GRPOLoss
from torchrl_data import ConversationEncoder, Conversations
from torchrl_data.conversation import Turn
from torchrl_envs import Episode
from torchrl_envs.agents.branches import Branches
from torchrl_envs.agents.turns import TurnRequest
from torchrl_envs.entries.rewards import RowReward
from torchrl_envs.episode.episode_entries import batch_of_ended
from torchrl_envs.rewards.finished_episodes import finished_episodes
from torchrl_modules.scoring.scorer import PackedScorer

CALL = {"id": "c", "type": "function", "function": {"name": "ask", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "ask", "parameters": {"type": "object"}}}


class Played:
    """An episode that a program drives; the policy's turns are spelled letter by letter."""

    def __init__(self, tokenizer):
        self.encoder = ConversationEncoder(tokenizer)
        self.episode, self.branches = Episode(), Branches(self.encoder.encode_waiting)
        self.num_drawn = 0
        self.read = {}
        """The ids that were read and drawn, by the conversation that they spell."""

    def ask(self, messages, text, *, tools=None, calls=False, agent=""):
        """A request and its answer, which is drawn as tokens that no tokenizer would give."""
        request = TurnRequest(messages, tools, None, agent=agent)
        if self.num_drawn:
            self.branches.go_on(self.episode, request)
        else:
            self.branches.begin(self.episode, request)
            self.episode.conversation = Conversations.from_messages([messages], [tools])
        opened = self.encoder.encode_waiting(self.episode.conversation)
        self.check_read(opened.ids(0), messages, tools)
        ids = [i for letter in text for i in self.encoder.guard.encode_texts([letter])[0]]
        ids.append(self.encoder.end_of_turn_id)
        # Each drawn token has a log-prob of its own, by which it is found again.
        log_probs = [-(self.num_drawn + n + 1) / 1024 for n in range(len(ids))]
        self.num_drawn += len(ids)
        turn, reply = Turn(ids, log_probs, said(text), versions=0), said(text, calls=calls)
        self.episode.conversation = opened.append_turns([turn])
        self.branches.add_reply(reply)
        self.read.setdefault(self.key([*messages, reply], tools), []).append([*opened.ids(0), *ids])

    @staticmethod
    def key(messages, tools):
        told = ((m["role"], m["content"], bool(m.get("tool_calls"))) for m in messages)
        return str(tools), *told

    def check_read(self, ids, messages, tools):
        """What the policy has said is read with the tokens that it was said with."""
        for size in range(len(messages) - 1, 0, -1):
            if before := self.read.get(self.key(messages[:size], tools)):
                assert any(ids[: len(each)] == each for each in before)
                return

    def rows(self, reward=1.0):
        self.episode.score.add("r", RowReward(reward))
        self.episode.terminate("done")
        self.episode.num_turns = 1
        ((*rows,),) = trajectory_rows(batch_of_ended([self.episode], ["r"]), [0])
        return rows


def user(text):
    return {"role": "user", "content": text}


def said(text, *, calls=False):
    return {"role": "assistant", "content": text} | ({"tool_calls": [CALL]} if calls else {})


def system(text):
    return {"role": "system", "content": text}


def played_at_random(tokenizer, seed, size):
    """Goes on, forks, asks again, edits, begins anew and changes the agent, at random."""
    rng, played = random.Random(seed), Played(tokenizer)
    known = [([], None)]
    for _ in range(size):
        messages, tools = rng.choice(known[-4:])
        messages = list(messages)
        if rng.random() < 0.3:
            messages = messages[: rng.randrange(0, len(messages) + 1)]
        if rng.random() < 0.2 and len(messages) > 2:  # without a turn of the policy's
            messages = [m for m in messages if m["role"] != "assistant" or rng.random() < 0.5]
        if rng.random() < 0.2:
            tools = rng.choice([None, [TOOL]])
        if messages and messages[-1]["role"] == "user":
            messages = messages[:-1]
        if not messages and rng.random() < 0.5:
            messages = [system(rng.choice(["You plan.", "You solve."]))]
        asked, answer = [*messages, user(rng.choice("ab"))], rng.choice(["x", "ya", "it"])
        calls = rng.random() < 0.3
        played.ask(asked, answer, tools=tools, calls=calls)
        known.append(([*asked, said(answer, calls=calls)], tools))
    return played


@example(seed=0, size=12)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 14))
def test_each_drawn_token_is_trained_in_one_row_of_the_tree(chatml_tokenizer, seed, size):
    played = played_at_random(chatml_tokenizer, seed, size)
    rows = played.rows()
    log_probs = [
        value
        for row in rows
        for value in row["log_probs", "full"][row["masks", "all_assistant_mask"]].tolist()
    ]
    drawn = [-(n + 1) / 1024 for n in range(played.num_drawn)]
    assert sorted(log_probs) == sorted(drawn)
    begun = [int(row["masks", "all_assistant_mask"].long().argmax()) for row in rows]
    parents = [int(row["parent_segment"]) for row in rows]
    assert parents.count(-1) == 1
    for number, (row, parent) in enumerate(zip(rows, parents, strict=True)):
        assert (row["row_kind"] == "main") == (parent == -1)
        assert row["agent"] in {"You plan.", "You solve.", "agent", "agent with ask"}
        shared = int(row["parent_tokens"])
        if row["row_kind"] == "parallel":  # what both begin with, and not a token less
            mine, theirs = row["tokens", "full"], rows[parent]["tokens", "full"]
            assert mine[:shared].tolist() == theirs[:shared].tolist()
            ends = shared == min(begun[number], len(theirs))
            assert ends or mine[shared] != theirs[shared]
        seen = {number}  # every row leads to the first one
        while parents[number] != -1:
            number = parents[number]
            assert number not in seen
            seen.add(number)
    (again, _), *rest = finished_episodes(rows, "test")
    assert not rest
    assert again.row_places() == played.episode.row_places()
    kinds = [(origin.kind, origin.agent) for origin in played.episode.origins]
    assert [(origin.kind, origin.agent) for origin in again.origins] == kinds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(seed=3, size=10)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 10))
def test_the_gradient_of_a_tree_is_that_of_separate_rows(
    make_tiny_model, chatml_tokenizer, dtype, seed, size
):
    """Beginnings that rows share are computed once, and each row has an advantage of its own."""
    rows = played_at_random(chatml_tokenizer, seed, size).rows()
    for number, row in enumerate(rows):
        row["advantage"] = torch.tensor([[1.0 - 0.4 * number]])
    model = make_tiny_model().to(dtype)
    values, gradients = [], []
    for share, parts in ((True, [rows]), (False, [[row] for row in rows])):
        scorer = PackedScorer(model, share_prefixes=share)
        loss = GRPOLoss(scorer, aggregation="sequence_sum", old_policy="current")
        model.zero_grad()
        objectives = [len(part) * loss(lazy_stack(part)).loss_objective for part in parts]
        torch.stack(objectives).sum().backward()
        values.append(float(sum(objectives).detach()))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    tree, apart = gradients
    assert apart.norm() > 0
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    assert (tree - apart).norm() / apart.norm() < 1e-6  # norms are computed in float32 throughout


def tree_of(played):
    """Kind, author, parent and the first thing asked that is not the parent's."""
    origins = played.episode.origins
    places = [parent for parent, _ in played.episode.row_places()]
    return {
        row.messages(0)[row.first_response(0)]["content"]: (
            *(origin.kind, origin.agent),
            None if place < 0 else places_text(played, place),
        )
        for row, origin, place in zip(played.episode.rows, origins, places, strict=True)
    }


def places_text(played, place):
    row = played.episode.rows[place]
    return row.messages(0)[row.first_response(0)]["content"]


def test_how_rows_begin_and_who_writes_them(chatml_tokenizer):
    """A main agent asks two helpers, samples two ways on from one turn, and is summarised."""
    played, task = Played(chatml_tokenizer), [system("You lead.\nToday is Monday."), user("task")]
    one, two = said("one", calls=True), said("two", calls=True)
    played.ask(task, "one", calls=True)
    helper = [system("You help."), user("first")]
    played.ask(helper, "two", calls=True)  # it runs a tool, while the other one asks
    played.ask([system("You help."), user("second")], "three")
    deeper = [system("You look."), user("look")]
    played.ask(deeper, "four")  # of the helper that waits
    played.ask([*helper, two, user("done")], "five")
    back = [*task, one, user("results")]
    played.ask(back, "six")
    played.ask([*task, one, user("other results")], "seven")
    played.ask([*back, said("six"), user("summarise")], "all in all")
    played.ask([task[0], user("Before: all in all. Go on.")], "eight")
    played.ask([*task, user("without a turn")], "nine")
    played.ask(task, "ten", agent="by header")
    assert tree_of(played) == {
        "one": ("main", "You lead.", None),
        "two": ("sub_agent", "You help.", "one"),
        "three": ("sub_agent", "You help.", "one"),
        "four": ("sub_agent", "You look.", "two"),
        "seven": ("parallel", "You lead.", "one"),
        "eight": ("compaction", "You lead.", "one"),
        "nine": ("compaction", "You lead.", "one"),
        "ten": ("sub_agent", "by header", "nine"),
    }
    rows = {row.messages(0)[row.first_response(0)]["content"]: row for row in played.episode.rows}
    seven = rows["seven"]
    left_at = dict(zip(rows, played.episode.row_places(), strict=True))["seven"][1]
    # The header of the user's message is shared too: they differ in its first word.
    text = chatml_tokenizer.decode(seven.ids(0)[:left_at])
    assert text.endswith("one<|im_end|>\n<|im_start|>user\n")
    assert not seven.assistant_mask(0)[:left_at].any()
    assert rows["one"].assistant_mask(0)[:left_at].any()


def test_a_request_that_was_asked_again_shares_its_prompt_and_no_more(chatml_tokenizer):
    """Both draw the same first token, which is drawn twice and trained twice."""
    played = Played(chatml_tokenizer)
    for answer in ("aa", "ab"):
        played.ask([user("x")], answer)
    first, second = played.rows()
    prompt = int(second["masks", "all_assistant_mask"].long().argmax())
    assert second["row_kind"] == "parallel"
    assert int(second["parent_tokens"]) == prompt
    pairs = list(pairwise([first, second]))
    assert all(a["tokens", "full"][prompt] == b["tokens", "full"][prompt] for a, b in pairs)
