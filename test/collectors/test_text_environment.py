"""Tools that are called in plain text: exact tokens, concurrent tools, limits that work."""

import functools
import math
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrl.data import LazyStackStorage, ReplayBuffer

from collectors import RolloutFunctionCollector, TextEnvironment
from collectors.text_environment.parts import text_sampling
from collectors.text_environment.requests import RequestSyntax
from objectives import GRPOLoss
from torchrl_envs import DataLoadingPrimer
from torchrl_envs.rewards.scoring_call import row_reward
from torchrl_modules import Generation, SamplingParameters, TransformersWrapper

END = "<|im_end|>"
SYNTAX = RequestSyntax()


class TextEngine:
    """Says a script's turns token by token, and stops at stop tokens as an engine does."""

    version = 0

    def __init__(self, tokenizer, turns):
        self.tokenizer = tokenizer
        self.turns = {key: list(value) for key, value in turns.items()}
        self.left = {}
        self.num_calls = 0

    def generate(self, prompts, params, *, max_new_tokens=None):
        self.num_calls += 1
        return [self._say(p, params, n) for p, n in zip(prompts, max_new_tokens, strict=True)]

    def _say(self, prompt, params, budget):
        text = self.tokenizer.decode(list(prompt))
        key = next(key for key in self.turns if key in text)
        if not self.left.get(key):
            turn = self.turns[key].pop(0)
            self.left[key] = self.tokenizer.encode(turn, add_special_tokens=False)
        ids = []
        while self.left[key] and len(ids) < budget:
            ids.append(self.left[key].pop(0))
            if ids[-1] in params.stop_token_ids:
                return Generation(ids, [-0.5] * len(ids), "stop")
        return Generation(ids, [-0.5] * len(ids), "length")

    def update_weights(self, state_dict, *, version=None):
        raise ValueError("a script has no weights")


def calculator(query):
    left, right = query.split("+")
    return str(int(left) + int(right))


def length(texts, **kwargs):
    return [float(len(text)) for text in texts]


@pytest.fixture
def make(chatml_tokenizer):
    environments = []

    def build(turns, tools=None, engine=TextEngine, **settings):
        turns = {"": turns} if isinstance(turns, list) else turns
        settings = {"reward_fn": length, "max_turns": 4} | settings
        model = engine(chatml_tokenizer, turns)
        environments.append(
            TextEnvironment(model, chatml_tokenizer, tools or {"Calc": calculator}, **settings)
        )
        return environments[-1]

    yield build
    for environment in environments:
        environment.close()


def test_an_episode(make, chatml_tokenizer):
    """A reward function of one text, as in TRL's guide."""

    @row_reward
    def exact_match(result, answer):
        return int(result.split("=")[1].split("<")[0] == answer)

    turns = {"1+1": ["<request><Calc>1+1<call>", "Result=2<submit>"]}
    turns["2+2"] = ["I call. <request><Calc>2+2<call>", "Result=5<submit>"]
    text_env = make(turns, reward_fn=exact_match, prompt="Use Calc.\n")
    queries, responses, masks, rewards, histories = text_env.run(
        ["What is 1+1?", "What is 2+2?"], answer=["2", "4"]
    )
    assert rewards == [1.0, 0.0]
    assert histories[0].text == (
        "Use Calc.\nWhat is 1+1?<request><Calc>1+1<call>2<response>Result=2<submit>"
    )
    assert histories[0].system_spans == [True, False, True, False]
    decode = chatml_tokenizer.decode
    assert decode(queries[0]) == "Use Calc.\nWhat is 1+1?"
    assert decode(responses[1][masks[1] == 1]) == (
        "I call. <request><Calc>2+2<call>Result=5<submit>"
    )
    assert decode(responses[1][masks[1] == 0]) == "4<response>"
    assert [(h.completed, h.truncated, h.stop_reason) for h in histories] == [
        (True, False, "answered")
    ] * 2


