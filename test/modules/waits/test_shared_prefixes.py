"""What rows begin with alike is kept once and read once, and they draw what they drew without."""

import asyncio
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_modules import AsyncTransformersEngine, SamplingParameters, TransformersEngine
from torchrl_modules.engines import shared_prefixes, slot_reader, step_graph
from torchrl_modules.engines.kept_caches import KeptCaches
from torchrl_modules.engines.readers import PrefixSlotReader
from torchrl_modules.engines.shared_prefixes import SharedPrefixes, num_saved, shared_lengths
from torchrl_modules.engines.slot_reader import SlotReader
from torchrl_modules.scoring.packed_attention import use_packed_attention
from torchrl_modules.tiny_model import tiny_qwen3

PARAMS = SamplingParameters(max_new_tokens=30, seed=5, stop_token_ids=(*range(30, 50),))
FIRST, SECOND = [*range(1, 30)], [*range(60, 80)]
PROMPTS = [FIRST] * 3 + [[*FIRST, 5, 6]] * 2 + [SECOND] * 2 + [[7, 8, 9]] + [[*SECOND[:5], 3]]


@pytest.fixture(autouse=True, params=["as on a GPU", "on a CPU"])
def way(request, monkeypatch):
    """Prefixes of a few tokens, read as a GPU reads them, or by the kernel for CPUs."""
    torch.manual_seed(0)  # of a model whose rows are some short, some long
    monkeypatch.setattr(shared_prefixes, "SHORTEST", 4)
    monkeypatch.setattr(slot_reader, "_PREFIX_PRICE", 0)
    if request.param == "as on a GPU":
        request.getfixturevalue("attention_of_a_gpu")
    return request.param


def without(model, **options):
    """An engine that keeps every row whole."""
    engine = TransformersEngine(model, **options)
    engine.reader = SlotReader
    return engine


def same(found, expected):
    assert [(one.ids, one.finish_reason) for one in found] == [
        (one.ids, one.finish_reason) for one in expected
    ]
    for here, there in zip(found, expected, strict=True):
        assert here.log_probs == pytest.approx(there.log_probs, abs=1e-5, rel=1e-4)


def num_kept(rows, cuts, price):
    shared = {tuple(row[:cut]) for row, cut in zip(rows, cuts, strict=True) if cut}
    own = sum(len(row) - cut for row, cut in zip(rows, cuts, strict=True))
    return own + sum(len(one) + price for one in shared)


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


@given(st.lists(TOKENS, min_size=1, max_size=4), st.integers(0, 3))
def test_the_cuts_leave_as_few_tokens_and_prices_as_any_would(rows, price):
    before, shared_prefixes.SHORTEST = shared_prefixes.SHORTEST, 1
    try:
        cuts = shared_lengths(rows, price)
    finally:
        shared_prefixes.SHORTEST = before
    every = product(*(range(len(row) + 1) for row in rows))
    least = min(num_kept(rows, some, price) for some in every)
    assert num_kept(rows, cuts, price) == least
    assert num_saved(rows, cuts, price) == sum(map(len, rows)) - least


def test_rows_share_where_it_saves_more_than_the_calls_take():
    prefixes = SharedPrefixes(torch.device("cpu"), price=20)
    prefixes.keep([None] * 8)
    prefixes.place([FIRST] * 4 + [[7] * 9] * 4, range(8))  # 3 * 29 - 20, and 3 * 9 - 20
    assert prefixes.starts.tolist() == [len(FIRST)] * 4 + [9] * 4
    prefixes.place([FIRST] * 3 + [[*range(40, 48)]] * 5, range(8))  # 2 * 29 - 20, and 4 * 8 - 20
    assert prefixes.starts.tolist() == [0] * 8  # which is less than three times the price
    # What is shared already costs nothing more, and another prefix no more than itself.
    prefixes.place([FIRST] * 4, range(4))
    assert prefixes.starts.tolist() == [len(FIRST)] * 4 + [0] * 4
    prefixes.place([[7] * 9] * 3 + [FIRST], range(4, 8))  # 2 * 9 - 20
    assert prefixes.starts.tolist() == [len(FIRST)] * 4 + [0] * 3 + [len(FIRST)]
    prefixes.place([[7] * 11] * 3, range(4, 7))
    assert prefixes.starts.tolist() == [len(FIRST)] * 4 + [11] * 3 + [len(FIRST)]


