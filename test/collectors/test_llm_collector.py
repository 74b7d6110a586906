"""The collector: batches into a buffer, versions, weight updates, determinism, its end."""

import copy
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torchrl.data import LazyStackStorage, LazyTensorStorage, ReplayBuffer
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import Compose

from collectors import LLMCollector, OnPolicy, StreamingCollector
from objectives import MCAdvantage, PairSelector, PassAtK, RoleBaseline, TopKRewardSelector
from torchrl_data import builtin_template
from torchrl_envs import (
    ChatEnv,
    DataExhaustedError,
    DataLoadingPrimer,
    EnvironmentTools,
    FunctionTools,
    RewardFunctions,
    StepCounter,
)
from torchrl_modules import TransformersWrapper


def length_reward(completions):
    return [float(len(completion)) for completion in completions]


def make_env(num_rows=2, *, group_size=2, batch_size=4, **primer):
    rows = [{"prompt": f"question <{i}>"} for i in range(num_rows)]
    return ChatEnv(batch_size=batch_size).append_transform(
        Compose(
            DataLoadingPrimer(rows, group_size=group_size, **primer),
            RewardFunctions([length_reward]),
            StepCounter(max_steps=2),
        )
    )


def is_first(completions):
    return [float(place == 0) for place in range(len(completions))]


def place_of(completions):
    return list(range(len(completions)))


@pytest.mark.parametrize("kind", [LLMCollector, StreamingCollector])
@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        # 0.75 / 0.5 and -0.25 / 0.5: less its mean by its deviation; place_of counts nothing.
        pytest.param([2.0, 0.0], [1.5, -0.5, -0.5, -0.5], id="a weight of 0 is that of a metric"),
        pytest.param([0.0, 3.0], [-1.1619, -0.3873, 0.3873, 1.1619], id="by sqrt(5/3)"),
    ],
)
def test_gdpo_weighs_the_rewards_as_the_environment_does(kind, weights, expected, make_policy):
    env = ChatEnv(batch_size=4).append_transform(
        Compose(
            DataLoadingPrimer([{"prompt": "question"}], group_size=4),
            RewardFunctions([is_first, place_of], weights=weights),
            StepCounter(max_steps=1),
        )
    )
    advantage = MCAdvantage(4, estimator="gdpo")
    buffer = ReplayBuffer(storage=LazyStackStorage(4), transform=advantage, batch_size=4)
    with kind(env, make_policy(), replay_buffer=buffer) as collector:
        collector.collect()
    found = sorted(buffer[:]["advantage"].flatten().tolist(), reverse=expected[0] > expected[1])
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.fixture
def make_policy(chatml_tokenizer, make_tiny_model):
    def make(seed=0, **sampling):
        sampling = {"max_new_tokens": 5} | sampling
        return TransformersWrapper(
            make_tiny_model(seed),
            tokenizer=chatml_tokenizer,
            generate_kwargs=sampling,
            write_tokens=False,
        )

    return make


def ids_of(batch):
    return [row["tokens", "full"].tolist() for row in batch.unbind(0)]


def test_the_same_seed_gives_the_same_ids_and_rewards(make_policy):
    def run(seed):
        collector = LLMCollector(make_env(shuffle=True, seed=3), make_policy())
        torch.manual_seed(seed)
        batches = [collector.collect() for _ in range(2)]
        collector.shutdown()
        return [(ids_of(batch), batch["reward"].tolist()) for batch in batches]

    assert run(0) == run(0)
    assert run(0) != run(1)


def test_an_update_changes_the_tokens_to_those_of_the_new_weights(make_policy, make_tiny_model):
    collector = LLMCollector(make_env(), make_policy(0, temperature=0.0))
    other = LLMCollector(make_env(), make_policy(1, temperature=0.0))
    old, expected = collector.collect(), other.collect()
    assert ids_of(old) != ids_of(expected)
    assert collector.policy_version == 0
    assert old["policy_version"].tolist() == [0] * 4

    source = make_tiny_model(1)
    assert collector.update_policy_weights_(source) == 1
    assert collector.policy_version == 1
    new = collector.collect()
    assert ids_of(new) == ids_of(expected)
    assert new["policy_version"].tolist() == [1] * 4
    for row in new.unbind(0):
        mask = row["masks", "all_assistant_mask"]
        versions = row["policy_versions", "full"]
        assert torch.equal(versions, torch.where(mask, 1, -1))

    # The policy has a copy: what the trainer does next does not reach it.
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.zero_()
    assert ids_of(collector.collect()) == ids_of(expected)


