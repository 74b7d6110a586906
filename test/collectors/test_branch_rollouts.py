"""Rollouts that leave another one of their group in the middle, in every collector."""

import random
import re
from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer

from collectors import LLMCollector, OnPolicy, StreamingCollector
from objectives import GRPOLoss, LengthPenalty, MCAdvantage, PairSelector, RolloutTreeCredit
from torchrl_data import keys
from torchrl_envs import (
    BranchRollouts,
    ChatEnv,
    DataLoadingPrimer,
    EnvironmentTools,
    EpisodeTransform,
    RewardErrorLimit,
    RewardFunctions,
    StepCounter,
)
from torchrl_modules import LLMWrapperBase
from torchrl_modules.engines.engine import Generation
from torchrl_modules.scoring.scorer import PackedScorer

NUM_TURNS = 5
END = "<|im_end|>"
KINDS = pytest.mark.parametrize("kind", [LLMCollector, StreamingCollector])


class Adder:
    """An engine that calls ``add`` with a number that it says once, or answers and has done."""

    version = 0

    def __init__(self, tokenizer, score, call_text, seed, answers=0.2):
        self.tokenizer, self.score, self.call_text = tokenizer, score, call_text
        self.rng, self.answers = random.Random(seed), answers
        self.drawn, self.num_read = Counter(), 0

    def generate(self, prompts, params, *, max_new_tokens=None):
        return [self.say(list(prompt)) for prompt in prompts]

    def say(self, prompt):
        number = sum(self.drawn.values()) + 1
        text = self.call_text("add", n=number)
        if self.rng.random() < self.answers:
            text = f"done {number}"
        ids = self.tokenizer.encode(text + END, add_special_tokens=False)
        log_probs = self.score([*prompt, *ids])[len(prompt) :].tolist()
        self.drawn[tuple(prompt)] += len(ids)
        return Generation(ids, log_probs, "stop")

    def update_weights(self, state_dict, *, version=None):
        raise ValueError("it has no weights")


class Tally:
    """Adds up what it is told, in an object that every episode has for itself."""

    def reset(self, *, start, **row):
        self.total = start

    def add(self, n: int) -> str:
        """Add a number.

        Args:
            n: The number.
        """
        self.total += n
        return f"the sum is {self.total}"

    def get_reward(self) -> float:
        return float(self.total)


class Forgetful(Tally):
    """Answers another way each time."""

    numbers = iter(range(10**6))

    def add(self, n: int) -> str:
        """Add a number.

        Args:
            n: The number.
        """
        return f"number {next(self.numbers)}"


class Again(EpisodeTransform):
    """Says more to the policy, and remembers how often, in the episode alone."""

    def after_turn(self, episode):
        count = episode.memory.get(self.key, 0) + 1
        episode.memory = {**episode.memory, self.key: count}
        if not episode.is_over and episode.awaits_answer:
            episode.say({"role": "user", "content": f"this is answer {count}"})


@pytest.fixture
def make(chatml_tokenizer, make_tiny_model, call_text, reference_log_probs):
    """A collector of two groups, and its engine."""

    def make(
        kind=LLMCollector,
        *,
        game=Tally,
        parts=(),
        group_size=5,
        num_roots=2,
        at="uniform",
        seed=0,
        answers=0.2,
        **settings,
    ):
        rows = [{"prompt": f"Begin with {n}.", "start": n} for n in range(8)]
        score = partial(reference_log_probs, make_tiny_model(0))
        engine = Adder(chatml_tokenizer, score, call_text, seed, answers)
        policy = LLMWrapperBase(engine, tokenizer=chatml_tokenizer)
        env = ChatEnv(batch_size=2 * group_size)
        given = [DataLoadingPrimer(rows, group_size=group_size, shuffle=False)]
        given += [] if game is None else [EnvironmentTools(game)]
        given += [*parts, StepCounter(NUM_TURNS), BranchRollouts(num_roots, at=at)]
        for part in given:
            env = env.append_transform(part)
        return kind(env, policy, **settings), engine

    return make


def collected(collector):
    """One batch."""
    if isinstance(collector, StreamingCollector):
        with collector:
            return next(iter(collector))
    return collector.collect()


def by_id(rows):
    return {int(row[keys.EPISODE_ID]): row for row in rows}


def ids_of(row):
    return row[keys.TOKENS_FULL].tolist()


