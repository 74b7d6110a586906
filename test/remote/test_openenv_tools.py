"""An OpenEnv server in an environment: its actions are tools, its losses are a row's own."""

import pytest
from process import ServerProcess
from torchrl.envs.transforms import Compose

from collectors import LLMCollector
from torchrl_envs import ChatEnv, DataLoadingPrimer, EnvironmentTools, RewardFunctions, StepCounter
from torchrl_envs.openenv import OpenEnvConnectionError, OpenEnvSession, OpenEnvTools
from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.task import TaskEnv

SETTINGS = {"show_schemas": False}


def guess(word: str) -> dict[str, str]:
    """Guess a word.

    Args:
        word: Five letters.
    """
    if word == "aaaaa":
        raise ValueError("that is no word")
    return {"message": f"[{word}]"}


def feedback(result):
    return result.observation["messages"][0]["content"].strip().split("\n", 1)[-1][-200:]


def collector_of(rows, policy, *parts, group_size=1):
    env = ChatEnv(batch_size=(len(rows) * group_size,)).append_transform(
        Compose(DataLoadingPrimer(rows, group_size=group_size), *parts, StepCounter(max_steps=12))
    )
    return LLMCollector(env, policy)


def messages(row):
    return [message.content for message in row["history"].full.unbind(0)]


def test_functions_make_the_actions(servers, scripted, call_text):
    rows = [{"prompt": name, "word": "crane"} for name in ("win", "lose", "silent")]
    policy = scripted(
        {
            "win": [call_text("guess", word="cargo"), call_text("guess", word="crane")],
            "lose": [call_text("guess", word="aaaaa"), *[call_text("guess", word="cargo")] * 6],
            "silent": ["I do not play."],
        }
    )
    tools = OpenEnvTools(
        f"{servers}/wordle", actions=[guess], reset_columns=["word"], text_of=feedback, **SETTINGS
    )
    collector = collector_of(rows, policy, tools)
    batch = collector.collect()
    won, lost, silent = batch.unbind(0)
    assert batch["reward"].flatten().tolist() == [1.0, 0.0, 0.0]
    assert messages(won)[0].endswith("You have 6 guesses. Put each in brackets: [crane].")
    assert "C A R G O\nG Y Y X X" in messages(won)[2]
    assert [row["stop_reason"] for row in (won, lost, silent)] == [
        "environment_done",
        "environment_done",
        "answered",
    ]
    assert won["terminated"].item()
    assert messages(lost)[2] == '{"error": "ValueError: that is no word"}'
    # Who never acts has the reward that the environment starts with.
    assert batch["scorable"].all()
    assert silent["rewards", "OpenEnv"].item() == 0.0
    # Every session was given back: a second batch finds as many.
    for _ in range(2):
        collector.collect()
    collector.shutdown()


def test_the_server_says_what_it_can_do(servers, scripted, call_text):
    tools = OpenEnvTools(f"{servers}/echo", **SETTINGS)
    (action,) = tools.actions.values()
    assert action.tool.name == "echo"
    shown = action.tool.schema["function"]
    assert shown["description"] == "Say something to the environment, which says it again."
    assert "metadata" not in shown["parameters"]["properties"]
    policy = scripted(
        [
            call_text("echo", message="hi") + call_text("echo", message="you"),
            call_text("echo", text="hi"),
            call_text("echo", message="x", fail=True),
            "done",
        ]
    )
    collector = collector_of([{"prompt": "go"}] * 2, policy, tools)
    batch = collector.collect()
    first, second, invalid, failed = (messages(batch[0])[i] for i in (2, 3, 5, 7))
    assert first == '{"echoed_message": "hi", "num_steps": 1, "was_reset": true}'
    assert second == '{"echoed_message": "you", "num_steps": 2, "was_reset": true}'
    assert "'text' was unexpected" in invalid or "'message' is a required" in invalid
    assert "step was told to fail" in failed
    assert batch["reward"].flatten().tolist() == pytest.approx([0.5, 0.5])
    collector.shutdown()


