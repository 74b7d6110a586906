"""What an asynchronous engine keeps between two turns; models of which nothing can be kept."""

import asyncio

import pytest
import torch
from async_rows import ENDLESS, LONG, PROMPTS, assert_exact, drawn_so_far
from transformers import AutoModelForCausalLM, MambaConfig, MistralConfig


async def converse(engine, session, num_turns=4, prompt=(5, 6, 7)):
    """A conversation: prompts and responses, and the prompt tokens that each turn has read."""
    turns, full = [], list(prompt)
    for turn in range(num_turns):
        before = engine.num_prompt_tokens_read
        drawn = await engine.respond(full, ENDLESS, session=session)
        turns.append((full, drawn, engine.num_prompt_tokens_read - before))
        full = [*full, *drawn.ids, 20 + turn, 21, 22]
    return turns


def test_a_turn_reads_only_what_is_new(run, exact_model):
    turns = run(lambda engine: converse(engine, "a"))
    # The token that was drawn last has not been read, and 3 are new.
    assert [num_read for _, _, num_read in turns] == [3, 4, 4, 4]
    for prompt, drawn, _ in turns:
        assert_exact(exact_model, prompt, drawn)


def test_conversations_at_once_do_not_meet(run, exact_model):
    async def main(engine):
        return await asyncio.gather(
            *(converse(engine, number, prompt=[5 + number % 3] * 4) for number in range(9))
        )

    for turns in run(main, max_running=4):
        for prompt, drawn, _ in turns:
            assert_exact(exact_model, prompt, drawn)


def test_the_tokens_decide_what_is_used_not_the_key(run, exact_model):
    async def main(engine):
        ((prompt, drawn, _),) = await converse(engine, "a", num_turns=1)
        rewritten = [*prompt, *drawn.ids[:10], 30, *drawn.ids[11:]]
        before = engine.num_prompt_tokens_read
        return rewritten, await engine.respond(rewritten, ENDLESS, session="a"), before, engine

    rewritten, drawn, before, engine = run(main)
    assert engine.num_prompt_tokens_read - before == len(rewritten) - 13
    assert_exact(exact_model, rewritten, drawn)


def test_an_update_makes_what_was_read_unusable(run, other_model):
    async def main(engine):
        ((prompt, drawn, _),) = await converse(engine, "a", num_turns=1)
        await engine.update_weights(other_model.state_dict())
        before = engine.num_prompt_tokens_read
        full = [*prompt, *drawn.ids, 4]
        return full, await engine.respond(full, ENDLESS, session="a"), before, engine

    full, drawn, before, engine = run(main)
    assert engine.num_prompt_tokens_read - before == len(full)
    assert_exact(other_model, full, drawn)


def test_what_is_kept_is_bounded_and_ends_with_the_session(run):
    async def main(engine):
        await asyncio.gather(*(converse(engine, number, 1, [number + 4]) for number in range(9)))
        most = engine.num_cached_tokens
        for number in range(9):
            engine.end_session(number)
        await engine.pause()
        await engine.resume()
        call = asyncio.create_task(engine.respond(PROMPTS[0], ENDLESS, session="a"))
        await drawn_so_far(engine, 2)
        engine.end_session("a")
        await call
        await engine.respond(PROMPTS[0], ENDLESS)
        return most, engine.num_cached_tokens

    # 30 tokens of each are read: 1 of the prompt, and all that were drawn but for the last one.
    assert run(main, max_cached_tokens=100) == (90, 0)


# Models whose caches can't be put together.


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            MambaConfig(vocab_size=337, hidden_size=32, num_hidden_layers=2, state_size=8),
            id="recurrent",
        ),
        pytest.param(
            MistralConfig(
                vocab_size=337,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                sliding_window=8,
                max_position_embeddings=512,
                initializer_range=0.3,
            ),
            id="sliding window",
        ),
    ],
)
def test_other_models_are_drawn_from_in_groups(run, config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    torch.manual_seed(1)
    other = AutoModelForCausalLM.from_config(config).double().eval()

    async def main(engine):
        calls = []
        for number, prompt in enumerate(PROMPTS * 3):
            budget = 3 + 5 * number
            call = engine.respond(prompt, LONG, max_new_tokens=budget, session=number)
            calls.append(asyncio.create_task(call))
            await asyncio.sleep(0.002)
        calls[5].cancel()
        await calls[2]
        await engine.update_weights(other.state_dict())
        return await asyncio.gather(*calls, return_exceptions=True)

    with pytest.warns(UserWarning, match="can't be put together"):
        results = run(main, model=model)
    versions = set()
    for prompt, drawn in zip(PROMPTS * 3, results, strict=True):
        if isinstance(drawn, asyncio.CancelledError):
            continue
        for version, start, end in drawn.versions:
            versions.add(version)
            assert_exact((model, other)[version], prompt, drawn, start, end)
    assert versions == {0, 1}
