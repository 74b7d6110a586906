"""Episodes that run by themselves come to the same end as those of a batch's steps."""

import asyncio
import threading
import time

import pytest
from torchrl.envs import RenameTransform, RewardScaling, RewardSum
from torchrl.envs.transforms import Compose

from collectors import LLMCollector
from collectors.trajectory_rows import trajectory_rows
from torchrl_envs import (
    ChatEnv,
    DataExhaustedError,
    DataLoadingPrimer,
    EnvironmentTools,
    EpisodeTransform,
    FunctionTools,
    RewardErrorLimit,
    RewardFunctions,
    StepCounter,
    TokenBudget,
)
from torchrl_envs.episode.async_runner import AsyncEpisodeRunner, prompt_of
from torchrl_modules.engines.batching_engine import BatchingEngine
from torchrl_modules.policies.async_policy import AsyncPolicy


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one.
        b: another.
    """
    return a + b


async def slow_add(a: int, b: int) -> int:
    """Add, later.

    Args:
        a: one.
        b: another.
    """
    await asyncio.sleep(0.01)
    return a + b


def fail(a: int) -> int:
    """Fail.

    Args:
        a: whatever.
    """
    raise ValueError(f"no {a}")


class Counter:
    """An environment with a state of its own."""

    def reset(self, **kwargs):
        if "broken" in kwargs["prompt"]:
            raise RuntimeError("does not start")
        self.count = 0
        return "count!"

    def count_up(self, by: int) -> str:
        """Count.

        Args:
            by: how far.
        """
        self.count += by
        return str(self.count)

    def get_reward(self):
        return self.count


def length_reward(completions):
    return [float(len(completion)) for completion in completions]


def rows_alone(env, policy, num_episodes):
    """Run episodes one by one in an event loop; their rows, as a collector makes them."""

    async def run():
        engine = BatchingEngine(policy.engine)
        runner = AsyncEpisodeRunner(env)
        episodes = runner.draw(num_episodes)
        taker = AsyncPolicy(policy, engine)
        await asyncio.gather(*[runner.run(episode, taker) for episode in episodes])
        batch = await asyncio.to_thread(runner.finish, episodes)
        engine.close()
        rows = trajectory_rows(batch, range(num_episodes), further=env.reward_entries)
        return [row for own in rows for row in own]

    env.check()
    return asyncio.run(run())


def story(row):
    """What has to be equal; log-probs and versions too."""
    plain = {}
    for key in ("reward", "scorable", "terminated", "truncated", "done", "group_id", "num_turns"):
        plain[key] = str(row[key].tolist())  # NaN is NaN
    for key in ("num_tool_calls", "num_tool_errors", "episode_reward"):
        plain[key] = str(row[key].tolist()) if row.get(key, None) is not None else None
    rewards = {} if row.get("rewards", None) is None else row["rewards"].items()
    plain["rewards"] = {name: str(value.tolist()) for name, value in rewards}
    plain["stop_reason"] = row["stop_reason"]
    plain["ids"] = row["tokens", "full"].tolist()
    plain["log_probs"] = row["log_probs", "full"].tolist()
    plain["assistant"] = row["masks", "all_assistant_mask"].tolist()
    return plain


ROWS = [{"prompt": text} for text in ("What is 2 + 2?", "say it again", "broken world", "hello")]


class Breaks(EpisodeTransform):
    """Raises in some event of each episode but the last, before others can take part in it."""

    async def begin(self, episode):
        if episode.group_id == 2:
            raise SystemExit("begin")

    async def before_turn(self, episode):
        await self.call(lambda: None, timeout_s=10.0)
        if episode.group_id == 0 and episode.num_turns == 1:
            raise ValueError("before_turn")

    def after_turn(self, episode):
        if episode.group_id == 1:
            raise ValueError("after_turn")
        episode.say({"role": "user", "content": "again"})


class Follows(EpisodeTransform):
    """Would be heard."""

    def after_turn(self, episode):
        assert episode.group_id != 1
        if episode.num_turns == 2:
            episode.terminate("followed")


def build_env(name, encoder, batch_size=4):
    parts = [DataLoadingPrimer(ROWS)]
    if name in ("tools", "counter", "budget"):
        parts += [FunctionTools([add, slow_add, fail]), RewardErrorLimit(1.0)]
    if name == "environment":
        parts += [EnvironmentTools(Counter), RewardErrorLimit(1.0)]
    else:
        parts.append(RewardFunctions([length_reward], completion_format="messages"))
    parts += {
        "counter": [StepCounter(max_steps=2)],
        "budget": [TokenBudget(60, encoder=encoder)],
        "breaks": [Breaks(), Follows(), RewardErrorLimit(1.0)],
        "scaled": [RewardScaling(loc=1.0, scale=3.0), RewardSum()],
    }.get(name, [])
    return ChatEnv(batch_size=batch_size).append_transform(Compose(*parts))


def turns_of(name, call_text):
    if name in ("tools", "counter", "budget"):
        first = call_text("add", a=1, b=2) + call_text("slow_add", a=3, b=4)
        return [first, call_text("fail", a=3) + call_text("nobody"), "It is 4."]
    if name == "environment":
        return [call_text("count_up", by=2), call_text("count_up", by=3), "It is 5."]
    return [[5, 6, 7]] if name == "cut" else ["It is 4."]


@pytest.mark.parametrize(
    "name", ["one turn", "tools", "counter", "budget", "environment", "scaled", "cut", "breaks"]
)
def test_an_episode_alone_ends_as_in_a_batch(name, scripted, call_text):
    def policy():
        turns = turns_of(name, call_text)
        return scripted(turns, generate_kwargs={"max_new_tokens": 64}, write_tokens=False)

    # An episode by itself does not know of how many rows the environment's batch is.
    alone, together = (build_env(name, policy().encoder, size) for size in (3, 4))
    own = [story(row) for row in rows_alone(alone, policy(), 4)]
    alone.close()
    collector = LLMCollector(together, policy())
    expected = [story(row) for row in collector.collect().unbind(0)]
    collector.shutdown()
    for one, other in zip(own, expected, strict=True):
        assert one == other
    if name == "environment":
        assert [row["stop_reason"].partition(":")[0] for row in own][2] == "environment_error"
    if name == "breaks":
        assert [row["stop_reason"] for row in own] == [
            "environment_error: Breaks: ValueError: before_turn",
            "environment_error: Breaks: ValueError: after_turn",
            "environment_error: Breaks: SystemExit: begin",
            "environment_done: followed",
        ]
        assert [row["scorable"] for row in own] == ["[False]"] * 3 + ["[True]"]
    if name == "scaled":
        assert own[0]["reward"] == own[0]["episode_reward"] == str([[3.0 * 1.0 + 1.0]])


def test_a_slow_tool_holds_up_its_own_episode_only(scripted, call_text):
    order, turn = [], threading.Event()

    def wait(a: int) -> int:
        """Wait.

        Args:
            a: how.
        """
        if a == 1:
            assert turn.wait(30.0)
        order.append(a)
        return a

    env = ChatEnv(batch_size=2).append_transform(
        Compose(
            DataLoadingPrimer([{"prompt": "first"}, {"prompt": "second"}]),
            FunctionTools([wait]),
        )
    )
    policy = scripted(
        {
            "first": [call_text("wait", a=1), "hello"],
            "second": [call_text("wait", a=2), call_text("wait", a=3), "hello"],
        },
        write_tokens=False,
    )

    async def run():
        runner = AsyncEpisodeRunner(env)
        first, second = runner.draw(2)
        taker = AsyncPolicy(policy, BatchingEngine(policy.engine))
        held = asyncio.create_task(runner.run(first, taker))
        await runner.run(second, taker)
        assert second.stop_reason == "answered"
        assert not held.done()
        turn.set()
        await held
        await asyncio.to_thread(runner.give_up, [first, second])

    env.check()
    asyncio.run(run())
    env.close()
    assert order == [2, 3, 1]


@pytest.mark.parametrize("kind", ["sync", "async", "blocking"])
def test_a_deadline_ends_a_call_and_no_other(kind, scripted, call_text):
    stop = threading.Event()

    def hang(a: int) -> int:
        """Hang.

        Args:
            a: whatever.
        """
        stop.wait(30.0)
        return a

    async def hang_async(a: int) -> int:
        """Hang.

        Args:
            a: whatever.
        """
        await asyncio.sleep(30.0)
        return a

    async def block(a: int) -> int:
        """Block the loop.

        Args:
            a: whatever.
        """
        stop.wait(30.0)
        return a

    tool = {"sync": hang, "async": hang_async, "blocking": block}[kind]
    tools = FunctionTools([tool, slow_add], timeout_s=0.5)
    env = ChatEnv(batch_size=2).append_transform(
        Compose(DataLoadingPrimer([{"prompt": "first"}, {"prompt": "second"}]), tools)
    )
    policy = scripted(
        {
            "first": [call_text(tool.__name__, a=1), "hello"],
            "second": [call_text("slow_add", a=2, b=1), "hello"],
        },
        write_tokens=False,
    )
    start = time.monotonic()
    late, good = rows_alone(env, policy, 2)
    stop.set()
    env.close()
    assert time.monotonic() - start < 20
    answers = [row["history", "full"].content for row in (late, good)]
    assert "no answer within 0.5 s" in str(answers[0])
    assert "3" in list(answers[1])[-2]


def test_episodes_that_no_data_are_left_for_are_closed():
    """An evaluation draws until the data end; each left a batch of them in its environment."""
    env = ChatEnv(batch_size=2).append_transform(
        DataLoadingPrimer([{"prompt": "first"}, {"prompt": "second"}], num_epochs=1)
    )
    runner = AsyncEpisodeRunner(env)
    runner.give_up(runner.draw(2))
    with pytest.raises(DataExhaustedError):
        runner.draw(2)
    assert env.runner._open == {}
    env.close()


def test_what_works_on_batches_of_steps_is_refused():
    env = ChatEnv(batch_size=2).append_transform(
        Compose(DataLoadingPrimer([{"prompt": "first"}]), RenameTransform(["group_id"], ["group"]))
    )
    with pytest.raises(ValueError, match="RenameTransform works on the steps of a batch"):
        AsyncEpisodeRunner(env)


class Notes(EpisodeTransform):
    """Notes the example of each episode before it begins."""

    def __init__(self):
        super().__init__()
        self.told = []

    def drawn(self, episodes):
        self.told += [(episode.example["prompt"], episode.seed) for episode in episodes]


def test_a_prompt_that_is_drawn_once_more_is_told_of_as_the_first_time():
    """On Ray, and where a group is drawn again, nobody draws from the data."""
    notes, data = Notes(), DataLoadingPrimer([{"prompt": "a"}], group_size=2, num_epochs=1)
    env = ChatEnv(batch_size=3).append_transform(notes).append_transform(data)
    runner = AsyncEpisodeRunner(env)
    first, second, without = runner.draw(3)
    assert notes.told == [("a", first.seed), ("a", second.seed)]
    assert without.stop_reason == "no_data"
    again = runner.draw_again(prompt_of(first), 7, 2)
    assert notes.told[2:] == [("a", 7), ("a", 7)]
    runner.give_up([first, second, without, *again])
