"""Tokens are scored and trained in the set that they were drawn from."""

import asyncio
import math

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import nn

from objectives import GRPOLoss
from torchrl_data import SamplingMasks
from torchrl_data.conversation_io import read_conversations, row_tensordicts
from torchrl_envs import ChatEnv, RetrieveKL
from torchrl_modules import (
    AsyncTransformersEngine,
    SamplingParameters,
    TransformersEngine,
    TransformersWrapper,
)
from torchrl_modules.scoring.scorer import PackedScorer

PROMPTS = [[5], [9, 8, 7, 6, 5, 4, 3], [20, 21, 22], [40] * 12]
PARAMS = {"stop_token_ids": (2,), "max_new_tokens": 12, "seed": 1, "sampling_mask": True}


def hand_made(make_tiny_model, logits):
    """A model that gives these logits at every position, whatever it reads."""
    model = make_tiny_model()
    with torch.no_grad():
        model.model.norm.weight.zero_()
        bias = torch.full((model.config.vocab_size,), -20.0)
        bias[: len(logits)] = torch.tensor(logits)
    model.lm_head.bias = nn.Parameter(bias)
    return model


@pytest.mark.parametrize("own_logits", [False, True], ids=["head in tiles", "the model's logits"])
def test_the_log_prob_is_the_logit_less_the_logsumexp_over_the_set(make_tiny_model, own_logits):
    model = hand_made(make_tiny_model, [0.0, math.log(2), math.log(3), math.log(4)])
    scorer = PackedScorer(model)
    if own_logits:
        scorer._reader.head = None
    masks = SamplingMasks.from_ids([[1, 3], [2], [0, 1, 2]], vocab_size=4)
    ids, mask = torch.tensor([7, 3, 2, 1]), torch.tensor([False, True, True, True])
    kept = scorer.score_packed(ids, torch.tensor([4]), mask, entropy=True, sampling_masks=masks)
    # 4 of 2 + 4; the only one; 2 of 1 + 2 + 3.
    torch.testing.assert_close(kept.log_prob.exp(), torch.tensor([4 / 6, 1.0, 2 / 6]))
    h = -sum(p * math.log(p) for p in (1 / 6, 2 / 6, 3 / 6))
    assert kept.entropy is not None
    torch.testing.assert_close(kept.entropy[1:], torch.tensor([0.0, h]), atol=1e-6, rtol=1e-5)
    cold = scorer.score_packed(ids, torch.tensor([4]), mask, temperature=0.5, sampling_masks=masks)
    torch.testing.assert_close(cold.log_prob[0].exp(), torch.tensor(16 / 20))  # squares
    # The gradient stays in the set: of the logit of token 2, drawn alone, there is none.
    kept.log_prob[1].backward()
    assert model.lm_head.bias.grad.abs().max() < 1e-6


def test_a_token_without_a_set_is_scored_as_ever(make_tiny_model):
    model = hand_made(make_tiny_model, [0.0, math.log(2), math.log(3), math.log(4)])
    masks = SamplingMasks.from_ids([[1, 3], []], vocab_size=4)
    ids, mask = torch.tensor([7, 3, 2]), torch.tensor([False, True, True])
    scores = PackedScorer(model).score_packed(
        ids,
        torch.tensor([3]),
        mask,
        truncation=SamplingParameters(top_k=2),
        sampling_masks=masks,
    )
    torch.testing.assert_close(scores.log_prob.exp(), torch.tensor([4 / 6, 3 / 7]))


def test_a_set_without_its_token_is_refused(make_tiny_model):
    masks = SamplingMasks.from_ids([[1, 3]], vocab_size=4)
    ids, mask = torch.tensor([7, 2]), torch.tensor([False, True])
    with pytest.raises(ValueError, match="sampled, 2, is not in its sampling mask"):
        PackedScorer(make_tiny_model()).score_packed(
            ids, torch.tensor([2]), mask, sampling_masks=masks
        )