def test_a_short_beginning_is_not_worth_a_cut():
    assert shared_lengths([[1, 2, 3, 9], [1, 2, 3, 8]]) == [0, 0]
    assert shared_lengths([[1, 2, 3, 4, 9], [1, 2, 3, 4, 8], [5] * 9]) == [4, 4, 0]
    # A system prompt that all begin with, and the longer prompts of two groups.
    system, one, two = [0] * 6, [1] * 9, [2] * 9
    rows = [system + one + [k] for k in range(3, 6)] + [system + two + [k] for k in range(3, 6)]
    assert shared_lengths(rows) == [15] * 6


def test_columns_of_prefixes_are_used_again():
    prefixes = SharedPrefixes(torch.device("cpu"))
    prefixes.keep([None] * 4)
    prefixes.place([FIRST, FIRST, SECOND, SECOND], range(4))
    assert (prefixes.num_columns, prefixes.num_places) == (len(FIRST) + len(SECOND), 8)
    assert prefixes.starts.tolist() == [len(FIRST)] * 2 + [len(SECOND)] * 2
    prefixes.keep([3, 2, None])  # the first prefix goes, a row comes that has the second one
    prefixes.place([[*SECOND, 1]], [2])
    assert prefixes.of_rows[2] is prefixes.of_rows[0]
    prefixes.keep([0, 1, 2, None, None])
    prefixes.place([[9] * 20, [9] * 20], [3, 4])
    assert prefixes.of_rows[3].offset == 0
    plan = prefixes.plan(8, 100)
    assert plan.order.tolist() == [3, 4, 0, 1, 2, 5, 6, 7]
    assert plan.queries.tolist() == [0, 2, *[5] * 7, 8]
    assert plan.starts.tolist()[:2] == [100, 100 + len(FIRST)]
    assert plan.lengths.tolist() == [20, len(SECOND), *[0] * 7]
    assert plan.has_any.tolist() == [True] * 5 + [False] * 3
    assert torch.equal(plan.order[plan.inverse], torch.arange(8))


def test_a_group_keeps_its_prompt_once():
    model = tiny_qwen3(100)
    use_packed_attention(model)
    reader = PrefixSlotReader(model)
    with torch.no_grad():
        reader.read([FIRST] * 16)
    layer = reader._layers[0].keys
    slots, _, columns, _ = layer.shape
    # Two to spare, and one for the prefix; each has the least columns there are, for what is drawn.
    assert (slots, columns) == (16 + 2 + 1, 1 + slot_reader._MIN_COLUMNS)


@pytest.mark.parametrize("captures", [False, True])
def test_groups_draw_the_same_while_rows_come_and_go(device_waits, monkeypatch, captures):
    model, budgets = tiny_qwen3(100), [30 - 2 * row for row in range(len(PROMPTS))]
    expected = without(model).generate(PROMPTS, PARAMS, max_new_tokens=budgets)
    drawn = device_waits.draw_continuously(without(model), PARAMS, 5)
    count = 0

    def capture(run, _):
        nonlocal count
        count += 1
        logits = run().clone()
        return lambda: logits.copy_(run())

    if captures:
        monkeypatch.setattr(slot_reader, "_STEPS_BEFORE_A_GRAPH", 1)
        monkeypatch.setattr(slot_reader, "_STEPS_BEFORE_A_SMALLER_GRAPH", 2)
        monkeypatch.setitem(step_graph.CAPTURES, "cpu", capture)
    engine = TransformersEngine(model)
    assert engine.reader is PrefixSlotReader
    for _ in range(2):
        same(engine.generate(PROMPTS, PARAMS, max_new_tokens=budgets), expected)
    again = device_waits.draw_continuously(engine, PARAMS, 5)
    same([one.generation() for one in again], [one.generation() for one in drawn])
    assert (count >= 2) == captures


def test_a_prefix_may_be_longer_than_a_slot():
    model, prompts = tiny_qwen3(100), [[*range(1, 99)] * 3] * 3 + [[5, 6]]
    same(
        TransformersEngine(model).generate(prompts, PARAMS),
        without(model).generate(prompts, PARAMS),
    )


