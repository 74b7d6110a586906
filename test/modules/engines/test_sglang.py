"""A real server of SGLang on a CPU: exact log-probs, weights, versions, and what is refused."""

import asyncio
import secrets
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_reference import OPTIONS, STOPS, turn_log_probs

from torchrl_data import SamplingMasks
from torchrl_modules import (
    EngineDied,
    SamplingParameters,
    SGLangServerEngine,
    SGLangWrapper,
    open_async,
    start_sglang_server,
)
from torchrl_modules.engines.version_labels import StaleWeights
from torchrl_modules.engines.whole_batch_engine import Row
from torchrl_modules.sglang.requests import read_drawn
from torchrl_modules.weights.lazy_weights import LazyWeights, WeightFacts

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-sglang/bin/python"
PROMPTS = [[5, 6, 7, 8] * 10, [9, 10], [11] * 40, [12, 13, 14]]
PARAMS = SamplingParameters(max_new_tokens=16, stop_token_ids=(3,))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def start(model_directory):
    """Starts a server with SGLang's own environment, and the names of kernels that it imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "test/sglang_cpu"))
        # One of 64 begins with a dash, as an option does.
        token = f"-{secrets.token_urlsafe(24)}"
        patch.setattr("torchrl_modules.sglang.server.secrets.token_urlsafe", lambda _: token)
        yield partial(
            start_sglang_server,
            model_directory,
            python=str(PYTHON),
            context_length=256,
            max_total_tokens=1024,
            sampling_mask_max_tokens=100,
        )


@pytest.fixture(scope="module")
def url(start):
    with start() as url:
        yield url


@pytest.fixture
def engine(url, model):
    with closing(SGLangServerEngine(url, timeout_s=120)) as engine:
        if engine.version:
            engine.update_weights(model.state_dict())
        yield engine


def assert_from(model, params, rows, prompts=PROMPTS):
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.error is None
        expected = turn_log_probs(model, params, prompt, row.ids)
        torch.testing.assert_close(
            torch.tensor(row.log_probs).double(), expected.double(), rtol=0, atol=5e-5
        )


DRAWN = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 7, "temperature": 1.3},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.1, "temperature": 0.8},
    "stops": {"stop_token_ids": STOPS},
    **{name: OPTIONS[name] for name in ("presence penalty", "frequency penalty", "logit bias")},
}


@pytest.mark.parametrize("options", DRAWN.values(), ids=DRAWN)
def test_log_probs_are_those_of_the_distribution_drawn_from(engine, model, options):
    params = replace(PARAMS, **options)
    rows = engine.generate(PROMPTS, params)
    assert_from(model, params, rows)
    for row in rows:
        stops = [i for i, token in enumerate(row.ids) if token in params.stop_token_ids]
        assert stops == ([len(row.ids) - 1] if row.finish_reason == "stop" else [])
        assert [span[1:] for span in row.versions] == [(0, len(row.ids))]


def test_the_tokens_that_a_truncation_left_come_with_the_row(engine, model):
    params = replace(PARAMS, top_k=40, top_p=0.7, sampling_mask=True, kept_counts=True)
    rows = engine.generate(PROMPTS, params)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        kept = SamplingMasks.of(row.sampling_masks).kept(model.config.vocab_size)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *row.ids]])).logits[0, len(prompt) - 1 : -1]
        # The probability of top-p is that of the whole vocabulary, as SGLang takes it.
        p, order = logits.softmax(-1).sort(-1, descending=True)
        left = (p.cumsum(-1) - p <= 0.7) & (torch.arange(p.shape[-1]) < 40)
        expected = torch.zeros_like(kept).scatter(1, order, left)
        assert torch.equal(kept, expected)
        assert row.kept_counts == expected.sum(-1).tolist()
        among = logits.masked_fill(~expected, -torch.inf).log_softmax(-1)
        own = among[torch.arange(len(row.ids)), torch.tensor(row.ids)]
        torch.testing.assert_close(torch.tensor(row.log_probs), own, rtol=0, atol=5e-5)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=4), inside),
    max_leaves=6,
)
ANSWERS = JSON | st.fixed_dictionaries(
    {
        "meta_info": st.fixed_dictionaries(
            {
                "finish_reason": JSON | st.fixed_dictionaries({"type": JSON}),
                "output_token_logprobs": JSON | st.lists(st.lists(JSON, max_size=3), max_size=3),
                "weight_versions": JSON,
                "output_token_sampling_mask": JSON,
                "output_token_sampling_logprobs": JSON,
            }
        )
    }
)


@given(ANSWERS, st.booleans())
def test_what_is_no_answer_of_sglang_is_an_error_of_the_row(answer, truncates):
    params = SamplingParameters(top_k=3 if truncates else 0, sampling_mask=True)
    drawn = read_drawn(answer, ["default"], params, 337, 100)
    if drawn.error is None:
        assert len(drawn.ids) == len(drawn.log_probs) == len(drawn.sampling_masks)
    else:
        assert drawn.finish_reason == "error"


def test_more_tokens_than_the_server_tells_are_an_error_of_the_row(engine):
    wide = replace(PARAMS, min_p=1e-9)
    (row,) = engine.generate([PROMPTS[1]], wide)
    assert row.finish_reason == "error"
    assert "--sampling-mask-max-tokens" in row.error
    with pytest.raises(ValueError, match="--sampling-mask-max-tokens 101"):
        engine.generate(PROMPTS, replace(PARAMS, top_k=101))


REFUSED = {
    "repetition": ({"repetition_penalty": 1.2}, "leaves the prompt's tokens out"),
    "min_tokens": ({"min_tokens": 2}, "no tokenizer"),
    "both": ({"top_k": 5, "top_p": 0.9}, "sampling_mask=True"),
    "greedy": ({"temperature": 0.0, "top_k": 5}, "they change no token"),
    "seed": ({"seed": 1}, "--enable-deterministic-inference"),
    "ends": ({"stop_token_ids": (7,)}, r"own end tokens, \[3\]"),
    "entropy": ({"entropy": True}, "one log-prob a token"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_scored_otherwise_is_refused(engine, options, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(PROMPTS, replace(PARAMS, **options))


def test_a_bad_row_alone_is_marked(engine):
    # An id outside the vocabulary would end the server.
    prompts = [[], [1] * 256, [337], [-1], [5], PROMPTS[1]]
    rows = engine.generate(prompts, PARAMS, max_new_tokens=[4, 4, 4, 4, 0, 4])
    assert [row.finish_reason for row in rows[:5]] == ["error"] * 5
    assert all(row.error for row in rows[:5])
    assert rows[5].ids


def test_a_row_may_fill_the_context(engine, model):
    prompt = [5, 6] * 120
    (row,) = engine.generate([prompt], replace(PARAMS, stop_token_ids=()), max_new_tokens=[400])
    assert (row.finish_reason, len(row.ids)) == ("length", engine.max_model_len - len(prompt))
    assert_from(model, PARAMS, [row], [prompt])


@pytest.mark.parametrize("way", ["file", "c10d"])
def test_an_update_changes_the_outputs_to_those_of_the_new_weights(
    url, engine, model, other_model, way
):
    with closing(SGLangServerEngine(url, weight_transfer=way)) as other:
        before = other.version
        for weights in (other_model, model):  # twice: the second broadcast meets nobody anew
            other.update_weights(weights.state_dict())
            rows = other.generate(PROMPTS, PARAMS)
            assert_from(weights, PARAMS, rows)
        assert other.version == before + 2
    with pytest.raises(StaleWeights, match="another client"):
        engine.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        pytest.param("model.norm.weight", torch.ones(3), r"shape \(3,\)", id="shape"),
        pytest.param("model.norm.weight", torch.full((64,), torch.nan), "not finite", id="NaN"),
        pytest.param("extra", torch.ones(3), "no use for", id="unknown name"),
    ],
)
def test_a_wrong_update_is_refused_whole(engine, model, other_model, name, value, message):
    version = engine.version
    with pytest.raises(ValueError, match=message):
        engine.update_weights({**other_model.state_dict(), name: value})
    assert engine.version == version
    assert_from(model, PARAMS, engine.generate(PROMPTS, PARAMS))


class LostWeights(LazyWeights):
    """Weights of which one can't be made."""

    def __init__(self, weights, lost):
        self.weights, self.lost = weights, lost
        self.facts = {
            name: WeightFacts(value.shape, value.dtype, float(value.abs().max()), value.data_ptr())
            for name, value in weights.items()
        }

    def __getitem__(self, name):
        if name == self.lost:
            raise OSError("the shard is gone")
        return self.weights[name]


