"""What is kept of rows is found by their tokens, bounded, and never used under other weights."""

import copy
import gc
import weakref

import pytest
import torch
from async_rows import ENDLESS, assert_exact
from hypothesis import given
from hypothesis import strategies as st

from torchrl_modules import SamplingParameters, TransformersEngine
from torchrl_modules.engines.kept_caches import KeptCaches
from torchrl_modules.weights.expected_weights import weights_fingerprint

IDS = st.lists(st.integers(0, 2) | st.just(1 << 20), max_size=6)


def num_shared(left, right):
    """How many tokens two rows have in common, one by one."""
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["keep", "find", "end"]), st.integers(0, 4), IDS), max_size=40
    ),
    most=st.integers(0, 20),
)
def test_the_longest_common_beginning_is_found(steps, most):
    kept, model = KeptCaches(max_tokens=most), {}  # the oldest used first
    for action, key, ids in steps:
        if action == "keep":
            cache = [(torch.zeros(1, len(ids), 1), torch.zeros(1, len(ids), 1))]
            kept.keep(key, ids, cache)
            model.pop(key, None)
            if 0 < len(ids) <= most:
                model[key] = ids
            while sum(map(len, model.values())) > most:
                del model[next(iter(model))]
        elif action == "end":
            kept.end(key)
            model.pop(key, None)
        elif ids:
            found = kept.find(ids)
            longest = max((num_shared(one, ids[:-1]) for one in model.values()), default=0)
            assert found.num_tokens == longest
            if longest:
                (used,) = [key for key, one in kept._kept.items() if one.cache is found.cache]
                assert num_shared(model[used], ids[:-1]) == longest
                model[used] = model.pop(used)
        assert kept.num_tokens == sum(map(len, model.values())) <= most
        assert len(kept) == len(model)


def test_a_row_without_a_key_is_used_up_by_one_that_goes_on_from_all_of_it():
    kept = KeptCaches(max_tokens=9)
    kept.keep(None, [1, 2, 3, 4], [(torch.zeros(1, 4, 1), torch.zeros(1, 4, 1))])
    found = [kept.find([1, 2, 9]), kept.find([1, 2, 3, 4]), kept.find([1, 2, 3, 4, 5])]
    assert [each.num_tokens for each in found] == [2, 3, 4]
    assert [each.used_up is None for each in found] == [True, True, False]
    kept.end(found[-1].used_up)
    assert len(kept) == 0


@pytest.fixture(name="engine")
def engine_fixture(build_model):
    """An engine that counts the tokens that its model reads, padding included."""
    model = build_model(0).double()
    engine = TransformersEngine(model)
    engine._num_read = 0

    def count(_module, _args, kwargs):
        if "input_ids" in kwargs:  # not of the reference
            engine._num_read += kwargs["input_ids"].numel()

    model.register_forward_pre_hook(count, with_kwargs=True)
    return engine


def next_turn(engine, rows):
    """Rows after one more turn, and how many tokens their prompts' reading took."""
    before = engine._num_read
    drawn = engine.generate(rows, ENDLESS)
    num_read = engine._num_read - before - len(rows) * (ENDLESS.max_new_tokens - 1)
    for row, one in zip(rows, drawn, strict=True):
        assert_exact(engine.inside, row, one)
    return [[*row, *one.ids, 20, 21, 22] for row, one in zip(rows, drawn, strict=True)], num_read


def test_a_turn_of_a_batch_reads_only_what_is_new(engine):
    rows, read = [[5, 6, 7], [5, 6, 9], [11, 12, 13]], []
    for turn in range(3):
        rows, num_read = next_turn(engine, rows)
        read.append(num_read)
        rows = rows[1:] + rows[:1] if turn == 0 else rows  # in any order
    assert read == [9, 3 * 4, 3 * 4]
    assert len(engine._kept) == 3  # each turn in the place of the one before


def test_a_rewritten_past_is_read_again_from_there(engine):
    ((row,), _) = next_turn(engine, [[5, 6, 7]])
    row[20] = 300 if row[20] != 300 else 301
    assert next_turn(engine, [row])[1] == len(row) - 20


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda model: step(model), id="an optimiser"),
        pytest.param(
            lambda model: [weight.data.mul_(1.001) for weight in model.parameters()],
            id="behind the back of autograd",
        ),
        pytest.param(lambda model: swap_data(model), id="other tensors"),
    ],
)
def test_what_other_weights_have_read_is_not_used(engine, change):
    rows, _ = next_turn(engine, [[5, 6, 7]])
    change(engine.inside)
    assert next_turn(engine, rows)[1] == len(rows[0])


def step(model):
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.tensor([[5, 6]])).logits.sum().backward()
    optimiser.step()


def swap_data(model):
    for weight in model.parameters():
        weight.data = weight.data * 1.001


def test_an_update_of_the_engine_lets_go_at_once(engine, build_model):
    rows, _ = next_turn(engine, [[5, 6, 7]])
    engine.update_weights(build_model(1).double().state_dict())
    assert engine._kept.num_tokens == 0
    assert next_turn(engine, rows)[1] == len(rows[0])


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool]),
    size=st.integers(1, 9),
    at=st.integers(0, 8),
)
def test_any_bit_changes_the_fingerprint(dtype, size, at):
    module = torch.nn.Module()
    module.register_buffer("one", torch.ones(size, dtype=dtype))
    before = weights_fingerprint(module)
    assert weights_fingerprint(module) == before
    module.one.data[at % size] = 0
    assert weights_fingerprint(module) != before
    assert weights_fingerprint(copy.deepcopy(module)) != before


def test_seeds_are_per_row(build_model):
    engine = TransformersEngine(build_model(0).double(), max_cached_tokens=0)
    both = engine.generate([[5], [6]], ENDLESS, seeds=[1, 2])
    turned = engine.generate([[6], [5]], ENDLESS, seeds=[2, 1])
    assert [one.ids for one in both] == [one.ids for one in reversed(turned)]
    with pytest.raises(ValueError, match=r"2 prompts, but 2 seeds, 1 of them not None"):
        engine.generate([[5], [6]], ENDLESS, seeds=[1, None])


def test_a_drawing_leaves_its_buffers_to_nobody(build_model, monkeypatch):
    """They are as large as all its rows, and the garbage collector comes by when it likes."""
    engine, readers = TransformersEngine(build_model()), []

    class Watched(engine.reader):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            readers.append(weakref.ref(self))

    monkeypatch.setattr(engine, "reader", Watched)
    gc.disable()
    try:
        engine.generate([[1, 2, 3], [4]], SamplingParameters(max_new_tokens=4))
    finally:
        gc.enable()
    assert [reader() for reader in readers] == [None]
