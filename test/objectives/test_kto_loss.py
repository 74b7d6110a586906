"""``KTOLoss`` against sums written out answer by answer, and how it splits."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from threading import Barrier

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import lazy_stack

from objectives import KTOLoss, KTOLossOutput, MixedLoss, Ranks, Window
from objectives import functional as F
from torchrl_data import keys, kto_rows
from torchrl_modules import TransformersWrapper

TURNS = (((5, 0),), ((1, 2), (3, 1)), ((2, 0),), ((4, 3), (1, 1)), ((6, 2),), ((1, 0),), ((2, 2),))
LABELS = (True, False, False, True, False, True, False)
MISMATCHED = (False, True, False, True, False, False, True)
OPTIONS = {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.7}


def rows_of(make_row, shift=-2.0):
    """Four answers and three mismatched ones, of unequal lengths, some in several turns."""
    rows = []
    for number, turns in enumerate(TURNS):
        row = make_row(number, turns=turns)
        row[keys.LABEL] = torch.tensor([LABELS[number]])
        row[keys.MISMATCHED] = torch.tensor([MISMATCHED[number]])
        row[keys.REF_LOG_PROBS_FULL] = row[keys.REF_LOG_PROBS_FULL] + shift
        rows.append(row)
    return rows


@pytest.fixture
def batch(make_row):
    return lazy_stack(rows_of(make_row))


def log_ratios(scorer, rows):
    """Of each row the log-prob of its answer, and that less the reference's."""
    for row in rows:
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        own = scorer.score_packed(ids, torch.tensor([len(ids)]), mask).log_prob
        yield own.sum(), own.sum() - row["next", "ref_log_probs", "full"][mask].sum()


def estimate(scorer, batch):
    mismatched = [row for row, is_one in zip(batch.unbind(0), MISMATCHED, strict=True) if is_one]
    scores = torch.stack([score for _, score in log_ratios(scorer, mismatched)])
    return float(scores.mean().detach())


@pytest.mark.parametrize("shift", [-2.0, 2.0])  # an estimate above 0, and one below
def test_the_loss_is_that_of_each_answer(make_scorer, make_row, shift):
    scorer, batch = make_scorer(), lazy_stack(rows_of(make_row, shift))
    found = estimate(scorer, batch)
    assert (found > 0) == (shift < 0)
    point = max(found, 0.0)
    answers = [row for row, other in zip(batch.unbind(0), MISMATCHED, strict=True) if not other]
    said, score = map(torch.stack, zip(*log_ratios(scorer, answers), strict=True))
    label = torch.tensor([True, False, False, True])
    output = KTOLoss(scorer, **OPTIONS)(batch)
    expected = F.kto_loss(score, label, reference_kl=point, **OPTIONS)
    torch.testing.assert_close(output.total(), expected.mean())
    (due,) = torch.autograd.grad(expected.mean(), scorer.table, retain_graph=True)
    output.total().backward()
    torch.testing.assert_close(scorer.table.grad, due)
    assert output.reference_kl.item() == pytest.approx(point)
    score, said = score.detach(), said.detach()
    torch.testing.assert_close(output.chosen_reward, 0.5 * score[label].mean())
    torch.testing.assert_close(output.rejected_reward, 0.5 * score[~label].mean())
    torch.testing.assert_close(output.chosen_log_prob, said[label].mean())
    torch.testing.assert_close(output.rejected_log_prob, said[~label].mean())
    right = (score > point) == label
    assert output.accuracy.item() == pytest.approx(right.double().mean().item())
    counts = (output.num_sequences, output.num_desirable, output.num_undesirable)
    assert counts == (4, 2, 2)
    assert output.num_active_tokens == 5 + 2 + 6 + 1


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    order=st.permutations(range(len(TURNS))),
    cuts=st.sets(st.integers(1, len(TURNS) - 1)),
    num_ranks=st.integers(1, 3),
)
def test_the_gradient_does_not_depend_on_how_rows_are_split(
    make_scorer, make_row, order, cuts, num_ranks
):
    scorer, rows = make_scorer(), rows_of(make_row)
    loss = KTOLoss(scorer, **OPTIONS, allow_empty=True)
    whole = loss(lazy_stack(rows))
    whole.total().backward()
    due, scorer.table.grad = scorer.table.grad.clone(), None
    packed = loss.pack(lazy_stack([rows[place] for place in order]))
    edges = [0, *sorted(cuts), len(rows)]
    parts = [packed.run(*edge) for edge in pairwise(edges)]
    shares = [parts[rank::num_ranks] for rank in range(num_ranks)]
    outputs = []
    for share, window in zip(shares, windows_of(loss, shares), strict=True):
        for part in share:
            outputs.append(loss(part, window=window))
            (outputs[-1].total() / num_ranks).backward()  # the mean over the ranks is taken
    torch.testing.assert_close(scorer.table.grad, due)
    combined = KTOLossOutput.combine(outputs)
    for name, value in whole.items():
        told = combined.get(name) / (num_ranks if name.startswith("loss_") else 1)
        torch.testing.assert_close(told, value.detach())


