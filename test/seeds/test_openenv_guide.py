"""What a user of TRL's guide to environments brings along works here: classes, rewards, columns.

The clients are OpenEnv's own, synchronous, each with an event loop of its own, in our threads.
"""

import pytest
from datasets import Dataset
from torchrl.envs.transforms import Compose
from typed_clients import (
    EchoAction,
    EchoEnv,
    OpenSpielAction,
    OpenSpielEnv,
    TextArenaAction,
    TextArenaEnv,
)

from collectors import LLMCollector, RolloutFunctionCollector, generate_rollout_completions
from torchrl_envs import ChatEnv, DataLoadingPrimer, EnvironmentTools, RewardFunctions, StepCounter
from torchrl_tasks.catch_game import CatchGame

URLS = {}


@pytest.fixture(autouse=True)
def urls(servers):
    URLS.update({name: f"{servers}/{name}" for name in ("echo", "wordle", "catch")})


@pytest.fixture
def clients():
    """Environments of the guide have no ``close``: their clients are closed here."""
    made = []
    yield made
    for client in made:
        client.close()


def rollouts(dataset, factory, reward_functions, policy, *, max_turns=12, group_size=1):
    env = ChatEnv(batch_size=(len(dataset) * group_size,)).append_transform(
        Compose(
            DataLoadingPrimer(dataset, group_size=group_size),
            EnvironmentTools(factory, show_schemas=False),
            RewardFunctions(reward_functions),
            StepCounter(max_steps=max_turns),
        )
    )
    collector = LLMCollector(env, policy)
    rows = collector.collect()
    collector.shutdown()
    return rows


def contents(row):
    return [message.content for message in row["history"].full.unbind(0)]


def chat(text):
    return [{"role": "user", "content": text}]


def test_quick_start(scripted, call_text, clients):
    class EchoToolEnv:
        def __init__(self):
            self.env = EchoEnv(base_url=URLS["echo"])
            self.reward = 0.0
            clients.append(self.env)

        def reset(self, **kwargs) -> str | None:
            self.reward = 0.0
            return None

        def echo(self, message: str) -> str:
            """
            Say a message to the environment.

            Args:
                message: What to say

            Returns:
                What the environment says.
            """
            result = self.env.step(EchoAction(message=message))
            self.reward = result.observation.reward
            return result.observation.echoed_message

    def reward_func(environments, **kwargs):
        return [env.reward for env in environments]

    dataset = Dataset.from_dict({"prompt": [chat("Echo 'Hello World!'.")] * 8})
    policy = scripted([call_text("echo", message="Hello World!"), "done"])
    rows = rollouts(dataset, EchoToolEnv, [reward_func], policy)
    assert rows["reward"].flatten().tolist() == pytest.approx([1.2] * 8)
    assert contents(rows[0])[2] == "Hello World!"


class WordleEnv:
    def __init__(self):
        self.client = TextArenaEnv(base_url=URLS["wordle"])

    def reset(self, **kwargs) -> str | None:
        result = self.client.reset(word=kwargs["word"])
        self._last_full_feedback = result.observation.messages[0].content
        self.reward = 0.0
        self.done = False
        return self._last_full_feedback

    def guess(self, guess: str) -> str:
        """
        Guess a word.

        Args:
            guess: The word, in brackets: '[abcde]'

        Returns:
            What the game says.
        """
        if self.done:
            raise ValueError("Game over.")
        result = self.client.step(TextArenaAction(message=guess))
        full = result.observation.messages[0].content
        feedback = full[len(self._last_full_feedback) :]
        self._last_full_feedback = full
        self.reward = 0.0 if "invalid move" in feedback else result.reward
        self.done = result.done
        return feedback

    def close(self):
        self.client.close()


def reward_func(environments, **kwargs) -> list[float]:
    return [env.reward for env in environments]


def test_wordle_with_the_error_that_ends_a_game(scripted, call_text):
    dataset = Dataset.from_dict({"prompt": [chat("win"), chat("lose")], "word": ["crane"] * 2})
    right = call_text("guess", guess="[crane]")
    policy = scripted(
        {
            "win": [call_text("guess", guess="[cargo]"), right, right, "I won."],
            "lose": [call_text("guess", guess="[xx]"), "I give up."],
        }
    )
    rows = rollouts(dataset, WordleEnv, [reward_func], policy)
    assert rows["reward"].flatten().tolist() == [1.0, 0.0]
    won, lost = contents(rows[0]), contents(rows[1])
    assert won[0].startswith("win\n\nYou have 6 guesses")
    assert won[2] == "C A R G O\nG Y Y X X\n"
    assert won[6] == '{"error": "ValueError: Game over."}'
    assert "invalid move" in lost[2]