def test_what_the_model_hears_when_a_call_is_wrong(make):
    def broken(query):
        raise ValueError("no such page")

    turns = [
        "<request><Clac>1+1<call>",
        "<request>Calc 1+1<call>",
        "<request><broken>x<call>",
        "<request><Long>x<call>",
    ]
    text_env = make(
        turns,
        tools={"Calc": calculator, "broken": broken, "Long": lambda _: "y" * 99},
        max_tool_response=60,
    )
    (history,) = text_env.run(["go"])[4]
    heard = [
        history.text[start:end]
        for (start, end), system in zip(history.text_spans, history.system_spans, strict=True)
        if system
    ][1:]
    assert heard == [
        "Unknown tool Clac.<response>",
        "Unknown tool call: <request>Calc 1+1<call><response>",
        "Tool error: no such page<response>",
        "y" * 57 + "...<response>",  # 60 characters, the mark of the cut included
    ]
    assert (history.truncated, history.stop_reason) == (True, "max_steps")


@pytest.mark.parametrize("limit", [1, 3, 4, 10, 11])
def test_a_result_has_at_most_max_tool_response_characters(make, limit):
    """With the mark of the cut; a result that fits is not cut."""
    text_env = make(
        ["<request><Ten>x<call>", "<submit>"],
        tools={"Ten": lambda _: "0123456789"},
        max_tool_response=limit,
    )
    (history,) = text_env.run(["go"])[4]
    start, end = history.text_spans[2]
    expected = {1: ".", 3: "...", 4: "0...", 10: "0123456789", 11: "0123456789"}[limit]
    assert history.text[start:end] == f"{expected}<response>"


def test_how_episodes_end(make):
    turns = {
        "answers": ["That is all." + END],
        "submits": ["x<submit>"],
        "long": ["a b c d e f g h i j k l m n o p"],
    }
    text_env = make(turns, generation_kwargs={"max_new_tokens": 12})
    histories = text_env.run(list(turns))[4]
    assert [(h.stop_reason, h.truncated) for h in histories] == [
        ("answered", False),
        ("answered", False),
        ("response_length", True),
    ]
    # What a query or a tool says ends nothing.
    text_env = make(
        ["<request><Say>x<call>", "fine" + END], tools={"Say": lambda _: f"<submit>{END}"}
    )
    (history,) = text_env.run([f"<submit>{END} <request><Calc>1<call>"])[4]
    assert history.text.endswith(f"fine{END}")
    end = text_env.tokenizer.eos_token_id
    assert (history.tokens == end).sum() == 1
    assert history.tokens[-1] == end


def test_max_length_is_never_exceeded(make):
    for limit in (20, 30, 40, 50):
        text_env = make(
            ["<request><Long>x<call>", "a b c d e f g h i j" * 9],
            tools={"Long": lambda _: "1234567890"},
            max_length=limit,
        )
        (history,) = text_env.run(["go"])[4]
        assert len(history.tokens) <= limit
        assert (history.truncated, history.stop_reason) == (True, "context_length")
    with pytest.raises(ValueError, match="reward"):
        make(["x"], reward_fn=lambda _: [1.0, 2.0]).run(["go"])


def test_tools_of_all_episodes_run_at_once(make):
    barrier = threading.Barrier(8, timeout=20)

    def meet(query):
        barrier.wait()
        return query

    turns = {f"query {i};": [f"<request><meet>{i}<call>", "<submit>"] for i in range(8)}
    histories = make(turns, tools=[meet]).run(list(turns))[4]
    assert [f">{i}<call>{i}<response>" in h.text for i, h in enumerate(histories)] == [True] * 8


def test_a_hung_tool_is_an_error_of_its_own_episode(make):
    def slow(query):
        time.sleep(3 if query == "0" else 0)
        return "ok"

    turns = {f"query {i};": [f"<request><slow>{i}<call>", "<submit>"] for i in range(2)}
    hung, fine = make(turns, tools=[slow], timeout_s=0.3).run(list(turns))[4]
    assert "Tool error: no answer within 0.3 s<response>" in hung.text
    assert "ok<response>" in fine.text


def test_async_tools_and_rewards(make):
    class Search:
        async def __call__(self, query):
            return f"found {query}"

    async def reward(texts, gold):
        return [float(g in t) for t, g in zip(texts, gold, strict=True)]

    text_env = make(
        ["<request><Search>cats<call>", "cats<submit>"], tools=[Search()], reward_fn=reward
    )
    rewards, (history,) = text_env.run(["go"], gold=["cats"])[3:]
    assert "found cats<response>" in history.text
    assert rewards == [1.0]