class Thread(Ranks):
    """A rank that is a thread of this process."""

    def __init__(self, size, total):
        super().__init__(0, 1)
        self.size, self.sum = size, total


def windows_of(loss, shares):
    """What each of some ranks, which are threads here, measures of its share."""
    said, barrier = [[]] * len(shares), Barrier(len(shares))

    def total(rank, values):
        said[rank] = values
        barrier.wait()
        found = [sum(each) for each in zip(*said, strict=True)]
        barrier.wait()
        return found

    def measured(rank):
        ranks = Thread(len(shares), partial(total, rank))
        return loss.measure_window(shares[rank], ranks=ranks)

    with ThreadPoolExecutor(len(shares)) as pool:
        return list(pool.map(measured, range(len(shares))))


def test_nothing_is_scored_twice(make_scorer, batch):
    scorer = make_scorer()
    loss = KTOLoss(scorer)
    packed = loss.pack(batch)
    window = loss.measure_window(packed)
    assert scorer.scored_rows == [3]  # the mismatched rows, and no others
    for part in packed.micro_batches(num_rows=3):
        loss(part, window=window)
    assert sum(scorer.scored_rows) == len(TURNS)


def test_a_reference_reads_the_prompt_of_both_rows_once(chatml_tokenizer, make_tiny_model):
    policy = TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer)
    given = [("say " * 30, "b" * 20, True), ("no " * 30, "c" * 10, False)]
    data = [{"prompt": p, "completion": c, "label": label} for p, c, label in given]
    rows = kto_rows(policy.encoder, data)
    read = []
    layer = policy.model.get_submodule("model.layers.0")
    layer.register_forward_hook(lambda _, given, __: read.append(given[0].shape[:2].numel()))
    ids = torch.cat([row["tokens", "full"] for row in rows])
    mask = torch.cat([row["masks", "all_assistant_mask"] for row in rows])
    lengths = torch.tensor([len(row["tokens", "full"]) for row in rows])
    policy.score_packed(ids, lengths, mask)
    trained = [row["masks", "all_assistant_mask"].nonzero().flatten().tolist() for row in rows]
    prompts = [own[0] for own in trained[::2]]
    assert min(prompts) > 40
    # Of each row what comes before its last trained token; a common beginning of all is read once.
    apart = sum(own[-1] for own in trained) - sum(prompts)
    assert sum(read) <= apart
    assert sum(read) >= apart - min(prompts)


def test_without_mismatched_rows(make_scorer, batch):
    scorer, answers = make_scorer(), batch[~torch.tensor(MISMATCHED)]
    loss = KTOLoss(scorer, loss_function="apo_zero_unpaired")
    of_all, of_answers = loss(batch), loss(answers)
    assert of_all.reference_kl == 0
    torch.testing.assert_close(of_all.total(), of_answers.total())
    with pytest.raises(ValueError, match=r"none of the rows of the window is mismatched"):
        KTOLoss(scorer)(answers)
    one = loss(answers[:1])
    assert one.rejected_reward is None
    assert one.num_undesirable == 0


def test_refused(make_scorer, batch):
    loss = KTOLoss(make_scorer())
    with pytest.raises(ValueError, match="the window needs a reference_kl"):
        loss(batch, window=Window(14, 4))
    with pytest.raises(ValueError, match=r"loss_function must be .*'kto'.*, got 'bco'"):
        loss.loss_function = "bco"
    with pytest.raises(ValueError, match=r"desirable_weight must be positive, got -1\.0"):
        KTOLoss(make_scorer(), desirable_weight=-1.0)
    with pytest.raises(ValueError, match=r"MixedLoss: stream 'ce': labels go by whole answers"):
        MixedLoss({"ce": loss})
    rows = list(batch.unbind(0))
    rows[2]["masks", "all_assistant_mask"] = torch.zeros(len(rows[2]["tokens", "full"])).bool()
    with pytest.raises(ValueError, match="row 2 has no trained token"):
        loss(lazy_stack(rows))
    told = [Window(3, 1, None, None, x) for x in (0.5, 0.5, 0.7)]
    assert Window.of(told[:2]).reference_kl == 0.5
    assert Window.of(told).reference_kl is None
