"""Padded batches of a training loop that has no environment: read rightly, or refused."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from transformers import GPT2Config, GPT2LMHeadModel

from objectives import GRPOLoss, KTOLoss, MCAdvantage, SFTLoss, TokenFilters
from objectives.losses.dpo import DPOLoss
from torchrl_modules import TransformersWrapper

ASSISTANT, ATTENTION = ("masks", "all_assistant_mask"), ("masks", "all_attention_mask")


@pytest.fixture
def policy(make_tiny_model, chatml_tokenizer):
    return TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer)


@pytest.fixture
def batch(chatml_tokenizer):
    """Two rows, padded on both sides: 2 and 3 tokens of a prompt, 2 and 1 of an answer."""
    real = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()
    trained = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 1, 0]]).bool()
    ids = torch.arange(70, 80).view(2, 5).masked_fill(~real, chatml_tokenizer.pad_token_id)
    return TensorDict(
        {("tokens", "full"): ids, ATTENTION: real, ASSISTANT: trained}, batch_size=[2]
    )


@pytest.mark.parametrize("key", [ASSISTANT, ATTENTION], ids=str)
def test_masks_are_numbers_0_and_1_or_refused(policy, batch, key):
    loss, mask = SFTLoss(policy), batch[key]
    want = loss(batch).total()
    for dtype in (torch.int64, torch.uint8, torch.float16):
        assert torch.equal(loss(batch.clone().set(key, mask.to(dtype))).total(), want)
    labels = batch["tokens", "full"].masked_fill(~mask, -100)
    added = torch.zeros(2, 5).masked_fill(~mask, -torch.inf)
    for strange in (labels, added, 0.5 * mask):
        with pytest.raises(ValueError, match=rf"SFTLoss: .*{key[1]}.*give labels != -100"):
            loss(batch.clone().set(key, strange))


def test_flags_of_rows_are_0_and_1_or_refused(make_scorer, make_batch):
    """-1 for an undesirable answer would be true, and so the answer a desirable one."""
    labelled = lazy_stack([row for row in make_batch().unbind(0) if row[ASSISTANT].any()])
    for i, row in enumerate(labelled.unbind(0)):
        row["label"], row["mismatched"] = torch.tensor([i % 2]), torch.tensor([0])
    kto = KTOLoss(make_scorer(), loss_function="apo_zero_unpaired")
    loss = kto(labelled)
    assert (loss.num_desirable, loss.num_undesirable) == (2, 3)
    labelled.unbind(0)[0]["label"][:] = -1
    with pytest.raises(ValueError, match=r"KTOLoss: 'label' .* holds -1"):
        kto(labelled)
    cut = make_batch()
    cut.unbind(0)[0]["truncated"] = torch.tensor([3])
    with pytest.raises(ValueError, match=r"'truncated' .* holds 3"):
        GRPOLoss(make_scorer(), filters=TokenFilters(drop_truncated=True))(cut)
    pair = lazy_stack(list(make_batch().unbind(0))[:2])
    for row, chosen in zip(pair.unbind(0), (1, -1), strict=True):
        row["pair_id"], row["chosen"] = torch.tensor([0]), torch.tensor([chosen])
    with pytest.raises(ValueError, match=r"'chosen' .* holds -1"):
        DPOLoss(make_scorer())(pair)


def test_padding_in_front_needs_an_attention_mask(policy, batch):
    loss, unmasked = SFTLoss(policy), batch.exclude(ATTENTION)
    with pytest.raises(ValueError, match=r"begin with different numbers.*\[1, 0\].*attention_mask"):
        loss(unmasked)
    # Behind the last trained token padding does no harm, and a tokenizer's first id may be it.
    assert torch.equal(loss(unmasked[1:]).total(), loss(batch[1:]).total())
    unmasked["tokens", "full"][:, 0] = policy.tokenizer.pad_token_id
    assert loss.pack(unmasked).lengths.tolist() == [5, 5]
    said = batch.clone().set(ATTENTION, torch.ones(2, 5).bool())  # so it is real
    assert loss.pack(said).lengths.tolist() == [5, 5]


def test_a_ratio_of_1_needs_no_log_probs_of_the_sampler(policy, batch):
    """One step on fresh tokens: the loss is minus the mean advantage of the tokens, 2, 2, -1."""
    batch["advantage"] = torch.tensor([2.0, -1.0])
    loss = GRPOLoss(policy, old_policy="current")
    torch.testing.assert_close(loss(batch).total(), torch.tensor(-1.0))
    packed = loss.pack(batch)
    loss.old_policy = "sampler"
    with pytest.raises(KeyError, match=r"needs \['log_probs'\].*Pack the rows again"):
        loss.pack(packed)


@pytest.mark.usefixtures("unchecked")
def test_rows_that_wait_for_their_group_are_no_batch(policy, batch):
    batch["reward"], batch["group_id"] = torch.ones(2, 1, 1), torch.tensor([7, 7])
    with pytest.raises(TypeError, match=r"GRPOLoss got None.*while no group is complete"):
        GRPOLoss(policy)(MCAdvantage(3).inv(batch))


def test_dropout_in_training_is_told_once(chatml_tokenizer, batch, caplog):
    """Of a GPT-2 as it comes, with its dropout of 0.1; in evaluation its ratios are 1."""
    config = GPT2Config(
        vocab_size=len(chatml_tokenizer), n_positions=16, n_embd=16, n_layer=1, n_head=2
    )
    policy = TransformersWrapper(GPT2LMHeadModel(config), tokenizer=chatml_tokenizer)
    batch["log_probs", "full"] = torch.full((2, 5), -5.0)
    batch["advantage"] = torch.ones(2)
    for is_training, old_policy, said in ((0, "sampler", 0), (1, "current", 0), (1, "sampler", 1)):
        policy.model.train(bool(is_training))
        loss = GRPOLoss(policy, old_policy=old_policy)
        caplog.clear()
        loss(batch), loss(batch)
        assert caplog.text.count("training mode and has dropout") == said


SURROGATES = {
    "clipped_surrogate": lambda F, *a: F.clipped_surrogate(a[0], *a[2:]),
    "cispo": lambda F, *a: F.cispo(*a),
    "sapo": lambda F, *a: F.sapo(a[0], *a[2:]),
    "vespo": lambda F, *a: F.vespo(*a),
    "gmpo": lambda F, *a: F.gmpo(a[0], *a[2:]),
    "divergence_masked": lambda F, *a: F.divergence_masked(a[1], a[1] + a[0], *a[2:]),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_an_advantage_of_each_sequence_does_not_go_by_the_columns(plain, name):
    """``[B]`` beside ``[B, T]`` would, where B is T; ``[B, 1]`` is that of each token of a row."""
    surrogate = SURROGATES[name]
    log_ratio = torch.linspace(-0.3, 0.3, 9).view(3, 3)
    log_prob, advantage = log_ratio - 1, torch.tensor([1.0, -1.0, 2.0])
    want = surrogate(plain, log_ratio, log_prob, advantage[:, None].expand(3, 3)).loss
    assert torch.equal(surrogate(plain, log_ratio, log_prob, advantage[:, None]).loss, want)
    with pytest.raises(ValueError, match=r"advantage \[3\].*make values\[:, None\]"):
        surrogate(plain, log_ratio, log_prob, advantage)


def test_other_functions_take_no_value_of_each_sequence(plain):
    tokens, sequences = -torch.ones(3, 3), -torch.ones(3)
    calls = {
        r"behavior_log_prob \[3\]": lambda: plain.log_ratio(tokens, sequences),
        r"ref_log_prob \[3\]": lambda: plain.kl_estimate(tokens, sequences),
        r"teacher_log_prob \[3\]": lambda: plain.sampled_distillation(
            tokens, sequences, direction="forward"
        ),
        r"advantage \[3\]": lambda: plain.off_policy_sequence_mask(
            tokens, tokens, sequences, threshold=1.0
        ),
        r"reward \[3\]": lambda: plain.generalized_advantage(sequences, tokens),
        r"mask \[3\]": lambda: plain.token_mean(tokens, sequences < 0),
    }
    for match, call in calls.items():
        with pytest.raises(ValueError, match=match):
            call()


def test_masks_of_functions_are_booleans(plain):
    """``~`` of 0 and 1 is -1 and -2: of a flag of whole numbers all sequences were dropped."""
    values, mask = torch.ones(1, 2), torch.tensor([[True, False]])
    for dtype in (torch.int64, torch.uint8, torch.float32):
        with pytest.raises(TypeError, match=r"mask must be of booleans.*mask\.bool\(\)"):
            plain.token_mean(values, mask.to(dtype))
        with pytest.raises(TypeError, match="mask must be of booleans"):
            plain.flag_fraction(mask, mask.to(dtype))
        with pytest.raises(TypeError, match="truncated must be of booleans"):
            plain.overlong_mask(torch.zeros(1, dtype=dtype), mask)
        with pytest.raises(TypeError, match="mask must be of booleans"):
            plain.overlong_mask(torch.zeros(1).bool(), mask.to(dtype))
