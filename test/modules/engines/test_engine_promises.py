"""What an engine of a user gives is checked where it is read, and the message names the engine."""

import asyncio
import re

import pytest
import torch

from collectors import OnPolicy, StreamingCollector, Wait
from collectors.rollout_func import generate_rollout_completions
from torchrl_data.conversation import Conversations
from torchrl_envs import ChatEnv, DataLoadingPrimer, StepCounter
from torchrl_modules import Generation
from torchrl_modules.engines.batching_engine import BatchingEngine
from torchrl_modules.engines.checked_generation import checked
from torchrl_modules.engines.engine import VersionSpan
from torchrl_modules.policies.async_policy import AsyncPolicy
from torchrl_modules.policies.base import LLMWrapperBase
from torchrl_modules.sampling.parameters import SamplingParameters

GOOD = Generation([5, 6], [-0.5, -1.0], "stop")
ENTROPY = SamplingParameters(max_new_tokens=4, entropy=True)
TEMPERED = SamplingParameters(max_new_tokens=4, temperature=0.5, untempered_log_probs=True)
FAULTS = {
    "nothing": (None, "it gave NoneType"),
    "a response in place of a list": (GOOD._asdict(), "it gave dict"),
    "too few": ([GOOD], "it gave 1"),
    "too many": ([GOOD] * 3, "it gave 3"),
    "a tuple in place of a Generation": ([GOOD, ([5], [-0.5], "stop")], "response 1 is a tuple"),
    "tensors": (
        [GOOD, GOOD._replace(ids=torch.tensor([5, 6]))],
        "response 1 has no lists of one length, {'ids': tensor([5, 6]), 'log_probs': [-0.5, -1.0]}",
    ),
    "a tensor of log-probs": (
        [GOOD, GOOD._replace(log_probs=torch.tensor([-0.5, -1.0]))],
        "response 1 has no lists of one length, {'ids': [5, 6], 'log_probs': tensor(",
    ),
    "no log-probs at all": ([GOOD, GOOD._replace(log_probs=None)], "'log_probs': None"),
    "a log-prob too few": (
        [GOOD, GOOD._replace(log_probs=[-0.5])],
        "response 1 has no lists of one length, {'ids': [5, 6], 'log_probs': [-0.5]}",
    ),
    "ids that are no whole numbers": ([GOOD, GOOD._replace(ids=[5.5, 6])], "none of tokens"),
    "negative ids": ([GOOD, GOOD._replace(ids=[-1, 6])], "none of tokens"),
    "probabilities": (
        [GOOD, GOOD._replace(log_probs=[0.6, 0.3])],
        "response 1 has a log-prob that is no finite number of at most 0: 0.6",
    ),
    "not a number": ([GOOD, GOOD._replace(log_probs=[-1.0, float("nan")])], "at most 0: nan"),
    "a reason of its own": (
        [GOOD, GOOD._replace(finish_reason="eos")],
        "response 1 has finish_reason 'eos', error=None",
    ),
    "an error without a word": ([GOOD, Generation([], [], "error")], "'error', error=None"),
    "an error that is none": ([GOOD, GOOD._replace(error="lost")], "'stop', error='lost'"),
    "versions of some tokens": (
        [GOOD, GOOD._replace(versions=[VersionSpan(3, 0, 1)])],
        "has [VersionSpan(version=3, start=0, end=1)], and the engine has version 3",
    ),
    "versions as a list": ([GOOD, GOOD._replace(versions=[3, 3])], "has [3, 3], and"),
    "a version that was never pushed": (
        [GOOD, GOOD._replace(versions=[VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)])],
        "VersionSpan(version=4, start=1, end=2)], and the engine has version 3",
    ),
}


class Own:
    """An engine of a user."""

    version = 3

    def __init__(self, given):
        self.given = given

    def generate(self, prompts, params, *, max_new_tokens=None):
        del prompts, params, max_new_tokens
        return self.given

    def update_weights(self, state_dict, *, version=None):
        raise ValueError("it has no weights")


class OwnAsync(Own):
    async def respond(self, prompt, params, *, max_new_tokens=None, session=None):
        del prompt, params, max_new_tokens, session
        return self.given

    async def pause(self): ...

    async def resume(self): ...

    def end_session(self, session): ...

    def close(self): ...


def told(name, what, num_prompts=2):
    return re.escape(f"{name} does not do what an engine promises, for {num_prompts} prompts: ") + (
        ".*" + re.escape(what)
    )


@pytest.mark.parametrize(("given", "what"), FAULTS.values(), ids=FAULTS)
def test_a_policy_names_the_engine_and_what_it_gave(given, what, chatml_tokenizer):
    policy = LLMWrapperBase(Own(given), tokenizer=chatml_tokenizer)
    chats = [[{"role": "user", "content": text}] for text in ("one", "two")]
    with pytest.raises(ValueError, match=told("Own", what)):
        policy.respond(Conversations.from_messages(chats))


