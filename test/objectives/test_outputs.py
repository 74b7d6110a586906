"""What a loss gives back: values that print, metrics of the call, one objective."""

import pytest
import torch

from objectives import DistillationLoss, GRPOLoss, GRPOLossOutput, SFTLoss
from objectives.losses.loss_output import make_output


def make_losses(make_scorer):
    return {
        "grpo": GRPOLoss(make_scorer(), kl_to_ref_coeff=0.2, entropy_bonus=True),
        "sft": SFTLoss(make_scorer(), kl_to_ref_coeff=0.2),
        "distillation": DistillationLoss(make_scorer()),
    }


@pytest.mark.parametrize("name", ["grpo", "sft", "distillation"])
def test_reducing_gives_the_objective_and_its_gradient(make_scorer, make_batch, name):
    """TorchRL's idiom: counts and metrics are no part of it, and nothing is divided."""
    loss = make_losses(make_scorer)[name]
    output = loss(make_batch())
    (want,) = torch.autograd.grad(output.total(), loss.actor_network.table, retain_graph=True)
    for reduced in (output.mean(reduce=True), output.sum(reduce=True)):
        assert reduced.item() == output.total().item()
        (got,) = torch.autograd.grad(reduced, loss.actor_network.table, retain_graph=True)
        assert torch.equal(got, want)
    assert output.mean().batch_size == torch.Size([])


def test_unaggregated_losses_are_reduced_as_asked(make_scorer, make_batch):
    each = GRPOLoss(make_scorer(), aggregation="none")(make_batch())
    mean = GRPOLoss(make_scorer())(make_batch())
    torch.testing.assert_close(each.mean(reduce=True), mean.total())
    torch.testing.assert_close(each.sum(reduce=True), 24 * mean.total())


def test_an_output_prints_its_values(make_scorer, make_batch):
    shown = repr(GRPOLoss(make_scorer())(make_batch(advantages=[0.0] * 6)))
    assert shown.startswith("GRPOLossOutput(")
    assert "loss_objective=0," in shown.replace("-0,", "0,")
    assert "num_active_tokens=24" in shown
    assert "entropy" not in shown, "what was not asked for is left out"
    each = GRPOLoss(make_scorer(), aggregation="none")(make_batch())
    assert "loss_objective=[24 values]" in repr(each)


@pytest.mark.parametrize("name", ["grpo", "sft", "distillation"])
def test_figures_are_of_the_call_and_combine_weighs_them(make_scorer, make_batch, name):
    """A part of the window has the metrics that it would have by itself."""
    loss, batch = make_losses(make_scorer)[name], make_batch()
    whole = loss(batch)
    window = loss.measure_window(batch)
    parts = batch.split([1, 5])
    outputs = [loss(part, window=window) for part in parts]
    for output, part in zip(outputs, parts, strict=True):
        for key, alone in loss(part).items():
            if alone is not None and not key.startswith("loss_"):
                torch.testing.assert_close(output.get(key), alone, msg=key)
    together = type(whole).combine(outputs)
    for key, value in whole.items():
        if value is not None:
            torch.testing.assert_close(together.get(key), value.detach(), check_dtype=False)


def test_the_weight_of_a_figure_is_its_tokens_by_hand():
    def output(tokens, ratio, ess):
        metrics = dict.fromkeys(
            ("clip_fraction", "clip_fraction_low", "clip_fraction_high", "kl_approx"), 0.0
        ) | {"kept_fraction": 1.0, "signal_fraction": 1.0, "loss_objective": 0.5}
        metrics |= {"num_active_tokens": tokens, "num_sequences": 1, "num_rows_left_out": 1}
        metrics |= {"ratio_mean": ratio, "ESS": ess}
        return make_output(
            GRPOLossOutput, {name: torch.tensor(float(x)) for name, x in metrics.items()}
        )

    # Ratios 1, 3 (mean 2, ESS 16 / 20) and 4.
    both = GRPOLossOutput.combine([output(2, 2, 0.8), output(1, 4, 1)])
    assert both.ratio_mean.item() == pytest.approx(8 / 3)
    assert both.ESS.item() == pytest.approx(8**2 / (3 * 26))
    assert (both.loss_objective, both.num_active_tokens, both.num_rows_left_out) == (1, 3, 2)
    with pytest.raises(ValueError, match="at least one"):
        GRPOLossOutput.combine([])


def test_signal_is_where_the_advantage_is_not_0(make_scorer, make_batch):
    batch = make_batch(advantages=(0.0, -0.5, 0.0, 0.0, 1.0, 0.0))
    loss = GRPOLoss(make_scorer())
    # Row 1 trains 4 of the 24 tokens; row 4 trains none.
    assert loss(batch).signal_fraction.item() == pytest.approx(4 / 24)
    assert loss.has_signal(loss.pack(batch))
    flat = loss.pack(make_batch(advantages=(0.0,) * 4 + (1.0, 0.0)))
    assert not loss.has_signal(flat)
    assert GRPOLoss(make_scorer(), entropy_bonus=True).has_signal(flat)
    none = flat.take_rows(torch.tensor([4]))
    assert not GRPOLoss(make_scorer(), entropy_bonus=True).has_signal(none)
