"""A run that stops and goes on: bit by bit in batches, no prompt skipped beside training."""

import copy
import multiprocessing
import random
from collections import Counter

import pytest
import torch
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import Drop, LLMCollector, OnPolicy, StreamingCollector, Wait
from collectors.resume.identity import CheckpointMismatch, identity_of
from collectors.resume.run_state import RunState
from objectives import GRPOLoss, MCAdvantage
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    DifficultyPools,
    EpisodeTransform,
    RewardFunctions,
    StepCounter,
)
from torchrl_envs.datasets.difficulty_pools import IDS_PER_EPOCH
from torchrl_modules import EngineDied, TransformersWrapper
from torchrl_modules.engines.batching_engine import BatchingEngine

pytestmark = pytest.mark.usefixtures("no_leaks")
_SHARED = multiprocessing.Value("i", 0)  # of TorchRL's storages, whose file lives to the end
N = 3  # rollouts of a prompt


class Again(EpisodeTransform):
    """Asks again, so that episodes have up to three turns."""

    answers_cut_turns = True

    def after_turn(self, episode):
        if episode.num_turns < 1 + (episode.group_id + episode.row) % 3:
            episode.say({"role": "user", "content": f"again, {episode.num_turns}"})


def length_reward(completions, trainer_state):
    return [len(str(c)) + 0.01 * trainer_state.global_step for c in completions]


def make_env(num_prompts=9, *, groups=2, reward=length_reward, words="question", **primer):
    rows = [{"prompt": f"{words} <{i}>", "number": i} for i in range(num_prompts)]
    return ChatEnv(batch_size=groups * N).append_transform(
        Compose(
            DataLoadingPrimer(rows, group_size=N, **primer),
            RewardFunctions([reward], completion_format="messages"),
            Again(),
            StepCounter(max_steps=3),
        )
    )


class Run:
    """Model, optimizer, schedule, collector and loss, made anew as a second process would."""

    def __init__(self, model, tokenizer, *, streams=False, env=None, **collector):
        self.model = model
        self.policy = TransformersWrapper(
            model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 5}, write_tokens=False
        )
        self.buffer = ReplayBuffer(
            storage=LazyStackStorage(2 * N), transform=MCAdvantage(N), batch_size=2 * N
        )
        env = make_env(shuffle=True, seed=3) if env is None else env
        kind = StreamingCollector if streams else LLMCollector
        self.collector = kind(env, self.policy, replay_buffer=self.buffer, **collector)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))
        self.loss = GRPOLoss(self.policy)
        self.state = RunState(
            identity=identity_of(self.policy, model),
            model=model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            collector=self.collector,
        )

    def step(self):
        """Gives what the step was like."""
        rows = self.collector.collect().unbind(0)
        keys = [("tokens", "full"), ("log_probs", "full"), ("policy_versions", "full")]
        keys += ["reward", "group_id"]
        story = [[*(row[key].tolist() for key in keys), row["stop_reason"]] for row in rows]
        story.append(self.buffer[:]["advantage"].tolist())
        self.train()
        return story

    def train(self):
        batch = self.loss.pack(self.buffer[:])
        output = self.loss(batch, window=self.loss.measure_window(batch))
        self.optimizer.zero_grad()
        output.loss_objective.backward()
        self.optimizer.step()
        self.schedule.step()
        self.buffer.empty()
        self.collector.update_policy_weights_(self.model)


@pytest.fixture
def make_run(make_tiny_model, chatml_tokenizer):
    runs = []

    def make(seed=0, **settings):
        runs.append(Run(make_tiny_model(seed), chatml_tokenizer, **settings))
        return runs[-1]

    yield make
    for run in runs:
        run.collector.shutdown()


