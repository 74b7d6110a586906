"""A reward that the environment gives itself, as TRL's proposal has it."""

import pytest
from torchrl.envs.transforms import Compose

from collectors import LLMCollector
from torchrl_envs import ChatEnv, DataLoadingPrimer, EnvironmentTools, RewardFunctions


class WordleEnv:
    def reset(self, **kwargs) -> str | None:
        self.won = False
        return None

    def guess(self, word: str) -> str:
        """Guess a word.

        Args:
            word: The word.
        """
        self.won = word == "crane"
        return "yes" if self.won else "no"

    def get_reward(self) -> float:
        return 1.0 if self.won else 0.0


def collect(parts, policy):
    rows = [{"prompt": "win"}, {"prompt": "lose"}]
    env = ChatEnv(batch_size=(2,)).append_transform(Compose(DataLoadingPrimer(rows), *parts))
    collector = LLMCollector(env, policy)
    batch = collector.collect()
    collector.shutdown()
    return batch


@pytest.fixture
def policy(scripted, call_text):
    return scripted(
        {
            "win": [call_text("guess", word="crane"), "done"],
            "lose": [call_text("guess", word="cargo"), "done"],
        }
    )


def test_no_reward_function_is_needed(policy):
    batch = collect([EnvironmentTools(WordleEnv, show_schemas=False)], policy)
    assert batch["reward"].flatten().tolist() == [1.0, 0.0]
    assert batch["rewards", "WordleEnv"].flatten().tolist() == [1.0, 0.0]


def test_it_is_summed_with_functions_at_weight_one_and_is_no_tool(policy):
    def format_reward(completions, **kwargs):
        return [2.0 for _ in completions]

    tools = EnvironmentTools(WordleEnv, show_schemas=False)
    assert list(tools.tools["WordleEnv"]) == ["guess"]
    batch = collect([tools, RewardFunctions([format_reward], weights=[0.1])], policy)
    assert batch["reward"].flatten().tolist() == pytest.approx([1.2, 0.2])


def test_no_source_of_reward_is_an_error_at_construction(policy):
    class Silent:
        def reset(self, **kwargs) -> None: ...

        guess = WordleEnv.guess

    with pytest.raises(ValueError, match="No reward"):
        collect([EnvironmentTools(Silent)], policy)