@KINDS
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 10**6),
    num_roots=st.integers(1, 4),
    at=st.sampled_from(["uniform", "surprise"]),
)
def test_each_token_is_drawn_once_and_trained_once(make, kind, seed, num_roots, at):
    collector, engine = make(kind, seed=seed, num_roots=num_roots, at=at)
    rows = list(collected(collector).unbind(0))
    assert [*Counter(int(row["group_id"]) for row in rows).values()] == [5, 5]
    trained, known = 0, by_id(rows)
    for row in rows:
        mask, ids = row[keys.ASSISTANT_MASK], ids_of(row)
        trained += int(mask.sum())
        left, size = int(row["branched_from"]), int(row["branched_tokens"])
        if left < 0:
            assert size == 0
            continue
        parent = known[left]
        assert int(parent["branched_from"]) == -1
        assert int(parent["group_id"]) == int(row["group_id"])
        assert ids[:size] == ids_of(parent)[:size]  # which ends where a turn of the parent begins
        assert parent[keys.ASSISTANT_MASK][size]
        assert not parent[keys.ASSISTANT_MASK][size - 1]
        assert parent[keys.ASSISTANT_MASK][:size].any()
        assert not mask[:size].any()
        assert mask[size]
        assert not row["log_probs", "full"][:size].any()
    num_drawn = sum(engine.drawn.values())
    assert trained == num_drawn if kind is LLMCollector else trained <= num_drawn
    assert sum(int(row["branched_from"]) < 0 for row in rows) >= 2 * num_roots


@KINDS
def test_a_game_is_where_the_turns_before_have_taken_it(make, kind):
    rows = list(collected(make(kind, answers=0.0)[0]).unbind(0))
    assert sum(int(row["branched_from"]) >= 0 for row in rows) == 6
    for row in rows:
        said = " ".join(m["content"] for m in row["history", "full"].to_chats())
        added = [int(n) for n in re.findall(r'"n": (\d+)', said)]
        assert len(added) == NUM_TURNS == int(row["num_turns"])
        assert float(row["reward"]) == int(row["row"]["start"]) + sum(added)
        assert row["stop_reason"] == "max_steps"


@KINDS
def test_what_transforms_remember_goes_along(make, kind):
    """Where nothing is held no turn is played again: what was said is enough."""

    def heard(completions, **_):
        return [float(text.count("this is answer")) for text in completions]

    rows = list(
        collected(
            make(kind, game=None, parts=[Again(), RewardFunctions([heard])], answers=0.5)[0]
        ).unbind(0)
    )
    for row in rows:
        said = [m["content"] for m in row["history", "full"].to_chats() if m["role"] == "user"]
        assert said[1:] == [f"this is answer {n}" for n in range(1, NUM_TURNS + 1)]
        # All that was said and heard is scored, that of the rollout which was left included.
        assert float(row["reward"]) == NUM_TURNS


@KINDS
def test_one_that_is_answered_in_another_way_fails_alone(make, kind):
    parts = [RewardErrorLimit(max_error_fraction=1.0)]
    rows = list(collected(make(kind, game=Forgetful, parts=parts, answers=0.0)[0]).unbind(0))
    for row in rows:
        if int(row["branched_from"]) < 0 and row["stop_reason"] == "max_steps":
            assert bool(row["scorable"])
    failed = [row for row in rows if row["stop_reason"].startswith("environment_error")]
    assert len(failed) == 6
    assert "BranchRollouts" in failed[0]["stop_reason"]
    assert "turn 1 of the rollout that it branches from" in failed[0]["stop_reason"]
    assert not any(bool(row["scorable"]) for row in failed)


def test_groups_that_are_drawn_in_the_place_of_others_branch_too(make):
    """Of the first two prompts all rollouts are equal: the next two take their place."""

    def reward(completions, start, **_):
        return [float(i % 2 and n > 1) for i, n in enumerate(start)]

    buffer = ReplayBuffer(
        storage=LazyStackStorage(32),
        transform=MCAdvantage(5, credit="tree", zero_variance="refill"),
    )
    parts = [Again(), RewardFunctions([reward])]
    make(game=None, parts=parts, replay_buffer=buffer)[0].collect()
    assert [int(row["row"]["start"]) for row in buffer[:].unbind(0)] == [2] * 5 + [3] * 5
    roots = [int(row["branched_from"]) < 0 for row in buffer[:].unbind(0)]
    assert roots == [True, True, False, False, False] * 2
    assert all(row["advantage"].shape == (len(ids_of(row)), 1) for row in buffer[:].unbind(0))


def test_log_probs_are_those_of_a_rollout_that_was_drawn_in_one_piece(
    make, make_tiny_model, reference_log_probs
):
    rows = collected(make(seed=3, answers=0.0)[0])
    model = make_tiny_model(0)
    for row in rows.unbind(0):
        mask = row[keys.ASSISTANT_MASK]
        expected = reference_log_probs(model, ids_of(row))
        torch.testing.assert_close(
            row["log_probs", "full"][mask], expected[mask], atol=1e-5, rtol=0
        )


