"""The token budget: never exceeded, told before each turn; what does not fit is cut with a mark."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchrl.envs.transforms import Compose

from collectors import LLMCollector
from torchrl_envs import ChatEnv, DataLoadingPrimer, EnvironmentTools, StepCounter, TokenBudget
from torchrl_envs.transforms.token_budget import CUT_MARK


class Library:
    """Answers with as much text as its row says."""

    read: list[str]

    def reset(self, *, sizes, opening=None):
        self.sizes = list(sizes)
        return opening

    def fetch(self) -> str:
        """Get the next text."""
        text = "a b c d e " * (self.sizes.pop(0) // 2 if self.sizes else 0)
        self.read.append(text)
        return text

    def get_reward(self):
        return float(len(self.read))


def make_env(rows, tokenizer, budget):
    library = type("Library", (Library,), {"read": []})
    env = ChatEnv(batch_size=len(rows), tokenizer=tokenizer).append_transform(
        Compose(
            DataLoadingPrimer(rows),
            budget,
            EnvironmentTools(library, show_schemas=False),
            StepCounter(max_steps=4),
        )
    )
    return env, library


def run(rows, tokenizer, policy, budget):
    env, library = make_env(rows, tokenizer, budget)
    trajectories = LLMCollector(env, policy).collect().unbind(0)
    env.close()
    return trajectories, library


def after_prompt(row):
    mask = row["masks", "all_assistant_mask"].tolist()
    return len(mask) - mask.index(True)


def test_a_long_result_is_cut_so_that_a_turn_fits_and_the_others_are_whole(
    scripted, call_text, chatml_tokenizer
):
    rows = [{"prompt": "<0>", "sizes": [400]}, {"prompt": "<1>", "sizes": [4]}]
    policy = scripted([call_text("fetch"), "done"], write_tokens=False)
    budget = TokenBudget(150, min_turn_tokens=20)
    (long, short), library = run(rows, chatml_tokenizer, policy, budget)
    result = long["history", "full"].to_chats()[2]["content"]
    assert result.endswith(CUT_MARK)
    assert len(max(library.read)) > len(result) > 20, "the environment answered in full"
    assert max(library.read).startswith(result.removesuffix(CUT_MARK))
    assert short["history", "full"].to_chats()[2]["content"] == "a b c d e " * 2
    assert [row["stop_reason"] for row in (long, short)] == ["answered"] * 2
    assert [bool(row["scorable"]) for row in (long, short)] == [True] * 2
    assert 150 - 20 <= after_prompt(long) <= 150
    # As much was kept as fits: the last turn had 20 tokens left, or very few more.
    last_turn = len(chatml_tokenizer("done<|im_end|>", add_special_tokens=False)["input_ids"])
    assert 20 <= 150 - (after_prompt(long) - last_turn) < 24


@pytest.mark.parametrize(
    ("script", "budget", "reason", "turns"),
    [
        pytest.param(["word " * 30], {"max_tokens": 20}, "token_budget", 1, id="turn cut"),
        pytest.param(["CALL"], {"max_tokens": 40}, "token_budget", 1, id="no room for a turn"),
        pytest.param(["done"], {"max_tokens": 40}, "answered", 1, id="fits"),
        pytest.param(["done"], {"max_model_len": 40}, "context_length", 0, id="made too long"),
        pytest.param(
            ["word " * 300], {"max_model_len": 100}, "context_length", 1, id="model's length"
        ),
        pytest.param(["CALL"], {"max_tokens": 5000}, "max_steps", 4, id="turns run out first"),
    ],
)
def test_why_an_episode_ends(scripted, call_text, chatml_tokenizer, script, budget, reason, turns):
    policy = scripted(
        [turn.replace("CALL", call_text("fetch")) for turn in script],
        write_tokens=False,
        generate_kwargs={"max_new_tokens": 1000},
    )
    opening = "word " * 60 if turns == 0 else None
    rows = [{"prompt": "<0> say it again", "sizes": [], "opening": opening}]
    (row,), _ = run(rows, chatml_tokenizer, policy, TokenBudget(**budget, min_turn_tokens=8))
    assert row["stop_reason"] == reason
    assert row["num_turns"] == turns
    assert bool(row["truncated"]) == (reason != "answered")
    assert bool(row["terminated"]) == (reason == "answered")
    assert bool(row["scorable"]) == (turns > 0)
    assert row["reward_errors"] == ""
    limit = budget.get("max_model_len", 10**6)
    assert len(row["tokens", "full"]) <= limit


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    max_tokens=st.integers(30, 300),
    least=st.integers(1, 30),
    sizes=st.lists(st.integers(0, 200), max_size=6),
    words=st.integers(0, 60),
    max_model_len=st.none() | st.integers(60, 300),
)
def test_the_budget_is_never_exceeded(
    scripted, call_text, chatml_tokenizer, max_tokens, least, sizes, words, max_model_len
):
    policy = scripted(
        ["word " * words + call_text("fetch")],
        write_tokens=False,
        generate_kwargs={"max_new_tokens": 1000},
    )
    budget = TokenBudget(max_tokens, min_turn_tokens=least, max_model_len=max_model_len)
    rows = [{"prompt": "<0>", "sizes": sizes}]
    (row,), library = run(rows, chatml_tokenizer, policy, budget)
    if not policy.engine.served:
        assert row["stop_reason"] == "context_length"
        return
    assert after_prompt(row) <= max_tokens
    if max_model_len is not None:
        assert len(row["tokens", "full"]) <= max_model_len
    start = len(policy.engine.served[0][0])
    for prompt, said in policy.engine.served:
        left = max_tokens - (len(prompt) - start)
        if max_model_len is not None:
            left = min(left, max_model_len - len(prompt))
        assert left >= least
        assert len(said.ids) <= left
    assert row["reward"].item() == len(library.read)
    assert row["stop_reason"] in ("token_budget", "context_length", "max_steps")


def test_budgets_are_an_entry_before_each_turn(scripted, call_text, chatml_tokenizer):
    budget = TokenBudget(100, min_turn_tokens=1)
    env, _ = make_env([{"prompt": "<0>", "sizes": [4]}], chatml_tokenizer, budget)
    batch = env.reset()
    assert batch["max_new_tokens"].tolist() == [100]
    assert batch["max_new_tokens"].dtype == torch.int64
    policy = scripted([call_text("fetch"), "done"])
    after = env.step(policy(batch))["next"]
    policy(after)
    first, second = (len(prompt) for prompt, _ in policy.engine.served)
    assert after["max_new_tokens"].tolist() == [100 - (second - first)]
    env.close()


@pytest.mark.parametrize(
    "options",
    [{}, {"max_tokens": 0}, {"max_tokens": 10}, {"max_tokens": 90, "min_turn_tokens": 0}],
    ids=str,
)
def test_a_budget_that_bounds_nothing_is_refused(options):
    with pytest.raises(ValueError, match="max_tokens or max_model_len, each at least min_turn_tok"):
        TokenBudget(**options)


def test_a_budget_without_anything_that_counts_is_refused():
    env, _ = make_env([{"prompt": "<0>", "sizes": []}], None, TokenBudget(100))
    with pytest.raises(ValueError, match=r"encoder=policy.encoder, or tokenizer= to the ChatEnv"):
        env.check()
