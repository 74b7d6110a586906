"""Transforms that are written as TorchRL's are: they see messages, write entries, give rewards."""

import warnings

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import (
    LazyStackStorage,
    NonTensor,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Unbounded,
)
from torchrl.envs import RewardScaling, RewardSum, Transform
from torchrl.envs.transforms import Compose

from collectors import LLMCollector, OnPolicy, StreamingCollector
from torchrl_data import History
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    EpisodeTransform,
    RetrieveLogProb,
    RewardFunctions,
    StepCounter,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what TorchRL imports
    from torchrl.data.llm import History as HistoryOfTorchRL
    from torchrl.envs.llm.transforms import AddThinkingPrompt
    from torchrl.modules.llm import ChatHistory as ChatHistoryOfTorchRL
    from torchrl.modules.llm import TransformersWrapper as WrapperOfTorchRL
    from torchrl.objectives.llm import MCAdvantage as MCAdvantageOfTorchRL

SAID = [{"role": "user", "content": "say it again"}, {"role": "assistant", "content": "hello"}]
AGAIN = {"role": "user", "content": "again please"}


def said_once(completions):
    return [float(len(messages)) for messages in completions]


def rewards():
    return RewardFunctions([said_once], completion_format="messages")


def collect(policy, *transforms, group_size=2, **settings):
    rows = [{"prompt": "say it again"}, {"prompt": "world"}]
    data = DataLoadingPrimer(rows, group_size=group_size)
    env = ChatEnv(batch_size=4).append_transform(Compose(data, StepCounter(2), *transforms))
    with LLMCollector(env, policy, **settings) as collector:
        return collector.collect()


class Asks(Transform):
    """Adds a message to the first row's conversation, and to no other one."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def _step(self, tensordict, next_tensordict):
        history = next_tensordict["history"].prompt
        nobody = History(role="<none>", content="")  # what TorchRL fills rows up with
        new = lazy_stack([lazy_stack([History(**AGAIN)]), *[lazy_stack([nobody])] * 3])
        if self.how == "in place":
            next_tensordict.get(("history", "prompt")).extend(new, dim=-1)
        else:
            longer = history.extend(new, inplace=False, dim=-1)
            next_tensordict["history"].prompt = longer
        return next_tensordict


@pytest.mark.parametrize("how", ["in place", "set"])
@pytest.mark.parametrize("around", [lambda part: part, lambda part: Begins(part)])
def test_messages_that_are_added_go_on_from_the_sampled_tokens(how, around, scripted):
    policy = scripted(["hello"])
    asked, *others = collect(policy, around(Asks(how)), rewards()).unbind(0)
    assert asked["history", "full"].to_chats() == [*SAID, AGAIN, SAID[1], AGAIN]
    assert asked["num_segments"] == 1
    # Each token that was drawn, where it was drawn, with its log-prob: none was encoded anew.
    ids, mask = asked["tokens", "full"], asked["masks", "all_assistant_mask"]
    (_, first), (prompt, second) = [
        (before, turn)
        for before, turn in policy.engine.served
        if before == (*ids.tolist()[: len(before)],)
    ][-2:]
    assert ids[mask].tolist() == [*first.ids, *second.ids]
    assert ids[len(prompt) :][: len(second.ids)].tolist() == list(second.ids)
    assert asked["log_probs", "full"][mask].tolist() == pytest.approx(
        [*first.log_probs, *second.log_probs]
    )
    assert [row["history", "full"].to_chats()[-1] for row in others] == [SAID[1]] * 3
    assert [row["stop_reason"] for row in (asked, *others)] == ["max_steps"] + ["answered"] * 3


class Rewrites(Transform):
    """Puts other words into the policy's mouth, and asks for more."""

    def _step(self, tensordict, next_tensordict):
        changed = [
            {"role": "user", "content": "world"},
            {"role": "assistant", "content": "4"},
            AGAIN,
        ]
        next_tensordict["history"].prompt = History.from_chats([changed] * 4)
        return next_tensordict

    def _reset(self, tensordict, tensordict_reset):
        first = lazy_stack([History(role="system", content="hello world")])
        rows = [first.extend(row, inplace=False) for row in tensordict_reset["history"].prompt]
        tensordict_reset["history"].prompt = lazy_stack(rows)
        return tensordict_reset


