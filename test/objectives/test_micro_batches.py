"""A batch that is packed once: its parts hold every row once, and train like the whole."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from objectives import (
    DistillationLoss,
    GRPOLoss,
    GRPOLossOutput,
    PackedBatch,
    SamplerCorrection,
    SFTLoss,
    TokenFilters,
)
from objectives.batching.loss_keys import GRPOLossKeys
from objectives.batching.packed_batch import Entries, pack_batch
from objectives.losses.surrogates import SURROGATES, surrogate_inputs


def make_packed(lengths, target_lengths):
    """Rows whose values tell where they come from: id = 100 row + position."""
    ids, mask, entry = [], [], []
    for row, (length, targets) in enumerate(zip(lengths, target_lengths, strict=True)):
        ids += [100 * row + i for i in range(length)]
        mask += [i >= length - targets for i in range(length)]
        entry += [100 * row + i for i in range(length - targets, length)]
    return PackedBatch(
        ids=torch.tensor(ids, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        target_mask=torch.tensor(mask, dtype=torch.bool),
        target_lengths=torch.tensor(target_lengths, dtype=torch.int64),
        sampled=torch.ones(len(entry), dtype=torch.bool),
        entries={"advantage": torch.tensor(entry, dtype=torch.float32)},
        left_out=torch.zeros(len(lengths), dtype=torch.bool),
    )


def rows_of(packed):
    """Each row as (ids, mask, advantages)."""
    ids = packed.ids.split(packed.lengths.tolist())
    masks = packed.target_mask.split(packed.lengths.tolist())
    values = packed.entries["advantage"].split(packed.target_lengths.tolist())
    return [
        (i.tolist(), m.tolist(), v.tolist()) for i, m, v in zip(ids, masks, values, strict=True)
    ]


row_sizes = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6)), min_size=1, max_size=8)


@settings(deadline=None, derandomize=True)
@given(sizes=row_sizes, limit=st.integers(1, 12))
def test_parts_hold_every_row_once_and_keep_to_the_limit(sizes, limit):
    lengths = [length for length, _ in sizes]
    packed = make_packed(lengths, [min(targets, length) for length, targets in sizes])
    parts = list(packed.micro_batches(max_tokens=limit))
    assert [row for part in parts for row in rows_of(part)] == rows_of(packed)
    assert all(len(part.ids) <= limit or part.num_rows == 1 for part in parts)
    # As few parts as a run in order allows: no two neighbours would fit together.
    pairs = itertools.pairwise(parts)
    assert all(len(left.ids) + int(right.lengths[0]) > limit for left, right in pairs)
    by_rows = list(packed.micro_batches(num_rows=limit))
    assert [row for part in by_rows for row in rows_of(part)] == rows_of(packed)
    assert [part.num_rows for part in by_rows[:-1]] == [limit] * (len(by_rows) - 1)


def packed_rows(rows):
    """Of which all but the first token are trained."""
    lengths = torch.tensor([len(row) for row in rows])
    packed = make_packed(lengths.tolist(), (lengths - 1).tolist())
    return replace(packed, ids=torch.tensor([token for row in rows for token in row]))


def test_tokens_that_rows_share_are_counted_once():
    prompt, other = [1, 2, 3, 4], [1, 2, 8, 9]
    rows = [
        [*prompt, 5, 6],  # 6 new tokens
        [*prompt, 7],  # 1
        [*prompt, 5, 6, 3],  # an earlier turn and one token: 1
        [*other, 5],  # 3 beside those above, which share 2 tokens with it
        [*other, 6],  # 1
    ]
    packed = packed_rows(rows)

    def counts(most, **options):
        return [part.num_rows for part in packed.micro_batches(max_tokens=most, **options)]

    assert counts(12) == [2, 2, 1]  # 11, 12 and 5 tokens
    assert counts(12, count_shared_once=True) == [5]  # 6 + 1 + 1 + 3 + 1
    assert counts(11, count_shared_once=True) == [4, 1]
    # In a part of its own the fourth row has all of its 5 tokens.
    assert counts(8, count_shared_once=True) == [3, 2]
    assert counts(6, count_shared_once=True) == [1, 1, 1, 2]  # 6; 5, and 3 are too many; 7; 5 + 1
    assert counts(1, count_shared_once=True) == [1] * 5
    with pytest.raises(ValueError, match="count_shared_once=True goes with max_tokens"):
        list(packed.micro_batches(num_rows=1, count_shared_once=True))


few_tokens = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


@settings(deadline=None, derandomize=True)
@given(rows=few_tokens, limit=st.integers(1, 14))
def test_a_part_has_as_many_unique_tokens_as_its_trie(rows, limit):
    def num_unique(some):  # each beginning of a row is a token of the trie
        return len({tuple(row[:n]) for row in some for n in range(1, len(row) + 1)})

    parts = packed_rows(rows).micro_batches(max_tokens=limit, count_shared_once=True)
    found = [part.ids.split(part.lengths.tolist()) for part in parts]
    shares = [[row.tolist() for row in part] for part in found]
    assert [row for part in shares for row in part] == rows
    assert all(num_unique(part) <= limit or len(part) == 1 for part in shares)
    pairs = itertools.pairwise(shares)
    assert all(num_unique([*left, right[0]]) > limit for left, right in pairs)


@settings(deadline=None, derandomize=True)
@given(sizes=row_sizes, data=st.data())
def test_rows_are_taken_in_any_order(sizes, data):
    lengths = [length for length, _ in sizes]
    packed = make_packed(lengths, [min(targets, length) for length, targets in sizes])
    rows = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=6))
    got = rows_of(packed.take_rows(torch.tensor(rows, dtype=torch.int64)))
    assert got == [rows_of(packed)[row] for row in rows]
    keep = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    )
    got = rows_of(packed.take_rows(keep))
    assert got == [row for row, kept in zip(rows_of(packed), keep.tolist(), strict=True) if kept]


@pytest.mark.parametrize(
    "limits", [{}, {"max_tokens": 4, "num_rows": 1}, {"max_tokens": 0}], ids=["none", "both", "0"]
)
def test_a_limit_that_is_none_raises(limits):
    with pytest.raises(ValueError, match="max_tokens or num_rows"):
        next(make_packed([2], [1]).micro_batches(**limits))


def with_teacher(batch):
    for row in batch.unbind(0):
        row["next", "teacher_log_probs", "full"] = row["next", "ref_log_probs", "full"]
    return batch


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (GRPOLoss, {"kl_to_ref_coeff": 0.1}),
        (SFTLoss, {"kl_to_ref_coeff": 0.1}),
        (DistillationLoss, {"aggregation": "fixed_length", "max_tokens": 9}),
    ],
    ids=["grpo", "sft", "distillation"],
)
def test_packed_once_and_trained_in_parts_is_the_gradient_of_the_whole(
    make_scorer, make_batch, loss, options
):
    batch = with_teacher(make_batch())
    whole, parts = make_scorer(), make_scorer()
    loss(whole, **options)(batch).total().backward()
    module = loss(parts, **options)
    packed = module.pack(batch)
    assert module.pack(packed) is packed
    window = module.measure_window(packed)
    assert window == module.measure_window(batch) == module.measure_window(batch.split(2))
    shuffled = packed.take_rows(torch.randperm(packed.num_rows))
    for part in shuffled.micro_batches(num_rows=2):
        module(part, window=window).total().backward()
    assert whole.table.grad.abs().max() > 0
    torch.testing.assert_close(parts.table.grad, whole.table.grad)


@st.composite
def grpo_options(draw):
    """Any options of the loss that go together."""

    def maybe(values):
        return draw(st.none() | values)

    surrogate = draw(st.sampled_from(list(SURROGATES)))
    aggregation = draw(
        st.sampled_from(["token_mean", "sequence_mean", "fixed_length", "sequence_sum"])
    )
    filters = TokenFilters(
        trust_region=maybe(st.sampled_from([0.05, 0.5])),
        top_entropy_fraction=maybe(st.sampled_from([0.2, 0.5, 0.8, 1.0])),
        off_policy_threshold=maybe(st.sampled_from([0.1, 0.5])),
        drop_truncated=draw(st.booleans()),
    )
    options = {
        "surrogate": surrogate,
        "aggregation": aggregation,
        "filters": filters,
        "masking_strategy": draw(st.sampled_from(["assistant", "response", "all"])),
        "old_policy": draw(st.sampled_from(["sampler", "recomputed", "current"])),
        "entropy_bonus": draw(st.booleans()),
        "temperature": draw(st.sampled_from([0.7, 1.0])),
    }
    if aggregation == "fixed_length":
        options["max_tokens"] = 7
    own_ratio = {"lengths", "behavior_log_prob"} & surrogate_inputs(SURROGATES[surrogate].function)
    if not own_ratio:
        options["ratio_level"] = draw(st.sampled_from(["token", "sequence", "sequence_token"]))
    if options["old_policy"] != "sampler":
        level, mode = st.sampled_from(["token", "sequence"]), st.sampled_from(["truncate", "mask"])
        options["sampler_correction"] = maybe(
            st.builds(
                SamplerCorrection,
                level=level,
                mode=mode,
                upper=st.just(1.3),
                max_k3=st.sampled_from([None, 0.1]),
                normalize=st.booleans(),
            )
            | st.builds(SamplerCorrection, level=st.just("k3"), max_k3=st.just(0.1))
        )
    # "response" and "all" train tokens that the fixture has no reference for.
    if options["masking_strategy"] == "assistant" and draw(st.booleans()):
        options |= {"kl_to_ref_coeff": 0.1, "kl_bias_correction": draw(st.booleans())}
    if draw(st.booleans()):
        options["kl_to_inference_coeff"] = 0.05
    if options["masking_strategy"] == "assistant":
        options["teacher_coeff"] = maybe(st.just(0.3))
        options["advantage_coeff"] = 0.5 if options["teacher_coeff"] is None else 0.0
    if {"kl_to_ref_coeff", "kl_to_inference_coeff"} & options.keys():
        options["kl_estimator"] = draw(st.sampled_from(["k1", "k2", "k3"]))
    elif not (options["entropy_bonus"] or options.get("teacher_coeff")) and (
        filters.top_entropy_fraction is None
    ):
        options["skip_rows_without_signal"] = draw(st.booleans())
    return options


@settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(options=grpo_options(), data=st.data())
def test_no_option_of_the_loss_depends_on_the_split(make_scorer, make_batch, options, data):
    """Loss, metrics and gradient of any partition of the rows, in any order, are the whole's."""
    batch = make_batch()
    for row in batch.unbind(0):
        row["old_log_probs", "full"] = row["old_log_probs", "full"].nan_to_num(posinf=-1.0)
    scorers = make_scorer(), make_scorer()
    whole = GRPOLoss(scorers[0], **options)(batch)
    whole.total().backward()
    loss = GRPOLoss(scorers[1], **options)
    packed = loss.pack(batch)
    order = data.draw(st.permutations(range(packed.num_rows)))
    num_rows = data.draw(st.integers(1, packed.num_rows))
    measured = data.draw(st.integers(1, packed.num_rows))
    window = loss.measure_window(packed.micro_batches(num_rows=measured))
    parts = packed.take_rows(torch.tensor(order)).micro_batches(num_rows=num_rows)
    outputs = [loss(part, window=window) for part in parts]
    for output in outputs:
        output.total().backward()
    torch.testing.assert_close(scorers[1].table.grad, scorers[0].table.grad)
    together = GRPOLossOutput.combine(outputs)
    for name, value in whole.items():
        if value is not None:
            torch.testing.assert_close(
                together.get(name), value.detach(), check_dtype=False, msg=f"{name} of {options}"
            )