@pytest.mark.parametrize("fault", ["shape", "nan", "missing", "unknown"])
def test_a_wrong_update_is_refused_whole(make_policy, make_tiny_model, fault):
    collector = LLMCollector(make_env(), make_policy(0, temperature=0.0))
    before = ids_of(collector.collect())
    weights = dict(make_tiny_model(1).state_dict())
    name = "model.norm.weight"  # the last one, after all others
    if fault == "shape":
        weights[name] = torch.zeros(3)
    elif fault == "nan":
        weights[name] = torch.full_like(weights[name], float("nan"))
    elif fault == "missing":
        del weights[name]
    else:
        weights["extra"] = torch.zeros(1)
    said = {"missing": f"it lacks {name}", "unknown": "it has no use for extra"}.get(fault, name)
    with pytest.raises(ValueError, match=f"keeps its weights .1 faults.: {said}"):
        collector.update_policy_weights_(weights)
    assert collector.policy_version == 0
    assert ids_of(collector.collect()) == before


def test_the_buffer_holds_what_the_collector_gives(make_policy):
    buffer = ReplayBuffer(storage=LazyStackStorage(8))
    collector = LLMCollector(make_env(), make_policy(), replay_buffer=buffer)
    torch.manual_seed(0)
    batches = [collector.collect(), collector.collect()]
    stored = buffer[:]
    assert ids_of(stored) == ids_of(batches[0]) + ids_of(batches[1])
    epoch = 2**40
    assert stored["group_id"].tolist() == [0, 0, 1, 1, epoch, epoch, epoch + 1, epoch + 1]
    assert stored["reward"].shape == (8, 1, 1)
    assert stored["scorable"].all()
    assert stored["done"].all()
    first = stored[0]
    full = first["tokens", "full"]
    split = torch.cat([first["tokens", "prompt"], first["tokens", "response"]])
    assert torch.equal(full, split)
    said = first["history", "full"].to_chats()[1]["content"]
    assert length_reward([said]) == [first["reward"].item()]


def test_rewards_can_be_changed_before_they_are_stored(make_policy):
    def negate(trajectories):
        for row in trajectories.unbind(0):
            row["reward"] = -row["reward"]
        return trajectories

    buffer = ReplayBuffer(storage=LazyStackStorage(4))
    collector = LLMCollector(make_env(), make_policy(), replay_buffer=buffer, postproc=negate)
    given = collector.collect()
    assert given["reward"].max() < 0
    assert torch.equal(buffer[:]["reward"], given["reward"])


@pytest.mark.parametrize(
    ("total", "epochs", "batches"),
    [
        pytest.param(8, None, 2, id="a budget"),
        pytest.param(5, None, 2, id="a budget that is no multiple of the batch"),
        pytest.param(None, 3, 3, id="the data end"),
        pytest.param(100, 3, 3, id="the data end before the budget"),
    ],
)
def test_a_run_ends(scripted, total, epochs, batches):
    collector = LLMCollector(
        make_env(num_epochs=epochs), scripted(["done"]), total_trajectories=total
    )
    assert len(list(collector)) == batches
    assert collector.num_collected == 4 * batches


def test_data_that_end_inside_a_batch(scripted):
    closed = []

    class Closes:
        def reset(self):
            pass

        def get_reward(self):
            return 1.0

        def close(self):
            closed.append(self)

    env = ChatEnv(batch_size=2).append_transform(
        Compose(
            DataLoadingPrimer([{"prompt": str(i)} for i in range(3)], num_epochs=1),
            EnvironmentTools(Closes),
        )
    )
    collector = LLMCollector(env, scripted(["done"]))
    assert [len(batch) for batch in collector] == [2, 1]
    with pytest.raises(DataExhaustedError, match="all rows of the data were drawn 1 times"):
        collector.collect()
    collector.shutdown()
    assert len(closed) == 3, "the row that had no partner never got an environment"


