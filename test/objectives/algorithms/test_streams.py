"""Several losses on the tokens of one batch: a mixed batch is the sum of separate ones."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import lazy_stack

import objectives.functional as F
from objectives import (
    DAPO,
    DistillationLoss,
    DistillationLossKeys,
    GRPOLoss,
    MixedLoss,
    MixedLossOutput,
    NonFiniteGate,
    SFTLoss,
    TokenFilters,
    write_streams,
)
from torchrl_data.missing_entry import MissingEntryError

REF = DistillationLossKeys(teacher_log_probs=("next", "ref_log_probs", "full"))
NEEDED = {
    "rl": ("log_probs", "advantage", "truncated"),
    "ce": (),
    "ref_kl": (),
}


def make_losses(scorer, *, aggregation="token_mean", rl=None):
    how = {"aggregation": aggregation} | (
        {"max_tokens": 7} if aggregation == "fixed_length" else {}
    )
    return {
        "rl": GRPOLoss(scorer, **how, **(rl or {})),
        "ce": SFTLoss(scorer, **how),
        "ref_kl": DistillationLoss(scorer, read=REF, **how),
    }


class Weighed:
    """A loss on one stream alone, from the definition: row by row, through the functions."""

    def __init__(self, scorer, aggregation):
        self.scorer, self.aggregation = scorer, aggregation

    def __call__(self, name, rows):
        """Sum over the stream's tokens of w f, by the counts of that stream alone."""
        values, lengths = [], []
        for row in rows:
            weight = row.get(("streams", name), None)
            if weight is None or not bool(weight.any()):
                continue
            mask = weight != 0
            ids = row["tokens", "full"]
            log_prob = self.scorer.score_packed(ids, torch.tensor([len(ids)]), mask).log_prob
            values.append(weight[mask].double() * self.term(name, log_prob, row, mask))
            lengths.append(int(mask.sum()))
        if not values:
            return torch.zeros(())
        max_tokens = 7 if self.aggregation == "fixed_length" else None
        return F.aggregate(
            torch.cat(values),
            lengths=torch.tensor(lengths),
            aggregation=self.aggregation,
            max_tokens=max_tokens,
        )

    def term(self, name, log_prob, row, mask):
        if name == "ce":
            return -log_prob
        if name == "ref_kl":
            return F.kl_estimate(log_prob, row["next", "ref_log_probs", "full"][mask])
        ratio = F.log_ratio(log_prob, row["log_probs", "full"][mask])
        return F.clipped_surrogate(ratio, row["advantage"].view(-1).expand_as(ratio)).loss


names = st.lists(st.sampled_from(sorted(NEEDED)), unique=True, max_size=3)
token_weight = st.sampled_from([0.0, 0.5, 1.0, -2.0])


@st.composite
def mixes(draw, batch):
    """Rows in which any tokens take part in any streams; what no stream of a row needs is gone."""
    rows = []
    for row in batch.unbind(0):
        row = row.clone()
        chosen = draw(names)
        for name in chosen:
            mask = row["masks", "all_assistant_mask"] & (
                torch.arange(len(row["tokens", "full"])) > 0
            )
            if name == "ce":
                mask = torch.arange(len(mask)) > 0
            weights = torch.tensor([draw(token_weight) for _ in range(len(mask))])
            row["streams", name] = weights * mask
        for name, entries in NEEDED.items():
            if name not in chosen:
                row = row.exclude(*entries)
        rows.append(row)
    return rows


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    data=st.data(),
    aggregation=st.sampled_from(["token_mean", "sequence_mean", "fixed_length", "sequence_sum"]),
    num_rows=st.integers(1, 6),
)
def test_the_gradient_of_a_mixed_batch_is_the_sum_of_the_separate_ones(
    make_scorer, make_batch, data, aggregation, num_rows
):
    """To 1e-6, whole and in micro-batches, and each stream alone from its definition."""
    rows = data.draw(mixes(make_batch()))
    apart, whole, parts = (make_scorer() for _ in range(3))
    reference = Weighed(apart, aggregation)
    want = {name: reference(name, rows) for name in NEEDED}
    total = sum(want.values())
    if total.requires_grad:
        total.backward()
    mixed = MixedLoss(make_losses(whole, aggregation=aggregation))
    output = mixed(lazy_stack(rows))
    output.total().backward()
    for name, value in want.items():
        got = output.streams[name].total()
        torch.testing.assert_close(got, value, rtol=1e-6, atol=1e-6, check_dtype=False)
    expected = gradient(apart)
    torch.testing.assert_close(gradient(whole), expected, rtol=1e-6, atol=1e-6)

    split = MixedLoss(make_losses(parts, aggregation=aggregation))
    packed = split.pack(lazy_stack(rows))
    window = split.measure_window(packed.micro_batches(num_rows=2))
    outputs = [split(part, window=window) for part in packed.micro_batches(num_rows=num_rows)]
    for each in outputs:
        each.total().backward()
    torch.testing.assert_close(gradient(parts), expected, rtol=1e-6, atol=1e-6)
    together = MixedLossOutput.combine(outputs)
    torch.testing.assert_close(together.total(), output.total().detach())
    counts = {name: float(o.num_active_tokens) for name, o in together.streams.items()}
    assert counts == {name: float((weights(rows, name) != 0).sum()) for name in NEEDED}


