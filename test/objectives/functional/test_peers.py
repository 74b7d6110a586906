"""The code of TRL and of TorchRL, run beside ours, where they are right.

TRL is no dependency: its tests are skipped where it is missing. To run them without touching the
environment::

    pip install --no-deps --target /tmp/trl "trl==1.16.*" accelerate
    PYTHONPATH=/tmp/trl pytest test/objectives/test_peers.py
"""

import warnings
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

import objectives.functional as F

B, T, L_MAX = 4, 6, 9


@pytest.fixture(scope="module")
def tokens():
    """Padded tokens of which the last row has none, without padding garbage (theirs would die)."""
    generator = torch.Generator().manual_seed(3)
    lp, old, ref, sampler = -2 * torch.rand(4, B, T, generator=generator, dtype=torch.float64)
    mask = torch.rand(B, T, generator=generator) > 0.3
    advantage = torch.tensor([1.0, -0.5, 2.0, -1.5], dtype=torch.float64)
    entropy = torch.rand(B, T, generator=generator, dtype=torch.float64)
    return SimpleNamespace(**locals())


@pytest.fixture(scope="module")
def trl_loss():
    """TRL's ``GRPOTrainer._compute_loss`` on tensors: ``f(tokens, loss_type, **settings)``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError)
    trainer = module.GRPOTrainer

    def identity(value, **_):
        return value

    def compute(x, loss_type, **settings):
        args = SimpleNamespace(
            use_bias_correction_kl=settings.pop("bias", False),
            delta=settings.pop("delta", None),
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
            steps_per_generation=1,
        )
        accelerator = SimpleNamespace(
            num_processes=1,
            reduce=lambda value, **_: value,
            gather=identity,
            gather_for_metrics=identity,
            pad_across_processes=lambda value, **_: value,
        )
        me = SimpleNamespace(
            args=args,
            accelerator=accelerator,
            model=SimpleNamespace(training=True),
            loss_type=loss_type,
            epsilon_low=0.2,
            epsilon_high=settings.pop("epsilon_high", 0.2),
            beta=settings.pop("beta", 0.0),
            importance_sampling_level=settings.pop("level", "token"),
            top_entropy_quantile=settings.pop("top_entropy", 1.0),
            off_policy_mask_threshold=settings.pop("off_policy", None),
            current_gradient_accumulation_steps=1,
            max_completion_length=L_MAX,
            use_vllm=False,
            vllm_importance_sampling_correction=False,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            _metrics={"train": defaultdict(list)},
            get_gamma_weights=trainer.get_gamma_weights,
            get_off_policy_mask=trainer.get_off_policy_mask,
        )
        assert not settings, settings
        me.get_high_entropy_mask = lambda *a: trainer.get_high_entropy_mask(me, *a)
        lp = x.lp.clone().requires_grad_()
        me._get_per_token_logps_and_entropies = lambda *_, **__: (lp, x.entropy, None)
        empty = torch.zeros(B, 0, dtype=torch.int64)
        inputs = {
            "prompt_ids": empty,
            "prompt_mask": empty,
            "completion_ids": torch.zeros(B, T, dtype=torch.int64),
            "completion_mask": x.mask.long(),
            "advantages": x.advantage,
            "old_per_token_logps": x.old,
            "ref_per_token_logps": x.ref,
            "sampling_per_token_logps": x.sampler,
            "num_items_in_batch": x.mask.sum(),
        }
        loss = trainer._compute_loss(me, None, inputs)
        return loss.detach(), torch.autograd.grad(loss, lp)[0]

    return compute


def ours(x, surrogate, aggregation, **kwargs):
    lp = x.lp.clone().requires_grad_()
    advantage = x.advantage[:, None].expand(B, T)
    term = surrogate(F.log_ratio(lp, x.old, x.mask), lp, advantage)
    values = term.loss
    if "keep" in kwargs:
        values = values * kwargs["keep"]
    if "beta" in kwargs:
        log_ratio = F.log_ratio(lp, x.old, x.mask) if kwargs.get("bias") else None
        values = values + kwargs["beta"] * F.kl_estimate(lp, x.ref, x.mask, log_ratio=log_ratio)
    max_tokens = L_MAX if aggregation == "fixed_length" else None
    loss = F.aggregate(values, x.mask, aggregation=aggregation, max_tokens=max_tokens)
    return loss.detach(), torch.autograd.grad(loss, lp)[0]


def clipped(x, level="token", **options):
    def surrogate(ratio, _, advantage):
        ratio = F.leveled_log_ratio(ratio, x.mask, level=level)
        return F.clipped_surrogate(ratio, advantage, x.mask, **options)

    return surrogate


TRL_CASES = {
    "grpo": (lambda x: (clipped(x), "sequence_mean"), {}),
    "bnpo": (lambda x: (clipped(x), "token_mean"), {}),
    "dr_grpo": (lambda x: (clipped(x), "fixed_length"), {}),
    "dapo": (lambda x: (clipped(x, clip_high=0.28), "token_mean"), {"epsilon_high": 0.28}),
    "luspo": (lambda x: (clipped(x, "sequence"), "sequence_sum"), {"level": "sequence"}),
    "cispo": (
        lambda x: (lambda r, lp, a: F.cispo(r, lp, a, x.mask), "token_mean"),
        {"epsilon_high": 5.0},
    ),
    "sapo": (lambda x: (lambda r, _, a: F.sapo(r, a, x.mask), "sequence_mean"), {}),
    "vespo": (lambda x: (lambda r, lp, a: F.vespo(r, lp, a, x.mask), "token_mean"), {}),
}


@pytest.mark.parametrize("loss_type", TRL_CASES)
def test_trl_loss_types(tokens, trl_loss, loss_type):
    make, settings = TRL_CASES[loss_type]
    torch.testing.assert_close(ours(tokens, *make(tokens)), trl_loss(tokens, loss_type, **settings))


def test_trl_gspo_and_dual_clip(tokens, trl_loss):
    mine = ours(tokens, clipped(tokens, "sequence"), "sequence_mean")
    torch.testing.assert_close(mine, trl_loss(tokens, "grpo", level="sequence"))
    mine = ours(tokens, clipped(tokens, ratio_cap=1.5), "sequence_mean")
    torch.testing.assert_close(mine, trl_loss(tokens, "grpo", delta=1.5))


@pytest.mark.parametrize("bias", [False, True], ids=["k3", "k3 times the ratio"])
def test_trl_kl(tokens, trl_loss, bias):
    mine = ours(tokens, clipped(tokens), "sequence_mean", beta=0.1, bias=bias)
    torch.testing.assert_close(mine, trl_loss(tokens, "grpo", beta=0.1, bias=bias))


def test_trl_masks(tokens, trl_loss):
    advantage = tokens.advantage[:, None].expand(B, T)
    keep = F.off_policy_sequence_mask(
        tokens.lp, tokens.sampler, advantage, tokens.mask, threshold=0.05
    )
    assert not keep[tokens.mask].all()
    mine = ours(tokens, clipped(tokens), "token_mean", keep=keep)
    torch.testing.assert_close(mine, trl_loss(tokens, "bnpo", off_policy=0.05))
    keep = F.high_entropy_mask(tokens.entropy, tokens.mask, top_fraction=0.4)
    mine = ours(tokens, clipped(tokens), "token_mean", keep=keep)
    torch.testing.assert_close(mine, trl_loss(tokens, "bnpo", top_entropy=0.4))


@pytest.fixture(scope="module")
def torchrl_llm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchrl.objectives.llm", exc_type=ImportError)


def test_torchrl_clipped_objective(tokens, torchrl_llm):
    bounds = torch.tensor(0.8).double().log(), torch.tensor(1.28).double().log()
    me = SimpleNamespace(_clip_bounds=bounds)
    log_ratio = F.log_ratio(tokens.lp, tokens.old, tokens.mask)
    advantage = tokens.advantage[:, None].expand(B, T)
    theirs, _ = torchrl_llm.GRPOLoss._compute_policy_objective(me, log_ratio, advantage)
    term = F.clipped_surrogate(log_ratio, advantage, tokens.mask, clip_high=0.28)
    # Its bounds are float32 constants.
    torch.testing.assert_close(term.loss[tokens.mask], theirs[tokens.mask], rtol=1e-6, atol=1e-6)


def test_torchrl_k3(tokens, torchrl_llm):
    theirs = torchrl_llm.k3_kl_token_estimate(tokens.ref, tokens.lp)
    kl = F.kl_estimate(tokens.lp, tokens.ref, tokens.mask)
    torch.testing.assert_close(kl[tokens.mask], theirs[tokens.mask])


def test_torchrl_cispo_has_no_gradient_where_ours_has(torchrl_llm):
    log_prob = torch.tensor([2.0], requires_grad=True)
    me = SimpleNamespace(_clip_bounds=(torch.tensor(0.8).log(), torch.tensor(1.2).log()))
    theirs, _ = torchrl_llm.CISPOLoss._compute_policy_objective(me, log_prob, torch.ones(1))
    assert torch.autograd.grad(theirs.sum(), log_prob)[0].item() == 0
    mask = torch.tensor([True])
    term = F.cispo(log_prob, log_prob, torch.ones(1), mask, max_ratio=1.2)
    assert torch.autograd.grad(term.loss.sum(), log_prob)[0].item() == pytest.approx(-1.2)


def test_torchrl_trajectory_advantage(torchrl_llm):
    from tensordict import TensorDict

    transform = torchrl_llm.MCAdvantage(4, prompt_key="group", trajectory_return="sum")
    rewards = [1.0, 2.0, 0.0, 4.0]
    for reward in rewards:
        row = TensorDict(
            {
                "group": torch.zeros(1, dtype=torch.int64),
                "next": {"reward": torch.tensor([[reward]]), "done": torch.ones(1, 1).bool()},
            },
            batch_size=[1],
        )
        out = transform.inv(row)
    mine = F.group_advantage(torch.tensor(rewards), torch.zeros(4, dtype=torch.int64))
    # It clamps the std where we add 1e-4.
    torch.testing.assert_close(out["advantage"].view(-1), mine, rtol=1e-4, atol=1e-4)
