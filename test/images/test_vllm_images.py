"""Images with real vLLM on a CPU: each token is drawn as the Transformers scorer reads the row."""

import asyncio
import warnings
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from image_rollouts import (
    GROUP,
    SAMPLING,
    gap,
    make_env,
    rows_of,
    sampled,
    scorer_of,
    sees_otherwise,
    with_pushes,
)
from torchrl.data import LazyStackStorage, ReplayBuffer
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from vision_models import asked, idefics

from collectors import LLMCollector, StreamingCollector, Wait
from objectives import GRPOLoss
from torchrl_data import Conversations
from torchrl_modules import VLLMEngine, open_async, vLLMWrapper
from torchrl_modules.policies.async_policy import AsyncPolicy

pytestmark = pytest.mark.vllm
ENGINE = {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20, "block_size": 32}


@pytest.fixture(scope="module", name="family")
def family_fixture():
    return idefics()


@pytest.fixture(scope="module", name="session_policy")
def session_policy_fixture(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own, while it is imported and built
        policy = vLLMWrapper(folder, generate_kwargs=SAMPLING, engine_kwargs=ENGINE)
    with closing(policy.engine):
        yield policy


@pytest.fixture(name="policy")
def policy_fixture(session_policy, family):
    """The one engine of the module, with the weights of `family`."""
    if session_policy.engine.version:
        session_policy.update_weights(family[0].state_dict())
    return session_policy


def test_what_is_drawn_is_what_is_scored(policy, family, monkeypatch):
    """Of groups, of several images in a row, of the same tokens with other images; then pushed."""
    from torchrl_modules.vllm import engine

    cached, read = [], engine.read_output

    def note(output, masks=None):
        cached.append((len(output.prompt_token_ids), output.num_cached_tokens))
        return read(output, masks)

    monkeypatch.setattr(engine, "read_output", note)
    version, scorer = policy.engine.version, scorer_of(family)
    rows = sampled(policy)
    assert torch.equal(rows[1]["tokens", "prompt"], rows[2]["tokens", "prompt"])
    assert gap(rows, {version: scorer}) < 1e-4
    output = GRPOLoss(scorer, temperature=0.9)(rows)
    torch.testing.assert_close(output.ratio_mean, torch.tensor(1.0), atol=1e-4, rtol=0)
    cached.clear()
    assert gap(sampled(policy), {version: scorer}) < 1e-4
    # Blocks of 32 tokens, of which the last token of a prompt is always read.
    lengths = [len(row["tokens", "prompt"]) for row in rows.unbind(0)]
    assert sorted(cached) == sorted((n, (n - 1) // 32 * 32) for n in lengths)
    other = sees_otherwise(family)
    assert gap(sampled(policy), {version: scorer_of(other)}) > 0.1, "the old vision tower"
    cached.clear()
    policy.update_weights(other[0].state_dict())
    assert gap(sampled(policy), {version + 1: scorer_of(other)}) < 1e-4
    assert min(cached)[1] == 0


def test_tools_show_images_in_the_middle_of_episodes(policy, family):
    buffer = ReplayBuffer(storage=LazyStackStorage(8))
    with LLMCollector(make_env(2), policy, replay_buffer=buffer) as collector:
        rows = collector.collect()
    assert [len(row["images"]["data"]) for row in rows.unbind(0)] == [3] * (2 * GROUP)
    assert gap(rows, {policy.engine.version: scorer_of(family)}) < 1e-4


def test_a_response_in_flight_sees_with_the_weights_that_come(policy, family):
    """What the old vision tower made of an image is forgotten in the midst of a response."""
    other, first = sees_otherwise(family), policy.engine.version
    prompt = policy.encoder.encode_waiting(Conversations.from_messages([asked("red", "blue")]))

    async def main():
        async with open_async(policy.engine) as engine:
            policy_of = AsyncPolicy(policy, engine)
            await policy_of.take_turn(prompt)  # so that the next one begins with a cached prefix
            stream = engine.submit(
                prompt.ids(0),
                replace(policy.sampling, stop_token_ids=()),
                max_new_tokens=200,
                images=prompt.images(0),
            )
            seen = 0
            async for delta in stream:
                seen += len(delta.ids)
                if seen >= 20 and engine.version == first:
                    await engine.update_weights(other[0].state_dict())
            drawn = await stream.result()
            again, reason = await policy_of.take_turn(prompt)
            return drawn.generation._replace(versions=drawn.versions), again, reason

    drawn, again, reason = asyncio.run(main())
    assert reason in ("stop", "length")
    scorers = {first: scorer_of(family), first + 1: scorer_of(other)}
    rows = rows_of(policy.append_generations(prompt, [drawn], 0)), rows_of(again)
    assert {*rows[0]["policy_versions", "full"][0].tolist()} == {-1, first, first + 1}
    for row in rows:
        assert gap(row, scorers) < 1e-4


@pytest.mark.parametrize("recompute", [True, False])
def test_collected_beside_training_with_pushes_of_what_sees(policy, family, recompute):
    """Through the streaming collector: three turns an episode, of which tools show the later."""
    scorers = {policy.engine.version: scorer_of(family)}
    with StreamingCollector(
        make_env(12, groups=1), policy, staleness=Wait(4, recompute=recompute)
    ) as collector:
        for batch in with_pushes(collector, family, scorers):
            if recompute:  # else what was in flight is of neither version alone
                assert gap(batch, scorers) < 1e-4
    if not recompute:
        assert gap(sampled(policy), scorers) < 1e-4


def test_what_vllm_would_read_otherwise_is_refused(policy, family, folder):
    """Other tokens, other pixels, adapters; and by itself each row whose images are others."""
    _, tokenizer, processor = family
    llm, whole = policy.engine._llm, {"longest_edge": 32}
    pixels = {"size": {"longest_edge": 64}, "max_image_size": whole, "do_image_splitting": True}
    fewer = Idefics3ImageProcessorPil(**pixels | {"size": whole, "do_image_splitting": False})
    paler = Idefics3ImageProcessorPil(**pixels, image_std=[0.6] * 3)
    make = partial(type(processor), tokenizer=tokenizer, image_seq_len=4)
    with pytest.raises(ValueError, match=r"vLLM makes \d+ tokens .* the row has 7; they differ"):
        VLLMEngine.from_llm(llm, processor=make(fewer))
    with pytest.raises(ValueError, match=r"processor makes other pixel_values .* by up to"):
        VLLMEngine.from_llm(llm, processor=make(paler))
    with pytest.raises(ValueError, match="processor= is given, and enable_lora too"):
        VLLMEngine(folder, processor=processor, enable_lora=True)
    with pytest.raises(TypeError, match=r"VLLMEngine sets \['skip_tokenizer_init'\] itself"):
        VLLMEngine(folder, processor=processor, skip_tokenizer_init=True)
    blind = VLLMEngine.from_llm(llm)
    assert blind.images is None
    (red, two), params = (
        policy.encoder.encode_waiting(
            Conversations.from_messages([asked("red"), asked("red", "blue")])
        ).split(),
        policy.sampling,
    )
    asked_for = [(red, red.images(0)), (red, []), (red, two.images(0)), (two, two.images(0))]
    prompts, images = zip(*((each.ids(0), its) for each, its in asked_for), strict=True)
    good, lost, more, also_good = policy.engine.generate(prompts, params, images=images)
    assert good.error is also_good.error is None
    assert "its images were lost, or changed" in lost.error
    assert "the 34 tokens of image 1 are not in the row" in more.error
    [refused] = blind.generate([red.ids(0)], params, images=[red.images(0)])
    assert refused.error.startswith("The prompt holds images, and the engine has no processor")
    with pytest.raises(ValueError, match=r"2 prompts, but .* the images of 1"):
        policy.engine.generate(prompts[:2], params, images=images[:1])


def test_an_image_that_is_drawn_ends_the_row(policy):
    """As it does in batches: whoever drew it sees nothing there."""
    prompt = policy.encoder.encode_waiting(Conversations.from_messages([asked("red")]))
    token = policy.engine.images.token_id
    forced = replace(policy.sampling, logit_bias={token: 100.0}, max_new_tokens=2)

    async def main():
        async with open_async(policy.engine) as engine:
            return await AsyncPolicy(policy, engine).take_turn(prompt)

    before, policy._sampling = policy.sampling, forced  # which a setter would not take
    try:
        again, reason = asyncio.run(main())
    finally:
        policy.sampling = before
    assert "which stand for images" in reason
    assert again.position(0).awaits_response