def gradient(scorer):
    return torch.zeros_like(scorer.table) if scorer.table.grad is None else scorer.table.grad


def weights(rows, name):
    found = [row["streams", name] for row in rows if row.get(("streams", name), None) is not None]
    return torch.cat([torch.zeros(0), *found])


def test_echo_trains_what_the_environment_answered(make_scorer, make_batch):
    """DAPO's loss of the sampled tokens as without it, and 0.05 times the mean -log pi of what came
    between and after them, by the number of those."""
    batch, scorer = make_batch(), make_scorer()
    write_streams(batch, rl="assistant", ce=("observation", 0.05))
    loss = MixedLoss({"rl": DAPO(scorer), "ce": SFTLoss(scorer)})
    output = loss(batch)
    torch.testing.assert_close(output.streams["rl"].total(), DAPO(scorer)(batch).total())
    nll = []
    for row in batch.unbind(0):
        mask, ids = row["masks", "all_assistant_mask"].tolist(), row["tokens", "full"]
        answered = [not m and any(mask[:i]) for i, m in enumerate(mask)]
        scores = scorer.score_packed(ids, torch.tensor([len(ids)]), torch.tensor(answered))
        nll += (-scores.log_prob).tolist()
    assert len(nll) == 2 + 1 + 3 + 1 + 2
    got = output.streams["ce"].total().item()
    # The weights are float32.
    assert got == pytest.approx(0.05 * sum(nll) / len(nll), rel=1e-6)
    assert scorer.scored_rows[0] == 5, "one pass scores all streams; row 4 has nothing to train"


def test_a_row_that_no_policy_can_have_sampled_is_left_out_of_its_stream_alone(
    make_scorer, make_batch, caplog
):
    rows = list(make_batch().unbind(0))
    sampled = rows[1]["masks", "all_assistant_mask"].nonzero()[0]
    rows[1]["log_probs", "full"][sampled] = math.nan
    write_streams(rows, rl="assistant", ce="all")
    scorers = make_scorer(), make_scorer()
    options = {"aggregation": "sequence_sum"}
    loss = MixedLoss({"rl": GRPOLoss(scorers[0], **options), "ce": SFTLoss(scorers[0])})
    output = loss(lazy_stack(rows))
    assert "1 of 5 rows" in caplog.text
    assert output.streams["rl"].num_rows_left_out.item() == 1
    assert output.streams["ce"].num_sequences.item() == 6
    # As alone: the row counts as a row of the stream (row 4, which samples nothing, does not).
    alone = GRPOLoss(scorers[1], **options)(lazy_stack([r for i, r in enumerate(rows) if i != 4]))
    torch.testing.assert_close(output.streams["rl"].total(), alone.total())
    assert output.streams["rl"].num_sequences == alone.num_sequences == 5


def test_entropy_filters_and_bonuses_are_those_of_their_stream(make_scorer, make_batch):
    batch, scorers = make_batch(), (make_scorer(), make_scorer())
    write_streams(batch, rl=("assistant", 0.5), ce="observation")
    rl = {"entropy_bonus": True, "filters": TokenFilters(top_entropy_fraction=0.5)}
    mixed = MixedLoss({"rl": GRPOLoss(scorers[0], **rl), "ce": SFTLoss(scorers[0])})
    packed = mixed.pack(batch)
    window = mixed.measure_window(packed)
    output = mixed(packed, window=window)
    alone = GRPOLoss(scorers[1], **rl)
    assert window["rl"].entropy_threshold == alone.measure_window(batch).entropy_threshold
    want = alone(batch, window=alone.measure_window(batch))
    for term in ("loss_objective", "loss_entropy"):
        got = getattr(output.streams["rl"], term)
        torch.testing.assert_close(got, 0.5 * getattr(want, term))
    assert output.streams["rl"].entropy == want.entropy
    assert dict(output.items()).keys() >= {"rl.loss_entropy", "ce.nll", "ce.num_active_tokens"}


