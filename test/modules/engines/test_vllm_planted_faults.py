"""Faults planted in what vLLM draws: verification names each, and nothing else."""

import asyncio
import copy
import itertools
import threading
from dataclasses import replace
from functools import partial

import peft
import pytest
import torch

from collectors.verification import Cause, Recomputation, SampledRow, verify_rows
from torchrl_data.conversation import Conversations
from torchrl_modules import AsyncVLLMEngine, TransformersWrapper, vLLMWrapper
from torchrl_modules.sampling.parameters import SamplingParameters

pytestmark = pytest.mark.vllm
QUESTIONS = ["What is 2 + 2?", "hello world"]
SAMPLING = {"max_new_tokens": 24, "stop_token_ids": ()}


@torch.no_grad()
def moved(model, version):
    """The weights of a version: those of version 1, and a step for each further one."""
    model = copy.deepcopy(model)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter += 0.02 * (version - 1) * torch.randn_like(parameter)
    return model


@pytest.fixture
def drawn(vllm_engine, chatml_tokenizer):
    """Draws rows of two turns, and records them as of version 1."""

    def draw(**sampling):
        policy = vLLMWrapper(
            vllm_engine, tokenizer=chatml_tokenizer, generate_kwargs=SAMPLING | sampling
        )
        rows = Conversations.from_messages([[{"role": "user", "content": q}] for q in QUESTIONS])
        _, rows, _ = policy.respond(rows)
        rows = rows.append_messages([[{"role": "user", "content": "again"}]] * len(rows))
        _, rows, _ = policy.respond(rows)
        return [
            SampledRow(
                name=f"row {i}",
                ids=rows.ids(i),
                sampled=rows.assistant_mask(i).tolist(),
                log_probs=rows.log_probs(i).tolist(),
                versions=[1 if here else None for here in rows.assistant_mask(i).tolist()],
                messages=rows.messages(i),
                batch="the batch",
            )
            for i in range(len(rows))
        ]

    return draw


@pytest.fixture
def verified(model, chatml_tokenizer):
    """Verifies rows by Transformers, with the weights of versions 1 to 3."""

    def verify(rows, *, trained=None, **sampling):
        policy = TransformersWrapper(
            moved(model, 1) if trained is None else trained,
            tokenizer=chatml_tokenizer,
            generate_kwargs=SAMPLING | sampling,
            generate=False,
        )
        weights = {v: moved(model, v).state_dict() for v in (1, 2, 3)}
        if trained is not None:
            weights = {1: trained.state_dict()}
        load = {v: partial(_load, weights[v]) for v in weights}
        return verify_rows(rows, Recomputation(policy, load))

    return verify


def _load(weights, model):
    model.load_state_dict(weights, strict=False)


def test_what_it_drew_is_explained(drawn, verified):
    for sampling in ({}, {"temperature": 0.7, "top_k": 20}):
        certificate = verified(drawn(**sampling), **sampling)
        assert certificate.is_clean
        assert certificate.num_tokens == 2 * 2 * 24


@pytest.mark.parametrize(
    ("planted", "cause", "said"),
    [
        ({"temperature": 0.7}, Cause.TEMPERATURE, "temperature 0.7; the settings say 1"),
        ({"top_k": 20}, Cause.TRUNCATION, "drawn with top_k=20; the settings say no truncation"),
        ({"top_p": 0.8}, Cause.TRUNCATION, "drawn with top_p=0.8; the settings say no truncation"),
    ],
)
def test_another_distribution_is_named(planted, cause, said, drawn, verified):
    certificate = verified(drawn(**planted))
    assert set(certificate.counts) == {cause}
    assert said in certificate.rows[0].words[cause]


def test_weights_that_never_arrived_are_named(vllm_engine, model, drawn, verified):
    vllm_engine.update_weights(moved(model, 3).state_dict())
    certificate = verified(drawn())
    assert set(certificate.counts) == {Cause.VERSION}
    assert certificate.rows[0].words[Cause.VERSION] == "drawn by version 3; the row says 1"


def test_adapters_that_the_engine_has_not_got_are_named(model, drawn, verified):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    trained = peft.get_peft_model(moved(model, 1), config)
    certificate = verified(drawn(), trained=trained)
    assert set(certificate.counts) == {Cause.ADAPTER}


def test_tokens_and_masks_of_others_are_named(drawn, verified):
    rows = drawn()
    first = rows[0].sampled.index(True)
    ids = list(rows[0].ids)
    ids[first - 3] = ids[first - 3] + 1  # not what the template writes
    changed = replace(rows[0], ids=ids)
    sampled = list(rows[1].sampled)
    first = sampled.index(True)
    sampled[first - 2 : first] = [True, True]  # the template wrote them
    log_probs = [
        -1.0 if new and not old else value
        for new, old, value in zip(sampled, rows[1].sampled, rows[1].log_probs, strict=True)
    ]
    versions = [1 if here else None for here in sampled]
    widened = replace(rows[1], sampled=sampled, log_probs=log_probs, versions=versions)
    certificate = verified([changed, widened])
    causes = [set(filter(None, row.causes)) for row in certificate.rows]
    assert causes == [{Cause.TOKENS}, {Cause.MASK}]


def test_a_cache_of_old_weights_is_named(vllm_engine, model, drawn, verified, monkeypatch):
    """The update was told to keep what the weights before it had read."""
    (begun, _) = drawn()
    prompt = list(begun.ids[: begun.num_prompt_tokens])
    params = SamplingParameters(max_new_tokens=60, stop_token_ids=())
    # Before the engine's thread draws: both take their numbers from the same generator.
    new = moved(model, 2).state_dict()
    llm_engine = vllm_engine._llm.llm_engine
    reached, asked, numbers = threading.Event(), threading.Event(), itertools.count(1)

    def step():
        """The second one ends when the update is asked for, however slow that is."""
        if next(numbers) == 2:
            reached.set()
            assert asked.wait(timeout=20)
        return type(llm_engine).step(llm_engine)

    async def main():
        face = AsyncVLLMEngine(vllm_engine)
        async with face, face.submit(prompt, params) as stream:
            assert await asyncio.to_thread(reached.wait, 20)
            update = asyncio.create_task(face.update_weights(new, recompute=False))
            await asyncio.sleep(0)  # it is asked for
            asked.set()
            await update
            return await stream.result()

    with monkeypatch.context() as patch:
        patch.setattr(llm_engine, "step", step)
        told = asyncio.run(main())
    drawn_ids, spans = told.generation.ids, told.versions
    assert [(span.start, span.end) for span in spans] == [(0, 2), (2, 60)]
    versions = [1 + (t >= spans[1].start) for t in range(len(drawn_ids))]
    columns = {
        "ids": [*prompt, *drawn_ids],
        "sampled": [False] * len(prompt) + [True] * len(drawn_ids),
        "log_probs": [float("nan")] * len(prompt) + list(told.generation.log_probs),
        "versions": [*[None] * len(prompt), *versions],
    }
    certificate = verified([replace(begun, messages=None, **columns)])
    assert set(certificate.counts) == {Cause.CACHE}
    verdict = certificate.rows[0]
    assert not any(verdict.causes[: spans[1].start])