@pytest.mark.parametrize(
    "truncation",
    [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1, "temperature": 0.7, "min_tokens": 3}],
)
def test_the_engine_writes_down_the_set_of_each_draw(make_tiny_model, truncation):
    model = make_tiny_model()
    vocab_size = model.config.vocab_size
    params = SamplingParameters(**PARAMS, **truncation, kept_counts=True)
    given = TransformersEngine(model).generate(PROMPTS, params)
    several = TransformersEngine(model, tokens_per_look=4).generate(PROMPTS, params)
    for prompt, one, two in zip(PROMPTS, given, several, strict=True):
        assert one.sampling_masks == two.sampling_masks  # what is drawn behind the end is dropped
        masks = SamplingMasks.of(one.sampling_masks)
        assert masks.counts().tolist() == one.kept_counts
        kept = masks.kept(vocab_size)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *one.ids]])).logits[0, len(prompt) - 1 : -1]
        logits = logits.double() / params.temperature
        expected = logits.masked_fill(~kept, -math.inf).log_softmax(-1)
        own = expected.gather(1, torch.tensor(one.ids)[:, None])[:, 0]
        torch.testing.assert_close(own, torch.tensor(one.log_probs).double(), atol=1e-5, rtol=0)
        # A stop token that may not come yet is in no set.
        assert not kept[: params.min_tokens, 2].any()


def test_the_asynchronous_engine_writes_them_down_too(make_tiny_model):
    model = make_tiny_model()
    params = SamplingParameters(**PARAMS, top_p=0.8)

    async def respond():
        async with AsyncTransformersEngine(TransformersEngine(model)) as engine:
            return await engine.respond(PROMPTS[1], params)

    given = asyncio.run(respond())
    masks = SamplingMasks.of(given.sampling_masks)
    masks.check_targets(torch.tensor(given.ids))
    assert 1 < masks.counts().float().mean() < model.config.vocab_size


@pytest.fixture
def policy(make_tiny_model, chatml_tokenizer):
    sampling = {"max_new_tokens": 16, "top_p": 0.7, "sampling_mask": True, "seed": 0}
    return TransformersWrapper(
        make_tiny_model(), tokenizer=chatml_tokenizer, generate_kwargs=sampling
    )


@pytest.fixture
def rows(policy):
    queries = TensorDict({"query": ["hello", "What is 2 + 2?", "bye"]}, batch_size=[3])
    full = policy.respond(policy._read_prompts(ChatEnv(batch_size=(3,)).reset(queries)))[1]
    rows = row_tensordicts(full)
    for row in rows:
        row["advantage"] = torch.ones(1, 1)
    return lazy_stack(rows)


def moved(policy, scale=0.3):
    """Change the weights, as an update does."""
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(7)
        for parameter in policy.parameters():
            parameter.add_(scale * parameter.std() * torch.randn_like(parameter))