def test_weights_are_normalized_over_the_rows_without_signal_too(make_scorer, make_batch):
    """They have advantage 0, so that leaving them out must not change the loss."""
    batch = make_batch()
    for row in batch.unbind(0):
        row["old_log_probs", "full"] = row["old_log_probs", "full"].nan_to_num(posinf=-1.0)
    correction = SamplerCorrection(level="token", mode="truncate", upper=1.3, normalize=True)
    options = {"old_policy": "recomputed", "masking_strategy": "all"}
    options |= {"sampler_correction": correction}
    losses = [
        GRPOLoss(make_scorer(), **options, skip_rows_without_signal=skip)(batch).loss_objective
        for skip in (True, False)
    ]
    assert any((row["advantage"] == 0).all() for row in batch.unbind(0))
    assert losses[0] != 0
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("loss", [GRPOLoss, SFTLoss, DistillationLoss])
@pytest.mark.parametrize("ragged", [True, False], ids=["ragged", "padded"])
def test_a_batch_without_rows_has_loss_0(make_scorer, make_batch, loss, ragged):
    module = loss(make_scorer(), **({} if loss is GRPOLoss else {"allow_empty": True}))
    batch = make_batch()[:0] if ragged else TensorDict({("tokens", "full"): torch.ones(0, 5)}, [0])
    packed = module.pack(batch)
    window = module.measure_window(batch)
    assert tuple(window) == (0, 0, None, None, None)
    assert list(packed.micro_batches(num_rows=2)) == []
    for output in (module(batch), module(packed, window=window)):
        output.total().backward()
        assert output.total().item() == 0
        assert output.num_sequences.item() == 0
        assert all(value.isfinite().all() for value in output.values() if value is not None)


