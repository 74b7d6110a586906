"""Each function compiles into one graph, and the graph gives the same value and gradient.

``aot_eager`` traces forward and backward as the default backend does, but needs no C compiler.
"""

from functools import partial

import pytest
import torch

B, T = 3, 5
LENGTHS = torch.tensor([4, 0, 5])


def make_inputs(*, packed):
    shape = (9,) if packed else (B, T)
    generator = torch.Generator().manual_seed(1)

    def noise():
        return -2 * torch.rand(shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(shape, generator=generator) > 0.3
    lengths = LENGTHS if packed else None
    return noise().requires_grad_(), noise(), noise(), noise() + 1, mask, lengths


def one_step(F, log_prob, old, other, advantage, mask, lengths):
    """Everything that a step of any of the algorithms calls."""
    ratio = F.log_ratio(log_prob, old, mask)
    sequence = F.leveled_log_ratio(ratio, mask, lengths, level="sequence_token")
    keep = F.off_policy_sequence_mask(log_prob, old, advantage, mask, lengths, threshold=0.1)
    keep = keep & F.trust_region_mask(log_prob, old, mask, threshold=0.5)
    keep = keep & F.high_entropy_mask(-other, mask, top_fraction=0.8)
    weight = F.sampler_correction(old, other, mask, lengths, level="sequence", max_k3=1.0).weight
    terms = [
        F.clipped_surrogate(ratio, advantage, mask, ratio_cap=3.0),
        F.clipped_surrogate(sequence, advantage, mask),
        F.cispo(ratio, log_prob, advantage, mask),
        F.sapo(ratio, advantage, mask),
        F.vespo(ratio, log_prob, advantage, mask, lengths),
        F.gmpo(ratio, advantage, mask, lengths),
        F.divergence_masked(log_prob, old, advantage, mask, divergence="symmetric_kl"),
        F.divergence_masked(log_prob, old, F.distillation_advantage(log_prob, other, mask), mask),
    ]
    tokens = sum(term.loss for term in terms) * keep * weight
    tokens = tokens + F.kl_estimate(log_prob, other, mask, log_ratio=ratio)
    tokens = tokens + F.sampled_distillation(log_prob, other, mask, direction="forward")
    tokens = tokens + F.negative_log_likelihood(log_prob, mask)
    reduced = [
        F.aggregate(tokens, mask, lengths, aggregation=name, max_tokens=7)
        for name in ("token_mean", "sequence_mean", "fixed_length", "sequence_sum")
    ]
    metrics = F.effective_sample_fraction(ratio, mask) + F.flag_fraction(keep, mask)
    return torch.stack(reduced).sum(), metrics + F.off_policy_gap(log_prob, old, mask)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_losses_are_one_graph(plain, packed):
    inputs = make_inputs(packed=packed)
    compiled = torch.compile(partial(one_step, plain), fullgraph=True, backend="aot_eager")
    results = []
    for function in (partial(one_step, plain), compiled):
        loss, metrics = function(*inputs)
        results.append((loss, metrics, *torch.autograd.grad(loss, inputs[0])))
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager)


def every_advantage(F, reward, group, mask, lengths, dense):
    return (
        F.group_advantage(reward, group),
        F.group_advantage(reward, group, scale="batch"),
        F.rloo_advantage(reward, group),
        F.gdpo_advantage(torch.stack([reward, -reward], 1), group, torch.ones(2)),
        F.pass_at_k_advantage(reward > 0, group, k=2),
        F.turn_advantage(dense, mask, lengths, group[:B]),
        F.maxrl_advantage(reward, group),
        F.relative_length(group, group),
        F.overlong_penalty(lengths, max_tokens=8, buffer_tokens=4),
        F.generalized_advantage(dense, -dense, mask, lengths, gamma=0.9, lmbda=0.8),
        F.value_loss(dense, -dense, dense + 1, clip_value=0.2),
    )


@pytest.mark.weekly
def test_advantages_are_one_graph(plain):
    generator = torch.Generator().manual_seed(0)
    inputs = (
        torch.tensor([1.0, 0.0, torch.nan, 2.0, 1.0]),
        torch.tensor([4, 4, 9, 9, 4]),
        torch.rand(9, generator=generator) > 0.4,
        LENGTHS,
        torch.rand(9, generator=generator),
    )
    compiled = torch.compile(partial(every_advantage, plain), fullgraph=True, backend="aot_eager")
    for eager, graph in zip(every_advantage(plain, *inputs), compiled(*inputs), strict=True):
        torch.testing.assert_close(graph, eager)


def over_the_vocabulary(F, logits, teacher, ids):
    scores = F.token_log_probs(logits, ids, temperature=0.7, chunk_tokens=2)
    jsd = F.generalized_jsd(logits, teacher, weight=0.3)
    return (scores.log_prob + scores.entropy + jsd).sum()


def test_vocabulary_functions_are_one_graph(plain):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    ids = torch.tensor([0, 6, 2, 3, 3])
    compiled = torch.compile(
        partial(over_the_vocabulary, plain), fullgraph=True, backend="aot_eager"
    )
    eager, graph = over_the_vocabulary(plain, logits, teacher, ids), compiled(logits, teacher, ids)
    torch.testing.assert_close(graph, eager)
    want, got = (torch.autograd.grad(loss, logits)[0] for loss in (eager, graph))
    torch.testing.assert_close(got, want)
