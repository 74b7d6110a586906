"""A seed of the sampling: each rollout of a run has random numbers of its own, whatever draws it.

The rollouts of a group have one prompt, and their responses are long enough that two of them with
different random numbers are never equal.
"""

from functools import partial

import pytest
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import (
    LLMCollector,
    OnPolicy,
    RolloutFunctionCollector,
    StreamingCollector,
    TextEnvironment,
    generate_rollout_completions,
)
from objectives import MCAdvantage
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    EpisodeTransform,
    RewardFunctions,
    StepCounter,
)
from torchrl_modules import EngineFleet, TransformersWrapper, vLLMWrapper
from torchrl_modules.engines.blocking_engine import BlockingEngine
from torchrl_modules.engines.open_async import open_async
from torchrl_modules.engines.transformers import TransformersEngine

N, GROUPS = 4, 2
SEED = 7


def length_reward(completions):
    return [float(len(str(completion))) for completion in completions]


class Asks(EpisodeTransform):
    """A user who asks once more."""

    answers_cut_turns = True

    def after_turn(self, episode):
        if episode.num_turns == 1:
            episode.say({"role": "user", "content": "again"})


def make_env(*parts, mode="history", tokenizer=None, num_epochs=None):
    rows = [{"prompt": text} for text in ("question", "tool", "hello")]
    data = DataLoadingPrimer(rows, group_size=N, num_epochs=num_epochs)
    rest = (*parts, RewardFunctions([length_reward]), StepCounter(3))
    env = ChatEnv(batch_size=(N * GROUPS,), input_mode=mode, tokenizer=tokenizer)
    return env.append_transform(Compose(data, *rest))


class WithoutSeeds:
    """An engine that somebody wrote by the protocol alone."""

    def __init__(self, engine):
        self._engine = engine

    @property
    def version(self):
        return self._engine.version

    def generate(self, prompts, params, *, max_new_tokens=None):
        return self._engine.generate(prompts, params, max_new_tokens=max_new_tokens)

    def update_weights(self, state_dict, *, version=None):
        self._engine.update_weights(state_dict, version=version)


@pytest.fixture
def make_policy(chatml_tokenizer, make_tiny_model):
    def make(engine="transformers", **settings):
        model = make_tiny_model()
        sampling = {"max_new_tokens": 12, "min_tokens": 12, "seed": SEED, **settings}
        make_it = partial(TransformersWrapper, tokenizer=chatml_tokenizer, generate_kwargs=sampling)
        if engine == "transformers":
            return make_it(model)
        engines = {
            "continuous": lambda: BlockingEngine(open_async(TransformersEngine(model))),
            "fleet": lambda: EngineFleet([partial(open_async, TransformersEngine(model))] * 2),
            "without seeds": lambda: WithoutSeeds(TransformersEngine(model)),
        }
        return vLLMWrapper(engines[engine](), tokenizer=chatml_tokenizer, generate_kwargs=sampling)

    return make


def spoken(batch):
    """What the policy sampled in each row."""
    return [
        tuple(row["tokens", "full"][row["masks", "all_assistant_mask"]].tolist())
        for row in batch.unbind(0)
    ]


COLLECTORS = {
    "LLMCollector": LLMCollector,
    "StreamingCollector": StreamingCollector,
    "StreamingCollector on policy": partial(StreamingCollector, staleness=OnPolicy()),
}
ENGINES = ["transformers", "continuous", "fleet", "without seeds"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", COLLECTORS)
def test_every_rollout_of_a_run_differs(make_policy, kind, engine):
    if engine == "without seeds" and kind == "StreamingCollector":
        pytest.skip("it serves no engine that draws batches alone")
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(N), batch_size=8)
    policy = make_policy(engine)
    with COLLECTORS[kind](make_env(), policy, replay_buffer=buffer) as collector:
        rows = [said for _ in range(3) for said in spoken(collector.collect())]
    assert len(set(rows)) == len(rows) == 3 * N * GROUPS
    assert bool((buffer[:]["advantage"] != 0).any())
    getattr(policy.engine, "close", lambda: None)()


@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
@pytest.mark.parametrize("kind", ["LLMCollector", "StreamingCollector on policy"])
def test_turns_of_an_episode_differ_and_both_collectors_draw_the_same(
    make_policy, chatml_tokenizer, kind, mode
):
    env = make_env(Asks(), mode=mode, tokenizer=chatml_tokenizer)
    policy = make_policy()
    policy = TransformersWrapper(
        policy.model,
        tokenizer=chatml_tokenizer,
        generate_kwargs=policy.sampling,
        input_mode=mode,
    )
    with COLLECTORS[kind](env, policy) as collector:
        batches = [spoken(collector.collect()) for _ in range(2)]
    for said in (one for batch in batches for one in batch):
        assert len(said) == 24
        assert said[:12] != said[12:], "the second turn has random numbers of its own"
    alone = LLMCollector(make_env(Asks()), make_policy())
    assert batches == [spoken(alone.collect()) for _ in range(2)]