def test_rewards_that_are_wrong(make):
    text_env = make(["x" + END] * 3, reward_fn=lambda _: "good")
    with pytest.raises(ValueError, match="returned 'good' when it got the texts of 1 episodes"):
        text_env.run(["go"])
    with pytest.raises(ValueError, match="'answers' needs an item per query, 1"):
        text_env.run(["go"], answers=["1", "2"])
    with pytest.raises(ValueError, match="reward_fn failed"):
        make(["x" + END], reward_fn=lambda _: 1 / 0).run(["go"])

    @row_reward
    def judge(text):
        return float("inf") if "bad" in text else 1.0

    histories = make({"1;": ["bad" + END], "2;": ["good" + END]}, reward_fn=judge).run(["1;", "2;"])
    assert math.isnan(histories[3][0])
    assert histories[3][1] == 1.0
    assert histories[4][0].reward_error == "reward_fn gave inf"


def reward_of_the_page(result, answer):
    """As TRL's page has it."""
    result_parsed = result.split("=")[1].split("<")[0]
    return int(result_parsed == answer)


def test_a_reward_of_one_text_is_told_by_its_annotation(make):
    """Or by the mark, or by what it does with a list."""

    def annotated(result: str, answer):
        return reward_of_the_page(result, answer)

    class Judge:
        async def __call__(self, result: "str", answer: "str") -> float:
            return reward_of_the_page(result, answer)

    def of_all(results: list[str], answer: list[str]) -> list[int]:
        return list(map(reward_of_the_page, results, answer))

    turns = {"1;": ["Result=2<submit>"], "2;": ["Result=5<submit>"]}
    partial = functools.partial(annotated)
    marked = row_reward(functools.partial(reward_of_the_page))
    for function in (annotated, Judge(), partial, of_all, marked, reward_of_the_page):
        text_env = make(turns, reward_fn=function)
        assert text_env.run(["1;", "2;"], answer=["2", "4"])[3] == [1.0, 0.0]
    # A text that it can't score is one row's error, of the first rollouts too.
    wrong = make(["nothing" + END] * 2, reward_fn=reward_of_the_page)
    histories = wrong.run(["1;", "2;"], answer=["2", "4"])[4]
    assert ["IndexError" in history.reward_error for history in histories] == [True, True]


def test_an_episode_that_failed_has_no_reward(make):
    """The others have theirs, with their own arguments."""

    class Failing(TextEngine):
        def _say(self, prompt, params, budget):
            if "bad" in self.tokenizer.decode(list(prompt)):
                return Generation([], [], "error", "out of memory")
            return super()._say(prompt, params, budget)

    def reward(texts, bonus):
        return [len(text) + b for text, b in zip(texts, bonus, strict=True)]

    turns = {"one": ["abc<submit>"], "two": ["ab<submit>"]}
    text_env = make(turns, engine=Failing, reward_fn=reward)
    rewards, histories = text_env.run(["one", "bad", "two"], bonus=[1, 10, 100])[3:]
    assert rewards[0::2] == [12.0, 110.0]
    assert math.isnan(rewards[1])
    assert [h.stop_reason for h in histories] == ["answered", "error: out of memory", "answered"]
    assert histories[1].reward_error == "error: out of memory"


PARTS = ["<request>", "<call>", "<A>", "<", ">", "x", "\n"]


@given(st.lists(st.sampled_from(PARTS), max_size=9).map("".join))
def test_parsing_is_total(text):
    found = SYNTAX.parse(text)
    if found is not None:
        name, query = found
        assert f"<{name}>{query}<call>" in text
        assert "<request>" not in query
        assert "<call>" not in query


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("<request><Calc>1/2<call>", ("Calc", "1/2")),
        ("I think <request> <Calc>a > b<call> more", ("Calc", "a > b")),
        ("<call><request><A>x<request><B>y<call>", ("B", "y")),
        ("<request><A>\nmany\nlines<call>", ("A", "\nmany\nlines")),
        ("<request>Calc<call>", None),
        ("<request><>x<call>", None),
        ("<request><A>x", None),
        ("<A>x<call>", None),
        ("", None),
    ],
)
def test_parsing(text, parsed):
    assert SYNTAX.parse(text) == parsed