def test_shutdown_closes_what_runs(scripted, call_text):
    events = []

    class Raises:
        def reset(self):
            events.append("reset")

        def ping(self) -> str:
            """Answer."""
            return "pong"

        def get_reward(self):
            return 1.0

        def close(self):
            events.append("close")

    env = ChatEnv(batch_size=2).append_transform(
        Compose(DataLoadingPrimer([{"prompt": "x"}]), EnvironmentTools(Raises))
    )
    policy = scripted([call_text("ping")])
    calls = []

    def breaks(batch):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("the engine is gone")
        return policy(batch)

    collector = LLMCollector(env, breaks)
    with pytest.raises(OSError, match="engine is gone"):
        collector.collect()
    assert events == ["reset"] * 2 + ["close"] * 2
    collector.shutdown()
    collector.shutdown()
    assert events.count("close") == 2


def test_an_episode_that_nothing_ends_is_an_error(scripted, call_text):
    class Talks:
        def reset(self):
            pass

        def ping(self) -> str:
            """Answer."""
            return "pong"

        def get_reward(self):
            return 1.0

    env = ChatEnv(batch_size=2).append_transform(
        Compose(DataLoadingPrimer([{"prompt": "x"}]), EnvironmentTools(Talks))
    )
    collector = LLMCollector(env, scripted([call_text("ping")]), max_turns=3)
    with pytest.raises(RuntimeError, match=r"2 episodes did not end within 3 turns.*StepCounter"):
        collector.collect()
    collector.shutdown()


def test_rows_that_are_done_are_not_generated_again(scripted, call_text):
    class Talks:
        def reset(self):
            pass

        def ping(self) -> str:
            """Answer."""
            return "pong"

        def get_reward(self):
            return 1.0

    env = ChatEnv(batch_size=3).append_transform(
        Compose(
            DataLoadingPrimer([{"prompt": f"<{i}>"} for i in range(3)]), EnvironmentTools(Talks)
        )
    )
    ping = call_text("ping")
    policy = scripted({"<0>": ["a"], "<1>": [ping, ping, "b"], "<2>": [ping, "c"]})
    batch = LLMCollector(env, policy).collect()
    assert batch["num_turns"].tolist() == [1, 3, 2], "in the environment's order"
    assert len(policy.engine.served) == 6
    assert [row["history", "full"].to_chats()[-1]["content"] for row in batch.unbind(0)] == [
        "a",
        "b",
        "c",
    ]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        pytest.param({"env": "bare"}, TypeError, "with transforms, got ChatEnv", id="bare"),
        pytest.param(
            {"env": "plain"}, TypeError, "with transforms, got TransformedEnv", id="TransformedEnv"
        ),
        pytest.param({"max_turns": 0}, ValueError, "at least 1, got 0", id="no turns"),
        pytest.param(
            {"total_trajectories": 0}, ValueError, "total_trajectories .* at least 1, got 0", id="0"
        ),
    ],
)
def test_wrong_construction_is_named(scripted, change, error, words):
    envs = {
        "bare": ChatEnv,
        "plain": lambda: TransformedEnv(ChatEnv(), StepCounter(max_steps=1)),
    }
    change = dict(change)
    env = envs.get(change.pop("env", None), make_env)()
    with pytest.raises(error, match=words):
        LLMCollector(env, scripted(["x"]), **change)


@pytest.mark.parametrize("shape", [(), (2, 2)])
def test_any_batch_shape(make_policy, shape):
    collector = LLMCollector(make_env(4, batch_size=shape, group_size=1), make_policy())
    batch = collector.collect()
    size = torch.Size(shape).numel()
    assert batch.batch_size == (size,)
    assert batch["group_id"].view(-1).tolist() == list(range(size))
    collector.shutdown()


