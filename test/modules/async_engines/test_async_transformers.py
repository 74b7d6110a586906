"""A Transformers model served to asyncio: exact whoever joins or leaves, whatever is updated."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest
import torch
from async_rows import ENDLESS, EXACT, LONG, PROMPTS, assert_exact, drawn_so_far, row_log_probs
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_modules import AsyncEngine, EngineDied, TransformersEngine
from torchrl_modules import open_async as open_engine
from torchrl_modules.scoring.trial import run_trial
from torchrl_modules.weights.expected_weights import UpdateRefused


def test_it_is_an_asynchronous_engine_with_the_limits_of_the_model(run, exact_model):
    async def main(engine):
        assert isinstance(engine, AsyncEngine)
        return engine.version, engine.vocab_size, engine.max_model_len

    assert run(main) == (0, exact_model.config.vocab_size, 512)


ROW = st.tuples(
    st.lists(st.integers(4, 336), min_size=1, max_size=12),
    st.integers(1, 12),  # budget
    st.integers(0, 6),  # comes after so many milliseconds
    st.sampled_from([None, 0, 3]),  # is cancelled after so many
)


@settings(max_examples=25)
@given(rows=st.lists(ROW, min_size=1, max_size=12), max_running=st.sampled_from([1, 2, 5, 64]))
def test_rows_that_join_and_leave_are_drawn_as_if_alone(run, exact_model, rows, max_running):
    params = replace(ENDLESS, stop_token_ids=(3, *range(100, 130)))

    async def main(engine):
        async def respond(number, prompt, budget, delay, cancel):
            await asyncio.sleep(delay / 1000)
            seeded = replace(params, seed=number)
            task = asyncio.create_task(engine.respond(prompt, seeded, max_new_tokens=budget))
            if cancel is not None:
                await asyncio.sleep(cancel / 1000)
                task.cancel()
            return (await asyncio.gather(task, return_exceptions=True))[0]

        return await asyncio.gather(*(respond(number, *row) for number, row in enumerate(rows)))

    alone = TransformersEngine(exact_model, max_cached_tokens=0)
    for number, (row, drawn) in enumerate(
        zip(rows, run(main, max_running=max_running), strict=True)
    ):
        prompt, budget, _, cancel = row
        if cancel is not None and isinstance(drawn, asyncio.CancelledError):
            continue
        seeded = replace(params, seed=number, max_new_tokens=budget)
        (expected,) = alone.generate([prompt], seeded)
        assert drawn.ids == expected.ids
        assert drawn.finish_reason == expected.finish_reason
        assert [tuple(span) for span in drawn.versions] == [(0, 0, len(drawn.ids))]
        assert_exact(exact_model, prompt, drawn)


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(replace(ENDLESS, temperature=0.7, top_k=20, top_p=0.9), id="truncated"),
        pytest.param(replace(ENDLESS, temperature=0.0), id="greedy"),
        pytest.param(
            replace(ENDLESS, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
            id="penalties",
        ),
        pytest.param(
            replace(ENDLESS, min_tokens=6, stop_token_ids=tuple(range(200)), min_p=0.01),
            id="no stop token too early",
        ),
        pytest.param(
            replace(ENDLESS, logit_bias={17: 9.0}, entropy=True, untempered_log_probs=True),
            id="a bias, and what can be reported",
        ),
    ],
)
def test_parameters_mean_what_they_mean_to_the_synchronous_engine(run, exact_model, params):
    async def main(engine):
        different = [
            engine.respond(prompt, replace(params, seed=seed))
            for seed, prompt in enumerate(PROMPTS)
        ]
        return await asyncio.gather(*different, engine.respond(PROMPTS[1], ENDLESS))

    alone = TransformersEngine(exact_model, max_cached_tokens=0)
    for seed, (prompt, drawn) in enumerate(zip(PROMPTS, run(main), strict=False)):
        (expected,) = alone.generate([prompt], replace(params, seed=seed))
        assert drawn.ids == expected.ids
        for name in ("log_probs", "untempered_log_probs", "entropies"):
            assert getattr(drawn, name) == pytest.approx(getattr(expected, name), abs=EXACT)


def test_stop_strings_end_a_row(run, chatml_tokenizer):
    params = replace(LONG, stop=("e",)).with_tokenizer(chatml_tokenizer)

    async def main(engine):
        return await asyncio.gather(*(engine.respond(prompt, params) for prompt in PROMPTS * 3))

    for drawn in run(main):
        assert drawn.finish_reason == "stop"
        assert "e" in chatml_tokenizer.decode(drawn.ids)
        assert "e" not in chatml_tokenizer.decode(drawn.ids[:-1])


def test_without_a_seed_torch_gives_one(run):
    def draw():
        torch.manual_seed(7)

        async def main(engine):
            return [drawn.ids for drawn in await asyncio.gather(*calls(engine))]

        return run(main)

    def calls(engine):
        return [engine.respond(PROMPTS[1], ENDLESS) for _ in range(4)]

    first = draw()
    assert first == draw()
    assert len(set(map(tuple, first))) == 4


def test_a_bad_row_is_an_error_of_its_own(run):
    async def main(engine):
        return await asyncio.gather(
            engine.respond([], ENDLESS),
            engine.respond([337], ENDLESS),
            engine.respond([5] * 500, ENDLESS),
            engine.respond([5], ENDLESS, max_new_tokens=0),
            engine.respond([5], ENDLESS),
        )

    drawn = run(main)
    assert [one.finish_reason for one in drawn] == ["error"] * 4 + ["length"]
    assert "grow by 30, but the model takes 512" in drawn[2].error


def test_a_row_that_is_not_finite_spoils_no_other_row_and_no_slot(run, build_model):
    model = build_model(0, tied=False)
    tried = set(torch.cat(run_trial(model, who="test").rows).tolist())
    poison = next(token for token in range(4, 337) if token not in tried)
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = torch.inf
    harmless = replace(ENDLESS, logit_bias={poison: -100})

    async def main(engine):
        calls = [engine.respond([20], harmless), engine.respond([4, 5, poison, 6], ENDLESS)]
        good, bad = await asyncio.gather(*calls)
        assert bad.finish_reason == "error"
        assert "log-prob of token 1 is not finite" in bad.error
        # They come into its slot, and beside a longer row masked columns are multiplied by 0.
        after = [engine.respond([21] * 40, harmless), engine.respond([20], harmless)]
        return [good, *await asyncio.gather(*after)]

    assert [one.finish_reason for one in run(main, model=model)] == ["length"] * 3


def test_rows_of_a_group_read_their_prompt_once(run):
    async def main(engine):
        await engine.pause()  # so that they are let in together
        calls = [asyncio.create_task(engine.respond(PROMPTS[0], ENDLESS)) for _ in range(16)]
        await asyncio.sleep(0.01)
        await engine.resume()
        await asyncio.gather(*calls)
        return engine.num_prompt_tokens_read

    assert run(main) == len(PROMPTS[0])


# Updates.


def test_an_update_in_the_middle_changes_the_tokens_after_it(run, exact_model, other_model):
    async def main(engine):
        calls = [asyncio.create_task(engine.respond(prompt, LONG)) for prompt in PROMPTS]
        await drawn_so_far(engine, 20)
        await engine.update_weights(other_model.state_dict(), version=5)
        assert engine.version == 5
        return await asyncio.gather(*calls)

    for prompt, drawn in zip(PROMPTS, run(main), strict=True):
        first, second = drawn.versions
        assert (first.version, first.start, second.version) == (0, 0, 5)
        assert (first.end, second.end) == (second.start, 400)
        assert 20 <= first.end < 400
        assert_exact(exact_model, prompt, drawn, 0, first.end)
        assert_exact(other_model, prompt, drawn, second.start)


def test_old_caches_are_kept_by_choice_and_serve_nobody_else(run, other_model):
    async def main(engine):
        call = asyncio.create_task(engine.respond(PROMPTS[0], LONG, session="a"))
        await drawn_so_far(engine, 20)
        await engine.update_weights(other_model.state_dict(), recompute=False)
        drawn = await call
        assert engine.num_cached_tokens == 0
        next_prompt = [*PROMPTS[0], *drawn.ids, 4]
        return drawn, next_prompt, await engine.respond(next_prompt, ENDLESS, session="a")

    drawn, next_prompt, after = run(main)
    second = drawn.versions[1].start
    apart = row_log_probs(other_model, PROMPTS[0], drawn.ids) - torch.tensor(drawn.log_probs)
    assert apart[second:].abs().max() > 0.01  # of neither version alone
    assert_exact(other_model, next_prompt, after)


def test_an_update_is_refused_as_a_whole(run, exact_model):
    wrong = exact_model.state_dict()
    name = sorted(wrong)[-1]
    wrong = wrong | {name: wrong[name] * torch.nan}

    async def main(engine):
        call = asyncio.create_task(engine.respond(PROMPTS[0], LONG))
        with pytest.raises(UpdateRefused, match="NaN or infinity"):
            await engine.update_weights(wrong)
        with pytest.raises(UpdateRefused, match="version 0 is not above"):
            await engine.update_weights(exact_model.state_dict(), version=0)
        return engine.version, await call

    version, drawn = run(main)
    assert version == 0
    assert_exact(exact_model, PROMPTS[0], drawn)


def test_the_model_may_be_trained_while_its_copy_is_drawn_from(run, build_model, exact_model):
    model = build_model(0).double()

    async def main(engine):
        call = asyncio.create_task(engine.respond(PROMPTS[0], LONG))
        await drawn_so_far(engine, 5)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.5)
        return await call

    assert_exact(exact_model, PROMPTS[0], run(main, model=model))


def test_a_model_that_is_not_copied_may_not_be_changed(run, build_model):
    model = build_model(0).double()

    async def main(engine):
        call = asyncio.create_task(engine.respond(PROMPTS[0], LONG))
        await drawn_so_far(engine, 5)
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(0.5)
        with pytest.raises(EngineDied, match="changed by somebody else than update_weights"):
            await call

    run(main, model=model, copy_model=False)


# Cancelling, pausing, dying, closing.


def test_cancelling_frees_the_row(run):
    async def main(engine):
        calls = [asyncio.create_task(engine.respond(prompt, LONG)) for prompt in PROMPTS]
        await drawn_so_far(engine, 2)
        for call in calls[:3]:
            call.cancel()
        await asyncio.gather(*calls[:3], return_exceptions=True)
        await engine.pause()  # after the aborts, in order
        left = len(engine._decoding._running), engine._decoding.slots.num_rows
        await engine.resume()
        return left, (await calls[3]).finish_reason

    assert run(main) == ((1, 1), "length")


def test_nothing_is_drawn_while_it_is_paused(run):
    async def main(engine):
        await engine.pause()
        call = asyncio.create_task(engine.respond(PROMPTS[1], ENDLESS))
        done, _ = await asyncio.wait({call}, timeout=0.5)
        assert not done
        assert engine.num_prompt_tokens_read == 0
        await engine.resume()
        return (await call).finish_reason

    assert run(main, stall_timeout_s=0.1) == "length"


def test_when_a_step_fails_everybody_is_told_at_once(run):
    async def main(engine):
        def fail(*_):
            raise MemoryError("no room")

        calls = [asyncio.create_task(engine.respond(prompt, LONG)) for prompt in PROMPTS]
        await drawn_so_far(engine, 2)
        engine._engine.inside.register_forward_pre_hook(fail)
        since = time.monotonic()
        for call in calls:
            with pytest.raises(EngineDied, match="no room"):
                await call
        with pytest.raises(EngineDied, match="no room"):
            await engine.respond(PROMPTS[0], ENDLESS)
        with pytest.raises(EngineDied, match="no room"):
            await engine.pause()
        return time.monotonic() - since

    assert run(main) < 1


def test_a_stuck_step_is_noticed(run):
    stuck = threading.Event()

    async def main(engine):
        call = asyncio.create_task(engine.respond(PROMPTS[0], LONG))
        await drawn_so_far(engine, 2)
        engine._engine.inside.register_forward_pre_hook(lambda *_: stuck.wait(20) and None)
        with pytest.raises(EngineDied, match="made no step"):
            await call
        stuck.set()

    run(main, stall_timeout_s=0.3)


def test_closing_lets_everybody_go_and_ends_the_thread(exact_model):
    async def main():
        engine = open_engine(TransformersEngine(exact_model))
        call = asyncio.create_task(engine.respond(PROMPTS[0], LONG))
        await drawn_so_far(engine, 2)
        engine.close()
        engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await call
        with pytest.raises(RuntimeError, match="closed"):
            await engine.respond(PROMPTS[0], ENDLESS)
        engine.end_session("a")
        return engine._thread._thread.is_alive()

    assert not asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_running": 0}, "max_running"),
        ({"max_cached_tokens": -1}, "max_cached_tokens"),
        ({"stall_timeout_s": 0.0}, "stall_timeout_s must be a finite"),
        ({"update_timeout_s": -1.0}, "update_timeout_s must be a finite"),
    ],
)
def test_settings_that_mean_nothing_are_refused(exact_model, options, message):
    with pytest.raises(ValueError, match=message):
        open_engine(TransformersEngine(exact_model), **options)