class MultiEnv:
    """Routes by the column ``env``, with clients that are made and closed by ``reset``."""

    def __init__(self):
        self._wordle = None
        self._catch = None
        self.active = None
        self.reward = 0.0
        self.done = False

    def reset(self, **kwargs) -> str | None:
        self.active = kwargs.get("env", "wordle")
        self.reward = 0.0
        self.done = False
        if self.active == "wordle":
            self._wordle = TextArenaEnv(base_url=URLS["wordle"])
            return self._wordle.reset(word="crane").observation.messages[0].content
        self._catch = OpenSpielEnv(base_url=URLS["catch"])
        result = self._catch.reset(seed=3)
        self.done = result.observation.done
        return self._board(result.observation.info_state)

    @staticmethod
    def _board(info_state):
        cells = "".join(".x"[int(cell)] for cell in info_state)
        return "\n".join(cells[i : i + 5] for i in range(0, len(cells), 5))

    def guess(self, guess: str) -> str:
        """
        Guess a word in Wordle.

        Args:
            guess: The word, in brackets.
        """
        if self.active != "wordle":
            raise ValueError("There is no Wordle here.")
        result = self._wordle.step(TextArenaAction(message=guess))
        self.reward = result.reward
        return result.observation.messages[0].content

    def stay(self) -> str:
        """
        Leave the paddle where it is and let the ball fall one row in Catch.
        """
        if self.active != "catch":
            raise ValueError("There is no paddle here.")
        result = self._catch.step(OpenSpielAction(action_id=1))
        self.done, self.reward = result.done, result.reward
        return self._board(result.observation.info_state)

    def close(self):
        for client in (self._wordle, self._catch):
            if client is not None:
                client.close()


def wordle_reward(environments, **kwargs) -> list[float | None]:
    return [env.reward if env.active == "wordle" else None for env in environments]


def catch_reward(environments, **kwargs) -> list[float | None]:
    return [
        None if env.active != "catch" else max(env.reward, 0.0) if env.done else 0.0
        for env in environments
    ]


def test_several_environments_behind_one_class(scripted, call_text):
    dataset = Dataset.from_dict(
        {
            "prompt": [chat("wordle")] * 2 + [chat("catch")] * 2,
            "env": ["wordle"] * 2 + ["catch"] * 2,
        }
    )
    policy = scripted(
        {
            "wordle": [call_text("stay"), call_text("guess", guess="[crane]"), "done"],
            "catch": [call_text("guess", guess="[crane]"), *[call_text("stay")] * 9, "done"],
        }
    )
    rows = rollouts(dataset, MultiEnv, [wordle_reward, catch_reward], policy)
    caught = float(CatchGame(3).ball_column == 2)
    assert rows["reward"].flatten().tolist() == [1.0, 1.0, caught, caught]
    assert rows["rewards", "wordle_reward"].isnan().flatten().tolist() == [False] * 2 + [True] * 2
    assert rows["rewards", "catch_reward"].isnan().flatten().tolist() == [True] * 2 + [False] * 2
    assert "There is no paddle here." in contents(rows[0])[2]
    assert "There is no Wordle here." in contents(rows[2])[2]


def test_migration_from_rollout_func(scripted, clients):
    client = EchoEnv(base_url=URLS["echo"])
    clients.append(client)

    def rollout_func(prompts, trainer):
        outputs = generate_rollout_completions(trainer, prompts)
        env_rewards = []
        for out in outputs:
            tokenizer = trainer.processing_class
            text = tokenizer.decode(out["completion_ids"], skip_special_tokens=True)
            env_rewards.append(client.step(EchoAction(message=text)).reward)
        return {
            "prompt_ids": [out["prompt_ids"] for out in outputs],
            "completion_ids": [out["completion_ids"] for out in outputs],
            "logprobs": [out["logprobs"] for out in outputs],
            "env_reward": env_rewards,
        }

    def reward_from_env(completions, **kwargs):
        return kwargs["env_reward"]

    collector = RolloutFunctionCollector(
        rollout_func,
        scripted({"short": ["hi"], "long": ["hello world"]}),
        DataLoadingPrimer([{"prompt": chat("short")}, {"prompt": chat("long")}]),
        num_rollouts=2,
        reward_functions=[reward_from_env],
    )
    rows = collector.collect()
    assert rows["reward"].flatten().tolist() == pytest.approx([0.2, 1.1])
    collector.shutdown()