def test_ratios_are_one_before_an_update_and_go_by_the_set_after_it(policy, rows):
    loss = GRPOLoss(policy)
    packed = loss.pack(rows)
    ratio = (loss._score(packed).log_prob - packed.entries["log_probs"]).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=2e-5, rtol=0)
    moved(policy)
    # A slow reference: the bare model, one row, the recorded set.
    expected = []
    for row in rows.unbind(0):
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        with torch.no_grad():
            logits = policy.model(ids[None]).logits[0].double()
        kept = SamplingMasks(
            row["sampling_mask", "bytes"], row["sampling_mask", "lengths"].long()
        ).kept(logits.shape[1])
        for t in mask.nonzero().flatten().tolist():
            own = logits[t - 1].masked_fill(~kept[t], -math.inf).log_softmax(-1)[ids[t]]
            expected.append(float(own))
    now = loss._score(packed).log_prob.detach()
    torch.testing.assert_close(now.double(), torch.tensor(expected).double(), atol=2e-5, rtol=0)
    # The truncation of the moved weights is another one.
    without = loss._score(loss.pack(rows.exclude("sampling_mask"))).log_prob
    assert (without - now).abs().max() > 0.05
    # Parts and orders change nothing; neither does padding, nor a scoring pass in parts.
    parts = torch.cat([loss._score(part).log_prob for part in packed.micro_batches(num_rows=1)])
    torch.testing.assert_close(parts, now, atol=1e-5, rtol=0)
    back = loss._score(packed.take_rows(torch.tensor([2, 0, 1]))).log_prob
    torch.testing.assert_close(back.sort().values, now.sort().values, atol=1e-5, rtol=0)
    keep = torch.arange(packed.num_targets) % 2 == 0
    torch.testing.assert_close(
        loss._score(packed.keep_targets(keep)).log_prob, now[keep], atol=1e-5, rtol=0
    )
    policy.scorer.micro_batch_tokens = 40
    with torch.no_grad():
        torch.testing.assert_close(loss._score(packed).log_prob, now, atol=1e-5, rtol=0)
    scored = policy.log_prob(rows)
    mask = torch.nn.utils.rnn.pad_sequence(
        [row["masks", "all_assistant_mask"] for row in rows.unbind(0)], batch_first=True
    )
    torch.testing.assert_close(scored[mask], now, atol=1e-5, rtol=0)
    found = policy.get_dist(rows).log_prob(
        torch.nn.utils.rnn.pad_sequence(
            [row["tokens", "full"] for row in rows.unbind(0)], batch_first=True
        )
    )
    torch.testing.assert_close(found[mask], now, atol=1e-5, rtol=0)


def test_padded_rows_are_scored_by_their_sets(policy):
    queries = TensorDict({"query": ["hello", "What is 2 + 2?", "bye"]}, batch_size=[3])
    policy.pad_output = True
    batch = policy(ChatEnv(batch_size=(3,)).reset(queries))
    moved(policy)
    loss = GRPOLoss(policy)
    batch["advantage"] = torch.ones(3, 1, 1)
    padded = loss._score(loss.pack(batch)).log_prob
    rows = lazy_stack(row_tensordicts(read_conversations(batch, "full", who="test")))
    for row in rows.unbind(0):
        row["advantage"] = torch.ones(1, 1)
    torch.testing.assert_close(padded, loss._score(loss.pack(rows)).log_prob)


def test_the_reference_scores_in_the_set_of_the_policy(policy, rows, make_tiny_model):
    reference = TransformersWrapper(
        make_tiny_model(),
        tokenizer=policy.tokenizer,
        generate=False,
        generate_kwargs=policy.sampling,
    )
    for parameters in (policy, reference):
        moved(parameters)
    now = policy.log_prob(rows)
    scored = RetrieveKL(ref_model=reference, add_to_reward=False)(rows)
    for row, own in zip(scored.unbind(0), now, strict=True):
        found = row["next", "ref_log_probs", "full"]
        torch.testing.assert_close(found, own[: len(found)], atol=1e-5, rtol=0)


class Untaught:
    """A scorer that takes no sampling masks."""

    temperature = 1.0

    def score_packed(self, ids, lengths, target_mask, *, temperature=1.0, entropy=False):
        raise AssertionError("not called")


def test_what_can_take_no_effect_is_refused(policy, rows, make_tiny_model, chatml_tokenizer):
    with pytest.raises(ValueError, match="sampling_mask records what top_k, top_p and min_p leave"):
        TransformersWrapper(
            make_tiny_model(),
            tokenizer=chatml_tokenizer,
            generate_kwargs={"sampling_mask": True},
        )
    with pytest.raises(ValueError, match="score_truncated=False scores over the whole"):
        policy.score_truncated = False
    loss = GRPOLoss(Untaught())
    with pytest.raises(TypeError, match="score_packed of Untaught takes none"):
        loss(rows)
