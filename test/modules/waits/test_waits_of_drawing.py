"""Drawing waits for the device once for each block of tokens, and draws the same in blocks."""

import asyncio
import random
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from torchrl_modules import AsyncTransformersEngine, SamplingParameters, TransformersEngine

MODELS = ("Llama", "Qwen3", "Gemma3")
MARKED = (pytest.param("Llama", marks=pytest.mark.weekly), *MODELS[1:])
"""With every change those that have more: norms of queries and keys, or a window."""
WAYS = ("greedy", "top-k, top-p", "seeds", "stop text", "penalties")
STOPS = {"stop": ("a", "b c"), "stop_token_ids": (30, 31, 150, 151)}


@pytest.fixture(scope="module")
def stopping(chatml_tokenizer):
    """Parameters by which rows end at many places, for every reason."""
    params = SamplingParameters(max_new_tokens=24, seed=3, **STOPS)
    others = {
        "stops": params,
        "greedy": replace(params, temperature=0.0, repetition_penalty=1.3),
        "penalties": replace(
            params,
            **{"min_tokens": 5, "presence_penalty": 0.3, "top_p": 0.9, "logit_bias": {7: 2.0}},
            **{"untempered_log_probs": True, "entropy": True},
        ),
    }
    return {name: one.with_tokenizer(chatml_tokenizer) for name, one in others.items()}


OFTEN = {("Gemma3", WAYS[1]), *(("Qwen3", way) for way in WAYS)}
CASES = [
    # What reads a model and what draws from its logits wait apart: each of both with each change.
    pytest.param(name, way, marks=() if (name, way) in OFTEN else pytest.mark.weekly)
    for name in MODELS
    for way in WAYS
]


@pytest.mark.parametrize("continuous", [False, True], ids=["together", "continuous"])
@pytest.mark.parametrize(("name", "way"), CASES)
@pytest.mark.filterwarnings("ignore:AsyncTransformersEngine. rows of Gemma3")
def test_the_host_looks_once_for_each_block(device_waits, name, way, continuous):
    params = device_waits.drawing_parameters(1 + 3 * 8)[way]
    model = device_waits.move(device_waits.tiny_models()[name])
    for num_rows in (3, 8):
        found = device_waits.count_drawing(model, params, num_rows, continuous=continuous)
        assert found.num_waits == 3, found.places  # tokens per look are 8 beside a device


@pytest.mark.parametrize("name", MARKED)
def test_a_device_draws_what_a_cpu_draws(device_waits, stopping, name):
    prompts = device_waits.prompts_of(6)
    model = device_waits.tiny_models()[name]
    expected = [TransformersEngine(model).generate(prompts, one) for one in stopping.values()]
    with device_waits.DeviceWaits():
        engine = TransformersEngine(device_waits.move(model))
        found = [engine.generate(prompts, one) for one in stopping.values()]
    for here, there in zip(found, expected, strict=True):
        check_alike(here, there)


def check_alike(found, expected):
    """The same tokens and ends; batches of other rows round differently."""
    assert [(one.ids, one.finish_reason) for one in found] == [
        (one.ids, one.finish_reason) for one in expected
    ]
    for here, there in zip(found, expected, strict=True):
        for name in ("log_probs", "untempered_log_probs", "entropies"):
            assert list(getattr(here, name)) == pytest.approx(
                list(getattr(there, name)), abs=1e-5, rel=1e-4
            )


@pytest.mark.parametrize("name", MARKED)
def test_blocks_draw_what_single_tokens_draw(device_waits, stopping, name):
    prompts, model = device_waits.prompts_of(9), device_waits.tiny_models()[name]
    budgets = [24 - 3 * (row % 4) for row in range(9)]
    single, *all_blocks = (
        TransformersEngine(model, tokens_per_look=number) for number in (1, 2, 5, 8, 64)
    )
    reasons = set()
    for params in stopping.values():
        expected = single.generate(prompts, params, max_new_tokens=budgets)
        # The next turn goes on from what was read of each row.
        turns = [[*p, *one.ids, 7] for p, one in zip(prompts, expected, strict=True)]
        expected_next = single.generate(turns, params)
        for blocks in all_blocks:
            check_alike(blocks.generate(prompts, params, max_new_tokens=budgets), expected)
            check_alike(blocks.generate(turns, params), expected_next)
        reasons |= {one.finish_reason for one in expected}
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.filterwarnings("ignore:AsyncTransformersEngine. rows of Gemma3")
def test_rows_that_join_and_leave_draw_the_same_in_blocks(device_waits, stopping, name):
    prompts, model = device_waits.prompts_of(7), device_waits.tiny_models()[name]
    kinds = [*stopping.values()]

    async def respond(tokens_per_look):
        engine = AsyncTransformersEngine(
            TransformersEngine(model, tokens_per_look=tokens_per_look), max_running=4
        )
        async with engine:
            calls = [
                engine.respond(
                    prompt,
                    replace(kinds[row % len(kinds)], seed=row),
                    max_new_tokens=24 - row,
                    session=row,
                )
                for row, prompt in enumerate(prompts)
            ]
            first = await asyncio.gather(*calls)
            more = [
                engine.respond([*prompt, *one.ids, 7], kinds[0], session=row)
                for row, (prompt, one) in enumerate(zip(prompts, first, strict=True))
            ]
            found = [*first, *await asyncio.gather(*more)]
            return found, engine.num_tokens_drawn

    (expected, count), *others = [asyncio.run(respond(number)) for number in (1, 3, 16)]
    for found, num_drawn in others:
        check_alike(found, expected)
        assert num_drawn == count == sum(len(one.ids) for one in expected)


@pytest.mark.parametrize("tokens_per_look", [1, 4])
def test_rows_that_have_ended_are_not_read_behind_the_last_position(tokens_per_look):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
    config.update({"bos_token_id": 0, "eos_token_id": 0})
    engine = TransformersEngine(GPT2LMHeadModel(config), tokens_per_look=tokens_per_look)
    draw = random.Random(0)
    prompts = [[draw.randrange(64) for _ in range(14)], *[[row] for row in range(1, 9)]]
    budgets = [2] + [12] * 8  # one row in nine ends: it stays in the batch
    params = SamplingParameters(max_new_tokens=12, seed=0)
    together = engine.generate(prompts, params, max_new_tokens=budgets)
    seeds = params.row_seeds(9)
    for prompt, budget, seed, found in zip(prompts, budgets, seeds, together, strict=True):
        check_alike(
            [found], engine.generate([prompt], params, max_new_tokens=[budget], seeds=[seed])
        )


def test_how_many_tokens_are_drawn_before_a_look_can_be_said(make_tiny_model):
    model = make_tiny_model()
    assert TransformersEngine(model).tokens_per_look == 1
    assert TransformersEngine(model, tokens_per_look=5).copied().tokens_per_look == 5
    with pytest.raises(ValueError, match="tokens_per_look must be a whole number"):
        TransformersEngine(model, tokens_per_look=0)