def test_a_real_model_to_the_loss(make_tiny_model, chatml_tokenizer, reference_log_probs):
    """Episodes of a Transformers model: exact tokens, log-probs, and rows for GRPOLoss."""
    model = make_tiny_model()
    torch.manual_seed(0)
    policy = TransformersWrapper(
        model, tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 24}
    )
    by_policy = TextEnvironment(policy, tools=[calculator], reward_fn=length, max_length=60)

    def rollout_func(prompts, owner):
        return by_policy.rollouts(by_policy.run(prompts)[4])

    buffer = ReplayBuffer(storage=LazyStackStorage(6), batch_size=6)
    collector = RolloutFunctionCollector(
        rollout_func,
        policy,
        DataLoadingPrimer([{"prompt": "What is 2 + 2?"}], group_size=6),
        num_rollouts=6,
        reward_field="env_reward",
        replay_buffer=buffer,
    )
    rows = collector.collect()
    for row in rows.unbind(0):
        ids = row["tokens", "full"].tolist()
        mask = row["masks", "all_assistant_mask"]
        expected = reference_log_probs(model, ids)
        torch.testing.assert_close(row["log_probs", "full"][mask], expected[mask])
    batch = buffer[:]
    batch["advantage"] = torch.randn(6, 1, 1)
    losses = GRPOLoss(policy)(batch)
    assert abs(losses.kl_approx.item()) < 1e-5
    by_policy.close()
    collector.shutdown()


def test_a_model_as_in_trl(make_tiny_model, chatml_tokenizer):
    class SimpleCalculatorTool:
        def __call__(self, text):
            return calculator(text)

    text_env = TextEnvironment(
        model=make_tiny_model(),
        tokenizer=chatml_tokenizer,
        tools=[SimpleCalculatorTool()],
        reward_fn=length,
        prompt="What is 13-3?\n",
        max_turns=1,
        max_tool_reponse=100,
        generation_kwargs={
            "do_sample": "true",
            "max_new_tokens": 8,
            "pad_token_id": chatml_tokenizer.pad_token_id,
        },
    )
    assert list(text_env.tools) == ["SimpleCalculatorTool"]
    assert text_env.parse_tool_call("<request><SimpleCalculatorTool>1+1<call>") == (
        "SimpleCalculatorTool",
        "1+1",
    )
    assert text_env.parse_tool_call("nothing") == (None, None)
    queries, responses, masks, _, _ = text_env.run(["What is 1+2?"])
    assert responses[0].shape == masks[0].shape
    assert queries[0].dtype == torch.int64
    as_in_trl = {"min_length": -1, "top_k": 0.0, "top_p": 1.0, "eos_token_id": -1}
    sampling = text_sampling(None, chatml_tokenizer, as_in_trl | {"do_sample": True})
    assert sampling == SamplingParameters(stop_token_ids=())
    with pytest.raises(TypeError, match="no parameter 'min_length'"):
        text_sampling(None, chatml_tokenizer, {"min_length": 3})
    greedy = TextEnvironment(
        make_tiny_model(),
        chatml_tokenizer,
        reward_fn=length,
        prompt="a",
        generation_kwargs={"do_sample": False, "max_new_tokens": 6},
    )
    first, second = (greedy.run(["b"])[1][0].tolist() for _ in range(2))
    assert first == second
    greedy.close()
    text_env.close()


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"max_turns": 0}, ValueError, "max_turns must be a whole number, at least 1, got 0"),
        ({"max_tool_response": 0}, ValueError, "max_tool_response"),
        ({"max_length": 0}, ValueError, "max_length"),
        ({"reward_fn": None}, TypeError, "reward_fn must be a function"),
        ({"tools": {"a>b": calculator}}, ValueError, "can't be named 'a>b'"),
        ({"tools": [calculator, calculator]}, ValueError, "two tools are named 'calculator'"),
        ({"tools": {"x": "1+1"}}, TypeError, "the tool x can't be called"),
        ({"generation_kwargs": {"beams": 2}}, TypeError, "no parameter 'beams'"),
    ],
)
def test_settings_that_cannot_work(make, settings, error, named):
    with pytest.raises(error, match=named):
        make(["x"], **settings)


def test_models_that_are_none(chatml_tokenizer):
    with pytest.raises(TypeError, match="must be a Transformers model, a policy or an engine"):
        TextEnvironment(object(), chatml_tokenizer, reward_fn=length)
    with pytest.raises(TypeError, match="needs the tokenizer"):
        TextEnvironment(object(), reward_fn=length)
