"""What TRL's reward functions are called with: strings or messages, logs, the trainer's state."""

import copy

import pytest
from torchrl.envs.transforms import Compose

from collectors import LLMCollector, RolloutFunctionCollector, rollout_metrics
from torchrl_envs import (
    AnswerReward,
    ChatEnv,
    DataLoadingPrimer,
    FunctionTools,
    RewardFunctions,
    StepCounter,
    row_reward,
)
from torchrl_envs.graders.answers import read_tags, think_answer_format
from torchrl_modules import TransformersWrapper

CHAT = [{"role": "user", "content": "<hi>"}]


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: The other.
    """
    return a + b


class Seen:
    """A reward function that keeps what it gets."""

    def __call__(self, prompts, completions, **kwargs):
        self.prompts, self.completions, self.kwargs = prompts, completions, kwargs
        return [0.0] * len(completions)


def run(scripted, rows, replies, functions, *tools, group_size=1, **settings):
    """The trajectories of one batch."""
    transforms = [
        DataLoadingPrimer(rows, group_size=group_size),
        *tools,
        RewardFunctions(functions, **settings),
        StepCounter(max_steps=1),
    ]
    size = len(rows) * group_size
    env = ChatEnv(batch_size=size, system_prompt="sys").append_transform(Compose(*transforms))
    return LLMCollector(env, scripted(replies)).collect()


REPLIES = {"<a>": ["four"], "<bb>": ["three"], "<hi>": ["ho"]}
ROWS = [{"prompt": "<a>"}, {"prompt": "<bb>"}]


@pytest.mark.parametrize(
    ("prompt", "tools", "settings", "expected"),
    [
        pytest.param("<hi>", (), {}, ("<hi>", "ho"), id="strings: strings"),
        pytest.param(CHAT, (), {}, "messages", id="messages: messages"),
        pytest.param("<hi>", [add], {}, "messages", id="strings and tools: messages"),
        pytest.param("<hi>", (), {"completion_format": "messages"}, "messages", id="asked for"),
        pytest.param(
            "<hi>", [add], {"completion_format": "text"}, ("<hi>", "ho"), id="text with tools"
        ),
        pytest.param("<hi>", (), {"level": "turn"}, "messages", id="turns: messages"),
    ],
)
def test_completions_are_what_the_data_are(scripted, prompt, tools, settings, expected):
    seen = Seen()
    by_turn = TurnSeen()
    functions = [by_turn if "level" in settings else seen]
    parts = [FunctionTools(list(tools), show_schemas=False)] if tools else []
    run(scripted, [{"prompt": prompt}], REPLIES, functions, *parts, **settings)
    seen = by_turn if "level" in settings else seen
    if expected == "messages":
        before = [{"role": "system", "content": "sys"}, *CHAT]
        expected = (before, [{"role": "assistant", "content": "ho"}])
    assert (seen.prompts, seen.completions) == ([expected[0]], [expected[1]])


class TurnSeen(Seen):
    def __call__(self, prompts, completions, **kwargs):
        super().__call__(prompts, completions, **kwargs)
        return [[0.0]] * len(completions)


def test_the_quickstart_of_trl(scripted):
    def reward_len(completions, **kwargs):
        return [-abs(20 - len(completion)) for completion in completions]

    batch = run(scripted, ROWS, REPLIES, [reward_len])
    assert batch["reward"].flatten().tolist() == [-16.0, -15.0]


def test_a_function_of_one_rollout_gets_a_string(scripted):
    @row_reward
    def length(completion, prompt):
        return len(completion) - len(prompt)

    batch = run(scripted, ROWS, REPLIES, [length])
    assert batch["reward"].flatten().tolist() == [1.0, 1.0]


def test_graders_of_this_package_read_messages_of_string_data(scripted):
    from torchrl_envs.graders.answers import exact_match

    rows = [{"prompt": "<a>", "answer": "four"}, {"prompt": "<bb>", "answer": "no"}]
    assert run(scripted, rows, REPLIES, [exact_match])["reward"].flatten().tolist() == [1.0, 0.0]


OPENS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize("prompt", ["<a>", [{"role": "user", "content": "<a>"}]], ids=type)
@pytest.mark.parametrize("place", ["environment", "postproc"])
def test_completions_begin_with_what_the_template_opens(scripted, chatml_tokenizer, prompt, place):
    """A tag that the prompt has is a part of the turn that closes it."""
    tokenizer = copy.deepcopy(chatml_tokenizer)
    tokenizer.chat_template = OPENS
    said = "four\n</think>\n<answer>4</answer>"
    seen, thinks = Seen(), []

    class Reader(AnswerReward):
        component_keys = ()

        def components(self, text, row, query):
            thinks.append(read_tags(text).think)
            return {"reward": 0.0}

    functions = RewardFunctions([think_answer_format, seen])
    parts = [DataLoadingPrimer([{"prompt": prompt}]), StepCounter(max_steps=1), Reader()]
    inside = [functions] if place == "environment" else []
    env = ChatEnv(batch_size=1).append_transform(Compose(*parts, *inside))
    policy = scripted({"<a>": [said]}, tokenizer=tokenizer)
    collector = LLMCollector(env, policy, postproc=None if inside else functions)
    batch = collector.collect()
    assert batch["rewards", "think_answer_format"].item() == 1.0
    (completion,) = seen.completions
    text = completion if isinstance(prompt, str) else completion[-1]["content"]
    assert text == f"<think>\n{said}"
    assert thinks == ["four"]
    assert batch[0]["history", "full"].to_chats()[-1]["content"] == said, "tokens are as they were"


def test_what_functions_log_is_in_rows_and_metrics(scripted):
    def logs(completions, log_metric, log_extra, **_):
        log_metric("length", len(completions[0]))
        log_metric("length", len(completions[1]))
        log_extra("upper", [completion.upper() for completion in completions])
        return [1.0] * len(completions)

    @row_reward
    def logs_one(completion, log_metric, log_extra):
        log_metric("is_four", completion == "four")
        log_extra("size", len(completion))
        return 0.0

    batch = run(scripted, ROWS, REPLIES, [logs, logs_one])
    assert list(batch["logged_extra"]) == [
        {"upper": "FOUR", "size": 4},
        {"upper": "THREE", "size": 5},
    ]
    assert batch[0]["logged_metrics"] == {"length": 4.5, "is_four": 1.0}
    metrics = rollout_metrics(batch)
    assert (metrics["logged/length"], metrics["logged/is_four"]) == (4.5, 0.5)


def test_a_metric_is_a_mean_over_rollouts_that_end_in_different_steps(scripted):
    """Two rollouts in the first step, one in the second: (2 * 2 + 1) / 3."""

    class More(RewardFunctions):
        def after_turn(self, episode):
            if episode.query == "<long>" and episode.num_turns == 1:
                episode.say({"role": "user", "content": "<more>"})

    def counts(completions, log_metric, **_):
        log_metric("finished", len(completions))
        return [0.0] * len(completions)

    rows = [{"prompt": "<a>"}, {"prompt": "<long>"}, {"prompt": "<bb>"}]
    env = ChatEnv(batch_size=3).append_transform(
        Compose(DataLoadingPrimer(rows), More([counts]), StepCounter(max_steps=2))
    )
    replies = REPLIES | {"<long>": ["one", "two"]}
    batch = LLMCollector(env, scripted(replies)).collect()
    assert rollout_metrics(batch)["logged/finished"] == pytest.approx(5 / 3)


@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [("log_extra", ("c", ["x"]), "expected 2, got 1"), ("log_metric", ("m", None), "float")],
)
def test_wrong_logging_makes_the_rollouts_unscorable(scripted, method, arguments, words):
    def logs(completions, **kwargs):
        kwargs[method](*arguments)
        return [1.0] * len(completions)

    batch = run(scripted, ROWS[:1], {"<a>": ["four", "four"]}, [logs], group_size=2)
    assert not batch["scorable"].any()
    assert all(words in error for error in batch["reward_errors"])


def test_the_trainer_state_counts_updates_since_the_first_batch(chatml_tokenizer, make_tiny_model):
    steps = []

    def wants_state(completions, trainer_state, **_):
        steps.append((trainer_state.global_step, trainer_state.max_steps))
        return [0.0] * len(completions)

    functions = RewardFunctions([wants_state])
    functions.trainer_state.max_steps = 3
    env = ChatEnv(batch_size=1).append_transform(
        Compose(DataLoadingPrimer([{"prompt": "a"}]), functions, StepCounter(max_steps=1))
    )
    policy = TransformersWrapper(
        make_tiny_model(0), tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 2}
    )
    collector = LLMCollector(env, policy)
    collector.update_policy_weights_(make_tiny_model(1))  # before the first batch: no step
    for _ in range(3):
        collector.collect()
        collector.update_policy_weights_(make_tiny_model(1))
    assert steps == [(0, 3), (1, 3), (2, 3)]


def test_rollout_functions_are_scored_alike(chatml_tokenizer, make_tiny_model):
    seen = Seen()
    policy = TransformersWrapper(
        make_tiny_model(0), tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 2}
    )

    def rollout_func(prompts, trainer):
        ids = trainer.processing_class.encode("ok")
        return {
            "prompt_ids": [[1]] * len(prompts),
            "completion_ids": [ids] * len(prompts),
            "logprobs": [[-1.0] * len(ids)] * len(prompts),
        }

    RolloutFunctionCollector(
        rollout_func,
        policy,
        DataLoadingPrimer([{"prompt": "a", "n": 3}]),
        num_rollouts=1,
        reward_functions=[seen],
    ).collect()
    assert (seen.prompts, seen.completions, seen.kwargs["n"]) == (["a"], ["ok"], [3])
    assert seen.kwargs["trainer_state"].global_step == 0


def test_thoughts_that_a_template_took_out_are_in_the_string():
    from torchrl_envs.rewards.scoring_call import _text

    message = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    assert _text(message) == "<think>\n2 and 2\n</think>\n\n4"
    assert _text({"role": "assistant", "content": [{"type": "text", "text": "4"}]}) == "4"