def test_an_update_that_ends_before_the_server_hears_of_it_changes_nothing(
    engine, model, other_model
):
    version = engine.version
    with pytest.raises(OSError, match="the shard is gone"):
        engine.update_weights(LostWeights(other_model.state_dict(), "model.norm.weight"))
    assert (engine.version, engine.mixed) == (version, False)
    assert_from(model, PARAMS, engine.generate(PROMPTS, PARAMS))


@pytest.mark.weekly
def test_rows_that_a_full_cache_puts_off_are_counted_and_exact(engine, model):
    """10 rows of 224 tokens are more than twice the 1,024 places of the cache."""
    before = engine.measure_load().num_preemptions
    prompts = [[5 + number, 6, 7, 8] for number in range(10)]
    # A row that could not end would be let in only where all of it has a place.
    params = replace(PARAMS, max_new_tokens=220, logit_bias={3: -50.0})
    rows = engine.generate(prompts, params)
    put_off = engine.measure_load().num_preemptions
    assert put_off > before
    time.sleep(1.5)  # a gauge would be zero again
    assert engine.measure_load().num_preemptions == put_off
    assert_from(model, params, rows, prompts)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_response_in_flight_goes_on_with_new_weights(engine, model, other_model, recompute):
    """Each token's log-prob is that of the weights that its version names."""
    params = replace(PARAMS, max_new_tokens=200, stop_token_ids=())

    async def main():
        with closing(open_async(engine)) as served:
            call = asyncio.create_task(served.respond(PROMPTS[1], params))
            await asyncio.sleep(0.3)
            new = other_model.state_dict()
            await served.update_weights(new, version=engine.version + 5, recompute=recompute)
            return await call, await served.respond(PROMPTS[1], PARAMS)

    first = engine.version
    row, later = asyncio.run(main())
    assert [span.version for span in row.versions] == [first, first + 5]
    cut = row.versions[0].end
    assert 0 < cut < len(row.ids) == row.versions[1].end
    old = turn_log_probs(model, params, PROMPTS[1], row.ids)
    new = turn_log_probs(other_model, params, PROMPTS[1], row.ids)
    drawn = torch.tensor(row.log_probs).double()
    torch.testing.assert_close(drawn[:cut], old[:cut].double(), rtol=0, atol=5e-5)
    matches = torch.allclose(drawn[cut:], new[cut:].double(), rtol=0, atol=5e-5)
    # Without recomputation they are of neither version alone.
    assert matches == recompute
    assert_from(other_model, PARAMS, [later], PROMPTS[1:2])