def test_mcp_tools_of_a_server(servers, scripted, call_text):
    tools = OpenEnvTools(f"{servers}/calculator", **SETTINGS)
    assert list(tools.actions) == ["add", "last"]
    policy = scripted(
        {
            "first": [call_text("add", a=2, b=3), call_text("last"), "done"],
            "second": [call_text("add", a=2, b="x"), call_text("last"), "done"],
        }
    )

    def used(environments, **kwargs):
        return [1.0 for _ in environments]

    rows = [{"prompt": "first"}, {"prompt": "second"}]
    collector = collector_of(rows, policy, tools, RewardFunctions([used]))
    batch = collector.collect()
    assert messages(batch[0])[2::2] == ["5", "5"]
    assert "'x' is not of type 'integer'" in messages(batch[1])[2]
    assert messages(batch[1])[4] == "0"
    assert batch["reward"].flatten().tolist() == [1.0, 1.0]
    assert batch["rewards", "OpenEnv"].isnan().all()
    collector.shutdown()


def test_groups_start_from_the_same_seed(servers, scripted):
    tools = OpenEnvTools(f"{servers}/echo", **SETTINGS)
    collector = collector_of([{"prompt": "p"}] * 2, scripted(["done"]), tools, group_size=4)
    openings = [messages(row)[0] for row in collector.collect().unbind(0)]
    assert len(set(openings[:4])) == len(set(openings[4:])) == 1
    assert openings[0] != openings[4]
    collector.shutdown()


def test_a_hung_step_truncates_its_row_alone(servers, scripted, call_text):
    tools = OpenEnvTools(f"{servers}/echo", timeout_s=4.0, **SETTINGS)
    policy = scripted(
        {
            "hangs": [call_text("echo", message="x", sleep_s=60) + call_text("echo", message="y")],
            "works": [call_text("echo", message="x"), call_text("echo", message="x"), "done"],
        }
    )
    collector = collector_of([{"prompt": "hangs"}, {"prompt": "works"}], policy, tools)
    hung, fine = collector.collect().unbind(0)
    assert hung["truncated"].item()
    assert not hung["terminated"].item()
    assert not hung["scorable"].item()
    assert hung["stop_reason"].startswith("environment_error: OpenEnvTimeoutError")
    assert "no answer to step within 4 s" in hung["reward_errors"]
    assert "SessionNotResetError" in messages(hung)[3]
    assert (fine["scorable"].item(), fine["stop_reason"]) == (True, "answered")
    collector.shutdown()


def test_a_server_without_room_and_a_dead_one(scripted, call_text):
    rows = [{"prompt": f"row {i};"} for i in range(3)]
    with ServerProcess(echo="echo:2") as server:
        tools = OpenEnvTools(f"{server.url}/echo", capacity_timeout_s=0.5, **SETTINGS)
        # Any two of the three get a session; one of them ends the server for the other one.
        policy = scripted([call_text("echo", message="x", kill_server=True), "done"])
        collector = collector_of(rows, policy, tools)
        batch = collector.collect()
        reasons = [row["stop_reason"] for row in batch.unbind(0)]
        kinds = ["OpenEnvCapacityError" in r for r in reasons]
        assert sum(kinds) == 1
        assert all(r.startswith("environment_error: OpenEnv") for r in reasons)
        assert not batch["scorable"].any()
        assert batch["truncated"].all()
        assert server.process.wait(timeout=60) == 1
        gone = collector.collect()
        assert all("no connection" in row["stop_reason"] for row in gone.unbind(0))
        collector.shutdown()


def test_rows_of_two_servers(servers, scripted, call_text):
    rows = [{"prompt": "w", "env": "wordle", "word": "crane"}]
    rows += [{"prompt": "e", "env": "echo", "word": None}]
    parts = [
        OpenEnvTools(
            f"{servers}/wordle",
            actions=[guess],
            reset_columns=["word"],
            text_of=feedback,
            where={"env": "wordle"},
            name="wordle",
            **SETTINGS,
        ),
        OpenEnvTools(f"{servers}/echo", where={"env": "echo"}, name="echo", **SETTINGS),
    ]
    policy = scripted(
        {"w": [call_text("guess", word="crane")], "e": [call_text("guess", word="crane"), "done"]}
    )
    collector = collector_of(rows, policy, *parts)
    batch = collector.collect()
    assert "unknown tool 'guess'; the tools are ['echo']" in messages(batch[1])[2]
    assert batch["rewards", "wordle"].isnan().flatten().tolist() == [False, True]
    collector.shutdown()