def test_a_rewritten_past_goes_on_with_other_numbers(make_policy):
    class Forget(EpisodeTransform):
        answers_cut_turns = True

        def after_turn(self, episode):
            if episode.num_turns == 1:
                episode.rewrite([{"role": "user", "content": "question"}])

    class Question(EpisodeTransform):
        def begin(self, episode):
            episode.query = "question"

    rows = LLMCollector(make_env(Question(), Forget()), make_policy()).collect()
    assert len(rows) == 2 * N * GROUPS
    prompts = {tuple(row["tokens", "prompt"].tolist()) for row in rows.unbind(0)}
    assert len(prompts) == 1, "both turns of all episodes go on from one prompt"
    assert len(set(spoken(rows))) == len(rows)


def test_a_resumed_run_draws_what_an_uninterrupted_one_draws(make_policy):
    whole = LLMCollector(make_env(), make_policy())
    first, second = spoken(whole.collect()), spoken(whole.collect())
    begun = LLMCollector(make_env(), make_policy())
    assert spoken(begun.collect()) == first
    resumed = LLMCollector(make_env(), make_policy())
    resumed.load_state_dict(begun.state_dict())
    assert spoken(resumed.collect()) == second


def test_another_seed_or_epoch_draws_others_and_an_evaluation_the_same(make_policy):
    collector = LLMCollector(make_env(), make_policy())
    first = spoken(collector.collect())
    assert not set(first) & set(spoken(LLMCollector(make_env(), make_policy(seed=8)).collect()))
    collector.collect()
    again = spoken(collector.collect())  # the second pass over the three rows
    assert not set(first) & set(again)
    (primer,) = collector.env.transforms_of(DataLoadingPrimer)
    primer.rewind()
    assert spoken(collector.collect()) == first


class DrawsItself(EpisodeTransform):
    """A source of prompts that names no seeds."""

    def draw(self, episodes):
        for episode in episodes:
            episode.query, episode.example = "question", {}


@pytest.mark.parametrize("kind", COLLECTORS)
def test_a_source_without_seeds_draws_rollouts_that_differ(make_policy, kind):
    parts = Compose(DrawsItself(), RewardFunctions([length_reward]), StepCounter(1))
    env = ChatEnv(batch_size=(4,)).append_transform(parts)
    with COLLECTORS[kind](env, make_policy()) as collector:
        rows = [said for _ in range(3) for said in spoken(collector.collect())]
    assert len(set(rows)) == len(rows) == 12


def test_several_samples_of_a_row_differ(chatml_tokenizer, make_policy):
    policy = make_policy()
    policy.num_samples = 3
    out = policy(make_env().reset())
    said = {tuple(row["tokens", "response"].tolist()) for row in out.reshape(-1).unbind(0)}
    assert len(said) == 3 * N * GROUPS


def test_a_call_by_hand_draws_the_same_again_and_explicit_seeds_stay(make_policy):
    policy = make_policy()
    prompts = [[5, 6, 7]] * 3
    first, second = (policy.engine.generate(prompts, policy.sampling) for _ in range(2))
    assert [each.ids for each in first] == [each.ids for each in second]
    assert len({tuple(each.ids) for each in first}) == 3
    alone = policy.engine.generate(prompts[:1], policy.sampling, seeds=[5])
    assert policy.engine.generate(prompts, policy.sampling, seeds=[4, 5, 6])[1].ids == alone[0].ids


def test_rollout_functions_and_text_environments_do_not_repeat_numbers(
    make_policy, chatml_tokenizer
):
    def rollout(prompts, trainer):
        first, second = (generate_rollout_completions(trainer, prompts) for _ in range(2))
        assert [a["completion_ids"] for a in first] != [b["completion_ids"] for b in second]
        return {
            "prompt_ids": [each["prompt_ids"] for each in first],
            "completion_ids": [each["completion_ids"] for each in first],
            "logprobs": [each["logprobs"] for each in first],
        }

    def run(collector, count):
        return [spoken(collector.collect()) for _ in range(count)]

    def build():
        data = DataLoadingPrimer([{"prompt": "question"}], group_size=N)
        return RolloutFunctionCollector(
            rollout, make_policy(), data, num_rollouts=N, reward_functions=[length_reward]
        )

    batches = run(build(), 3)
    assert len({said for batch in batches for said in batch}) == 3 * N
    begun, resumed = build(), build()
    begun.collect()
    resumed.load_state_dict(begun.state_dict())
    assert run(resumed, 2) == batches[1:]

    environment = TextEnvironment(
        make_policy(), chatml_tokenizer, reward_fn=length_reward, prompt="hello"
    )
    said = [ids.tolist() for _ in range(3) for ids in environment.run(["question"] * 2)[1]]
    assert len(set(map(tuple, said))) == 6