@pytest.mark.parametrize("streams", [False, True])
def test_S05_a_run_goes_on_bit_by_bit_from_every_step(streams, make_run):
    settings = {"streams": True, "staleness": OnPolicy()} if streams else {}
    whole = make_run(**settings)
    torch.manual_seed(11)
    whole.collector.update_policy_weights_(whole.model)
    stories, states = [], []
    for _ in range(6):
        stories.append(whole.step())
        states.append(copy.deepcopy(whole.state.state_dict()))
    last = {name: value.clone() for name, value in whole.model.state_dict().items()}
    assert stories[0][0][2] != stories[1][0][2]  # other versions
    for step, state in enumerate(states[:-1], 1):
        torch.manual_seed(step)  # whatever happened before
        run = make_run(seed=5, **settings)
        run.state.load_state_dict(state)
        run.collector.update_policy_weights_(run.model)
        assert [run.step() for _ in range(6 - step)] == stories[step:]
        assert all(torch.equal(last[n], value) for n, value in run.model.state_dict().items())
        run.collector.shutdown()


def test_a_restored_collector_wants_the_weights_first(make_run):
    run = make_run()
    run.collector.update_policy_weights_(run.model)
    run.step()
    state = copy.deepcopy(run.state.state_dict())
    other = make_run()
    other.state.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Hand the restored model over first"):
        other.collector.collect()
    assert other.collector.update_policy_weights_(other.model) == 2 == run.collector.policy_version


class Bumpy:
    """An engine that dies now and then."""

    def __init__(self, engine, chance):
        self.engine, self.chance = engine, chance
        self.vocab_size, self.max_model_len = engine.vocab_size, engine.max_model_len

    @property
    def version(self):
        return self.engine.version

    def generate(self, *args, **kwargs):
        if random.random() < self.chance:
            raise EngineDied("bumped")
        return self.engine.generate(*args, **kwargs)

    def update_weights(self, state_dict, *, version=None):
        self.engine.update_weights(state_dict, version=version)


class Killed:
    """A run that is killed again and again and goes on from its last checkpoint.

    Training is the same as no training here: what counts is which prompt was trained when.
    """

    def __init__(self, staleness, policies, num_prompts):
        self.staleness, self.policies, self.num_prompts = staleness, policies, num_prompts
        self.trained, self.saved, self.state = [], [], None
        self.kinds = Counter()
        self.num_kills = 0

    @staticmethod
    def prompt_of(row):
        return int(row["row"]["number"])

    def begin(self):
        attempts = Counter()

        def reward(number, completions):
            attempts[number[0]] += 1  # flat at the first attempt: dropped and drawn again
            flat = number[0] % 3 == 0 and attempts[number[0]] == 1
            return [1.0 if flat else float(i) for i in range(len(completions))]

        policy = self.policies()
        buffer = ReplayBuffer(
            storage=LazyStackStorage(2 * N),
            transform=MCAdvantage(N, zero_variance="refill"),
            batch_size=2 * N,
        )
        self.collector = StreamingCollector(
            make_env(self.num_prompts, reward=reward, shuffle=True, seed=2, num_epochs=1),
            policy,
            replay_buffer=buffer,
            staleness=self.staleness,
            engine=BatchingEngine(Bumpy(policy.engine, 0.02)),
        )
        self.weights = copy.deepcopy(policy.engine.model)
        if self.state is not None:
            self.collector.load_state_dict(copy.deepcopy(self.state))
        self.trained = list(self.saved)
        self.collector.update_policy_weights_(self.weights)

    def live(self, chooser):
        """Train, save now and then; gives whether the data have ended before the kill."""
        self.begin()
        try:
            for _ in range(chooser.randint(1, 6)):
                for batch in self.collector:
                    numbers = Counter(self.prompt_of(row) for row in batch.unbind(0))
                    self.collector.replay_buffer.empty()
                    if chooser.random() < 0.3:  # the batch that is in training is the saver's
                        self.save(numbers)
                    self.collector.update_policy_weights_(self.weights)
                    self.trained.append(numbers)
                    if chooser.random() < 0.5:
                        self.save()
                    break
                else:
                    return True
        finally:
            self.kinds.update(self.collector.ledger.balance.dropped.keys())
            self.collector.shutdown()
            self.num_kills += 1
        return False

    def save(self, batch=None):
        self.state = copy.deepcopy(self.collector.state_dict())
        self.saved = [*self.trained, *([] if batch is None else [batch])]