def test_an_environment_class_with_a_session_of_its_own(servers, scripted, call_text):
    class Catch:
        def __init__(self):
            self.session = OpenEnvSession(f"{servers}/catch", message_timeout_s=20)
            self.reward = 0.0

        async def reset(self, *, seed: int, **row):
            board = (await self.session.reset(seed=seed)).observation["info_state"]
            return str(board.index(1.0))

        async def stay(self) -> str:
            """Leave the paddle where it is."""
            result = await self.session.step({"action_id": 1})
            self.reward = result.reward
            return "over" if result.done else "falling"

        def get_reward(self) -> float:
            return self.reward

        async def close(self):
            await self.session.close()

    policy = scripted([*[call_text("stay")] * 9, "done"])
    tools = EnvironmentTools(Catch, show_schemas=False)
    collector = collector_of([{"prompt": str(i)} for i in range(16)], policy, tools)
    batch = collector.collect()
    for row in batch.unbind(0):
        column = int(messages(row)[0].split()[-1])
        assert row["reward"].item() == (1.0 if column == 2 else -1.0)
        assert messages(row)[-2] == "over"
    collector.shutdown()


def test_a_class_that_loses_its_session_loses_its_row_alone(servers, scripted, call_text):
    class Waiter:
        def __init__(self):
            self.session = OpenEnvSession(f"{servers}/echo")

        async def reset(self, **row):
            await self.session.reset()

        async def wait(self, duration_s: float) -> str:
            """Wait.

            Args:
                duration_s: How long.
            """
            self.session.message_timeout_s = 0.5 if duration_s else 60.0
            result = await self.session.step({"message": "waited", "sleep_s": duration_s})
            return result.observation["echoed_message"]

        def get_reward(self) -> float:
            return 1.0

        async def close(self):
            await self.session.close()

    policy = scripted(
        {
            "long": [call_text("wait", duration_s=60.0), "done"],
            "short": [call_text("wait", duration_s=0.0), "done"],
        }
    )
    tools = EnvironmentTools(Waiter, show_schemas=False)
    collector = collector_of([{"prompt": "long"}, {"prompt": "short"}], policy, tools)
    lost, fine = collector.collect().unbind(0)
    assert lost["truncated"].item()
    assert not lost["scorable"].item()
    assert lost["stop_reason"].startswith("environment_error: OpenEnvTimeoutError")
    assert lost["reward_errors"] == lost["stop_reason"]
    assert fine["reward"].item() == 1.0
    assert messages(fine)[2] == "waited"
    collector.shutdown()


def test_what_is_wrong_at_construction(servers):
    with pytest.raises(ValueError, match="reward must be one of"):
        OpenEnvTools(f"{servers}/echo", reward="mean")
    with pytest.raises(ValueError, match="base_url must be http"):
        OpenEnvTools("localhost", actions=[guess])

    def undocumented(word: str): ...

    with pytest.raises(ValueError, match="undocumented can't be offered"):
        OpenEnvTools(f"{servers}/echo", actions=[undocumented])
    with pytest.raises(OpenEnvConnectionError, match="no connection"):
        OpenEnvTools(f"{servers}/nowhere", connect_timeout_s=2)


def test_a_column_that_reset_reads_is_missing(servers, scripted):
    tools = OpenEnvTools(f"{servers}/wordle", actions=[guess], reset_columns=["word"], **SETTINGS)
    with pytest.raises(ValueError, match=r"needs the columns \['word'\]"):
        collector_of([{"prompt": "x"}], scripted(["x"]), tools)
    tools.close()


def test_a_server_is_a_task(servers, scripted, call_text):
    """Its tools and rewards, with data whose columns reset gets; each group has its own seed."""
    rows = [{"prompt": f"<{i}> play", "word": "crane"} for i in range(6)]
    task = make_task(
        "openenv",
        base_url=f"{servers}/wordle",
        dataset=rows,
        reset_columns=["word"],
        num_held_out=2,
        max_turns=3,
    )
    assert [len(task.train_rows), len(task.held_out_rows)] == [4, 2]
    env = TaskEnv(task, num_envs=4, repeats=2, shuffle=False, show_schemas=False)
    (tool,) = next(iter(env.transforms_of(OpenEnvTools))).tool_names()
    hit = call_text(tool, message="[crane]")
    policy = scripted({"<2>": [hit, "done"], "<3>": [call_text(tool, message="[cargo]"), "done"]})
    batch = LLMCollector(env, policy).collect()
    env.close()
    assert batch["reward"].flatten().tolist() == [1.0, 1.0, 0.0, 0.0]
    assert batch["group_id"].tolist() == [2, 2, 3, 3]