def is_trained(strategy, mask, at):
    """By hand: whether a token is trained, in a row of whose tokens some were sampled."""
    begun = {"assistant": mask[at], "response": any(mask[: at + 1]), "all": True}
    return at > 0 and begun[strategy]  # nothing stands before the first one to predict it


@settings(deadline=None, derandomize=True)
@given(
    given_rows=st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.booleans(), max_size=6), st.integers(0, 2)),
        min_size=1,
        max_size=5,
    ),
    strategy=st.sampled_from(["assistant", "response", "all"]),
)
def test_each_strategy_trains_its_tokens_of_every_row(given_rows, strategy):
    """Whatever a row begins with, and whatever the mask says of the padding on its sides."""
    rows, trained, sampled = [], [], []
    for left, mask, right in given_rows:
        padded = torch.tensor([True] * left + mask + [True] * right, dtype=torch.bool)
        real = torch.tensor([False] * left + [True] * len(mask) + [False] * right)
        masks = {"all_assistant_mask": padded, "all_attention_mask": real.bool()}
        rows.append(TensorDict({"tokens": {"full": torch.arange(len(padded))}, "masks": masks}))
        trained.append([is_trained(strategy, mask, at) for at in range(len(mask))])
        sampled += [mask[at] for at, is_target in enumerate(trained[-1]) if is_target]
    packed = pack_batch(lazy_stack(rows), GRPOLossKeys(), strategy, Entries({}, {}), who="test")
    lengths = packed.lengths.tolist()
    assert lengths == [len(row) for row in trained]
    assert [row.tolist() for row in packed.target_mask.split(lengths)] == trained
    assert packed.target_lengths.tolist() == [sum(row) for row in trained]
    assert packed.sampled.tolist() == sampled


def test_a_response_begins_with_its_first_sampled_token(make_row):
    """By hand: rows that begin with it, that sample one token, and that sample none."""
    shapes = [(0, ((2, 2),)), (2, ((1, 3),)), (3, ()), (0, ((1, 0),)), (0, ((1, 2),))]
    shapes += [(1, ((1, 1), (2, 1)))]
    rows = [make_row(i, prompt=prompt, turns=turns) for i, (prompt, turns) in enumerate(shapes)]
    packed = pack_batch(lazy_stack(rows), GRPOLossKeys(), "response", Entries({}, {}), who="test")
    found = [mask.int().tolist() for mask in packed.target_mask.split(packed.lengths.tolist())]
    # The first token of a row has nothing before it that could predict it.
    assert found[:4] == [[0, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0], [0]]
    assert found[4:] == [[0, 1, 1], [0, 1, 1, 1, 1, 1]]
    assert packed.target_lengths.tolist() == [3, 4, 0, 0, 2, 5]