def test_the_gradient_is_that_of_whole_rollouts(make, make_tiny_model):
    """Credit by the tree trains each token once, for all rollouts that it is a part of."""
    rows = list(collected(make(seed=5)[0]).unbind(0))
    known = by_id(rows)
    assert sum(int(row["branched_from"]) >= 0 for row in rows) >= 3

    def gradient(rows, credit):
        buffer = ReplayBuffer(
            storage=LazyStackStorage(32), transform=MCAdvantage(5, scale="none", credit=credit)
        )
        buffer.extend(lazy_stack(rows))
        model = make_tiny_model(0).double()
        loss = GRPOLoss(PackedScorer(model), aggregation="sequence_sum", old_policy="current")
        loss(buffer[:]).loss_objective.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    whole = [row.clone() for row in rows]
    for row in whole:
        if int(row["branched_from"]) >= 0:
            size, parent = int(row["branched_tokens"]), known[int(row["branched_from"])]
            row[keys.ASSISTANT_MASK][:size] = parent[keys.ASSISTANT_MASK][:size]
    tree, apart = gradient(rows, "tree"), gradient(whole, "episode")
    assert apart.norm() > 0
    assert (tree - apart).norm() / apart.norm() < 1e-6
    assert (gradient(rows, "episode") - apart).norm() / apart.norm() > 1e-2


def test_a_counter_does_not_count_a_row_that_waits():
    data = DataLoadingPrimer([{"prompt": "a"}], group_size=2)
    env = ChatEnv(batch_size=2)
    for part in (data, Again(), StepCounter(3)):
        env = env.append_transform(part)
    batch = env.reset()
    for takes_part in ([True, False], [True, False], [True, True]):
        batch.set("_step", torch.tensor(takes_part))
        batch = env.step(batch.set("text_response", ["x", "y"]))["next"]
    assert batch["step_count"].flatten().tolist() == [3, 1]
    assert batch["done"].flatten().tolist() == [True, False]


def test_turns_are_drawn_by_their_weights(make):
    """A function of the turns says where; the first turn is never one of them."""
    seen = []

    def last(turns):
        seen.append([turn.before.num_turns for turn in turns])
        assert all(
            turn.log_probs.ndim == 1 and turn.message["role"] == "assistant" for turn in turns
        )
        return [0.0] * (len(turns) - 1) + [1.0]

    rows = collected(make(at=last, answers=0.0)[0])
    assert seen == [[1, 2, 3, 4]] * 4
    for row in rows.unbind(0):
        if int(row["branched_from"]) >= 0:
            own = row[keys.ASSISTANT_MASK][int(row["branched_tokens"]) :]
            starts = (own[1:] & ~own[:-1]).sum() + own[0]
            assert int(starts) == 1


def test_one_turn_is_none_to_leave_at(make):
    """Where no root has a second turn, the others begin with the prompt, with all their turns."""
    rows = collected(make(answers=1.0)[0])
    assert {int(row["branched_from"]) for row in rows.unbind(0)} == {-1}
    assert {row["stop_reason"] for row in rows.unbind(0)} == {"answered"}


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda make: make(num_roots=5), "num_roots=5 of a group of 5 rollouts leaves none"),
        (lambda _: BranchRollouts(0), "num_roots"),
        (lambda _: BranchRollouts(1, at="entropy"), "must be one of"),
        (
            lambda make: make(parts=[StepCounter(1)]),
            "ends every episode after one turn",
        ),
        (
            lambda make: make(
                replay_buffer=ReplayBuffer(
                    storage=LazyStackStorage(32), transform=PairSelector(group_size=5)
                )
            ),
            "PairSelector works on whole rollouts",
        ),
        (
            lambda make: make(
                replay_buffer=ReplayBuffer(
                    storage=LazyStackStorage(32),
                    transform=MCAdvantage(5, estimator=LengthPenalty(coeff=0.1)),
                )
            ),
            "LengthPenalty works on whole rollouts",
        ),
        (
            lambda make: make(StreamingCollector, staleness=OnPolicy()),
            "on policy all rollouts of a step are drawn in one batch",
        ),
    ],
)
def test_what_can_not_branch_is_refused(make, build, said):
    with pytest.raises(ValueError, match=said):
        build(make)


@pytest.mark.parametrize("given", [[1.0], 1.0, ["late"] * 4, [float("nan")] * 4])
def test_weights_that_are_none_are_refused(make, given):
    collector, _ = make(at=lambda _: given, answers=0.0)
    with pytest.raises(ValueError, match="a weight of at least 0 for each of 4 turns"):
        collector.collect()


def test_without_a_collector_nothing_would_branch():
    data = DataLoadingPrimer([{"prompt": "a"}], group_size=2)
    env = ChatEnv(batch_size=2).append_transform(data).append_transform(BranchRollouts(1))
    with pytest.raises(RuntimeError, match="rollouts branch in LLMCollector"):
        env.reset()


def test_a_tree_needs_rollouts_that_branch(make, chatml_tokenizer):
    data = DataLoadingPrimer([{"prompt": "a", "start": 1}], group_size=2)
    env = ChatEnv(batch_size=2).append_transform(data).append_transform(EnvironmentTools(Tally))
    policy = LLMWrapperBase(Adder(chatml_tokenizer, None, None, 0), tokenizer=chatml_tokenizer)
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(2, credit="tree"))
    with pytest.raises(ValueError, match="no rollout leaves another one"):
        LLMCollector(env, policy, replay_buffer=buffer)
    with pytest.raises(ValueError, match="given twice"):
        MCAdvantage(2, credit="tree", estimator=RolloutTreeCredit())
