"""Scores of a policy: its own distribution, truncated as it samples, as log-probs or in full."""

import importlib
import warnings
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from objectives import GRPOLoss
from torchrl_data import Tokens
from torchrl_data.conversation import Conversations
from torchrl_data.conversation_io import write_conversations
from torchrl_modules import TransformersWrapper
from torchrl_modules.policies.compute_dtype import (
    check_quantization,
    compute_dtype,
    warn_of_other_dtype,
)
from torchrl_modules.quantized_forward import quantize_forward
from torchrl_modules.sampling import distribution

CHATS = [[{"role": "user", "content": text}] for text in ("hi", "a longer question 🙂", "x")]
DRAWN = [
    pytest.param({}, id="plain"),
    pytest.param({"temperature": 0.7}, id="tempered"),
    pytest.param({"temperature": 0.7, "top_k": 6}, id="top-k"),
    pytest.param({"top_p": 0.8}, id="top-p"),
    pytest.param({"min_p": 0.1, "top_p": 0.9, "temperature": 1.3}, id="min-p, then top-p"),
]


def make_batch():
    batch = TensorDict(batch_size=[len(CHATS)])
    write_conversations(batch, "prompt", Conversations.from_messages(CHATS))
    return batch


@pytest.fixture
def make_policy(chatml_tokenizer, make_tiny_model):
    def make(*, seed=0, **kwargs):
        kwargs["generate_kwargs"] = {"max_new_tokens": 8, **kwargs.get("generate_kwargs", {})}
        return TransformersWrapper(make_tiny_model(seed), tokenizer=chatml_tokenizer, **kwargs)

    return make


@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("pad_output", [False, True], ids=["ragged", "padded"])
def test_scores_of_the_sampler_are_what_it_stored(make_policy, monkeypatch, drawn, pad_output):
    monkeypatch.setattr(distribution, "_TILE_BYTES", 4 * 4 * 360)  # several tiles
    torch.manual_seed(0)
    options = {"generate_kwargs": drawn, "untempered_log_probs": True, "entropy": True}
    policy = make_policy(pad_output=pad_output, **options)
    batch = policy(make_batch())
    names = ("log_probs", "entropy", "untempered_log_probs")
    stored = {name: [row[name, "full"].clone() for row in batch.unbind(0)] for name in names}
    given = batch.select("tokens", "masks")
    scored = make_policy(generate=False, **options)(given)
    for name in names:
        for row, expected in zip(scored.unbind(0), stored[name], strict=True):
            torch.testing.assert_close(row[name, "full"], expected, rtol=1e-4, atol=1e-5)
    assert scored[0]["log_probs", "full"].requires_grad


@pytest.mark.parametrize("masked", [True, False], ids=["assistant mask", "no mask"])
@pytest.mark.parametrize("gap", [0, 2])
def test_padded_rows_are_answered_padded_whether_there_is_a_gap_or_not(make_policy, gap, masked):
    """A batch whose rows happen to be of one length has no gaps, and is padded all the same."""
    ids = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])
    rows = [row[n * gap :] for n, row in enumerate(ids)]  # the second prompt is shorter by the gap
    tokens = Tokens.from_rows(prompt=[r[:-2] for r in rows], response=[r[-2:] for r in rows])
    tokens = Tokens.from_rows(**{n: tokens.rows(n) for n in ("prompt", "response")}, full=rows)
    padded, masks = tokens.to_padded(0)
    batch = TensorDict({"tokens": padded, "masks": masks}, batch_size=[2])
    sampled = torch.tensor([[False, False, False, True, True]] * 2)
    if masked:
        batch["masks", "all_assistant_mask"] = sampled
    scored = make_policy(generate=False)(batch)["log_probs", "full"]
    assert scored.shape == (2, 5)
    assert ((scored != 0) == sampled).all()  # without a mask it is the response