def test_what_keeps_the_promise_is_taken_as_it_is(chatml_tokenizer):
    spans = [VersionSpan(2, 0, 1), VersionSpan(3, 1, 2)]
    given = (GOOD._replace(versions=spans, log_probs=[0.0, -1.0]), Generation([], [], "error", "x"))
    policy = LLMWrapperBase(Own(given), tokenizer=chatml_tokenizer)
    chats = [[{"role": "user", "content": text}] for text in ("one", "two")]
    _, full, reasons = policy.respond(Conversations.from_messages(chats))
    assert reasons == ["stop", "error: x"]
    assert full.ids(0)[-2:] == [5, 6]
    assert full.policy_versions(0)[-2:].tolist() == [2, 3]


class Frozen(Own):
    update_weights = None  # type: ignore[assignment]


class Positional(Own):
    def generate(self, prompts, params):
        return [GOOD for _ in prompts]

    def update_weights(self, state_dict): ...


class ForEachCaller:
    version = 0

    async def respond(self, prompt, params, *, max_new_tokens=None, session=None): ...

    async def update_weights(self, state_dict, *, version=None): ...


class Counts(Own):
    def update_weights(self, state_dict, *, version=None):
        del state_dict, version
        self.version += 1


@pytest.mark.parametrize(
    ("engine", "what"),
    [
        pytest.param(
            Frozen(None), "Frozen has no method update_weights.", id="a method is missing"
        ),
        pytest.param(
            Positional(None),
            "Positional has a generate that does not take max_new_tokens= and has a "
            "update_weights that does not take version=.",
            id="arguments are missing",
        ),
        pytest.param(
            object(),
            "object has no version and has no method generate and has no method update_weights.",
            id="no engine",
        ),
    ],
)
def test_what_is_no_engine_is_refused_when_the_policy_is_made(engine, what, chatml_tokenizer):
    with pytest.raises(TypeError, match=re.escape(f"LLMWrapperBase: the engine {what}")):
        LLMWrapperBase(engine, tokenizer=chatml_tokenizer)
    policy = LLMWrapperBase(Own(None), tokenizer=chatml_tokenizer)
    with pytest.raises(TypeError, match=re.escape(f"LLMWrapperBase: the engine {what}")):
        policy.engine = engine
    policy.engine = ForEachCaller()


def test_an_update_after_which_the_version_is_another_one_is_an_error(chatml_tokenizer):
    policy = LLMWrapperBase(Counts(None), tokenizer=chatml_tokenizer)
    assert policy.update_weights({}) == 4
    with pytest.raises(RuntimeError, match=r"Counts.*has version 5 after the update, and 9 is due"):
        policy.update_weights({}, version=9)


@pytest.mark.parametrize(("params", "name"), [(ENTROPY, "entropy"), (TEMPERED, "untempered")])
def test_what_was_asked_for_is_there(params, name):
    with pytest.raises(ValueError, match=f"response 0 has no lists.*{name}.*: \\(\\)"):
        checked(Own(None), [GOOD], params, 1)


def test_every_other_reader_has_the_check(chatml_tokenizer):
    policy = LLMWrapperBase(Own(None), tokenizer=chatml_tokenizer)
    with pytest.raises(ValueError, match=told("Own", "it gave NoneType", 1)):
        generate_rollout_completions(type("Owner", (), {"policy": policy}), ["a prompt"])
    params = SamplingParameters(max_new_tokens=4)

    async def ask():
        served = BatchingEngine(Own([GOOD, GOOD]))
        with pytest.raises(ValueError, match=told("Own", "it gave 2", 1)):
            await served.respond([5], params)
        taking = AsyncPolicy(policy, OwnAsync(None))
        with pytest.raises(ValueError, match=told("OwnAsync", "response 0 is a NoneType", 1)):
            await taking.take_turn(
                Conversations.from_messages([[{"role": "user", "content": "one"}]])
            )

    asyncio.run(ask())


@pytest.mark.parametrize("staleness", [Wait(2), OnPolicy()], ids=["beside training", "on policy"])
def test_a_streaming_collector_says_it_too(staleness, chatml_tokenizer):
    given = GOOD._replace(log_probs=[-0.5])
    engine = OwnAsync(given) if staleness.max_staleness else None
    policy = LLMWrapperBase(Own([given] * 2), tokenizer=chatml_tokenizer)
    data = DataLoadingPrimer([{"prompt": "?"}], group_size=2)
    env = ChatEnv(batch_size=2).append_transform(data).append_transform(StepCounter(1))
    name = type(engine or policy.engine).__name__
    with (
        StreamingCollector(env, policy, staleness=staleness, engine=engine) as collector,
        pytest.raises(
            RuntimeError, match=rf"failed: ValueError: {name} does not do.*of one length"
        ),
    ):
        next(iter(collector))
