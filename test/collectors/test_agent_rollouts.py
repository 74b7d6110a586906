"""Programs that own their loop, collected and trained: each sampled token once, with ratio 1."""

import functools
import threading
from itertools import chain

import openai
import pytest
import torch
from tensordict import lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import LLMCollector, StreamingCollector, rollout_metrics
from collectors.record import RolloutRecorder, RunRecord
from objectives import GRPOLoss, MCAdvantage
from torchrl_envs import AgentProgram, ChatEnv, DataLoadingPrimer, RewardFunctions, StepCounter
from torchrl_modules import TransformersWrapper

GROUP, SIZE = 2, 4


def two_agents(told, lock, endpoint, *, prompt, seed):
    """One plans and one solves, by turns; of the planner's history a part is left out once."""
    del seed
    with openai.OpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
    ) as client:

        def ask(chat):
            reply = client.chat.completions.create(model=endpoint.model, messages=chat)
            chat.append(reply.choices[0].message)
            with lock:
                told.append(reply.usage.completion_tokens)

        planner = [{"role": "user", "content": f"plan {prompt}"}]
        solver = [{"role": "user", "content": f"solve {prompt}"}]
        for _ in range(2):
            ask(planner)
            planner.append({"role": "user", "content": "go on"})
            ask(solver)
            solver.append({"role": "user", "content": "go on"})
        ask([planner[0], planner[-1]])
        return float(len(solver[1].content) > 3)


def test_held_out_programs_may_ask_for_the_policys_own_temperature(
    make_tiny_model, chatml_tokenizer
):
    def program(endpoint, *, prompt):
        with openai.OpenAI(
            base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
        ) as client:
            chat = [{"role": "user", "content": prompt}]
            client.chat.completions.create(model="m", messages=chat, temperature=0.5)
        return 1.0

    def make_env(**options):
        rows = [{"prompt": f"What is {i} + 2?"} for i in range(2)]
        loader = DataLoadingPrimer(rows, group_size=1, **options)
        env = ChatEnv(batch_size=2, tokenizer=chatml_tokenizer)
        return env.append_transform(Compose(loader, AgentProgram(program, timeout_s=60)))

    torch.manual_seed(0)
    policy = TransformersWrapper(
        make_tiny_model(),
        tokenizer=chatml_tokenizer,
        generate_kwargs={"max_new_tokens": 3, "temperature": 0.5},
    )
    with StreamingCollector(make_env(), policy) as collector:
        assert set(collector.collect()["stop_reason"]) == {"response_length"}
        point = collector.evaluate(make_env(num_epochs=1), wait=True)
    assert point.trajectories["reward"].flatten().tolist() == [1.0, 1.0]


def collected(make, make_tiny_model, chatml_tokenizer, program):
    """A group of two, each cut after two turns, from a buffer."""
    torch.manual_seed(0)
    policy = TransformersWrapper(
        make_tiny_model(), tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 5}
    )
    env = ChatEnv(batch_size=2, tokenizer=chatml_tokenizer).append_transform(
        Compose(
            DataLoadingPrimer([{"prompt": "x"}], group_size=2),
            AgentProgram(program, timeout_s=30, end_timeout_s=30),
            StepCounter(max_steps=2),
        )
    )
    buffer = ReplayBuffer(storage=LazyStackStorage(100), transform=MCAdvantage(2))
    with make(env, policy, replay_buffer=buffer) as collector:
        return collector.collect()


def asks_anew(endpoint, number):
    with openai.OpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
    ) as client:
        chat = [{"role": "user", "content": f"question {number}"}]
        client.chat.completions.create(model=endpoint.model, messages=chat)


@pytest.mark.parametrize("make", [LLMCollector, StreamingCollector])
def test_a_conversation_that_a_limit_left_unanswered_is_no_row(
    make, make_tiny_model, chatml_tokenizer
):
    def program(endpoint):
        for number in range(9):
            asks_anew(endpoint, number)

    rows = collected(make, make_tiny_model, chatml_tokenizer, program).unbind(0)
    assert {row["stop_reason"] for row in rows} == {"max_steps"}
    assert all(row["masks", "all_assistant_mask"].any() for row in rows)
    numbers = [int(row["episode_id"]) for row in rows]
    assert sorted(map(numbers.count, set(numbers))) == [2, 2]  # two questions each


def test_a_program_that_is_cut_is_told_while_its_group_goes_on(make_tiny_model, chatml_tokenizer):
    ends, told, first = [], threading.Event(), threading.Lock()

    def program(endpoint):
        if first.acquire(blocking=False):
            asks_anew(endpoint, 0)
            asks_anew(endpoint, 1)
            with pytest.raises(openai.PermissionDeniedError, match="max_steps"):
                asks_anew(endpoint, 2)
            told.set()
        else:
            asks_anew(endpoint, 0)
            ends.append(told.wait(20))  # its group is not over before that
        return 1.0

    collected(StreamingCollector, make_tiny_model, chatml_tokenizer, program)
    assert ends
    assert all(ends)