@pytest.mark.parametrize("drawn", DRAWN)
def test_the_ratio_of_unchanged_weights_is_one(make_policy, drawn):
    torch.manual_seed(0)
    policy = make_policy(generate_kwargs=drawn)
    batch = policy(make_batch())
    rows = [row.select("tokens", "masks", "log_probs") for row in batch.unbind(0)]
    for row in rows:
        row["advantage"] = torch.ones(1, 1)
    output = GRPOLoss(policy, temperature=drawn.get("temperature", 1.0))(lazy_stack(rows))
    torch.testing.assert_close(output.ratio_mean, torch.tensor(1.0), rtol=0, atol=1e-5)
    torch.testing.assert_close(output.kl_approx, torch.tensor(0.0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", ["sft", "rlhf"])
@pytest.mark.parametrize("pad_output", [False, True], ids=["ragged", "padded"])
def test_the_loss_of_torchrl_reads_the_policy(make_policy, pad_output, strategy):
    """On other weights than those that sampled, so that a token out of place shows."""
    torch.manual_seed(0)
    batch = make_policy(pad_output=pad_output)(make_batch()).select("tokens", "masks", "log_probs")
    rows = batch.clone() if pad_output else lazy_stack(list(batch.unbind(0)))
    rows["advantage"] = torch.tensor([1.0, -2.0, 0.5]).reshape(3, 1, 1)
    policy = make_policy(seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        their_loss = importlib.import_module("torchrl.objectives.llm").GRPOLoss
    ours = GRPOLoss(policy, clip_epsilon=0.2)(rows)
    theirs = their_loss(policy, clip_epsilon=0.2, entropy_bonus=False, masking_strategy=strategy)(
        rows
    )
    assert not torch.isclose(ours.ratio_mean, torch.tensor(1.0), atol=1e-3)
    torch.testing.assert_close(theirs.loss_objective, ours.loss_objective, rtol=1e-4, atol=1e-6)


@pytest.fixture
def padded_vocabulary(chatml_tokenizer, make_tiny_model):
    """A policy whose model has 40 ids more than its tokenizer."""
    model = make_tiny_model()
    model.resize_token_embeddings(400)
    return TransformersWrapper(
        model, tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 8}
    )


def test_ids_beyond_the_tokenizer_are_the_models_own(
    padded_vocabulary, chatml_tokenizer, reference_log_probs
):
    policy = padded_vocabulary
    assert len(chatml_tokenizer) < 390 < policy.vocab_size == 400
    batch = policy(make_batch())
    ids = [[*row["tokens", "full"].tolist(), 390, 5, 399] for row in batch.unbind(0)]
    given = TensorDict({"tokens": Tokens.from_rows(full=[torch.tensor(row) for row in ids])}, 3)
    found = policy.log_prob(given)
    for row, scores in zip(ids, found, strict=True):
        expected = reference_log_probs(policy.model, row)[1:]
        torch.testing.assert_close(scores[1 : len(row)], expected, rtol=1e-4, atol=1e-5)


def test_a_token_that_the_model_does_not_know_marks_its_row_alone(padded_vocabulary):
    policy = padded_vocabulary
    rows = [[5, 6, 7], [5, 400, 7, 8], [5, 6, 9]]
    masks = [[False, True, True], [False, False, True, True], [False, False, True]]

    def batch_of(*which):
        return lazy_stack(
            [
                TensorDict(
                    {
                        ("tokens", "full"): torch.tensor(rows[i]),
                        ("masks", "all_assistant_mask"): torch.tensor(masks[i]),
                    }
                )
                for i in which
            ]
        )

    found, others = policy.log_prob(batch_of(0, 1, 2)), policy.log_prob(batch_of(0, 2))
    torch.testing.assert_close(found[[0, 2], :3], others)
    assert found[1].isnan().tolist() == [False, False, True, True]
    assert found[1, :2].tolist() == [0.0, 0.0]
    policy.generate = False
    scored = policy(batch_of(0, 1, 2))
    torch.testing.assert_close(scored[2]["log_probs", "full"], others[1])
    assert scored[1]["log_probs", "full"].isnan().tolist() == masks[1]
    distribution = policy.get_dist(batch_of(0, 1, 2))
    padded = torch.tensor([[5, 6, 7, 0], [5, 0, 7, 8], [5, 6, 9, 0]])
    torch.testing.assert_close(distribution.log_prob(padded)[[0, 2], :3], others)


def test_the_whole_softmax_is_scored_on_request(make_policy, reference_log_probs):
    torch.manual_seed(0)
    policy = make_policy(generate_kwargs={"top_k": 4}, score_truncated=False)
    batch = policy(make_batch())
    found = policy.log_prob(batch)
    for i, row in enumerate(batch.unbind(0)):
        mask = row["masks", "all_assistant_mask"]
        expected = reference_log_probs(policy.model, row["tokens", "full"].tolist())
        torch.testing.assert_close(
            found[i, : len(mask)][mask], expected[mask], rtol=1e-4, atol=1e-5
        )
        assert (row["log_probs", "full"][mask] > expected[mask] + 0.01).any(), "nothing was cut"
    torch.testing.assert_close(policy.get_dist(batch).log_prob(_tokens(batch)), found)


def test_a_token_that_other_weights_would_leave_out_has_a_finite_score_and_gradient(make_policy):
    torch.manual_seed(0)
    batch = make_policy(generate_kwargs={"top_k": 2})(make_batch())
    other = make_policy(seed=1, generate_kwargs={"top_k": 2})
    scores = other.log_prob(batch)
    assert (scores < -1.0).any()
    assert scores.isfinite().all()
    scores.sum().backward()
    assert all(p.grad.isfinite().all() for p in other.model.parameters())


def _tokens(batch):
    rows = [row["tokens", "full"] for row in batch.unbind(0)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("pad_output", [False, True], ids=["ragged", "padded"])
def test_the_distribution_and_the_log_probs_agree_in_value_and_gradient(
    make_policy, drawn, pad_output
):
    torch.manual_seed(0)
    policy = make_policy(generate_kwargs=drawn, pad_output=pad_output)
    batch = policy(make_batch())
    tokens = batch["tokens", "full"] if pad_output else _tokens(batch)
    dist = policy.get_dist(batch)
    log_prob = policy.log_prob(batch)
    assert dist.batch_shape == log_prob.shape == tokens.shape
    torch.testing.assert_close(dist.log_prob(tokens), log_prob, rtol=1e-4, atol=1e-5)
    assert torch.equal(log_prob != 0, dist.mask)
    for i, row in enumerate(batch.unbind(0)):
        mask = row["masks", "all_assistant_mask"]
        stored = row["log_probs", "full"][mask]
        torch.testing.assert_close(log_prob[i][dist.mask[i]], stored, rtol=1e-4, atol=1e-5)
    parameters = list(policy.model.parameters())
    found = torch.autograd.grad(log_prob.sum(), parameters)
    expected = torch.autograd.grad(dist.log_prob(tokens).sum(), parameters)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * max(b.abs().max().item(), 1))


def test_a_distribution_is_one_where_it_is_scored_and_nothing_elsewhere(make_policy):
    torch.manual_seed(0)
    policy = make_policy(generate_kwargs={"top_k": 3})
    dist = policy.get_dist(policy(make_batch()))
    probs = dist.probs
    torch.testing.assert_close(probs.sum(-1), dist.mask.float())
    assert ((probs > 0).sum(-1)[dist.mask] == 3).all()
    expected = -(probs * probs.clamp(min=1e-30).log()).sum(-1)
    torch.testing.assert_close(dist.entropy(), expected)
    drawn = dist.sample((50,))
    assert drawn.shape == (50, *dist.mask.shape)
    assert not drawn[:, ~dist.mask].any()
    assert dist.log_prob(drawn[0]).isfinite().all()
    assert torch.equal(dist.mode[dist.mask], probs[dist.mask].argmax(-1))
    assert dist.logits.shape == (*dist.mask.shape, policy.model.config.vocab_size)


@pytest.mark.parametrize(
    ("trained", "sampled", "warns"),
    [
        pytest.param(torch.bfloat16, None, True, id="autocast, and an engine of float32"),
        pytest.param(torch.bfloat16, torch.bfloat16, False, id="both in bfloat16"),
        pytest.param(None, None, False, id="both in float32"),
    ],
)
def test_an_engine_that_computes_in_another_type_is_told(
    make_tiny_model, chatml_tokenizer, caplog, trained, sampled, warns
):
    trainer, sampler = (
        TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer, autocast_dtype=dtype)
        for dtype in (trained, sampled)
    )
    assert compute_dtype(trainer) == (trained or torch.float32)
    assert warn_of_other_dtype(trainer, sampler) is warns
    words = "samples in torch.float32, and TransformersWrapper trains in torch.bfloat16"
    assert (words in caplog.text) is warns
    assert not warn_of_other_dtype(trainer, object()), "what can't be told is not warned of"


def test_an_engine_that_rounds_what_the_trained_model_does_not_is_told_and_the_reverse_refused(
    make_tiny_model, chatml_tokenizer, caplog
):
    whole, rounded = (
        TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer) for _ in range(2)
    )
    quantize_forward(rounded.model, "fp8_per_channel")
    engine = SimpleNamespace(quantization=None)
    sampler = SimpleNamespace(engine=engine)
    assert not check_quantization(whole, sampler)
    with pytest.raises(ValueError, match="trained with quantization=fp8_per_channel, and Simple"):
        check_quantization(rounded, sampler)
    assert not caplog.text
    engine.quantization = "fp8_per_channel"
    assert not check_quantization(rounded, sampler)
    assert check_quantization(whole, sampler)
    assert "draws with weights quantised by fp8_per_channel" in caplog.text
    engine.quantization = "fp8_per_tensor"
    with pytest.raises(ValueError, match="draws with quantization=fp8_per_tensor"):
        check_quantization(rounded, sampler)