def test_what_is_kept_of_a_row_is_all_of_it():
    model = tiny_qwen3(100)
    use_packed_attention(model)
    kept, plain = KeptCaches(None), KeptCaches(None)
    row = [*FIRST, 11, 12, 13]
    with torch.no_grad():
        for cls, where in ((PrefixSlotReader, kept), (SlotReader, plain)):
            reader = cls(model, where)
            reader.read([FIRST, SECOND, FIRST])
            for token in row[len(FIRST) :]:
                reader.advance(torch.tensor([token] * 3))
            reader.leave_behind(2, row)
            # The next turn reads only what is new, and its rows share what was kept.
            reader.restart(where)
            logits = reader.read([[*row, 20], [*row, 21]])
            assert reader.num_read == 2
            logits = reader.advance(logits.argmax(-1))
            if cls is PrefixSlotReader:
                found = logits
                assert reader._prefixes.starts.tolist() == [len(row)] * 2
    torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-5)


def test_new_weights_read_what_is_shared_again():
    model = tiny_qwen3(100)
    other = {name: 0.7 * x for name, x in model.state_dict().items()}
    params = SamplingParameters(max_new_tokens=40, temperature=0.0, stop_token_ids=())

    async def run(engine):
        decoding = engine._decoding
        tasks = [asyncio.create_task(engine.respond(prompt, params)) for prompt in PROMPTS]
        while decoding.num_drawn < 3 * len(PROMPTS):
            await asyncio.sleep(0.001)
        await engine.update_weights(other)
        return [await task for task in tasks]

    engine = AsyncTransformersEngine(TransformersEngine(model))
    try:
        assert isinstance(engine._decoding.slots, PrefixSlotReader)
        found = asyncio.run(run(engine))
    finally:
        engine.close()
    model.load_state_dict(other)
    checked = 0
    for prompt, one in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *one.ids]])).logits[0].log_softmax(-1)
        for at, version in enumerate(one.token_versions(0)):
            if version == 1:
                expected = logits[len(prompt) + at - 1, one.ids[at]].item()
                assert one.log_probs[at] == pytest.approx(expected, abs=1e-4)
                checked += 1
    assert checked > 20


@pytest.mark.parametrize("captures", [False, True])
def test_columns_lie_as_steps_read_them_while_groups_come_and_go(way, monkeypatch, captures):
    model = tiny_qwen3(100)
    use_packed_attention(model)
    readers = [PrefixSlotReader(model), SlotReader(model)]
    by_length = was_varlen = way == "as on a GPU"
    if captures:
        monkeypatch.setattr(slot_reader, "_STEPS_BEFORE_A_GRAPH", 0)
        readers[0]._capture = lambda run, _: run
    logits = torch.empty(0, 100)
    # Of rows before, which stay; of those that join; and how columns lie from then on.
    for stay, join, is_varlen in (
        ([], [SECOND, [3, 4, 5]], by_length),
        ([0, 1], [FIRST] * 3, True),
        ([1, 3, 4], [[*FIRST, 8]], True),
        ([0, 2], [[9] * 7], True),  # a row that has a prefix is still there
        ([0, 2], [], True),  # it has gone
        ([1], [[50, 51]], by_length),
        ([0, 1], [SECOND] * 2, True),
    ):
        rows = []
        with torch.no_grad():
            for reader in readers:
                reader.keep(stay)
                kept = logits[stay] if stay else logits[:0]
                rows.append(torch.cat([kept, reader.read(join)]) if join else kept)
            torch.testing.assert_close(*rows, atol=1e-5, rtol=1e-5)
            if is_varlen != was_varlen:  # of buffers that were
                assert not readers[0].has_graphs
            was_varlen = is_varlen
            assert readers[0]._places.is_varlen == is_varlen
            assert readers[0]._layers[1].values.is_contiguous() != is_varlen
            logits = rows[1]
            for _ in range(3):
                found, logits = (each.advance(logits.argmax(-1)) for each in readers)
                torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-5)
            assert readers[0].has_graphs == captures
