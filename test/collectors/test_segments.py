"""An episode whose past is rewritten is several rows, and each sampled token is in one of them."""

from itertools import chain

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from tensordict import lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import LLMCollector
from objectives import GRPOLoss, MCAdvantage
from torchrl_agents.collection import rollout_buffer
from torchrl_data import row_state, write_conversations
from torchrl_data.conversation import Conversations
from torchrl_data.conversation_io import read_conversations
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    DropReasoning,
    EpisodeTransform,
    FoldContext,
    RewardFunctions,
)
from torchrl_envs.testing.scripted_turns import ScriptedTurns
from torchrl_modules import TransformersWrapper

GROUP = 2


class Asks(EpisodeTransform):
    """A user who answers so many turns."""

    answers_cut_turns = True

    def __init__(self, num_answers):
        super().__init__()
        self.num_answers = num_answers

    def after_turn(self, episode):
        told = episode.memory.get(self.key, 0)
        if told < self.num_answers:
            episode.memory = {**episode.memory, self.key: told + 1}
            episode.say({"role": "user", "content": f"again {told}"})


class FoldsEntries(EpisodeTransform):
    """Rewrites the entries of the batch, as a transform of TorchRL's would."""

    answers_cut_turns = True

    def _step(self, tensordict, next_tensordict):
        prompt = read_conversations(next_tensordict, "prompt", who="test")
        folded = [[{"role": "user", "content": f"in short {i}"}] for i in range(len(prompt))]
        write_conversations(next_tensordict, "prompt", Conversations.from_messages(folded))
        return next_tensordict


class Places(EpisodeTransform):
    """Numbers the tokens of an episode, over all of its segments."""

    def finish(self, episode):
        count = sum(part.num_tokens(0) for part in episode.rows)
        episode.token_entries["place"] = torch.arange(count)


class Recorded:
    """An engine that notes what it sampled, and has other weights at every turn, by its version."""

    def __init__(self, engine):
        self._engine = engine
        self.sampled = []

    @property
    def version(self):
        return len(self.sampled)

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate(self, *args, **kwargs):
        generations = self._engine.generate(*args, **kwargs)
        self.sampled.append(generations)
        return generations


def shorten(messages):
    return f"{len(messages)} messages"


def number_of_turns(completions):
    return [float(sum(m["role"] == "assistant" for m in messages)) for messages in completions]


def collect(model, tokenizer, *transforms, seed=0, size=2 * GROUP, room=None):
    torch.manual_seed(seed)
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 5}, write_tokens=False
    )
    policy.engine = Recorded(policy.engine)
    rows = [{"prompt": f"What is {i} + 2?"} for i in range(size)]
    env = ChatEnv(batch_size=size, tokenizer=tokenizer).append_transform(
        Compose(
            DataLoadingPrimer(rows, group_size=GROUP),
            *transforms,
            RewardFunctions([number_of_turns], completion_format="messages"),
        )
    )
    buffer = rollout_buffer(MCAdvantage(GROUP))  # that of the recipes
    if room is not None:
        buffer = ReplayBuffer(storage=LazyStackStorage(room), transform=MCAdvantage(GROUP))
    try:
        return LLMCollector(env, policy, replay_buffer=buffer).collect(), buffer, policy
    finally:
        env.close()


def test_a_storage_without_room_for_all_rows_of_the_episodes_is_refused(
    make_tiny_model, chatml_tokenizer
):
    """Four episodes, each folded before both of its later turns: twelve rows."""
    parts = (make_tiny_model(), chatml_tokenizer, Asks(2), FoldContext(shorten, max_turns=1))
    with pytest.raises(ValueError, match=r"a batch has 12 rows, and the storage .* holds 4"):
        collect(*parts, room=2 * GROUP)
    rows, buffer, _ = collect(*parts)
    assert len(rows) == len(buffer) == 12


def sampled_ids(row):
    return row["tokens", "full"][row["masks", "all_assistant_mask"]].tolist()


@settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(num_answers=3, max_turns=1, keep_last=1, seed=0)
@given(
    num_answers=st.integers(2, 5),
    max_turns=st.integers(1, 2),
    keep_last=st.integers(0, 2),
    seed=st.integers(0, 100),
)
def test_each_sampled_token_is_trained_once_and_rows_share_reward_and_advantage(
    make_tiny_model, chatml_tokenizer, num_answers, max_turns, keep_last, seed
):
    model = make_tiny_model()
    fold = FoldContext(shorten, max_turns=max_turns, keep_last=keep_last)
    rows, buffer, policy = collect(model, chatml_tokenizer, Asks(num_answers), fold, seed=seed)
    episodes: dict[int, list] = {}
    for row in rows.unbind(0):
        episodes.setdefault(int(row["episode_id"]), []).append(row)
    assert len(episodes) == 2 * GROUP
    # What the engine drew, turn by turn, is what is trained, in order and once.
    drawn = [[g[i].ids for g in policy.engine.sampled] for i in range(2 * GROUP)]
    for own, turns in zip(episodes.values(), drawn, strict=True):
        assert [int(row["segment"]) for row in own] == list(range(len(own)))
        assert list(chain(*map(sampled_ids, own))) == list(chain(*turns))
        versions = torch.cat([row["policy_versions", "full"] for row in own])
        assert versions[versions >= 0].tolist() == [i for i, ids in enumerate(turns) for _ in ids]
        assert {int(row["policy_version"]) for row in own} == {0}  # the one that it began with
        assert len({float(row["reward"]) for row in own}) == 1
        assert float(own[0]["reward"]) == num_answers + 1 == int(own[0]["num_turns"])
        if max_turns == 1 and keep_last < 2:  # folded before every turn but the first
            assert len(own) == num_answers + 1
    advantages = {}
    for row in buffer[:].unbind(0):
        advantages.setdefault(int(row["episode_id"]), set()).add(float(row["advantage"]))
    assert advantages.keys() == episodes.keys()
    assert all(len(values) == 1 for values in advantages.values())
    # The weights have not changed, so what was recorded is what the model gives now.
    loss = GRPOLoss(TransformersWrapper(model, tokenizer=chatml_tokenizer, generate=False))
    with torch.no_grad():
        output = loss(buffer[:])
    torch.testing.assert_close(output.ratio_mean, torch.ones(()), rtol=0, atol=1e-4)


def test_groups_that_wait_go_on_after_a_checkpoint_without_pickle(
    make_tiny_model, chatml_tokenizer, through_files, same
):
    """Real rows, with their conversations; of one episode only some segments were there."""
    rows = list(
        collect(make_tiny_model(), chatml_tokenizer, FoldContext(shorten, max_turns=1), Asks(2))[
            0
        ].unbind(0)
    )
    # The last row of the first group comes after the save, and most of the second group.
    first = [row for row in rows if int(row["group_id"]) == int(rows[0]["group_id"])]
    second = [row for row in rows if int(row["group_id"]) != int(rows[0]["group_id"])]
    before, after = [*first[:-1], second[0]], [first[-1], *second[1:]]
    runs = MCAdvantage(GROUP), MCAdvantage(GROUP)
    assert runs[0].inv(lazy_stack(before)) is None
    runs[1].load_state_dict(through_files(runs[0].state_dict()))
    assert runs[1].stats == runs[0].stats
    assert runs[1].queue.missing() == runs[0].queue.missing()
    released = [run.inv(lazy_stack(after)) for run in runs]
    states = [[row_state(row) for row in out.unbind(0)] for out in released]
    assert len(states[0]) == len(rows) > 2 * GROUP
    assert same(*states)
    with pytest.raises(ValueError, match="have 2 members, these have 3"):
        MCAdvantage(3).load_state_dict(runs[0].state_dict())


def test_a_second_fold_gets_the_first_summary(make_tiny_model, chatml_tokenizer):
    folded = []

    def summarize(messages):
        folded.append([m["content"] for m in messages if m["role"] == "user"])
        return f"summary {len(folded)}"

    rows, _, _ = collect(
        make_tiny_model(),
        chatml_tokenizer,
        Asks(3),
        FoldContext(summarize, max_turns=1, keep_last=1),
        size=GROUP,
    )
    assert folded[:2] == [[], []]  # the turn alone; "again 0" is kept
    assert folded[2][0].startswith("summary")
    assert "again 0" in folded[2]
    last = next(row for row in rows.unbind(0) if int(row["segment"]) == 3)
    contents = list(last["history", "full"].content)
    assert contents[0].startswith("What is 0 + 2?\n\nsummary")
    assert contents[1] == "again 2"