def test_a_batch_with_one_stream_of_two_has_loss_0_in_the_other(make_scorer, make_batch):
    rows = [row.exclude("advantage", "log_probs") for row in make_batch().unbind(0)]
    write_streams(rows, ce="assistant")
    scorer = make_scorer()
    loss = MixedLoss({"rl": GRPOLoss(scorer), "ce": SFTLoss(scorer)})
    packed = loss.pack(lazy_stack(rows))
    assert loss.has_signal(packed)
    gate = NonFiniteGate(torch.optim.SGD(scorer.parameters(), lr=0.1))
    output = loss(packed, window=loss.measure_window(packed))
    assert output.streams["rl"].total() == 0
    torch.testing.assert_close(output.total(), SFTLoss(make_scorer())(lazy_stack(rows)).total())
    gate.backward(output, packed)
    assert not gate.step().skipped
    nothing = loss.pack(lazy_stack([row.exclude("streams") for row in rows]))
    assert not loss.has_signal(nothing)
    assert loss(nothing).total() == 0


def test_padding_takes_part_in_no_stream(make_scorer, make_batch):
    """Dense rows, padded on the right with weights of 1, give what the ragged ones give."""
    batch = make_batch()
    write_streams(batch, rl="assistant", ce="observation")
    keys = ["streams", "tokens", "masks", "log_probs", "advantage"]
    width = max(len(row["tokens", "full"]) for row in batch.unbind(0)) + 2
    padded = []
    for row in batch.unbind(0):
        gap = width - len(row["tokens", "full"])
        row = row.select(*keys).clone()
        for key in row.keys(include_nested=True, leaves_only=True):
            if key != "advantage":
                row[key] = torch.cat([row[key], row[key].new_ones(gap)])
        row["masks", "all_attention_mask"][width - gap :] = False
        padded.append(row)
    scorer = make_scorer()
    loss = MixedLoss({"rl": GRPOLoss(scorer), "ce": SFTLoss(scorer)})
    torch.testing.assert_close(loss(torch.stack(padded)).total(), loss(batch).total())


def test_a_missing_entry_names_row_and_stream(make_scorer, make_batch):
    rows = list(make_batch().unbind(0))
    write_streams(rows, rl="assistant")
    rows[2] = rows[2].exclude("advantage")
    loss = MixedLoss({"rl": GRPOLoss(make_scorer())})
    with pytest.raises(MissingEntryError, match=r"row 2 takes part in .*'rl'.*'advantage'.*lacks"):
        loss(lazy_stack(rows))
    rows[2]["streams", "rl"] = torch.zeros(len(rows[2]["tokens", "full"]))
    assert loss(lazy_stack(rows)).streams["rl"].num_sequences.item() == 4
    rows[2]["streams", "rl"] = torch.full((len(rows[2]["tokens", "full"]),), math.inf)
    rows[2]["advantage"] = torch.ones(1, 1)
    with pytest.raises(ValueError, match="'rl' are NaN or infinite"):
        loss(lazy_stack(rows))
    rows[2]["streams", "rl"] = torch.ones(3)
    with pytest.raises(ValueError, match="aligned"):
        loss(lazy_stack(rows))
    with pytest.raises(MissingEntryError, match="all_assistant_mask"):
        write_streams(rows[0].exclude("masks"), rl="all")


def test_a_window_without_a_stream_is_refused(make_scorer, make_batch):
    batch, scorer = make_batch(), make_scorer()
    write_streams(batch, rl="assistant", ce="all")
    loss = MixedLoss({"rl": GRPOLoss(scorer), "ce": SFTLoss(scorer)})
    window = loss.measure_window(batch)
    del window["ce"]
    with pytest.raises(ValueError, match=r"counts of \['rl'\].*measure_window"):
        loss(batch, window=window)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda *_: {}, "at least one"),
        (lambda a, _: {"rl": a}, "takes TokenLoss"),
        (lambda a, b: {"rl": GRPOLoss(a), "ce": SFTLoss(b)}, "differ in actor_network"),
        (lambda a, _: {"rl": GRPOLoss(a), "ce": SFTLoss(a, temperature=0.7)}, "in temperature"),
        (lambda a, _: {"ce": SFTLoss(a, masking_strategy="all")}, "masking_strategy='all' has no"),
        (lambda a, _: {"ce": SFTLoss(a, loss_function="minor_sft")}, "minor SFT"),
        (lambda a, _: {"rl": GRPOLoss(a, skip_rows_without_signal=True)}, "skip_rows"),
        (lambda a, _: {"rl": GRPOLoss(a, aggregation="none")}, "aggregation='none'"),
    ],
)
def test_streams_that_can_not_be_mixed_raise(make_scorer, make, hint):
    with pytest.raises((ValueError, TypeError), match=hint):
        MixedLoss(make(make_scorer(), make_scorer()))


@pytest.mark.parametrize(
    ("given", "hint"),
    [("prompt", "one of"), (("all", 0.0), "is 0"), (("all", math.nan), "finite")],
)
def test_bad_weights_raise(make_batch, given, hint):
    with pytest.raises(ValueError, match=hint):
        write_streams(make_batch(), rl=given)


def test_combine_needs_outputs():
    with pytest.raises(ValueError, match="at least one"):
        MixedLossOutput.combine([])
