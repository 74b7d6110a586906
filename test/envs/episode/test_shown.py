"""What ``print`` and a notebook show of an environment, a batch and a conversation."""

import html
import re

import pytest
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import LLMCollector
from torchrl_data import ChatHistory, History
from torchrl_envs import ChatEnv, DataLoadingPrimer, FunctionTools, RewardFunctions, StepCounter
from torchrl_modules import TransformersWrapper

ROWS = [{"prompt": "Say yes."}, {"prompt": "Please, say yes."}]


def polite(completions, **columns):
    return [1.0 for _ in completions]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


@pytest.fixture
def env():
    parts = (
        DataLoadingPrimer(ROWS, group_size=2, shuffle=True),
        FunctionTools([add]),
        RewardFunctions([polite]),
        StepCounter(max_steps=3),
    )
    return ChatEnv(batch_size=(4,), system_prompt="Be kind.").append_transform(Compose(*parts))


@pytest.fixture
def policy(chatml_tokenizer, make_tiny_model):
    sampling = {"max_new_tokens": 4, "temperature": 0.0}
    return TransformersWrapper(
        make_tiny_model(), tokenizer=chatml_tokenizer, generate_kwargs=sampling
    )


def test_an_environment_tells_its_parts(env):
    assert repr(env).splitlines() == [
        "EpisodeEnv(",
        "    ChatEnv(batch_size=(4,), input_mode='history', system_prompt='Be kind.'),",
        "    DataLoadingPrimer(2 rows, group_size=2, shuffle=True),",
        "    FunctionTools(tools=['add']),",
        "    RewardFunctions(rewards=['polite']),",
        "    StepCounter(max_steps=3),",
        ")",
    ]


def test_a_batch_is_shown_in_a_line_for_each_entry_that_it_has(env, policy):
    buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=4)
    collector = LLMCollector(env, policy, replay_buffer=buffer, total_trajectories=8)
    batch = collector.collect()
    told = "policy=TransformersWrapper, total_episodes=8, replay_buffer=ReplayBuffer"
    assert repr(collector) == f"LLMCollector(num_collected=4, {told})"
    shown = repr(batch)
    shortest, longest = (f(len(row) for row in batch["tokens", "full"]) for f in (min, max))
    assert shortest < longest
    assert f"full: 4 rows, {shortest} to {longest} long, dtype=torch.int64" in shown
    assert re.search(r"full: Conversations\(4 rows, tokens=.*messages=\[3, 3, 3, 3\]\)", shown)
    # Nothing that the batch lacks, and nothing of how it is stored.
    assert not [word for word in ("padded", "prompt=", "_metadata", "is_complete") if word in shown]
    assert f"full: Tensor(shape=[{len(batch[0]['tokens', 'full'])}], dtype=torch.int64)" in repr(
        batch[0]["tokens"]
    )


def test_messages_are_shown_by_their_beginnings():
    chats = [[{"role": "user", "content": f"{i}" * 80}] * (1 + i % 2) for i in range(5)]
    history = History.from_chats(chats)
    assert repr(history).splitlines() == [
        "History(",
        f"    user: '{'0' * 59},",
        f"    user: '{'1' * 59} | user: '{'1' * 59},",
        f"    user: '{'2' * 59},",
        "    ...,",
        "    batch_size=[5, -1])",
    ]
    one = f"History(\n    user: '{'0' * 59},\n    batch_size="
    assert repr(history[0]) == f"{one}[1])"
    assert repr(history[0][0]) == f"{one}[])"


def test_a_notebook_shows_the_page_and_runs_nothing_of_it():
    history = History.from_chats([[{"role": "user", "content": '"><script>alert(1)</script>'}]])
    shown = history._repr_html_()
    frame = re.fullmatch(r'<iframe sandbox="" style="[^"]*" srcdoc="([^"]*)"></iframe>', shown)
    assert html.unescape(frame[1]) == history.to_html()
    assert "<script" not in shown


@pytest.mark.parametrize("bare", [False, True])
def test_what_is_no_batch_is_named(env, bare):
    with pytest.raises(TypeError, match=r"reset takes a TensorDict, .* got list: \['a'\]. .*query"):
        (ChatEnv(batch_size=(1,)) if bare else env).reset(["a"])


def test_messages_for_a_policy_are_named(policy):
    messages = [{"role": "user", "content": "yes"}]
    words = r"TransformersWrapper takes a TensorDict, .* got list: \[{'role': 'user'.*from_chats"
    with pytest.raises(TypeError, match=words):
        policy(messages)
    batch = TensorDict({"history": ChatHistory(prompt=History.from_chats([messages]))}, [1])
    assert policy(batch)["history", "full"].shape == (1, 2)  # as the message says