@pytest.mark.parametrize("kind", ["batch", "streaming"])
def test_each_sampled_token_is_trained_once_with_ratio_one(kind, make_tiny_model, chatml_tokenizer):
    torch.manual_seed(0)
    model, told = make_tiny_model(), []
    policy = TransformersWrapper(
        model, tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 5}
    )
    rows = [{"prompt": f"What is {i} + 2?"} for i in range(SIZE)]
    program = functools.partial(two_agents, told, threading.Lock())
    env = ChatEnv(batch_size=SIZE, tokenizer=chatml_tokenizer).append_transform(
        Compose(DataLoadingPrimer(rows, group_size=GROUP), AgentProgram(program, timeout_s=60))
    )
    buffer = ReplayBuffer(storage=LazyStackStorage(100), transform=MCAdvantage(GROUP))
    make = LLMCollector if kind == "batch" else StreamingCollector
    with make(env, policy, replay_buffer=buffer) as collector:
        batch = collector.collect()
    episodes: dict[int, list] = {}
    for row in batch.unbind(0):
        episodes.setdefault(int(row["episode_id"]), []).append(row)
    assert len(episodes) >= GROUP
    for own in episodes.values():
        # Two conversations of two turns each, and the one that left something out.
        assert sorted(int(row["num_turns"]) for row in own) == [5, 5, 5]
        assert len({float(row["reward"]) for row in own}) == 1
        (reason,) = {row["stop_reason"] for row in own}  # of the last turn: cut, or said to its end
        assert reason in {"response_length", "environment_done"}
    masks = [row["masks", "all_assistant_mask"] for row in chain(*episodes.values())]
    if kind == "batch":
        assert sum(int(mask.sum()) for mask in masks) == sum(told)
        assert len(told) == 5 * SIZE
    loss = GRPOLoss(TransformersWrapper(model, tokenizer=chatml_tokenizer, generate=False))
    with torch.no_grad():
        output = loss(buffer[:])
    # The ratio is 1 at each of them, so that its divergence is 0.
    torch.testing.assert_close(output.ratio_mean, torch.ones(()), rtol=0, atol=1e-4)
    torch.testing.assert_close(output.kl_approx, torch.zeros(()), rtol=0, atol=1e-6)


def leads_and_helps(endpoint, *, prompt):
    """One agent, named by its system prompt, asks another one, named by a header, or does not."""
    with openai.OpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
    ) as client:

        def ask(*chat, **more):
            reply = client.chat.completions.create(model=endpoint.model, messages=chat, **more)
            return reply.choices[0].message

        lead = {"role": "system", "content": "You lead."}
        said = ask(lead, {"role": "user", "content": prompt})
        if "0" in prompt:
            question = {"role": "user", "content": "help"}
            ask(question, extra_headers={"x-agent-name": "helper"})
        ask(lead, {"role": "user", "content": prompt}, said, {"role": "user", "content": "so?"})
        return float(len(said.content))


def test_rows_know_their_author_and_agents_are_compared_with_themselves(
    make_tiny_model, chatml_tokenizer, tmp_path
):
    torch.manual_seed(0)
    policy = TransformersWrapper(
        make_tiny_model(), tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 9}
    )
    rows = [{"prompt": "What is 0 + 2?"}, {"prompt": "What is 1 + 2?"}]
    env = ChatEnv(batch_size=4, tokenizer=chatml_tokenizer).append_transform(
        Compose(DataLoadingPrimer(rows, group_size=2), AgentProgram(leads_and_helps, timeout_s=60))
    )
    advantage = MCAdvantage(2, credit="agent", scale="none")
    buffer = ReplayBuffer(storage=LazyStackStorage(100), transform=advantage)
    with LLMCollector(env, policy, replay_buffer=buffer) as collector:
        batch = collector.collect().unbind(0)
    found = [(row["row_kind"], row["agent"], int(row["parent_segment"])) for row in batch]
    helped, alone = (
        [("sub_agent", "helper", 1), ("main", "You lead.", -1)],
        ("main", "You lead.", -1),
    )
    assert found == [*helped, *helped, alone, alone]
    recorder = RolloutRecorder(tmp_path, chatml_tokenizer)
    recorder.write(1, lazy_stack(list(batch)))
    recorder.close()
    (step,) = RunRecord(tmp_path).steps  # a group is of its prompt, and not of a helper's
    assert [group.prompt for group in step.groups] == [row["prompt"] for row in rows]
    assert [len(group.rewards) for group in step.groups] == [2, 2]
    metrics = rollout_metrics(lazy_stack(list(batch)))
    assert metrics["rows_per_episode"] == 6 / 4
    assert metrics["rows/sub_agent_fraction"] == 2 / 6
    rewards = [float(row["reward"]) for row in batch]
    for row, reward in zip(buffer[:].unbind(0), rewards, strict=True):
        own = [
            r
            for each, r in zip(batch, rewards, strict=True)
            if int(each["group_id"]) == int(row["group_id"]) and each["agent"] == row["agent"]
        ]
        assert float(row["advantage"]) == pytest.approx(reward - sum(own) / len(own))


@pytest.mark.parametrize(
    ("credit", "said"),
    [
        ("turn", "needs rewards by turn or token"),
        ("branch", "needs rewards by turn or token"),
        ("agent", "has no AgentProgram"),
    ],
)
def test_credit_without_what_it_needs_is_refused_before_anything_is_sampled(
    make_tiny_model, chatml_tokenizer, credit, said
):
    policy = TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer)
    loader = DataLoadingPrimer([{"prompt": "x"}], group_size=2)
    env = ChatEnv(batch_size=2, tokenizer=chatml_tokenizer).append_transform(
        Compose(loader, RewardFunctions([lambda completions: [0.0] * len(completions)]))
    )
    buffer = ReplayBuffer(storage=LazyStackStorage(9), transform=MCAdvantage(2, credit=credit))
    with pytest.raises(ValueError, match=said):
        LLMCollector(env, policy, replay_buffer=buffer)