def test_a_conversation_that_is_changed_begins_anew(scripted):
    policy = scripted(["hello"])
    rows = collect(policy, Rewrites(), rewards())
    assert rows["num_segments"].tolist() == [2] * 8
    first, second = rows[0], rows[1]
    assert first["history", "full"].to_chats() == [
        {"role": "system", "content": "hello world"},
        *SAID,
    ]
    assert second["history", "full"].to_chats()[1]["content"] == "4"
    # What the policy did not say is not trained: each row has one turn of it.
    (turn, *_) = [turn for _, turn in policy.engine.served]
    for row in (first, second):
        assert row["tokens", "full"][row["masks", "all_assistant_mask"]].tolist() == list(turn.ids)


class Notes(Transform):
    """Counts steps and writes a word, each declared as an observation."""

    def _step(self, tensordict, next_tensordict):
        next_tensordict["count"] = tensordict["count"] + 1
        return next_tensordict.set("word", ["a", "b", "c", "d"])

    def _reset(self, tensordict, tensordict_reset):
        return tensordict_reset.set("count", torch.zeros(4, 1)).set("word", [""] * 4)

    def transform_observation_spec(self, observation_spec):
        shape = observation_spec.shape
        observation_spec["count"] = Unbounded(shape=(*shape, 1))
        observation_spec["word"] = NonTensor(shape=shape, example_data="")
        return observation_spec


def test_rows_keep_what_transforms_declare(scripted):
    rows = collect(scripted(["hello"]), Asks("set"), Notes(), RewardSum(), rewards())
    assert rows["count"].flatten().tolist() == [2, 1, 1, 1]  # of the step in which each ended
    assert [row["word"] for row in rows.unbind(0)] == ["a", "b", "c", "d"]
    assert rows["episode_reward"].flatten().tolist() == rows["reward"].flatten().tolist()
    assert not {"step_count", "episode", "max_new_tokens"} & set(rows[0].keys())


class Bundle(Compose):
    """Transforms under one name."""

    def __init__(self):
        super().__init__(RewardScaling(loc=1.0, scale=3.0), Compose(RewardSum()))


class Begins(Compose):
    """Does something of its own, and is not taken apart."""

    begun = False

    def _reset(self, tensordict, tensordict_reset):
        self.begun = True
        return super()._reset(tensordict, tensordict_reset)


def test_transforms_of_the_reward_wait_for_it_inside_a_compose_too(scripted):
    begins = Begins(Notes())
    assert collect(scripted(["hello"]), begins, rewards())["count"].tolist() == [[1.0]] * 4
    assert begins.begun
    rows = collect(scripted(["hello"]), Compose(Bundle()), rewards())
    assert rows["reward"].flatten().tolist() == [1.0 * 3.0 + 1.0] * 4
    assert rows["episode_reward"].flatten().tolist() == [4.0] * 4


class Says(EpisodeTransform):
    """Takes part in two events."""

    def begin(self, episode):
        episode.query += "!"

    def after_turn(self, episode):
        episode.say({"role": "user", "content": "go on"})


@pytest.mark.parametrize("how", ["append_transform", "insert_transform", "append", "insert", "pop"])
def test_transforms_may_come_and_go_between_steps(how):
    def texts(step):
        batch = env.reset()
        if step:
            batch = env.step(batch.set("text_response", ["hello"] * 4))["next"]
        chats = batch["history"].prompt.to_chats()
        return [[message["content"] for message in chat] for chat in chats[:2]]

    env = ChatEnv(batch_size=4).append_transform(DataLoadingPrimer([{"prompt": "a"}] * 4))
    env.append_transform(Compose(Says(), Asks("in place")))
    if how != "pop":
        asks, says = env.transform.pop(), env.transform.pop()
        assert texts(step=True) == [["a", "hello"]] * 2
        for part in (says, asks):  # the second reads what the first one said
            place = (len(env.transform),) if "insert" in how else ()
            part.reset_parent()
            getattr(env if "transform" in how else env.transform, how)(*place, part)
    said = ["a!", "hello", "go on"]
    assert texts(step=True) == [[*said, AGAIN["content"]], said]
    assert texts(step=False) == [["a!"]] * 2
    env.transform.pop()
    env.transform.pop()
    assert texts(step=True) == [["a", "hello"]] * 2


def test_a_sum_of_rewards_needs_no_batch(scripted):
    """Groups of two in an environment of four rows: TorchRL's transform begins with all four."""
    data = DataLoadingPrimer([{"prompt": f"<{n}>"} for n in range(4)], group_size=2)
    parts = (data, StepCounter(1), rewards(), RewardSum())
    env = ChatEnv(batch_size=(2, 2)).append_transform(Compose(*parts))
    with StreamingCollector(env, scripted(["hello"]), staleness=OnPolicy()) as collector:
        rows = collector.collect()
    assert rows["episode_reward"].shape == (4, 1, 1)
    assert rows["episode_reward"].tolist() == rows["reward"].tolist()


