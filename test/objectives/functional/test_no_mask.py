"""No mask is a mask of ones: the same value and gradient, in both layouts."""

from types import SimpleNamespace

import pytest
import torch

import objectives.functional as F

NO_MASK = {
    "log_ratio": lambda x: F.log_ratio(x.lp, x.other, x.mask),
    "sequence ratio": lambda x: F.leveled_log_ratio(
        x.lp, level="sequence", mask=x.mask, lengths=x.lengths
    ),
    "distillation advantage": lambda x: F.distillation_advantage(x.lp, x.other, x.mask),
    "k3": lambda x: F.sampler_correction(
        x.lp, x.other, mask=x.mask, lengths=x.lengths, level="k3", max_k3=0.5
    ),
    "kl": lambda x: F.kl_estimate(x.lp, x.other, x.mask, log_ratio=x.other),
    "nll": lambda x: F.negative_log_likelihood(x.lp, x.mask),
    "distillation": lambda x: F.sampled_distillation(x.lp, x.other, x.mask, direction="forward"),
    "correction": lambda x: F.sampler_correction(x.lp, x.other, mask=x.mask, lengths=x.lengths),
    "gap": lambda x: F.off_policy_gap(x.lp, x.other, x.mask),
    "entropy threshold": lambda x: F.entropy_threshold(x.lp, x.mask, top_fraction=0.5),
    "entropy filter": lambda x: F.high_entropy_mask(x.lp, x.mask, top_fraction=0.5),
    "trust region": lambda x: F.trust_region_mask(x.lp, x.other, x.mask, threshold=0.5),
    "stale": lambda x: F.off_policy_sequence_mask(
        x.lp, x.other, x.adv, threshold=0.1, mask=x.mask, lengths=x.lengths
    ),
    "ess": lambda x: F.effective_sample_fraction(x.lp, x.mask),
    "flags": lambda x: F.flag_fraction(x.adv > 0, x.mask),
    "gae": lambda x: F.generalized_advantage(x.lp, x.other, x.mask, x.lengths, lmbda=0.7),
    "sequence mean": lambda x: F.sequence_mean(x.lp, mask=x.mask, lengths=x.lengths),
    **{
        name: lambda x, name=name: F.aggregate(
            x.lp, aggregation=name, max_tokens=7, mask=x.mask, lengths=x.lengths
        )
        for name in F.AGGREGATIONS
    },
}


@pytest.mark.parametrize("name", NO_MASK)
@pytest.mark.parametrize("shape", [(2, 5), (7,), (0,)], ids=str)
def test_no_mask_is_a_mask_of_ones(name, shape):
    generator = torch.Generator().manual_seed(3)
    lp, other, adv = (torch.randn(shape, generator=generator).double() for _ in range(3))
    lengths = None if len(shape) == 2 else torch.tensor([shape[0] // 2, 0, (shape[0] + 1) // 2])
    results = []
    for mask in (None, torch.ones(shape, dtype=torch.bool)):
        lp = lp.detach().requires_grad_()
        given = SimpleNamespace(lp=lp, other=other, adv=adv, mask=mask, lengths=lengths)
        found = NO_MASK[name](given)
        found = found if isinstance(found, tuple) else (found,)
        total = sum((x.sum() for x in found if x.requires_grad), torch.zeros(()))
        grads = torch.autograd.grad(total, lp) if total.requires_grad else ()
        results.append([x.detach() for x in (*found, *grads)])
    assert len(results[0]) == len(results[1])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_the_mean_of_one_token_is_its_value():
    value = torch.tensor([-3.0])
    for mask in (None, torch.tensor([True])):
        assert F.token_mean(value, mask).item() == -3.0
