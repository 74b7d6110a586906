"""How an episode ends: one table, whichever collector runs it and wherever the counter stands."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import Transform

from collectors import LLMCollector, StreamingCollector
from objectives import GRPOLoss, MCAdvantage, TokenFilters
from torchrl_data import FinishReason, StopReason
from torchrl_data.conversation import Conversations
from torchrl_data.stop_reason import end_text, stop_reason_of
from torchrl_envs import (
    AddThinkingPrompt,
    ChatEnv,
    DataLoadingPrimer,
    EpisodeTransform,
    RewardErrorLimit,
    RewardFunctions,
    StepCounter,
    StepEnvironments,
    TokenBudget,
)
from torchrl_envs.episode.episode import Episode
from torchrl_modules import TransformersWrapper

ENDS, GOES_ON = 100.0, -100.0
"""Bias of the end token: every turn is that token alone, or none ever ends."""
COLLECTORS = (LLMCollector, StreamingCollector)


class Steps:
    """Has something to say so many times, and then says how it is over."""

    def __init__(self, num_steps, *end):
        self.left, self.end = num_steps, end

    def reset(self, *, seed=None, options=None):
        return "begin", {}

    def step(self, text):
        self.left -= 1
        return ("more", 1.0, *(self.end if self.left == 0 else (False, False)), {})


class Says(EpisodeTransform):
    """A user who answers once, or does something else to the episode."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def after_turn(self, episode):
        self.act(episode)


class Cuts(Transform):
    """A transform of TorchRL's kind that truncates."""

    def _step(self, tensordict, next_tensordict):
        over = torch.ones_like(next_tensordict["truncated"])
        return next_tensordict.set("truncated", over).set("done", over)


def steps(num_steps, *end):
    return lambda: StepEnvironments(lambda _: Steps(num_steps, *end))


def says(act):
    return lambda: Says(act)


def collect(chatml_tokenizer, make_tiny_model, collector, bias, parts, counter, first, model_len):
    end = chatml_tokenizer.convert_tokens_to_ids("<|im_end|>")
    policy = TransformersWrapper(
        make_tiny_model(),
        tokenizer=chatml_tokenizer,
        generate_kwargs={"max_new_tokens": 6, "logit_bias": {end: bias}},
        max_model_len=model_len,
    )
    env = ChatEnv(batch_size=2, tokenizer=chatml_tokenizer)
    env = env.append_transform(DataLoadingPrimer([{"prompt": "question"}], group_size=2))
    parts = [part() for part in parts]
    if not any(isinstance(part, StepEnvironments) for part in parts):
        number = itertools.count()
        parts.append(RewardFunctions([lambda completions: [next(number) for _ in completions]]))
    parts += [RewardErrorLimit(1.0)]
    if counter:
        parts.insert(0 if first else len(parts), StepCounter(counter))
    for part in parts:
        env = env.append_transform(part)
    buffer = ReplayBuffer(storage=LazyStackStorage(2), transform=MCAdvantage(2), batch_size=2)
    kwargs = {"replay_buffer": buffer, "total_trajectories": 2}
    with collector(env, policy, **kwargs) as collecting:
        rows = collecting.collect()
    return rows, policy, buffer


EVERY = {
    "answered in the last turn": (ENDS, (), 1, StopReason.ANSWERED, -1, "stop"),
    "answered": (ENDS, (), 3, StopReason.ANSWERED, -1, "stop"),
    "cut in the last turn": (GOES_ON, (), 1, StopReason.RESPONSE_LENGTH, 6, "length"),
    "cut": (GOES_ON, (), None, StopReason.RESPONSE_LENGTH, 6, "length"),
    "cut, and the environment would be done": (
        *(GOES_ON, (steps(1, True, False),), 4),
        *(StopReason.RESPONSE_LENGTH, 6, "length"),
    ),
    "no turn left to answer in": (
        *(ENDS, (steps(9, True, False),), 3),
        *(StopReason.MAX_STEPS, 3, "stop"),
    ),
    "done in the last turn": (
        *(ENDS, (steps(3, True, False),), 3),
        *(StopReason.ENVIRONMENT_DONE, -1, "stop"),
    ),
    "the environment truncates": (
        *(ENDS, (steps(2, False, True),), 4),
        *(StopReason.TRUNCATED, -1, "stop"),
    ),
    "the environment fails": (
        *(ENDS, (lambda: StepEnvironments(lambda _: 1 / 0),), 4),
        *(StopReason.ENVIRONMENT_ERROR, -1, ""),
    ),
    "a transform's own words": (
        *(ENDS, (says(lambda episode: episode.terminate("solved")),), 4),
        *(StopReason.ENVIRONMENT_DONE, -1, "stop"),
    ),
    "a transform cuts": (
        *(ENDS, (says(lambda episode: episode.truncate("enough")),), 4),
        *(StopReason.TRUNCATED, -1, "stop"),
    ),
    "to think again with no turn left": (
        *(ENDS, (lambda: AddThinkingPrompt(lambda _: True, "Sure?", max_prompts=9),), 2),
        *(StopReason.ANSWERED, -1, "stop"),
    ),
    "the budget of the episode": (
        *(GOES_ON, (lambda: TokenBudget(max_tokens=5, min_turn_tokens=1),), 4),
        *(StopReason.TOKEN_BUDGET, 5, "length"),
    ),
    "the policy's limit under that budget": (
        *(GOES_ON, (lambda: TokenBudget(max_tokens=50, min_turn_tokens=1),), 4),
        *(StopReason.RESPONSE_LENGTH, 6, "length"),
    ),
}


