"""What a policy writes on request: several responses a prompt, padding, further values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from torchrl_data.batched_object import read_objects, write_objects
from torchrl_data.conversation import Conversations, Turn
from torchrl_data.conversation_io import read_conversations, row_tensordicts, write_conversations
from torchrl_data.history import History
from torchrl_data.layout import LogProbs, Masks, Tokens
from torchrl_data.ragged.padded import padded_rows
from torchrl_modules import TransformersEngine, TransformersWrapper

CHATS = [[{"role": "user", "content": text}] for text in ("hi", "a longer question 🙂", "x")]


def make_batch(chats=CHATS, batch_size=None):
    batch = TensorDict(batch_size=batch_size or [len(chats)])
    write_conversations(batch, "prompt", Conversations.from_messages(chats))
    return batch


@pytest.fixture(scope="module")
def make_policy(chatml_tokenizer, make_tiny_model):
    def make(**kwargs):
        kwargs.setdefault("generate_kwargs", {"max_new_tokens": 6})
        return TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer, **kwargs)

    return make


# Several responses per prompt ---------------------------------------------------------------------


@pytest.mark.parametrize("pad_output", [False, True], ids=["ragged", "padded"])
@pytest.mark.parametrize("batch_size", [[3], [3, 1]], ids=str)
def test_samples_add_a_dimension_and_keep_what_belongs_to_a_row(
    make_policy, batch_size, pad_output
):
    torch.manual_seed(0)
    batch = make_batch(batch_size=batch_size)
    batch.set("group_id", torch.arange(3).view(batch_size))
    write_objects(batch, "query", ["a", "b", "c"])
    given_keys = set(batch.keys())
    out = make_policy(num_samples=4, pad_output=pad_output)(batch)
    assert out.batch_size == torch.Size([*batch_size, 4])
    assert set(batch.keys()) == given_keys, "the input is left as it was"
    assert out.get("group_id").flatten().tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert read_objects(out, "query") == ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    full = read_conversations(out, "full", who="test")
    rows = [full.messages(i) for i in range(12)]
    assert [row[0] for row in rows] == [chat[0] for chat in CHATS for _ in range(4)]
    assert all(len(row) == 2 for row in rows)
    assert len({tuple(full.ids(i)) for i in range(4)}) > 1, "they are drawn independently"
    flat = out.reshape(-1)
    for i in range(12):
        real = flat[i]["masks", "all_attention_mask"]
        assert flat[i]["tokens", "full"][real].tolist() == full.ids(i)


def test_one_sample_adds_a_dimension_too(make_policy):
    assert make_policy(num_samples=1)(make_batch()).batch_size == torch.Size([3, 1])


def test_a_group_reads_its_prompt_once(make_policy):
    policy = make_policy(num_samples=5, write_tokens=False)
    seen = []
    hook = policy.model.model.register_forward_pre_hook(
        lambda *given: seen.append(tuple(given[2]["input_ids"].shape)), with_kwargs=True
    )
    policy(make_batch())
    hook.remove()
    assert seen[0][0] == 3, "three prompts, though fifteen rows"
    assert seen[1] == (15, 1)


# Padded output ------------------------------------------------------------------------------------

TURN = {"role": "assistant", "content": ""}


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=5))
def test_padded_rows_are_the_ragged_ones_where_the_mask_is_true(rows):
    from torchrl_data.conversation import EncodedMessages, Source

    conversations = Conversations.from_messages([[] for _ in rows])
    conversations = conversations.append_encoded(
        [EncodedMessages(list(range(7, 7 + p)), [Source.TEMPLATE] * p) for p, _ in rows]
    )
    conversations = conversations.append_turns(
        [
            Turn(
                list(range(20, 20 + r)),
                [-0.5 - i for i in range(r)],
                TURN,
                versions=3,
                extra={"entropy": [1.0 + i for i in range(r)]},
            )
            for _, r in rows
        ]
    )
    ragged = row_tensordicts(conversations)
    padded = padded_rows(ragged, pad_token_id=7)
    width = max(p for p, _ in rows)
    for i, ((p, r), row) in enumerate(zip(rows, ragged, strict=True)):
        real = padded["masks", "all_attention_mask"][i]
        assert real.tolist() == [width - p <= at < width + r for at in range(len(real))], (
            "the prompt ends, and the response begins, at one column in all rows"
        )
        for key in (
            ("tokens", "full"),
            ("log_probs", "full"),
            ("entropy", "full"),
            ("masks", "all_assistant_mask"),
            ("policy_versions", "full"),
        ):
            assert torch.equal(padded[key][i][real], row[key]), key
        assert (
            padded["tokens", "prompt"][i].tolist()[width - p :] == row["tokens", "prompt"].tolist()
        )
        parts = {"tokens": (20, 1, 7), "log_probs": (-0.5, -1, 0), "entropy": (1.0, 1, 0)}
        for group, (first, step, fill) in parts.items():
            drawn = [first + step * k for k in range(r)]
            assert row[group, "response"].tolist() == drawn
            missing = max(n for _, n in rows) - r
            assert padded[group, "response"][i].tolist() == drawn + [fill] * missing
        gap = ~real
        assert (padded["tokens", "full"][i][gap] == 7).all()
        assert not padded["masks", "all_assistant_mask"][i][gap].any()
        assert (padded["policy_versions", "full"][i][gap] == -1).all()


def test_both_forms_hold_the_same_and_convert(make_policy):
    outputs = []
    for pad_output in (False, True):
        torch.manual_seed(0)
        outputs.append(make_policy(pad_output=pad_output, entropy=True)(make_batch()))
    ragged, padded = outputs
    mask = padded["masks", "all_attention_mask"]
    assert not mask.all(), "nothing was padded"
    tokens = padded["tokens", "full"]
    for i, row in enumerate(ragged.unbind(0)):
        assert torch.equal(tokens[i][mask[i]], row["tokens", "full"])
        assert torch.equal(padded["entropy", "full"][i][mask[i]], row["entropy", "full"])
    group = padded["tokens"]
    assert group.prompt.shape[1] + group.response.shape[1] == group.full.shape[1]


@pytest.mark.parametrize("batch_size", [[3], [3, 1]], ids=str)
def test_groups_are_of_their_classes_and_read_by_name(make_policy, batch_size):
    batch = make_policy()(make_batch(batch_size=batch_size))
    full = read_conversations(batch, "full", who="test")
    starts = [full.position(i).response_start for i in range(3)]
    expected = {
        (Tokens, "tokens", "prompt"): [full.ids(i)[:n] for i, n in enumerate(starts)],
        (Tokens, "tokens", "full"): [full.ids(i) for i in range(3)],
        (LogProbs, "log_probs", "full"): [full.log_probs(i).tolist() for i in range(3)],
        (Masks, "masks", "all_assistant_mask"): [full.assistant_mask(i).tolist() for i in range(3)],
    }
    for (cls, group, name), rows in expected.items():
        assert type(batch[group]) is cls
        for shown in (getattr(batch[group], name), batch[group, name], batch[group][name]):
            flat = shown if len(batch_size) == 1 else [row for (row,) in shown]
            assert [row.tolist() for row in flat] == rows
        assert batch[group].padded is False
        row = batch.reshape(-1)[1]
        assert getattr(row[group], name).tolist() == row[group, name].tolist() == rows[1]


def test_the_last_message_is_read_by_a_nested_key(make_policy):
    """What parsers of TorchRL do."""
    batch = make_policy()(make_batch())
    said = [c.last_message(0)["content"] for c in read_conversations(batch, "full", who="test")]
    history = batch["history", "full"]
    assert type(history) is History
    assert list(history[..., -1].content) == said
    stacked = lazy_stack(list(batch.unbind(0)))
    assert list(stacked["history", "full"][..., -1].content) == said
    assert batch[1]["history", "full"][..., -1].content == said[1]


# Further values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param({}, id="plain"),
        pytest.param({"temperature": 0.7, "top_k": 5}, id="tempered and truncated"),
        pytest.param({"temperature": 0.0}, id="greedy"),
    ],
)
def test_entropy_and_untempered_log_probs_are_those_of_the_bare_model(
    make_policy, reference_log_probs, kwargs
):
    torch.manual_seed(0)
    policy = make_policy(
        generate_kwargs={"max_new_tokens": 6, **kwargs}, entropy=True, untempered_log_probs=True
    )
    batch = policy(make_batch())
    temperature = kwargs.get("temperature") or 1.0
    for row in batch.unbind(0):
        ids = row["tokens", "full"]
        mask = row["masks", "all_assistant_mask"]
        expected = reference_log_probs(policy.model, ids.tolist())
        own = row["untempered_log_probs", "full"]
        torch.testing.assert_close(own[mask], expected[mask], rtol=0, atol=1e-5)
        assert not own[~mask].any()
        assert torch.equal(own[mask], row["untempered_log_probs", "response"])
        with torch.no_grad():
            logits = policy.model(input_ids=ids[None]).logits[0, :-1][mask[1:]] / temperature
        if "top_k" in kwargs:
            logits = logits.topk(kwargs["top_k"]).values
        log_p = logits.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        found = row["entropy", "full"][mask]
        torch.testing.assert_close(found, entropy, rtol=1e-4, atol=1e-5)


def test_figures_are_kept_over_turns_and_by_rows_that_failed(make_policy):
    policy = make_policy(entropy=True, max_model_len=60, write_tokens=False)
    chats = [CHATS[0], [{"role": "user", "content": "z" * 200}]]
    batch = policy(make_batch(chats))
    full = read_conversations(batch, "full", who="test")
    first = full.extra(0)["entropy"]
    news = [{"role": "user", "content": "go on"}]
    write_conversations(batch, "prompt", full.append_messages([news, news]))
    policy(batch)
    full = read_conversations(batch, "full", who="test")
    second = full.extra(0)["entropy"]
    assert torch.equal(second[: len(first)], first)
    assert ((second > 0) == full.assistant_mask(0)).all()
    rows = row_tensordicts(full)
    assert rows[1]["entropy", "full"].tolist() == [0.0] * full.num_tokens(1)


def test_without_a_request_there_are_none(make_policy, make_tiny_model):
    batch = make_policy()(make_batch())
    assert "entropy" not in batch
    assert "untempered_log_probs" not in batch
    generation = TransformersEngine(make_tiny_model()).generate(
        [[5]], make_policy().sampling, max_new_tokens=[2]
    )[0]
    assert generation.entropies == generation.untempered_log_probs == ()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        pytest.param(
            {"num_samples": 0},
            "num_samples must be a whole number, at least 1, got 0",
            id="no sample",
        ),
        pytest.param(
            {"pad_output": True, "write_tokens": False}, "pad_output pads", id="nothing to pad"
        ),
    ],
)
def test_wrong_options_are_named(make_policy, kwargs, words):
    with pytest.raises(ValueError, match=words):
        make_policy(**kwargs)


# Rows that can't be encoded -----------------------------------------------------------------------


def test_a_row_that_the_template_refuses_is_marked_and_no_other(make_policy):
    image = [{"type": "text", "text": "x"}, {"type": "image", "url": "u"}]
    chats = [CHATS[0], [{"role": "user", "content": image}], CHATS[2]]
    torch.manual_seed(0)
    alone = make_policy()(make_batch([CHATS[0], CHATS[2]]))
    torch.manual_seed(0)
    batch = make_policy()(make_batch(chats))
    reasons = read_objects(batch, "finish_reason")
    assert reasons[1].startswith("error: The chat template can't render messages")
    assert [reasons[0], reasons[2]] == read_objects(alone, "finish_reason")
    full = read_conversations(batch, "full", who="test")
    assert full[[0, 2]] == read_conversations(alone, "full", who="test")
    assert full.num_tokens(1) == 0
    assert full.messages(1) == chats[1]
    assert len(batch["tokens"].full[1]) == 0
    refused = make_policy()(make_batch([chats[1]]))
    assert read_objects(refused, "finish_reason") == [reasons[1]]