@pytest.mark.parametrize(
    "staleness", [Wait(2), Wait(3, pipeline_depth=1), Drop(1)], ids=["wait", "ahead", "drop"]
)
def test_S06_whenever_it_is_killed_no_prompt_is_skipped_or_trained_twice(
    staleness, make_tiny_model, chatml_tokenizer
):
    def policy():
        return TransformersWrapper(
            make_tiny_model(0),
            tokenizer=chatml_tokenizer,
            generate_kwargs={"max_new_tokens": 3},
            write_tokens=False,
        )

    chooser = random.Random(repr(staleness))
    run = Killed(staleness, policy, num_prompts=24)
    while not run.live(chooser):
        assert run.num_kills < 100
    numbers = sum(run.trained, Counter())
    ledger = run.collector.ledger
    assert ledger.frontier == 24  # every prompt was trained, or given up after its attempts
    assert len(numbers) == ledger.balance.trained.groups >= 8
    assert set(numbers.values()) == {N}
    assert run.num_kills > 3
    assert "no_signal" in run.kinds


class KilledWithPools(Killed):
    """Every third prompt is solved, and not to be drawn again."""

    @staticmethod
    def prompt_of(row):
        return int(row["group_id"])

    def begin(self):
        def reward(number, completions):
            return [(n % 3 == 0) + i / 10 for i, n in enumerate(number)]

        policy = self.policies()
        env = make_env(self.num_prompts, reward=reward, num_epochs=3)
        (primer,) = env.transforms_of(DataLoadingPrimer)
        primer.admit_by(DifficultyPools(admit_easy=0.0))
        self.collector = StreamingCollector(
            env,
            policy,
            replay_buffer=ReplayBuffer(storage=LazyStackStorage(2 * N), batch_size=2 * N),
            staleness=self.staleness,
            engine=BatchingEngine(Bumpy(policy.engine, 0.02)),
        )
        self.weights = copy.deepcopy(policy.engine.model)
        if self.state is not None:
            self.collector.load_state_dict(copy.deepcopy(self.state))
        self.trained = list(self.saved)
        self.collector.update_policy_weights_(self.weights)


def test_S06_with_difficulty_pools_each_prompt_is_trained_once_in_each_epoch_that_draws_it(
    make_tiny_model, chatml_tokenizer
):
    def policy():
        return TransformersWrapper(
            make_tiny_model(0),
            tokenizer=chatml_tokenizer,
            generate_kwargs={"max_new_tokens": 3},
            write_tokens=False,
        )

    chooser = random.Random(5)
    run = KilledWithPools(Wait(2), policy, num_prompts=18)
    while not run.live(chooser):
        assert run.num_kills < 100
    expected = {
        epoch * IDS_PER_EPOCH + number: N
        for epoch in range(3)
        for number in range(18)
        if epoch == 0 or number % 3
    }
    assert sum(run.trained, Counter()) == expected
    assert run.num_kills > 3


def test_S07_what_differs_is_named(make_run, chatml_tokenizer, make_tiny_model):
    run = make_run()
    run.step()
    state = copy.deepcopy(run.state.state_dict())

    def refuses(message, **settings):
        with pytest.raises(ValueError, match=message):
            make_run(**settings).state.load_state_dict(state)

    refuses("content", env=make_env(shuffle=True, seed=3, words="another"))
    refuses("seed", env=make_env(shuffle=True, seed=4))
    refuses("transforms", streams=True)
    other = make_run()
    other.state.identity["model.rope_theta"] = 1.0
    with pytest.raises(CheckpointMismatch, match=r"model.rope_theta was absent and is 1.0"):
        other.state.load_state_dict(state)
    saved = torch.get_rng_state()
    torch.rand(1)
    other.state.load_state_dict(state, allow=["model.rope_theta"])
    assert torch.equal(saved, torch.get_rng_state())
    for field, changed in (("chat_template", "x"), ("toolkit", "0.0.9"), ("tokenizer", "y")):
        of_another = state | {"identity": {**state["identity"], field: changed}}
        with pytest.raises(CheckpointMismatch, match=f"{field} was"):
            other.state.load_state_dict(of_another)


def test_what_has_no_state_is_refused():
    with pytest.raises(TypeError, match="sampler is of type object"):
        RunState(sampler=object())  # type: ignore[arg-type]
