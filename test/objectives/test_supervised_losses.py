"""``SFTLoss`` and ``DistillationLoss`` against sums written out row by row."""

import subprocess
import sys

import pytest
import torch
from tensordict import lazy_stack

from objectives import DistillationLoss, SFTLoss, Window


@pytest.fixture
def scored(make_scorer, make_batch):
    """A scorer, a batch, and per row the log-probs, references and teacher of trained tokens."""
    scorer, batch = make_scorer(), make_batch()
    rows = []
    for row in batch.unbind(0):
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        log_prob = scorer.score_packed(ids, torch.tensor([len(ids)]), mask).log_prob
        ref = row["next", "ref_log_probs", "full"][mask]
        teacher = row["next", "teacher_log_probs", "full"][mask]
        rows.append((log_prob, ref, teacher))
    return scorer, batch, rows


def k3(log_prob, ref):
    return (ref - log_prob).exp() - (ref - log_prob) - 1


REDUCTIONS = {
    "token_mean": lambda rows: torch.cat(rows).mean(),
    "sequence_mean": lambda rows: sum(r.mean() for r in rows if len(r)) / len(rows),
    "sequence_sum": lambda rows: sum(r.sum() for r in rows) / len(rows),
}


@pytest.mark.parametrize("aggregation", REDUCTIONS)
def test_sft(scored, aggregation):
    scorer, batch, rows = scored
    output = SFTLoss(scorer, aggregation=aggregation, kl_to_ref_coeff=0.3)(batch)
    reduce = REDUCTIONS[aggregation]
    torch.testing.assert_close(output.loss_sft, reduce([-lp for lp, _, _ in rows]))
    kl = [k3(lp, ref) for lp, ref, _ in rows]
    torch.testing.assert_close(output.loss_kl_to_ref, 0.3 * reduce(kl))
    torch.testing.assert_close(output.kl_to_ref, torch.cat(kl).mean().detach())
    torch.testing.assert_close(output.total(), output.loss_sft + output.loss_kl_to_ref)
    torch.testing.assert_close(output.nll, -torch.cat([lp for lp, _, _ in rows]).mean().detach())


@pytest.mark.parametrize("aggregation", ["sequence_mean", "sequence_sum"])
def test_minor_sft(scored, aggregation):
    scorer, batch, rows = scored
    output = SFTLoss(scorer, loss_function="minor_sft", aggregation=aggregation, beta=0.5)(batch)
    reduce = torch.mean if aggregation == "sequence_mean" else torch.sum
    terms = [
        -torch.nn.functional.logsigmoid(0.5 * (reduce(lp) - reduce(ref)))
        for lp, ref, _ in rows
        if len(lp)
    ]
    torch.testing.assert_close(output.loss_sft, sum(terms) / len(rows))


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("aggregation", REDUCTIONS)
def test_distillation(scored, aggregation, direction):
    scorer, batch, rows = scored
    loss = DistillationLoss(scorer, kl_direction=direction, aggregation=aggregation)
    order = (lambda a, b: (a, b)) if direction == "reverse" else (lambda a, b: (b, a))
    kl = [k3(*order(lp, teacher)) for lp, _, teacher in rows]
    output = loss(batch)
    torch.testing.assert_close(output.loss_distill, REDUCTIONS[aggregation](kl))
    torch.testing.assert_close(output.total(), output.loss_distill)
    torch.testing.assert_close(output.kl_to_teacher, torch.cat(kl).mean().detach())


@pytest.mark.parametrize(
    "make_loss",
    [
        pytest.param(lambda s: SFTLoss(s, kl_to_ref_coeff=0.1), id="sft"),
        pytest.param(lambda s: SFTLoss(s, loss_function="minor_sft"), id="minor sft"),
        pytest.param(lambda s: DistillationLoss(s, aggregation="sequence_sum"), id="distillation"),
    ],
)
def test_micro_batches_add_up_and_an_empty_batch_is_0(make_scorer, make_batch, make_row, make_loss):
    batch, scorer = make_batch(), make_scorer()
    loss = make_loss(scorer)
    whole = loss(batch)
    window = Window(whole.num_active_tokens.item(), whole.num_sequences.item())
    parts = [loss(part, window=window).total() for part in batch.split(4)]
    torch.testing.assert_close(sum(parts), whole.total())
    nothing = lazy_stack([make_row(0, turns=())])
    empty = loss(nothing, window=window)  # of a window that trains something
    empty.total().backward()
    assert empty.total().item() == 0
    with pytest.raises(ValueError, match=r"Loss: no token of the 1 rows is trained.*demonstration"):
        loss(nothing)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        pytest.param({"loss_function": "minor"}, "minor_sft", id="misspelt function"),
        pytest.param({"aggregation": "mean"}, "token_mean", id="misspelt aggregation"),
        pytest.param({"beta": 0.1}, "minor_sft", id="beta that sft would ignore"),
        pytest.param({"max_tokens": 4}, "fixed_length", id="max_tokens that would be ignored"),
        pytest.param(
            {"loss_function": "minor_sft", "aggregation": "token_mean"},
            "sequence_mean",
            id="minor sft is per answer",
        ),
        pytest.param({"temperature": 0.0}, "temperature", id="temperature 0"),
        pytest.param({"kl_to_ref_coeff": -0.1}, "kl_to_ref", id="negative coefficient"),
    ],
)
def test_bad_sft_options_raise(make_scorer, options, hint):
    with pytest.raises(ValueError, match=hint):
        SFTLoss(make_scorer(), **options)


def test_bad_distillation_options_raise(make_scorer):
    with pytest.raises(ValueError, match="forward"):
        DistillationLoss(make_scorer(), kl_direction="back")
    with pytest.raises(ValueError, match="sequence_sum"):
        DistillationLoss(make_scorer(), aggregation="mean")


_GIVES_NO_BATCH = """
from objectives import GRPOLoss, MixedLoss, SFTLoss
class Scorer:
    def score_packed(self): ...
for loss in (GRPOLoss(Scorer()), SFTLoss(Scorer()), MixedLoss({"ce": SFTLoss(Scorer())})):
    for given in ([{"messages": []}], ({}, 1)):
        for call in (loss, loss.pack):
            try:
                call(given)
            except TypeError as error:
                print(error)
"""


def test_what_is_no_batch_is_named():
    """In a process of its own: the types of arguments are checked in that of the tests."""
    done = subprocess.run([sys.executable, "-c", _GIVES_NO_BATCH], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 12, done.stderr[-2000:]
    for number, line in enumerate(lines):
        name = ("GRPOLoss", "SFTLoss", "MixedLoss")[number // 4]
        found = ("list: [{'messages': []}]", "tuple: ({}, 1)")[number // 2 % 2]
        assert line.startswith(f"{name} takes a TensorDict [B] of one row per trajectory")
        assert f"; got {found}. A list of rows becomes one with tensordict.lazy_stack" in line
