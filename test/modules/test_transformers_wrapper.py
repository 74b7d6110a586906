"""The policy's layout: prompt, response and full, written and scored."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_data.batched_object import read_objects
from torchrl_data.conversation import Conversations
from torchrl_data.conversation_io import read_conversations, write_conversations
from torchrl_data.missing_entry import MissingEntryError
from torchrl_modules import SamplingParameters, TransformersWrapper

CHATS = [[{"role": "user", "content": text}] for text in ("hi", "a longer question 🙂", "x")]


def make_batch(chats=CHATS, batch_size=None):
    batch = TensorDict(batch_size=batch_size or [len(chats)])
    write_conversations(batch, "prompt", Conversations.from_messages(chats))
    return batch


@pytest.fixture
def make_policy(chatml_tokenizer, make_tiny_model):
    def make(model=None, **kwargs):
        kwargs.setdefault("generate_kwargs", {"max_new_tokens": 6})
        model = make_tiny_model() if model is None else model
        return TransformersWrapper(model, tokenizer=chatml_tokenizer, **kwargs)

    return make


@pytest.mark.parametrize("batch_size", [[4], [2, 2]], ids=str)
def test_full_is_prompt_and_response_in_every_entry(make_policy, chatml_tokenizer, batch_size):
    torch.manual_seed(0)
    batch = make_policy()(make_batch([*CHATS, CHATS[0]], batch_size))
    full = read_conversations(batch, "full", who="test")
    for i, row in enumerate(batch.reshape(-1).unbind(0)):
        tokens = row["tokens"]
        response = tokens["response"]
        assert torch.equal(tokens["full"], torch.cat([tokens["prompt"], response]))
        assert tokens["full"].tolist() == full.ids(i)
        mask = row["masks", "all_assistant_mask"]
        assert mask.tolist() == [False] * len(tokens["prompt"]) + [True] * len(response)
        assert row["masks", "all_attention_mask"].all()
        log_probs = row["log_probs"]
        assert log_probs["full"].shape == tokens["full"].shape
        assert torch.equal(log_probs["full"][mask], log_probs["response"])
        assert (log_probs["response"] < 0).all(), "none is left out, the first one least"
        text = full.messages(i)[-1]["content"]
        assert chatml_tokenizer.decode(response).removesuffix("<|im_end|>") == text


def test_scoring_gives_back_what_sampling_stored(make_policy, make_tiny_model):
    torch.manual_seed(0)
    settings = {"generate_kwargs": {"max_new_tokens": 6, "temperature": 0.8}}
    batch = make_policy(**settings)(make_batch())
    stored = [row["log_probs", "full"].clone() for row in batch.unbind(0)]
    conversations = batch.select(("history", "full"))
    for given in (batch, conversations):
        scored = make_policy(make_tiny_model(), generate=False, **settings)(given)
        for row, expected in zip(scored.unbind(0), stored, strict=True):
            torch.testing.assert_close(row["log_probs", "full"], expected, rtol=0, atol=1e-5)
            assert row["log_probs", "full"].requires_grad


def test_rows_that_do_not_take_part_stay_as_they_were(make_policy):
    batch = make_batch()
    before = read_conversations(batch, "prompt", who="test")
    batch["_step"] = torch.tensor([True, False, True])
    policy = make_policy(write_tokens=False)
    policy(batch)
    full = read_conversations(batch, "full", who="test")
    assert [len(full.messages(i)) for i in range(3)] == [2, 1, 2]
    assert full[1] == before[1]
    assert full.messages(0)[0] == CHATS[0][0]
    assert full.messages(2)[0] == CHATS[2][0]
    assert [bool(reason) for reason in read_objects(batch, "finish_reason")] == [
        True,
        False,
        True,
    ]


def test_a_row_that_is_too_long_is_left_and_the_others_speak(make_policy):
    chats = [CHATS[0], [{"role": "user", "content": "z" * 200}], CHATS[2]]
    batch = make_policy(max_model_len=60, write_tokens=False)(make_batch(chats))
    full = read_conversations(batch, "full", who="test")
    assert [len(full.messages(i)) for i in range(3)] == [2, 1, 2]
    reason = read_objects(batch, "finish_reason")[1]
    assert reason.startswith("error: the prompt has")
    assert "takes 60" in reason


def test_a_model_directory_gives_the_same_policy(
    make_policy, make_tiny_model, chatml_tokenizer, tmp_path
):
    make_tiny_model().save_pretrained(tmp_path)
    chatml_tokenizer.save_pretrained(tmp_path)
    settings = {"generate_kwargs": {"max_new_tokens": 6, "temperature": 0.0}}
    loaded = TransformersWrapper(str(tmp_path), **settings)
    batches = [policy(make_batch()) for policy in (loaded, make_policy(**settings))]
    fulls = [read_conversations(batch, "full", who="test") for batch in batches]
    assert [fulls[0].ids(i) for i in range(3)] == [fulls[1].ids(i) for i in range(3)]


def test_a_turn_stops_at_the_end_of_turn_unless_told_otherwise(make_policy, chatml_tokenizer):
    end = chatml_tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in make_policy().sampling.stop_token_ids
    own = make_policy(generate_kwargs={"stop_token_ids": [5]})
    assert own.sampling.stop_token_ids == (5,)


def test_wrong_construction_is_named(make_policy, make_tiny_model):
    with pytest.raises(TypeError, match="needs the tokenizer of the model"):
        TransformersWrapper(make_tiny_model())
    with pytest.raises(TypeError, match="no parameter 'temprature'"):
        make_policy(generate_kwargs={"temprature": 1.0})


def test_a_batch_without_a_prompt_is_named(make_policy):
    with pytest.raises(
        MissingEntryError, match=r"TransformersWrapper reads \('history', 'prompt'\)"
    ):
        make_policy()(TensorDict(batch_size=[2]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            {"max_new_tokens": 2.5},
            "SamplingParameters: max_new_tokens must be a whole number, at least 1, got 2.5",
            id="half",
        ),
        pytest.param({"top_k": 1.5}, "top_k must be a whole number, at least 0", id="top-k"),
        pytest.param({"temperature": "hot"}, "temperature must be a finite number", id="a word"),
        pytest.param({"temperature": float("nan")}, "temperature must be a finite", id="nan"),
        pytest.param({"temperature": -0.1}, r"temperature .* in \[0, inf\), got -0.1", id="cold"),
        pytest.param({"top_p": 0.0}, r"top_p must be .* in \(0, 1\], got 0.0", id="top-p"),
        pytest.param({"min_p": 1.5}, r"min_p must be .* in \[0, 1\], got 1.5", id="min-p"),
        pytest.param({"repetition_penalty": 0.0}, r"repetition_penalty .* got 0.0", id="penalty"),
        pytest.param({"presence_penalty": 2.5}, r"presence_penalty .* \[-2, 2\]", id="presence"),
        pytest.param({"frequency_penalty": -3}, r"frequency_penalty .* \[-2, 2\]", id="frequency"),
        pytest.param({"logit_bias": {3: 101.0}}, r"logit_bias\[3\] .* \[-100, 100\]", id="bias"),
        pytest.param({"seed": 1 << 63}, "seed must be below", id="seed"),
        pytest.param({"stop_token_ids": ["x"]}, "stop_token_ids must be a .*, got 'x'", id="word"),
        pytest.param(
            {"stop_token_ids": [-5]}, "stop_token_ids must be a .*, got -5", id="negative"
        ),
        pytest.param(
            {"stop_token_ids": [None]}, "stop_token_ids must be given, got None", id="nothing"
        ),
        pytest.param({"stop_token_ids": [99999]}, "are not in the vocabulary", id="unknown"),
    ],
)
def test_sampling_that_can_not_work_is_refused_when_made(make_policy, settings, message):
    with pytest.raises(ValueError, match=message):
        make_policy(generate_kwargs=settings)


def test_none_leaves_a_default_by_name_only(make_policy):
    assert make_policy(generate_kwargs={"temperature": None}).temperature == 1.0
    with pytest.raises(ValueError, match="temperature must be given, got None"):
        SamplingParameters(temperature=None)


@pytest.mark.parametrize("name", ["max_model_len", "micro_batch_tokens"])
def test_limits_are_positive(make_policy, name):
    with pytest.raises(ValueError, match=f"{name} must be a whole number, at least 1, got 0"):
        make_policy(**{name: 0})


def test_wrong_sampling_is_found_before_a_model_is_loaded():
    with pytest.raises(TypeError, match=r"does not take do_sample=False\. Use temperature=0"):
        TransformersWrapper("no/model", generate_kwargs={"do_sample": False})