def test_entries_that_are_rewritten_lose_no_token(make_tiny_model, chatml_tokenizer):
    class Twice(FoldsEntries):
        count = 0

        def _step(self, tensordict, next_tensordict):
            self.count += 1
            return super()._step(tensordict, next_tensordict) if self.count < 3 else next_tensordict

    rows, _, policy = collect(make_tiny_model(), chatml_tokenizer, Twice(), size=GROUP)
    assert [int(row["num_segments"]) for row in rows.unbind(0)] == [3] * 3 * GROUP
    assert [len(sampled_ids(row)) for row in rows.unbind(0)] == [
        len(g[i].ids) for i in range(GROUP) for g in policy.engine.sampled
    ]


@pytest.mark.parametrize(
    ("summarize", "error"),
    [
        pytest.param(lambda _: 1 / 0, "ZeroDivisionError", id="it raises"),
        pytest.param(lambda _: None, "TypeError: it returned None", id="it gives no text"),
    ],
)
def test_a_summary_that_fails_ends_its_episode_alone(
    make_tiny_model, chatml_tokenizer, summarize, error
):
    def only_zero(messages):
        return summarize(messages) if "again 0" in str(messages) else "fine"

    class AsksOne(Asks):
        def after_turn(self, episode):
            if episode.row == 0:
                super().after_turn(episode)

    rows, _, _ = collect(
        make_tiny_model(), chatml_tokenizer, AsksOne(2), FoldContext(only_zero, max_turns=2), size=4
    )
    reasons = [row["stop_reason"] for row in rows.unbind(0)]
    assert reasons[0].startswith(f"environment_error: FoldContext: {error}")
    assert reasons[1:] == ["response_length"] * 3 or "answered" in reasons[1:]
    assert rows[0]["scorable"].tolist() == [False]


def test_reasoning_of_earlier_turns_is_dropped_and_trained_once_with_its_values_by_token(
    chatml_tokenizer,
):
    turns = ["<think>\nhm\n</think>\n\nIt is 4.", "<think>\nwell\n</think>\n\nIt is 4.", "done"]
    rows = [{"prompt": "What is 2 + 2?"}]
    env = ChatEnv(batch_size=1, tokenizer=chatml_tokenizer).append_transform(
        Compose(
            DataLoadingPrimer(rows),
            Asks(2),
            DropReasoning(),
            Places(),
            RewardFunctions([number_of_turns], completion_format="messages"),
        )
    )
    rows = LLMCollector(env, ScriptedTurns(chatml_tokenizer, turns)).collect()
    texts = [chatml_tokenizer.decode(sampled_ids(row)) for row in rows.unbind(0)]
    assert texts == [f"{turn}<|im_end|>" for turn in turns]
    full = [chatml_tokenizer.decode(row["tokens", "full"]) for row in rows.unbind(0)]
    assert ["hm" in text for text in full] == [True, False, False]
    assert ["well" in text for text in full] == [False, True, False]
    assert rows["reward"].flatten().tolist() == [3.0] * 3
    places = [row["next", "place"].tolist() for row in rows.unbind(0)]
    assert [len(own) for own in places] == [len(row["tokens", "full"]) for row in rows.unbind(0)]
    numbers = [place for own in places for place in own]
    assert numbers == list(range(len(numbers)))
    env.close()


@pytest.mark.parametrize(
    ("settings_", "error", "match"),
    [
        pytest.param({}, ValueError, "max_turns or max_tokens", id="never"),
        pytest.param({"max_turns": 0}, ValueError, "at least 1", id="no turns"),
        pytest.param({"max_turns": 1, "keep_last": -1}, ValueError, "keep_last", id="negative"),
        pytest.param({"max_turns": 1, "timeout_s": 0}, ValueError, "timeout_s", id="no time"),
    ],
)
def test_settings_that_make_no_sense(settings_, error, match):
    with pytest.raises(error, match=match):
        FoldContext(shorten, **settings_)