class Gives(Transform):
    """Gives a reward as TorchRL's parsers do."""

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("reward", torch.full((4, 1, 1), 7.0))

    def transform_reward_spec(self, reward_spec):
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1))
        return reward_spec


def test_a_reward_is_kept_or_refused_where_two_give_one(scripted):
    policy = scripted(["hello"])
    assert collect(policy, Gives())["reward"].flatten().tolist() == [7.0] * 4
    with pytest.raises(ValueError, match=r"\['said_once'\] score the episodes, and so does a tran"):
        collect(policy, Gives(), rewards())


class Adds(Transform):
    """Reads the reward of others, and changes it."""

    def _step(self, tensordict, next_tensordict):
        return next_tensordict.set("reward", next_tensordict["reward"] + 10)


def test_a_transform_that_reads_the_reward_comes_after_it_wherever_it_stands(scripted):
    """`said_once` gives 1: 11 in either order; without `in_keys` it is told how to say so."""
    policy = scripted(["hello"])
    for parts in ((rewards(), Adds(in_keys=["reward"])), (Adds(in_keys=["reward"]), rewards())):
        assert collect(policy, *parts)["reward"].flatten().tolist() == [11.0] * 4
    with pytest.raises(KeyError) as failed:
        collect(policy, rewards(), Adds())
    assert "Adds reads 'reward'" in failed.value.__notes__[0]
    assert "super().__init__(in_keys=['reward'])" in failed.value.__notes__[0]


def test_what_belongs_to_torchrl_s_own_layer_is_refused_when_composed(
    scripted, make_tiny_model, chatml_tokenizer
):
    wrapper = WrapperOfTorchRL(make_tiny_model(), tokenizer=chatml_tokenizer, generate=False)
    with pytest.raises(TypeError, match=r"got <class 'torchrl.*torchrl_modules.TransformersWrap"):
        collect(wrapper, rewards())
    with pytest.raises(TypeError, match=r"torchrl_modules.TransformersWrapper, got <class 'torchr"):
        RetrieveLogProb(wrapper)
    theirs = AddThinkingPrompt(cond=bool)
    with pytest.raises(TypeError, match=r"torchrl\.envs\.llm\..*AddThinkingPrompt works on the"):
        collect(scripted(["hello"]), theirs)
    storage = LazyStackStorage(8)
    buffer = ReplayBuffer(storage=storage, transform=MCAdvantageOfTorchRL(grpo_size=2))
    with pytest.raises(TypeError, match=r"torchrl\.objectives\.llm\..*MCAdvantage works on the"):
        collect(scripted(["hello"]), rewards(), replay_buffer=buffer)
    several = ReplayBufferEnsemble(ReplayBuffer(), ReplayBuffer())  # has an extend that raises
    for bare in (storage, TensorDict({}), several):
        with pytest.raises(TypeError, match=r"replay_buffer takes ReplayBuffer\(.*, got <class"):
            collect(scripted(["hello"]), rewards(), replay_buffer=bare)


def test_a_wrapper_of_torchrl_answers_this_environment(make_tiny_model, chatml_tokenizer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what TorchRL's wrapper does
        theirs = WrapperOfTorchRL(
            make_tiny_model(), tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 4}
        )

        def answers(prompt):
            chats = ChatHistoryOfTorchRL(prompt=prompt, batch_size=prompt.shape[:-1])
            return theirs(TensorDict({"history": chats}, batch_size=chats.batch_size))["history"]

        def policy(tensordict):
            full = answers(tensordict["history"].prompt.to_torchrl()).full
            tensordict["history"].full = full
            return tensordict

        queries = ["say it again", "world"]
        data = DataLoadingPrimer([{"prompt": text} for text in queries])
        env = ChatEnv(batch_size=2).append_transform(Compose(data, StepCounter(2), rewards()))
        batch = env.rollout(2, policy)
        asked = [[{"role": "user", "content": text}] for text in queries]
        want = History.from_torchrl(answers(HistoryOfTorchRL.from_chats(asked)).full)
    assert [steps[-1] for steps in batch["next", "history"].prompt.to_chats()] == want.to_chats()
    assert batch["next", "reward"].flatten().tolist() == [1.0, 1.0]
