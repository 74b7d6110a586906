"""Agents of one program with rewards of their own, from what is returned to their advantages."""

import math
import re

import pytest
from agents_for_tests import ROWS, client_of, play, reason_of
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import LLMCollector
from objectives import MCAdvantage
from torchrl_data.batched_object import read_objects
from torchrl_envs import AgentProgram, ChatEnv, DataLoadingPrimer, StepCounter


def ask(client, endpoint, agent, text):
    chat = [{"role": "user", "content": text}]
    headers = {"x-agent-name": agent} if agent else {}
    reply = client.chat.completions.create(
        model=endpoint.model, messages=chat, extra_headers=headers
    )
    return reply.choices[0].message.content


def two_players(rewards, *, names=("white", "black")):
    """A program in which two agents take a turn each."""

    def program(endpoint, *, question):
        del question
        with client_of(endpoint) as client:
            for name in names:
                ask(client, endpoint, name, f"You are {name}.")
        return rewards

    return program


AGENTS = ["white", "black"]


@pytest.mark.parametrize(
    ("rewards", "by_source", "mean"),
    [
        ({"white": 1, "black": 0.5}, {"white": 1.0, "black": 0.5}, 0.75),
        ({"white": 1, "black": None}, {"white": 1.0}, 1.0),
        (0.25, {"white": 0.25, "black": 0.25}, 0.25),
    ],
)
def test_each_agent_has_what_the_program_gives_it(chatml_tokenizer, rewards, by_source, mean):
    last = play(chatml_tokenizer, two_players(rewards), ["One.", "Two."], agents=AGENTS)
    found = {name: last["rewards", name].item() for name in AGENTS}
    assert {name: value for name, value in found.items() if not math.isnan(value)} == by_source
    assert last["reward"].item() == mean
    (episode,) = last["episode"]
    assert episode.agent_rewards == by_source
    assert [origin.agent for origin in episode.origins] == AGENTS


@pytest.mark.parametrize(
    ("rewards", "names", "words"),
    [
        ({"white": 1}, AGENTS, r"took turns as \['black'\]"),
        ({"white": 1, "black": 0, "red": 1}, AGENTS, r"gave rewards to \['red'\]"),
        ({"white": 1, "black": 0}, ["white", "red"], r"took turns as \['red'\]"),
        ({"white": 1, "black": 0}, ["white", ""], r"Name the author of each request"),
        ({"white": 1, "black": "much"}, AGENTS, "much"),
        ({"white": 1, "black": float("nan")}, AGENTS, "nan"),
    ],
)
def test_what_is_not_paid_or_not_known_is_not_trained(chatml_tokenizer, rewards, names, words):
    program = two_players(rewards, names=names)
    last = play(chatml_tokenizer, program, ["One.", "Two."], agents=AGENTS)
    assert not last["scorable"].item()
    assert re.search(words, read_objects(last, "reward_errors")[0])


def test_a_program_that_is_cut_or_fails_pays_all_of_its_agents_alike(chatml_tokenizer):
    def fails(endpoint, *, question):
        two_players(1.0)(endpoint, question=question)
        raise RuntimeError("lost")

    last = play(chatml_tokenizer, fails, ["A."], agents=AGENTS, error_reward=-1.0)
    assert {last["rewards", name].item() for name in AGENTS} == {-1.0}
    program = two_players({"white": 1, "black": 0})
    limit = StepCounter(max_steps=1)
    last = play(chatml_tokenizer, program, ["A."], limit, agents=AGENTS, end_timeout_s=5.0)
    assert reason_of(last) == "max_steps"
    assert last["reward"].item() == 0.0
    (episode,) = last["episode"]
    assert episode.agent_rewards == {"white": 0.0, "black": 0.0}


def collected(scripted, rewards, **advantage):
    """The rows of a group of games, whose players get these rewards, one game after the other."""
    left = iter(rewards)

    def program(endpoint, *, question):
        return two_players(next(left))(endpoint, question=question)

    env = ChatEnv(batch_size=len(rewards)).append_transform(
        Compose(
            DataLoadingPrimer(ROWS, group_size=len(rewards)),
            AgentProgram(program, agents=AGENTS, timeout_s=20.0),
        )
    )
    buffer = ReplayBuffer(
        storage=LazyStackStorage(16), transform=MCAdvantage(len(rewards), **advantage)
    )
    collector = LLMCollector(env, scripted(["One.", "Two."]), replay_buffer=buffer)
    try:
        return collector.collect(), buffer[:]
    finally:
        collector.shutdown()
        env.close()


def test_each_agent_is_compared_with_itself_by_its_own_rewards(scripted):
    games = [
        {"white": 3.0, "black": 0.0},
        {"white": 1.0, "black": 0.0},
        {"white": 2.0, "black": 6.0},
        {"white": 2.0, "black": None},
    ]
    rows, trained = collected(scripted, games, scale="none", credit="agent")
    # Less the mean of the same agent in the group: 2 for white; 2 for black, of those three.
    wanted = {
        "white": [(1.0, -1.0), (2.0, 0.0), (2.0, 0.0), (3.0, 1.0)],
        "black": [(0.0, -2.0), (0.0, -2.0), (6.0, 4.0), (None, 0.0)],
    }
    found = {"white": [], "black": []}
    for row in trained:
        own = row["agent_reward"].item()
        paid = (own if own == own else None, round(row["advantage"].item(), 5))
        found[read_objects(row, "agent")[0]].append(paid)
    for agent, pairs in found.items():
        assert sorted(pairs, key=str) == wanted[agent]
    assert rows["reward"].flatten().unique().tolist() == [0.5, 1.5, 2.0, 4.0]


def test_one_credit_for_all_is_refused_before_anything_is_sampled(scripted):
    with pytest.raises(ValueError, match=r"\['white', 'black'\] have rewards of their own"):
        collected(scripted, [{"white": 1, "black": 0}] * 2)


def test_rows_of_a_file_with_agents_rewards_are_refused_by_other_credits(scripted):
    games = [{"white": 1, "black": 0}, {"white": 0, "black": 1}]
    rows, _ = collected(scripted, games, credit="agent")
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(2))
    with pytest.raises(ValueError, match="take credit='agent'"):
        buffer.extend(rows)


@pytest.mark.parametrize(
    ("agents", "error"),
    [("white", TypeError), ([1, 2], TypeError), (["white"], ValueError), (["a", "a"], ValueError)],
)
def test_names_that_can_not_be_are_refused(agents, error):
    with pytest.raises(error, match="agents"):
        AgentProgram(two_players(1.0), agents=agents)
