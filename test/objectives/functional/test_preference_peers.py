"""TRL's losses of preferences, run beside ours on the same tokens; skipped where TRL is missing."""

import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

import objectives.functional as F

P, T, PROMPT, BETA = 4, 7, 2, 0.3
SMOOTHING = {"exo_pair": 0.1, "robust": 0.1}
OF_MEANS = ("ipo",)
OURS_ALONE = ("orpo",)
"""What TRL computes in a trainer of its own."""


@pytest.fixture(scope="module")
def trl():
    """A trainer of TRL by its name in ``trl.trainer``."""

    def get(module, name):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(pytest.importorskip(module, exc_type=ImportError), name)

    return get


def tokens(num_rows, seed):
    """Log-probs of padded rows under policy and reference, and which tokens are answers."""
    generator = torch.Generator().manual_seed(seed)
    own, reference = -2 * torch.rand(2, num_rows, T, generator=generator, dtype=torch.float64)
    ends = torch.randint(PROMPT + 1, T + 1, (num_rows, 1), generator=generator)
    at = torch.arange(T)
    mask = (at >= PROMPT) & (at < ends)
    return own.requires_grad_(), reference, mask


def model_of(log_probs):
    """What stands for a model: its log-probs of all tokens but the first."""

    def model(*, labels, **_):
        shown = (log_probs[:, 1:]).masked_fill(labels[:, 1:] == -100, 0.0)
        flat = torch.zeros_like(shown)
        more = {"entropy": flat, "mean_logits": flat, "is_top1": flat > 0}
        return SimpleNamespace(log_probs=shown, **more)

    return model


def trainer(**settings):
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x
    )
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        beta=BETA,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )


def inputs_of(mask, **more):
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}
    return whole | more


@pytest.mark.parametrize("loss_type", [f for f in F.PREFERENCE_FUNCTIONS if f not in OURS_ALONE])
def test_pairs(trl, loss_type):
    own, reference, mask = tokens(2 * P, 3)
    smoothing = SMOOTHING.get(loss_type, 0.0)
    me = trainer(
        loss_types=[loss_type],
        loss_weights=[1.0],
        label_smoothing=smoothing,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        ld_alpha=None,
    )
    compute = trl("trl.trainer.dpo_trainer", "DPOTrainer")._compute_loss
    sums = F.sequence_sum(reference, mask).chunk(2)
    known = dict(zip(("ref_chosen_logps", "ref_rejected_logps"), sums, strict=True))
    theirs = compute(me, model_of(own), inputs_of(mask.long(), **known), False)
    (due,) = torch.autograd.grad(theirs, own)
    answer = F.sequence_mean if loss_type in OF_MEANS else F.sequence_sum
    scores = answer(own, mask) - answer(reference, mask)
    options = {"beta": BETA, "loss_function": loss_type, "label_smoothing": smoothing}
    mine = F.preference_loss(*scores.chunk(2), **options).mean()
    rounding = 1e-6 if loss_type == "exo_pair" else 1e-12  # its smoothing is a float32 there
    close = {"rtol": rounding, "atol": rounding}
    torch.testing.assert_close(mine, theirs, **close)
    torch.testing.assert_close(torch.autograd.grad(mine, own)[0], due, **close)


def test_odds_ratio(trl):
    own, _, mask = tokens(2 * P, 3)
    chosen, rejected = F.sequence_mean(own, mask).float().chunk(2)
    me = SimpleNamespace(beta=BETA, accelerator=SimpleNamespace(device="cpu"))
    compute = trl("trl.experimental.orpo.orpo_trainer", "ORPOTrainer").odds_ratio_loss
    theirs = -compute(me, chosen, rejected)[0]
    mine = F.preference_loss(chosen, rejected, beta=BETA, loss_function="orpo")
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("shift", [-1.0, 1.0])  # an estimated divergence above 0, and one below
def test_single_answers(trl, loss_type, shift):
    own, reference, mask = tokens(P, 3)
    other, of_reference, shifted = tokens(P, 4)
    label = torch.tensor([True, False, False, True])
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.7}
    kto = trl("trl.trainer.kto_trainer", "KTOTrainer")
    kl = F.sequence_sum(other.detach(), shifted), F.sequence_sum(of_reference + shift, shifted)
    me = trainer(loss_type=loss_type, calculate_KL=loss_type == "kto", **weights)
    me._compute_kl_logps = lambda *_: kl[0]
    known = {"ref_logps": F.sequence_sum(reference, mask), "ref_KL_logps": kl[1]}
    given = inputs_of(mask.long(), label=label, **known)
    theirs = kto._compute_loss(me, model_of(own), given, False)
    (due,) = torch.autograd.grad(theirs, own)
    point = float((kl[0] - kl[1]).mean().clamp(min=0)) if loss_type == "kto" else 0.0
    assert (point > 0) == (shift < 0 and loss_type == "kto")
    score = F.sequence_sum(own, mask) - F.sequence_sum(reference, mask)
    mine = F.kto_loss(score, label, reference_kl=point, beta=BETA, **weights).mean()
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(mine, theirs, **close)
    torch.testing.assert_close(torch.autograd.grad(mine, own)[0], due, **close)