@pytest.mark.parametrize("part", ["postproc", "buffer"])
def test_nothing_is_lost_when_what_takes_the_trajectories_fails(make_policy, part):
    fails = [True, False, False]

    def fail_once(batch):
        if fails.pop(0):
            raise OSError("the disk is full")
        return batch

    buffer = ReplayBuffer(storage=LazyStackStorage(8))
    if part == "buffer":
        extend = buffer.extend
        buffer.extend = lambda batch: extend(fail_once(batch))
    env = make_env(num_rows=4)
    collector = LLMCollector(
        env,
        make_policy(),
        replay_buffer=buffer,
        postproc=fail_once if part == "postproc" else None,
    )
    with pytest.raises(OSError, match="the disk is full"):
        collector.collect()
    assert collector.num_collected == 0
    assert collector.collect()["group_id"].view(-1).tolist() == [0, 0, 1, 1]
    assert collector.num_collected == len(buffer) == 4
    ledger = next(env.transforms_of(DataLoadingPrimer)).ledger
    assert (ledger["drawn"], ledger["ended"]) == (4, 4)
    collector.shutdown()


@pytest.mark.parametrize(
    ("policy", "settings", "kind", "message"),
    [
        pytest.param({"num_samples": 2}, {}, ValueError, "num_samples=2", id="samples"),
        pytest.param({"generate": False}, {}, ValueError, "generate=False", id="scorer"),
        pytest.param({"input_mode": "text"}, {}, ValueError, "input_mode='text'", id="mode"),
        pytest.param(None, {}, TypeError, "Wrap a model", id="model"),
        pytest.param({}, {"group": 4}, ValueError, "groups of 4", id="groups"),
    ],
)
def test_parts_that_do_not_fit_are_refused_when_composed(
    chatml_tokenizer, make_tiny_model, policy, settings, kind, message
):
    model = make_tiny_model()
    if policy is not None:
        policy = TransformersWrapper(model, tokenizer=chatml_tokenizer, **policy)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(8), transform=MCAdvantage(settings.get("group", 2))
    )
    with pytest.raises(kind, match=message):
        LLMCollector(make_env(), policy or model, replay_buffer=buffer)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        pytest.param([TopKRewardSelector(4)], "TopK.* of 4 rows, and gets groups of 2", id="top k"),
        pytest.param([PairSelector(4)], "PairS.* of 4 rows, and gets groups of 2", id="pairs"),
        pytest.param(  # the selector gets the rows first, and gives one of two
            [MCAdvantage(2), TopKRewardSelector(2)],
            "MCAdvantage waits for groups of 2 rows, and gets groups of 1",
            id="order",
        ),
        pytest.param([TopKRewardSelector(2), MCAdvantage(2)], None, id="these fit"),
    ],
)
def test_groups_that_would_never_be_complete_are_refused(make_policy, parts, message):
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=Compose(*parts))
    refused = pytest.raises(ValueError, match=message) if message else nullcontext()
    with refused, LLMCollector(make_env(), make_policy(), replay_buffer=buffer):
        pass


@pytest.mark.parametrize("estimator", ["group", "rloo", "maxrl", "gdpo", PassAtK(k=1)])
def test_groups_of_one_rollout_that_are_compared_with_nothing_are_refused(make_policy, estimator):
    """R less the mean of a group of one is 0, whatever R is; a baseline of the past is not."""

    def compose(size, **chosen):
        transform = MCAdvantage(size, **chosen)
        buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=transform)
        env = make_env(group_size=size)
        LLMCollector(env, make_policy(), replay_buffer=buffer).shutdown()

    with pytest.raises(ValueError, match="each group has one, whose advantage is always 0"):
        compose(1, estimator=estimator)
    compose(2, estimator=estimator)
    compose(1, estimator=RoleBaseline())


def test_a_storage_smaller_than_a_batch_is_refused_when_composed(make_policy):
    """Half of the groups would be overwritten before anybody reads them."""
    env = make_env()
    too_small = env.batch_size.numel() - 1
    buffer = ReplayBuffer(storage=LazyStackStorage(too_small), transform=MCAdvantage(2))
    with pytest.raises(ValueError, match=rf"the storage of the buffer holds {too_small}"):
        LLMCollector(env, make_policy(), replay_buffer=buffer)


@pytest.mark.parametrize("kind", [LLMCollector, StreamingCollector])
def test_a_buffer_that_draws_ahead_is_refused_when_composed(make_policy, kind):
    buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=4, prefetch=1)
    with pytest.raises(ValueError, match=f"{kind.__name__}: the replay buffer has a prefetch"):
        kind(make_env(), make_policy(), replay_buffer=buffer)