@pytest.mark.parametrize("first", [True, False], ids=["counter first", "counter last"])
@pytest.mark.parametrize("collector", COLLECTORS)
@pytest.mark.parametrize("case", EVERY)
def test_an_end_is_the_same_everywhere(chatml_tokenizer, make_tiny_model, case, collector, first):
    bias, parts, counter, reason, limit, finished = EVERY[case]
    make = (chatml_tokenizer, make_tiny_model)
    rows, policy, buffer = collect(*make, collector, bias, parts, counter, first, None)
    for row in rows.unbind(0):
        assert row["stop_reason"].partition(":")[0] == reason
        assert (bool(row["truncated"]), bool(row["terminated"]), bool(row["done"])) == (
            reason.is_truncated,
            not reason.is_truncated,
            True,
        )
        assert (row["stop_code"], row["stop_limit"]) == (reason.number, limit)
        assert row["finish_reason"] == finished
        assert bool(row["scorable"]) == reason.is_scorable
        if finished == "length":  # nothing was written after what the policy said
            assert bool(row["masks", "all_assistant_mask"][-1])
    if reason.is_scorable:
        out = GRPOLoss(policy, filters=TokenFilters(drop_truncated=True))(buffer[:])
        assert float(out.kept_fraction) == float(not reason.is_truncated)


@pytest.mark.parametrize("collector", COLLECTORS)
def test_the_models_own_length_is_told_from_the_response_length(
    chatml_tokenizer, make_tiny_model, collector
):
    make = (chatml_tokenizer, make_tiny_model)
    prompt = int((~collect(*make, LLMCollector, GOES_ON, (), 1, False, None)[0][0][
        "masks", "all_assistant_mask"
    ]).sum())  # fmt: skip
    for room, reason, limit in ((5, "context_length", prompt + 5), (6, "response_length", 6)):
        rows, _, _ = collect(*make, collector, GOES_ON, (), 1, False, prompt + room)
        assert rows["stop_reason"] == [reason] * 2
        assert rows["stop_limit"].tolist() == [limit] * 2
        assert len(rows[0]["tokens", "full"]) == prompt + room


def test_a_transform_of_torchrls_that_truncates_is_the_users_cut(chatml_tokenizer, make_tiny_model):
    make = (chatml_tokenizer, make_tiny_model)
    rows, _, _ = collect(*make, LLMCollector, ENDS, (Cuts,), 4, False, None)
    assert (rows["stop_reason"], bool(rows["truncated"].all())) == (["truncated"] * 2, True)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["terminate", "truncate"]),
            st.one_of(st.sampled_from(["", *StopReason]), st.text(min_size=1)),
        ),
        min_size=1,
    ),
    st.sampled_from(["stop", "length", "context_length"]),
)
def test_the_flags_follow_from_the_reason(calls, finish_reason):
    episode = Episode()
    episode.conversation = Conversations.from_messages([[{"role": "assistant", "content": "x"}]])
    episode.num_turns, episode.finish_reason = 1, finish_reason
    for name, reason in calls:
        if name == "truncate" and not stop_reason_of(reason, StopReason.TRUNCATED)[0].is_truncated:
            with pytest.raises(ValueError, match=r"Episode\.truncate: "):
                episode.truncate(reason)
        else:
            getattr(episode, name)(reason)
    ended = episode.is_done
    assert episode.settle() == ended
    if ended:
        kind, text = stop_reason_of(episode.stop_reason, StopReason.TRUNCATED)
        assert text == episode.stop_reason
        assert type(text) is str
        assert (episode.is_truncated, episode.is_terminated) == (
            kind.is_truncated,
            not kind.is_truncated,
        )
        assert kind.is_truncated or finish_reason == "stop"


def test_the_table_of_the_docs_is_that_of_the_code():
    text = (Path(__file__).parents[2] / "docs/environments.md").read_text(encoding="utf-8")
    lines = text.partition("## When an episode ends")[2].partition("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "`" in line]
    told = {
        row[0].strip("`").partition(":")[0]: row
        for row in cells
        if len(row) == 6 and row[1].isdigit()
    }
    assert set(told) == set(StopReason)
    for reason in StopReason:
        _, number, _, flag, trained, kept = told[reason]
        assert int(number) == reason.number
        assert flag == ("truncated" if reason.is_truncated else "terminated")
        assert trained == ("yes" if reason.is_scorable else "no")
        assert kept == ("no" if reason.is_truncated else "yes")


def test_what_is_shown_of_an_end():
    assert end_text("max_steps", 1) == "max_steps (1 turn)"
    assert end_text("error: gone", -1) == "error: gone"
    assert FinishReason.CONTEXT_LENGTH == StopReason.CONTEXT_LENGTH