def test_a_pause_lasts_over_an_update_and_is_no_stall(url, other_model):
    async def main():
        with (
            closing(SGLangServerEngine(url, stall_timeout_s=1.0)) as client,
            closing(open_async(client)) as served,
        ):
            await served.pause()
            call = asyncio.create_task(served.respond(PROMPTS[1], PARAMS))
            await asyncio.sleep(0.2)
            await served.update_weights(other_model.state_dict())
            done, _ = await asyncio.wait({call}, timeout=2.5)
            assert not done
            await served.resume()
            return await call, client.version

    row, version = asyncio.run(main())
    assert [span.version for span in row.versions] == [version]
    assert_from(other_model, PARAMS, [row], PROMPTS[1:2])


def test_a_cancelled_row_ends_on_the_server(url, engine):
    """The server says how many rows it draws: none, long before the row would have ended."""
    long = replace(PARAMS, max_new_tokens=200, stop_token_ids=())

    def running():
        text = engine._prober.request("GET", "/metrics")[1]
        lines = [line for line in text.splitlines() if line.startswith("sglang:num_running_reqs{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    calls = [engine.draw_one(Row([5, 6, 7], 200, None), long) for _ in range(2)]
    calls[0].cancel()
    result = calls[1].result(60)
    assert len(result.ids) == 200
    deadline = time.monotonic() + 60
    while running() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running() == 0


def test_another_token_and_another_server_are_refused(url, model_directory):
    with pytest.raises(PermissionError, match="--api-key"):
        SGLangServerEngine(url.replace("http://:", "http://:x"))
    with pytest.raises(ValueError, match="Say where it is: model="):
        SGLangServerEngine(url, model=f"{model_directory}-gone")
    with pytest.raises(TypeError, match="skip_tokenizer_init"):
        start_sglang_server(model_directory, skip_tokenizer_init=False).__enter__()
    with pytest.raises(ValueError, match="python='no-python' is no program"):
        start_sglang_server(model_directory, python="no-python").__enter__()


def test_no_list_of_processes_shows_the_token(url):
    token = url.partition("://:")[2].partition("@")[0]
    assert len(token) >= 24
    shown = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    assert any("torchrl_modules/sglang/launch.py" in words for words in shown)
    assert not any(token in words for words in shown)


def test_a_server_that_cannot_start_says_why(tmp_path, start):
    with (
        pytest.raises(RuntimeError, match=r"(?s)The SGLang server did not start.*nothing"),
        start_sglang_server(str(tmp_path / "nothing"), python=str(PYTHON), device="cpu"),
    ):
        pass


def test_a_server_that_stands_still_is_noticed(url, model):
    with closing(SGLangServerEngine(url, stall_timeout_s=2.0)) as engine:
        engine.update_weights(model.state_dict())
        assert engine.generate([[5]], PARAMS)[0].ids
        scheduler = _scheduler()
        scheduler.suspend()
        try:
            with pytest.raises(EngineDied, match="no progress"):
                engine.generate([[5, 6]], PARAMS)
        finally:
            scheduler.resume()


@pytest.mark.weekly
def test_a_server_that_dies_is_started_again_with_its_weights(
    start, model_directory, model, other_model, chatml_tokenizer
):
    """A policy over a model's folder; its rows are drawn again by the next server."""
    options = {name: value for name, value in start.keywords.items() if name != "python"}
    policy = SGLangWrapper(
        model_directory,
        tokenizer=chatml_tokenizer,
        engine_kwargs={"python": str(PYTHON), **options},
        generate_kwargs={"max_new_tokens": 16, "stop_token_ids": (3,)},
    )
    with closing(policy.engine) as served:
        served.update_weights(other_model.state_dict(), version=7)
        assert_from(other_model, PARAMS, served.generate(PROMPTS, PARAMS))
        _scheduler().kill()
        rows = served.generate(PROMPTS, PARAMS)
        assert_from(other_model, PARAMS, rows)
        assert {span.version for row in rows for span in row.versions} == {7}


def _scheduler():
    """The process that draws tokens, of the server that was started last."""
    family = psutil.Process().children(recursive=True)
    drawing = [each for each in family if "sglang::scheduler" in " ".join(each.cmdline())]
    return max(drawing, key=psutil.Process.create_time)