@pytest.mark.parametrize("kind", [LLMCollector, StreamingCollector])
def test_a_storage_of_one_shape_is_refused_when_composed(make_policy, kind):
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    words = f"{kind.__name__}: rows have different lengths, which LazyTensorStorage can't hold. Gi"
    with pytest.raises(ValueError, match=words):
        kind(make_env(), make_policy(), replay_buffer=buffer)
    with kind(make_env(), make_policy(), replay_buffer=buffer, postproc=lambda rows: rows):
        pass  # who makes rows of one shape may


def test_an_environment_without_data_is_refused_when_composed(make_policy):
    env = ChatEnv(batch_size=2).append_transform(StepCounter(max_steps=2))
    with pytest.raises(ValueError, match="Append a DataLoadingPrimer"):
        LLMCollector(env, make_policy())


def test_advantages_without_any_reward_are_refused_when_composed(make_policy):
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(2))

    def collector(**settings):
        env = ChatEnv(batch_size=2).append_transform(
            Compose(
                DataLoadingPrimer([{"prompt": "x"}], group_size=2),
                FunctionTools([add]),
                StepCounter(max_steps=2),
            )
        )
        return LLMCollector(env, make_policy(), replay_buffer=buffer, **settings)

    with pytest.raises(ValueError, match=r"MCAdvantage needs rewards.*RewardFunctions"):
        collector()

    def score(batch):
        return batch.set("reward", torch.rand(len(batch), 1, 1))

    rows = collector(postproc=score).collect()
    assert len(rows) == len(buffer) == 2


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One number.
        b: Another number.
    """
    return a + b


def test_a_pickled_collector_goes_on_where_it_was(make_policy):
    collector = LLMCollector(make_env(4), make_policy(temperature=0.0))
    collector.collect()
    copy = pickle.loads(pickle.dumps(collector))
    assert ids_of(copy.collect()) == ids_of(collector.collect())
    copy.shutdown()
    collector.shutdown()


def test_template_kwargs_of_the_environment_alone_are_refused(chatml_tokenizer, scripted):
    tokenizer = copy.deepcopy(chatml_tokenizer)
    tokenizer.chat_template = builtin_template("qwen3")
    env = ChatEnv(
        batch_size=2, tokenizer=tokenizer, template_kwargs={"enable_thinking": False}
    ).append_transform(DataLoadingPrimer([{"prompt": "What is 2 + 2?"}] * 2))
    policy = scripted(["done"], tokenizer=tokenizer, write_tokens=False)
    with pytest.raises(ValueError, match=r"enable_thinking \(False / 'not given'\)"):
        LLMCollector(env, policy)
    env.close()


NEMOTRON = "{# <TOOLCALL> #}" + builtin_template("chatml")
MISTRAL = "{# [TOOL_CALLS] #}" + builtin_template("chatml")


@pytest.mark.parametrize("kind", [LLMCollector, StreamingCollector])
@pytest.mark.parametrize(
    ("template", "said"),
    [
        (NEMOTRON, '<TOOLCALL>[{"name": "add", "arguments": {"a": 1, "b": 2}}]</TOOLCALL>'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]'),
        (None, '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'),
    ],
    ids=["nemotron", "mistral", "hermes"],
)
def test_calls_are_read_as_the_policys_template_teaches(scripted, kind, template, said):
    if kind is StreamingCollector:
        kind = partial(StreamingCollector, staleness=OnPolicy())

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one.
            b: another.
        """
        return a + b

    env = ChatEnv(batch_size=1).append_transform(
        Compose(
            DataLoadingPrimer([{"prompt": "1 + 2? Call add."}]),
            FunctionTools([add], show_schemas=False),
            RewardFunctions([length_reward]),
            StepCounter(3),
        )
    )
    with kind(env, scripted([said, "It is 3."], chat_template=template)) as collector:
        (row,) = collector.collect().unbind(0)
    assert int(row["num_tool_calls"]) == 1
    roles = [message["role"] for message in row["history", "full"].to_chats()]
    assert roles == ["user", "assistant", "tool", "assistant"]
